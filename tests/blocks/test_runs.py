"""Neighbouring blocks stay together in block tables, and ``stats`` tells how well."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from kvpagoda import KVCache, RetryLater, Schema
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.schema import Attention, Layer

FULL = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
GEMMA = Schema.from_hf_config(
    dict(
        model_type="gemma3_text", vocab_size=10**6, hidden_size=48, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, sliding_window=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    dtype="float32",
)  # fmt: skip


def counted(cache: KVCache) -> list[float]:
    """Return the blocks per run of each group, counted block by block."""
    found = list[float]()
    for group in cache.core.groups:
        num_blocks = num_runs = 0
        for slot in cache.core.running:
            before = None
            for place in group.held_places(slot).tolist():
                num_blocks += 1
                num_runs += before is None or place != before + 1
                before = place
        found.append(num_blocks / num_runs if num_runs else 0.0)
    return found


@pytest.mark.parametrize(("schema", "budget"), [(FULL, "4KiB"), (GEMMA, "64KiB")])
def test_the_figure_is_that_of_a_plain_count(schema: Schema, budget: str) -> None:
    cache = KVCache(schema, budget, block_size=4, max_requests=5, device="none")
    rng, running, seen = np.random.default_rng(3), list[Sequence](), set[float]()
    assert [group.blocks_per_run for group in cache.stats().groups] == [0.0] * len(cache.core.groups)
    for number in range(80):
        if running and (len(running) == 5 or rng.integers(2)):
            running.pop(int(rng.integers(len(running)))).close()
        prompt = rng.integers(1000 * number, 1000 * number + 999, int(rng.integers(4, 90))).astype(np.int32)
        try:
            running.append(cache.open(prompt, reserve=100))
        except RetryLater:
            continue
        running[-1].commit(prompt)
        for sequence in running:
            if sequence.length < 100:
                sequence.extend(1)
                sequence.commit([7])
        figures = [group.blocks_per_run for group in cache.stats().groups]
        assert figures == counted(cache)
        seen.update(figures)
    assert len(seen) > 20 and cache.stats().evicted_blocks > 0


def test_runs_stay_long_under_pressure() -> None:
    """Requests of 120 to 480 blocks; while one is opened the others decode, a block each. Handed out as
    they were freed, blocks have runs of 4.8 here."""
    cache = KVCache(FULL, num_blocks=4000, block_size=4, max_requests=17, device="none")
    rng, running, figures = np.random.default_rng(0), deque[tuple[Sequence, int]](), list[float]()
    for number in range(300):
        prompt = np.arange(2000 * number, 2000 * number + int(rng.integers(480, 1920)), dtype=np.int32)
        sequence = None
        while sequence is None:
            try:
                sequence = cache.open(prompt, reserve=len(prompt) + 40)
                sequence.commit(prompt)
            except RetryLater:
                pass
            for _ in range(len(running)):
                one, end = running.popleft()
                one.extend(4)
                one.commit([1, 2, 3, 4])
                if one.length < end:
                    running.append((one, end))
                else:
                    one.close()
        running.append((sequence, len(prompt) + 4 * int(rng.integers(1, 8))))
        figures.append(cache.stats().groups[0].blocks_per_run)
    cache.check()
    assert np.mean(figures[100:]) > 7
