"""The programs in the guides, which tests run as a reader would."""

import re
from pathlib import Path

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
# What a reader replaces in them.
SERVICE, KEY = "http://127.0.0.1:8000", '"KEY"'


def program(guide: str, language: str, text: str) -> str:
    """Return the program of a guide in this language that contains this text."""
    blocks: list[str] = re.findall(
        rf"^```{language}\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (found,) = (block for block in blocks if text in block)
    return found


def follow_js() -> str:
    """Return the reader of streams, for browsers and Node.js."""
    return program("follow-runs", "js", "async function* follow(")


def for_service(text: str, url: str, key: str) -> str:
    """Return a program for this service instead of the example's."""
    assert SERVICE in text
    assert KEY in text
    return text.replace(SERVICE, url).replace(KEY, f'"{key}"')
