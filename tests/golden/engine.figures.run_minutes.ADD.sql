INSERT INTO "flotilla".run_minutes AS m (
    minute, action_id, succeeded, failed, cancelled, retried, paused, work_seconds, begun, waited_seconds,
    longest_wait_seconds
)
SELECT *
FROM unnest(
    %(minutes)s::timestamptz[], %(actions)s::int[], %(succeeded)s::int8[], %(failed)s::int8[], %(cancelled)s::int8[],
    %(retried)s::int8[], %(paused)s::int8[], %(work)s::float8[], %(begun)s::int8[], %(waited)s::float8[],
    %(longest_wait)s::float8[]
) AS n (minute, action_id)
ORDER BY n.minute, n.action_id
ON CONFLICT (minute, action_id) DO UPDATE
SET succeeded = m.succeeded + excluded.succeeded,
    failed = m.failed + excluded.failed,
    cancelled = m.cancelled + excluded.cancelled,
    retried = m.retried + excluded.retried,
    paused = m.paused + excluded.paused,
    work_seconds = m.work_seconds + excluded.work_seconds,
    begun = m.begun + excluded.begun,
    waited_seconds = m.waited_seconds + excluded.waited_seconds,
    longest_wait_seconds = greatest(m.longest_wait_seconds, excluded.longest_wait_seconds)
