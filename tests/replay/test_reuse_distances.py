"""Reuse distances, the bound and the working set against the slowest way to compute them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_cache import furthest_reuse, naive_replay

from kvpagoda.errors import BadInput
from kvpagoda.replay import Reuse, Trace, lru_hits, replay, reuse_distances, reuse_histogram, working_set
from kvpagoda.replay.reuse import weight_of_larger_before
from raises import raises

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
    reuse = Reuse.of(trace_of(chains))
    assert lru_hits(reuse, [capacity]) == [naive_replay(chains, capacity, "lru")[0]] == [reuse.hits(capacity).sum()]


@given(CHAINS, st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_the_bound(chains: list[list[int]], capacity: int) -> None:
    chains = [[0], *chains]  # a trace with requests but without blocks is refused
    found = replay(trace_of(chains), capacity_blocks=capacity, policy="opt")
    assert (found.block_hits, found.evictions) == naive_replay(chains, capacity, "opt")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=60))
@settings(deadline=None)
def test_weight_of_larger_before(pairs: list[tuple[int, int]]) -> None:
    expected = [sum(weight for earlier, weight in pairs[:i] if earlier > pairs[i][0]) for i in range(len(pairs))]
    values, weights = np.array(pairs, np.int64).reshape(-1, 2).T
    assert weight_of_larger_before(values, weights).tolist() == expected


@given(CHAINS)
@settings(max_examples=200, deadline=None)
def test_the_histogram_and_the_quantiles_are_those_of_the_distances(chains: list[list[int]]) -> None:
    trace = trace_of(chains)
    reuse, distances = Reuse.of(trace), reuse_distances(trace)
    seen = np.sort(distances[distances >= 0])
    assert reuse.num_reuses == len(seen)
    rows = reuse_histogram(reuse)
    assert sum(count for *_, count in rows) == len(seen)
    assert all(count == ((seen >= low) & (seen < high)).sum() for low, high, count in rows)
    assert [low for low, *_ in rows] == [0, 1, 2, 4, 8, 16, 32, 64][: len(rows)]
    assert not len(seen) or rows[-1][0] <= seen[-1] < rows[-1][1]
    for share in (0.5, 0.9):
        if len(seen):
            assert reuse.quantile(share) == seen[int(len(seen) * share)]


def test_the_working_set_of_each_window() -> None:
    trace = trace_of([[1, 2], [1, 3], [1, 2], [4], []], [5.0, 6.0, 15.5, 36.0, 36.5])
    found = working_set(trace, 10)
    assert found.begins.tolist() == [5, 15, 25, 35] and found.requests.tolist() == [2, 1, 0, 2]
    assert found.blocks.tolist() == [3, 2, 0, 1] and found.fresh.tolist() == [3, 0, 0, 1]
    assert len(working_set(trace_of([]), 10).begins) == 0
    for window in (0, -1, float("nan"), float("inf")):
        with raises(BadInput, needed=window):
            working_set(trace, window)
    with raises(BadInput, needed=1e-09, available=31.5):
        working_set(trace, 1e-9)
