"""Runs the measurements, one after the other: one that fails is a row that says why, and the others still run."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvpagoda.bench_gpu import crossing, formats, loop, steps
from kvpagoda.bench_gpu.card import Card
from kvpagoda.bench_gpu.rows import CARD, HEADS, SHORT, STEPS, BenchCase, BenchRow, RowSizes
from kvpagoda.errors import CheckFailed

QUESTION = "What does this library leave of the card's speed, and what of the host's time?"


def all_cases(card: Card, sizes: RowSizes) -> list[BenchCase]:
    """Return every case."""
    return [
        crossing.card_case(card, sizes), *steps.cases(card, sizes), *loop.cases(card, sizes), *formats.cases(card, sizes),
        *crossing.cases(card, sizes),
    ]  # fmt: skip


def short_cases(card: Card, sizes: RowSizes) -> list[BenchCase]:
    """Return a few cases: the card, a step with full attention, and heads in fp8 with one scale a tensor."""
    every = all_cases(card, sizes)
    return [next(case for case in every if case.part == part) for part in (CARD, STEPS, HEADS)]


def run(
    card: Card, cases: Sequence[BenchCase], moved: Callable[[float, str], None] | None = None
) -> Iterator[BenchRow]:
    """Run ``cases``, and yield the row of each. ``moved``: is told how many were run before, and the name of the next."""
    for number, case in enumerate(cases):
        if moved is not None:
            moved(number, f"{case.part}: {case.name}")
        try:
            with card.active():
                figures, bounds = case.run()
            row = BenchRow(case.part, case.name, figures, bounds)
        except Exception as error:  # any error is a row, and the others still run
            row = BenchRow(case.part, case.name, failed=" ".join(f"{type(error).__name__}: {error}".split()))
        try:
            with card.active():
                card.tidy()
        except Exception as error:  # after an illegal access every call fails; this row may be the one that made it
            row = BenchRow(case.part, case.name, failed=row.failed or f"{type(error).__name__} afterwards: {error}")
        yield row


def result(card: Card, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Return the rows, and the machine that they are of, as plain data: the form of ``benchmarks/results``."""
    return {
        "question": QUESTION,
        "machine": {
            **card.facts(), "numpy": np.__version__, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "rows": [row.to_dict() for row in rows],
    }  # fmt: skip


def short(card: Card) -> str:
    """Return what the short form found, in one line. Raises CheckFailed if a case failed."""
    sizes = SHORT.within(card.free_nbytes())
    found = {row.part: row for row in run(card, short_cases(card, sizes))}
    failed = [f"{row.part}: {row.failed}" for row in found.values() if row.failed]
    if failed:
        raise CheckFailed("; ".join(failed))
    copies, step, heads = (found[part].figures for part in (CARD, STEPS, HEADS))
    return (
        f"copies {copies['device_gbps']:,.0f} GB/s on the device, page-locked {copies['in_gbps']:.0f} in and "
        f"{copies['out_gbps']:.0f} out; heads in fp8 {heads['append_percent']:.0f} % of a copy; a step of {sizes.requests} "
        f"requests holds the host {step['idle_us']:.0f} us, behind work {step['behind_us']:.0f}, without a device "
        f"{step['none_us']:.0f}"
    )
