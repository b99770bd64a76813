"""Actions for tests: one for each thing that a user's action may do, correctly or not.

They write their effects into `public.effects`, a table that a test creates if it needs the effects.
"""

import asyncio
import contextlib
import logging
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.orm import Session

from app.fleet import (
    FleetError,
    GiveUp,
    HeldLock,
    LockLost,
    Run,
    RunFailed,
    TryAgain,
    action,
    breaker,
    limit,
    lock,
    once,
    result,
    transaction,
    trigger,
)
from app.fleet.cluster.link import clock
from app.fleet.telemetry.logs import event_log

EFFECTS = "CREATE TABLE public.effects (run_id bigint, attempt int, token bigint, instance text, note text)"
ADDRESS = "ann@example.org"
EFFECT = text("INSERT INTO public.effects VALUES (:run, :attempt, :token, :instance, :note)")


def effect(run: Run[Any], note: str) -> dict[str, Any]:
    instance = os.environ.get("FLOTILLA_INSTANCE_NAME", str(os.getpid()))
    return {"run": run.id, "attempt": run.attempt, "token": run.token, "instance": instance, "note": note}


class Parcel(BaseModel):
    weight: int
    label: str = ""


@action("noop")
async def noop(_: Run) -> None:
    """Do nothing."""


@action("echo")
async def echo(run: Run) -> dict[str, Any]:
    return run.payload


@action("weigh")
async def weigh(run: Run[Parcel]) -> int:
    return run.payload.weight


@action("weigh-in-thread")
def weigh_in_thread(run: Run[Parcel]) -> int:
    time.sleep(0.01)
    return run.payload.weight


@action("nap")
async def nap(run: Run) -> str:
    await asyncio.sleep(run.payload.get("seconds", 0.1))
    return "rested"


@action("spawn")
async def spawn(run: Run) -> int:
    event_log(__name__).warning("trial.spawns")
    return await trigger("echo", {"by": run.id})


@action("sleep-once")
async def sleep_once(run: Run) -> None:
    """Sleep in the first attempt, until its instance is killed."""
    if run.attempt == 1:
        await asyncio.sleep(3600)


@action("fail", retries=2, retry_delay="50ms")
async def fail(_: Run) -> None:
    raise ValueError("the parcel\x00is torn")


@action("fail-once", retries=1, retry_delay="50ms")
async def fail_once(run: Run) -> int:
    if run.attempt == 1:
        raise TryAgain("not yet", after=0.05)
    return run.attempt


@action("give-up")
async def give_up(_: Run) -> None:
    raise GiveUp("there is no such parcel")


@action("deliver", retries=0)
async def deliver(run: Run) -> None:
    """Fail until the bug is mended: until there is a file with this name."""
    if not is_open(run.payload["mended"]):
        raise AttributeError(f"parcel {run.id} has no attribute 'weight'")


@action("leak", retries=0)
async def leak(_: Run) -> None:
    raise GiveUp("postgresql://u:sekret@h, password=hunter2 it said")


@action("write-twice", retries=0)
async def write_twice(_: Run) -> None:
    async with transaction() as own:
        await own.execute(text("CREATE TEMPORARY TABLE mails (address text UNIQUE) ON COMMIT DROP"))
        for _number in range(2):
            await own.execute(text("INSERT INTO mails VALUES (:address)"), {"address": ADDRESS})


@action("not-json")
async def not_json(_: Run) -> object:
    return object()


@action("quit", retries=0)
async def quit_(_: Run) -> None:
    raise SystemExit(3)


@action("hang", timeout="300ms", retries=0)
async def hang(_: Run) -> None:
    await asyncio.sleep(3600)


@action("deaf", timeout="300ms", retries=0)
async def deaf(_: Run) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@action("deaf-thread", timeout="300ms", retries=0)
def deaf_thread(_: Run) -> None:
    time.sleep(60)


@action("block", timeout="5s", retries=0)
async def block(run: Run) -> None:
    time.sleep(run.payload.get("seconds", 3))  # noqa: ASYNC251 — the mistake this action is for


