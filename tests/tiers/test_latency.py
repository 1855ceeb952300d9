"""Histograms of latencies beside numpy."""

from __future__ import annotations

import numpy as np
import pytest

from kvpagoda.tiers.latency import BOUNDS, Latencies


def test_counts_are_those_of_numpy() -> None:
    times = np.random.default_rng(0).lognormal(-5, 2, 2000)
    latencies = Latencies()
    for seconds in [*times.tolist(), *BOUNDS]:
        latencies.add(seconds)
    found, every = latencies.picture(), np.concatenate([times, BOUNDS])
    edges = np.array([-np.inf, *BOUNDS, np.inf])
    assert found.counts == tuple(
        int(((edges[i] < every) & (every <= edges[i + 1])).sum()) for i in range(len(edges) - 1)
    )
    assert found.count == len(every) and found.total == pytest.approx(every.sum())


def test_a_quantile_lies_in_the_bucket_of_the_exact_one() -> None:
    times = np.random.default_rng(1).lognormal(-5, 1, 500)
    latencies = Latencies()
    for seconds in times.tolist():
        latencies.add(seconds)
    edges = np.array([0.0, *BOUNDS])
    for share in (0.01, 0.5, 0.9, 0.99):
        told, exact = latencies.picture().quantile(share), float(np.quantile(times, share, method="inverted_cdf"))
        assert told is not None
        assert np.searchsorted(edges, told) == np.searchsorted(edges, exact)


def test_none_without_calls_and_the_last_bound_at_most() -> None:
    latencies = Latencies()
    assert latencies.picture().quantile(0.5) is None
    latencies.add(99.0)
    assert latencies.picture().quantile(0.5) == BOUNDS[-1]
