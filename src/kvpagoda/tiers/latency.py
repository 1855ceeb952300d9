"""Histograms of how long calls took."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets, in seconds; one more bucket counts calls that took longer than all bounds."""


@dataclass(frozen=True)
class Histogram:
    """The durations of calls: ``counts[i]`` calls took at most ``bounds[i]`` seconds and more than the bound before.

    The last count, for which there is no bound, is of calls that took longer than all bounds. ``total``: seconds of all
    calls.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """The number of calls."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the seconds within which ``share`` (0 to 1) of the calls were done; None without calls.

        Calls are taken as evenly spread inside a bucket. The result is at most the last bound.
        """
        below = [0, *accumulate(self.counts)]
        wanted = share * below[-1]
        if not below[-1]:
            return None
        bucket = next(i for i, done in enumerate(below[1:]) if done >= wanted and self.counts[i])
        if bucket == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[bucket - 1] if bucket else 0.0
        return low + (self.bounds[bucket] - low) * (wanted - below[bucket]) / self.counts[bucket]


class Latencies:
    """Counts calls by their duration."""

    def __init__(self) -> None:
        self._counts, self._total = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a call that took ``seconds``. O(log buckets)."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total += seconds

    def picture(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(BOUNDS, tuple(self._counts), self._total)
