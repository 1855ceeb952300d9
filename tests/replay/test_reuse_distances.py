"""Reuse distances, the bound and the working set against the slowest way to compute them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_cache import furthest_reuse, naive_replay

from kvpagoda.errors import BadInput
from kvpagoda.replay import Trace, lru_hits, replay, reuse_distances, reuse_histogram, working_set
from kvpagoda.replay.reuse import larger_before

CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30)


def trace_of(chains: list[list[int]], arrivals: list[float] | None = None) -> Trace:
    times = arrivals or [0.0] * len(chains)
    return Trace.read(
        {"timestamp": time * 1000, "input_length": len(chain), "output_length": 1, "hash_ids": chain}
        for chain, time in zip(chains, times)
    )


@given(CHAINS)
@settings(max_examples=300, deadline=None)
def test_reuse_distances(chains: list[list[int]]) -> None:
    assert reuse_distances(trace_of(chains)).tolist() == furthest_reuse(chains)


@given(CHAINS, st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_the_distances_give_the_hits_of_lru_at_every_capacity(chains: list[list[int]], capacity: int) -> None:
    distances = reuse_distances(trace_of(chains))
    assert lru_hits(distances, [capacity]) == [naive_replay(chains, capacity, "lru")[0]]


@given(CHAINS, st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_the_bound(chains: list[list[int]], capacity: int) -> None:
    chains = [[0], *chains]  # a trace with requests but without blocks is refused
    found = replay(trace_of(chains), capacity_blocks=capacity, policy="opt")
    assert (found.block_hits, found.evictions) == naive_replay(chains, capacity, "opt")


@given(st.lists(st.integers(0, 40), max_size=60))
@settings(deadline=None)
def test_larger_before(values: list[int]) -> None:
    expected = [sum(earlier > value for earlier in values[:i]) for i, value in enumerate(values)]
    assert larger_before(np.array(values, np.int64)).tolist() == expected


def test_the_histogram_holds_every_reuse_once() -> None:
    assert reuse_histogram(np.array([-1, 0, 0, 1, 2, 3, 4, 7, 8])) == [
        (0, 1, 2),
        (1, 2, 1),
        (2, 4, 2),
        (4, 8, 2),
        (8, 16, 1),
    ]
    assert reuse_histogram(np.array([-1, -1])) == [] == reuse_histogram(np.array([], np.int64))
    assert reuse_histogram(np.array([0])) == [(0, 1, 1)]
    distances = np.random.default_rng(0).integers(-1, 5000, 1000)
    rows = reuse_histogram(distances)
    assert sum(count for *_, count in rows) == (distances >= 0).sum()
    assert all(count == ((distances >= low) & (distances < high)).sum() for low, high, count in rows)


def test_the_working_set_of_each_window() -> None:
    trace = trace_of([[1, 2], [1, 3], [1, 2], [4], []], [5.0, 6.0, 15.5, 36.0, 36.5])
    found = working_set(trace, 10)
    assert found.begins.tolist() == [5, 15, 25, 35] and found.requests.tolist() == [2, 1, 0, 2]
    assert found.blocks.tolist() == [3, 2, 0, 1] and found.fresh.tolist() == [3, 0, 0, 1]
    assert len(working_set(trace_of([]), 10).begins) == 0
    for window in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="above 0"):
            working_set(trace, window)
    with pytest.raises(BadInput, match="more than 10 million windows"):
        working_set(trace, 1e-9)
