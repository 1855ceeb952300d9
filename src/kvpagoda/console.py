"""What commands print: tables on standard output, progress on standard error. Needs rich, of the ``cli`` extra."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

Moved = Callable[[float, str], None]


def output() -> Console:
    """Standard output, as wide as the terminal; text is printed as it is."""
    return Console(highlight=False, markup=False)


def say(line: str, indent: int = 0) -> None:
    """Print a line, broken at spaces where the terminal is narrower, with what follows indented; as it is where nobody says
    how wide (in a pipe)."""
    out = output()
    if out.is_terminal or "COLUMNS" in os.environ:
        line = textwrap.fill(line, out.width, subsequent_indent=" " * indent, break_on_hyphens=False)
    out.print(line, soft_wrap=True)


def table(names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> Table:
    """A table of columns ``names``, of which those in ``left`` are aligned left, the others right. A cell is one line. Where
    the terminal is too narrow, those on the left are cut, the numbers on the right never."""
    cells = [list(row) for row in rows]
    made = Table(box=None, pad_edge=False)
    for name, *column in zip(names, *cells):
        if name in left:
            made.add_column(name, justify="left", no_wrap=True)
        else:
            made.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, (name, *column))))
    for row in cells:
        made.add_row(*row)
    return made


def print_figures(names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> None:
    """Print a ``table`` of figures, or, where the terminal is too narrow for it, each row as lines of a name and a value."""
    out, cells = output(), [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    if sum(widths) + 2 * (len(widths) - 1) <= out.width:
        out.print(table(names, cells, left))
        return
    for row in cells:
        for name, cell in zip(names, row):
            out.print(f"{name:<{max(map(len, names))}}  {cell}")
        out.print()


@contextmanager
def progress(total: int, unit: str) -> Iterator[Moved | None]:
    """A bar of ``total`` units while the block runs: it is moved by calls with how many are done and a note. None where
    standard error is no terminal: nothing is printed then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)
