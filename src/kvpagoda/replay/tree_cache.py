"""Chains of blocks in a prefix tree, one request after another, without memory behind it."""

from __future__ import annotations

from kvpagoda.free_list import IdPool
from kvpagoda.policies import EvictionPolicy
from kvpagoda.prefix import PrefixTree
from kvpagoda.replay.trace import Ids32


class TreeCache:
    """A cache of at most ``capacity`` blocks between two requests. A block is named by ``width`` numbers of a chain.

    ``request`` looks up the longest cached prefix of a chain, inserts and uses its first ``capacity`` blocks, the deepest
    first, and evicts leaves while more blocks are cached than the capacity."""

    def __init__(self, capacity: int, policy: str | EvictionPolicy, width: int = 1) -> None:
        self.capacity, self._width = capacity, width
        self._tree = PrefixTree(width, policy=policy, capacity=capacity)
        self._ids = IdPool(first=1)

    @property
    def num_cached(self) -> int:
        """Blocks that are cached."""
        return self._tree.num_cached

    def request(self, chain: Ids32) -> tuple[int, int]:
        """Serve a request whose blocks are ``chain``, int32 ``[blocks * width]``. Return how many of its blocks hit, and how
        many blocks were evicted."""
        tree, width = self._tree, self._width
        match = tree.match(chain)
        hit, used = match.num_blocks, min(len(chain) // width, self.capacity)
        if hit < used:  # before the touch of the blocks above them: the deepest blocks are used first
            tree.insert(match, chain[hit * width : used * width], self._ids.take(used - hit)[None])
        tree.touch(match, hit)
        over = tree.num_cached - self.capacity
        if over <= 0:
            return hit, 0
        self._ids.give(tree.evict(over).ids[0])
        return hit, over
