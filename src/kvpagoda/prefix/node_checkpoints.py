"""The checkpoints that lie in one node, by depth."""

from __future__ import annotations

from bisect import bisect_right

_FEW = 64


class Checkpoint:
    """The state ``state_id`` after ``depth`` blocks. ``among``: the checkpoints of the node in which it lies; ``used``: when;
    ``num_holds``: how many need it.
    """

    __slots__ = ("among", "depth", "num_holds", "state_id", "used")

    def __init__(self, state_id: int, depth: int) -> None:
        self.state_id, self.depth = state_id, depth
        self.used = self.num_holds = 0
        self.among: NodeCheckpoints


class NodeCheckpoints:
    """Checkpoints by depth. ``put``, ``take`` and ``last`` are amortised O(log n) and a short move in a list."""

    __slots__ = ("_by_depth", "_depths")

    def __init__(self) -> None:
        self._by_depth: dict[int, Checkpoint] = {}
        self._depths: list[int] = []  # ascending; some of them are gone

    def __len__(self) -> int:
        return len(self._by_depth)

    def __contains__(self, depth: int) -> bool:
        return depth in self._by_depth

    def all(self) -> list[Checkpoint]:
        """All of them, by depth. O(n log n)."""
        return [self._by_depth[depth] for depth in sorted(self._by_depth)]

    def put(self, checkpoint: Checkpoint) -> None:
        """Add ``checkpoint``, at whose depth there is none."""
        depth, depths = checkpoint.depth, self._depths
        if not depths or depth > depths[-1]:
            depths.append(depth)
        else:
            at = bisect_right(depths, depth)
            if not at or depths[at - 1] != depth:
                depths.insert(at, depth)
        self._by_depth[depth] = checkpoint
        checkpoint.among = self

    def take(self, depth: int) -> None:
        """Take out the one at ``depth``."""
        del self._by_depth[depth]
        if len(self._depths) > 2 * len(self._by_depth) + _FEW:
            self._depths = sorted(self._by_depth)

    def last(self, depth: int) -> Checkpoint | None:
        """The deepest up to ``depth``."""
        depths = self._depths
        at = end = bisect_right(depths, depth)
        while at and depths[at - 1] not in self._by_depth:
            at -= 1
        del depths[at:end]
        return self._by_depth[depths[at - 1]] if at else None

    def split(self, depth: int) -> tuple[NodeCheckpoints, NodeCheckpoints]:
        """Those up to ``depth``, and the others; one of the two is this object. O(the fewer)."""
        at, other = bisect_right(self._depths, depth), NodeCheckpoints()
        is_front = 2 * at < len(self._depths)
        moved = self._depths[:at] if is_front else self._depths[at:]
        del self._depths[slice(at) if is_front else slice(at, None)]
        for one in moved:
            if one in self._by_depth:
                other.put(self._by_depth.pop(one))
        return (other, self) if is_front else (self, other)

    def joined(self, below: NodeCheckpoints) -> NodeCheckpoints:
        """These and ``below``, all of which are deeper, in one of the two objects. O(the fewer), and a copy of a list."""
        into, other = (self, below) if len(self) >= len(below) else (below, self)
        into._depths = self._depths + below._depths
        into._by_depth.update(other._by_depth)
        for checkpoint in other._by_depth.values():
            checkpoint.among = into
        return into
