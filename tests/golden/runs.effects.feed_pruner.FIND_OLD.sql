SELECT id, at < statement_timestamp() - (SELECT kept FROM "flotilla".feed_settings),
       pg_snapshot_xmin(pg_current_snapshot())::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8
FROM "flotilla".feed
WHERE id > %(after)s
ORDER BY id
LIMIT 250
