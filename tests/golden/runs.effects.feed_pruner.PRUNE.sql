WITH deleted AS (
    DELETE FROM "flotilla".feed
    WHERE id = ANY (%(ids)s::int8[]) AND (first IS NULL OR first < (SELECT max(first) FROM "flotilla".feed))
    RETURNING id, first, many
), unread AS (
    INSERT INTO "flotilla".feed (first, state, many, runs, actions, seqs, attempts)
    SELECT coalesce((SELECT first + many - 1 FROM "flotilla".feed WHERE first IS NOT NULL ORDER BY first DESC LIMIT 1), 0) + 1, 'unread', sum(many), '{}', '{}', '{}', '{}'
    FROM deleted
    WHERE first IS NULL
    HAVING count(*) > 0
)
SELECT id FROM deleted
