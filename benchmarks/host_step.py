"""CPU time of the host's part of a decode step, ours alone. It runs in turns with a fixed piece of numpy work, whose
times show the noise of the machine.

The second case has models with windows and with states beside full attention, and all requests begin a block in the same
step: ``completes_us`` and ``begins_us`` are the medians of the step whose tokens complete a block of each request, and of
the step that begins the next.

``kv_indices`` is left out: on a GPU, a kernel makes it from the block table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from time import thread_time_ns

import numpy as np
import numpy.typing as npt

from benchmarks.peers.ours import ARRAYS, FULL
from benchmarks.timing import Options, Row, tell
from kvpagoda import KVCache, Limits, PersistentBatch, Schema

QUESTION = "What CPU time does the host's part of a decode step take, at the median, in the mean and at most?"
BLOCK_SIZE, TURN = 16, 64
_BASE = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 32_000, "max_position_embeddings": 262_144,
}  # fmt: skip
MODELS: dict[str, tuple[Schema, tuple[int, ...]]] = {
    "full attention": (FULL, (0,)),
    "windows, Gemma-like": (
        Schema.from_hf_config({
            **_BASE, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 1024,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 5 + ["full_attention"],
        }, dtype="bfloat16"),
        (0, 5),
    ),
    "states, Qwen3-Next-like": (
        Schema.from_hf_config({
            **_BASE, "model_type": "qwen3_next", "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        }, dtype="bfloat16"),
        (3,),
    ),
}  # fmt: skip
"""Name -> its layers, and one layer of each of its groups that has a block table."""


def running(requests: int, context: int, steps: int, staggered: bool, schema: Schema = FULL) -> PersistentBatch:
    """Return a persistent batch of ``requests`` requests of ``context`` tokens each, with room for ``steps`` steps.

    ``staggered``: a sixteenth of the requests begins a block in every step; otherwise all begin one at once."""
    longest = context + BLOCK_SIZE + steps
    cache = KVCache(
        schema, num_blocks=requests * (longest // BLOCK_SIZE + 2), max_requests=requests, block_size=BLOCK_SIZE,
        limits=Limits(max_context=longest), device="none",
    )  # fmt: skip
    sequences = []
    for i in range(requests):
        text = np.full(context + i % BLOCK_SIZE * staggered, i, np.int32)
        sequence = cache.open(text, reserve=longest)
        while sequence.length < context:
            sequence.commit(text[sequence.length :][: cache.step_limit(sequence)])
        sequences.append(sequence)
    return cache.persistent_batch(sequences)


def step(batch: PersistentBatch, layers: tuple[int, ...] = (0,)) -> None:
    """Run a step with one token for every request, and make the index arrays of the groups of ``layers``."""
    made = batch.extend()
    for layer in layers:
        arrays = made.layer(layer).arrays
        for name in ARRAYS:
            getattr(arrays, name)  # an array is made when it is read
    batch.commit(np.ones(len(batch.sequences), np.int32))


def blocks_begin(options: Options) -> list[Row]:
    """Return the rows of the second case: steps of each model in turns, its requests all at the same place in a block."""
    requests, context, turns = (16, 256, 1) if options.quick else (256, 1024, 16)
    rounds = turns * TURN // BLOCK_SIZE
    work = {
        name: partial(step, running(requests, context, (turns + 1) * TURN, False, schema), layers)
        for name, (schema, layers) in MODELS.items()
    }
    taken: dict[str, npt.NDArray[np.float64]] = {name: np.zeros((rounds, BLOCK_SIZE)) for name in work}
    for _ in range(TURN):
        for call in work.values():
            call()
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        for name, call in work.items():
            for at in range(BLOCK_SIZE):  # the step for token ``at`` of a block
                start = thread_time_ns()
                call()
                taken[name][number, at] = (thread_time_ns() - start) / 1e3
    gc.unfreeze()
    full = taken["full attention"]
    return [
        {
            "case": f"{requests} requests of {context:,} tokens, blocks begin together", "who": name,
            "us": float(np.median(times)), "mean_us": float(times.mean()), "p99_us": float(np.percentile(times, 99)),
            "completes_us": float(np.median(times[:, -1])), "begins_us": float(np.median(times[:, 0])),
            "p99_of_full": float(np.percentile(times, 99) / np.percentile(full, 99)), "steps": times.size,
        }
        for name, times in taken.items()
    ]  # fmt: skip


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
    ] + blocks_begin(options)  # fmt: skip


if __name__ == "__main__":
    tell("host_step", QUESTION, measure)
