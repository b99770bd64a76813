"""Typed clients, generated from the OpenAPI document, trigger a run, see its end, and read an error.

The clients are the programs of `docs/guides/clients.md`: they are generated, type-checked and run as it says.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jsonschema
import pytest

from app.fleet.api_keys import make_key
from tests.support import fleet as fleets
from tests.support import guides, tools
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.pages import blocks
from tests.support.postgres import Postgres
from tests.support.streams import messages

pytestmark = pytest.mark.template

OPERATE = make_key("clients", "operate")
TYPESCRIPT = fleets.ROOT / "tests" / "clients" / "typescript"
BIN = Path(sys.executable).parent
REFUSED = [
    "422 /problems/invalid",
    "payload.weight Input should be a valid integer, unable to parse string as an integer",
]


@pytest.fixture(scope="module")
def service(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstanceProcess]:
    address = postgres.new_migrated_database()
    folder = tmp_path_factory.mktemp("service")
    with Fleet(address, folder, FLOTILLA_ACTIONS="tests.support.trial_actions", FLOTILLA_API_KEYS=OPERATE[1]) as fleet:
        (instance,) = fleet.start()
        instance.client.headers["authorization"] = f"Bearer {OPERATE[0]}"
        yield instance
    postgres.drop(address)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    written = fleets.run("openapi", "--output", str(path))
    assert written.returncode == 0, written.stderr
    return path


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    def run_here(command: Sequence[str | Path]) -> str:
        """Run a command in the test's folder, without settings of the user, and return its output."""
        env = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": "flotilla-client"}
        done = subprocess.run(
            [*map(str, command)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_here


def test_the_commands_of_the_guide_are_those_of_these_tests() -> None:
    """The tests use other paths, and install nothing."""
    commands = {block.text for block in blocks(guides.GUIDES / "clients.md") if block.language == "sh"}
    assert commands == {
        "flotilla openapi --output openapi.json\n",
        "openapi-python-client generate --path openapi.json\npip install ./flotilla-client\n",
        "npx openapi-typescript openapi.json --output flotilla.d.ts\n",
    }


def test_a_generated_python_client(
    service: InstanceProcess, document: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    run([BIN / "openapi-python-client", "generate", "--path", document, "--fail-on-warning"])
    program = guides.for_service(guides.program("clients", "python", "flotilla_client"), service.url, OPERATE[0])
    (tmp_path / "program.py").write_text(program)
    run([BIN / "mypy", "--strict", "--cache-dir", tmp_path / "cache", "program.py"])
    assert run([sys.executable, "program.py"]).splitlines() == ["succeeded 3", *REFUSED]


def test_a_generated_typescript_client(
    service: InstanceProcess, document: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    node, packages = tools.program("node"), TYPESCRIPT / "node_modules"
    if not (packages / ".bin" / "tsc").exists():
        tools.missing(f"the packages of {TYPESCRIPT.name} are not installed; scripts/tools installs them")
    (tmp_path / "node_modules").symlink_to(packages)
    for name in ("package.json", "tsconfig.json"):
        (tmp_path / name).write_text((TYPESCRIPT / name).read_text())
    run([node, packages / ".bin" / "openapi-typescript", document, "--output", "flotilla.d.ts"])
    program = guides.for_service(guides.program("clients", "ts", "createClient"), service.url, OPERATE[0])
    (tmp_path / "program.ts").write_text(program)
    (tmp_path / "follow.js").write_text(f"{guides.follow_js()}\nexport {{ follow }};\n")
    run([node, packages / ".bin" / "tsc"])
    lines = run([node, "compiled/program.js"]).splitlines()
    assert lines == ["pending undefined", "running undefined", "succeeded 3", *REFUSED]


def test_the_messages_of_real_streams_have_the_documented_types(service: InstanceProcess, document: Path) -> None:
    components = json.loads(document.read_text())["components"]

    def check(name: str, data: object) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema.Draft202012Validator(schema).validate(data)

    kinds = {"state": "StateEvent", "progress": "ProgressEvent", "log": "LogEvent", "done": "RunDone"}
    seen: list[str] = []
    # The second one is pending again before it succeeds.
    ids = [service.trigger(action)["id"] for action in ("speak", "fail-once")]
    for run_id in ids:
        with service.client.stream("GET", f"/runs/{run_id}/events") as answer:
            for message in messages(answer.iter_lines()):
                check(kinds.get(message.event, "EmittedEvent"), message.data)
                seen.append(message.event)
    states = ["state"] * 3
    assert sorted(seen) == sorted([*states, "log", "progress", "noted", "done", *states, "state", "state", "done"])
    with service.client.stream("GET", "/events?after=0") as answer:
        for message in messages(answer.iter_lines()):
            check("FeedEvent", message.data)
            if message.data["run"] == ids[-1] and message.data["data"]["state"] == "succeeded":
                break


def test_the_document_is_the_same_with_all_settings_and_needs_no_database(document: Path) -> None:
    env = {
        "FLOTILLA_ENVIRONMENT": "production",
        "FLOTILLA_ROLE": "worker",
        "FLOTILLA_API_KEYS": OPERATE[1],
        "PYTHONHASHSEED": "4711",
    }
    written = subprocess.run(
        [sys.executable, "-m", "app", "openapi"],
        cwd=fleets.ROOT,
        env=fleets.environment("postgresql://nobody@127.0.0.1:1/nothing", env),
        capture_output=True,
        check=False,
    )
    assert written.returncode == 0, written.stderr
    assert written.stdout == document.read_bytes()
