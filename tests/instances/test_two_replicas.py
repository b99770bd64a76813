"""What breaks at two replicas: each block of `docs/two-replicas.md` is run by two processes.

The blocks `before/…` are seen to fail, and the blocks `after/…` to hold. Nothing depends on luck: the call to another
system in a block (`world.slow`) is recorded, and returns when the test opens its gate. So a test decides which of two
processes goes on, and when a process is killed.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import psycopg
import pytest

from tests.support import fleet as fleets
from tests.support.fleet import NO_TRUST, ROOT, environment
from tests.support.fork_server import Launched
from tests.support.pages import blocks
from tests.support.postgres import Postgres, eventually, free_port
from tests.support.streams import Watcher

pytestmark = pytest.mark.template

PAGE = ROOT / "docs" / "two-replicas.md"
Side = Literal["before", "after"]
# What the page calls your database and another system.
WORLD = """
import asyncio
import os
from contextlib import asynccontextmanager

import psycopg


@asynccontextmanager
async def connect():
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as session:
        yield session


async def slow(what):
    async with connect() as session:
        await session.execute("INSERT INTO calls VALUES (%s, %s)", [what, os.getpid()])
        while not await (await session.execute("SELECT 1 FROM gates WHERE what = %s", [what])).fetchone():
            await asyncio.sleep(0.02)
