"""What commands print: text on standard output, progress on standard error. Needs rich, of the ``cli`` extra."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvpagoda.text import wrapped

Moved = Callable[[float, str], None]


def output() -> Console:
    """Standard output, as wide as the terminal; text is printed as it is."""
    return Console(highlight=False, markup=False)


def say(line: str, indent: int = 0) -> None:
    """Print a line, broken at spaces where the terminal is narrower, with what follows indented; as it is where nobody says
    how wide (in a pipe)."""
    out = output()
    is_known = out.is_terminal or "COLUMNS" in os.environ
    out.print("\n".join(wrapped(line, out.width if is_known else None, " " * indent)), soft_wrap=True)


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
