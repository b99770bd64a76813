WITH waiting AS (
    UPDATE "flotilla".runs SET run_at = run_at - %(by)s WHERE state = 'pending'
), scheduled AS (
    UPDATE "flotilla".actions
    SET next_run_at = CASE WHEN id = ANY (%(actions)s) THEN next_run_at - %(by)s ELSE next_run_at END,
        rate_used_until = rate_used_until - %(by)s
), limited AS (
    UPDATE "flotilla".limits SET used_until = used_until - %(by)s
)
UPDATE "flotilla".breakers
SET open_until = open_until - %(by)s, probe_until = probe_until - %(by)s,
    failed_at = ARRAY(SELECT at - %(by)s FROM unnest(failed_at) AS at)
