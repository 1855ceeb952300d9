"""What an eviction policy is: one of the three replaceable parts of the library. Write your own, or take one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvpagoda.blocks.ids import Ids

Keys = Ids
Forgotten = Ids | list[int]


class EvictionPolicy(Protocol):
    """Says which cached block goes next. The tree asks; the policy keeps what it needs to answer.

    It knows a block by its *key*: a small whole number, from 0 on, that the tree gives each block. ``Keys`` are int32
    vectors. Only a **leaf** may go: a block with nothing below it that nobody pins; the tree says which those are. A
    policy may remember blocks that were evicted (ghosts): their keys stay theirs until ``remove`` says that they are
    forgotten, and the same block gets the same key when it comes again.

    An object serves one tree. A method that raises must have changed nothing, and ``set_leaf`` must not raise.

    >>> class Oldest:  # first added, first evicted; a policy for texts that never grow
    ...     def __init__(self): self.leaves = {}
    ...     def add(self, keys, priority): pass
    ...     def touch(self, keys, priority): pass
    ...     def set_leaf(self, key, is_leaf): self.leaves.update({key: 1}) if is_leaf else self.leaves.pop(key)
    ...     def choose(self, chain): return chain(next(iter(self.leaves)))
    ...     def remove(self, keys, *, evicted): return keys
    ...     def check(self, keys, leaves): assert set(self.leaves) == leaves
    >>> from kvpagoda.prefix import PrefixTree
    >>> tree = PrefixTree(block_size=1, policy=Oldest())
    """

    def add(self, keys: Keys, priority: int) -> None:
        """These blocks, nearest to the root first, are cached now; the deepest counts as added, and used, first."""

    def touch(self, keys: Keys, priority: int) -> None:
        """These blocks, nearest to the root first, were used once; the deepest counts as used first."""

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        """``key`` is from now on a leaf, or no longer one."""

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        """The blocks to evict next: one leaf, and what above it in ``chain(leaf)`` goes before any other leaf.

        ``chain(leaf)``: the leaf and its ancestors, deepest first, as far as they may go. There is at least one leaf. The
        tree evicts all that is returned, or, if it cannot, takes back that the first is a leaf, and says it again.
        """

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        """These blocks, deepest first, are cached no more; returns the keys, of these or of ghosts, that are forgotten,
        as a vector or a list.

        Not ``evicted``: they were dropped for good; there is no need to remember them.
        """

    def check(self, keys: Keys, leaves: set[int]) -> None:
        """Prove that the policy knows exactly the cached ``keys`` and these ``leaves``. Raises CheckFailed."""