"""
CALLS = "CREATE TABLE calls (what text, process int); CREATE TABLE gates (what text);"
SERVICES = {
    "before": "from fastapi import FastAPI\n{imports}\napp = FastAPI()\n{includes}\n",
    # As an instance is started by the command line, with more routes in the router of the service.
    "after": (
        "from app import routes\nfrom app.fleet.cli import main\n{imports}\n{includes}\n"
        "if __name__ == '__main__':\n    main()\n"
    ),
}
TARGET = {"before": "app", "after": "routes.router"}
# Long enough to see a draining instance on a busy machine. No test waits for its end.
DRAIN_DELAY = "5"


def write_services(folder: Path) -> str:
    """Write the blocks of the page into their files, and a service for each side; return the tables."""
    python = [block.text for block in blocks(PAGE) if block.language == "python"]
    (tables,) = [block.text for block in blocks(PAGE) if block.language == "sql"]
    imports, *files = python
    assert imports.startswith("# imports\n")
    (folder / "world.py").write_text(WORLD)
    routers: dict[Side, list[str]] = {"before": [], "after": []}
    for block in files:
        named = re.match(r"# (before|after)/(\w+)\.py\n", block)
        assert named, f"a block begins with the name of its file: {block[:60]!r}"
        side: Side = "before" if named[1] == "before" else "after"
        (folder / side).mkdir(exist_ok=True)
        (folder / side / "__init__.py").touch()
        (folder / side / f"{named[2]}.py").write_text(imports + block)
        if "router = APIRouter(" in block:
            routers[side].append(named[2])
    for side, modules in routers.items():
        (folder / f"{side}_service.py").write_text(
            SERVICES[side].format(
                imports="\n".join(f"from {side} import {name}" for name in modules),
                includes="\n".join(f"{TARGET[side]}.include_router({name}.router)" for name in modules),
            )
        )
    return tables


class Replica:
    def __init__(self, side: Side, address: str, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.client = httpx.Client(base_url=self.url, timeout=120, verify=NO_TRUST)
        self.log = folder / f"{side}-{port}.log"
        if side == "before":
            module, arguments = "uvicorn", ["before_service:app", "--port", str(port)]
        else:
            module, arguments = "after_service", ["serve", "--port", str(port)]
        self.process = launch(module, arguments, address, folder, self.log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def status(self, path: str = "/health/ready") -> int | None:
        """Return the status of a request on a new connection; None without an answer."""
        try:
            return httpx.get(self.url + path, timeout=30, verify=NO_TRUST).status_code
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.status() == 200

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()


def launch(module: str, arguments: list[str], address: str, folder: Path, log: Path) -> Launched:
    """Run a module in this folder, from the fork server."""
    assert fleets.fork_server is not None
    env = environment(address, {"FLOTILLA_ACTIONS": "after", "FLOTILLA_DRAIN_DELAY": DRAIN_DELAY})
    with Path(os.devnull).open() as nothing, log.open("wb") as target:
        streams = (nothing.fileno(), target.fileno(), target.fileno())
        return fleets.fork_server.launch(module, arguments, env, folder, streams)


class Pair:
    """Two replicas of one side, and their database. A replica that has ended is replaced."""

    def __init__(self, side: Side, address: str, folder: Path) -> None:
        self.address = address
        self._side: Side = side
        self._folder = folder
        self._all: list[Replica] = []
        self._database = psycopg.connect(address, autocommit=True)
        self._threads = ThreadPoolExecutor()

    def replicas(self) -> tuple[Replica, Replica]:
        living = [each for each in self._all if each.process.poll() is None]
        started = [Replica(self._side, self.address, self._folder) for _ in range(2 - len(living))]
        self._all += started
        for each in started:
            eventually(each.is_ready)
        first, second = (*living, *started)
        return first, second

    def rows(self, statement: str, *values: object) -> list[Any]:
        return self._database.execute(statement.encode(), values).fetchall()

    def column(self, statement: str, *values: object) -> list[Any]:
        return [value for (value,) in self.rows(statement, *values)]

    def post(self, replica: Replica, path: str) -> "Future[httpx.Response]":
        return self._threads.submit(replica.client.post, path)

    def callers(self, what: str, count: int) -> list[int]:
        """Wait until so many calls to the other system were made; return the processes that made them."""

        def made() -> list[int] | None:
            found = self.column("SELECT process FROM calls WHERE what = %s", what)
            return found if len(found) >= count else None

        return eventually(made)

    def open(self, what: str) -> None:
        self._database.execute("INSERT INTO gates VALUES (%s)", [what])

    def end(self) -> None:
        for each in self._all:
            each.end()
        self._threads.shutdown()
        self._database.close()


def pair(side: Side, address: str, folder: Path) -> Iterator[Pair]:
    tables = write_services(folder)
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(f"{tables}{CALLS}".encode())
    own = Pair(side, address, folder)
    try:
        yield own
    finally:
        own.end()


@pytest.fixture(scope="module")
def before(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from pair("before", postgres.new_database(), tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="module")
def after(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from pair("after", postgres.new_migrated_database(), tmp_path_factory.mktemp("after"))


def test_a_timer_in_each_process_sends_the_report_from_each_replica(before: Pair) -> None:
    pids = {each.pid for each in before.replicas()}
    eventually(lambda: set(before.column("SELECT process FROM mails WHERE what = 'report'")) >= pids)


def test_a_schedule_has_one_run_for_each_instant(after: Pair) -> None:
    after.replicas()
    eventually(lambda: after.column("SELECT count(*) FROM mails WHERE what = 'report'")[0] >= 3)
    slots = after.column("SELECT slot FROM mails WHERE what = 'report'")
    assert len(slots) == len(set(slots))


def test_a_background_task_is_lost_with_its_process(before: Pair) -> None:
    first, second = before.replicas()
    assert first.client.post("/orders").status_code == 202
    assert before.callers("label", 1) == [first.pid]
    first.kill()
    before.open("label")
    # The other replica is up, a new one starts, and neither of them has the order.
    assert before.replicas()[0] is second
    assert before.column("SELECT count(*) FROM mails WHERE what = 'shipped'") == [0]
    assert before.callers("label", 1) == [first.pid]


def test_a_run_is_continued_by_another_instance(after: Pair) -> None:
    replicas = after.replicas()
    assert replicas[0].client.post("/orders").status_code == 202
    (executing,) = after.callers("label", 1)
    victim = next(each for each in replicas if each.pid == executing)
    victim.kill()
    _, successor = after.callers("label", 2)
    assert successor != executing
    after.open("label")
    shipped = "SELECT process FROM mails WHERE what = 'shipped'"
    eventually(lambda: after.column(shipped))
    assert after.column(shipped) == [successor]


def test_a_lock_in_memory_lets_two_replicas_withdraw_the_same_money(before: Pair) -> None:
    answers = [before.post(each, "/withdrawals") for each in before.replicas()]
    before.callers("fraud check", 2)
    before.open("fraud check")
    assert [each.result().status_code for each in answers] == [200, 200]
    assert before.column("SELECT balance FROM accounts") == [20]


def test_a_lock_of_the_cluster_lets_one_of_them_withdraw_it(after: Pair) -> None:
    first, second = after.replicas()
    answers = [after.post(first, "/withdrawals")]
    after.callers("fraud check", 1)
    answers.append(after.post(second, "/withdrawals"))
    eventually(lambda: [each["waiting"] for each in locks(first) if each["name"] == "account"] == [1])
    after.open("fraud check")
    assert [each.result().status_code for each in answers] == [200, 409]
    assert after.column("SELECT balance FROM accounts") == [20]


def locks(replica: Replica) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = replica.client.get("/locks").json()["items"]
    return found


def test_a_slow_holder_of_an_expired_lease_writes_after_its_successor(before: Pair) -> None:
    first, second = before.replicas()
    late = before.post(first, "/books/close")
    before.callers(f"sums of {first.pid}", 1)
    before.open(f"sums of {second.pid}")
    # As soon as the lease has expired.
    eventually(lambda: second.client.post("/books/close").status_code == 200)
    before.open(f"sums of {first.pid}")
    assert late.result().status_code == 200
    assert before.column("SELECT process FROM entries ORDER BY id") == [second.pid, first.pid]


def test_a_lock_does_not_expire_under_its_holder_and_a_former_holder_writes_nothing(after: Pair) -> None:
    first, second = after.replicas()
    late = after.post(first, "/books/close")
    after.callers(f"sums of {first.pid}", 1)
    assert second.client.post("/books/close").status_code == 409
    released = second.client.delete("/locks/books", params={"reason": "a test of two replicas"})
    assert released.status_code < 300, released.text
    after.open(f"sums of {second.pid}")
    eventually(lambda: second.client.post("/books/close").status_code == 200)
    after.open(f"sums of {first.pid}")
    assert late.result().status_code >= 400
    assert after.column("SELECT process FROM entries ORDER BY id") == [second.pid]


def test_a_counter_in_memory_allows_ten_calls_on_each_replica(before: Pair) -> None:
    assert allowed_calls(before) == 20


def test_a_limit_allows_ten_calls_in_the_whole_cluster(after: Pair) -> None:
    assert allowed_calls(after) == 10


def allowed_calls(pair: Pair) -> int:
    replicas = pair.replicas()
    statuses = [each.client.post("/lookups").status_code for _ in range(12) for each in replicas]
    assert set(statuses) == {200, 429}
    return statuses.count(200)


def test_progress_in_memory_is_unknown_to_the_other_replica(before: Pair) -> None:
    first, second = before.replicas()
    assert first.client.post("/imports/1").status_code == 202
    eventually(lambda: first.client.get("/imports/1").json() == 0.5)
    assert second.client.get("/imports/1").status_code == 404
    before.open("rows")


def test_progress_of_a_run_is_streamed_by_each_instance(after: Pair) -> None:
    replicas = after.replicas()
    run = replicas[0].client.post("/imports").json()["run"]
    for each in replicas:
        watcher = Watcher(run)
        # Two changes of state, and the progress.
        watcher.read(each.url, most=3)
        assert watcher.received[-1]["data"] == {"done": 0.5, "text": "half of the rows"}
        assert each.client.get(f"/runs/{run}").json()["progress"]["done"] == 0.5
    after.open("rows")


def test_two_deliveries_of_a_webhook_are_booked_twice(before: Pair) -> None:
    answers = [before.post(each, "/webhooks/paid-1") for each in before.replicas()]
    before.callers("ledger", 2)
    before.open("ledger")
    assert [each.result().status_code for each in answers] == [204, 204]
    assert len(before.column("SELECT event FROM bookings")) == 2


def test_two_deliveries_of_a_webhook_are_booked_once(after: Pair) -> None:
    first, second = after.replicas()
    answer = after.post(first, "/webhooks/paid-1")
    after.callers("ledger", 1)
    assert second.client.post("/webhooks/paid-1").status_code == 503
    after.open("ledger")
    assert answer.result().status_code == 204
    assert second.client.post("/webhooks/paid-1").status_code == 204
    assert after.column("SELECT event FROM bookings") == ["paid-1"]


def test_a_repeated_request_charges_twice(before: Pair) -> None:
    answers = [before.post(each, "/charges/order-1") for each in before.replicas()]
    before.callers("risk check", 2)
    before.open("risk check")
    assert [each.result().status_code for each in answers] == [202, 202]
    assert before.column("SELECT key FROM charges") == ["order-1", "order-1"]


def test_a_repeated_request_with_a_key_is_the_same_run(after: Pair) -> None:
    replicas = after.replicas()
    answers = [after.post(each, "/charges/order-1").result() for each in replicas]
    assert answers[0].status_code == 202
    assert answers[0].json() == answers[1].json()
    after.open("risk check")
    run = f"/runs/{answers[0].json()['run']}"
    eventually(lambda: replicas[0].client.get(run).json()["state"] == "succeeded")
    assert after.column("SELECT key FROM charges") == ["order-1"]


def test_a_loop_in_each_process_reads_the_feed_from_each_replica(before: Pair) -> None:
    pids = {each.pid for each in before.replicas()}
    eventually(lambda: set(before.column("SELECT process FROM polls")) >= pids)


def test_a_singleton_reads_the_feed_on_one_instance_and_moves_when_it_dies(after: Pair) -> None:
    replicas = after.replicas()
    began = after.column("SELECT count(*) FROM polls")[0]
    eventually(lambda: after.column("SELECT count(*) FROM polls")[0] >= began + 3)
    (holder,) = set(after.column("SELECT process FROM polls OFFSET %s", began))
    next(each for each in replicas if each.pid == holder).kill()
    eventually(lambda: set(after.column("SELECT process FROM polls OFFSET %s", began)) != {holder})
    (_, successor) = dict.fromkeys(after.column("SELECT process FROM polls OFFSET %s", began))
    assert successor in {each.pid for each in replicas}


def test_two_pods_that_migrate_at_once_collide(before: Pair, tmp_path: Path) -> None:
    write_services(tmp_path)
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'customers'::regclass AND NOT granted"
    with psycopg.connect(before.address) as session:
        # Both have read the version when one of them gets the table.
        session.execute("LOCK TABLE customers IN ACCESS SHARE MODE")
        pods = [launch("before.migrate", [], before.address, tmp_path, log) for log in logs]
        eventually(lambda: before.column(waiting) == [2])
    assert sorted(pod.wait(60) for pod in pods) == [0, 1]
    assert "DuplicateColumn" in "".join(log.read_text() for log in logs)


def test_two_pods_that_run_flotilla_migrate_at_once_take_turns(postgres: Postgres) -> None:
    (command,) = [block.text.split() for block in blocks(PAGE) if block.language == "sh"]
    address = postgres.new_database()
    with ThreadPoolExecutor() as threads:
        pods = [threads.submit(fleets.run, *command[1:], address=address) for _ in range(2)]
    done = [pod.result() for pod in pods]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    outcomes = sorted(each.stdout.strip() for each in done)
    assert outcomes == ["flotilla: already up to date", "flotilla: migrated"]
    postgres.drop(address)


def test_a_plain_server_closes_its_port_while_its_probe_has_never_said_so(before: Pair) -> None:
    first, _ = before.replicas()
    os.kill(first.pid, signal.SIGTERM)
    answers = statuses_until(first, None)
    assert set(answers) <= {200, None}


def test_an_instance_says_that_it_leaves_and_still_serves(after: Pair) -> None:
    first, _ = after.replicas()
    os.kill(first.pid, signal.SIGTERM)
    answers = statuses_until(first, 503)
    assert None not in answers
    assert first.status("/actions") == 200
    first.kill()


def statuses_until(replica: Replica, last: int | None) -> list[int | None]:
    """Query the probe until it answers with this status, and return all statuses."""
    answers: list[int | None] = []

    def is_last() -> bool:
        answers.append(replica.status())
        return answers[-1] == last

    eventually(is_last)
    return answers
