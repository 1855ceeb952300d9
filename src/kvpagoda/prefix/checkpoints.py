"""Checkpoints of the prefix tree: copied states at block boundaries, ordered by last use."""

from __future__ import annotations

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.policies.heap import LazyHeap
from kvpagoda.prefix.invariants import expect
from kvpagoda.prefix.lru import Clock, Entry
from kvpagoda.prefix.node import Checkpoint, Node


class Checkpoints:
    """State ids at depths of nodes, ordered by last use. Held checkpoints are outside of the order.

    ``by_state``: state id -> checkpoint, for all of them. ``num_held``: how many of these are held. The node of a
    checkpoint is the one in which it lies, also after splits and merges. A checkpoint belongs to the tree; leases do
    not hold it. All calls are amortised O(log n), and O(nodes) where they search along a path.
    """

    def __init__(self, clock: Clock) -> None:
        self.by_state: dict[int, Checkpoint] = {}
        self._clock = clock
        self._loose = LazyHeap(lambda state_id: (self.by_state[state_id].used, 0))
        self.num_held = 0

    def put(self, node: Node, depth: int, state_id: int, entry: Entry | None = None) -> bool:
        """Add a checkpoint at ``depth`` of ``node``; return False if there is one already.

        ``entry``: see ``Clock``; None: it counts as used now.
        Raises NotOwned for a state id that is a checkpoint already.
        """
        if state_id in self.by_state:
            raise NotOwned(f"state {state_id} is a checkpoint already", needed=state_id, available="checkpoint")
        if node.checkpoints is not None and depth in node.checkpoints:
            return False
        checkpoint = self.by_state[state_id] = Checkpoint(state_id, depth)
        checkpoint.used = self._clock.enter(entry)
        node.put_checkpoint(checkpoint)
        self._loose.add(state_id)
        return True

    def find(self, state_id: int) -> Checkpoint:
        """Return the checkpoint with this state id. Raises NotOwned."""
        if state_id not in self.by_state:
            raise NotOwned(f"state {state_id} is not a checkpoint of this tree", needed=state_id)
        return self.by_state[state_id]

    def is_held(self, state_id: int) -> bool:
        """Return whether the checkpoint with this state id is held. Raises NotOwned. O(1)."""
        return self.find(state_id).num_holds > 0

    def last(self, node: Node, depth: int) -> Checkpoint | None:
        """Return the deepest checkpoint of ``node`` and the nodes above it, up to ``depth``; None if there is none."""
        while node.parent is not None:
            if node.checkpoints is not None and (found := node.checkpoints.last(depth)):
                return found
            node = node.parent
        return None

    def touch(self, node: Node, depth: int) -> None:
        """Count a use of the checkpoint that ``last`` returns, if there is one."""
        if self.by_state and (found := self.last(node, depth)):
            found.used = self._clock.tick()

    def use(self, state_id: int) -> None:
        """Count a use of the checkpoint with this state id. Raises NotOwned."""
        self.find(state_id).used = self._clock.tick()

    def oldest(self) -> int | None:
        """Return when the checkpoint that ``evict`` removes next was last used; None if it would remove none."""
        first = self._loose.first()
        return None if first is None else first[0]

    def hold(self, state_id: int) -> None:
        """Protect the checkpoint with this state id from ``evict`` and ``drop``. Holds are counted.

        ``release`` ends one hold. The checkpoint is still removed if its blocks are removed. Raises NotOwned.
        """
        checkpoint = self.find(state_id)
        checkpoint.num_holds += 1
        if checkpoint.num_holds == 1:
            self.num_held += 1
            self._loose.discard(state_id)

    def release(self, state_id: int) -> None:
        """End one hold; this does not count as a use. Raises NotOwned, and BadInput if the checkpoint is not held."""
        checkpoint = self.find(state_id)
        if not checkpoint.num_holds:
            raise BadInput(f"checkpoint {state_id} is released more often than it was held")
        checkpoint.num_holds -= 1
        if not checkpoint.num_holds:
            self.num_held -= 1
            self._loose.add(state_id)

    def drop(self, state_id: int) -> None:
        """Remove a checkpoint; the caller owns its state id again. Raises NotOwned, and BadInput if it is held."""
        checkpoint = self.find(state_id)
        if checkpoint.num_holds:
            raise BadInput(f"checkpoint {state_id} is held {checkpoint.num_holds} times; release it first")
        self._take(checkpoint)

    def drop_after(self, node: Node, depth: int) -> list[int]:
        """Remove the checkpoints of ``node`` deeper than ``depth``, held or not; return their ids, deepest first."""
        states: list[int] = []
        while node.checkpoints is not None and (last := node.checkpoints.last(node.end)) and last.depth > depth:
            self._take(last)
            states.append(last.state_id)
        return states

    def evict(self, count: int = 1) -> tuple[int, ...]:
        """Remove the ``count`` least recently used checkpoints that are not held, fewer if there are fewer.

        Returns their state ids. ``touch`` and ``use`` count as uses. Their blocks stay cached.
        """
        states: list[int] = []
        while len(states) < count and (first := self._loose.first()):
            states.append(first[2])
            self._take(self.by_state[first[2]])
            self._clock.floor = max(self._clock.floor, first[0])
        return tuple(states)

    def check(self, nodes: list[Node]) -> None:
        """Prove that ``nodes`` have these checkpoints, each in its place, and that the order is right.

        Raises CheckFailed.
        """
        found = {}
        for node in nodes:
            for entry in node.checkpoints.all if node.checkpoints is not None else ():
                found[entry.state_id] = entry
                inside = node.start < entry.depth <= node.end and entry.among is node.checkpoints
                expect(inside, f"checkpoint {entry.state_id} of depth {entry.depth} is not of {node.start}..{node.end}")
                expect(self.last(node, entry.depth) is entry, f"checkpoint {entry.state_id} is not found")
        expect(found == self.by_state, f"checkpoints {sorted(found.keys() ^ self.by_state.keys())[:16]} are misplaced")
        loose = {state_id for state_id, entry in found.items() if not entry.num_holds}
        expect(
            self.num_held == len(found) - len(loose), f"{self.num_held} held checkpoints, not {len(found) - len(loose)}"
        )
        self._loose.check(loose)

    def _take(self, checkpoint: Checkpoint) -> None:
        self.num_held -= checkpoint.num_holds > 0
        del self.by_state[checkpoint.state_id]
        self._loose.discard(checkpoint.state_id)
        checkpoint.among.take(checkpoint.depth)
