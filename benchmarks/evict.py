"""The cost of evicting a block with LRU, from 1,000 to 1,000,000 cached blocks."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from benchmarks.timing import Options, Row, tell
from kvpagoda.core.prefix import PrefixTree

QUESTION = "What does it cost to evict a block, and does it cost the same in a large cache?"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
SHAPES = {"edges of 1,000 blocks": 1000, "leaves of one block": 1}
BLOCK_SIZE, CALL, RUNS, MANY = 16, 100, 5, 10_000


def cache_of(num_blocks: int, per_edge: int) -> PrefixTree:
    """Return a tree of ``num_blocks`` blocks, in edges of ``per_edge`` blocks without a common prefix."""
    tree = PrefixTree(BLOCK_SIZE)
    texts = np.arange(num_blocks * BLOCK_SIZE, dtype=np.int32).reshape(-1, per_edge * BLOCK_SIZE)
    ids = np.arange(1, num_blocks + 1, dtype=np.int32).reshape(-1, 1, per_edge)
    for text, blocks in zip(texts, ids):
        tree.insert(tree.match(text), text, blocks)
    assert tree.num_evictable == num_blocks
    return tree


def per_block(tree: PrefixTree, num_blocks: int, calls: int) -> float:
    """Return the median CPU seconds per block over ``RUNS`` runs of ``calls`` calls that evict ``num_blocks`` each."""

    def run() -> float:
        start = time.process_time()
        for _ in range(calls):
            tree.evict(num_blocks)
        return time.process_time() - start

    return median(run() for _ in range(RUNS)) / (num_blocks * calls)


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    sizes = (10_000,) if options.quick else SIZES
    many = 1000 if options.quick else MANY
    for shape, per_edge in SHAPES.items():
        first = 0.0
        for size in sizes:
            tree = cache_of(size, per_edge)
            taken = per_block(tree, CALL, calls=1 if size < 10_000 else 10)
            first = first or taken
            rows.append(row(shape, size, CALL, taken, taken / first))
        taken = per_block(tree, many, calls=1)
        rows.append(row(shape, sizes[-1], many, taken, taken / first))
    return rows


def row(shape: str, cached: int, evicted: int, taken: float, ratio: float) -> Row:
    """Return a row: ``us_a_block`` in calls that evict ``evicted`` blocks each; ``ratio`` to the smallest cache."""
    return {"shape": shape, "cached": cached, "a_call": evicted, "us_a_block": taken * 1e6, "ratio": ratio}


if __name__ == "__main__":
    tell("evict", QUESTION, measure)
