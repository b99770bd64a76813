"""Which worker runs which test: one test after the other, in their order, to whichever worker is free.

Tests whose module makes something once stay together, on one worker.

A worker that ends in a test (by the time limit, or by a crash) is replaced by a new one. The test has failed then.
xdist's scheduler (3.8) takes it for one that is still to be run, and the run never ends: either the test ends the new
worker too, or, when no other worker has anything left to run, the new worker is never told what to do.
"""

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling


class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if makes_something_once(self._root / file) else nodeid

    def remove_node(self, node: Any) -> str | None:
        """Take back what an ended worker had still to run, but for the test in which it ended: that has failed."""
        units = self.assigned_work[node]
        left = ((unit, test) for unit in units.values() for test, done in unit.items() if not done)
        unit, crashed = next(left, (None, None))
        if unit is not None:
            unit[crashed] = True
            self.assigned_work[node] = {name: unit for name, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return crashed


@cache
def makes_something_once(file: Path) -> bool:
    return 'scope="module"' in file.read_text()
