"""Distributes the tests: one after the other, in their order, to the next free worker.

The tests of a module with a module-scoped fixture stay together on one worker.

If a worker ends during a test, by the time limit or by a crash, the test has failed and a new worker replaces it. The
scheduler of xdist (3.8) would run that test again, and the test run would never end: either the test ends the new
worker too, or the new worker gets no message if no other worker has anything left to run.
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
        return file if has_module_fixture(self._root / file) else nodeid

    def remove_node(self, node: Any) -> str | None:
        """Return the tests of an ended worker to the queue, except the test in which it ended: that one has failed."""
        units = self.assigned_work[node]
        left = ((unit, test) for unit in units.values() for test, done in unit.items() if not done)
        unit, crashed = next(left, (None, None))
        if unit is not None:
            unit[crashed] = True
            self.assigned_work[node] = {name: unit for name, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return crashed


@cache
def has_module_fixture(file: Path) -> bool:
    return 'scope="module"' in file.read_text()
