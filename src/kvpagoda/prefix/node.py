"""The nodes of the prefix tree, each one edge with its blocks, checkpoints and links; and the roots above them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput
from kvpagoda.prefix.children import Children
from kvpagoda.prefix.edge_arrays import EdgeArrays


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state ``state_id`` after ``depth`` blocks.

    ``used``: the time of its last use. ``num_holds``: how many holds protect it. ``among``: the checkpoints of the node
    in which it lies.
    """

    state_id: int
    depth: int
    used: int = 0
    num_holds: int = 0
    among: NodeCheckpoints = field(init=False, repr=False)


class NodeCheckpoints:
    """Checkpoints by depth. ``put``, ``take`` and ``last`` are O(log n) plus a short move in a list."""

    __slots__ = ("_depths", "all")

    def __init__(self) -> None:
        self.all: list[Checkpoint] = []  #: by ascending depth
        self._depths: list[int] = []

    def __contains__(self, depth: int) -> bool:
        last = self.last(depth)
        return last is not None and last.depth == depth

    def put(self, checkpoint: Checkpoint) -> None:
        """Add ``checkpoint``; there must be none at its depth."""
        index = bisect_left(self._depths, checkpoint.depth)
        self._depths.insert(index, checkpoint.depth)
        self.all.insert(index, checkpoint)
        checkpoint.among = self

    def take(self, depth: int) -> None:
        """Remove the checkpoint at ``depth``."""
        index = bisect_left(self._depths, depth)
        del self._depths[index], self.all[index]

    def last(self, depth: int) -> Checkpoint | None:
        """Return the deepest checkpoint up to ``depth``, or None."""
        count = bisect_right(self._depths, depth)
        return self.all[count - 1] if count else None

    def split(self, depth: int) -> NodeCheckpoints:
        """Remove the checkpoints up to ``depth`` and return them. O(n)."""
        count, above = bisect_right(self._depths, depth), NodeCheckpoints()
        above.extend(self.all[:count])
        del self._depths[:count], self.all[:count]
        return above

    def extend(self, below: list[Checkpoint]) -> None:
        """Append the checkpoints ``below``, all deeper than those here. O(len(below))."""
        self._depths += [checkpoint.depth for checkpoint in below]
        self.all += below
        for checkpoint in below:
            checkpoint.among = self


class LeaseEnd(Protocol):
    """The part of a lease that the node in which it ends uses."""

    node: Node
    num_blocks: int
    tree: object
    is_open: bool


# Empty containers that nodes share and never write: most nodes are leaves, and cost less without their own.
_NO_CHILDREN: Children[Node] = Children()
_NO_LEASES: list[LeaseEnd] = []
NO_USES: list[tuple[int, int]] = []


