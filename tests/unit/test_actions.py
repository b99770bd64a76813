"""Declarations of actions: each mistake is refused when the module is loaded, with the name of the action."""

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
    ("options", "message"),
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
def test_an_invalid_option_is_refused_with_the_name_of_the_action(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ActionInvalid) as refused:
        declare("shipping", **options)
    assert "the action 'shipping' (tests.unit.test_actions." in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["", "Shipping", "9lives", "a b", "x" * 101, "ü"])
def test_an_invalid_name_of_an_action_is_refused(name: str) -> None:
    with pytest.raises(ActionInvalid, match="a name is"):
        declare(name)


def test_a_function_that_does_not_take_exactly_the_run_is_refused() -> None:
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


def test_an_action_can_still_be_called_as_a_function() -> None:
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


def test_a_payload_is_validated_and_completed_with_defaults() -> None:
    assert typed().encode({"weight": "3"}) == '{"weight":3,"label":""}'
    assert typed().encode(Parcel(weight=4)) == '{"weight":4,"label":""}'
    assert typed().decode('{"weight":3}') == Parcel(weight=3)


def test_the_error_of_an_invalid_payload_names_the_field_and_not_the_value() -> None:
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
def test_a_payload_with_nan_or_infinity_is_refused_and_not_replaced_by_null(number: float) -> None:
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


def test_a_scheduled_action_with_a_required_payload_field_is_refused() -> None:
    with pytest.raises(ActionInvalid, match="on a schedule it is given no payload, so each field needs a default"):

        @action("weigh", every="1h")
        async def weigh(_: Run[Parcel]) -> None: ...


# -- rates ------------------------------------------------------------------------------------------------------------


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


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package `shelf`, to which tests add modules."""
    package = tmp_path / "shelf"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [each for each in sys.modules if each.partition(".")[0] == "shelf"]:
        del sys.modules[name]


DECLARED = "from app.fleet import Run, action\n\n@action({name!r})\nasync def tick(_: Run) -> None: ...\n"


def test_a_package_is_loaded_with_all_its_modules(shelf: Path) -> None:
    (shelf / "one.py").write_text(DECLARED.format(name="one"))
    (shelf / "deep").mkdir()
    (shelf / "deep" / "__init__.py").write_text("from shelf.one import tick\n")
    (shelf / "deep" / "two.py").write_text(DECLARED.format(name="two"))
    assert sorted(each.name for each in Catalogue.load(["shelf"])) == ["one", "two"]


def test_two_actions_with_one_name_are_refused_with_both_locations(shelf: Path) -> None:
    (shelf / "one.py").write_text(DECLARED.format(name="same"))
    (shelf / "two.py").write_text(DECLARED.format(name="same"))
    with pytest.raises(ActionInvalid, match=r"called 'same': shelf\.one\.tick and shelf\.two\.tick"):
        Catalogue.load(["shelf"])


def test_a_missing_module_is_an_invalid_setting() -> None:
    with pytest.raises(SettingsError, match=r"FLOTILLA_ACTIONS names 'app\.nothing'"):
        Catalogue.load(["app.nothing"])


def test_a_failing_import_within_a_module_is_raised_unchanged(shelf: Path) -> None:
    (shelf / "one.py").write_text("import no_such_thing\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        Catalogue.load(["shelf"])


def test_the_error_for_an_unknown_action_names_the_command_that_lists_actions() -> None:
    with pytest.raises(ActionUnknown, match="`flotilla actions`"):
        Catalogue({})["nothing"]


@pytest.mark.anyio
async def test_a_trigger_outside_of_a_running_service_raises() -> None:
    with pytest.raises(FleetError, match="are for the code of a running service"):
        await trigger("tick")
    with pytest.raises(FleetError, match="are for the code of a running service"):
        await declare().trigger()
