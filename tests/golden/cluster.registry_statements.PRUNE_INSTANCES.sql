DELETE FROM "flotilla".instances
WHERE id IN (
    SELECT id FROM "flotilla".instances
    WHERE state = 'gone' AND gone_at < clock_timestamp() - interval '7 days'
    ORDER BY id
    LIMIT 500
    FOR UPDATE SKIP LOCKED
)
