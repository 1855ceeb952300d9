"""The SIEVE policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpagoda.prefix.id_pool import grown
from kvpagoda.prefix.policies.heap import HeapPolicy, Mask
from kvpagoda.prefix.policies.protocol import Keys


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
