"""What lines have done, as the effects of the action `step` tell it, in the order in which they were written."""

from collections.abc import Iterable
from typing import TypeAlias

from tests.support.trial_actions import EFFECTS

# Numbered by the server: of two transactions of which one began after the other's commit, the later has the greater.
NUMBERED = f"{EFFECTS}; ALTER TABLE public.effects ADD place bigserial"
TOLD = "SELECT run_id, note FROM public.effects ORDER BY place"

Effects: TypeAlias = Iterable[tuple[int, str]]


def lines_of(effects: Effects) -> dict[str, list[int]]:
    """Return which runs each line has completed, in that order; fail if two of one were under way at once."""
    ended: dict[str, list[int]] = {}
    under_way: dict[str, int] = {}
    for run_id, note in effects:
        key, _, what = note.rpartition(" ")
        if key == "None":
            continue
        if what == "began":
            # The same one again: after a failure, a death, a pause.
            assert under_way.get(key, run_id) == run_id, f"{run_id} beside {under_way[key]} in the line {key}"
            under_way[key] = run_id
        else:
            assert under_way.pop(key) == run_id
            ended.setdefault(key, []).append(run_id)
    return ended