class Node(EdgeArrays):
    """A run of whole blocks without a branch inside. A root has no blocks.

        root ──...── start ║ block │ block │ block ║ end ──< children      depths: in blocks from the root

    ``first``: the tokens of the first block as bytes, the key of this node in its parent. ``leases``: the leases that
    end in this node. ``pins``: the number of these leases plus the number of pinned children. ``num_pinned``: how many
    leading blocks leases cover. ``checkpoints``: those that lie in this node, or None if it never had one. ``used``,
    ``uses``, ``queued``: see ``LRUOrder``. ``leaf``: see ``PolicyOrder``. ``into``: the node that took over the blocks,
    after a merge. ``root``: the name (below 0) and the namespace of a root, else None.
    """

    __slots__ = (
        "checkpoints", "children", "first", "into", "leaf", "leases", "num_pinned", "parent", "pins", "queued", "root",
        "start", "used", "uses",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        start: int,
        block_size: int,
        tokens: Ids,
        ids: Ids,
        num_blocks: int,
        first: bytes = b"",
        root: tuple[int, bytes] | None = None,
    ) -> None:
        self.block_size = block_size
        self._tokens, self._ids = tokens, ids
        self._at, self.num_blocks = 0, num_blocks
        is_full = ids.shape[1] == num_blocks and len(tokens) == num_blocks * block_size
        self.tokens, self.ids = (tokens, ids) if is_full else (tokens[: num_blocks * block_size], ids[:, :num_blocks])
        self.parent, self.start, self.first, self.root = parent, start, first, root
        self.children, self.leases = _NO_CHILDREN, _NO_LEASES
        self.pins = self.num_pinned = 0
        self.checkpoints: NodeCheckpoints | None = None
        self.used, self.uses = 0, NO_USES
        self.queued, self.leaf = 0, -1
        self.into: Node | None = None

    @property
    def end(self) -> int:
        """Depth of the end, in blocks from the root."""
        return self.start + self.num_blocks

    @property
    def is_evictable(self) -> bool:
        """Whether the last block may be evicted: there are no children and no lease covers it."""
        return not self.children and self.num_blocks > self.num_pinned

    def up_to(self, depth: int) -> Node:
        """Return the node that now holds the block that ends at ``depth``, or the root for 0.

        The block was in this node or above it when the caller got the node. Splits and merges since then do not matter.
        """
        node = self
        while True:
            while node.into is not None:
                node = node.into
            if depth > node.start or node.parent is None:
                return node
            node = node.parent

    def covered(self) -> int:
        """Return ``num_pinned``, computed from scratch. O(leases).

        All blocks if a child is pinned, otherwise as far as the deepest lease ends.
        """
        if self.pins > len(self.leases):
            return self.num_blocks
        return max([lease.num_blocks for lease in self.leases], default=self.start) - self.start

    def put_child(self, child: Node) -> None:
        """Add ``child``, or replace the child with the same first block by it."""
        if self.children is _NO_CHILDREN:
            self.children = Children()
        self.children.put(child.first, child)

    def put_lease(self, lease: LeaseEnd) -> None:
        """Add ``lease``, which ends in this node."""
        if self.leases is _NO_LEASES:
            self.leases = []
        self.leases.append(lease)

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add ``checkpoint``, which lies in this node."""
        if self.checkpoints is None:
            self.checkpoints = NodeCheckpoints()
        self.checkpoints.put(checkpoint)

    def split(self, depth: int) -> Node:
        """Move the blocks above ``depth`` to a new node between this one and its parent, and return the new node.

        Leases and checkpoints move with the blocks at their depth, and the parent's children are updated.
        O(smaller part). If this raises, nothing has changed.
        """
        count = depth - self.start
        first = self.block(count)
        above = Node(self.parent, self.start, self.block_size, *self.take_front(count), count, self.first)
        above.num_pinned = min(self.num_pinned, count)
        self.num_pinned -= above.num_pinned
        for lease in self.leases:
            if lease.num_blocks <= depth:
                lease.node = above
                above.put_lease(lease)
        if above.leases:
            self.leases = [lease for lease in self.leases if lease.num_blocks > depth]
        self.pins -= len(above.leases)
        above.pins = len(above.leases) + (self.pins > 0)
        if self.checkpoints is not None:
            above.checkpoints = self.checkpoints.split(depth)
        above.used = self.used
        if self.uses:
            reaching = bisect_left(self.uses, (depth,))  # the first stretch that ends at ``depth`` or deeper
            above.uses, self.uses = self.uses[:reaching], self.uses[reaching:]
            if self.uses:
                end, above.used = self.uses[0]
                del self.uses[: end == depth]
        if self.parent is not None:
            self.parent.put_child(above)
        self.parent, self.start, self.first = above, depth, first
        above.put_child(self)
        return above

    def merge(self, above: Node) -> None:
        """Take over everything of the parent ``above``, which has no other child; update the parent of ``above``.

        Costs what ``put_front`` does. If this raises, nothing has changed.
        """
        end = above.end
        self.put_front(above)
        if above.used:
            self.uses = [*above.uses, (end, above.used), *self.uses]
        self.parent, self.start, self.first = above.parent, above.start, above.first
        self.num_pinned += above.num_pinned
        for lease in above.leases:
            lease.node = self
            self.put_lease(lease)
        self.pins += len(above.leases)
        if above.checkpoints is not None:
            above.checkpoints.extend([] if self.checkpoints is None else self.checkpoints.all)
            self.checkpoints = above.checkpoints
        above.into = self
        if self.parent is not None:
            self.parent.put_child(self)


def nodes_below(root: Node) -> Iterator[Node]:
    """Yield ``root`` and every node below it, parents before children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


class Roots(dict[bytes, Node]):
    """Namespace in which something is cached or pinned -> its root.

    Blocks have ``block_size`` tokens and ``num_rows`` ids each.
    """

    def __init__(self, block_size: int, num_rows: int) -> None:
        self._block_size, self._num_rows = block_size, num_rows
        self._num_made = 0

    def new(self, namespace: bytes) -> Node:
        """Return a new root, which is not in this map yet. Raises BadInput.

        It is added when something is pinned or cached in its namespace.
        """
        if not isinstance(namespace, bytes):
            raise BadInput(f"a namespace is bytes, got {namespace!r}", needed=namespace)
        self._num_made += 1
        no_ids = np.empty((self._num_rows, 0), np.int32)
        return Node(None, 0, self._block_size, np.empty(0, np.int32), no_ids, 0, root=(-self._num_made, namespace))

    def drop(self, node: Node) -> bool:
        """Remove ``node`` if it is a root without children and pins; return whether it was."""
        is_bare = node.root is not None and not node.pins and not node.children
        if node.root is not None and is_bare:
            del self[node.root[1]]
        return is_bare

    def nodes(self) -> list[Node]:
        """Return all nodes, roots included, parents before children. O(nodes)."""
        return [node for root in self.values() for node in nodes_below(root)]
