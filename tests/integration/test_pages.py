"""Pages of runs: their size and the rows read for them are bounded, whatever the size and the number of runs."""

import json
from collections.abc import AsyncIterator, Iterator
from itertools import product
from typing import Any

import psycopg
import pytest

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.http.runs import MAX_PAGE_BYTES
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.alike import COUNTED, FIND_GROUPS
from app.fleet.runs.read.matching import FIRST_ID_SINCE, IDS_ALIKE, MATCH
from app.fleet.runs.read.pages import EXTRACT, MAX_WHOLE, NEWEST, page_sql
from app.fleet.runs.retry import ENDED
from tests.integration.test_actions_http import RUN, get, post
from tests.support.runs import LocalInstance, local_instance

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, max_body=4_000_000) as own:
        await post(own, "/actions/echo/pause", status=200)
        yield own


# -- extracts ---------------------------------------------------------------------------------------------------------


async def test_a_page_has_short_values_completely_and_the_beginning_of_long_ones(here: LocalInstance) -> None:
    text = '{"text":"%s"}'
    longest = "x" * (MAX_WHOLE - len(text % ""))
    short = (await post(here, "/actions/echo/runs", {"payload": {"text": longest}}, 202)).json()
    long = (await post(here, "/actions/echo/runs", {"payload": {"text": longest + "x"}}, 202)).json()
    newest, older = (await get(here, "/runs"))["items"]
    assert older == short | {"truncated": {}}
    assert newest == long | {"payload": None, "truncated": {"payload": (text % longest)[:EXTRACT]}}
    assert (await get(here, f"/runs/{long['id']}"))["payload"] == {"text": longest + "x"}
    assert (await get(here, "/actions/echo"))["last_run"] == newest
    assert newest in [each["last_run"] for each in (await get(here, "/actions"))["items"]]


async def test_each_long_field_of_a_pending_or_ended_run_is_replaced_by_an_extract(here: LocalInstance) -> None:
    values = {"result": json.dumps("ü" * 3000), "error": "e" * 5000, "progress": json.dumps({"text": "p" * 5000})}
    waiting = await here.trigger("echo", {"text": "y" * 5000})
    await here.sql(
        "UPDATE runs SET error = %s, progress = %s WHERE id = %s", values["error"], values["progress"], waiting
    )
    ended = (await here.run("noop")).id
    await here.sql(
        "UPDATE finished_runs SET result = %s, error = %s, progress = %s, payload = %s WHERE id = %s",
        *values.values(),
        json.dumps({"text": "y" * 5000}),
        ended,
    )
    runs = {run["id"]: run for run in (await get(here, "/runs"))["items"]}
    assert set(runs[waiting]["truncated"]) == {"payload", "error", "progress"}
    assert set(runs[ended]["truncated"]) == {"payload", "result", "error", "progress"}
    for run in runs.values():
        assert set(run) == RUN | {"truncated"}
        for field, extract in run["truncated"].items():
            assert run[field] is None
            assert len(extract) == EXTRACT
            assert field == "payload" or extract == values[field][:EXTRACT]


async def test_a_null_value_is_not_truncated(here: LocalInstance) -> None:
    (run,) = [(await here.run("noop")).id]
    (listed,) = (await get(here, "/runs"))["items"]
    assert listed == await get(here, f"/runs/{run}") | {"truncated": {}}


async def test_runs_of_a_megabyte_each_make_a_small_page(here: LocalInstance) -> None:
    body = {"runs": [{"action": "echo", "payload": {"text": "z" * 100_000}}] * 30}
    await post(here, "/runs:batch", body, 202)
    page = await here.running.client.get("/runs?limit=500")
    assert len(page.json()["items"]) == 30
    assert len(page.content) < 30_000


async def test_a_page_ends_before_it_is_too_large_and_the_next_page_continues(here: LocalInstance) -> None:
    # Each of these characters takes six bytes in the response and one in the table.
    body = {"runs": [{"action": "echo", "payload": {"text": "a" * 900}}] * 500}
    made = [run["id"] for run in (await post(here, "/runs:batch", body, 202)).json()["runs"]]
    await here.sql("UPDATE runs SET error = repeat(chr(1), 1000), progress = to_json(repeat('b', 1000))")
    seen: list[int] = []
    query = "limit=500"
    pages = 0
    while query:
        answer = await here.running.client.get(f"/runs?{query}")
        assert len(answer.content) <= MAX_PAGE_BYTES + 100_000
        page = answer.json()
        seen += [run["id"] for run in page["items"]]
        query = f"limit=500&cursor={page['next_cursor']}" if page["next_cursor"] else ""
        pages += 1
    assert seen == made[::-1]
    assert pages > 2


# -- indexes ----------------------------------------------------------------------------------------------------------

