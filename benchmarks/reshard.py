"""How fast copies between layouts are planned, and how fast they run compared with copying memory.

Each case is a pair of layouts of the same content. ``spans_a_second``: spans that are planned, merged and sorted in a
second. ``us``: time of one run with the default number of threads. ``one_thread_percent``, ``one_copy_percent``: speed
on one thread and by default, as a share of the speed of one ``np.copyto`` of all bytes on one thread. For many bytes,
the C library makes this copy with stores that bypass the processor's caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.timing import Options, Row, medians, tell
from kvpagoda.layouts import Layout, named, reshard

QUESTION = "How fast are copies between layouts planned and made?"
Pair = tuple[tuple[Layout, ...], tuple[Layout, ...]]


def measure(options: Options) -> list[Row]:
    return [_row(options, case, *pair) for case, pair in cases(512 if options.quick else 4096).items()]


def cases(tokens: int) -> dict[str, Pair]:
    """Return the cases: name -> (source layouts by rank, target layouts by rank)."""
    gqa: dict[str, Any] = dict(layers=8, tokens=tokens, heads=8, head_dim=128)
    latent: dict[str, Any] = dict(layers=24, tokens=2 * tokens)
    flashinfer, hnd = named("vllm-flashinfer", **gqa), named("vllm-flashinfer-hnd", **gqa)
    return {
        "one block a layer -> all layers of a block": (flashinfer.split(), named("vllm-cross-layer", **gqa).split()),
        "pages of 16 -> 64": (flashinfer.split(), named("vllm-flashinfer", page_size=64, **gqa).split()),
        "2 ranks -> 8, heads outermost": (hnd.split(2), hnd.split(8)),
        "1 rank -> 4, tokens outermost": (flashinfer.split(), flashinfer.split(4)),
        "tokens outermost -> heads outermost": (flashinfer.split(), hnd.split()),
        "584-byte rows, pages of 64 -> 32": (
            named("vllm-dsv4", page_size=64, **latent).split(),
            named("vllm-dsv4", page_size=32, **latent).split(),
        ),
        "528-byte rows, inline -> footer": (
            named("sglang-v41-inline", **latent).split(),
            named("sglang-v41", **latent).split(),
        ),
    }


def _row(options: Options, case: str, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Row:
    """Plan and run the copy from ``sources`` to ``targets`` and return its row."""
    plan = reshard(sources, targets)
    given = [np.full(rank.nbytes, 1, np.uint8) for rank in sources]
    taken = [np.full(rank.nbytes, 2, np.uint8) for rank in targets]
    plain, copied = np.full(plan.nbytes, 1, np.uint8), np.full(plan.nbytes, 2, np.uint8)
    times = medians(
        {
            "plan": lambda: reshard(sources, targets).by_rank,
            "run": lambda: plan.run(given, taken),
            "one thread": lambda: plan.run(given, taken, threads=1),
            "copy": lambda: np.copyto(copied, plain),
        },
        options.runs,
    )
    cost = plan.to_dict()
    return {
        "case": case,
        "MB": plan.nbytes / 1e6,
        "spans": cost["spans"],
        "median_bytes": cost["median"],
        "spans_a_second": cost["spans"] / times["plan"],
        "us": times["run"] * 1e6,
        "one_thread_percent": 100 * times["copy"] / times["one thread"],
        "one_copy_percent": 100 * times["copy"] / times["run"],
    }


if __name__ == "__main__":
    tell("reshard", QUESTION, measure)
