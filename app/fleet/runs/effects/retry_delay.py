"""When a failed run is tried again: one policy, for every way in which an attempt fails.

The wait before the first retry is the action's `retry_delay`; each further wait is twice as long, up to its
`max_retry_delay`; and each is up to `SPREAD` longer or shorter at random, so that runs which failed together are not
tried again together. PostgreSQL computes it from the row of the action, in the statement that gives the run back. So it
is the same whether the instance that executed the run gives it back, or another one that lacks the action in its code.
Attempts that the death of an instance ended are no failures, and do not count.
"""

FACTOR = 2.0
SPREAD = 0.25


def usual_wait(run: str = "r") -> str:
    """Return the subquery for the wait of a row of `runs`, in seconds; its attempt has failed, and counts."""
    return f"""(
            SELECT least(a.retry_delay * {FACTOR} ^ least({run}.attempt - {run}.deaths - 1, 60), a.max_retry_delay)
                   * ({1 - SPREAD} + {2 * SPREAD} * random())
            FROM {{schema}}.actions AS a
            WHERE a.id = {run}.action_id
        )"""
