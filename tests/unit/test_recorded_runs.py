"""`Run.for_test`: a handle for unit tests, which records what an action does, without a database."""

import asyncio
from typing import Any, assert_type, cast

import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import Run, action
from app.fleet.engine.actions.recorded import RecordedRun
from app.fleet.errors import EngineError, NotJson


class Wanted(BaseModel):
    place: str
    times: int = 2


@action("sound-for-test")
async def sound(run: Run[Wanted]) -> str:
    found: list[int] = run.last_checkpoint or []
    while len(found) < run.payload.times:
        found = [*found, run.attempt]
        await run.progress(len(found) / run.payload.times, run.payload.place)
        await run.checkpoint(found)
    async with run.commit({"found": found}):
        pass
    return run.payload.place


@action("log-for-test")
def log(run: Run) -> int:
    run.blocking.log("a line", "warning")
    run.blocking.checkpoint({"read": run.payload["size"]})
    return len(run.payload)


def test_the_handle_has_the_type_of_its_payload() -> None:
    assert_type(Run.for_test(payload=Wanted(place="bar")), RecordedRun[Wanted])
    assert_type(Run.for_test(), RecordedRun[dict[str, Any]])
    assert Run.for_test().payload == {}


async def test_what_an_action_does_is_recorded() -> None:
    run = Run.for_test(Wanted(place="bar"), session=cast("AsyncSession", object()))
    assert await sound(run) == "bar"
    assert run.checkpoints == [[1], [1, 1]]
    assert run.events == [("progress", {"done": 0.5, "text": "bar"}), ("progress", {"done": 1.0, "text": "bar"})]
    assert (run.committed, run.result) == (True, {"found": [1, 1]})


async def test_an_attempt_begins_at_the_given_checkpoint() -> None:
    run = Run.for_test(
        Wanted(place="bar"), attempt=3, last_checkpoint=[1], session=cast("AsyncSession", object()), action="sound"
    )
    await sound(run)
    assert (run.checkpoints, run.last_checkpoint) == ([[1, 3]], [1, 3])
    assert (run.attempt, run.max_attempts, run.action, run.trigger) == (3, 4, "sound", "code")


async def test_a_commit_without_a_session_says_what_to_do() -> None:
    run = Run.for_test(Wanted(place="bar", times=0))
    with pytest.raises(EngineError, match="needs a database: test this action with the fixture `instance`"):
        await sound(run)
    assert not run.committed


async def test_the_checks_are_those_of_a_real_handle() -> None:
    run = Run.for_test()
    with pytest.raises(NotJson):
        await run.checkpoint(object())
    with pytest.raises(EngineError, match="reserved"):
        await run.emit("state")
    assert (run.checkpoints, run.events) == ([], [])


async def test_an_action_that_is_asked_to_stop_stops_at_its_next_checkpoint() -> None:
    run = Run.for_test(Wanted(place="bar"))
    run.stopping.set()
    with pytest.raises(asyncio.CancelledError):
        await sound(run)
    assert run.checkpoints == [[1]]


def test_a_plain_function_is_tested_without_an_event_loop() -> None:
    run = Run.for_test({"size": 3})
    assert log(run) == 1
    assert run.events == [("log", {"level": "warning", "text": "a line"})]
    assert run.checkpoints == [{"read": 3}]


def test_a_plain_function_that_commits_is_referred_to_the_fixture() -> None:
    with pytest.raises(EngineError, match="fixture `instance`"):
        Run.for_test().blocking.commit(lambda session: session)
