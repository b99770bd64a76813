"""When a failed run is tried again: one policy, whichever way the attempt has failed.

The delay before the first retry is the action's `retry_delay`. Each further delay is twice as long, up to
`max_retry_delay`. Each is up to `SPREAD` longer or shorter at random, so that runs that failed together are not tried
again together. PostgreSQL computes the delay from the action's row, in the statement that makes the run pending. So the
delay is the same on every instance, also on one whose code does not have the action. Attempts that ended with their
instance are no failures and do not count.
"""

FACTOR = 2.0
SPREAD = 0.25


def retry_delay_sql(run: str = "r") -> str:
    """Return the subquery for the delay of a row of `runs`, in seconds; its last attempt has failed, and counts."""
    return f"""(
            SELECT least(a.retry_delay * {FACTOR} ^ least({run}.attempt - {run}.deaths - 1, 60), a.max_retry_delay)
                   * ({1 - SPREAD} + {2 * SPREAD} * random())
            FROM {{schema}}.actions AS a
            WHERE a.id = {run}.action_id
        )"""
