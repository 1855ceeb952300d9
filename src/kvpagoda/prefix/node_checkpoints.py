"""The checkpoints that lie in one node, by depth."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state ``state_id`` after ``depth`` blocks. ``among``: the checkpoints of the node in which it lies; ``used``: when;
    ``num_holds``: how many need it.
    """

    state_id: int
    depth: int
    used: int = 0
    num_holds: int = 0
    among: NodeCheckpoints = field(init=False, repr=False)


class NodeCheckpoints:
    """Checkpoints by depth. ``put``, ``take`` and ``last`` are O(log n) and a short move in a list."""

    __slots__ = ("_depths", "all")

    def __init__(self) -> None:
        self.all: list[Checkpoint] = []  #: by depth
        self._depths: list[int] = []

    def __contains__(self, depth: int) -> bool:
        last = self.last(depth)
        return last is not None and last.depth == depth

    def put(self, checkpoint: Checkpoint) -> None:
        """Add ``checkpoint``, at whose depth there is none."""
        at = bisect_left(self._depths, checkpoint.depth)
        self._depths.insert(at, checkpoint.depth)
        self.all.insert(at, checkpoint)
        checkpoint.among = self

    def take(self, depth: int) -> None:
        """Take out the one at ``depth``."""
        at = bisect_left(self._depths, depth)
        del self._depths[at], self.all[at]

    def last(self, depth: int) -> Checkpoint | None:
        """The deepest up to ``depth``."""
        at = bisect_right(self._depths, depth)
        return self.all[at - 1] if at else None

    def split(self, depth: int) -> NodeCheckpoints:
        """Those up to ``depth``, which are not here any more. O(n)."""
        at, above = bisect_right(self._depths, depth), NodeCheckpoints()
        above.extend(self.all[:at])
        del self._depths[:at], self.all[:at]
        return above

    def extend(self, below: list[Checkpoint]) -> None:
        """Add ``below``, all of which are deeper. O(these)."""
        self._depths += [checkpoint.depth for checkpoint in below]
        self.all += below
        for checkpoint in below:
            checkpoint.among = self
