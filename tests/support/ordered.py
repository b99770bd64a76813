"""Read which ordered runs have run, and when, from the effects of the action `step` in the order of their inserts."""

from collections.abc import Iterable
from typing import TypeAlias

from tests.support.trial_actions import EFFECTS

# Numbered by the server: a transaction that begins after another's commit gets a greater number.
NUMBERED = f"{EFFECTS}; ALTER TABLE public.effects ADD position bigserial"
READ_EFFECTS = "SELECT run_id, note FROM public.effects ORDER BY position"

Effects: TypeAlias = Iterable[tuple[int, str]]


def runs_by_key(effects: Effects) -> dict[str, list[int]]:
    """Return the completed runs of each ordering key, in order. Fail if two runs of a key ran at the same time."""
    ended: dict[str, list[int]] = {}
    under_way: dict[str, int] = {}
    for run_id, note in effects:
        key, _, what = note.rpartition(" ")
        if key == "None":
            continue
        if what == "began":
            # The same run may begin again: after a failure, the death of its instance, or a pause.
            assert under_way.get(key, run_id) == run_id, (
                f"{run_id} runs together with {under_way[key]} of the key {key}"
            )
            under_way[key] = run_id
        else:
            assert under_way.pop(key) == run_id
            ended.setdefault(key, []).append(run_id)
    return ended
