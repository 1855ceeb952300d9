"""Is a new source tree slower than an old one? ``python -m benchmarks.heads --old /path/to/old/src --new src``.

Both trees do the same work with the same text of ``head_cases``. Each measurement has a process of its own, forked from one
that has imported the tree; the two take turns, ``ROUNDS`` times, and the best of their CPU seconds counts. All of that is
repeated (``--repeats``) with new processes, which lie elsewhere in memory. The ratio is the median of the ratios of the
repeats; ``spread`` is half the distance between their quartiles, in percent of the ratio.
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
ROUNDS = 5
WORDS = ("replay", "tree", "step", "lookup", "evict", "swap", "tier", "hybrid")
"""What ``--only`` takes: the first words of the cases."""


class Head:
    """One source tree, loaded in a process of its own."""

    def __init__(self, source: Path) -> None:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }  # fmt: skip
        self.source = source
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.head_cases"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip

    def begin(self, case: str, quick: bool) -> None:
        """Prepare one case. Raises SystemExit with the tree and its error."""
        self._ask({"case": case, "quick": quick})

    def seconds(self) -> float:
        """Measure once: CPU seconds."""
        return float(self._ask({"go": True})["seconds"])

    def end(self) -> None:
        """The case is done."""
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
    """A row for each case: best seconds of each repeat, their ratios, the median ratio and its spread.

    ``told``: called with the name of each case before it is measured.
    """
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for repeat in range(repeats):
        with Head(old) as a, Head(new) as b:
            heads = (a, b)
            for name in names:
                if told is not None:
                    told(f"{name}, {repeat + 1} of {repeats}")
                for head, best in zip(heads, _best_in_turns(heads, name, quick)):
                    taken[name][heads.index(head)].append(best)
    return [_row(name, *seconds) for name, seconds in taken.items()]


def _best_in_turns(heads: tuple[Head, Head], case: str, quick: bool) -> tuple[float, float]:
    """The least CPU seconds of each, of ``ROUNDS`` rounds after one that does not count; who is first changes."""
    for head in heads:
        head.begin(case, quick)
    times: dict[Head, list[float]] = {head: [] for head in heads}
    for number in range(1 + ROUNDS):
        for head in heads[:: 1 if number % 2 else -1]:
            times[head].append(head.seconds())
    for head in heads:
        head.end()
    first, second = (min(times[head][1:]) for head in heads)
    return first, second


def _row(name: str, old: list[float], new: list[float]) -> Row:
    ratios = [b / a for a, b in zip(old, new)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    ratio = median(ratios)
    return {
        "case": name, "old_ms": 1e3 * median(old), "new_ms": 1e3 * median(new), "ratio": ratio,
        "spread_percent": 50 * (high - low) / ratio, "ratios": ratios,
    }  # fmt: skip


def table(rows: list[Row]) -> Table:
    made = Table(box=None, pad_edge=False)
    made.add_column("case", no_wrap=True)
    for title in ("old", "new", "new/old", "spread"):
        made.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row["ratio"] > 1.03 else "green" if row["ratio"] < 0.97 else None
        made.add_row(
            row["case"], f"{row['old_ms']:,.2f} ms", f"{row['new_ms']:,.2f} ms", f"{row['ratio']:.3f}",
            f"{row['spread_percent']:.1f}%", style=style,
        )  # fmt: skip
    return made


@contextmanager
def _progress(steps: int) -> Iterator[Any]:
    """What is told of each step: a bar on a terminal, nothing elsewhere."""
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
    parser.add_argument("--old", type=Path, required=True, help="folder that holds the old kvpagoda package, e.g. ../old/src")
    parser.add_argument("--new", type=Path, default=ROOT / "src", help="folder that holds the new one (default: this)")
    parser.add_argument("--only", default="", help=f"cases that begin with these words, of {', '.join(WORDS)}")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of processes; a ratio is the median of theirs")
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
        console.print(f"CPU time, best of {ROUNDS} turns; medians of {asked.repeats} pairs; {started['cpu']}")


if __name__ == "__main__":
    main()
