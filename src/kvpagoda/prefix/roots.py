"""The namespaces of a prefix tree: one root each, for as long as something hangs below it or is pinned."""

from __future__ import annotations

from kvpagoda.errors import BadInput
from kvpagoda.prefix.invariants import nodes_below
from kvpagoda.prefix.node import Node, new_root


class Roots(dict[bytes, Node]):
    """Roots by namespace, of blocks of ``block_size`` tokens that have ``num_rows`` ids each."""

    def __init__(self, block_size: int, num_rows: int) -> None:
        self._block_size, self._num_rows = block_size, num_rows
        self._num_made = 0

    def new(self, namespace: bytes) -> Node:
        """A root that is not in here: it is put in once something is pinned or hangs there. Raises BadInput."""
        if not isinstance(namespace, bytes):
            raise BadInput(f"a namespace is bytes, got {namespace!r}")
        self._num_made += 1
        return new_root(self._block_size, self._num_rows, -self._num_made, namespace)

    def drop(self, node: Node) -> bool:
        """Take out ``node``, if it is a root that nobody needs; whether it was."""
        is_bare = node.root is not None and not node.pins and not node.children
        if node.root is not None and is_bare:
            del self[node.root[1]]
        return is_bare

    def nodes(self) -> list[Node]:
        """All nodes, roots too, a parent before its children. O(nodes)."""
        return [node for root in self.values() for node in nodes_below(root)]
