SELECT id, name FROM "flotilla".actions
