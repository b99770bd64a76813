"""Declaring actions: everything that is wrong is said at once, with the name; nothing is found out in production."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from app.fleet import FleetError, PayloadInvalid, Run, action, limit, trigger
from app.fleet.coordination.permits import Limit
from app.fleet.duration import Rate, format_rate
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.errors import ActionInvalid, ActionUnknown, SettingsError


class Parcel(BaseModel):
    weight: int
    label: str = ""


def declare(name: str = "tick", **options: Any) -> Action[Any]:
    @action(name, **options)
    async def tick(_: Run) -> None: ...

    return tick


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cron": "never"}, "the cron expression 'never' is not valid"),
        ({"cron": "* * * * *", "timezone": "Nowhere"}, "no time zone 'Nowhere'"),
        ({"every": "soon"}, "'soon' is not a duration"),
        ({"misfire": "maybe"}, "`misfire` is 'maybe', and must be one of 'once', 'all', 'skip'"),
        ({"overlap": "twice"}, "`overlap` is 'twice'"),
        ({"retries": -1}, "`retries` is -1"),
        ({"concurrency": 0}, "`concurrency` is 0, and must be 1 or more; to stop an action, pause it"),
        ({"rate": "fast"}, "'fast' is not a rate: write it like '10/s'"),
        ({"rate": "0/s"}, "'0/s' is not a rate"),
        ({"rate": 20}, "20 is not a rate"),
        ({"rate": "10/s", "burst": 0}, "`burst` is 0, and must be a whole number from 1 to 1000000"),
        ({"rate": "10/s", "burst": 1_000_001}, "`burst` is 1000001"),
        ({"rate": "10/s", "burst": 1.5}, "`burst` is 1.5"),
        ({"rate": "10/s", "burst": True}, "`burst` is True"),
        ({"rate": "1/d", "burst": 1000}, "`burst` is 1000, which at 1/d is more than a year's worth"),
        ({"burst": 1}, "`burst` is 1, and there is no `rate`: give both, or neither"),
        ({"priority": 9999}, "`priority` is 9999"),
        ({"timeout": 0}, "`timeout` is 0 s"),
        ({"retention": "never"}, "`retention`: 'never' is not a duration"),
    ],
)
def test_an_option_that_is_wrong_is_said_with_the_actions_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ActionInvalid) as refused:
        declare("shipping", **options)
    assert "the action 'shipping' (tests.unit.test_actions." in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["", "Shipping", "9lives", "a b", "x" * 101, "ü"])
def test_a_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(ActionInvalid, match="a name is"):
        declare(name)


def test_a_function_takes_the_run_and_nothing_else() -> None:
    with pytest.raises(ActionInvalid, match="takes one argument, the run"):

        @action("none")  # type: ignore[arg-type]
        async def none() -> None: ...

    with pytest.raises(ActionInvalid, match="is a `Run` or a `Run\\[Payload\\]`"):

        @action("other")  # type: ignore[arg-type]
        async def other(_: int) -> None: ...

    with pytest.raises(ActionInvalid, match="cannot be a generator"):

        @action("many")
        async def many(_: Run) -> Any:
            yield 1


def test_an_action_is_a_function_still() -> None:
    @action("double")
    def double(run: Run[int]) -> int:
        """Say it twice."""
        return run.payload * 2

    class Stub:
        payload = 21

    assert double(Stub()) == 42  # type: ignore[arg-type]
    assert double.summary == "Say it twice."
    assert double.blocking


# -- payloads ---------------------------------------------------------------------------------------------------------


def typed() -> Action[Parcel]:
    @action("weigh")
    async def weigh(_: Run[Parcel]) -> None: ...

    return weigh


def test_a_payload_is_checked_and_what_it_lacks_is_filled_in() -> None:
    assert typed().encode({"weight": "3"}) == '{"weight":3,"label":""}'
    assert typed().encode(Parcel(weight=4)) == '{"weight":4,"label":""}'
    assert typed().decode('{"weight":3}') == Parcel(weight=3)


def test_a_payload_that_does_not_fit_names_the_field_and_keeps_the_value_to_itself() -> None:
    with pytest.raises(PayloadInvalid) as refused:
        typed().encode({"weight": "hunter2"})
    assert refused.value.errors == [
        {
            "field": "payload.weight",
            "message": "Input should be a valid integer, unable to parse string as an integer",
        }
    ]
    assert "hunter2" not in str(refused.value)
    with pytest.raises(PayloadInvalid, match=r"payload\.weight: Field required"):
        typed().encode(None)


def test_without_a_type_any_json_object_is_a_payload() -> None:
    plain = declare()
    assert plain.encode({}) is None
    assert plain.encode({"a": [1]}) == '{"a":[1]}'
    assert plain.encode(Parcel(weight=1)) == '{"weight":1,"label":""}'
    for wrong in ([1], "text", 7):
        with pytest.raises(PayloadInvalid):
            plain.encode(wrong)
    with pytest.raises(PayloadInvalid, match="cannot be written as JSON"):
        plain.encode({"a": object()})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_has_not_is_refused_and_not_made_null(number: float) -> None:
    class Measure(BaseModel):
        metres: float | None

    @action("measure")
    async def measured(_: Run[Measure]) -> None: ...

    plain = declare()
    for given in ({"a": number}, {"a": [{"b": (None, number)}]}):
        with pytest.raises(PayloadInvalid, match="NaN or infinity"):
            plain.encode(given)
    with pytest.raises(PayloadInvalid, match="NaN or infinity"):
        measured.encode(Measure(metres=number))
    assert measured.encode(Measure(metres=None)) == '{"metres":null}'


def test_a_scheduled_action_can_do_without_a_payload() -> None:
    with pytest.raises(ActionInvalid, match="on a schedule it is given no payload, so each field needs a default"):

        @action("weigh", every="1h")
        async def weigh(_: Run[Parcel]) -> None: ...


# -- options that are numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "interval"), [("10/s", 0.1), ("100/m", 0.6), ("5/10s", 2.0), ("1/h", 3600.0), ("2/ms", 0.0005)]
)
def test_a_rate_is_so_many_in_so_long_one_at_once_unless_a_burst_is_given(text: str, interval: float) -> None:
    assert Rate.parse(text) == Rate(interval, 1)
    assert Rate.parse(text, 7) == Rate(interval, 7)


@pytest.mark.parametrize("text", ["20/s", "5/10s", "1/d"])
def test_an_action_and_a_limit_read_a_rate_and_a_burst_in_the_same_way(text: str) -> None:
    default = inspect.signature(limit).parameters["burst"].default
    for declared, burst in ((declare(rate=text), default), (declare(rate=text, burst=7), 7)):
        limited = Limit.of("tides", text, burst)
        assert declared.rate == Rate(limited.interval, limited.burst)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        *[(text, text) for text in ("20/s", "100/m", "100/h", "1/d", "3/7s", "1/7h", "7/365d", "1/30d", "1000/7s")],
        *[("60/m", "1/s"), ("5/10s", "30/m"), ("5/ms", "5000/s"), ("24/d", "1/h"), ("999999999/s", "999999999/s")],
    ],
)
def test_a_rate_is_written_as_it_may_be_declared(text: str, written: str) -> None:
    interval = Rate.parse(text).interval
    assert format_rate(interval) == written
    assert Rate.parse(written).interval == pytest.approx(interval)


# -- finding them -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `shelf`, to put modules into."""
    package = tmp_path / "shelf"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [each for each in sys.modules if each.partition(".")[0] == "shelf"]:
        del sys.modules[name]


