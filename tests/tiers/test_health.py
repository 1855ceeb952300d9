"""How calls go: histograms of latencies beside numpy, and circuit breakers."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from kvpagoda.tiers.health import BOUNDS, Breaker, Breakers, Health, Latencies


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


def test_a_breaker_opens_waits_and_is_probed_at_intervals_that_double() -> None:
    breaker = Breaker("", limit=2, pause=1.0, longest=32.0)
    assert not breaker.fail(b"key", 0.5, 0.0) and not breaker.is_open and not breaker.takes_probe(99.0)
    assert breaker.fail(b"other", 0.6, 0.0) and (breaker.key, breaker.seconds) == (b"other", 0.6)
    assert (
        breaker.is_open and not breaker.takes_probe(0.9) and breaker.takes_probe(1.0) and not breaker.takes_probe(1.5)
    )
    assert not breaker.fail(b"other", 0.6, 1.5)
    assert breaker.is_open and not breaker.takes_probe(3.4) and breaker.takes_probe(3.5)  # twice as long
    breaker.retry_now()
    breaker.is_probed = True
    assert not breaker.takes_probe(3.6)  # one probe at a time
    breaker.is_probed = False
    assert breaker.takes_probe(3.6)
    for _ in range(20):
        breaker.fail(b"other", 0.6, 10.0)
        assert breaker.takes_probe(42.0)


@pytest.mark.parametrize("is_probed", [True, False])
def test_each_shard_has_a_breaker_that_begins_anew_after_a_success(is_probed: bool) -> None:
    breakers = Breakers(2, 1.0, is_probed=is_probed)
    assert not breakers.fail("a", b"key", 0.5, 0.0) and not breakers.succeed("a")
    for _ in range(2):
        breakers.fail("a", b"key", 0.5, 0.0)
    breakers.fail("b", b"key", 0.5, 0.0)
    assert [*breakers.open_ones] == ["a"]
    breaker = breakers.open_ones["a"]
    assert breaker.takes_probe(1.0) and breaker.takes_probe(2.0 + (not is_probed))
    assert not breaker.takes_probe(3.0 + 2 * (not is_probed) - 0.1)
    breakers.retry_now("a")
    breakers.retry_now("c")
    assert breaker.takes_probe(3.5)
    assert breakers.succeed("a") and not breakers.open_ones


def test_two_threads_may_tell_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Both see that there is news, and the other one takes all of it."""

    class Turned(deque[tuple[str, str]]):
        is_first = True

        def popleft(self) -> tuple[str, str]:
            if self.is_first:
                self.is_first = False
                health.tell("disk")
            return super().popleft()

    health = Health(None, 1, 1.0)  # type: ignore[arg-type]
    health._turned = Turned([("load", "down"), ("load", ""), ("store", "full")])
    with caplog.at_level("INFO", "kvpagoda"):
        health.tell("disk")
    assert len(caplog.records) == 3 and not health._turned
