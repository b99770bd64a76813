"""The documentation is complete and correct: pages describe everything that the code has, and nothing else.

Tables are parsed by the names of their columns, and links are followed.
"""

import ast
import fnmatch
import importlib
import inspect
import json
import os
import pkgutil
import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml
from dotenv import dotenv_values
from fastapi import FastAPI
from prometheus_client import REGISTRY
from pydantic_settings import BaseSettings

from app import fleet, main, routes
from app.fleet import sql
from app.fleet.background import LoopErrors
from app.fleet.cli import app as command_line
from app.fleet.cluster import anomalies
from app.fleet.db.namespace import Lock
from app.fleet.db.schema import metadata
from app.fleet.edge.problems import KINDS
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.run import Blocking, Run
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.figures.cluster_figures import Figures
from app.fleet.engine.figures.minute_counts import MinuteCounts
from app.fleet.engine.figures.run_metrics import RunMetrics
from app.fleet.errors import FleetError
from app.fleet.runs.effects.states import RunState
from app.fleet.settings import FleetSettings, known_names
from app.fleet.telemetry.metrics import DEFINITIONS
from app.settings import Settings
from examples.deal_desk import settings as deal_desk

pytestmark = pytest.mark.template

ROOT = Path(__file__).resolve().parents[2]
# A service built on the template has its own conventions: only the files of the template are checked.
FLEET = ROOT / "app" / "fleet"
TEMPLATE_FOLDERS = ("app/fleet", "alembic/versions/fleet", "benchmarks", "docs", "examples", "k8s", "scripts", "tests")
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
LEVELS = {"debug", "info", "warning", "error"}


# -- reading pages ----------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def rows(page: Path, column: str) -> list[dict[str, str]]:
    """Return the rows of all tables of a page that have this column, as dictionaries by column."""
    found = []
    header: list[str] | None = None
    for line in without_code(page.read_text()).splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if header is None:
            header = cells
        elif column in header and not set(line) <= set("|- :"):
            assert len(cells) == len(header), f"{page.name}: a row of {len(cells)} cells: {line}"
            found.append(dict(zip(header, cells, strict=True)))
    assert found, f"{page.name} has no table with a column {column!r}"
    return found


def by_name(page: Path, column: str) -> dict[str, dict[str, str]]:
    """Return the rows by the first name in this column. Fail if a name occurs twice."""
    named = [(codes(row[column])[0], row) for row in rows(page, column) if codes(row[column])]
    assert len({name for name, _ in named}) == len(named), f"{page.name} has a row twice"
    return dict(named)


def codes(text: str) -> list[str]:
    """Return the texts in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def plain(text: str) -> str:
    return text.replace("`", "")


def sections(page: Path) -> dict[str, str]:
    """Return the text below each second-level heading."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def pages() -> list[Path]:
    examples = sorted((ROOT / "examples").rglob("*.md"))
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted(DOCS.rglob("*.md")), *examples]


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the relative links of a page."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Return the fragments of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_table_of_a_page_is_parsed_by_the_names_of_its_columns(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| A | B |\n|---|---|\n| `x` | y \\| z |\n\n| C |\n|---|\n| `w` |\n")
    assert rows(page, "A") == [{"A": "`x`", "B": "y | z"}]
    assert by_name(page, "C") == {"w": {"C": "`w`"}}


# -- settings ---------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Format a default as the pages do."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def described_settings() -> dict[str, dict[str, str]]:
    """Return the rows of the page of settings, by the name with the prefix."""
    found = {}
    for row in rows(REFERENCE / "settings.md", "Variable"):
        (name,) = [name for name in codes(row["Variable"]) if name.startswith("FLOTILLA_")]
        assert name not in found, f"{name} has two rows"
        found[name] = row
    return found


def test_every_setting_has_a_row_with_its_default_and_nothing_else_does() -> None:
    described = {name: plain(row["Default"]) for name, row in described_settings().items()}
    fields = FleetSettings.model_fields.items()
    assert described == {f"FLOTILLA_{name.upper()}": shown(field.default) for name, field in fields}


