"""SGLang's cache of a model with recurrent states, without memory: a tree of edges, of which some have the state of their end.

A text can be resumed only where an edge with a state ends. The states have slots of their own, which running requests take
too. Its scheduler copies a state of a chunk at the last multiple of ``grid`` tokens from where the chunk begins, or where the
prompt leaves the cached text; of an output at every multiple of 256 tokens. A text is published up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.edge_lru import EdgeLRU, EdgeRequest
from kvpagoda.replay.engines.edge_windows import WindowTree
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.text_tree import Edge, TextTree
from kvpagoda.replay.trace import Ints
from kvpagoda.units import ceil_div

RATIO = 0.9
"""Memory for states, as a multiple of that for blocks: the default of ``--mamba-full-memory-ratio``."""
CHUNK, INTERVAL, OWN, LEAST = 64, 256, 3, 5
"""Tokens of a chunk of the kernel, tokens of an output from one copy to the next, slots of a running request, and slots that
there must be for each request that runs."""


def slots(num_blocks: int, groups: Sequence[Group], ratio: float = RATIO) -> tuple[int, int]:
    """Return how many of ``num_blocks``, which all groups share, are blocks of texts, and how many slots the rest is, each a
    block of every group with states; ``ratio``: see ``RATIO``. Raises BadInput for other groups than full attention and
    states.

    >>> slots(1_900, Group.from_text("full+3*state"))
    (1000, 300)
    """
    kinds = [group.kind for group in groups]
    full, states = kinds.count("full"), kinds.count("state")
    if not full or not states or full + states < len(kinds):
        text = f"SGLang's profile has full attention, and windows of one size or states, got {', '.join(kinds)}"
        raise BadInput(text, needed=tuple(kinds))
    exact = Fraction(str(ratio))
    blocks = int(num_blocks / (full * (1 + exact)))
    return blocks, int(blocks * full * exact / states)


class StateTree(WindowTree):
    """A ``WindowTree`` whose edges have a state in place of windows: ``has_window`` says so, and each counts as one.

    ``per_path``: a new state evicts the first of its text that are more than so many, but those where texts part and
    those that are held. None: none."""

    def __init__(self, per_path: int | None = None) -> None:
        super().__init__(1)
        self.per_path = per_path

    def resume(self, blocks: Ints) -> tuple[Edge, int]:
        """See ``WindowTree``: at the deepest state."""
        whole, deepest = self._walk(blocks, at_once=False)
        at = next((on for on in reversed(deepest.path) if on.has_window), self.root)
        for on in at.path:
            self._use(on)
        self._use_windows(at)
        return at, whole

    def peek(self, blocks: Ints) -> int:
        """See ``TextTree``: up to the deepest state."""
        ends = [edge.end for edge, same in self._follow(blocks) if edge.has_window and same == len(edge.blocks)]
        return ends[-1] if ends else 0

    def publish_state(self, blocks: Ints) -> tuple[int, Edge, bool]:
        """Add ``blocks`` and the state of their end. Return how many blocks were there, the edge that ends where they end, and
        whether it had no state."""
        found, edge = self.insert(blocks)
        is_new = not edge.has_window
        if is_new:
            self._keep(edge)
        self._use_windows(edge)
        if is_new and self.per_path is not None:
            kept = [on for on in edge.path if on.has_window]
            excess = len(kept) - self.per_path
            can_go = [on for on in kept[:-1] if not on.window_locks and len(on.children) == 1]
            for on in can_go[: max(0, excess)]:
                self._lose(on)
        return found, edge, is_new

    def lock_windows(self, edge: Edge) -> int:
        """Keep the state of ``edge``."""
        if edge.parent is not None:
            self._lock_window(edge)
        return 0

    def unlock_windows(self, edge: Edge, first: int) -> None:
        """Undo one ``lock_windows``."""
        if edge.parent is not None:
            self._unlock_window(edge)

    def _weight(self, edge: Edge) -> int:
        return 1

    def _use_windows(self, edge: Edge) -> None:
        if edge.has_window:
            edge.window_used = next(self._ticks)
            self._offer_windows(edge)

    def _split(self, edge: Edge, at: int) -> Edge:
        return TextTree._split(self, edge, at)


@dataclass
class _Stateful(EdgeRequest):
    """A running request. ``branch``: tokens after which it leaves the cached text, or 0. ``slots``: those that it holds.
    ``tracked``: the tokens after which its last state was copied, if it is not published yet, or 0."""

    branch: int = 0
    slots: int = 0
    tracked: int = 0


class StateLRU(EdgeLRU):
    """Serves requests of ``chains`` with ``num_blocks`` blocks and ``num_slots`` states. See ``driver.Manager``,
    ``EdgeLRU`` and ``StateTree``.

    A look-up that finds a state takes a slot for a copy of it; a request has ``OWN`` once it runs, and one more for a moment
    when it publishes a state."""

    tree: StateTree
    running: dict[int, _Stateful]  # type: ignore[assignment]

    def __init__(self, chains: Chains, num_blocks: int, num_slots: int, per_path: int | None = None) -> None:
        super().__init__(chains, num_blocks)
        self.tree = StateTree(per_path)
        self.grid = max(CHUNK, self.size)
        self.num_slots = self.free_apart = num_slots
        self._branch = self._copied = 0

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``; but the edges on its way count as used, and a state may be evicted. O(blocks)."""
        keys = self.chains.keys(request)
        edge, whole = self.tree.resume(keys[: (known - 1) // self.size])
        branch = whole * self.size // self.grid * self.grid
        self._branch = branch if branch > edge.end * self.size else 0
        self._copied = int(edge.parent is not None)
        if self._copied:
            self._lock(edge)
            self._take(1)
            self._unlock(edge)
        self._asked = request, keys, edge.end, edge
        return edge.end * self.size

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``: the whole prompt must fit, and there must be ``LEAST`` slots for each request."""
        asked, keys, found, edge = self._asked
        assert asked == request, "a request is looked up before it starts"
        self._lock(edge)
        fits = LEAST * (len(self.running) + 1) <= self.num_slots
        if not fits or ceil_div(known, self.size) - found > self.free + self.tree.num_unlocked:
            self._unlock(edge)
            self.free_apart += self._copied
            return False
        self.running[request] = _Stateful(
            keys, edge, found, found, found * self.size, known, self._branch, self._copied
        )
        self._promise(request, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``."""
        one = self.running[request]
        super().stop(request, is_complete)
        self.tree.unlock_windows(one.edge, 0)
        self.free_apart += one.slots

    def _lock(self, edge: Edge) -> None:
        self.tree.lock(edge)
        self.tree.lock_windows(edge)

    def _unlock(self, edge: Edge) -> None:
        self.tree.unlock_windows(edge, 0)
        self.tree.unlock(edge)

    def _take(self, count: int) -> None:
        """Take slots, for which states are evicted if need be."""
        blocks, states = self.tree.num_blocks, self.tree.num_windows
        self.tree.evict_windows(count - self.free_apart)
        self.free += blocks - self.tree.num_blocks
        self.free_apart += states - self.tree.num_windows - count
        assert self.free_apart >= 0

    def _allocate(self) -> None:
        due = [(self.running[request], tokens) for request, (tokens, _) in self._due.items()]
        self._take(sum(OWN - one.slots for one, _ in due))
        super()._allocate()
        for one, tokens in due:
            one.slots = OWN
            self._track(one, one.length - tokens, one.length)

    def _evict(self, spare: int) -> None:
        states = self.tree.num_windows
        super()._evict(spare)
        self.free_apart += states - self.tree.num_windows

    def _track(self, one: _Stateful, begin: int, end: int) -> None:
        """Note where a state is copied in the chunk from ``begin`` to ``end``."""
        if end > one.known:
            every = max(self.grid, INTERVAL)
            one.tracked = end // every * every if end // every * every > begin else one.tracked
        elif end - begin >= self.grid:
            at = begin + (end - begin) // self.grid * self.grid
            upto = end if (end - begin) // CHUNK * CHUNK == at - begin else at + 1
            is_branch = begin < one.branch < upto and (one.branch - begin) % self.grid == 0
            one.tracked = one.branch if is_branch else at

    def _publish(self, request: int, complete: int = -1) -> None:
        end, one = self._computed.pop(request), self.running[request]
        if (end > one.known and request != complete) or not one.tracked:
            return
        if request != complete:
            self._take(1)
        keys, states = one.keys[: one.tracked // self.size], self.tree.num_windows
        found, edge, is_new = self.tree.publish_state(keys)
        self.free_apart += states + is_new - self.tree.num_windows
        if request == complete:
            one.slots -= is_new
        else:
            self.free_apart += not is_new
        self.free += found - one.held
        one.held, one.tracked = len(keys), 0
        self._lock(edge)
        self._unlock(one.edge)
        one.edge = edge
