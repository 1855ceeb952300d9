"""Is a new source tree slower than an old one? ``python -m benchmarks.heads --old /path/to/old/src --new src``.

Both trees do the same work, defined by the same ``head_cases``. Each measurement runs in its own process, forked from
one that has imported the tree. The work is cut into slices of some milliseconds. The two trees run slices in turns for
at least ``ENOUGH`` seconds, so that other load on the machine affects both alike. A tree's time is the sum, over the
slices of a pass, of the median CPU seconds of each slice. All of this is repeated (``--repeats``) with new processes,
which have other memory addresses. The ratio is the median of the ratios of the repeats; ``+-`` is half the distance
between their quartiles. ``calls``: number of function calls of a pass, new/old; it is the same in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from benchmarks.timing import Row, machine

ROOT = Path(__file__).parents[1]
ENOUGH = 0.7
"""Least CPU seconds of each tree and case in one repeat."""
WORDS = ("replay", "tree", "step", "lookup", "evict", "swap", "tier", "hybrid")
"""The first words of the case names, for ``--only``."""


class Head:
    """One source tree, loaded in its own process."""

    def __init__(self, source: Path) -> None:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }  # fmt: skip
        self.source = source
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.head_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip

    def begin(self, case: str, quick: bool) -> None:
        """Prepare one case. Raises SystemExit with the tree and its error."""
        self._ask({"case": case, "quick": quick})

    def slice(self, count: bool = False) -> tuple[int, float]:
        """Run the next slice of the case. Return its number in the pass, and its CPU seconds or, if ``count``, its
        number of function calls."""
        answer = self._ask({"count": count})
        return answer["slice"], answer["found"]

    def end(self) -> None:
        """End the case."""
        self._write({"end": True})

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        self._write(what)
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"its process ended ({self._child.wait()})"}
        if "error" in answer:
            raise SystemExit(f"{self.source}: {what}: {answer['error']}")
        return answer

    def _write(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()

    def __enter__(self) -> Head:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()


def measure(old: Path, new: Path, names: list[str], repeats: int, quick: bool = False, told: Any = None) -> list[Row]:
    """Measure the cases ``names`` in both trees. Return a row for each: milliseconds of a pass, their ratio and its
    spread, the ratio of calls.

    ``told``: called with the name of each case before it is measured.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    calls = {}
    for repeat in range(repeats):
        with Head(old) as a, Head(new) as b:
            heads = (a, b) if repeat % 2 else (b, a)  # alternate: the order affects the processor's caches
            for name in names:
                if told is not None:
                    told(f"{name}, {repeat + 1} of {repeats}")
                for head in heads:
                    head.begin(name, quick)
                seconds = in_turns(heads, 0.0 if quick else ENOUGH)
                taken[name].append((seconds[a], seconds[b]))
                if name not in calls:
                    calls[name] = {head: _pass(head) for head in heads}
                    calls[name] = calls[name][b] / calls[name][a]
                for head in heads:
                    head.end()
    return [_row(name, pairs, calls[name]) for name, pairs in taken.items()]


def in_turns(heads: tuple[Head, Head], enough: float) -> dict[Head, float]:
    """Run whole passes in both trees, slice by slice in turns, for at least ``enough`` seconds. Return the seconds of a
    pass for each tree: the sum of the medians of its slices."""
    times: dict[Head, dict[int, list[float]]] = {head: {} for head in heads}
    number, spent = -1, 0.0
    while number or spent < enough:
        for head in heads:
            number, seconds = head.slice()
            times[head].setdefault(number, []).append(seconds)
        spent += seconds
    return {head: sum(map(median, times[head].values())) for head in heads}


def _pass(head: Head) -> float:
    """Run one pass and return its number of function calls."""
    number, total = -1, 0.0
    while number:
        number, count = head.slice(count=True)
        total += count
    return total


def _row(name: str, pairs: list[tuple[float, float]], calls: float) -> Row:
    """Return the row of a case from the (old, new) seconds of each repeat and the ratio of calls."""
    ratios = [new / old for old, new in pairs]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "case": name, "old_ms": 1e3 * median(old for old, _ in pairs), "new_ms": 1e3 * median(new for _, new in pairs),
        "ratio": median(ratios), "spread": (high - low) / 2, "calls": calls, "ratios": ratios,
    }  # fmt: skip


def table(rows: list[Row]) -> Table:
    """Return the rows as a table: red if the new tree takes over 3 % longer, green if over 3 % less."""
    made = Table(box=None, pad_edge=False)
    made.add_column("case", no_wrap=True)
    for title in ("old", "new", "new/old", "+-", "calls"):
        made.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row["ratio"] > 1.03 else "green" if row["ratio"] < 0.97 else None
        made.add_row(
            row["case"], f"{row['old_ms']:,.2f} ms", f"{row['new_ms']:,.2f} ms", f"{row['ratio']:.3f}",
            f"{row['spread']:.3f}", f"{row['calls']:.3f}", style=style,
        )  # fmt: skip
    return made


@contextmanager
def _progress(steps: int) -> Iterator[Any]:
    """Yield a function that advances a progress bar by one of ``steps``, or None if standard error is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps, note="")
        yield lambda note: progress.update(task, advance=1, note=note)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description="Compare two source trees.")
    parser.add_argument(
        "--old", type=Path, required=True, help="folder that holds the old kvpagoda package, e.g. ../old/src"
    )
    parser.add_argument("--new", type=Path, default=ROOT / "src", help="folder that holds the new one (default: this)")
    parser.add_argument("--only", default="", help=f"cases that begin with these words, of: {', '.join(WORDS)}")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of processes; a ratio is the median over them")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    from benchmarks.head_cases import cases

    for source in (asked.old, asked.new):
        if not (source / "kvpagoda" / "__init__.py").exists():
            parser.error(f"no package kvpagoda in {source}")
    only = tuple(word.strip() for word in asked.only.split(",") if word.strip())
    names = [name for name in cases(asked.quick) if not only or name.startswith(only)]
    if not names or asked.repeats < 1:
        parser.error(f"nothing to measure: --only {asked.only}, --repeats {asked.repeats}")
    started = machine()
    with _progress(len(names) * asked.repeats) as told:
        rows = measure(asked.old.resolve(), asked.new.resolve(), names, asked.repeats, asked.quick, told)
    if asked.json:
        print(json.dumps({"machine": started, "repeats": asked.repeats, "rows": rows}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(table(rows))
        console.print(f"CPU time of a pass; medians of {asked.repeats} pairs of processes; {started['cpu']}")


if __name__ == "__main__":
    main()
