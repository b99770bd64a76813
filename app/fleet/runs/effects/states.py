"""The states of a run, and the conditions on them which all statements share.

A statement that changes a run names the state that the run must have, and never a state that it must not have. A state
that a later release adds is then refused by every statement that does not name it.

A new state touches:

    here, `db/schema/runs.py`, a migration  `RunState`; `ACTIVE` if its row is in `runs`; the CHECK; an index for lists
    `runs/`                                 a statement for each transition; `cancel_run` and `retry_run`, with their
                                            texts; `active_run` in `overlap.py`; the branches of `read/pages.py`
    `runs/end.py`                           CONFIRM, if the run writer makes the transition: it knows ends and pending
    `runs/effects/events.py`                READ and `event_insert_sql` build the events of the states that they know; a
                                            state without an event is a gap in the numbers, at which readers stop
    `runs/claim.py`, `claim_ordered.py`     ALLOWED counts running runs; any unfinished head blocks its ordering key
    `engine/actions/admin.py`               LIST: the newest run of an action
    `engine/figures/run_metrics.py`         OUTCOMES, for metrics
    the views, in a migration               `runnable_runs`, `worker_backlog`: which runs wait, and which run
    `engine/once/statements.py`             a key belongs to its run only while the run is running
    `engine/enqueue/following.py`           `result`, if the state is an end
    `cli/`                                  runs.py, follow.py, trigger.py: the texts for people

Both conditions compare under the collation "C", which does not change equality, but keeps the planner from using a
partial index (`WHERE state = 'running'`). The statements of attempts and claims find rows by their ids; with these
conditions they read the primary key alone. Otherwise, while the table is empty, a walk through a partial index seems to
cost nothing, and under a held snapshot that walk passes every entry that vacuum could not remove yet. Statements that
search for runs in a state say `state = 'running'`, and use the index.
"""

import enum


class RunState(enum.StrEnum):
    # A row of `runs`.
    PENDING = "pending"
    RUNNING = "running"
    # A row of `finished_runs`.
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ACTIVE = (RunState.PENDING, RunState.RUNNING)


def is_running(run: str = "r") -> str:
    return f"""{run}.state COLLATE "C" = 'running'"""


def is_pending(run: str = "r") -> str:
    return f"""{run}.state COLLATE "C" = 'pending'"""