def test_every_setting_has_a_meaning_and_the_effect_of_an_invalid_value() -> None:
    for name, row in described_settings().items():
        assert row["Meaning"], name
        assert row["When it is wrong"], name


def test_a_default_that_depends_on_the_environment_is_described_for_both() -> None:
    development = Settings.load()
    production = Settings.load(environment="production", database_url="postgresql://db.example/app")
    meaning = {name: row["Meaning"] for name, row in described_settings().items()}
    delay = f"{production.drain_delay_seconds:g} in production, {development.drain_delay_seconds:g} in development"
    assert delay in meaning["FLOTILLA_DRAIN_DELAY"]
    migrates = {shown(each.migrates_on_start): each.environment for each in (development, production)}
    text = " ".join(f"`{value}` in {environment}," for value, environment in migrates.items()).rstrip(",")
    assert text in meaning["FLOTILLA_MIGRATE_ON_START"]


def test_the_example_of_an_environment_has_every_setting_commented_out_with_its_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert not [line for line in lines if is_setting(f"# {line}")]
    settings = [(above, line[2:]) for above, line in pairwise(lines) if is_setting(line)]
    assert all(above.startswith("# ") and not is_setting(above) for above, _ in settings), "each has a line above it"

    uncommented = tmp_path / ".env"
    uncommented.write_text("\n".join(line for _, line in settings))
    given = {name if name.startswith("FLOTILLA_") else f"FLOTILLA_{name}" for name in dotenv_values(uncommented)}
    assert given == known_names(FleetSettings)
    assert len(settings) == len(given), "a setting stands there twice"
    defaults = FleetSettings.load()
    monkeypatch.setitem(FleetSettings.model_config, "env_file", str(uncommented))
    assert FleetSettings.load() == defaults


def is_setting(line: str) -> bool:
    """Whether the line is a setting of the template; a service may add its own."""
    return re.match(r"# (FLOTILLA|DATABASE)_[A-Z_]+=", line) is not None


@pytest.mark.parametrize("kind", [deal_desk.Desk, deal_desk.World])
def test_every_setting_of_the_deal_desk_has_a_row_with_its_default_and_nothing_else_does(
    kind: type[BaseSettings],
) -> None:
    prefix = kind.model_config["env_prefix"]
    page = by_name(ROOT / "examples" / "deal_desk" / "README.md", f"`{prefix}…`")
    described = {name: plain(row["Default"]) for name, row in page.items()}
    assert described == {f"{prefix}{name.upper()}": shown(field.default) for name, field in kind.model_fields.items()}


# -- actions ----------------------------------------------------------------------------------------------------------

ACTIONS = REFERENCE / "actions.md"


def written_defaults(function: Callable[..., Any]) -> dict[str, str]:
    """Return the parameters of a function with their defaults, formatted as on the pages."""
    return {
        name: "required" if each.default is each.empty else literal(each.default)
        for name, each in inspect.signature(function).parameters.items()
    }


def literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_option_of_an_action_has_a_row_with_its_default_and_nothing_else_does() -> None:
    described = {name: plain(row["Default"]) for name, row in by_name(ACTIONS, "Option").items()}
    assert described == written_defaults(fleet.action)


def test_every_option_of_an_action_has_a_meaning_and_the_text_of_its_refusal() -> None:
    for name, row in by_name(ACTIONS, "Option").items():
        assert row["Meaning"], name
        assert fragments(row["When it is wrong"]), name
    quoted = [row["When it is wrong"] for row in rows(ACTIONS, "Option")] + [
        row["Text"] for row in rows(ACTIONS, "Text")
    ]
    assert missing_quotations(quoted) == []


def test_every_public_name_of_a_run_has_a_row_and_nothing_else_does() -> None:
    names = [code.partition("(")[0] for row in rows(ACTIONS, "What it is") for code in codes(row["Name"])]
    assert sorted(names) == sorted(public_names(Run))


def test_the_methods_of_a_run_are_written_with_their_parameters() -> None:
    written = [code for row in rows(ACTIONS, "What it is") for code in codes(row["Name"]) if "(" in code]
    methods = {name for name in public_names(Run) if inspect.isfunction(getattr(Run, name))}
    assert set(written) == {f"{name}({', '.join(parameters(getattr(Run, name)))})" for name in methods}


