"""Steps in which many requests begin or complete a block: few calls for all of them, and the same as one after another."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvpagoda
from kvpagoda import KVCache, Limits
from kvpagoda.core.batch.persistent import PersistentBatch
from kvpagoda.core.batch.step_buffers import TableSnapshot
from kvpagoda.core.blocks.group import BlockNames
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.groups import WindowGroup
from kvpagoda.schema import Attention, Growth, Layer, Schema

HOME = str(Path(kvpagoda.__file__).parent)
FULL = Attention(1, 2, 2, "float32")
WINDOW = Attention(1, 2, 2, "float32", Growth(window=32))
MANY, SIZE = 256, 4


def cache_of(*kinds: Attention, **arguments: Any) -> KVCache:
    layers = tuple(Layer(i, "attention", (kind,)) for i, kind in enumerate(kinds))
    usual = {"max_requests": MANY, "block_size": SIZE, "limits": Limits(max_context=512), "device": "none"}
    return KVCache(Schema(layers, "test", vocab_size=1000), **{**usual, **arguments})


def together(cache: KVCache, prompts: list[list[int]]) -> PersistentBatch:
    """Return a persistent batch of one request for each of ``prompts``, which are committed."""
    sequences = [cache.open(prompt, reserve=320) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts):
        sequence.commit(prompt[sequence.length :])
    return cache.persistent_batch(sequences)


def calls_of_steps(*kinds: Attention) -> list[int]:
    """Return how many Python calls of the package each of the last ``SIZE`` steps makes, the first of which begins a block of
    each of 256 requests."""
    cache = cache_of(*kinds, num_blocks=MANY * 130)
    batch, tokens, count = together(cache, [[i] * 64 for i in range(MANY)]), np.ones(MANY, np.int32), [0]

    def note(frame: FrameType, event: str, _: object) -> None:
        count[-1] += event == "call" and frame.f_code.co_filename.startswith(HOME)

    for number in range(12 * SIZE):
        if number >= 11 * SIZE:
            count.append(0)
            sys.setprofile(note)
        try:
            step = batch.extend()
            for layer in range(len(kinds)):
                np.asarray(step.layer(layer).arrays.block_table)
            batch.commit(tokens)
        finally:
            sys.setprofile(None)
    cache.check()
    return count[1:]


def test_a_step_that_begins_a_block_of_all_requests_makes_no_call_for_each() -> None:
    """An eighth of the requests is settled in the step that completes their blocks: the tree takes one text after another."""
    full, mixed = calls_of_steps(FULL), calls_of_steps(FULL, WINDOW)
    usual, begins, completes = mixed[1], mixed[0], mixed[-1]
    assert max(full) < MANY and begins < MANY, (full, mixed)
    assert begins - usual < MANY / 4 and begins < 2.5 * full[0], (full, mixed)
    assert completes - usual < 24 * MANY / 8, (full, mixed)


def state_of(cache: KVCache) -> list[object]:
    """Return who owns which block, in which order blocks are allocated and evicted next, and what can be found."""
    found: list[object] = [[request.slot for request in cache.core.waiting]]
    for group in cache.core.groups:
        found += [group.table.cells, group.firsts, group.shares, group.ends, group.reserves, group.outstanding]
        found += [
            group.free.peek(group.free.num_free),
            group.num_held,
            group.surplus,
            group.num_cold,
            group.oldest(),
        ]
        if isinstance(group, WindowGroup):
            found.append([name for turn, ids in group._queue for name in ids[group._uses[ids] == -turn].tolist()])
    nodes = cache.core.prefix.tree.nodes()
    return [*found, [(node.used, node.uses, node.num_pinned, node.ids.tolist()) for node in nodes]]


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WINDOW), (WINDOW,)], ids=["full", "full and window", "window"])
@pytest.mark.parametrize("num_blocks", [1000, 2400])
def test_requests_that_are_settled_together_leave_what_they_leave_one_after_another(
    kinds: tuple[Attention, ...], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some texts are alike, so that blocks are duplicates, and requests come and go; memory lacks in the small cache."""
    caches = [cache_of(*kinds, num_blocks=num_blocks, max_requests=12) for _ in range(2)]
    few, many = (cache._settler for cache in caches)
    settle, join, sizes = few.settle, many._together, [0]
    monkeypatch.setattr(few, "settle", lambda *requests: [settle(one) for one in requests])

    def joined(requests: list[RequestState], at: int) -> list[RequestState]:
        sizes.append(len(some := join(requests, at)))
        return some

    monkeypatch.setattr(many, "_together", joined)
    prompts = [[*range(8), number // 3, number // 2] * 2 for number in range(12)]
    batches = [together(cache, prompts) for cache in caches]
    random = np.random.default_rng(0)
    for number in range(240):
        tokens = random.integers(0, 2, 12).astype(np.int32) if number % 40 > 30 else np.full(12, 5, np.int32)
        for cache, batch in zip(caches, batches):
            batch.extend()
            batch.commit(tokens)
            if number % 50 == 49:
                oldest = batch.sequences[number % 12]
                batch.remove(oldest)
                oldest.close()
                prompt = [*range(8), number % 7]
                sequence = cache.open(prompt, reserve=320)
                sequence.commit(prompt[sequence.length :])
                batch.add(sequence)
        if number % SIZE == SIZE - 1:  # a step in which blocks of most requests become whole
            for one, other in zip(*map(state_of, caches)):
                np.testing.assert_equal(one, other, err_msg=f"step {number}")
    for cache in caches:
        cache.check()
    assert max(sizes) > 1 or (len(kinds) == 1 and kinds[0] is WINDOW)


def test_a_block_that_two_readers_leave_in_one_call_is_cold_when_the_last_has_left() -> None:
    (group,) = cache_of(WINDOW, num_blocks=10, max_requests=1).core.groups
    assert isinstance(group, WindowGroup)
    group.cache_blocks([], [], BlockNames(np.array([3, 4, 5, 6])))
    group.read(BlockNames(np.array([4, 5])))
    for ids in group.apart(BlockNames(np.array([3, 4, 4, 5])), [2, 2]):
        group.leave(ids)
    assert (group.num_cold, group.num_reads, group.num_read) == (2, 2, 2)
    freed = group.evict(2)
    assert freed is not None and freed.blocks[0][1].tolist() == [3, 4]


def test_a_window_that_moves_changes_the_cells_that_left_and_those_that_came() -> None:
    cells = np.arange(1, 41, dtype=np.int32).reshape(2, 20)
    slots, versions = np.array([0, 1, 0]), np.zeros(3, np.int64)
    before = TableSnapshot((slots, versions, np.array([0, 2, 3]), np.array([9, 11, 5])), [])
    after = TableSnapshot((slots, versions, np.array([2, 2, 6]), np.array([10, 11, 7])), [])
    delta = after.since(before, cells)
    changed = sorted(zip(delta.rows.tolist(), delta.columns.tolist(), delta.values.tolist()))
    assert changed == [(0, 0, 0), (0, 1, 0), (0, 9, 10), (2, 3, 0), (2, 4, 0), (2, 5, 0), (2, 6, 7)]
    assert not len(delta.renewed)
