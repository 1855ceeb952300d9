"""The checkpoints of one node, by depth."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field


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
