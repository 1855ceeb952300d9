"""How long cached blocks live, for a sample of them: seconds from publication to eviction, from the last use to eviction,
and between uses."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic
from typing import Any

import numpy.typing as npt

from kvpagoda.abc import BlockIds, CacheObserver, RequestView
from kvpagoda.tiers.health import Histogram, Latencies
from kvpagoda.units import whole_number

BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the buckets, in seconds."""
_FEW = 16  # ids, up to which a list is faster than arrays
Ids = npt.NDArray[Any]


class Residency(CacheObserver):
    """Follows the cached blocks whose id is a multiple of ``every``, which is rounded up to a power of two. The blocks of an
    id come and go with the texts, so these are a sample of all. A call is three array operations, and a step for each
    sampled block. ``without``: names of groups whose blocks are not followed."""

    def __init__(self, every: int = 128, without: Collection[str] = ()) -> None:
        every = whole_number(every, "every how many blocks one is followed", at_least=1, below=2**31)
        self.every = 1 << (every - 1).bit_length()
        self._mask = self.every - 1
        self._without = {"", *without}
        self._lives: dict[tuple[str, int], list[float]] = {}  # (group, block id) -> [cached, last used]
        self._lifetime, self._idle, self._reuse_gap = Latencies(BOUNDS), Latencies(BOUNDS), Latencies(BOUNDS)

    def on_cached(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> None:
        """Note that those of ``blocks`` that are new can be shared from now on."""
        for group, ids, _ in blocks:
            for number in self._sampled(group, ids):
                if (group, number) not in self._lives:
                    self._lives[group, number] = [now := monotonic(), now]

    def on_hit(self, request: RequestView, blocks: tuple[BlockIds, ...]) -> None:
        """Note that ``request`` found ``blocks``."""
        for group, ids, _ in blocks:
            for number in self._sampled(group, ids):
                if (life := self._lives.get((group, number))) is not None:
                    now = monotonic()
                    self._reuse_gap.add(now - life[1])
                    life[1] = now

    def on_evicted(self, blocks: tuple[BlockIds, ...], reason: str, namespaces: frozenset[bytes]) -> None:
        """Note that ``blocks`` are gone; what was not evicted has no figures."""
        if reason in ("reset", "lost"):
            self._lives.clear()
        for group, ids, _ in blocks:
            for number in self._sampled(group, ids):
                if (life := self._lives.pop((group, number), None)) is not None and reason == "evicted":
                    now = monotonic()
                    self._lifetime.add(now - life[0])
                    self._idle.add(now - life[1])

    def _sampled(self, group: str, ids: Ids) -> list[int]:
        """Return those of ``ids`` whose last bits are 0; none if memory is short: figures are no reason to fail."""
        if group in self._without:
            return []
        try:
            if len(ids) <= _FEW:
                return [number for number in ids.tolist() if not number & self._mask]
            found: list[int] = ids[(ids & self._mask) == 0].tolist()
            return found
        except MemoryError:
            return []

    def stats(self) -> tuple[Histogram, Histogram, Histogram]:
        """Return the figures so far: seconds from a block's publication, and from its last use, to its eviction, and between
        two uses."""
        return self._lifetime.picture(), self._idle.picture(), self._reuse_gap.picture()
