SELECT at, instance, what, detail
FROM (
    SELECT started_at AS at, name AS instance, 'joined' AS what, version AS detail FROM "flotilla".instances
    UNION ALL
    SELECT gone_at, name, CASE WHEN gone_reason = 'left' THEN 'left' ELSE 'gone' END, gone_reason
    FROM "flotilla".instances
    WHERE state = 'gone'
    UNION ALL
    SELECT began_at, instance, 'led', NULL FROM "flotilla".leader_terms
) AS e
WHERE at > clock_timestamp() - interval '1 h'
ORDER BY at DESC
LIMIT 200