def parameters(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]


def test_every_name_that_a_plain_function_may_use_is_documented() -> None:
    text = sections(ACTIONS)["The run"].partition("### Plain functions")[2]
    assert public_names(Blocking) <= {code.partition("(")[0] for code in codes(text)}
    assert f"`commit({', '.join(parameters(Blocking.commit))})`" in text


def test_every_argument_of_trigger_has_a_row_with_its_default_and_an_order_has_the_same() -> None:
    described = {name: plain(row["Default"]) for name, row in by_name(ACTIONS, "Argument").items()}
    given = written_defaults(fleet.trigger)
    assert described == {name: default for name, default in given.items() if name != "action"}
    assert set(Order.__dataclass_fields__) - {"digest"} == set(given) - {"session"}


def test_the_trigger_of_an_action_has_the_arguments_of_trigger() -> None:
    method, function = (inspect.signature(each).parameters for each in (Action.trigger, fleet.trigger))
    assert list(method)[0:2] == ["self", "payload"]
    assert list(function)[0:2] == ["action", "payload"]
    assert method["payload"].default is function["payload"].default
    assert list(method.values())[2:] == list(function.values())[2:]


def test_the_calls_that_trigger_are_written_with_their_parameters() -> None:
    written = {codes(row["Call"])[0].removeprefix("await ") for row in rows(ACTIONS, "Call")}
    calls = (("index_filing.trigger", Action.trigger), ("trigger", fleet.trigger), ("trigger_many", fleet.trigger_many))
    assert written == {f"{name}({', '.join(with_star(function))})" for name, function in calls}


def with_star(function: Callable[..., Any]) -> list[str]:
    """The parameters of a call, with the `*` before those that are given by name."""
    given = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    positional = [each.name for each in given if each.kind is not each.KEYWORD_ONLY]
    return [*positional, "*", *(each.name for each in given if each.kind is each.KEYWORD_ONLY)]


