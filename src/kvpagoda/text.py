"""Tables and lines of text, as wide as there is room."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence


def table(
    names: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], width: int | None = None
) -> list[str]:
    """A line for the ``names`` of columns and for each row, those of ``left`` aligned left, the others right; where that is
    wider than ``width``, each row as lines of a name and a value, and an empty one between.

    >>> table(["model", "bytes"], [["a", "1,024"], ["other", "7"]], left=["model"])
    ['model  bytes', 'a      1,024', 'other      7']
    """
    cells = [names, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        longest = max(map(len, names))
        stacked = [[f"{name:<{longest}}  {cell}" for name, cell in zip(names, row)] for row in cells[1:]]
        return [line for row in stacked for line in (*row, "")][:-1]
    aligned = ["<" if name in left else ">" for name in names]
    return ["  ".join(f"{one:{at}{n}}" for one, at, n in zip(row, aligned, widths)).rstrip() for row in cells]


def wrapped(line: str, width: int | None, indent: str = "") -> list[str]:
    """``line`` in pieces of at most ``width`` columns, broken at spaces, all but the first behind ``indent``."""
    if width is None:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
