"""Fixtures for all tests: one PostgreSQL 18 for each worker, a new database for each test, and a fleet.

Each run of pytest writes all its files into its own folder, so that concurrent runs do not disturb each other. The
folder is removed when the run has ended, however it ended (`tests/support/reaper.py`), but stays if a test has failed.
It is in memory if there is room: a new database has about three hundred files, which take three times as long on a
disk.
"""

import contextlib
import gc
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.support.fork_server import ForkServer
from tests.support.postgres import PREPARED, Postgres, server
from tests.support.reaper import Reaper
from tests.support.scheduler import Scheduler

FOLDER = pytest.StashKey[Path]()
REAPER = pytest.StashKey[Reaper]()
MINE = Path(__file__).parent / "mine"
ABOUT_TEMPLATE = re.compile(r"^pytestmark = .*\bpytest\.mark\.template\b", re.MULTILINE)


# A file system in memory, and the space that a run needs at most, with a large reserve.
MEMORY = Path("/dev/shm")  # noqa: S108 — a new folder is created in it
MIN_FREE = 6 << 30


def memory() -> Path | None:
    """Return the file system in memory if a run can use it; None if it cannot, or if the user has set a folder."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return None
    usage = os.statvfs(MEMORY)
    has_room = usage.f_bavail * usage.f_frsize >= MIN_FREE
    return MEMORY if has_room and not usage.f_flag & os.ST_NOEXEC else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Create the folder of the run, and a reaper for each of its processes."""
    # A command in the background of a shell ignores Ctrl-C, and its child processes, which tests interrupt, would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        reaper = Reaper()
    else:
        folder = Path(tempfile.mkdtemp(prefix="flotilla-tests-", dir=memory()))
        # PostgreSQL does not run as root, and must be able to enter the folder.
        folder.chmod(0o711)
        os.environ["TMPDIR"] = os.environ[PREPARED] = tempfile.tempdir = str(folder)
        config.option.basetemp = config.option.basetemp or folder / "tmp"
        config.stash[FOLDER] = folder
        reaper = Reaper(folder)
    # Hundreds of processes import the same modules, so compiled modules are kept even if the environment disables that.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    config.stash[REAPER] = reaper
    config.add_cleanup(reaper.close)


@cache
def is_a_service() -> bool:
    """Whether this repository is a service made from the template, and not the template: then it has another name."""
    from app.fleet.template.record import FILE, Record

    root = Path(__file__).parents[1]
    # A damaged file is an error, and must not leave out tests of the template.
    return not (root / FILE).exists() or Record.read(root).name != "flotilla"


def pytest_report_header() -> str | None:
    return "without the tests of the template itself: this is a service made from it" if is_a_service() else None


class LeftOut(pytest.Module):
    """A module without tests, which is not imported."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leave out the modules with the template's own tests in a service: they may import what it has deleted."""
    if is_a_service() and ABOUT_TEMPLATE.search(module_path.read_text()):
        return LeftOut.from_parent(parent, path=module_path)
    return None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the template's own tests in a service, and start the long tests first.

    Otherwise a worker could be left with a long test at the end.
    """
    if is_a_service():
        left_out = [item for item in items if item.get_closest_marker("template")]
        items[:] = [item for item in items if not item.get_closest_marker("template")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Let the garbage collector ignore what the collection has made, which saves a tenth of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED and FOLDER in session.config.stash:
        session.config.stash[REAPER].keep_folder()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"The files of the failed tests are in {config.stash[FOLDER]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a module with a constant `POSTGRES_VERSIONS` on each of these versions."""
    versions = getattr(metafunc.module, "POSTGRES_VERSIONS", None)
    if versions and "postgres" in metafunc.fixturenames:
        metafunc.parametrize("postgres", versions, indirect=True, scope="session")


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Remove settings that come from the shell or from a `.env` in the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("FLOTILLA_", "DATABASE_")):
                patch.delenv(name)
        from app.fleet.settings import FleetSettings
        from app.settings import Settings

        for settings in (FleetSettings, Settings):
            patch.setitem(settings.model_config, "env_file", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the instances of tests from a fork server, if it can launch them. Tests of `tests/mine` start none."""
    if all(item.path.is_relative_to(MINE) for item in request.session.items):
        yield
        return
    fleets.fork_server = ForkServer()
    yield
    fleets.fork_server.close()
    fleets.fork_server = None


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[int], Postgres]]:
    """Return a function that returns the server of a version, which stays up for the whole run."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda version: stack.enter_context(server(version)))


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest, servers: Callable[[int], Postgres]) -> Postgres:
    """A server that tests share: version 18, or one of `POSTGRES_VERSIONS`. To stop a server, use `own_postgres`."""
    return servers(getattr(request, "param", 18))


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server for this test alone, which it may stop or break."""
    with server() as running:
        yield running


@pytest.fixture
def address(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """A database for this test alone. It is migrated, unless the test is marked `empty_database`."""
    empty = request.node.get_closest_marker("empty_database") is not None
    own = postgres.new_database() if empty else postgres.new_migrated_database()
    yield own
    postgres.drop(own)


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path) as own:
        yield own