@pytest.mark.parametrize("page", ["actions", "python"])
def test_the_examples_of_the_reference_are_python_that_runs(page: str, tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", (REFERENCE / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        module = tmp_path / "example.py"
        module.write_text(example)
        runpy.run_path(str(module))


def fragments(text: str) -> list[str]:
    """Return the quoted parts of a text, split at the `…` that stand for variable parts."""
    parts = [part.strip() for code in codes(text) for part in re.split("…|;", code)]
    return [part for part in parts if part]


def missing_quotations(quoted: Sequence[str]) -> list[str]:
    """Return the parts of quotations that no string of the code contains."""
    source = " ".join(texts_of_the_code())
    return [part for text in quoted for part in fragments(text) if part not in source]


# -- metrics, logs ----------------------------------------------------------------------------------------------------


def test_every_metric_has_a_row_with_its_type_and_labels_and_nothing_else_does() -> None:
    described = {
        name: (row["Type"], tuple(codes(row["Labels"])))
        for name, row in by_name(REFERENCE / "metrics.md", "Name").items()
    }
    assert described == {each.name: (each.kind, each.labels) for each in DEFINITIONS} | dict(other_metrics())


def other_metrics() -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Yield the metrics that are not in `DEFINITIONS`: instruments, and the figures of runs and of the cluster."""
    instruments = [each for each in REGISTRY.collect() if each.name.startswith("flotilla_")]
    runs = RunMetrics(Catalogue({}), MinuteCounts(lambda: None))
    for family in (*instruments, *runs.collect(), *Figures([], [], [], 0).collect()):
        suffix = "_total" if family.type == "counter" else ""
        yield family.name + suffix, (family.type, tuple(getattr(family, "_labelnames", ())))


def test_every_metric_has_a_meaning_and_an_alert() -> None:
    for name, row in by_name(REFERENCE / "metrics.md", "Name").items():
        assert row["Meaning"], name
        assert row["Alert on"], name


@cache
def logged() -> dict[str, tuple[set[str], set[str], bool]]:
    """Return all events that the code logs: levels, fields, and whether there are fields that cannot be read here."""
    found: dict[str, tuple[set[str], set[str], bool]] = {}
    for path in sorted(FLEET.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            if is_log(call.func):
                names = [each.value for each in ast.walk(call.args[0]) if isinstance(each, ast.Constant)]
                assert names, f"{path.name}:{call.lineno} logs an event whose name is not written there"
                events = [(str(name), {cast("ast.Attribute", call.func).attr}, fields_of(call)) for name in names]
            elif ast.unparse(call.func) == "LoopErrors":
                events = events_of_loop(call)
            else:
                continue
            for name, new_levels, new_fields in events:
                levels, fields, open_ended = found.get(name, (set(), set(), False))
                open_ended = open_ended or any(each.arg is None for each in call.keywords)
                found[name] = levels | new_levels, fields | new_fields, open_ended
    return found


def fields_of(call: ast.Call) -> set[str]:
    return {each.arg for each in call.keywords if each.arg is not None}


def events_of_loop(call: ast.Call) -> list[tuple[str, set[str], set[str]]]:
    """Return the events that a background loop logs about the errors of its steps."""
    names = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
    found = [(str(names["defect"]), {"error"}, {"error", "service"})]
    if "failed" in names:
        levels = {"debug", "warning"} if "warn_when" in fields_of(call) else {"debug"}
        fields = fields_of(call) - set(inspect.signature(LoopErrors).parameters)
        found.append((str(names["failed"]), levels, fields | {"reason"}))
    return found


def is_log(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in LEVELS
        and isinstance(function.value, ast.Name)
        and function.value.id == "log"
    )


def test_every_event_logger_is_called_log() -> None:
    """Otherwise the next test would not find its events."""
    for path in sorted(FLEET.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called = ast.unparse(node.value.func)
                if called in {"event_log", "logs.event_log"}:
                    assert [ast.unparse(target) for target in node.targets] == ["log"], path


def test_every_event_that_is_logged_has_a_row_and_nothing_else_does() -> None:
    assert set(by_name(REFERENCE / "logs.md", "Event")) == set(logged())


@pytest.mark.parametrize("name", sorted(logged()))
def test_the_row_of_an_event_has_its_levels_and_fields(name: str) -> None:
    row = by_name(REFERENCE / "logs.md", "Event")[name]
    levels, fields, open_ended = logged()[name]
    assert set(row["Level"].split(", ")) == levels
    described = set(codes(row["Fields"]))
    assert fields <= described if open_ended else fields == described
    assert row["Meaning"]


# -- command line -----------------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Return all commands as they are typed: `runs`, and `runs cancel`."""
    # Typer has its own copy of click without public types.
    top = dict(cast("Any", typer.main.get_command(command_line)).commands)
    below = {f"{name} {sub}": each for name, group in top.items() for sub, each in below_of(group).items()}
    return top | below


def below_of(command: Any) -> dict[str, Any]:
    return dict(getattr(command, "commands", {}))


def test_every_command_has_a_section_and_nothing_else_does() -> None:
    assert set(sections(REFERENCE / "command-line.md")) == {f"`flotilla {name}`" for name in commands()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_section_of_a_command_has_its_options_and_their_defaults(name: str, tmp_path: Path) -> None:
    parameters = {
        ", ".join(f"`{option}`" for option in each.opts): "required" if each.required else shown(each.default)
        for each in commands()[name].params
    }
    text = sections(REFERENCE / "command-line.md")[f"`flotilla {name}`"]
    section = tmp_path / "section.md"
    section.write_text(text)
    column = next((each for each in ("Option", "Argument or option") if f"| {each} |" in text), None)
    if column is None:
        assert not parameters
        return
    described = {row[column]: plain(row["Default"]) for row in rows(section, column)}
    assert described == parameters


def test_every_exit_code_of_an_error_is_in_the_table() -> None:
    described = {row["Exit code"] for row in rows(REFERENCE / "command-line.md", "Exit code")}
    assert {str(error.exit_code) for error in errors()} <= described


# -- errors, problems, anomalies --------------------------------------------------------------------------------------


@cache
def errors() -> tuple[type[FleetError], ...]:
    """Return the whole tree of errors, from all modules of the template."""
    for module in pkgutil.walk_packages([str(FLEET)], "app.fleet."):
        importlib.import_module(module.name)
    found: list[type[FleetError]] = [FleetError]
    for each in found:
        found += [sub for sub in each.__subclasses__() if sub.__module__.startswith("app.fleet.")]
    return tuple(dict.fromkeys(found))


def test_every_error_has_a_row_with_its_exit_code_and_nothing_else_does() -> None:
    described = {name: row["Exit code"] for name, row in by_name(REFERENCE / "errors.md", "Error").items()}
    assert described == {error.__name__: str(error.exit_code) for error in errors()}


def test_the_drawing_of_the_tree_of_errors_is_correct() -> None:
    drawing = re.search(r"^```\n(FleetError\n.*?)^```", (REFERENCE / "errors.md").read_text(), re.DOTALL | re.MULTILINE)
    assert drawing is not None
    drawn: list[tuple[int, str]] = []
    for line in drawing[1].splitlines():
        name = line.lstrip("│├└─ ")
        drawn.append(((len(line) - len(name)) // 4, name))
    parents: dict[str, str] = {}
    way: list[str] = []
    for depth, name in drawn:
        parents[name] = way[depth - 1] if depth else ""
        way[depth:] = [name]
    real = {error.__name__: "" if error is FleetError else parent(error) for error in errors()}
    assert parents == real


def parent(error: type[FleetError]) -> str:
    return next(base.__name__ for base in error.__bases__ if issubclass(base, FleetError))


def test_every_kind_of_problem_has_a_row_with_its_status_and_nothing_else_does() -> None:
    described = {name: row["Status"] for name, row in by_name(REFERENCE / "problems.md", "Kind").items()}
    assert described == {slug: str(kind.status) for slug, kind in KINDS.items()}


def test_every_kind_of_anomaly_in_the_code_is_in_the_list_of_kinds() -> None:
    made = [
        call
        for path in FLEET.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Anomaly"
    ]
    assert {ast.literal_eval(call.args[0]) for call in made} == set(anomalies.KINDS)


@pytest.mark.parametrize("kind", anomalies.KINDS)
def test_every_kind_of_anomaly_has_a_page_with_symptoms_check_and_remedy(kind: str) -> None:
    page = DOCS / "runbook" / f"{kind}.md"
    assert page.read_text().startswith(f"# {kind}\n")
    assert list(sections(page))[:3] == ["Symptoms", "Check", "Remedy"]


@pytest.mark.parametrize("page", ["instance-will-not-start", "runs-fail"])
def test_every_text_that_the_runbook_quotes_is_in_the_code(page: str) -> None:
    """The parts of each quotation, without its `…`, are in strings of the code."""
    assert missing_quotations([row["Text"] for row in rows(DOCS / "runbook" / f"{page}.md", "Text")]) == []


@pytest.mark.parametrize("page", sorted((DOCS / "runbook").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_the_runbook_has_a_summary_a_check_and_a_remedy(page: Path) -> None:
    found = list(sections(page))
    assert "Check" in found
    assert {"Remedy", "Messages"} & set(found)
    assert re.match(r"# .+\n\n\*.+\*\n", page.read_text()), "a summary in italics is below the title"


def texts_of_the_code() -> Iterator[str]:
    for path in sorted(FLEET.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


# -- HTTP, Python, database -------------------------------------------------------------------------------------------


def paths(service: FastAPI) -> set[str]:
    return {f"{method.upper()} {path}" for path, methods in service.openapi()["paths"].items() for method in methods}


def test_every_endpoint_has_a_row_and_nothing_else_does() -> None:
    own = FastAPI()
    own.include_router(routes.router)
    own.include_router(routes.public)
    described = [codes(row["Request"])[0] for row in rows(REFERENCE / "http.md", "Request")]
    # Without the routes that the service or the tests add.
    assert set(described) == paths(main.app) - paths(own)
    assert len(set(described)) == len(described)


def test_the_page_of_the_python_reference_lists_exactly_the_public_names() -> None:
    assert {f"`{name}`" for name in fleet.__all__} == set(sections(REFERENCE / "python.md"))
    assert all(hasattr(fleet, name) for name in fleet.__all__)


def test_every_table_and_sequence_has_its_row() -> None:
    page = REFERENCE / "database.md"
    tables = {table.name for table in metadata.tables.values()}
    # SQLAlchemy has no public list of sequences.
    sequences = {sequence.name for sequence in cast("Any", metadata)._sequences.values()}
    described = set(by_name(page, "Object"))
    views = {"leader_turn", "runnable_runs", "worker_backlog"}
    assert tables | sequences | views | {"alembic_version"} == described


@pytest.mark.parametrize("table", sorted(metadata.tables))
def test_every_column_of_a_table_has_its_row(table: str, tmp_path: Path) -> None:
    section = tmp_path / "section.md"
    section.write_text(sections(REFERENCE / "database.md")[f"The table `{table}`"])
    columns = [name for row in rows(section, "Column") for name in codes(row["Column"])]
    assert sorted(columns) == sorted(column.name for column in metadata.tables[table].columns)


def test_every_kind_of_lock_has_its_row() -> None:
    described = {row["Lock"] for row in rows(REFERENCE / "database.md", "Lock")}
    assert {lock.name.lower() for lock in Lock} <= described


def test_every_name_of_a_session_has_its_row() -> None:
    described = {
        code
        for row in rows(REFERENCE / "database.md", "`application_name`")
        for code in codes(row["`application_name`"])
    }
    roles = {code.split("/")[2] for code in described if code.count("/") >= 2}
    named = set()
    for path in sorted(FLEET.rglob("*.py")):
        text = path.read_text()
        named |= set(re.findall(r"flotilla/\{[\w.]+\}/(\w+)", text))
        named |= set(re.findall(r"\.application\(f?\"(\w+)", text))
    assert roles == named


@pytest.mark.parametrize(
    "page",
    [
        "explanation/presence-and-death",
        "explanation/runs",
        "explanation/scheduling",
        "explanation/streams",
        "reference/bounds",
    ],
)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    for row in rows(DOCS / f"{page}.md", "Constant"):
        module = codes(row["Where"])[0].removesuffix(".py").replace("/", ".")
        value = getattr(importlib.import_module(module), codes(row["Constant"])[0])
        # Numbers are whole numbers, durations are in seconds.
        assert row["Value"] == (str(value) if isinstance(value, int) else f"{value:.12g} s"), row["Constant"]


# -- the whole repository ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_an_existing_page_and_heading(page: Path) -> None:
    for target in links(page):
        path, _, fragment = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        assert leads_to.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert leads_to.exists(), f"{target} leads nowhere"
        if fragment:
            assert fragment in anchors(leads_to), f"{target}: no such heading"


def test_the_overview_lists_every_page_and_the_readme_leads_to_it() -> None:
    overview = DOCS / "README.md"
    listed = {(DOCS / target).resolve() for target in links(overview)}
    assert listed == set(DOCS.rglob("*.md")) - {overview}
    assert "docs/README.md" in links(ROOT / "README.md")


def test_every_page_that_is_named_anywhere_exists() -> None:
    """Names of pages in code and comments are checked too: an error message must not name a missing page."""
    for path, text in texts():
        # Addresses lead to pages of other projects.
        for named in re.findall(r"\bdocs/[\w/.-]*\w", re.sub(r"https?://\S+", "", text)):
            assert list(ROOT.glob(f"{named}*")), f"{path} names {named}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_that_a_page_for_contributors_names_exists(page: str) -> None:
    """A file may have moved since the page was written."""
    files = re.findall(r"`((?:app|alembic|docs|tests)/[\w./-]*\w/?)`", (ROOT / page).read_text())
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_package_has_a_row_in_the_architecture() -> None:
    rooms = {str(path.parent.relative_to(ROOT)) for path in FLEET.glob("*/__init__.py")}
    rooms |= {str(path.parent.relative_to(ROOT)) for path in (FLEET / "engine").glob("*/__init__.py")}
    named = set(by_name(DOCS / "architecture.md", "Room"))
    # These two packages are outside of the layers.
    assert rooms - named == {"app/fleet/engine", "app/fleet/telemetry"}
    assert named <= rooms


STATE_CHANGE = re.compile(r'(?:INTO|DELETE FROM) "flotilla"\.(?:finished_)?runs\b|SET state =')


def files_of_transitions() -> set[str]:
    """Return the files that the table of transitions names."""
    table = ast.get_docstring(ast.parse((FLEET / "runs" / "__init__.py").read_text())) or ""
    return set(re.findall(r"\b(\w+\.py)$", table, re.MULTILINE))


def test_the_table_of_transitions_has_every_file_whose_statements_change_a_state() -> None:
    changing = {
        f"{name.split('.')[1]}.py"
        for name, text in sql.statements().items()
        if name.startswith("runs.") and STATE_CHANGE.search(text)
    }
    assert files_of_transitions() == changing


def test_the_diagram_of_a_run_has_all_states_and_the_files_of_their_transitions() -> None:
    _, _, after = (DOCS / "architecture.md").read_text().partition("stateDiagram-v2")
    arrows = re.findall(r"^    (\S+) --> (\S+): (.+)$", after.partition("```")[0], re.MULTILINE)
    assert {state for before, then, _ in arrows for state in (before, then)} == {"[*]", *RunState}
    assert {name for _, _, names in arrows for name in names.split(", ")} == files_of_transitions()


def test_every_test_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    defined = {
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert set(re.findall(r"`(test_\w+)`", text)) <= defined


def test_every_command_of_make_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in pages():
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, page


def test_every_command_of_flotilla_that_is_named_exists() -> None:
    for page in pages():
        named = set(re.findall(r"(?:`|^|bin/|-- )flotilla ([a-z]+)", page.read_text(), re.MULTILINE))
        # `preflight` is not a command but the name of a session.
        assert named <= {*commands(), "preflight"}, page


def modules() -> list[Path]:
    return [path for folder in TEMPLATE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("module", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_has_a_docstring(module: Path) -> None:
    assert ast.get_docstring(ast.parse(module.read_text()))


def decisions() -> list[Path]:
    return sorted((DOCS / "decisions").glob("*.md"))


@pytest.mark.parametrize("page", decisions(), ids=lambda page: page.stem)
def test_a_decision_has_its_four_sections(page: Path) -> None:
    assert list(sections(page)) == ["Context", "Decision", "Consequences", "Alternatives"]
    assert page.read_text().startswith(f"# {page.name[:4]} ")


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [page.name[:5] for page in decisions()] == [f"{number:04}-" for number in range(1, len(decisions()) + 1)]


@cache
def texts() -> tuple[tuple[Path, str], ...]:
    """Return all text files of the template, without files that git ignores."""
    ignored = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())]

    def kept(names: list[str]) -> list[str]:
        return sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored))

    names = kept([path.name for path in ROOT.iterdir() if path.is_file()])
    found = [ROOT / name for name in names]
    for own in TEMPLATE_FOLDERS:
        for folder, folders, files in os.walk(ROOT / own):
            folders[:] = kept(folders)
            found += [Path(folder, name) for name in kept(files)]
    return tuple((path.relative_to(ROOT), path.read_text(errors="replace")) for path in found)


def test_the_pipeline_runs_only_the_local_checks_and_has_no_other_permissions() -> None:
    pipeline = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert pipeline["permissions"] == {"contents": "read"}
    (job,) = pipeline["jobs"].values()
    assert "permissions" not in job
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command.split()[-1] == ".ci/run"
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


# These patterns are written so that they do not match themselves.
MACHINE_PATTERNS = {
    "the host of a package index": (
        r"\bpy[p]i\.|registry\.np[m]js|python[h]osted\.|index[-]url[ =]\S*://|/simpl[e]/? *$"
    ),
    "the home of a person": r"/hom[e]/\w|/User[s]/\w|/roo[t]/|[A-Z]:\\User[s]",
}


@pytest.mark.parametrize("what", MACHINE_PATTERNS)
def test_no_file_contains_a_name_of_one_machine(what: str) -> None:
    pattern = re.compile(MACHINE_PATTERNS[what], re.MULTILINE)
    assert [(path, found[0]) for path, text in texts() if (found := pattern.search(text))] == []
