"""Each table has an owner: only the owner writes it, and no room below the owner names it.

The owner of a table is the room of its module in `app/fleet/db/schema/`. The statements are those of `app.fleet.sql`,
which are also in `tests/golden/`. Known exceptions are listed with a reason; one that is not needed any more fails.
"""

import re
from collections.abc import Iterator

import pytest
from sqlalchemy import Sequence, Table

from app.fleet import sql
from app.fleet.db.schema import cluster, coordination, engine, once, runs

# From the lowest to the highest, as in the import contract of `pyproject.toml`.
ROOMS = ("db", "cluster", "coordination", "runs", "stream", "engine", "http", "dashboard", "cli", "testing")
OWNERS = {
    owner: {value.name for value in vars(module).values() if isinstance(value, Table | Sequence)}
    for owner, module in {
        "cluster": cluster,
        "coordination": coordination,
        "runs": runs,
        "engine": engine,
        "engine.once": once,
    }.items()
}
OWNER_OF = {table: owner for owner, tables in OWNERS.items() for table in tables}
# The sequence of a column belongs to its table.
OWNER_OF["runs_id_seq"] = "runs"

# (subroom, table): why its statements write a table that it does not own.
WRITE_EXCEPTIONS = {
    ("engine.actions", "actions"): "only the engine changes actions; `runs` reads their names, limits and retention",
    ("engine.dispatch", "actions"): "the scheduler advances the next slot, as above",
    ("engine.enqueue", "run_keys"): "`TAKE_KEYS` takes the keys of new runs; the statement moves to `runs/`",
    ("engine.enqueue", "runs_id_seq"): "the ids of runs with keys are drawn before the runs are inserted",
    **{
        ("testing.clock", table): "the clock of a test moves everything that waits; no service executes this"
        for table in ("runs", "actions", "limits", "breakers")
    },
    **{
        ("testing.survival", table): "the rounds of a test do not find the keys of earlier rounds"
        for table in ("once_keys", "run_keys")
    },
    ("testing.worker", "runs"): "a test that executes one run locks the others for the time of the claim",
    ("http.idempotency", "run_keys"): "the Idempotency-Key of a batch is a row that belongs to no run",
}
# (room, table): why its statements name a table of a room above it.
NAME_EXCEPTIONS = {
    ("db", "instances"): "`db.migrations.INSPECT` recognises a schema of Flotilla by this table",
}

TABLE = r'"flotilla"\.(\w+)'
WRITE = re.compile(rf"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM)\s+{TABLE}|\bnextval\s*\(\s*'{TABLE}'")
LOCK = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b(?:\s+OF\s+(\w+(?:\s*,\s*\w+)*))?")
SOURCE = re.compile(
    rf"(?:\bFROM|\bJOIN|,|\bLATERAL)\s+{TABLE}(?:\s+(?:AS\s+)?(?!(?:WHERE|ORDER|JOIN|SET|FOR)\b)(\w+))?"
)


def named(statement: str) -> set[str]:
    """Every table and sequence that a statement names."""
    return {table for table in re.findall(TABLE, statement) if table in OWNER_OF}


def written(statement: str) -> set[str]:
    """Every table that a statement changes or whose rows it locks as for a change."""
    changed = {table for found in WRITE.findall(statement) for table in found if table}
    return (changed | set(locked(statement))) & OWNER_OF.keys()


def locked(statement: str) -> Iterator[str]:
    """Yield the tables that FOR [NO KEY] UPDATE locks: those after OF, otherwise all of its SELECT."""
    for clause in LOCK.finditer(statement):
        sources = {(alias or table): table for table, alias in SOURCE.findall(select_around(statement, clause.start()))}
        names = re.split(r"\s*,\s*", clause[1]) if clause[1] else sources
        yield from (sources[name] for name in names if name in sources)


def select_around(statement: str, position: int) -> str:
    """Return the text before this position that is in the same parentheses, without inner parentheses."""
    kept: list[str] = []
    depth = 0
    for letter in reversed(statement[:position]):
        depth += (letter == ")") - (letter == "(")
        if depth < 0:
            break
        if depth == 0 and letter != "(":
            kept.append(letter)
    return "".join(reversed(kept))


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def height(name: str) -> int:
    return ROOMS.index(name.partition(".")[0])


def module_of(statement: str) -> str:
    """`runs.claim.CLAIM` is in `runs.claim`; constants are in capital letters."""
    return ".".join(part for part in statement.split(".")[:-1] if not part.isupper())


def foreign_writes() -> dict[tuple[str, str], set[str]]:
    """The statements that write tables of another room, by subroom and table."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, statement in sql.statements().items():
        module = module_of(name)
        for table in written(statement):
            if not within(module, OWNER_OF[table]):
                subroom = ".".join(module.split(".")[:2])
                found.setdefault((subroom, table), set()).add(name)
    return found


def names_from_below() -> dict[tuple[str, str], set[str]]:
    """The statements that name tables of a room above theirs, by room and table."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, statement in sql.statements().items():
        module = module_of(name)
        for table in named(statement):
            if height(module) < height(OWNER_OF[table]):
                found.setdefault((module.partition(".")[0], table), set()).add(name)
    return found


def test_only_the_owner_of_a_table_writes_it() -> None:
    found = foreign_writes()
    unlisted = {key: names for key, names in found.items() if key not in WRITE_EXCEPTIONS}
    assert not unlisted, "these statements write tables of another room"


def test_no_room_names_a_table_of_a_room_above_it() -> None:
    found = names_from_below()
    unlisted = {key: names for key, names in found.items() if key not in NAME_EXCEPTIONS}
    assert not unlisted, "these statements name tables of a room above theirs"


def test_every_exception_is_still_needed() -> None:
    unneeded = (WRITE_EXCEPTIONS.keys() - foreign_writes()) | (NAME_EXCEPTIONS.keys() - names_from_below())
    assert not unneeded, "delete these exceptions"


@pytest.mark.parametrize("name", [name for name, text in sql.statements().items() if LOCK.search(text)])
def test_the_tables_of_each_locking_clause_are_found(name: str) -> None:
    """A clause whose tables are not found would escape the first test."""
    assert set(locked(sql.statements()[name])) <= OWNER_OF.keys()
    assert set(locked(sql.statements()[name]))
