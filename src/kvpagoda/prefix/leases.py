"""Leases of one tree: how many blocks of each node they pin, counted as leases open, grow and close."""

from __future__ import annotations

from kvpagoda.prefix.eviction_order import EvictionOrder
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.results import Lease


class Leases:
    """The open leases of one tree. Nothing here can fail.

    ``num_pinned``: blocks that at least one lease covers. ``num_open``: open leases.
    """

    def __init__(self, tree: object, order: EvictionOrder) -> None:
        self._tree, self._order = tree, order
        self.num_pinned = self.num_open = 0

    def open(self, node: Node, depth: int) -> Lease:
        """Open a lease of the blocks up to ``depth``, which lies in ``node``. O(nodes that were not pinned before)."""
        lease = Lease(self._tree, node, depth)
        self.num_open += 1
        self._tie(lease, node)
        return lease

    def extend(self, lease: Lease, node: Node, depth: int) -> None:
        """Extend ``lease`` to end at ``depth`` in ``node``, at or below its present end."""
        old, lease.num_blocks = lease.node, depth
        if node is old:
            if depth - node.start > node.num_pinned:
                self._cover(node, depth - node.start)
            return
        lease.node = node
        old.leases.remove(lease)
        self._tie(lease, node)
        old.pins -= 1

    def close(self, lease: Lease, node: Node) -> Node | None:
        """Close ``lease``, which ends in ``node``; return the root if nothing below it is pinned any more, else None.

        O(nodes that are not pinned any more).
        """
        lease.is_open = False
        node.leases.remove(lease)
        self.num_open -= 1
        while True:
            node.pins -= 1
            covered = node.covered() if node.pins else 0
            if covered < node.num_pinned:
                self.num_pinned += covered - node.num_pinned
                node.num_pinned = covered
                self._order.mark(node)
            if node.pins:
                return None
            if node.parent is None:
                return node
            node = node.parent

    def _tie(self, lease: Lease, node: Node) -> None:
        """Let ``lease`` end in ``node``, and pin everything above it."""
        node.put_lease(lease)
        node.pins += 1
        self._cover(node, lease.num_blocks - node.start)
        while node.pins == 1 and node.parent is not None:
            node = node.parent
            node.pins += 1
            if node.num_pinned < node.num_blocks:
                self._cover(node, node.num_blocks)

    def _cover(self, node: Node, num_blocks: int) -> None:
        """Pin at least the first ``num_blocks`` blocks of ``node``."""
        if num_blocks > node.num_pinned:
            self.num_pinned += num_blocks - node.num_pinned
            node.num_pinned = num_blocks
            if node.leaf >= 0:
                self._order.mark(node)