FILL = """
INSERT INTO actions (name, misfire, overlap, priority, max_attempts, retention)
SELECT 'many-' || i, 'once', 'allow', 0, 1, '7d' FROM generate_series(1, 20) AS i;

-- Of the 20 actions, the second last has the oldest runs alone, and the last has none.
INSERT INTO finished_runs (id, action_id, state, priority, run_at, token, attempt, max_attempts, trigger, events,
                           created_at, finished_at, expires_at)
SELECT i, CASE WHEN i <= 100000 THEN 19 ELSE 1 + i / 10 % 18 END,
       (ARRAY['failed', 'cancelled', 'succeeded'])[1 + least(i % 10, 2)],
       0, now(), 1, 1, 1, 'api', 1, now(), now(), now()
FROM generate_series(1, 1000000) AS i;

INSERT INTO runs (id, action_id, state, priority, run_at, max_attempts, trigger, instance_id)
OVERRIDING SYSTEM VALUE
SELECT i, CASE WHEN i <= 1030000 THEN 19 ELSE 1 + i / 10 % 18 END,
       CASE WHEN i % 1000 = 0 THEN 'running' ELSE 'pending' END, 0, now(), 1, 'api', 1
FROM generate_series(1000001, 1300000) AS i;
"""


def scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if plan.get("Relation Name") in {"runs", "finished_runs"} or plan["Node Type"] == "Bitmap Index Scan":
        yield plan
    for each in plan.get("Plans", ()):
        yield from scans(each)


def rows_read_by(plan: dict[str, Any]) -> float:
    """Return the rows or entries that a scan has read, including those it has filtered out."""
    passed = sum(plan.get(f"Rows Removed by {what}", 0) for what in ("Filter", "Index Recheck"))
    return float((plan["Actual Rows"] + passed) * plan["Actual Loops"])


def test_a_page_reads_few_rows_of_an_index_for_any_filter_and_cursor(address: str) -> None:
    """With 1,300,000 runs, a page reads at most all running runs, or a small multiple of the rows that it shows."""
    limit = 51
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SET search_path TO flotilla; SET synchronous_commit TO off")
        connection.execute(FILL)
        connection.execute("ANALYZE runs; ANALYZE finished_runs; ANALYZE actions")
        filters: list[tuple[str, ...]] = [(), *((state,) for state in RunState), tuple(RunState)]
        for action_id, states, before in product((None, 1, 19, 20), filters, (NEWEST, 1_100_000, 900_000, 2_000)):
            statement = Namespace("flotilla").sql(page_sql(of_action=action_id is not None, states=states))
            values = {"action_id": action_id, "limit": limit, "before": before, "after": 0}
            row = connection.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement, values, prepare=False).fetchone()
            assert row is not None
            for scan in scans(row[0][0]["Plan"]):
                what = (action_id, states, before, scan["Node Type"], scan.get("Index Name"))
                assert scan["Node Type"] != "Seq Scan", what
                # All running runs, which are 300 here, or the rows of a page and some rows in another state.
                assert rows_read_by(scan) <= max(300, 12 * limit), what
        # The failed runs that a retry of many takes, in batches.
        for states in (("failed",), ("cancelled",), ("cancelled", "failed")):
            which: dict[str, Any] = {"action": 1, "states": list(states), "since": None, "until": "infinity"}
            which |= {"first_state": states[0], "last_state": states[-1], "most": limit}
            batch = Statement(f"{ENDED} FOR UPDATE SKIP LOCKED")
            explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + Namespace("flotilla").sql(batch)
            row = connection.execute(explain, which, prepare=False).fetchone()
            assert row is not None
            (scan,) = scans(row[0][0]["Plan"])
            assert (scan["Index Name"], rows_read_by(scan)) == ("finished_runs_action_state", limit)
        # The dashboard's groups of errors: of each, at most COUNTED + 1 entries are counted. And the runs of a group.
        for first, last, groups in ((0, 2**31 - 1, 19), (3, 3, 1)):
            found = explained(connection, FIND_GROUPS, {"first_action": first, "last_action": last})
            assert {scan["Index Name"] for scan in found} == {"finished_runs_alike"}
            assert sum(map(rows_read_by, found)) <= groups * (COUNTED + 8)
        alike = connection.execute("SELECT alike FROM finished_runs WHERE alike IS NOT NULL LIMIT 1").fetchone()
        assert alike is not None
        of_group = {"action_id": 3, "alike": alike[0], "limit": limit, "before": NEWEST, "after": 0}
        (scan,) = explained(connection, IDS_ALIKE, of_group)
        assert (scan["Index Name"], rows_read_by(scan)) == ("finished_runs_alike", limit)
        # The candidates of other filters, and the search for an instant.
        ids = list(range(995_000, 1_005_000))
        candidates: dict[str, Any] = {"ids": ids, "state": None, "ordering_key": None, "words": "no such words"}
        assert sum(map(rows_read_by, explained(connection, MATCH, candidates))) <= 2 * len(ids)
        for since in ("-infinity", "infinity"):
            assert sum(map(rows_read_by, explained(connection, FIRST_ID_SINCE, {"since": since}))) <= 200


def explained(
    connection: psycopg.Connection[Any], statement: Statement, values: dict[str, Any]
) -> list[dict[str, Any]]:
    """Execute a statement, and return its scans."""
    explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + Namespace("flotilla").sql(statement)
    row = connection.execute(explain, values, prepare=False).fetchone()
    assert row is not None
    found = list(scans(row[0][0]["Plan"]))
    assert "Seq Scan" not in {scan["Node Type"] for scan in found}
    return found
