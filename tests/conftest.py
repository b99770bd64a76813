"""Fixtures everyone uses: one PostgreSQL 18 for each worker, a database of its own for each test, and a fleet.

A run of pytest has a folder of its own for everything that it writes, so that several runs at once do not meet, and
nothing of it is left when it has ended, however it ended (`tests/support/reaper.py`). If a test has failed, the folder
stays. The folder is in memory where there is room: a new database is some three hundred files, which take a file system
on a disk three times as long.
"""

import contextlib
import os
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


# A file system in memory, and what a run needs of it at the most, with much to spare.
MEMORY = Path("/dev/shm")  # noqa: S108 — a folder of our own is made in it
NEEDED = 6 << 30


def memory() -> Path | None:
    """The file system in memory, if a run can use it; None if it cannot, or the user names a folder."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return None
    about = os.statvfs(MEMORY)
    roomy = about.f_bavail * about.f_frsize >= NEEDED
    return MEMORY if roomy and not about.f_flag & os.ST_NOEXEC else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the run its folder, and each of its processes a reaper."""
    # In a shell's background, a command ignores Ctrl-C, and so would each process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        reaper = Reaper()
    else:
        folder = Path(tempfile.mkdtemp(prefix="flotilla-tests-", dir=memory()))
        # PostgreSQL, which does not run as root, must come through.
        folder.chmod(0o711)
        os.environ["TMPDIR"] = os.environ[PREPARED] = tempfile.tempdir = str(folder)
        config.option.basetemp = config.option.basetemp or folder / "tmp"
        config.stash[FOLDER] = folder
        reaper = Reaper(folder)
    # Some hundred processes import the same modules: what Python has compiled is kept, also where it usually is not.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    config.stash[REAPER] = reaper
    config.add_cleanup(reaper.close)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: nothing of it is left when all else is done."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED and FOLDER in session.config.stash:
        session.config.stash[REAPER].keep_folder()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"What the failed tests have written is in {config.stash[FOLDER]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a module that names `POSTGRES_VERSIONS` on each of them."""
    versions = getattr(metafunc.module, "POSTGRES_VERSIONS", None)
    if versions and "postgres" in metafunc.fixturenames:
        metafunc.parametrize("postgres", versions, indirect=True, scope="session")


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Settings come from the test alone: not from a shell, and not from a `.env` in the checkout."""
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
def fork_server() -> Iterator[None]:
    """Start instances of the tests from a fork server, where it can launch them."""
    fleets.fork_server = ForkServer()
    yield
    fleets.fork_server.close()
    fleets.fork_server = None


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[int], Postgres]]:
    """Servers that stay up for the whole run, one of each version that is asked for."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda version: stack.enter_context(server(version)))


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest, servers: Callable[[int], Postgres]) -> Postgres:
    """A server that others use too: 18, or the version a module asks for. A test that stops one takes its own."""
    return servers(getattr(request, "param", 18))


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server this test may do anything to."""
    with server() as running:
        yield running


@pytest.fixture
def address(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """A database nobody else uses. Its tables are there, unless the test is marked `empty_database`."""
    empty = request.node.get_closest_marker("empty_database") is not None
    own = postgres.new_database() if empty else postgres.new_migrated_database()
    yield own
    postgres.drop(own)


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path) as own:
        yield own
