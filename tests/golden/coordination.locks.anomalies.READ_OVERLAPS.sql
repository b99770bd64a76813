SELECT DISTINCT ON (name) name, token, instance, other_token, other, found_at
FROM "flotilla".lock_overlaps
WHERE found_at > clock_timestamp() - %(age)s
ORDER BY name, id DESC
LIMIT 100
