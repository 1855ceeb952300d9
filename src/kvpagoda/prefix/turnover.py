"""What the policy is told as blocks come and go, and who it knows them as."""

from __future__ import annotations

import numpy as np

from kvpagoda.alloc.held import Ids
from kvpagoda.prefix.names import Names
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.numbers import Numbers
from kvpagoda.prefix.policy import Policy
from kvpagoda.prefix.proof import expect


class Turnover:
    """Gives every cached block a cell, tells ``policy`` what happens to it, and knows the node of every leaf.

    ``leaves``: cell -> node, for the last block of each node that has no children and is not pinned to its end.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.leaves: dict[int, Node] = {}
        self._cells, self._names = Numbers(), Names()

    def mark(self, node: Node) -> None:
        """See whether the last block of ``node`` is a leaf now, and the one that was still is. O(1) and the policy's."""
        leaf = -1
        if not node.children and node.num_blocks > node.num_pinned:
            leaf = int(node.cells[-1])
        if leaf != node.leaf:
            self._unmark(node)
            if leaf >= 0:
                self.leaves[leaf] = node
                self.policy.mark(leaf, True)
                node.leaf = leaf

    def add(self, above: int, tokens: Ids, n: int, priority: int) -> Ids:
        """Cells for the ``n`` new blocks of ``tokens`` below the cell ``above``; blocks that have a name get theirs back."""
        again: list[int] = []
        size = len(tokens) // n
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
        return cells

    def choose(self, limit: int) -> tuple[Node, int]:
        """The node whose last blocks go next, and how many, at most ``limit``. There is a leaf."""

        def chain(leaf: int) -> Ids:
            node = self.leaves[leaf]
            return node.cells[max(node.num_pinned, node.num_blocks - limit) :][::-1]

        cells = self.policy.choose(chain)
        return self.leaves[int(cells[0])], len(cells)

    def remove(self, node: Node, count: int, *, evicted: bool) -> None:
        """The last ``count`` blocks of ``node``, which still has them, are going."""
        self._unmark(node)
        left = node.num_blocks - count
        forgotten = self.policy.remove(node.cells[left:][::-1], evicted=evicted)
        if self._names or len(forgotten) < count:
            assert node.parent is not None
            above = int(node.cells[left - 1]) if left else node.parent.last_cell
            self._names.leave(above, node.cells[left:].tolist(), node.blocks_from(left))
            forgotten = np.array(self._names.forget(forgotten.tolist()), np.int32)
        self._cells.give(forgotten)

    def check(self, nodes: list[Node], cells: Ids) -> None:
        """Prove that the policy knows exactly ``cells`` and the leaves of ``nodes``. Raises CheckFailed. O(blocks)."""
        leaves = {n.last_cell: n for n in nodes if not n.root and not n.children and n.num_blocks > n.num_pinned}
        expect(leaves == self.leaves, f"leaves {sorted(leaves.keys() ^ self.leaves.keys())[:16]}")
        marked = {node.leaf: node for node in nodes if node.leaf >= 0}
        expect(leaves == marked, f"marked leaves {sorted(leaves.keys() ^ marked.keys())[:16]}")
        self.policy.check(cells, set(leaves))

    def _unmark(self, node: Node) -> None:
        if node.leaf >= 0:
            del self.leaves[node.leaf]
            self.policy.mark(node.leaf, False)
            node.leaf = -1
