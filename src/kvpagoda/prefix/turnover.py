"""The order in which blocks go: what it is told as they come and go, and a policy that knows them by cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix.names import Names
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.numbers import Numbers
from kvpagoda.prefix.policy import Policy
from kvpagoda.prefix.proof import expect


class Turnover(Protocol):
    """How a tree keeps the order in which its blocks go. ``num_rows``: rows that it keeps with the ids of each block."""

    num_rows: int

    def rows(self, node: Node, tokens: Ids, n: int, priority: int) -> Ids:
        """``n`` blocks of ``tokens`` will be added below all blocks of ``node``; returns their rows ``[num_rows, n]``."""

    def added(self, node: Node, n: int) -> None:
        """They stand at the end of ``node`` now."""

    def start_use(self) -> None:
        """What ``use`` is told until the next call lies on one path, the deepest first."""

    def use(self, node: Node, depth: int, priority: int) -> None:
        """The blocks of ``node`` up to ``depth`` were used."""

    def mark(self, node: Node) -> None:
        """Whether the last block of ``node`` may go can have changed: told when it may begin to, and for a ``leaf`` also when
        it may not any more."""

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes whose last blocks go next, and how many, ``limit`` in all if so many may go; each is taken care of, with
        ``remove`` and ``mark``, before the next is asked for."""

    def remove(self, node: Node, count: int, *, evicted: bool) -> None:
        """The last ``count`` blocks of ``node``, which still has them, are going; ``mark`` follows if some are left."""

    def check(self, nodes: list[Node]) -> None:
        """Prove that this agrees with ``nodes``, all there are. Raises CheckFailed."""


class ByCell:
    """A ``Policy`` that knows each block by a number of its own, its cell: the last row of the ids.

    ``leaves``: cell -> node, for the last block of each node that may go.
    """

    num_rows = 1

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.leaves: dict[int, Node] = {}
        self._cells, self._names = Numbers(), Names()

    def mark(self, node: Node) -> None:
        leaf = int(node.ids[-1, -1]) if node.is_evictable else -1
        if leaf != node.leaf:
            self._unmark(node)
            if leaf >= 0:
                self.leaves[leaf] = node
                self.policy.mark(leaf, True)
                node.leaf = leaf

    def rows(self, node: Node, tokens: Ids, n: int, priority: int) -> Ids:
        """Cells; blocks that have a name get theirs back."""
        again: list[int] = []
        size, above = len(tokens) // n, _last_cell(node)
        while len(again) < n and self._names:
            block = tokens[len(again) * size : (len(again) + 1) * size].tobytes()
            cell = self._names.find(above, block)
            if cell is None:
                break
            self._names.come_back(cell)
            again.append(cell)
            above = cell
        cells = self._cells.take(n - len(again))
        if again:
            cells = np.concatenate((np.array(again, np.int32), cells))
        self.policy.add(cells, priority)
        return cells[None]

    def added(self, node: Node, n: int) -> None:
        pass

    def start_use(self) -> None:
        pass

    def use(self, node: Node, depth: int, priority: int) -> None:
        self.policy.touch(node.ids[-1, : depth - node.start], priority)

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        def chain(leaf: int) -> Ids:
            node = self.leaves[leaf]
            return node.ids[-1, max(node.num_pinned, node.num_blocks - limit) :][::-1]

        while limit > 0 and self.leaves:
            cells = self.policy.choose(chain)
            limit -= len(cells)
            yield self.leaves[int(cells[0])], len(cells)

    def remove(self, node: Node, count: int, *, evicted: bool) -> None:
        self._unmark(node)
        left = node.num_blocks - count
        gone = node.ids[-1, left:]
        forgotten = self.policy.remove(gone[::-1], evicted=evicted)
        if self._names or len(forgotten) < count:
            assert node.parent is not None
            above = int(node.ids[-1, left - 1]) if left else _last_cell(node.parent)
            self._names.leave(above, gone.tolist(), node.blocks_from(left))
            forgotten = np.array(self._names.forget(forgotten.tolist()), np.int32)
        self._cells.give(forgotten)

    def check(self, nodes: list[Node]) -> None:
        cells: Ids = np.concatenate([np.empty(0, np.int32), *(node.ids[-1] for node in nodes)])
        expect(len(np.unique(cells)) == len(cells), "a cell names two blocks")
        leaves = {_last_cell(node): node for node in nodes if node.is_evictable}
        expect(leaves == self.leaves, f"leaves {sorted(leaves.keys() ^ self.leaves.keys())[:16]}")
        marked = {node.leaf: node for node in nodes if node.leaf >= 0}
        expect(leaves == marked, f"marked leaves {sorted(leaves.keys() ^ marked.keys())[:16]}")
        self.policy.check(cells, set(leaves))

    def _unmark(self, node: Node) -> None:
        if node.leaf >= 0:
            del self.leaves[node.leaf]
            self.policy.mark(node.leaf, False)
            node.leaf = -1


def _last_cell(node: Node) -> int:
    """What the blocks below ``node`` have above them: a cell, or the name of a root."""
    return node.root[0] if node.root else int(node.ids[-1, -1])
