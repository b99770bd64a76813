SELECT first, many, at, state, instance, runs, actions, seqs, attempts
FROM (
    SELECT *, sum(cardinality(runs)) OVER (ORDER BY first) - cardinality(runs) AS before
    FROM (
        SELECT *
        FROM "flotilla".feed
        WHERE first >= coalesce((SELECT max(first) FROM "flotilla".feed WHERE first <= %(after)s + 1), 0)
          AND first + many > %(after)s + 1
        ORDER BY first
        LIMIT %(limit)s
    ) AS page
) AS p
WHERE before < 5000
ORDER BY first
