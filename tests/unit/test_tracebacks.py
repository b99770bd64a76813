"""Tracebacks are written as Python writes them, but bounded, and without secrets, rows and values of variables."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from app.fleet.telemetry.redaction import redact
from app.fleet.telemetry.tracebacks import (
    FIRST_FRAMES,
    LAST_FRAMES,
    LEFT_OUT,
    MAX_TEXT,
    MAX_TRACEBACK,
    UNREADABLE,
    traceback_of,
)
from tests.support.trial_faults import RAISED, in_a_circle

# With a line that says how much is missing.
BOUND = MAX_TRACEBACK + 50


def raised(error: BaseException, depth: int = 0) -> BaseException:
    """Return the exception after it was raised within so many calls."""

    def fall(left: int) -> None:
        if left:
            fall(left - 1)
        raise error

    try:
        fall(depth)
    except BaseException:
        return error
    raise AssertionError


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return raised(error)


def test_a_traceback_names_each_line_and_ends_with_the_exception() -> None:
    lines = traceback_of(raised(ValueError("the parcel is torn"))).split("\n")
    assert lines[0] == "Traceback (most recent call last):"
    # Another test of this process may have a secret that is a part of the path.
    assert re.fullmatch(rf'  File "{re.escape(redact(__file__))}", line \d+, in raised', lines[1])
    assert lines[2] == "    fall(depth)"
    assert lines[-2:] == ["    raise error", "ValueError: the parcel is torn"]


def test_the_exception_behind_another_one_comes_before_it() -> None:
    text = traceback_of(caused(KeyError("parcel"), raised(OSError("the disk is full"))))
    cause, _, effect = text.partition("\n\nThe above exception was the direct cause of the following exception:\n\n")
    assert cause.endswith("\nOSError: the disk is full")
    assert effect.startswith("Traceback (most recent call last):\n")
    assert effect.endswith("\nKeyError: 'parcel'")

    error = ValueError("torn")
    error.__context__ = OSError("the disk is full")
    handling = "OSError: the disk is full\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert traceback_of(error) == f"{handling}ValueError: torn"
    error.__suppress_context__ = True
    assert traceback_of(error) == "ValueError: torn"


def test_the_members_of_a_group_are_shown_with_their_own_tracebacks() -> None:
    text = traceback_of(BaseExceptionGroup("many", [raised(ValueError("a")), TypeError("b")]))
    assert text.startswith("ExceptionGroup: many (2 sub-exceptions)\n  1 of this group:\n    Traceback")
    assert text.endswith("\n    ValueError: a\n  2 of this group:\n    TypeError: b")


def test_notes_are_shown() -> None:
    error = ValueError("torn")
    error.add_note("parcel 17,\npassword=hunter2")
    assert traceback_of(error) == "ValueError: torn\nparcel 17, password=***"


def test_of_many_frames_the_first_and_the_last_are_kept() -> None:
    text = traceback_of(raised(ValueError("deep"), depth=500))
    assert text.count("  File ") == FIRST_FRAMES + LAST_FRAMES
    assert f"… ({502 - FIRST_FRAMES - LAST_FRAMES} more frames) …" in text
    assert text.index("in raised") < text.index("more frames") < text.index("raise error")


def test_of_many_exceptions_the_nearest_are_kept() -> None:
    error = raised(ValueError("0"))
    for number in range(1, 20):
        error = caused(ValueError(str(number)), error)
    text = traceback_of(error)
    assert text.startswith(LEFT_OUT)
    assert re.findall(r"ValueError: (\d+)", text) == ["15", "16", "17", "18", "19"]
    group = traceback_of(ExceptionGroup("many", [ValueError(str(number)) for number in range(20)]))
    assert group.endswith(f"ValueError: 3\n  {LEFT_OUT}")


def test_an_exception_that_led_to_itself_is_shown_once() -> None:
    assert re.findall(r"ValueError: (\w+)", traceback_of(in_a_circle())) == ["two", "one"]


def test_a_long_traceback_keeps_its_end() -> None:
    error: BaseException = ValueError("x" * 5_000_000)
    for letter in "abcd":
        error = caused(ValueError(letter * 100_000), raised(error, depth=100))
    text = traceback_of(error)
    assert re.match(r"… \(\d+ more characters\) …\n", text)
    assert MAX_TRACEBACK < len(text) < BOUND
    assert text.endswith(f"\nValueError: {'d' * (MAX_TEXT - len('ValueError: '))}")


@pytest.mark.parametrize("make", RAISED.values(), ids=RAISED)
def test_no_exception_prevents_a_text_that_can_be_stored(make: Callable[[], BaseException]) -> None:
    text = traceback_of(raised(make()))
    assert 0 < len(text) < BOUND
    assert "\x00" not in text
    assert text.encode().decode() == text


def test_an_exception_whose_own_attributes_raise_has_no_traceback_and_does_no_harm() -> None:
    class Evil(Exception):
        @property
        def __cause__(self) -> Any:  # type: ignore[override]
            raise KeyboardInterrupt

    assert traceback_of(Evil("torn")) == UNREADABLE


def test_a_traceback_contains_no_secret_no_row_and_no_value_of_a_variable() -> None:
    def send(parcel: str) -> None:
        password = "hunter2" + parcel  # noqa: F841
        connect(password="hunter2")  # type: ignore[name-defined]  # noqa: F821

    def store(address: str) -> None:
        raise IntegrityError("INSERT INTO mails VALUES (%(a)s)", {"a": address}, ValueError(f"it has {7}"))

    for do, value in ((send, "the value"), (store, "ann@" + "example.org")):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            do(value)
        text = traceback_of(caught.value)
        assert f"in {do.__name__}" in text
        for hidden in ("hunter2", value, "[SQL", "[parameters"):
            assert hidden not in text
    assert text.endswith("\nValueError: it has 7")


async def cancelled() -> BaseException:
    async def wait() -> None:
        await asyncio.sleep(3600)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError as error:
        return error
    raise AssertionError


def test_the_traceback_of_a_cancelled_task_shows_where_it_waited() -> None:
    assert "in wait\n    await asyncio.sleep(3600)\n" in traceback_of(asyncio.run(cancelled()))
