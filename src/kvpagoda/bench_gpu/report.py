"""``kvpagoda bench gpu``: tables of the figures with their bounds, and the file that keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import kvpagoda
from kvpagoda.bench_gpu.card import Card
from kvpagoda.bench_gpu.measure import all_cases, run
from kvpagoda.bench_gpu.rows import (
    BLOCKS,
    CARD,
    HEADS,
    INDEX_KEYS,
    LATENTS,
    LOOP,
    NVFP4_ROWS,
    STEPS,
    SWAP,
    TIER,
    BenchRow,
    RowSizes,
)
from kvpagoda.console import progress
from kvpagoda.text import table, wrapped
from kvpagoda.units import format_bytes

_ROWS = "append and gather: percent of a copy on the device that moves as many bytes; few: an append of 256 rows"
NOTES = {
    CARD: "a copy on the device, of which reads and writes count; page-locked copies in and out",
    STEPS: "256 requests: time that the host is held, without a device, on an idle one, and behind 4 ms of its work; begins: "
    "steps in which all requests begin a block",
    LOOP: "a step of a replayed graph: time that the device works, and that a step takes where the host waits for its tokens, "
    "and where it prepares the next one meanwhile (ahead)",
    HEADS: f"8 heads of 128 or 64 elements. {_ROWS}", LATENTS: _ROWS, INDEX_KEYS: _ROWS, NVFP4_ROWS: _ROWS,
    BLOCKS: "percent of a copy on the device that moves as many bytes; host: time of a call that copies 1 and 64 blocks",
    TIER: "percent: of a page-locked copy that way; evict: time that a request is held which evicts 64 blocks",
    SWAP: "percent: of a page-locked copy that way; first: the first time, when memory is page-locked",
}  # fmt: skip
"""Part -> what its figures are."""
UNITS = {"percent": "%", "us": "us", "gbps": "GB/s", "ms_a_gib": "ms/GiB"}
"""End of a figure's name -> its unit."""


def bench(card: Card, sizes: RowSizes, quiet: bool = False) -> tuple[list[BenchRow], bool]:
    """Run every case on ``card``; return the rows, and whether Ctrl-C ended it before the last. ``quiet``: show no
    progress."""
    rows = list[BenchRow]()
    with card.active():
        cases = all_cases(card, sizes.within(card.free_nbytes()))
    try:
        with progress(len(cases), "cases", quiet) as moved:
            for row in run(card, cases, moved):
                rows.append(row)  # one by one: an interrupt leaves those that are done
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def save(found: dict[str, Any], folder: Path | None = None) -> Path:
    """Write what ``result`` returned to ``gpu_<card>.json``, and return the path. ``folder``: None: ``benchmarks/results`` of
    a source checkout, elsewhere the current one. Raises OSError."""
    results = Path(kvpagoda.__file__).parents[2] / "benchmarks" / "results"
    name = re.sub(r"\W+", "_", str(found["machine"]["card"]).lower()).strip("_")
    path = (folder or (results if results.is_dir() else Path())) / f"gpu_{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def title(facts: Mapping[str, object]) -> str:
    """Return the card and the versions in one line."""
    versions = ", ".join(f"{name} {facts[name] or 'unknown'}" for name in ("driver", "torch", "triton", "kvpagoda"))
    return f"{facts['card']}, {format_bytes(int(str(facts['card_nbytes'])))}: {versions}"


def text(rows: Sequence[BenchRow], width: int | None = None) -> str:
    """Return tables of ``rows``, one for each part, at most ``width`` columns wide."""
    lines = list[str]()
    for part, group in groupby(rows, key=lambda row: row.part):
        of_part = [*group]
        lines += [*wrapped(f"{part}: {NOTES[part]}", width, "  "), ""]
        if done := [row for row in of_part if not row.failed]:
            lines += [*_table(done, width), ""]
        for row in of_part:
            if row.failed:
                lines += [*wrapped(f"failed: {row.case}: {row.failed}", width, "  "), ""]
    bounds = [row.meets(name) for row in rows for name in row.bounds]
    failed = sum(bool(row.failed) for row in rows)
    told = f"{sum(map(bool, bounds))} of {len(bounds)} figures meet their bounds; * does not"
    lines += wrapped(f"{told}{f'; {failed} of {len(rows)} cases failed' if failed else ''}", width)
    return "\n".join(lines)


def _table(rows: list[BenchRow], width: int | None) -> list[str]:
    names = [*rows[0].figures]
    heads = ["", *(_head(name, rows) for name in names)]
    return table(heads, [[row.case, *(_cell(row, name) for name in names)] for row in rows], left=[""], width=width)


def _head(name: str, rows: list[BenchRow]) -> str:
    """Return the heading of a figure: its name, its unit and its bound."""
    unit = next(end for end in UNITS if name.endswith(f"_{end}"))
    bounds = {str(row.bounds[name]): None for row in rows if name in row.bounds}
    return "\n".join((name.removesuffix(f"_{unit}").replace("_", " "), UNITS[unit], *list(bounds)[:1]))


def _cell(row: BenchRow, name: str) -> str:
    value = row.figures[name]
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"
    return shown + ("*" if row.meets(name) is False else "")
