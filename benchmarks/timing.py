"""What the benchmarks share: medians, the machine they were taken on, and how a result is told and kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(calls: Mapping[str, Callable[[], object]], runs: int = 7, repeat: int = 1) -> dict[str, float]:
    """Median seconds of each call over ``runs`` rounds; a round times all of them in turn, each the best of ``repeat``."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            taken[name].append(min(seconds(call) for _ in range(repeat)))
    return {name: median(times) for name, times in taken.items()}


def machine() -> dict[str, str | int | None]:
    """Where and with what this was measured."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("kvpagoda", "numpy", "torch")},
    }


def tell(name: str, question: str, measure: Callable[[], list[Row]]) -> None:
    """Measure and print rows, as JSON with ``--json``; with ``--save`` keep them in ``benchmarks/results/<name>.json``."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", action="store_true", help=f"also write benchmarks/results/{name}.json")
    options = parser.parse_args()
    result = {"question": question, "machine": machine(), "rows": measure()}
    text = json.dumps(result, indent=2)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text if options.json else _table(question, result["rows"]))


def _table(question: str, rows: list[Row]) -> str:
    lines = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        [question, "", *("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)]
    )


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
