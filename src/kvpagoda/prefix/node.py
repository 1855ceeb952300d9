"""One edge of the prefix tree, what is kept there, and who holds it."""

from __future__ import annotations

from kvpagoda.alloc.held import Ids
from kvpagoda.prefix.children import Children
from kvpagoda.prefix.run import Run


class Node(Run):
    """A run of whole blocks with nothing that branches off inside. A root has none.

        root ──...── start ║ block │ block │ block ║ end ──< children      depths: in blocks from the root

    ``pins``: leases that end in here or below. ``ends``: how many end in here, by depth. ``num_pinned``: the leading
    blocks that leases cover. ``checkpoints``: depth -> state id. ``leaf``: the cell that the policy has as a leaf, or -1.
    ``into``: the node that took the blocks over, when this one is no more. ``root``: the name (below 0) and the namespace
    of a root, else None.
    """

    __slots__ = (
        "checkpoints", "children", "ends", "into", "leaf", "num_pinned", "parent", "pins", "root", "start",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        start: int,
        block_size: int,
        arrays: tuple[Ids, Ids, Ids],
        root: tuple[int, bytes] | None = None,
    ) -> None:
        super().__init__(block_size, *arrays)
        self.parent, self.start, self.root = parent, start, root
        self.children: Children[Node] = Children()
        self.pins, self.num_pinned, self.leaf = 0, 0, -1
        self.ends: dict[int, int] = {}
        self.checkpoints: dict[int, int] = {}
        self.into: Node | None = None

    @property
    def end(self) -> int:
        """The depth of the end."""
        return self.start + self.num_blocks

    @property
    def last_cell(self) -> int:
        """What the blocks of the children have above them: a cell, or the name of a root."""
        return self.root[0] if self.root else int(self.cells[-1])

    def up_to(self, depth: int) -> Node:
        """The node that now holds the block that ends at ``depth``, which was once here or above; 0: the root."""
        node = self
        while True:
            while node.into is not None:
                node = node.into
            if depth > node.start or node.parent is None:
                return node
            node = node.parent

    def covered(self) -> int:
        """``num_pinned`` from scratch: all blocks if a lease ends below, else as far as the furthest end. O(ends)."""
        if self.pins > sum(self.ends.values()):
            return self.num_blocks
        return max(self.ends, default=self.start) - self.start

    def count_end(self, depth: int, change: int) -> None:
        """One lease more (1) or fewer (-1) ends at ``depth``."""
        self.ends[depth] = self.ends.get(depth, 0) + change
        if not self.ends[depth]:
            del self.ends[depth]

    def split(self, depth: int) -> Node:
        """Give what lies above ``depth`` to a node of its own, between this one and its parent, and return it.

        Pins, ends and checkpoints go where their depth is; the parent is told. O(smaller part).
        """
        count = depth - self.start
        above = Node(self.parent, self.start, self.block_size, self.take_front(count))
        above.pins, above.num_pinned = self.pins, min(self.num_pinned, count)
        self.num_pinned -= above.num_pinned
        for end in [end for end in self.ends if end <= depth]:
            above.ends[end] = self.ends.pop(end)
        self.pins -= sum(above.ends.values())
        for place in [place for place in self.checkpoints if place <= depth]:
            above.checkpoints[place] = self.checkpoints.pop(place)
        if self.parent is not None:
            self.parent.children.put(above.block(0), above)
        self.parent, self.start = above, depth
        above.children.put(self.block(0), self)
        return above

    def merge(self, above: Node) -> None:
        """Take over everything of the parent ``above``, which has no other child; the parent's parent is told.

        Costs what ``put_front`` does.
        """
        self.put_front(above)
        self.parent, self.start, self.pins = above.parent, above.start, above.pins
        self.num_pinned += above.num_pinned
        self.ends.update(above.ends)
        self.checkpoints.update(above.checkpoints)
        above.into = self
        if self.parent is not None:
            self.parent.children.put(self.block(0), self)
