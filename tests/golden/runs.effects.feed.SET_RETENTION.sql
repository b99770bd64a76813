UPDATE "flotilla".feed_settings SET kept = %(kept)s WHERE kept IS DISTINCT FROM %(kept)s
