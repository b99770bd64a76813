SELECT id, checkpoint FROM "flotilla".runs WHERE id = ANY (%(ids)s) AND checkpoint IS NOT NULL
UNION ALL
SELECT id, checkpoint FROM "flotilla".finished_runs WHERE id = ANY (%(ids)s) AND checkpoint IS NOT NULL
