"""The example service `examples/deal_desk`, on three instances for a minute, while they are killed and upstreams fail.

The upstreams are a separate process that is not killed. They record all requests, and each promise of the desk is
checked against that record (`examples/deal_desk/verdict.py`), not against the tables of the desk.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest
from psycopg.rows import TupleRow

from examples.deal_desk.__main__ import lines
from examples.deal_desk.verdict import Verdict, judge
from examples.deal_desk.world.record import Everything
from tests.support.fleet import NO_TRUST, ROOT, Fleet, environment, start
from tests.support.postgres import Postgres, eventually, free_port

pytestmark = [pytest.mark.long, pytest.mark.template]

DESK = [sys.executable, "-m", "examples.deal_desk"]
MINUTE = 60.0
# The longest time for each of the two waits at the end. Together with the minute, less than a test may take.
PATIENCE = 40.0
# Seconds between two kills, at least and at most.
BETWEEN_KILLS = (3.0, 7.0)
FAST = {
    "DESK_FILINGS_EVERY": "1s",
    "DESK_HALTS_EVERY": "1",
    "DESK_SOURCES_EVERY": "3s",
    "DESK_MAX_RETRY_DELAY": "1s",
    # The upstream allows ten within any second; if the upstream is delayed, requests arrive closer together.
    "DESK_EDGAR_RATE": "4/s",
    # Enough filings at once that reading all of them at once would exceed the rate.
    "DESK_WORLD_EVERY": "6",
    "DESK_WORLD_BUNCH": "15",
    "DESK_WORLD_REFUSES": "0.3",
}
FOLLOW_UPS = ["read-filing", "deliver-alert", "research-deal", "read-source"]


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    kills: int
    rested: bool
    rescued: int
    undelivered: int


class World:
    """The upstreams, as a process."""

    def __init__(self, folder: Path) -> None:
        port = str(free_port())
        self.env = {**FAST, "DESK_WORLD_PORT": port, "DESK_WORLD_FILE": str(folder / "world.sqlite3")}
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "world.log").open("wb") as log:
            self._process = start([*DESK, "world"], environment(None, self.env), log, plain=True)

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/record", verify=NO_TRUST).is_success
        except httpx.TransportError:
            return False

    def be_quiet(self) -> None:
        httpx.post(f"{self.url}/quiet", verify=NO_TRUST).raise_for_status()

    def record(self) -> Everything:
        return Everything.model_validate_json(httpx.get(f"{self.url}/record", timeout=30, verify=NO_TRUST).text)

    def end(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def outcome(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """The result of the minute, which the tests check."""
    folder = tmp_path_factory.mktemp("desk")
    address = postgres.new_migrated_database()
    world = World(folder)
    try:
        eventually(world.is_up, within=60)
        desk = {"FLOTILLA_ACTIONS": "examples.deal_desk", "DESK_WORLD_URL": world.url, **world.env}
        with (
            Fleet(address, folder, FLOTILLA_POOL_MAX="8", FLOTILLA_LOG_LEVEL="warning", **desk) as fleet,
            psycopg.connect(address, autocommit=True) as session,
        ):
            killed = run_for_a_minute(fleet)
            rested = wait_until_all_is_done(world, session)
            verdict = judge(world.record(), killed)
            print("\n".join(lines(verdict)))  # noqa: T201 — shown when one of the tests fails
            yield Outcome(verdict, len(killed), rested, count_rescued_runs(session), count_undelivered(session))
    finally:
        world.end()
        postgres.drop(address)


def run_for_a_minute(fleet: Fleet) -> dict[str, float]:
    """Run three instances for a minute, and kill one after the other; return when each caller was killed."""
    chance = random.Random(7)
    instances = fleet.start(3)
    killed: dict[str, float] = {}
    until = time.monotonic() + MINUTE
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, chance.uniform(*BETWEEN_KILLS)))
        victim = instances.pop(chance.randrange(len(instances)))
        killed[f"deal-desk/{victim.pid}"] = time.time()
        victim.kill()
        instances.append(fleet.launch().wait_ready())
    return killed


def wait_until_all_is_done(world: World, session: psycopg.Connection[TupleRow]) -> bool:
    """Let nothing new appear, and wait until every feed was polled once more, and all runs that follow have ended."""
    world.be_quiet()
    quiet_at = time.time()

    def all_feeds_were_polled() -> bool:
        halts = any(each.upstream == "halts" and each.at > quiet_at + 1 for each in world.record().requests)
        return (
            halts
            and has_succeeded_since(session, "watch-filings", quiet_at)
            and has_succeeded_since(session, "survey-sources", quiet_at)
        )

    try:
        eventually(all_feeds_were_polled, within=PATIENCE, every=0.5)
        eventually(lambda: unfinished(session) == 0, within=PATIENCE, every=0.5)
    except AssertionError:
        return False
    return True


def has_succeeded_since(session: psycopg.Connection[TupleRow], action: str, since: float) -> bool:
    """Whether a run of the action that began since then has succeeded, with only numbers in its result."""
    rows = session.execute(
        """
        SELECT r.result::text
        FROM flotilla.finished_runs AS r
        JOIN flotilla.actions AS a ON a.id = r.action_id
        WHERE a.name = %s AND r.state = 'succeeded' AND r.started_at > to_timestamp(%s)
        """,
        (action, since),
    )
    return any(all(isinstance(each, int) for each in json.loads(row[0]).values()) for row in rows)


def unfinished(session: psycopg.Connection[TupleRow]) -> int:
    statement = "SELECT count(*) FROM flotilla.runs AS r JOIN flotilla.actions AS a ON a.id = r.action_id"
    return number(session, f"{statement} WHERE a.name = ANY (%s)", FOLLOW_UPS)


def count_rescued_runs(session: psycopg.Connection[TupleRow]) -> int:
    """Count the runs that continued after the death of their instance."""
    died = "SELECT count(DISTINCT run_id) FROM flotilla.run_events WHERE data::text LIKE %s"
    return number(session, died, "%died while it ran it%")


def count_undelivered(session: psycopg.Connection[TupleRow]) -> int:
    return number(session, "SELECT count(*) FROM deal_desk.alerts WHERE delivered_at IS NULL")


def number(session: psycopg.Connection[TupleRow], statement: str, *values: object) -> int:
    row = session.execute(statement.encode(), values or None).fetchone()
    assert row is not None
    return int(row[0])


def test_the_minute_had_enough_faults_to_test_the_promises(outcome: Outcome) -> None:
    """Without enough faults, the other tests would prove little."""
    verdict = outcome.verdict
    assert outcome.kills >= 3
    assert outcome.rescued >= 1
    assert verdict.filings >= 120
    assert verdict.posts["refused"] >= 0.2 * verdict.posts.total()
    assert verdict.posts["lost"] >= 1


def test_all_work_is_completed_after_nothing_new_appears(outcome: Outcome) -> None:
    assert outcome.rested


def test_no_filing_is_missed(outcome: Outcome) -> None:
    assert outcome.verdict.missed == []


def test_no_alert_is_lost(outcome: Outcome) -> None:
    assert outcome.verdict.missing == []
    assert outcome.undelivered == 0


def test_no_alert_is_delivered_twice_except_where_the_result_cannot_be_known(
    outcome: Outcome,
) -> None:
    assert outcome.verdict.not_excused == []


def test_one_instance_at_a_time_polls_the_halts(outcome: Outcome) -> None:
    """A turn ends with its instance. Three more turns are allowed, because a turn can be lost for other reasons."""
    assert len(outcome.verdict.turns) <= outcome.kills + 3


def test_no_upstream_receives_more_requests_than_it_allows(outcome: Outcome) -> None:
    assert outcome.verdict.too_often == Counter()


def test_research_is_paid_once_for_each_deal_although_calls_are_interrupted(outcome: Outcome) -> None:
    verdict = outcome.verdict
    assert (verdict.paid_twice, verdict.not_paid) == ([], [])
    assert verdict.charges == verdict.deals
    assert verdict.calls > verdict.charges, "some calls were repeated"


# -- upstreams that the desk starts itself ----------------------------------------------------------------------------


def test_the_desk_hosts_its_upstreams_and_their_record_survives_the_hosting_instance(
    address: str, tmp_path: Path
) -> None:
    port = str(free_port())
    own = FAST | {"DESK_WORLD_PORT": port, "DESK_WORLD_FILE": str(tmp_path / "world.sqlite3")}
    url = f"http://127.0.0.1:{port}"
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="examples.deal_desk", **own) as fleet:
        instances = fleet.start(2)
        before = eventually(lambda: record_with_posts(url), within=60)
        holder = next(instance for instance in instances if "singleton:deal-desk-world" in instance.me()["locks"])
        holder.kill()
        after = eventually(lambda: record_with_posts(url), within=60)
        assert {filing.accession for filing in before.filings} <= {filing.accession for filing in after.filings}
        assert [post.fate for post in before.posts] == [post.fate for post in after.posts[: len(before.posts)]]
        report = subprocess.run(
            [*DESK, "report"],
            cwd=ROOT,
            env=environment(None, own),
            capture_output=True,
            text=True,
            check=True,
        )
    assert report.stdout.startswith("appeared"), report.stdout
    assert "0 deals charged twice" in report.stdout


def record_with_posts(url: str) -> Everything | None:
    try:
        record = Everything.model_validate_json(httpx.get(f"{url}/record", verify=NO_TRUST).text)
    except httpx.TransportError:
        return None
    return record if any(post.fate == "shown" for post in record.posts) else None