@action("die")
async def die(_: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@action("alone", overlap="skip")
async def alone(run: Run) -> None:
    await asyncio.sleep(run.payload.get("seconds", 0.5))


@action("in-turn", overlap="queue")
async def in_turn(run: Run) -> None:
    await asyncio.sleep(run.payload.get("seconds", 0.05))


@action("two-at-once", concurrency=2)
async def two_at_once(run: Run) -> None:
    await asyncio.sleep(run.payload.get("seconds", 0.05))


@action("rated", rate="20/s")
async def rated(_: Run) -> None: ...


@action("note")
async def note(run: Run) -> None:
    """Write an effect in the transaction that completes the run."""
    await run.emit("noting")
    await asyncio.sleep(run.payload.get("seconds", 0))
    await opened(run.payload.get("gate"))
    async with run.commit({"noted": True}) as session:
        await session.execute(EFFECT, effect(run, "committed"))


@action("step", retry_delay="20ms")
async def step(run: Run) -> None:
    """An ordered run: write an effect when it begins, and one in the transaction that completes it."""
    async with transaction() as session:
        await session.execute(EFFECT, effect(run, f"{run.ordering_key} began"))
    await asyncio.sleep(run.payload.get("seconds", 0))
    await opened(run.payload.get("gate"))
    if run.attempt <= run.payload.get("failures", 0):
        raise TryAgain("not yet", after=run.payload.get("after"))
    async with run.commit() as session:
        await session.execute(EFFECT, effect(run, f"{run.ordering_key} ended"))


@action("note-in-thread")
def note_in_thread(run: Run) -> None:
    time.sleep(run.payload.get("seconds", 0))

    def write(session: Session) -> None:
        session.execute(EFFECT, effect(run, "committed"))

    run.blocking.commit(write)


@action("walk")
async def walk(run: Run) -> dict[str, Any]:
    """Take many steps with a checkpoint after each. With `gate`, take the last one only when that file exists."""
    steps = run.payload.get("steps", 20)
    done = run.last_checkpoint["done"] if run.last_checkpoint else 0
    seen = run.last_checkpoint["seen"] if run.last_checkpoint else []
    instance = str(os.getpid())
    for step in range(done, steps):
        await asyncio.sleep(run.payload.get("seconds", 0.1))
        while step + 1 == steps and not is_open(run.payload.get("gate")):
            # The run can be paused here at once.
            await run.checkpoint({"done": step, "seen": seen})
            await asyncio.sleep(0.05)
        if instance not in seen:
            seen.append(instance)
        await run.progress((step + 1) / steps)
        await run.checkpoint({"done": step + 1, "seen": seen})
    return {"steps": steps, "instances": seen, "attempt": run.attempt}


async def opened(gate: str | None) -> None:
    while not is_open(gate):  # noqa: ASYNC110 — a new file sends no notification
        await asyncio.sleep(0.05)


def is_open(gate: str | None) -> bool:
    return gate is None or Path(gate).exists()


@action("relay")
async def relay(run: Run) -> int:
    return await trigger("echo", run.payload)


@action("late")
async def late(run: Run) -> str:
    """Ignore the cancellation, and write once more after the run was taken over; other attempts end at once."""
    if run.attempt > 1:
        return "done by another"
    write = run.payload["write"]
    if write == "once":
        async with once("late", "key") as fresh:
            await oversleep()
            await fresh.session.execute(EFFECT, effect(run, "late"))
        return "late"
    await oversleep()
    if write == "checkpoint":
        await run.checkpoint({"late": True})
    elif write == "event":
        await run.emit("late")
    elif write == "guard":
        async with transaction() as guarded:
            await guarded.execute(EFFECT, effect(run, "late"))
            await run.guard(guarded)
    elif write == "commit":
        async with run.commit("late") as last:
            await last.execute(EFFECT, effect(run, "late"))
    return "late"


async def oversleep() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)


@action("sift", retry_delay="50ms")
async def sift(run: Run) -> str:
    """Process a key once. The first attempt may wait for a gate, or fail, with its effect written but not committed."""
    async with once("sift", run.payload["key"]) as fresh:
        if fresh:
            await fresh.session.execute(EFFECT, effect(run, "sifted"))
            if run.attempt == 1:
                await opened(run.payload.get("gate"))
                if run.payload.get("fail"):
                    raise ValueError("the sieve is torn")
    return fresh.state


@action("talk")
async def talk(_: Run) -> None:
    logging.getLogger("trial").warning("the parcel is heavy")


@action("speak")
async def speak(run: Run) -> None:
    await run.log("hello")
    await run.progress(0.5)
    await run.emit("noted", {"n": 1})


@action("chatter")
async def chatter(run: Run) -> None:
    """Say something `count` times, `pause` seconds apart, with `padding` letters; in attempt 1, `first` times."""
    count = run.payload.get("count", 10)
    for number in range(run.payload.get("first", count) if run.attempt == 1 else count):
        said = {"n": number, "attempt": run.attempt, "padding": "x" * run.payload.get("padding", 0)}
        await run.emit("said", said)
        await asyncio.sleep(run.payload.get("pause", 0.05))


