"""A captured decode loop: how long a step takes where the host waits for each, and where it is one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from time import perf_counter

import numpy as np
import torch

from kvpagoda.bench_gpu.card import Card
from kvpagoda.bench_gpu.rows import LOOP, BenchCase, RowBound, RowSizes, at_most
from kvpagoda.bench_gpu.steps import FULL, BenchSteps, schemas

ROWS, WORK = 64, 1e-3
"""Rows of the loop, and seconds of work of each of its steps: a small model's."""
TIMES_DEVICE = 1.2
"""How much longer a step may take than the device works, where the host is one step ahead."""


def cases(card: Card, sizes: RowSizes) -> Iterator[BenchCase]:
    """Yield the case of this file."""
    yield BenchCase(LOOP, f"{min(ROWS, sizes.requests)} rows", partial(measure_loop, card, sizes))


def measure_loop(card: Card, sizes: RowSizes) -> tuple[dict[str, float], dict[str, RowBound]]:
    """Replay one captured step again and again. It reads the arrays of the batch, works, and says a token for each row, which
    the host has to read before it commits that step, or one step later."""
    rows, context = min(ROWS, sizes.requests), sizes.contexts[0]
    with closing(BenchSteps(schemas()[FULL], card.device, sizes, context, rows)) as steps:
        tokens = torch.zeros(rows, dtype=torch.int64, device=card.device)
        told = [card.page_locked(8 * rows).view(torch.int64) for _ in range(2)]
        events = [card.event() for _ in told]

        def work() -> None:
            card.queue(WORK)
            read = torch.stack([array.sum() for array in steps.arrays()]).sum()
            tokens.copy_(read.clamp(0, 1).expand(rows))

        def launch(turn: int) -> None:
            steps.extend()
            replay()
            told[turn % 2].copy_(tokens, non_blocking=True)
            events[turn % 2].record()

        def hear(turn: int) -> None:
            events[turn % 2].synchronize()
            steps.commit(told[turn % 2].numpy().astype(np.int32))

        def waits_for_each(turn: int) -> None:
            launch(turn)
            hear(turn)

        def one_ahead(turn: int) -> None:
            launch(turn)
            hear(turn - 1)

        steps.extend()
        replay = card.captured(work)  # the arrays of all later steps have the same addresses
        steps.commit(np.ones(rows, np.int32))
        for event in events:
            event.record()
        device = card.device_seconds(replay)
        figures = {
            "device_us": 1e6 * device,
            "waits_us": 1e6 * _a_step(card, waits_for_each, sizes.steps),
            "ahead_us": 1e6 * _a_step(card, one_ahead, sizes.steps),
        }
    return figures, {"ahead_us": at_most(TIMES_DEVICE * figures["device_us"], f"{TIMES_DEVICE:g} x device")}


def _a_step(card: Card, step: Callable[[int], None], count: int) -> float:
    """Return the seconds of a step in the mean of ``count``."""
    card.wait()
    start = perf_counter()
    for turn in range(count):
        step(turn)
    card.wait()
    return (perf_counter() - start) / count
