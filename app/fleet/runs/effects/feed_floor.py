"""The floor of a scan of the feed: below this id, no row is left to handle and none can appear.

An index keeps the entries of updated and deleted rows until vacuum removes them, and one open snapshot anywhere in the
database delays vacuum. A scan from the lowest id would read all of them, so it begins at the floor.

A row may become visible late, with an id below rows that were handled long ago. Its transaction changed runs before it
drew the row's id, and therefore had a transaction id by then. So once every transaction below a mark's horizon has
ended, a scan from the floor sees every row that will ever exist below the mark. When that scan has committed, the floor
rises to the mark.

A floor is in the memory of one process. A new process begins at 0.
"""

from collections import deque
from typing import NamedTuple

MAX_MARKS = 100


class Mark(NamedTuple):
    """An id up to which all visible rows were handled, and the transactions that could still add a row below it."""

    id: int
    # Every such transaction has a lower transaction id.
    horizon: int


class Floor:
    def __init__(self) -> None:
        self.id = 0
        self._marks: deque[Mark] = deque()

    def reachable(self, oldest: int) -> int:
        """Return the id to which a scan may raise the floor; `oldest` is the lowest transaction id in progress."""
        return max((mark.id for mark in self._marks if mark.horizon <= oldest), default=self.id)

    def rise(self, to: int, mark: Mark | None) -> None:
        """Raise the floor after a scan has committed, and add its mark."""
        self.id = max(self.id, to)
        if mark is not None:
            # Otherwise marks would accumulate while one transaction stays open.
            if len(self._marks) == MAX_MARKS:
                self._marks.pop()
            self._marks.append(mark)
        while self._marks and self._marks[0].id <= self.id:
            self._marks.popleft()
