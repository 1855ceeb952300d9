"""How long cached blocks live, for a sample of them: seconds from publication to eviction, from the last use to eviction,
and between uses."""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

import numpy.typing as npt

from kvpagoda.tiers.health import Histogram, Latencies
from kvpagoda.units import whole_number

BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the buckets, in seconds."""
_FEW = 16  # names, up to which a list is faster than arrays
Names = npt.NDArray[Any]


class ResidencyStats(NamedTuple):
    """Seconds in the life of sampled blocks, of all groups."""

    lifetime: Histogram
    """From the moment when a block could be shared to its eviction."""
    idle: Histogram
    """From its last use (a request that found it, or its publication) to its eviction."""
    reuse_gap: Histogram
    """Between two uses."""


class Residency:
    """Follows the cached blocks whose name is a multiple of ``every``, which is rounded up to a power of two. The blocks of a
    name come and go with the texts, so these are a sample of all. A call is three array operations, and a step for each
    sampled block.

    A block that is removed without an eviction, by ``invalidate`` or ``reset``, is forgotten when its name is used again.
    """

    def __init__(self, every: int = 128) -> None:
        every = whole_number(every, "every how many blocks one is followed", at_least=1, below=2**31)
        self.every = 1 << (every - 1).bit_length()
        self._mask = self.every - 1
        self._lives: dict[tuple[int, int], list[float]] = {}  # (group, name) -> [published, last used]
        self._lifetime, self._idle, self._reuse_gap = Latencies(BOUNDS), Latencies(BOUNDS), Latencies(BOUNDS)

    def published(self, group: int, names: Names) -> None:
        """Note that the blocks ``names`` of ``group`` can be shared from now on."""
        for name in self._sampled(names):
            self._lives[group, name] = [now := monotonic(), now]

    def used(self, group: int, names: Names) -> None:
        """Note that a request found the blocks ``names``."""
        for name in self._sampled(names):
            if (life := self._lives.get((group, name))) is not None:
                now = monotonic()
                self._reuse_gap.add(now - life[1])
                life[1] = now

    def evicted(self, group: int, names: Names) -> None:
        """Note that the blocks ``names`` were evicted."""
        for name in self._sampled(names):
            if (life := self._lives.pop((group, name), None)) is not None:
                now = monotonic()
                self._lifetime.add(now - life[0])
                self._idle.add(now - life[1])

    def _sampled(self, names: Names) -> list[int]:
        """Return those of ``names`` whose last bits are 0; none if memory is short: the cache must not fail for a figure."""
        try:
            if len(names) <= _FEW:
                return [name for name in names.tolist() if not name & self._mask]
            found: list[int] = names[(names & self._mask) == 0].tolist()
            return found
        except MemoryError:
            return []

    def stats(self) -> ResidencyStats:
        """Return the figures so far."""
        return ResidencyStats(self._lifetime.picture(), self._idle.picture(), self._reuse_gap.picture())
