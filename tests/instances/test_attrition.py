"""Instances survive repeated faults that break connections: the short form of `make chaos attrition`."""

from pathlib import Path

from tests.chaos.attrition import PHASES, wear
from tests.support.postgres import Postgres


def test_instances_survive_terminated_backends_crashes_idle_transactions_and_cancellations(
    own_postgres: Postgres, tmp_path: Path
) -> None:
    verdict = wear(own_postgres, tmp_path, seconds=2.5, rate=150)
    assert verdict.correct, str(verdict)
    assert [phase.name for phase in verdict.phases] == list(PHASES)
    assert all(phase.outages for phase in verdict.phases if phase.name in {"terminated", "crashed"})
