"""The fenced blocks of the pages, which tests execute as a reader would."""

import re
from dataclasses import dataclass
from pathlib import Path

# A block within a list is indented.
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. The language is empty if the page names none."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in their order."""
    content = page.read_text()
    return [
        Block(
            found["language"].strip(),
            re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            content.count("\n", 0, found.start()) + 1,
        )
        for found in FENCE.finditer(content)
    ]
