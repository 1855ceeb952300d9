"""Base class of policies that evict the leaf with the smallest (rank, stamp)."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.id_pool import grown
from kvpagoda.prefix.lazy_heap import LazyHeap
from kvpagoda.prefix.policies.protocol import Forgotten, Keys

Mask = npt.NDArray[np.bool_]
_LAST = 2**62, 2**62, -1


class HeapPolicy:
    """A rank and a stamp for each key, and a heap of the leaves ordered by both; the base class of policies.

    Stamps come from one counter, so no two are equal. Adding or touching n blocks is O(n) array work. A choice is
    amortised O(log leaves), plus O(1) for each block chosen.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._rank = np.zeros(0, np.int64)
        self._stamp = np.zeros(0, np.int64)
        self._leaves = LazyHeap(self._order)

    def add(self, keys: Keys, priority: int) -> None:
        self._make_room(int(keys.max(initial=0)) + 1)
        self._use(keys)
        self._rank[keys] = 0

    def touch(self, keys: Keys, priority: int) -> None:
        self._use(keys)

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._leaves.add(key)
        else:
            self._leaves.discard(key)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        return self._first_of(self._leaves, chain, self._leaves)

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        return keys

    def check(self, keys: Keys, leaves: set[int]) -> None:
        if len(keys) and int(keys.max()) >= len(self._stamp):
            raise CheckFailed(f"the policy has no rank for key {int(keys.max())}")
        self._leaves.check(leaves)

    def _make_room(self, length: int) -> None:
        """Grow the arrays to ``length`` keys. Called before anything changes, since it may raise."""
        self._rank, self._stamp = grown(self._rank, length), grown(self._stamp, length)

    def _order(self, key: int) -> tuple[int, int]:
        return int(self._rank[key]), int(self._stamp[key])

    def _first_of(self, heap: LazyHeap, chain: Callable[[int], Keys], *heaps: LazyHeap) -> Keys:
        """Return the first leaf of ``heap``, and then its ancestors to evict before all other leaves of ``heaps``."""
        leaf = heap.pop()
        try:
            return self._run(chain(leaf), *heaps)
        except BaseException:
            heap.add(leaf)
            raise

    def _run(self, keys: Keys, *heaps: LazyHeap) -> Keys:
        """Return the first of ``keys``, and those after it to evict before all remaining leaves of ``heaps``.

        ``keys``: a victim and its ancestors.
        """
        if len(keys) == 1:
            return keys
        rank, stamp, _ = min((heap.first() or _LAST for heap in heaps), key=itemgetter(1))
        for start in range(1, len(keys), 256):  # in pieces: the cost depends on the result, not on all ``keys``
            part = keys[start : start + 256]
            goes = self._goes(part, keys[start - 1 :][: len(part)], rank, stamp)
            stop = int(goes.argmin())
            if not goes[stop]:
                return keys[: start + stop]
        return keys

    def _goes(self, keys: Keys, below: Keys, rank: int, stamp: int) -> Mask:
        """Return which of ``keys`` would be evicted before a leaf of this rank and stamp.

        ``below``: for each key the key of the block below it, which is evicted before it.
        """
        ranks = self._rank[keys]
        goes: Mask = (ranks < rank) | ((ranks == rank) & (self._stamp[keys] < stamp))
        return goes

    def _use(self, keys: Keys) -> None:
        """Give ``keys`` new stamps, the smallest to the deepest (the last) of them."""
        n = len(keys)
        self._stamp[keys] = np.arange(self._clock + n, self._clock, -1)
        self._clock += n
