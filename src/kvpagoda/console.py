"""What commands print: tables on standard output, progress on standard error. Needs rich, of the ``cli`` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

Moved = Callable[[int, str], None]


def output() -> Console:
    """Standard output, as wide as the terminal; text is printed as it is."""
    return Console(highlight=False, markup=False)


def table(names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> Table:
    """A table of columns ``names``, of which those in ``left`` are aligned left, the others right. A cell is one line."""
    made = Table(box=None, pad_edge=False)
    for name in names:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


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
