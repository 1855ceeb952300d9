"""The interface of eviction policies, one of the three replaceable parts of the library.

Write your own policy, or use a built-in one by name. ``OldestLeaf`` replaces a policy that fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from kvpagoda.arrays import Ids
from kvpagoda.errors import CheckFailed

Keys = Ids
Forgotten = Ids | list[int]


class EvictionPolicy(Protocol):
    """Chooses which cached blocks are evicted next. The tree asks; the policy keeps the data that it needs to answer.

    A policy knows each block by its *key*: a small whole number, from 0 on, that the tree assigns. ``Keys`` are int32
    vectors. Only a **leaf** can be evicted: an unpinned block with nothing below it. The tree tells the policy which
    blocks are leaves. A policy may remember evicted blocks (ghosts). Their keys stay assigned until ``remove`` returns
    them as forgotten, and a block that is cached again before that gets the same key.

    An object serves one tree. It may read the vectors that it is given, not write them. A method that raises MemoryError
    must not have changed anything: the caller of the tree gets the error, and may call again. After any other error, and
    after an answer that cannot be, the tree never calls the object again: it logs the error, and evicts the
    oldest leaves first from then on. No request is lost, and no caller gets the error.

    >>> class Oldest:  # first added, first evicted; a policy for texts that never grow
    ...     def __init__(self): self.leaves = {}
    ...     def add(self, keys, priority): pass
    ...     def touch(self, keys, priority): pass
    ...     def set_leaf(self, key, is_leaf): self.leaves.update({key: 1}) if is_leaf else self.leaves.pop(key)
    ...     def choose(self, chain): return chain(next(iter(self.leaves)))
    ...     def remove(self, keys, *, evicted): return keys
    ...     def check(self, keys, leaves): assert set(self.leaves) == leaves
    >>> from kvpagoda.core.prefix import PrefixTree
    >>> tree = PrefixTree(block_size=1, policy=Oldest())
    """

    def add(self, keys: Keys, priority: int) -> None:
        """Called when the blocks ``keys``, nearest to the root first, were cached.

        The deepest block counts as added, and used, first. ``priority``: from the call that inserted the blocks.
        """

    def touch(self, keys: Keys, priority: int) -> None:
        """Called when the blocks ``keys``, nearest to the root first, were used once.

        The deepest block counts as used first. ``priority``: from the call that used the blocks.
        """

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        """Called when the block ``key`` becomes a leaf, or is no leaf any more. Must not raise, not even MemoryError."""

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        """Return the blocks to evict next: one leaf, followed by those of its ancestors to evict before any other leaf.

        ``chain(leaf)`` returns the leaf and its ancestors, deepest first, as far as they can be evicted; the result is
        a leading part of it. There is at least one leaf. The tree evicts all blocks returned. If it cannot, it calls
        ``set_leaf`` for the first one with False and then with True.
        """

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        """Called when the blocks ``keys``, deepest first, are no longer cached; return the keys that are forgotten.

        These may be of removed blocks or of ghosts, as a vector or a list. If not ``evicted``, the blocks were removed
        for good, and there is no need to remember them.
        """

    def check(self, keys: Keys, leaves: set[int]) -> None:
        """Prove that the policy knows exactly the cached ``keys`` and these ``leaves``. Raises CheckFailed."""


class OldestLeaf:
    """The policy that takes over from one that failed: the text that became a leaf, or was used as one, longest ago is
    evicted first. It needs to know nothing but the present ``leaves``, and cannot fail."""

    def __init__(self, leaves: Iterable[int]) -> None:
        self._leaves = OrderedDict.fromkeys(leaves)

    def add(self, keys: Keys, priority: int) -> None:
        pass

    def touch(self, keys: Keys, priority: int) -> None:
        deepest = int(keys[-1])
        if deepest in self._leaves:
            self._leaves.move_to_end(deepest)

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._leaves[key] = None
        else:
            del self._leaves[key]

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        return chain(next(iter(self._leaves)))

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        return keys

    def check(self, keys: Keys, leaves: set[int]) -> None:
        if self._leaves.keys() != leaves:
            raise CheckFailed(
                f"the oldest leaf and the tree disagree about {sorted(self._leaves.keys() ^ leaves)[:16]}"
            )
