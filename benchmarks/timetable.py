"""Many actions that are all due in the same second (`FLOTILLA_ACTIONS=benchmarks.timetable`).

The environment sets the number of actions, and the seconds between two slots.
"""

import os

from app.fleet import Run, action
from benchmarks import marks

COUNT = int(os.environ.get("BENCHMARK_COUNT", "1"))
PERIOD = int(os.environ.get("BENCHMARK_PERIOD", "15"))


async def due(run: Run) -> None:
    marks.leave(run)


for number in range(COUNT):
    globals()[f"due_{number}"] = action(f"due-{number}", cron=f"*/{PERIOD} * * * * *")(due)
