"""Where in the tree there is a copy of the state, and which copy was used least recently."""

from __future__ import annotations

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.prefix.clock import Clock
from kvpagoda.prefix.invariants import expect
from kvpagoda.prefix.lazy_heap import LazyHeap
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.node_checkpoints import Checkpoint


class Checkpoints:
    """State ids at depths of nodes, ordered by use; those that somebody holds are outside of the order.

    ``by_state``: all of them by state id; ``num_held``: of these, those that somebody holds. A node has those that lie in
    it, also after splits and merges. All calls are amortised O(log n), and O(nodes) where they look along a path. Those
    with a node are the tree's; leases do not hold checkpoints.
    """

    def __init__(self, clock: Clock) -> None:
        self.by_state: dict[int, Checkpoint] = {}
        self._clock = clock
        self._loose = LazyHeap(lambda state_id: (self.by_state[state_id].used, 0))
        self.num_held = 0

    def put(self, node: Node, depth: int, state_id: int) -> bool:
        """Put a checkpoint at ``depth`` of ``node``; False if there is one. Raises NotOwned for an id that is in."""
        if state_id in self.by_state:
            raise NotOwned(f"state {state_id} is a checkpoint already")
        if node.checkpoints is not None and depth in node.checkpoints:
            return False
        checkpoint = self.by_state[state_id] = Checkpoint(state_id, depth)
        checkpoint.used = self._clock.tick()
        node.put_checkpoint(checkpoint)
        self._loose.add(state_id)
        return True

    def find(self, state_id: int) -> Checkpoint:
        """The checkpoint with this state id. Raises NotOwned."""
        if state_id not in self.by_state:
            raise NotOwned(f"state {state_id} is not a checkpoint of this tree")
        return self.by_state[state_id]

    def is_held(self, state_id: int) -> bool:
        """Whether somebody holds the checkpoint with this state id. Raises NotOwned. O(1)."""
        return self.find(state_id).num_holds > 0

    def last(self, node: Node, depth: int) -> Checkpoint | None:
        """The deepest checkpoint of ``node``, and what lies above it, up to ``depth``."""
        while node.parent is not None:
            if node.checkpoints is not None and (found := node.checkpoints.last(depth)):
                return found
            node = node.parent
        return None

    def touch(self, node: Node, depth: int) -> None:
        """The checkpoint that ``last`` finds was used."""
        if self.by_state and (found := self.last(node, depth)):
            found.used = self._clock.tick()

    def use(self, state_id: int) -> None:
        """The checkpoint with this state id was used. Raises NotOwned."""
        self.find(state_id).used = self._clock.tick()

    def oldest(self) -> int | None:
        """When the one was used that ``evict`` takes out next; None if there is none that nobody holds."""
        first = self._loose.first()
        return None if first is None else first[0]

    def hold(self, state_id: int) -> None:
        """Let nobody evict or drop the checkpoint with this state id until ``release``, as often as it is held; only with its
        blocks it may still go. Raises NotOwned."""
        checkpoint = self.find(state_id)
        checkpoint.num_holds += 1
        if checkpoint.num_holds == 1:
            self.num_held += 1
            self._loose.discard(state_id)

    def release(self, state_id: int) -> None:
        """End one hold; where it was last used has not changed. Raises NotOwned, and BadInput if nobody holds it."""
        checkpoint = self.find(state_id)
        if not checkpoint.num_holds:
            raise BadInput(f"checkpoint {state_id} is released more often than it was held")
        checkpoint.num_holds -= 1
        if not checkpoint.num_holds:
            self.num_held -= 1
            self._loose.add(state_id)

    def drop(self, state_id: int) -> None:
        """Take out a checkpoint: its id is the caller's again. Raises NotOwned, and BadInput for one that is held."""
        checkpoint = self.find(state_id)
        if checkpoint.num_holds:
            raise BadInput(f"{checkpoint.num_holds} hold checkpoint {state_id}; release it first")
        self._take(checkpoint)

    def drop_after(self, node: Node, depth: int) -> list[int]:
        """Take out the checkpoints of ``node`` deeper than ``depth``, held or not; returns their state ids, deepest first."""
        states: list[int] = []
        while node.checkpoints is not None and (last := node.checkpoints.last(node.end)) and last.depth > depth:
            self._take(last)
            states.append(last.state_id)
        return states

    def evict(self, count: int = 1) -> tuple[int, ...]:
        """Take out the ``count`` least recently used (put or touched) that nobody holds; returns their state ids, fewer if
        there are fewer. Their blocks stay."""
        states: list[int] = []
        while len(states) < count and (first := self._loose.first()):
            states.append(first[2])
            self._take(self.by_state[first[2]])
        return tuple(states)

    def check(self, nodes: list[Node]) -> None:
        """Prove that ``nodes`` have these, each at its place, and that the order is right. Raises CheckFailed."""
        found = {}
        for node in nodes:
            for one in node.checkpoints.all if node.checkpoints is not None else ():
                found[one.state_id] = one
                inside = node.start < one.depth <= node.end and one.among is node.checkpoints
                expect(inside, f"checkpoint {one.state_id} of depth {one.depth} is not of {node.start}..{node.end}")
                expect(self.last(node, one.depth) is one, f"checkpoint {one.state_id} is not found")
        expect(found == self.by_state, f"checkpoints {sorted(found.keys() ^ self.by_state.keys())[:16]} are astray")
        loose = {state for state, one in found.items() if not one.num_holds}
        expect(
            self.num_held == len(found) - len(loose), f"{self.num_held} held checkpoints, not {len(found) - len(loose)}"
        )
        self._loose.check(loose)

    def _take(self, checkpoint: Checkpoint) -> None:
        self.num_held -= checkpoint.num_holds > 0
        del self.by_state[checkpoint.state_id]
        self._loose.discard(checkpoint.state_id)
        checkpoint.among.take(checkpoint.depth)
