"""Every command and code block of the README, the first pages and the guides is run by a test, or says why not.

A comment above a block says which: `<!-- tests/instances/test_guides.py runs this. -->`, or `<!-- Not run by a test: it
needs a Kubernetes cluster. -->`. Pages in `WHOLE` need no comments, because a test runs them from the first block to
the last. Output and drawings are blocks of the language `text` or `mermaid`.
"""

import re
from pathlib import Path

import pytest

from tests.support.pages import Block, blocks
from tests.unit.test_documentation import ROOT

pytestmark = pytest.mark.template

# Not to be run: what a command shows, and drawings.
SHOWN = {"text", "mermaid"}
# To be run. A block in another language is a mistake, or the language is to be added here.
RUN = {"sh", "python", "js", "ts", "sql", "yaml", "toml"}
WHOLE = {
    "docs/start/first-action.md": "tests/instances/test_walkthrough.py",
    "docs/start/tour.md": "tests/instances/test_tours.py",
    "docs/guides/test.md": "tests/integration/test_guide_for_tests.py",
    "docs/two-replicas.md": "tests/instances/test_two_replicas.py",
    "examples/deal_desk/README.md": "tests/instances/test_tours.py",
}
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ROOT / "docs" / "two-replicas.md",
    ROOT / "examples" / "deal_desk" / "README.md",
]
COMMENT = re.compile(r"<!-- (?:(?P<test>tests/\S+\.py) runs this\b.*|Not run by a test: (?P<reason>.+)) -->")


def path_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def comment_above(page: Path, block: Block) -> re.Match[str] | None:
    lines = page.read_text().splitlines()
    return COMMENT.fullmatch(lines[block.line - 2].strip()) if block.line > 1 else None


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_every_block_has_a_language(page: Path) -> None:
    assert [block.line for block in blocks(page) if block.language not in SHOWN | RUN] == []


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_every_block_is_run_by_a_test_or_says_why_not(page: Path) -> None:
    to_run = [block for block in blocks(page) if block.language in RUN]
    if path_of(page) in WHOLE:
        assert to_run
        assert not any(comment_above(page, block) for block in to_run), "this page is run as a whole"
    else:
        assert [f"{path_of(page)}:{block.line}" for block in to_run if comment_above(page, block) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_a_test_that_runs_a_block_exists_and_names_the_page(page: Path) -> None:
    named = {found["test"] for block in blocks(page) if (found := comment_above(page, block)) and found["test"]}
    for test in {*named, WHOLE.get(path_of(page), "")} - {""}:
        text = (ROOT / test).read_text()
        # By its path, or by its name as an argument.
        names = (path_of(page), f'"{page.name}"', f'"{page.stem}"')
        assert any(name in text for name in names), f"{test} does not name {path_of(page)}"


def test_a_block_has_its_language_its_text_and_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n- In a list:\n\n  ```sh\n  one\n    two\n  ```\n\n```\nbare\n```\n")
    assert blocks(page) == [Block("sh", "one\n  two\n", 5), Block("", "bare\n", 10)]
