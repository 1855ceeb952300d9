"""``auto`` on the public traces: never half a point worse than LRU, and better where ARC is much better."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvpagoda.replay import Reuse, Trace, lru_hits, replay, synthetic

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
LIMITS = {"weka_agentic_rle": 1500}  # requests: all of them are 94 million references
QUICK = {
    "mooncake_synthetic": (439, 4392), "lmcache_agent_lcp": (251, 502, 1254, 2508, 5015), "weka_agentic_rle": (10_000,),
}  # fmt: skip
SLOW = {
    "mooncake_synthetic": (200, 878, 2196, 8785, 21_962), "mooncake_conversation": (914, 1827, 3656, 18_279, 100_000),
    "weka_agentic_rle": (3000, 30_000),
}  # fmt: skip


@cache
def trace(name: str) -> Trace:
    return Trace.read(TRACES / f"{name}.jsonl.gz", LIMITS.get(name)).by_arrival()


def least(trace: Trace, capacity: int) -> float:
    """The hits of LRU less half a point."""
    return lru_hits(Reuse.of(trace), [capacity])[0] - 0.005 * trace.num_refs


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the public traces in ../shared/traces")
@pytest.mark.parametrize(
    ("name", "capacity"),
    [(name, size) for name, sizes in QUICK.items() for size in sizes]
    + [pytest.param(name, size, marks=pytest.mark.slow) for name, sizes in SLOW.items() for size in sizes],
)
def test_never_half_a_point_worse_than_lru(name: str, capacity: int) -> None:
    assert replay(trace(name), capacity_blocks=capacity, policy="auto").block_hits >= least(trace(name), capacity)


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the public traces in ../shared/traces")
@pytest.mark.parametrize("capacity", [pytest.param(1827, marks=pytest.mark.slow), 9139])
def test_a_point_better_where_arc_is(capacity: int) -> None:
    conversation = trace("mooncake_conversation")
    found = replay(conversation, capacity_blocks=capacity, policy="auto")
    assert found.block_hits >= least(conversation, capacity) + 0.0145 * found.block_refs


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_on_synthetic_workloads_too(share: float) -> None:
    workload = synthetic(1000, seed=3)
    capacity = round(share * workload.num_distinct)
    assert replay(workload, capacity_blocks=capacity, policy="auto").block_hits >= least(workload, capacity)
