"""The traceback of each failed attempt is kept with its run, and shown to those who may operate."""

import re
from collections.abc import AsyncIterator
from html import unescape
from typing import Any

import psycopg
import pytest

from app.fleet.api_keys import make_key
from app.fleet.cli import runs
from app.fleet.engine.execute import batches, failures
from app.fleet.engine.maintenance import pruner
from app.fleet.runs.attempt_writes import MAX_TRACEBACKS
from app.fleet.runs.cancel import cancel_run
from app.fleet.runs.retry import retry_run
from app.fleet.telemetry.redaction import redact
from app.fleet.telemetry.tracebacks import MAX_TRACEBACK
from tests.integration.test_audit import logged
from tests.integration.test_dashboard import get, sign_in, unhurried
from tests.support import trial_actions, trial_faults
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

MODULES = ("tests.support.trial_actions", "tests.support.trial_faults")
READ, OPERATE = make_key("bob", "read"), make_key("alice", "operate")


@pytest.fixture
async def here(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalInstance]:
    # The test calls the pruner itself.
    monkeypatch.setattr(pruner, "INTERVAL", 3600)
    async with local_instance(address, actions=MODULES) as own:
        yield own


async def stored(here: LocalInstance, run_id: int, columns: str = "error, traceback") -> list[Any]:
    return await here.sql(f"SELECT {columns} FROM run_tracebacks WHERE run_id = %s ORDER BY token", run_id)


async def test_the_traceback_of_each_failed_attempt_is_stored_once(here: LocalInstance) -> None:
    run = await here.run("fail")
    ours = [(1, 1, "flotilla-1"), (2, 2, "flotilla-1"), (3, 3, "flotilla-1")]
    assert await stored(here, run.id, "token, attempt, instance") == ours
    for error, traceback in await stored(here, run.id):
        assert error == run.error == "ValueError: the parcel\\x00is torn"
        assert f'File "{redact(str(trial_actions.__file__))}", line' in traceback
        assert traceback.endswith('is torn")\nValueError: the parcel\\x00is torn')


