"""Actions that only tests need: for each thing that a user's may do, well or badly.

What they do is written into `public.effects`, which a test makes when it wants to see it.
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
    Held,
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
    session,
    trigger,
)
from app.fleet.cluster.link import clock

EFFECTS = "CREATE TABLE public.effects (run_id bigint, attempt int, token bigint, instance text, note text)"
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


@action("leak", retries=0)
async def leak(_: Run) -> None:
    raise GiveUp("postgresql://u:sekret@h, password=hunter2 it said")


@action("write-twice", retries=0)
async def write_twice(_: Run) -> None:
    async with session() as own:
        await own.execute(text("CREATE TEMPORARY TABLE mails (address text UNIQUE) ON COMMIT DROP"))
        for _number in range(2):
            await own.execute(text("INSERT INTO mails VALUES (:address)"), {"address": "ann@example.org"})


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
    time.sleep(8)


@action("block", timeout="2s", retries=0)
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
    """Leave an effect in the transaction that completes the run."""
    await run.emit("noting")
    await asyncio.sleep(run.payload.get("seconds", 0))
    await opened(run.payload.get("gate"))
    async with run.commit({"noted": True}) as transaction:
        await transaction.execute(EFFECT, effect(run, "committed"))


@action("step", retry_delay="20ms")
async def step(run: Run) -> None:
    """Be one of a line: leave an effect when it begins, and one in the transaction that completes it."""
    async with session() as transaction:
        await transaction.execute(EFFECT, effect(run, f"{run.order_by} began"))
    await asyncio.sleep(run.payload.get("seconds", 0))
    if run.attempt <= run.payload.get("failures", 0):
        raise TryAgain("not yet", after=run.payload.get("after"))
    async with run.commit() as transaction:
        await transaction.execute(EFFECT, effect(run, f"{run.order_by} ended"))


@action("note-in-thread")
def note_in_thread(run: Run) -> None:
    time.sleep(run.payload.get("seconds", 0))

    def write(transaction: Session) -> None:
        transaction.execute(EFFECT, effect(run, "committed"))

    run.blocking.commit(write)


@action("walk")
async def walk(run: Run) -> dict[str, Any]:
    """Take many steps, with a checkpoint after each; the last one when the file `gate` is there, if there is one."""
    steps = run.payload.get("steps", 20)
    done = run.state["done"] if run.state else 0
    seen = run.state["seen"] if run.state else []
    instance = str(os.getpid())
    for step in range(done, steps):
        await asyncio.sleep(run.payload.get("seconds", 0.1))
        while step + 1 == steps and not is_open(run.payload.get("gate")):
            # Where it can be paused at once.
            await run.checkpoint({"done": step, "seen": seen})
            await asyncio.sleep(0.05)
        if instance not in seen:
            seen.append(instance)
        await run.progress((step + 1) / steps)
        await run.checkpoint({"done": step + 1, "seen": seen})
    return {"steps": steps, "instances": seen, "attempt": run.attempt}


async def opened(gate: str | None) -> None:
    while not is_open(gate):  # noqa: ASYNC110 — a file tells nobody that it is there
        await asyncio.sleep(0.05)


def is_open(gate: str | None) -> bool:
    return gate is None or Path(gate).exists()


@action("relay")
async def relay(run: Run) -> int:
    return await trigger("echo", run.payload)


@action("late")
async def late(run: Run) -> str:
    """Write once more after the run was taken over, whatever its cancellation says; another attempt just ends."""
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
        async with session() as guarded:
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
    other = await trigger(run.payload["of"], {"x": 1} if run.payload["of"] == "echo" else None)
    try:
        return {"said": await result(other, timeout=run.payload.get("timeout", 10))}
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
    """Leave an effect with a lock's token; `late` does so when the lock is lost, whatever its cancellation says."""
    async with lock("trial", ttl="3s", on_loss="tell") as held:
        if run.payload.get("late") and run.attempt == 1:
            while not held.lost.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await held.lost.wait()
        # In a task of its own: whatever cancels the attempt at this moment, the late write is tried.
        writing = asyncio.create_task(write_under_lock(run, held))
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(writing)
        writing.result()
        return held.token


async def write_under_lock(run: Run, held: Held) -> None:
    async with session() as transaction:
        await transaction.execute(EFFECT, {**effect(run, "locked"), "token": held.token})
        if run.payload.get("guarded", True):
            await held.guard(transaction)


@action("hold-lock")
async def hold_lock(run: Run) -> str:
    """Hold a lock for long; an attempt after the first has nothing to do."""
    if run.attempt > 1:
        return "another held it"
    async with lock("trial"):
        await asyncio.sleep(3600)
    return "held it"


@action("strike", concurrency=6)
async def strike(run: Run) -> None:
    """Take a lock again and again, and leave an effect each time; what was lost on the way is tried again."""
    done = run.state or 0

    async def leave(held: Held) -> None:
        with contextlib.suppress(LockLost):
            async with session() as transaction:
                await transaction.execute(EFFECT, {**effect(run, "struck"), "token": held.token})
                # Most of the time that it is held: whoever is frozen while holding it is frozen here.
                await asyncio.sleep(run.payload.get("dwell", 0))
                if run.payload.get("guarded", True):
                    await held.guard(transaction)

    while done < run.payload["times"]:
        with contextlib.suppress(LockLost):
            async with lock("trial", ttl="3s") as held:
                # As what runs in a thread: the cancellation does not reach it.
                await asyncio.shield(leave(held))
                done += 1
        if done % 10 == 0:
            await run.checkpoint(done)


@action("wear", retries=30, retry_delay="50ms")
async def wear(run: Run) -> None:
    """Leave an effect, by `run.commit` or in a guarded session; in its first attempt, with trouble if that is asked."""
    trouble = run.payload["trouble"] if run.attempt == 1 else None

    async def leave() -> None:
        async with run.commit() if run.payload["commit"] else session() as transaction:
            await transaction.execute(EFFECT, effect(run, "left"))
            if trouble == "idle":
                # Longer than the instance lets a transaction idle.
                await asyncio.sleep(1.5)
            if not run.payload["commit"]:
                await run.guard(transaction)

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
    """Have `workers` ask for permits until an instant, or until the file `gate` is there; return when they had them."""
    wanted, instants = run.payload, list[float]()

    async def ask() -> None:
        while not gate.done() and clock() < wanted.get("until", math.inf):
            await limit("trial", wanted["rate"], burst=wanted.get("burst", 1))
            instants.append(clock())
            if len(instants) == 10:
                await run.emit("served")

    # Without a gate, never done.
    gate = asyncio.ensure_future(opened(wanted["gate"]) if "gate" in wanted else asyncio.Future[None]())
    await asyncio.gather(*(ask() for _ in range(wanted["workers"])))
    return [round(instant, 5) for instant in instants]


@action("call", retries=0)
async def call(run: Run) -> str:
    """Call somebody, who answers, or does not, or lets the first one wait for ever."""
    async with breaker("trial", failures=1, rest=run.payload.get("rest", "100ms")):
        if run.payload["does"] == "fail":
            raise ConnectionError("nobody answers")
        if run.payload["does"] == "hang" and run.attempt == 1:
            await asyncio.sleep(3600)
        return "answered"
