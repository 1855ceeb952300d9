"""Which blocks leases cover: counts on the nodes, kept as leases come, grow and go."""

from __future__ import annotations

from kvpagoda.prefix.eviction_order import EvictionOrder
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.results import Lease


class Leases:
    """The leases of one tree. ``num_pinned``: blocks that some lease covers; ``num_open``: leases. Nothing here can fail."""

    def __init__(self, tree: object, order: EvictionOrder) -> None:
        self._tree, self._order = tree, order
        self.num_pinned = self.num_open = 0

    def open(self, node: Node, depth: int) -> Lease:
        """A lease of the blocks up to ``depth``, which lies in ``node``. O(nodes that were not pinned before)."""
        lease = Lease(self._tree, node, depth)
        self.num_open += 1
        self._tie(lease, node)
        return lease

    def extend(self, lease: Lease, node: Node, depth: int) -> None:
        """Let ``lease`` end at ``depth`` in ``node``, at or below where it ends now."""
        old, lease.num_blocks = lease.node, depth
        if node is old:
            self._cover(node, depth - node.start)
            return
        lease.node = node
        old.leases.remove(lease)
        self._tie(lease, node)
        old.pins -= 1

    def close(self, lease: Lease, node: Node) -> Node | None:
        """End ``lease``, which ends in ``node``; the root if nothing below it is pinned any more. O(nodes that are not)."""
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
        """``lease`` ends in ``node`` now; what lies above it is pinned."""
        node.put_lease(lease)
        node.pins += 1
        self._cover(node, lease.num_blocks - node.start)
        while node.pins == 1 and node.parent is not None:
            node = node.parent
            node.pins += 1
            if node.num_pinned < node.num_blocks:
                self._cover(node, node.num_blocks)

    def _cover(self, node: Node, num_blocks: int) -> None:
        """At least the first ``num_blocks`` of ``node`` are pinned now."""
        if num_blocks > node.num_pinned:
            self.num_pinned += num_blocks - node.num_pinned
            node.num_pinned = num_blocks
            if node.leaf >= 0:
                self._order.mark(node)
