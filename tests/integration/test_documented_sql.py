"""The SQL statements of the documentation can be executed, because operators copy them in an emergency."""

import re
from pathlib import Path

import psycopg
import pytest

from tests.support.service import service

pytestmark = [pytest.mark.anyio, pytest.mark.template]

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [*sorted((DOCS / "runbook").glob("*.md")), *sorted((DOCS / "explanation").glob("*.md"))]
PAGES.append(DOCS / "reference" / "database.md")
PAGES += [DOCS / "guides" / name for name in ("ordered-runs.md", "seen-once.md")]


def statements() -> list[tuple[str, str]]:
    """Return each block of SQL with its page. A block within a list is indented."""
    block = re.compile(r"^ *```sql\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
    return [(page.stem, statement) for page in PAGES for statement in block.findall(page.read_text())]


async def test_every_sql_statement_of_the_documentation_can_be_executed(address: str) -> None:
    assert len(statements()) > 10
    async with service(address):
        with psycopg.connect(address, autocommit=True) as session:
            for page, statement in statements():
                try:
                    session.execute(statement.encode())
                except psycopg.Error as error:
                    raise AssertionError(f"{page}: {error}") from error
