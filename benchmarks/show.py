"""Saved results as tables for a terminal, and as plots."""

from __future__ import annotations

import io
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_CALLED = {
    "ours": "kvpagoda", "prototype": "prototype of ours", "vllm": "vLLM", "sglang": "SGLang", "hf": "transformers",
    "sglang_rust": "SGLang, Rust tree",
}  # fmt: skip
"""Name of a peer in results -> name in plots."""


def table(found: dict[str, Any], width: int = 80) -> str:
    """Return the result of one question as a text table, in lines of at most ``width`` characters. The name of a case
    is a line above its rows."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    console.print(found["question"] + "\n")
    keys = dict.fromkeys(key for row in found["rows"] for key in row)
    columns = [key for key in keys if key not in ("case", "machine") and not _is_said(key, found["rows"])]
    console.print(_lines(columns, found["rows"], [], width))
    for case, rows in groupby(found["rows"], lambda row: row.get("case")):
        if case is not None:
            console.print(case, markup=False)
        console.print(_lines(columns, found["rows"], list(rows), width))
    machine = found["machine"]
    versions = "".join(f", {name} {version}" for name, version in found.get("versions", {}).items() if version != "-")
    load = f", load {machine['load']}" if "load" in machine else ""
    console.print(f"\n{machine['cpu']}, {machine['cpus']} cores{load}, Python {machine['python']}{versions}")
    for name, reason in found.get("absent", {}).items():
        console.print(f"absent: {name} ({reason})", markup=False)
    if found.get("quick"):
        console.print("small sizes: to see that it works, not to quote")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _lines(columns: list[str], rows: list[dict[str, Any]], shown: list[dict[str, Any]], width: int) -> Table:
    """Return the lines of the rows ``shown``, or those of the header if there are none, in columns that are as wide as those
    of all ``rows``."""
    cells = {column: [_short(row.get(column)) for row in rows] for column in columns}
    heads = {column: column.replace("_", " ") for column in columns}
    widths = {column: max(map(len, (*cells[column], *heads[column].split()))) for column in columns}
    while sum(widths.values()) + len(columns) > width + 1 and max(widths.values(), default=1) > 1:
        widths[max(widths, key=lambda column: widths[column])] -= 1
    made = Table(box=None, pad_edge=False, collapse_padding=True, show_header=not shown)
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        made.add_column(heads[column], justify="left" if is_text else "right", overflow="fold", width=widths[column])
    for row in shown:
        made.add_row(*(_short(row.get(column)) for column in columns))
    return made


def _is_said(key: str, rows: list[dict[str, Any]]) -> bool:
    """Return whether no row has anything under ``key``, or the name of each row's case has it, a word."""
    found = [(row.get(key), row.get("case", "")) for row in rows]
    return all(value is None for value, _ in found) or all(
        isinstance(value, str) and value in case for value, case in found if value is not None
    )


def _short(value: object) -> str:
    """Return ``value`` for a cell: floats with three digits, or as whole numbers from 1000 on; numbers in a row as the first
    and the last; None as nothing."""
    if isinstance(value, list) and len(value) > 1 and value == [*range(value[0], value[0] + len(value))]:
        return f"{value[0]}-{value[-1]}"
    if isinstance(value, bool) or value is None or value == []:
        return str(value) if isinstance(value, bool) else ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plots(results: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Draw a plot for each question that compares peers (rows with ``over_ours``): each peer's time over ours. Return
    the paths of the PNG files in ``folder``."""
    if not any(row.get("over_ours") is not None for found in results.values() for row in found["rows"]):
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for name, found in results.items():
        rows = [row for row in found["rows"] if row.get("over_ours") is not None]
        cases = list(dict.fromkeys(row["case"] for row in rows))
        if not rows:
            continue
        figure, axes = pyplot.subplots(
            len(cases), 1, squeeze=False, sharex=True, layout="constrained",
            figsize=(7, 0.8 + sum(0.35 + 0.2 * _of(rows, case) for case in cases)),
            gridspec_kw={"height_ratios": [1 + _of(rows, case) for case in cases]},
        )  # fmt: skip
        for axis, case in zip(axes[:, 0], cases):
            of_case = [row for row in rows if row["case"] == case]
            names, times = [_called(row["who"]) for row in of_case], [row["over_ours"] for row in of_case]
            axis.hlines(names, 1, times, color="#4878a8", linewidth=2)
            axis.plot(times, names, "o", color="#4878a8", markersize=4)
            for who, over in zip(names, times):
                side, text = ("left", (6, -3)) if over >= 1 else ("right", (-6, -3))
                axis.annotate(_short(over), (over, who), text, textcoords="offset points", fontsize=7, ha=side)
            axis.axvline(1, color="#888888", linewidth=0.8)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axis.xaxis.set_minor_formatter("")
            axis.set_title(case, loc="left", fontsize=8)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.margins(x=0.12)
            axis.tick_params(labelsize=7)
        axes[-1, 0].set_xlabel("times what ours takes (left of 1: less than ours)", fontsize=8)
        figure.suptitle(textwrap.fill(found["question"], 90), fontsize=10)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
        made.append(path)
    return made


def _called(who: str) -> str:
    """Return the name of a peer for plots; what follows a comma is kept."""
    name, comma, rest = who.partition(", ")
    return _CALLED.get(name, name) + comma + rest


def _of(rows: list[dict[str, Any]], case: str) -> int:
    """Return how many of ``rows`` belong to ``case``."""
    return sum(row["case"] == case for row in rows)
