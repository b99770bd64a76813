"""The states of a run, and the conditions on them which all statements share.

A statement that changes a run names the state that the run must have, and never a state that it must not have. A state
that a later release adds is then refused by every statement that does not name it.

Both conditions compare under the collation "C", which does not change equality, but keeps the planner from using a
partial index (`WHERE state = 'running'`). Statements that find a row by its id use these conditions, and so read the
primary key alone. Otherwise, while the table is empty, a walk through a partial index seems to cost nothing, and under
a held snapshot that walk passes every entry that vacuum could not remove yet. Statements that search for runs in a
state say `state = 'running'`, and use the index.
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
