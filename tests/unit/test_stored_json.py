"""Stored JSON can be read again by all its readers."""

import json
import time
from datetime import timedelta
from typing import Any

import pydantic_core
import pytest

from app.fleet import TryAgain
from app.fleet.db.stored_json import MAX_DEPTH, MAX_DIGITS, why_unreadable
from app.fleet.duration import MAX_DURATION


def nested(depth: int, inner: Any = 1) -> Any:
    for number in range(depth):
        inner = [inner] if number % 2 else {"[": inner}
    return inner


@pytest.mark.parametrize("sign", ["", "-"])
def test_an_integer_may_have_as_many_digits_as_all_parsers_accept(sign: str) -> None:
    longest = sign + "9" * MAX_DIGITS
    assert why_unreadable(f'{{"a": {longest}}}') is None
    assert json.loads(longest)
    assert why_unreadable(f'{{"a": [{longest}0]}}') == "it has an integer of more than 4300 digits"


def test_digits_within_a_string_are_not_an_integer() -> None:
    text = pydantic_core.to_json({"a": "1" * 5000, "b": ['\\"', "2" * 5000]}).decode()
    assert why_unreadable(text) is None


def test_a_value_of_the_maximum_depth_can_be_serialised_within_a_page() -> None:
    text = json.dumps(nested(MAX_DEPTH))
    assert why_unreadable(text) is None
    assert pydantic_core.to_json({"items": [{"result": json.loads(text)}]})
    assert why_unreadable(json.dumps(nested(MAX_DEPTH + 1))) == "it is nested more than 200 deep"
    assert why_unreadable(json.dumps([[1]] * 1000)) is None
    assert why_unreadable(json.dumps(["[" * 1000] * 10)) is None


def test_checking_a_text_of_the_maximum_length_is_fast() -> None:
    began = time.process_time()
    for text in ("9" * 4300 + " ", "[1]," * 10, '"\\"', "[", "x"):
        why_unreadable(text * (1_000_000 // len(text)))
    # A quadratic search would take minutes.
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "after", [-1, float("nan"), float("inf"), MAX_DURATION + 1, 10**400, "soon", timedelta.max, [], True]
)
def test_an_invalid_retry_delay_is_refused_by_the_constructor(after: Any) -> None:
    with pytest.raises(ValueError, match=r"a wait must be from 0 s to 366d|is not a duration|is no duration"):
        TryAgain("later", after=after)


@pytest.mark.parametrize(
    ("after", "seconds"),
    [(None, None), (0, 0), (1.5, 1.5), ("1h30m", 5400), (timedelta(minutes=1), 60), (MAX_DURATION, MAX_DURATION)],
)
def test_a_retry_delay_may_have_any_form_of_a_duration(after: Any, seconds: float | None) -> None:
    assert TryAgain("later", after=after).after == seconds
