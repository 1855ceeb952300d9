"""The roots of a prefix tree: one for each namespace in which something is cached or pinned."""

from __future__ import annotations

from kvpagoda.errors import BadInput
from kvpagoda.prefix.invariants import nodes_below
from kvpagoda.prefix.node import Node, new_root


class Roots(dict[bytes, Node]):
    """Namespace -> root. Blocks have ``block_size`` tokens and ``num_rows`` ids each."""

    def __init__(self, block_size: int, num_rows: int) -> None:
        self._block_size, self._num_rows = block_size, num_rows
        self._num_made = 0

    def new(self, namespace: bytes) -> Node:
        """Return a new root, which is not in this map yet. Raises BadInput.

        It is added when something is pinned or cached in its namespace.
        """
        if not isinstance(namespace, bytes):
            raise BadInput(f"a namespace is bytes, got {namespace!r}")
        self._num_made += 1
        return new_root(self._block_size, self._num_rows, -self._num_made, namespace)

    def drop(self, node: Node) -> bool:
        """Remove ``node`` if it is a root without children and pins; return whether it was."""
        is_bare = node.root is not None and not node.pins and not node.children
        if node.root is not None and is_bare:
            del self[node.root[1]]
        return is_bare

    def nodes(self) -> list[Node]:
        """Return all nodes, roots included, parents before children. O(nodes)."""
        return [node for root in self.values() for node in nodes_below(root)]
