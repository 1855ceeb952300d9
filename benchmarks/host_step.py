"""CPU time of the host's part of a decode step, ours alone. It runs in turns with a fixed piece of numpy work, whose
times show the noise of the machine.

``kv_indices`` is left out: on a GPU, a kernel makes it from the block table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from time import thread_time_ns

import numpy as np

from benchmarks.peers.ours import ARRAYS, FULL
from benchmarks.timing import Options, Row, tell
from kvpagoda import KVCache, Limits, PersistentBatch

QUESTION = "What CPU time does the host's part of a decode step take, at the median, in the mean and at most?"
BLOCK_SIZE, TURN = 16, 64


def running(requests: int, context: int, steps: int, staggered: bool) -> PersistentBatch:
    """Return a persistent batch of ``requests`` requests of ``context`` tokens each, with room for ``steps`` steps.

    ``staggered``: a sixteenth of the requests begins a block in every step; otherwise all begin one at once."""
    longest = context + BLOCK_SIZE + steps
    cache = KVCache(
        FULL, num_blocks=requests * (longest // BLOCK_SIZE + 2), max_requests=requests, block_size=BLOCK_SIZE,
        limits=Limits(max_context=longest), device="none",
    )  # fmt: skip
    sequences = []
    for i in range(requests):
        text = np.full(context + i % BLOCK_SIZE * staggered, i, np.int32)
        sequence = cache.open(text, reserve=longest)
        sequence.commit(text[sequence.length :])
        sequences.append(sequence)
    return cache.persistent_batch(sequences)


def step(batch: PersistentBatch) -> None:
    """Run a step with one token for every request, and make the index arrays of one group."""
    arrays = batch.extend().layer(0).arrays
    for name in ARRAYS:
        getattr(arrays, name)  # an array is made when it is read
    batch.commit(np.ones(len(batch.sequences), np.int32))


def measure(options: Options) -> list[Row]:
    requests, context, turns = (16, 256, 2) if options.quick else (256, 131_072, 32)
    work: dict[str, Callable[[], object]] = {}
    for name, staggered in (("blocks begin together", False), ("staggered", True)):
        work[name] = partial(step, running(requests, context, (turns + 1) * TURN, staggered))
    values = np.arange(requests)
    work["noise: 40 sums of numpy"] = lambda: [values + i for i in range(40)]
    taken: dict[str, list[int]] = {name: [] for name in work}
    for _ in range(TURN):
        for call in work.values():
            call()
    gc.collect()
    gc.freeze()
    for _ in range(turns):
        for name, call in work.items():
            for _ in range(TURN):
                start = thread_time_ns()
                call()
                taken[name].append(thread_time_ns() - start)
    gc.unfreeze()
    return [
        {
            "case": f"{requests} requests of {context:,} tokens", "who": name, "us": median(times) / 1e3,
            "mean_us": mean(times) / 1e3, "best_us": min(times) / 1e3, "most_us": max(times) / 1e3, "steps": len(times),
        }
        for name, times in taken.items()
    ]  # fmt: skip


if __name__ == "__main__":
    tell("host_step", QUESTION, measure)
