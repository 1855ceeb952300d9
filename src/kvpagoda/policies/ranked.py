"""FIFO, LFU, LFUDA, priorities and SIEVE: each is a heap with a rank of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpagoda.blocks.free_list import grown
from kvpagoda.policies.heap import HeapPolicy, Mask
from kvpagoda.policies.protocol import Keys


class FIFO(HeapPolicy):
    """First added, first evicted."""

    def touch(self, keys: Keys, priority: int) -> None:
        pass


class LFU(HeapPolicy):
    """Least frequently used since it was cached, among equals the least recently used."""

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._rank[keys] = 1

    def touch(self, keys: Keys, priority: int) -> None:
        super().touch(keys, priority)
        self._rank[keys] += 1


class LFUDA(HeapPolicy):
    """LFU with dynamic ageing: old uses lose weight.

    The rank is the number of uses plus the rank of the last victim.
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0
        self._uses = np.zeros(0, np.int64)

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._uses[keys] = 1
        self._rank[keys] = self._age + 1

    def touch(self, keys: Keys, priority: int) -> None:
        super().touch(keys, priority)
        self._uses[keys] += 1
        self._rank[keys] = self._age + self._uses[keys]

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        keys = super().choose(chain)
        self._age = int(self._rank[keys[-1]])
        return keys

    def _make_room(self, length: int) -> None:
        super()._make_room(length)
        self._uses = grown(self._uses, length)


class ByPriority(HeapPolicy):
    """Lowest priority first, among equals the least recently used. A block keeps the highest priority it was used with.

    With a deadline (by any whole-numbered clock) as the priority, this is time to live: the block that expires first is
    evicted first.
    """

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._rank[keys] = priority

    def touch(self, keys: Keys, priority: int) -> None:
        highest = np.maximum(self._rank[keys], priority)
        super().touch(keys, priority)
        self._rank[keys] = highest


class SIEVE(HeapPolicy):
    """SIEVE (Zhang et al., NSDI 2024): a hand moves from the oldest block to the newest, and then starts again.

    It evicts the first leaf that was not used since the hand passed it; a leaf that was used is skipped once. Blocks
    that are not leaves are ignored. Blocks never move, so the rank of a key is the round in which the hand reaches it,
    and the stamp is its place in the round. New blocks lie ahead of the hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self._round, self._hand = 0, 0
        self._used = np.zeros(0, np.bool_)

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._used[keys] = False

    def touch(self, keys: Keys, priority: int) -> None:
        self._used[keys] = True

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._rank[key] = self._round + (self._stamp[key] <= self._hand)
        super().set_leaf(key, is_leaf)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        while self._used[leaf := self._leaves.pop()]:
            self._used[leaf] = False
            self._rank[leaf] += 1
            self._leaves.add(leaf)
        self._leaves.add(leaf)
        if self._rank[leaf] > self._round:
            self._round, self._hand = int(self._rank[leaf]), 0
        keys = super().choose(chain)
        self._hand = int(self._stamp[keys[-1]])
        return keys

    def _goes(self, keys: Keys, below: Keys, rank: int, stamp: int) -> Mask:
        ahead = self._stamp[keys]
        sooner = ahead < stamp if self._round == rank else np.full(len(keys), self._round < rank)
        return sooner & (ahead > self._stamp[below]) & ~self._used[keys]

    def _make_room(self, length: int) -> None:
        super()._make_room(length)
        self._used = grown(self._used, length)
