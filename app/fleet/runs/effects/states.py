"""The state of a run in a statement's condition, in one place.

A statement that changes a run says which state it must be in, never which one it must not be in: a state that is added
later is then refused by every statement that does not name it.

Both conditions compare under the collation "C", which changes nothing about equality. But the planner no longer proves
a partial index (`WHERE state = 'running'`) from them. Statements that look a row up by its id use them, and so read
the primary key alone: while the table is empty, walking through a partial index seems to cost nothing, and under a
held snapshot that is a walk through every entry that vacuum could not remove yet. Statements that search for runs in a
state say `state = 'running'`, and use the index.
"""


def is_running(run: str = "r") -> str:
    return f"""{run}.state COLLATE "C" = 'running'"""


def is_pending(run: str = "r") -> str:
    return f"""{run}.state COLLATE "C" = 'pending'"""
