"""What an eviction policy is. One of the three replaceable parts of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvpagoda.blocks.ids import Ids

Cells = Ids


class Policy(Protocol):
    """Says which cached block goes next. The tree asks; the policy keeps what it needs to answer.

    It knows blocks by their *cell*: a dense number from 0 that the tree gives each block. ``Cells`` are int32 vectors.
    Only a **leaf** may go: a block with nothing below it that nobody pins; the tree says which those are. A policy may
    remember blocks that were evicted (ghosts): their cells stay theirs until ``remove`` says that they are forgotten,
    and the same block gets the same cell when it comes again.
    """

    def add(self, cells: Cells, priority: int) -> None:
        """These blocks, nearest to the root first, are cached now; the deepest counts as added, and used, first."""

    def touch(self, cells: Cells, priority: int) -> None:
        """These blocks, nearest to the root first, were used once; the deepest counts as used first."""

    def mark(self, cell: int, is_leaf: bool) -> None:
        """``cell`` is from now on a leaf, or no longer one."""

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        """The blocks to evict next: one leaf, and what above it in ``chain(leaf)`` goes before any other leaf.

        ``chain(leaf)``: the leaf and its ancestors, deepest first, as far as they may go. There is at least one leaf.
        The tree evicts all that is returned.
        """

    def remove(self, cells: Cells, *, evicted: bool) -> Cells:
        """These blocks, deepest first, are cached no more; returns the cells, of these or of ghosts, that are forgotten.

        Not ``evicted``: they were dropped for good; there is no need to remember them.
        """

    def check(self, cells: Cells, leaves: set[int]) -> None:
        """Prove that the policy knows exactly the cached ``cells`` and these ``leaves``. Raises CheckFailed."""