DECLARED = "from app.fleet import Run, action\n\n@action({name!r})\nasync def tick(_: Run) -> None: ...\n"


def test_a_package_is_loaded_with_all_it_contains(shelf: Path) -> None:
    (shelf / "one.py").write_text(DECLARED.format(name="one"))
    (shelf / "deep").mkdir()
    (shelf / "deep" / "__init__.py").write_text("from shelf.one import tick\n")
    (shelf / "deep" / "two.py").write_text(DECLARED.format(name="two"))
    assert sorted(each.name for each in Catalogue.load(["shelf"])) == ["one", "two"]


def test_two_actions_of_one_name_are_refused_with_both_places(shelf: Path) -> None:
    (shelf / "one.py").write_text(DECLARED.format(name="same"))
    (shelf / "two.py").write_text(DECLARED.format(name="same"))
    with pytest.raises(ActionInvalid, match=r"called 'same': shelf\.one\.tick and shelf\.two\.tick"):
        Catalogue.load(["shelf"])


def test_a_module_that_is_not_there_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match=r"FLOTILLA_ACTIONS names 'app\.nothing'"):
        Catalogue.load(["app.nothing"])


def test_a_module_that_lacks_something_itself_says_so_itself(shelf: Path) -> None:
    (shelf / "one.py").write_text("import no_such_thing\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        Catalogue.load(["shelf"])


def test_an_unknown_action_is_said_with_where_to_look() -> None:
    with pytest.raises(ActionUnknown, match="`flotilla actions`"):
        Catalogue({})["nothing"]


@pytest.mark.anyio
async def test_a_trigger_outside_of_a_service_says_where_it_belongs() -> None:
    with pytest.raises(FleetError, match="are for the code of a running service"):
        await trigger("tick")
    with pytest.raises(FleetError, match="are for the code of a running service"):
        await declare().trigger()
