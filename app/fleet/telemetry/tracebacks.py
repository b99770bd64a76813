"""Tracebacks as texts that are stored and shown: bounded, redacted, and without the values of variables.

The layout is Python's own: the exception behind another one comes before it, the members of a group come after it.

    part             what is kept
    an exception     its class and text as `describe` writes them, `MAX_TEXT` characters; `MAX_NOTES` notes
    its frames       the first `FIRST_FRAMES` (the action's own code) and the last `LAST_FRAMES` (where it was raised)
    a frame          file, line, function, and `MAX_LINE` characters of the source line
    exceptions       `MAX_EXCEPTIONS`: the raised one, those behind it, the members of groups
    the whole        the last `MAX_TRACEBACK` characters

Each text is redacted before it is cut, because a part of a secret is not recognised. `describe` leaves out what a
database error says about statements and rows. Control characters, NUL and lone surrogates become escapes, so PostgreSQL
can store every result.

Python's `traceback` module is not used: it writes the whole text of an exception, reads the attributes of objects to
suggest other names, and parses source lines to underline a part of them. That takes 0.3 to 14 ms, on the event loop; a
traceback from here takes 0.02 to 0.1 ms when its frames are known, and 0.02 ms more for each new one.

Nothing that the methods of an exception do leaves `traceback_of`.
"""

import linecache
import textwrap
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from types import TracebackType

from app.fleet.telemetry.redaction import clip, describe, printable, redact

MAX_TRACEBACK = 8_000
MAX_EXCEPTIONS = 5
FIRST_FRAMES = 5
LAST_FRAMES = 15
MAX_LINE = 300
MAX_TEXT = 1_000
MAX_NOTES = 3

CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
LEFT_OUT = "(further exceptions are left out)"
UNREADABLE = "(the traceback cannot be read)"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, with those of the exceptions that led to it."""
    try:
        text = "\n".join(parts(error, []))
    except BaseException:  # noqa: BLE001 — the exception is the action's; its methods may do anything
        return UNREADABLE
    if len(text) <= MAX_TRACEBACK:
        return text
    return f"… ({len(text) - MAX_TRACEBACK} more characters) …\n{text[-MAX_TRACEBACK:]}"


def led_to(error: BaseException) -> BaseException | None:
    """Return the exception behind another one: its cause, or the one that was being handled when it was raised."""
    return error.__context__ if error.__cause__ is None and not error.__suppress_context__ else error.__cause__


def parts(error: BaseException, seen: list[BaseException]) -> Iterator[str]:
    """Yield the parts of a traceback; `seen` has the exceptions that it contains already."""
    seen.append(error)
    behind = led_to(error)
    if behind is not None and not any(behind is each for each in seen):
        if len(seen) < MAX_EXCEPTIONS:
            yield from parts(behind, seen)
            yield f"\n{CAUSE if behind is error.__cause__ else CONTEXT}\n"
        else:
            yield f"{LEFT_OUT}\n"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        yield from frames(error.__traceback__)
    yield printable(describe(error))[:MAX_TEXT]
    for note in getattr(error, "__notes__", ())[:MAX_NOTES]:
        yield printable(redact(" ".join(clip(note).split())))[:MAX_TEXT]
    for number, member in enumerate(error.exceptions if isinstance(error, BaseExceptionGroup) else (), 1):
        if len(seen) == MAX_EXCEPTIONS:
            yield f"  {LEFT_OUT}"
            break
        yield f"  {number} of this group:"
        yield textwrap.indent("\n".join(parts(member, seen)), "    ")


def frames(trace: TracebackType | None) -> Iterator[str]:
    first: list[TracebackType] = []
    last: deque[TracebackType] = deque(maxlen=LAST_FRAMES)
    count = 0
    while trace is not None:
        (first if count < FIRST_FRAMES else last).append(trace)
        count += 1
        trace = trace.tb_next
    yield from map(frame, first)
    if left_out := count - len(first) - len(last):
        yield f"  … ({left_out} more frames) …"
    yield from map(frame, last)


def frame(trace: TracebackType) -> str:
    code = trace.tb_frame.f_code
    return place(code.co_filename, trace.tb_lineno or 0, code.co_name)


# Cached, because thousands of attempts fail in the same lines when a dependency is down.
@lru_cache(maxsize=1024)
def place(filename: str, line: int, function: str) -> str:
    source = linecache.getline(filename, line).strip()
    text = redact(f'  File "{filename}", line {line}, in {function}\n    {source}')
    return "\n".join(printable(each)[:MAX_LINE] for each in text.rstrip().split("\n"))
