"""Where in the tree there is a copy of the state, and which copy was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from kvpagoda.errors import NotOwned
from kvpagoda.prefix.node import Node


class Checkpoints:
    """State ids at depths of nodes, ordered by use. A node has those that lie in it, also after splits and merges.

    ``places``: state id -> the node, or one that became part of it, and the depth; the least recently used first.
    """

    def __init__(self) -> None:
        self.places: OrderedDict[int, tuple[Node, int]] = OrderedDict()

    def put(self, node: Node, depth: int, state_id: int) -> bool:
        """Put a checkpoint at ``depth`` of ``node``; False if there is one. Raises NotOwned for an id that is in. O(1)."""
        if state_id in self.places:
            raise NotOwned(f"state {state_id} is a checkpoint already")
        if depth in node.checkpoints:
            return False
        node.put_checkpoint(depth, state_id)
        self.places[state_id] = (node, depth)
        return True

    def use(self, node: Node, depth: int) -> bool:
        """The last checkpoint of ``node`` up to ``depth`` was used; False if there is none."""
        if not node.checkpoints:
            return False
        places = [place for place in node.checkpoints if place <= depth]
        if places:
            self.places.move_to_end(node.checkpoints[max(places)])
        return bool(places)

    def drop(self, state_id: int) -> None:
        """Take out a checkpoint. Raises NotOwned for an id that is not in. O(1)."""
        if state_id not in self.places:
            raise NotOwned(f"state {state_id} is not a checkpoint of this tree")
        node, depth = self.places.pop(state_id)
        del node.up_to(depth).checkpoints[depth]

    def drop_after(self, node: Node, depth: int) -> list[int]:
        """Take out the checkpoints of ``node`` deeper than ``depth``; returns their state ids, deepest first."""
        if not node.checkpoints:
            return []
        states = [node.checkpoints[place] for place in sorted(node.checkpoints, reverse=True) if place > depth]
        for state in states:
            self.drop(state)
        return states

    def oldest(self, count: int) -> tuple[int, ...]:
        """The state ids of the ``count`` least recently used. O(count)."""
        return tuple(islice(self.places, max(0, count)))
