"""The comparison with other projects: each statement about another project has a source, and each source is used."""

import re

import pytest

from tests.unit.test_documentation import DOCS, ROOT, links, rows

pytestmark = pytest.mark.template

PAGE = DOCS / "comparison.md"
# The first column of each table names the row, and the second is Flotilla's.
TABLES = (
    ("Celery", "APScheduler", "arq", "taskiq"),
    ("Procrastinate", "PgQueuer", "Temporal", "DBOS"),
)
# These cells claim nothing.
NO_CLAIM = re.compile(r"Not stated in its documentation|Not measured")
# The row that is not a claim of theirs: our benchmarks measure it.
MEASURED = "measured by us"
REFERENCE = re.compile(r"\[\^([\w-]+)\](?!:)")
SOURCE = re.compile(r"^\[\^([\w-]+)\]: (.+)$", re.MULTILINE)


@pytest.mark.parametrize("project", [project for table in TABLES for project in table])
def test_every_cell_about_another_project_has_a_source_or_claims_nothing(project: str) -> None:
    found = [row for row in rows(PAGE, project) if MEASURED not in row[""]]
    assert len(found) > 10
    bare = {row[""]: row[project] for row in found if not REFERENCE.search(row[project])}
    unsourced = {name: cell for name, cell in bare.items() if not NO_CLAIM.fullmatch(cell)}
    assert unsourced == {}


def test_every_source_is_used_and_every_reference_has_one() -> None:
    text = PAGE.read_text()
    sources = [name for name, _ in SOURCE.findall(text)]
    assert len(sources) == len(set(sources))
    assert set(sources) == set(REFERENCE.findall(text))


def test_every_source_is_an_address_with_a_version_or_a_date() -> None:
    for name, source in SOURCE.findall(PAGE.read_text()):
        assert re.search(r"\]\(https://github\.com/[\w.-]+/[\w.-]+", source), name
        assert re.search(r"\d{4}-\d\d-\d\d$|\b\d+\.\d+\.\d+\b", source), name
        # A page of a repository is named with its commit or tag, because it changes.
        assert not re.search(r"/blob/(main|master|HEAD)/", source), name


@pytest.mark.parametrize("project", [project for table in TABLES for project in table])
def test_the_page_says_first_what_another_project_does_better(project: str) -> None:
    _, _, better = PAGE.read_text().partition("## What they do better")
    better, _, _ = better.partition("\n## ")
    (entry,) = re.findall(rf"^- \*\*{project}\*\*(.*?)(?=^- |\Z)", better, re.DOTALL | re.MULTILINE)
    assert REFERENCE.search(entry)


def test_the_table_of_the_readme_names_every_project_and_leads_to_the_sources() -> None:
    named = {name for row in rows(ROOT / "README.md", "Better than Flotilla at") for name in row[""].split(", ")}
    assert named == {project for table in TABLES for project in table}
    assert "docs/comparison.md" in links(ROOT / "README.md")


@pytest.mark.parametrize("others", TABLES)
def test_both_tables_have_the_same_column_of_flotilla(others: tuple[str, ...]) -> None:
    def own(table: tuple[str, ...]) -> dict[str, str]:
        return {row[""]: row["Flotilla"] for row in rows(PAGE, table[0]) if MEASURED not in row[""]}

    assert own(others) == own(TABLES[0])
