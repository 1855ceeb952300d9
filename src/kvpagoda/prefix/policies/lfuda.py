"""The LFU policy with dynamic ageing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpagoda.prefix.id_pool import grown
from kvpagoda.prefix.policies.heap import HeapPolicy
from kvpagoda.prefix.policies.protocol import Keys


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
