"""A picture as SVG text: shapes in a few named colours, each with a light and a dark form.

A picture is 400 units wide, so that text of 11 units can be read on a phone; a wide screen shows it at ``SHOWN`` pixels.
As a file it has its own background and follows the colour scheme of the system. ``tools/site_pages.py`` puts it into
a page of the site, where it follows the page's scheme.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH, SHOWN, MARGIN = 400, 560, 6
COLOURS = {
    "paper": ("#ffffff", "#1c1f26"),
    "ink": ("#24292f", "#dde1e6"),
    "faint": ("#57606a", "#a3acb6"),
    "line": ("#b9c0c8", "#565e68"),
    "main": ("#2866a8", "#71aae8"),
    "pale": ("#cfe1f4", "#2a4668"),
    "warm": ("#b4540f", "#e8a05f"),
    "rest": ("#8c959f", "#7d8590"),
    "on": ("#ffffff", "#10141a"),
}
"""Name -> colour on a light and on a dark page. ``on``: text on ``main`` and ``warm``."""
WIDEST = 0.57
"""No text that is drawn is wider than this, for each character, in parts of its size."""


class Picture:
    """A picture that grows downwards. ``title``: what it shows, for those who do not see it. ``y``: where the next row
    begins; callers move it."""

    def __init__(self, title: str) -> None:
        self.title, self.y = title, float(MARGIN)
        self._parts: list[str] = []
        self._styles: set[str] = set()

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "", edge: str = "", *, dashed: bool = False
    ) -> None:
        """Draw a rectangle with ``fill`` and ``edge``, names of colours; "" for none."""
        names = f"{self._fill(fill)} {self._edge(edge)}".strip()
        dashes = ' stroke-dasharray="3 2"' if dashed else ""
        at = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect class="{names}" {at} rx="2"{dashes}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str = "ink",
        size: float = 11,
        anchor: str = "start",
        *,
        bold: bool = False,
    ) -> None:
        """Write ``text`` with its baseline at ``y``. ``anchor``: ``start``, ``middle`` or ``end``. It must be inside of the
        picture."""
        width = len(text) * size * WIDEST
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0 and left + width <= WIDTH, (
            f"{text!r} at {x} leaves the picture: {left:.0f} to {left + width:.0f}"
        )
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text class="{self._fill(fill)}" x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{where}{weight}>'
            f"{escape(text, quote=False)}</text>"
        )

    def paragraph(self, text: str, fill: str = "faint", size: float = 11, *, x: float = MARGIN) -> None:
        """Write ``text`` at ``y`` in as many lines as it needs, and move ``y`` below it."""
        most, line = int((WIDTH - MARGIN - x) / (size * WIDEST)), ""
        for word in text.split():
            if len(line) + 1 + len(word) > most:
                self.text(x, self.y + size, line, fill, size)
                self.y, line = self.y + 1.3 * size, ""
            line = f"{line} {word}".strip()
        self.text(x, self.y + size, line, fill, size)
        self.y += 1.3 * size

    def heading(self, text: str) -> None:
        """Write a bold line at ``y``, and move ``y`` below it."""
        self.text(MARGIN, self.y + 12, text, size=12, bold=True)
        self.y += 17

    def line(self, points: Iterable[tuple[float, float]], edge: str = "line", *, dashed: bool = False) -> None:
        """Draw a line through ``points``."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = ' stroke-dasharray="3 2"' if dashed else ""
        self._parts.append(f'<polyline class="none {self._edge(edge)}" points="{path}"{dashes}/>')

    def dot(self, x: float, y: float, radius: float, fill: str = "main", edge: str = "") -> None:
        """Draw a disc."""
        names = f"{self._fill(fill)} {self._edge(edge)}".strip()
        self._parts.append(f'<circle class="{names}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>')

    def render(self) -> str:
        """Return the SVG file. It ends below ``y``."""
        height = self.y + MARGIN
        light, dark = (";".join(f"--{name}:{pair[at]}" for name, pair in COLOURS.items()) for at in (0, 1))
        rules = "".join(sorted(self._styles))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" viewBox="0 0 {WIDTH} {_n(height)}" '
            f'width="{SHOWN}" height="{round(height * SHOWN / WIDTH)}" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.title, quote=False)}</title>\n"
            f"<style>.drawing{{{light}}}\n@media (prefers-color-scheme: dark){{.drawing{{{dark}}}}}\n"
            f".drawing .none{{fill:none}}.drawing .paper{{fill:var(--paper)}}{rules}</style>\n"
            f'<rect class="paper" width="{WIDTH}" height="{_n(height)}"/>\n' + "\n".join(self._parts) + "\n</svg>\n"
        )

    def _fill(self, name: str) -> str:
        """Return the class that fills with the colour ``name``."""
        if not name:
            return "none"
        assert name in COLOURS
        self._styles.add(f".drawing .{name}{{fill:var(--{name})}}")
        return name

    def _edge(self, name: str) -> str:
        """Return the class that draws the edge in the colour ``name``."""
        if not name:
            return ""
        assert name in COLOURS
        self._styles.add(f".drawing .{name}-edge{{stroke:var(--{name});stroke-width:1.2}}")
        return f"{name}-edge"


def _n(value: float) -> str:
    """Return ``value`` with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
