"""The example service `examples/deal_desk`, on three instances for a minute, while they are killed and upstreams fail.

The upstreams are a process that nobody kills. They keep a record of all that reached them, and each promise of the desk
is decided from that record (`examples/deal_desk/verdict.py`): what the desk itself believes is not asked.
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

pytestmark = pytest.mark.long

DESK = [sys.executable, "-m", "examples.deal_desk"]
MINUTE = 60.0
# How long it may take to come to rest; twice. Together with the minute, less than a test may take.
PATIENCE = 40.0
# Every so many seconds, one is killed.
BETWEEN_KILLS = (3.0, 7.0)
HURRY = {
    "DESK_FILINGS_EVERY": "1s",
    "DESK_HALTS_EVERY": "1",
    "DESK_SOURCES_EVERY": "3s",
    "DESK_MAX_RETRY_DELAY": "1s",
    # Of ten that are allowed within any second; where the upstream itself is held up, requests come closer together.
    "DESK_EDGAR_RATE": "4/s",
    # So many filings at once that reading them all at once would be too many.
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
    taken_over: int
    undelivered: int


class World:
    """The upstreams, as a process."""

    def __init__(self, folder: Path) -> None:
        port = str(free_port())
        self.env = {**HURRY, "DESK_WORLD_PORT": port, "DESK_WORLD_FILE": str(folder / "world.sqlite3")}
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
    """What came of the minute."""
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
            killed = minute(fleet)
            rested = rests(world, session)
            verdict = judge(world.record(), killed)
            print("\n".join(lines(verdict)))  # noqa: T201 — shown when one of the tests fails
            yield Outcome(verdict, len(killed), rested, taken_over(session), undelivered(session))
    finally:
        world.end()
        postgres.drop(address)


def minute(fleet: Fleet) -> dict[str, float]:
    """Run three for a minute, and kill one after the other; return when each caller was killed."""
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


def rests(world: World, session: psycopg.Connection[TupleRow]) -> bool:
    """Let nothing new appear, and wait until every feed was looked at once more, and what followed is done."""
    world.be_quiet()
    quiet_at = time.time()

    def looked() -> bool:
        halts = any(each.upstream == "halts" and each.at > quiet_at + 1 for each in world.record().requests)
        return halts and ended(session, "watch-filings", quiet_at) and ended(session, "survey-sources", quiet_at)

    try:
        eventually(looked, within=PATIENCE, every=0.5)
        eventually(lambda: under_way(session) == 0, within=PATIENCE, every=0.5)
    except AssertionError:
        return False
    return True


def ended(session: psycopg.Connection[TupleRow], action: str, since: float) -> bool:
    """Whether a run of it that began since has succeeded, with numbers alone in what it returned."""
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


def under_way(session: psycopg.Connection[TupleRow]) -> int:
    statement = "SELECT count(*) FROM flotilla.runs AS r JOIN flotilla.actions AS a ON a.id = r.action_id"
    return number(session, f"{statement} WHERE a.name = ANY (%s)", FOLLOW_UPS)


def taken_over(session: psycopg.Connection[TupleRow]) -> int:
    """How many runs went on after the death of their instance."""
    died = "SELECT count(DISTINCT run_id) FROM flotilla.run_events WHERE data::text LIKE %s"
    return number(session, died, "%died while it ran it%")


def undelivered(session: psycopg.Connection[TupleRow]) -> int:
    return number(session, "SELECT count(*) FROM deal_desk.alerts WHERE delivered_at IS NULL")


def number(session: psycopg.Connection[TupleRow], statement: str, *values: object) -> int:
    row = session.execute(statement.encode(), values or None).fetchone()
    assert row is not None
    return int(row[0])


def test_the_minute_was_a_hard_one(outcome: Outcome) -> None:
    """Otherwise the rest would say little."""
    verdict = outcome.verdict
    assert outcome.kills >= 3
    assert outcome.taken_over >= 1
    assert verdict.filings >= 120
    assert verdict.posts["refused"] >= 0.2 * verdict.posts.total()
    assert verdict.posts["lost"] >= 1


def test_it_comes_to_rest_when_nothing_new_appears(outcome: Outcome) -> None:
    assert outcome.rested


def test_no_filing_is_missed(outcome: Outcome) -> None:
    assert outcome.verdict.missed == []


def test_no_alert_is_lost(outcome: Outcome) -> None:
    assert outcome.verdict.missing == []
    assert outcome.undelivered == 0


def test_no_alert_is_delivered_twice_unless_the_chat_did_not_answer_or_its_caller_was_killed_right_then(
    outcome: Outcome,
) -> None:
    assert outcome.verdict.not_excused == []


def test_halts_are_looked_at_by_one_instance_at_a_time(outcome: Outcome) -> None:
    """A turn ends with its instance; one or two more, if it was lost for another reason."""
    assert len(outcome.verdict.turns) <= outcome.kills + 3


def test_the_rate_of_no_upstream_is_exceeded(outcome: Outcome) -> None:
    assert outcome.verdict.too_often == Counter()


def test_research_is_paid_once_for_each_deal_although_calls_are_cut_short(outcome: Outcome) -> None:
    verdict = outcome.verdict
    assert (verdict.paid_twice, verdict.not_paid) == ([], [])
    assert verdict.charges == verdict.deals
    assert verdict.calls > verdict.charges, "some were called again"


# -- the world, where nobody has started one --------------------------------------------------------------------------


def test_a_desk_starts_its_upstreams_itself_and_their_record_outlives_the_instance_that_had_them(
    address: str, tmp_path: Path
) -> None:
    port = str(free_port())
    own = HURRY | {"DESK_WORLD_PORT": port, "DESK_WORLD_FILE": str(tmp_path / "world.sqlite3")}
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
