"""Costs compared with what the machine itself can do, as ratios within one run, with a margin for a busy machine."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpagoda.core.prefix import PrefixTree


def fastest(call: Callable[[], object], times: int = 60) -> float:
    """Return the seconds of the fastest of ``times`` calls."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def test_a_full_match_costs_little_more_than_one_compare() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 131_072).astype(np.int32)
    asked, ids = tokens.copy(), np.arange(1, 8193, dtype=np.int32)
    tree = PrefixTree(16)
    tree.insert(tree.match(tokens), tokens, ids[None])
    order = np.arange(8192)
    limit = fastest(lambda: (np.equal(tokens, asked), ids[order]))
    match = fastest(lambda: tree.match(asked))
    assert tree.match(asked).num_blocks == 8192
    assert match < 5 * limit, f"match {match * 1e6:.0f} us, compare and gather {limit * 1e6:.0f} us"


def cost_of_evicting(num_blocks: int, run: int) -> float:
    """Return the seconds to evict one block from a tree with texts of ``run`` blocks below 10 shared blocks."""
    tree, size = PrefixTree(4), 4
    shared = np.zeros(10 * size, np.int32)
    lease = tree.insert(tree.match(shared), shared, np.arange(1, 11, dtype=np.int32)[None], pin=True).lease
    texts = np.arange(1, num_blocks * size + 1, dtype=np.int32).reshape(-1, run * size)
    ids = np.arange(11, 11 + num_blocks, dtype=np.int32).reshape(-1, 1, run)
    for text, blocks in zip(texts, ids):
        tree.insert(lease, text, blocks, pin=False)
    assert tree.num_evictable == num_blocks
    batches = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(50):
            tree.evict(1)
        batches.append((time.perf_counter() - start) / 50)
    return min(batches)


@pytest.mark.parametrize(
    ("num_blocks", "run"),
    [(200_000, 50), (50_000, 1), pytest.param(200_000, 1, marks=pytest.mark.slow)],
)
def test_evicting_a_block_costs_the_same_in_a_large_cache(num_blocks: int, run: int) -> None:
    small, large = cost_of_evicting(1000, run), cost_of_evicting(num_blocks, run)
    assert large < 5 * small, f"{large * 1e6:.1f} us a block of {num_blocks}, {small * 1e6:.1f} us of 1,000"


MARGIN = 1.5  # for a busy machine


def benchmark(name: str) -> list[dict]:
    """Run a benchmark in a process of its own and return its rows."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json"], cwd=root, capture_output=True, check=True
    )
    return json.loads(done.stdout)["rows"]


@pytest.mark.slow
def test_the_match_benchmark_stays_within_three_compares_and_gathers() -> None:
    for row in benchmark("match"):
        if row["cached_as"] in ("one edge", "missing"):
            assert row["ratio"] < 3 * MARGIN, row


@pytest.mark.slow
def test_the_evict_benchmark_stays_flat_to_a_million_blocks() -> None:
    """Because of cold memory, a large cache may cost up to twice as much as the smallest."""
    rows = benchmark("evict")
    assert {row["cached"] for row in rows} >= {1000, 1_000_000}
    for row in rows:
        assert row["ratio"] < 2 * MARGIN, row
