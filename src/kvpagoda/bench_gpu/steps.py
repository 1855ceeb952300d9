"""The host's part of a decode step, with a device and without: on an idle device, and while the device has work to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda import KVCache, Limits, Retention, Sequence
from kvpagoda.bench_gpu.card import Call, Card
from kvpagoda.bench_gpu.rows import STEPS, BenchCase, RowBound, RowSizes, at_most
from kvpagoda.schema import Attention, Growth, Layer, Schema

BLOCK_SIZE, WARM_UP = 16, 18
"""Tokens of a block, and steps before the first that is timed: in one of them all requests begin a block."""
ARRAYS = ("block_table", "cache_seqlens", "slot_mapping", "kv_indptr", "kv_last_page_len")
"""What a step reads of each group: the arrays of FlashAttention, and of FlashInfer but ``kv_indices``."""
MORE_US, TIMES_BEHIND, TIMES_FULL = 25, 1.2, 2
"""How much longer a step may take with a device than without, behind work than on an idle device, and with windows than
with full attention when all requests begin a block."""
FULL, GEMMA, QWEN = "full", "Gemma-like", "Qwen3-Next-like"
_DELTA = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "vocab_size": 1 << 20,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "max_position_embeddings": 1 << 20, "dtype": "bfloat16",
}  # fmt: skip


def schemas() -> dict[str, Schema]:
    """Return the layers of each kind of model, with narrow rows: what a step costs does not depend on their width."""
    heads = partial(Attention, 1, 8, 8, "bfloat16")
    windows = [Layer(i, "sliding_attention", (heads(Growth(window=1024)),)) for i in range(5)]
    full = Layer(5, "full_attention", (heads(),))
    return {
        FULL: Schema((Layer(0, "full_attention", (heads(),)),)),
        GEMMA: Schema((*windows, full)),
        QWEN: Schema.from_hf_config(_DELTA),
    }


def cases(card: Card, sizes: RowSizes) -> Iterator[BenchCase]:
    """Yield a case for each context and kind of model."""
    begins: dict[int, tuple[float, float]] = {}
    for context in sizes.contexts:
        for name, schema in schemas().items():
            measure = partial(measure_steps, card, sizes, name, schema, context, begins)
            yield BenchCase(STEPS, f"{name}, {context:,}", measure)


def measure_steps(
    card: Card, sizes: RowSizes, name: str, schema: Schema, context: int, begins: dict[int, tuple[float, float]]
) -> tuple[dict[str, float], dict[str, RowBound]]:
    """Time steps of requests that have all the same length, so that all begin a block in the same step.

    ``begins``: context -> times of such a step with full attention, without a device and with one, written here for the
    models after it."""
    with closing(BenchSteps(schema, "none", sizes, context)) as steps:
        none, none_begins = steps.timed(card.held_seconds)
    with closing(BenchSteps(schema, card.device, sizes, context)) as steps:
        idle, idle_begins = steps.timed(card.held_seconds)
        behind, _ = steps.timed(partial(card.held_seconds, behind=True))
    figures = {
        "none_us": none,
        "idle_us": idle,
        "behind_us": behind,
        "none_begins_us": none_begins,
        "begins_us": idle_begins,
    }
    bounds = {
        "idle_us": at_most(none + MORE_US, f"none + {MORE_US}"),
        "behind_us": at_most(TIMES_BEHIND * idle, f"{TIMES_BEHIND:g} x idle"),
    }
    if name == FULL:
        begins[context] = none_begins, idle_begins
    elif name == GEMMA and context in begins:
        for figure, full in zip(("none_begins_us", "begins_us"), begins[context]):
            bounds[figure] = at_most(TIMES_FULL * full, f"{TIMES_FULL} x full")
    return figures, bounds


class BenchSteps:
    """Decode steps of ``sizes.requests`` requests of ``context`` tokens each, in a cache of their own, made here."""

    def __init__(
        self, schema: Schema, device: torch.device | str, sizes: RowSizes, context: int, requests: int | None = None
    ) -> None:
        requests, self._steps = requests or sizes.requests, sizes.steps
        longest = context + WARM_UP + 2 * sizes.steps + BLOCK_SIZE
        self.cache = KVCache(
            schema, num_blocks=requests * (-(-longest // BLOCK_SIZE) + 2), max_requests=requests, block_size=BLOCK_SIZE,
            device=device, limits=Limits(max_context=longest, swap=0), retention=Retention(checkpoints=requests),
        )  # fmt: skip
        sequences = [self._begun(i, context, longest) for i in range(requests)]
        self._batch = self.cache.persistent_batch(sequences)
        self._tokens = np.ones(requests, np.int32)
        groups = {layer.growth: layer.index for layer in schema.layers if layer.block_rows()}
        self._layers = [*groups.values()]
        for _ in range(WARM_UP):
            self.step()

    def _begun(self, number: int, context: int, longest: int) -> Sequence:
        """Return a request whose prompt of ``context`` tokens, which no other has, is committed."""
        text = np.full(context, number, np.int32)
        sequence = self.cache.open(text, capacity=0, reserve=longest)
        while sequence.length < context:
            piece = min(context - sequence.length, self.cache.step_limit(sequence))
            sequence.extend(piece)
            sequence.commit(text[:piece])
        return sequence

    def step(self) -> None:
        """Make room for a token of each request, read the arrays of each group, and commit the tokens."""
        self.extend()
        self.commit(self._tokens)

    def extend(self) -> None:
        """Make room for a token of each request, and read the arrays of each group."""
        self._made = self._batch.extend()
        self.arrays()
        _ = self._made.state_indices, self._made.state_writes

    def arrays(self) -> list[torch.Tensor]:
        """Return the arrays of the last step: each is made when it is first read."""
        groups = [self._made.layer(index).arrays for index in self._layers]
        return [getattr(arrays, name) for arrays in groups for name in ARRAYS]

    def commit(self, tokens: npt.NDArray[np.int32]) -> None:
        """Commit a token of each request."""
        self._batch.commit(tokens)

    def timed(self, time: Callable[[Call], float]) -> tuple[float, float]:
        """Run steps; return the median microseconds of all, and of those in which all requests begin a block."""
        taken, beginning = [], []
        for _ in range(self._steps):
            begins = self._batch.sequences[0].length % BLOCK_SIZE == 0
            taken.append(time(self.step))
            if begins:
                beginning.append(taken[-1])
        return 1e6 * median(taken), 1e6 * median(beginning or taken)

    def close(self) -> None:
        """Close the requests and the cache."""
        self.cache.close()