@action("ask-another")
async def ask_another(run: Run) -> dict[str, Any]:
    other = await trigger(run.payload["of"], {"x": 1} if run.payload["of"] == "echo" else run.payload.get("given"))
    try:
        return {"said": await result(other, timeout=run.payload.get("timeout", 60))}
    except (RunFailed, TimeoutError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


@action("emit-badly")
async def emit_badly(run: Run) -> list[str]:
    refused = []
    for kind, data in (("big", "x" * 1_000_000), ("odd", object()), ("state", None), ("done", None), ("a\nb", None)):
        try:
            await run.emit(kind, data)
        except FleetError as error:
            refused.append(str(error))
    try:
        await run.log("oh", level="dire")  # type: ignore[arg-type]
    except FleetError as error:
        refused.append(str(error))
    await run.emit("still-here")
    return refused


@action("note-under-lock")
async def note_under_lock(run: Run) -> int:
    """Write an effect with the token of a lock; with `late`, after the lock is lost, ignoring the cancellation."""
    # The next holder, on a busy machine, keeps the lock for longer than it needs for its write.
    async with lock("trial", ttl="10s", on_loss="tell") as held:
        if run.payload.get("late") and run.attempt == 1:
            while not held.lost.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await held.lost.wait()
        # In a separate task, so that the late write is tried even if the attempt is cancelled at this moment.
        writing = asyncio.create_task(write_under_lock(run, held))
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(writing)
        writing.result()
        return held.token


async def write_under_lock(run: Run, held: HeldLock) -> None:
    async with transaction() as session:
        await session.execute(EFFECT, {**effect(run, "locked"), "token": held.token})
        if run.payload.get("guarded", True):
            await held.guard(session)


@action("hold-lock")
async def hold_lock(run: Run) -> str:
    """Hold a lock for a long time; later attempts have nothing to do."""
    if run.attempt > 1:
        return "another held it"
    async with lock("trial"):
        await asyncio.sleep(3600)
    return "held it"


@action("occupy")
async def occupy(run: Run) -> None:
    """Hold a session of the pool."""
    async with transaction() as session:
        await session.execute(text("SELECT 1"))
        await asyncio.sleep(run.payload["seconds"])


@action("strike", concurrency=6)
async def strike(run: Run) -> None:
    """Acquire a lock again and again, and write an effect each time; repeat an acquisition that was lost."""
    done = run.last_checkpoint or 0

    async def leave(held: HeldLock) -> None:
        with contextlib.suppress(LockLost):
            async with transaction() as session:
                await session.execute(EFFECT, {**effect(run, "struck"), "token": held.token})
                # Most of the holding time is here, so a process that is frozen while it holds the lock is frozen here.
                await asyncio.sleep(run.payload.get("dwell", 0))
                if run.payload.get("guarded", True):
                    await held.guard(session)

    while done < run.payload["times"]:
        with contextlib.suppress(LockLost):
            async with lock("trial", ttl="3s") as held:
                # As code in a thread, which the cancellation does not reach.
                await asyncio.shield(leave(held))
                done += 1
        if done % 10 == 0:
            await run.checkpoint(done)


@action("wear", retries=30, retry_delay="50ms")
async def wear(run: Run) -> None:
    """Write an effect, by `run.commit` or in a guarded session; on request, the first attempt has trouble."""
    trouble = run.payload["trouble"] if run.attempt == 1 else None

    async def leave() -> None:
        async with run.commit() if run.payload["commit"] else transaction() as session:
            await session.execute(EFFECT, effect(run, "left"))
            if trouble == "idle":
                # Longer than a transaction of the instance may be idle.
                await asyncio.sleep(1.5)
            if not run.payload["commit"]:
                await run.guard(session)

    leaving = asyncio.create_task(leave())
    if trouble == "cancelled":
        asyncio.get_running_loop().call_later(random.uniform(0, 0.01), leaving.cancel)
    try:
        await leaving
    except asyncio.CancelledError:
        if trouble is None or not leaving.cancelled():
            raise
        raise TryAgain("cancelled in its transaction", after="50ms") from None


@action("take-permits", retries=0)
async def take_permits(run: Run) -> list[float]:
    """Let `workers` acquire permits until a time, or until the file `gate` exists; return the times of the permits."""
    wanted, instants = run.payload, list[float]()

    async def ask() -> None:
        while not gate.done() and clock() < wanted.get("until", math.inf):
            await limit("trial", wanted["rate"], burst=wanted.get("burst", 1))
            instants.append(clock())
            if len(instants) == 10:
                await run.emit("served")

    # Without a gate, this is never true.
    gate = asyncio.ensure_future(opened(wanted["gate"]) if "gate" in wanted else asyncio.Future[None]())
    await asyncio.gather(*(ask() for _ in range(wanted["workers"])))
    return [round(instant, 5) for instant in instants]


@action("call", retries=0)
async def call(run: Run) -> str:
    """Call a dependency that answers, or fails, or lets the first call hang."""
    async with breaker("trial", failures=1, rest=run.payload.get("rest", "100ms")):
        if run.payload["does"] == "fail":
            raise ConnectionError("nobody answers")
        if run.payload["does"] == "hang" and run.attempt == 1:
            await asyncio.sleep(3600)
        return "answered"
