"""The ARC policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.lazy_heap import LazyHeap
from kvpagoda.prefix.policies.ghosts import Ghosts
from kvpagoda.prefix.policies.heap import HeapPolicy, Mask
from kvpagoda.prefix.policies.protocol import Forgotten, Keys


class ARC(HeapPolicy):
    """ARC (Megiddo and Modha, FAST 2003) for a cache of ``capacity`` blocks.

    Blocks used once and blocks used again are each ordered by recency, and each kind has its ghosts. A hit on a ghost
    changes the share of the cache for blocks used once.

    The victim is the least recently used leaf among the blocks used once, while these are more than their share,
    otherwise among the blocks used again; if that kind has no leaf, it is one of the other kind. The rank is the kind:
    1 used once, 2 used again, negative for their ghosts, 0 for unknown keys. Amortised O(log leaves) for a choice, plus
    O(1) for each block chosen.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._ghosts = Ghosts(capacity)
        self._num_once = 0
        self._again = LazyHeap(self._order)  # leaves used again; leaves used once are in _leaves

    def add(self, keys: Keys, priority: int) -> None:
        self._make_room(int(keys.max(initial=0)) + 1)
        kinds = self._rank[keys]
        ranks, num_known = np.where(kinds == 0, 1, 2), int(np.count_nonzero(kinds))
        ghosts = keys[kinds < 0][::-1].tolist()
        self._use(keys)
        for key in ghosts:
            self._ghosts.recall(key)
        self._rank[keys] = ranks
        self._num_once += len(keys) - num_known

    def touch(self, keys: Keys, priority: int) -> None:
        once = keys[self._rank[keys] == 1]
        leaves = self._leaves.members.intersection(once.tolist()) if len(once) else ()
        self._use(keys)
        self._rank[once] = 2
        self._num_once -= len(once)
        for key in leaves:
            self._leaves.discard(key)
            self._again.add(key)

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        heap = self._leaves if self._rank[key] == 1 else self._again
        (heap.add if is_leaf else heap.discard)(key)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        surplus = self._num_once - self._ghosts.share
        if self._leaves.members and (surplus > 0 or not self._again.members):
            keys = self._first_of(self._leaves, chain, self._leaves)
            return keys[:surplus] if surplus > 0 else keys
        return self._first_of(self._again, chain, self._again)

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        kinds = self._rank[keys]
        once = keys[kinds == 1].tolist()
        again = keys[kinds == 2].tolist()
        self._num_once -= len(once)
        self._rank[keys] = -kinds if evicted else 0
        if evicted:
            self._ghosts.once.update(dict.fromkeys(once))
            self._ghosts.again.update(dict.fromkeys(again))
        forgotten = self._ghosts.trim(self._num_once)
        self._rank[forgotten] = 0
        return forgotten if evicted else [*once, *again, *forgotten]

    def check(self, keys: Keys, leaves: set[int]) -> None:
        known = np.flatnonzero(self._rank > 0)
        once = int(np.count_nonzero(self._rank == 1))
        if not np.array_equal(known, np.sort(keys)) or once != self._num_once:
            raise CheckFailed(f"ARC and the tree disagree about keys {np.setxor1d(known, keys)[:16].tolist()}")
        self._leaves.check({leaf for leaf in leaves if self._rank[leaf] == 1})
        self._again.check({leaf for leaf in leaves if self._rank[leaf] == 2})
        for kind, ghosts in ((-1, self._ghosts.once), (-2, self._ghosts.again)):
            if set(np.flatnonzero(self._rank == kind).tolist()) != ghosts.keys():
                raise CheckFailed("ARC counts a block that is cached among the ghosts, or has lost a ghost")

    def _goes(self, keys: Keys, below: Keys, rank: int, stamp: int) -> Mask:
        goes: Mask = (self._rank[keys] == self._rank[below]) & (self._stamp[keys] < stamp)
        return goes
