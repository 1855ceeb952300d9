"""How long calls took, in a few integers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets, in seconds; one bucket more has what took longer."""


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` calls took at most ``bounds[i]`` seconds and more than the bound before; the last count is of those that
    took longer than all. ``total``: seconds of all calls."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Calls in all."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Seconds within which ``share`` of the calls (0 to 1) were done, evenly spread inside a bucket; at most the last
        bound. None without calls."""
        below = [0, *accumulate(self.counts)]
        wanted = share * below[-1]
        if not below[-1]:
            return None
        at = next(i for i, done in enumerate(below[1:]) if done >= wanted and self.counts[i])
        if at == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[at - 1] if at else 0.0
        return low + (self.bounds[at] - low) * (wanted - below[at]) / self.counts[at]


class Latencies:
    """Counts calls by how long they took."""

    def __init__(self) -> None:
        self._counts, self._total = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """A call took ``seconds``. O(log buckets)."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total += seconds

    def picture(self) -> Histogram:
        """The counts now."""
        return Histogram(BOUNDS, tuple(self._counts), self._total)
