"""The cost of choosing what to evict: a block with each policy, and a checkpoint, from 1,000 to 1,000,000 blocks.

The blocks belong to chats that grow by turns, which is expensive for policies that walk over inner blocks. With LRU
there is a checkpoint at each block. Measures our tree alone, without memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from benchmarks.timing import Options, Row, tell
from kvpagoda.core.prefix import POLICY_NAMES, PrefixTree

QUESTION = (
    "What does it cost to choose the block, or the checkpoint, to evict, and does it cost the same in a large cache?"
)
SIZES = (1_000, 10_000, 100_000, 1_000_000)
LENGTH = 50  # blocks of a chat
CALLS = 200  # evictions in a run, one per call


def cache_of(num_blocks: int, policy: str) -> PrefixTree:
    """Return a tree of ``num_blocks`` blocks of one token, in chats of ``LENGTH`` blocks. The chats grow in turns; at
    the end, a quarter of them is used once more."""
    tree, chats = PrefixTree(1, policy=policy, capacity=num_blocks, proves_ids=False), num_blocks // LENGTH
    texts = np.arange(num_blocks, dtype=np.int32).reshape(chats, LENGTH)
    ids, turn = texts[:, None] + np.int32(1), LENGTH // 5
    for begin in range(0, LENGTH, turn):
        for text, blocks in zip(texts, ids):
            match = tree.match(text[:begin])
            lease = tree.insert(match, text[begin : begin + turn], blocks[:, begin : begin + turn], pin=True).lease
            assert lease is not None
            tree.touch(match)
            for depth in range(begin + 1, begin + turn + 1) if policy == "lru" else ():
                tree.set_checkpoint(lease, depth, int(blocks[0, depth - 1]))
            tree.unpin(lease)
    for text in texts[::4]:
        tree.touch(tree.match(text))
    assert tree.num_evictable == num_blocks
    return tree


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    sizes = (1_000,) if options.quick else SIZES
    for policy in POLICY_NAMES:
        first: dict[str, float] = {}
        for size in sizes:
            tree, runs = cache_of(size, policy), 1 if options.quick else options.runs
            count = min(CALLS, size // (4 * runs))
            calls: dict[str, Callable[[], object]] = {f"a block, {policy}": partial(tree.evict, 1)}
            if policy == "lru":  # checkpoints have the same order with every policy
                calls["a checkpoint"] = tree.checkpoints.evict
            for case, call in calls.items():
                us = 1e6 * median(_each(call, count) for _ in range(runs))
                rows.append({"case": case, "cached": size, "us": us, "ratio": us / first.setdefault(case, us)})
    return rows


def _each(call: Callable[[], object], count: int) -> float:
    """Return the mean CPU seconds of ``count`` calls."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


if __name__ == "__main__":
    tell("victims", QUESTION, measure)
