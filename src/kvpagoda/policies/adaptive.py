"""ARC, and ``auto``: LRU or ARC, whichever hits more often for the workload, as measured on a sample of the blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kvpagoda.arrays import grown
from kvpagoda.errors import CheckFailed
from kvpagoda.policies.heap import HeapPolicy, LazyHeap, Mask
from kvpagoda.policies.protocol import Forgotten, Keys

Queue = OrderedDict[int, None]
_SHADOW = 128  # blocks in a shadow, up to twice as many; all blocks of a smaller cache
_WINDOW = 8  # uses of sampled blocks between two comparisons, in sizes of a shadow
_MARGIN = 200  # ARC takes over if it has more than one additional hit for each 200 uses
_CACHED, _SAMPLED = 1, 2  # flags of a key: ARC knows it, cached or as a ghost; a shadow knows it


class Ghosts:
    """Evicted blocks, by whether they were used once or again, and the share of the cache for blocks used once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.share = 0
        self.once: Queue = OrderedDict()
        self.again: Queue = OrderedDict()

    def recall(self, key: int) -> bool:
        """Remove the ghost ``key``, which is cached again, and adapt the share. Return False if it is no ghost."""
        once, again = len(self.once), len(self.again)
        if key in self.once:
            self.share = min(self._capacity, self.share + max(1, again // once))
            del self.once[key]
        elif key in self.again:
            self.share = max(0, self.share - max(1, once // again))
            del self.again[key]
        else:
            return False
        return True

    def trim(self, num_once: int) -> list[int]:
        """Forget the oldest ghosts beyond ARC's limits, given ``num_once`` cached blocks used once; return them."""
        forgotten = []
        while len(self.once) > max(0, self._capacity - num_once):
            forgotten.append(self.once.popitem(last=False)[0])
        while len(self.once) + len(self.again) > self._capacity:
            forgotten.append((self.again or self.once).popitem(last=False)[0])
        return forgotten


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


class ShadowLRU:
    """A simulation of an LRU cache of ``capacity`` blocks in which every block is a leaf."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: Queue = OrderedDict()
        self.hits = 0

    def __contains__(self, key: int) -> bool:
        return key in self._queue

    def use(self, key: int) -> list[int]:
        """Use ``key``; return the keys that are forgotten."""
        if key in self._queue:
            self.hits += 1
            self._queue.move_to_end(key)
            return []
        self._queue[key] = None
        return [self._queue.popitem(last=False)[0]] if len(self._queue) > self._capacity else []


class ShadowARC:
    """A simulation of an ARC cache of ``capacity`` blocks, and its ghosts, in which every block is a leaf."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self.ghosts = Ghosts(capacity)
        self.hits = 0

    def __contains__(self, key: int) -> bool:
        return any(key in queue for queue in (self._once, self._again, self.ghosts.once, self.ghosts.again))

    def use(self, key: int) -> list[int]:
        """Use ``key``; return the keys that are forgotten."""
        if key in self._once or key in self._again:
            self.hits += 1
            self._once.pop(key, None)
            self._again[key] = None
            self._again.move_to_end(key)
            return []
        (self._again if self.ghosts.recall(key) else self._once)[key] = None
        if len(self._once) + len(self._again) <= self._capacity:
            return []
        if self._once and (len(self._once) > self.ghosts.share or not self._again):
            self.ghosts.once[self._once.popitem(last=False)[0]] = None
        else:
            self.ghosts.again[self._again.popitem(last=False)[0]] = None
        return self.ghosts.trim(len(self._once))


class Auto(ARC):
    """LRU, or ARC while ARC would hit more often.

    Both use ARC's two heaps of leaves; LRU takes the older of the two first leaves. So switching moves nothing. Every
    k-th block that is not remembered is sampled, and the uses of sampled blocks go to shadows of a k-th of the
    capacity. The shadows' hits, halved at each comparison, decide which policy leads. Costs O(1) more than ARC for each
    block.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._every = max(1, capacity // _SHADOW)
        size = max(1, capacity // self._every)
        self._shadow_lru, self._shadow_arc = ShadowLRU(size), ShadowARC(size)
        self._window = _WINDOW * size
        self._uses = self._phase = 0
        self._is_lru = True
        self._known = np.zeros(0, np.uint8)  # by key: _CACHED | _SAMPLED
        self._dropped: list[int] = []  # keys that the shadows have forgotten since the last removal

    def add(self, keys: Keys, priority: int) -> None:
        self._make_room(int(keys.max(initial=0)) + 1)
        known = self._known[keys]
        fresh = np.flatnonzero(known == 0)
        known[fresh[self._phase :: self._every]] = _SAMPLED
        sampled = keys[known >= _SAMPLED][::-1].tolist()
        super().add(keys, priority)
        self._known[keys] = known | _CACHED
        self._phase = (self._phase - len(fresh)) % self._every
        self._watch(sampled)

    def touch(self, keys: Keys, priority: int) -> None:
        sampled = keys[self._known[keys] >= _SAMPLED][::-1].tolist()
        super().touch(keys, priority)
        self._watch(sampled)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        if not self._is_lru:
            return super().choose(chain)
        once, again = self._leaves.first(), self._again.first()
        oldest = self._leaves if once and not (again and again[1] < once[1]) else self._again
        return self._first_of(oldest, chain, self._leaves, self._again)

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        forgotten = super().remove(keys, evicted=evicted)
        self._known[forgotten] &= ~np.uint8(_CACHED)
        if self._dropped:
            forgotten = sorted({*forgotten, *self._dropped})
            self._dropped.clear()
        return [key for key in forgotten if not self._known[key]]

    def check(self, keys: Keys, leaves: set[int]) -> None:
        super().check(keys, leaves)
        if not np.array_equal(np.flatnonzero(self._known & _CACHED), np.flatnonzero(self._rank)):
            raise CheckFailed("the monitor and ARC disagree about the keys that are remembered")

    def _make_room(self, length: int) -> None:
        super()._make_room(length)
        self._known = grown(self._known, length)

    def _goes(self, keys: Keys, below: Keys, rank: int, stamp: int) -> Mask:
        if not self._is_lru:
            return super()._goes(keys, below, rank, stamp)
        goes: Mask = self._stamp[keys] < stamp
        return goes

    def _watch(self, sampled: list[int]) -> None:
        """Show the used keys ``sampled`` to the shadows; once in a while compare their hits and choose the policy."""
        lru, arc = self._shadow_lru, self._shadow_arc
        for key in sampled:
            lost = [old for old in lru.use(key) if old not in arc] + [old for old in arc.use(key) if old not in lru]
            if lost:
                self._known[lost] &= _CACHED
                self._dropped += lost
        self._uses += len(sampled)
        if self._uses >= self._window:
            gain = arc.hits - lru.hits
            if self._is_lru and gain * _MARGIN > self._uses:
                self._is_lru = False
                self._ghosts.share = arc.ghosts.share * self._every
            elif gain < 0:
                self._is_lru = True
            for shadow in (lru, arc):
                shadow.hits //= 2
            self._uses //= 2