async def test_a_batch_that_is_sent_again_stores_its_tracebacks_once(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    genuine = batches.store_tracebacks
    lost: list[int] = []

    async def lose_first_response(connection: Any, namespace: Any, batch: Any) -> None:
        kept = [each.attempt.traceback for each in batch]
        await genuine(connection, namespace, batch)
        if len(lost) < 2:
            lost.append(len(batch))
            for each, traceback in zip(batch, kept, strict=True):
                each.attempt.traceback = traceback
            raise psycopg.OperationalError("the connection broke before the response")

    monkeypatch.setattr(batches, "store_tracebacks", lose_first_response)
    run = await here.run("fall")
    assert lost == [1, 1]
    assert (run.state, run.attempt) == ("failed", 2)
    assert await stored(here, run.id, "token") == [(1,), (2,)]
    assert logged(caplog, "run.write_refused") == []


async def test_an_attempt_whose_run_was_taken_over_stores_no_traceback(here: LocalInstance) -> None:
    with here.without_comparison():
        run_id = await here.trigger("fall", {"seconds": 1})
        await here.attempt(run_id)
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s RETURNING 1", run_id)
        writer = here.engine.executor.writer
        await soon(lambda: here.sql("SELECT 1 WHERE %s", writer.fenced["completion"] == 1))
    assert await here.sql("SELECT * FROM run_tracebacks") == []


async def test_a_traceback_contains_no_secret_no_statement_and_no_row(here: LocalInstance) -> None:
    for name, payload, ends in (
        ("misbehave", {"how": "secret"}, "\nValueError: password=***"),
        ("write-twice", None, '\nUniqueViolation: duplicate key value violates unique constraint "mails_address_key"'),
    ):
        run = await here.run(name, payload)
        ((error, traceback),) = await stored(here, run.id)
        assert error == run.error
        assert traceback.endswith(ends)
        for hidden in ("hunter2", trial_actions.ADDRESS, "DETAIL", "[SQL", "[parameters"):
            assert hidden not in error + traceback


async def test_the_traceback_of_a_timeout_shows_where_the_action_waited(here: LocalInstance) -> None:
    run = await here.run("hang")
    ((error, traceback),) = await stored(here, run.id)
    assert error == "exceeded its deadline of 0.3 s"
    assert f'File "{redact(str(trial_actions.__file__))}", line' in traceback
    assert "in hang\n    await asyncio.sleep(3600)\n" in traceback
    assert traceback.endswith("\nCancelledError")


async def test_no_exception_prevents_a_bounded_traceback(here: LocalInstance) -> None:
    for how in trial_faults.RAISED:
        run = await here.run("misbehave", {"how": how})
        assert run.state == "failed"
        for error, traceback in await stored(here, run.id):
            assert 0 < len(error) <= batches.MAX_HEADLINE, how
            assert 0 < len(traceback) < MAX_TRACEBACK + 50, how


@pytest.mark.parametrize(
    ("how", "kept"), [("gives-up", []), ("later-nan", []), ("gives-up-because", ["KeyError: 'parcel'"])]
)
async def test_what_an_action_says_itself_has_a_traceback_only_with_a_cause(
    here: LocalInstance, how: str, kept: list[str]
) -> None:
    run = await here.run("misbehave", {"how": how})
    assert [traceback.split("\n")[0] for _, traceback in await stored(here, run.id)] == kept


async def test_an_attempt_that_is_cancelled_on_request_has_no_traceback(here: LocalInstance) -> None:
    run_id = await here.trigger("nap", {"seconds": 60})
    await here.attempt(run_id)
    async with here.running.context.database.autocommit() as connection:
        await cancel_run(connection, here.running.context.database.namespace, run_id)
    assert (await here.ended(run_id)).state == "cancelled"
    assert await stored(here, run_id) == []


async def test_a_run_keeps_the_tracebacks_of_its_last_claims_only(here: LocalInstance) -> None:
    attempts = [await here.attempt(await here.trigger("nap", {"seconds": 60})) for _ in range(2)]
    with here.without_comparison():
        for attempt, token in zip(attempts, (100, 1), strict=True):
            attempt.token, attempt.traceback = token, "Traceback"
            await here.sql("UPDATE runs SET token = %s WHERE id = %s RETURNING 1", token, attempt.run_id)
            await here.sql(
                "INSERT INTO run_tracebacks (run_id, token, attempt, error, traceback) "
                "SELECT %s, %s - n, 1, 'former', 'former' FROM generate_series(1, 15) AS n RETURNING 1",
                attempt.run_id,
                token - 10 if token > 10 else token,
            )
        database = here.running.context.database
        async with database.autocommit() as connection:
            batch = [batches.Returned(attempt, False, None, "Error") for attempt in attempts]
            await batches.store_tracebacks(connection, database.namespace, batch)
        first, second = [await stored(here, attempt.run_id, "token") for attempt in attempts]
    assert MAX_TRACEBACKS == 20
    assert [token for (token,) in first] == [*range(81, 90), 100]
    assert [token for (token,) in second] == [*range(-14, 1), 1]
    assert {attempt.traceback for attempt in attempts} == {None}, "what is stored is not sent again"


async def test_a_traceback_that_postgresql_refuses_does_not_change_how_the_run_ends(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failures, "stored_traceback", lambda _: "a\x00b")
    run = await here.run("fail")
    assert (run.state, run.attempt, run.error) == ("failed", 3, "ValueError: the parcel\\x00is torn")
    assert await stored(here, run.id) == []
    assert [each["what"] for each in logged(caplog, "run.write_refused")] == ["returned", "returned", "ended"]


async def test_tracebacks_survive_the_retry_of_an_operator_and_are_deleted_with_their_run(here: LocalInstance) -> None:
    kept = await here.run("misbehave", {"how": "nul"})
    run = await here.run("misbehave", {"how": "nul"})
    async with here.running.context.database.autocommit() as connection:
        await retry_run(connection, here.running.context.database.namespace, run.id)
    assert (await here.ended(run.id)).attempt == 1
    assert await stored(here, run.id, "token, attempt") == [(1, 1), (2, 1)]
    await here.sql("UPDATE finished_runs SET expires_at = now() - interval '1 s' WHERE id = %s RETURNING 1", run.id)
    assert await here.engine.pruner.prune() == 1
    assert await here.sql("SELECT run_id FROM run_tracebacks") == [(kept.id,)]


# -- the page of the run ----------------------------------------------------------------------------------------------


async def test_the_page_of_a_run_shows_its_failed_attempts_newest_first(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhurried(monkeypatch)
    run = await here.run("fail")
    html = await get(here, f"/runs/{run.id}")
    assert re.findall(r'<details id="attempt-(\d)"( open)?>', html) == [("3", " open"), ("2", ""), ("1", "")]
    summaries = [unescape(re.sub("<.*?>", "", each)) for each in re.findall(r"<summary>(attempt .*?)</summary>", html)]
    for number, summary in zip((3, 2, 1), summaries, strict=True):
        assert re.fullmatch(rf"attempt {number} on flotilla-1, .*: ValueError: the parcel\\x00is torn", summary)
    assert html.count("in fail\n") == 3
    assert "Failed attempts" not in await get(here, f"/runs/{(await here.run('echo')).id}")


async def test_a_key_with_the_scope_read_sees_no_tracebacks(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)
    async with local_instance(address, api_keys=f"{READ[1]},{OPERATE[1]}") as guarded:
        run = await guarded.run("fail")
        await sign_in(guarded, READ[0])
        html = await get(guarded, f"/runs/{run.id}")
        assert "to see their tracebacks" in html
        assert "trial_actions" not in html
        assert '<details id="attempt' not in html
        await sign_in(guarded, OPERATE[0])
        html = await get(guarded, f"/runs/{run.id}")
        assert "trial_actions" in html
        assert "to see their tracebacks" not in html


async def test_the_command_line_shows_the_latest_traceback_of_a_run_that_has_an_error(here: LocalInstance) -> None:
    failed, well = await here.run("fail"), await here.run("echo")
    settings = here.running.context.settings
    shown = dict(runs.details(*await runs.find_run(settings, failed.id)))
    assert shown["traceback"].startswith("attempt 3 on flotilla-1, ")
    assert shown["traceback"].endswith(f"\n{failed.error}")
    assert "traceback" not in dict(runs.details(*await runs.find_run(settings, well.id)))
