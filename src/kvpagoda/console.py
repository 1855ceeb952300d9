"""Console output of the commands: text on standard output, progress on standard error. Needs rich (extra ``cli``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvpagoda.text import wrapped

Moved = Callable[[float, str], None]


def output() -> Console:
    """Return standard output as a console as wide as the terminal; text is printed without markup or highlighting."""
    return Console(highlight=False, markup=False)


def say(line: str, indent: int = 0) -> None:
    """Print a line, broken at spaces to the width of the terminal; continuation lines start with ``indent`` spaces.

    If the width is unknown (in a pipe, and ``COLUMNS`` is not set), print the line unbroken.
    """
    out = output()
    is_known = out.is_terminal or "COLUMNS" in os.environ
    out.print("\n".join(wrapped(line, out.width if is_known else None, " " * indent)), soft_wrap=True)


def bars(values: Mapping[str, float], columns: Sequence[str], cells: Mapping[str, Sequence[str]]) -> None:
    """Print a line for each name in ``values``: the name, a bar, of which the longest fills the terminal, and the
    ``cells`` of that name under the headings ``columns``."""
    table = Table(box=None, expand=True, pad_edge=False, header_style="")
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, value in values.items():
        table.add_row(name, Bar(max(values.values()), 0, value, color="green"), *cells[name])
    output().print(table)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show ``what`` beside a spinner on standard error while the block runs; nothing if that is not a terminal."""
    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress(total: int, unit: str, quiet: bool = False) -> Iterator[Moved | None]:
    """Show a progress bar of ``total`` units, and an estimate of the time that remains, while the block runs.

    Yields a function that takes the number of units done and a note, and updates the bar. Yields None, and prints
    nothing, if standard error is not a terminal, or if it is to be ``quiet``.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)
