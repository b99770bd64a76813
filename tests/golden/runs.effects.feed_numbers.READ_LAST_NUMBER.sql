SELECT coalesce((SELECT first + many - 1 FROM "flotilla".feed WHERE first IS NOT NULL ORDER BY first DESC LIMIT 1), 0)
