"""Draws a recorded terminal as an animated SVG: an image that shows each line at the time at which it appeared.

CSS animates the lines, without a script, so the image also moves in an `<img>`. Its colours follow the reader's theme.
Readers who prefer reduced motion see the last frame, which stands still.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

Kind = Literal["command", "output", "failure", "success"]

# The size of a character and of a line, for a font of 13 pixels.
CHARACTER, LINE, MARGIN, BAR = 7.82, 19, 16, 30
# Seconds for which the last frame stays before the animation begins again.
HOLD = 5.0
STYLE = """
svg { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
text { white-space: pre; fill: var(--ink); }
.paper { fill: var(--paper); stroke: var(--edge); }
.dot { fill: var(--edge); }
.command { fill: var(--command); font-weight: 600; }
.failure { fill: var(--failure); font-weight: 600; }
.success { fill: var(--success); font-weight: 600; }
svg { --paper: #ffffff; --edge: #d0d7de; --ink: #1f2328; --command: #0550ae; --failure: #b42318; --success: #116329; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --edge: #3d444d; --ink: #d1d7e0; --command: #79c0ff; --failure: #ff8f85; --success: #6fdd8b; }
}
@media (prefers-reduced-motion: reduce) { .line { animation: none !important; } }
"""


@dataclass(frozen=True)
class Line:
    """A line of the terminal, and how many seconds after the start it appeared."""

    at: float
    text: str
    kind: Kind = "output"


def draw(lines: Sequence[Line], *, title: str, description: str) -> str:
    """Return the SVG. The description is for readers who do not see the image."""
    columns = max(len(line.text) for line in lines)
    width = round(columns * CHARACTER + 2 * MARGIN)
    height = BAR + len(lines) * LINE + MARGIN
    seconds = lines[-1].at + HOLD
    frames, rows = [], []
    for number, line in enumerate(lines):
        shown = 100 * line.at / seconds
        # The step is shorter than a frame: a line appears, and does not fade in.
        frames.append(
            f"@keyframes l{number} {{ 0%, {shown:.2f}% {{ opacity: 0 }} {shown + 0.01:.2f}% {{ opacity: 1 }} }}"
        )
        kind = "" if line.kind == "output" else f" {line.kind}"
        animation = f"animation: l{number} {seconds:.1f}s infinite"
        rows.append(
            f'<text class="line{kind}" style="{animation}" x="{MARGIN}" y="{BAR + (number + 1) * LINE - 5}">'
            f"{escape(line.text)}</text>"
        )
    dots = "".join(f'<circle class="dot" cx="{MARGIN + 4 + 16 * each}" cy="16" r="5"/>' for each in range(3))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label={quoteattr(title)}>'
    )
    parts = [
        head,
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        f"<style>{STYLE}{chr(10).join(frames)}\n</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>{dots}',
        *rows,
        "</svg>\n",
    ]
    return "\n".join(parts)
