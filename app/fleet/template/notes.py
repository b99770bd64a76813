"""The changelog between two releases."""

import re


def sections(changelog: str, level: str = "##") -> dict[str, str]:
    """Return the texts below the headings of this level."""
    parts = re.split(rf"^{level} (.+)$", changelog, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def between(old: str, new: str) -> dict[str, str]:
    """Return the sections that the older changelog does not have, or has otherwise."""
    known = sections(old)
    return {heading: text for heading, text in sections(new).items() if text and known.get(heading) != text}


def manual_steps(notes: dict[str, str]) -> list[str]:
    """Return what must be done by hand, for the oldest release first."""
    steps = (sections(text, level="###").get("Manual steps") for text in notes.values())
    return [text for text in steps if text and text != "None."][::-1]
