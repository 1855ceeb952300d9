"""SGLang's cache of a model with sliding windows, without memory: a tree of edges whose windows have a memory of their own.

A block of a text is cached in full attention. Its rows in the layers with windows are cached beside it, or no longer: they
have a pool of their own, which is evicted in an order of its own, so that an edge can outlive its windows. A text can be
resumed only behind as many blocks with windows as a window has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.edge_lru import EdgeLRU, EdgeRequest
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.text_tree import Edge, TextTree
from kvpagoda.replay.trace import Ints
from kvpagoda.units import ceil_div

RATIO = 0.8
"""Blocks of a layer with a window for a block of one with full attention: the default of ``--swa-full-tokens-ratio``."""
INTERVAL = 128
"""An output frees what left its window after so many tokens (``SGLANG_SWA_EVICTION_INTERVAL``)."""


def pools(num_blocks: int, groups: Sequence[Group], ratio: float = RATIO) -> tuple[int, int, int]:
    """Return how many of ``num_blocks``, which all groups share, are blocks of texts in full attention, and in windows, and
    the size of a window in tokens (0: no windows); ``ratio``: see ``RATIO``. Raises BadInput for other groups than SGLang has
    here.

    >>> pools(1_000, Group.from_text("full+5*window:1024"))
    (200, 160, 1024)
    """
    kinds = [group.kind for group in groups]
    sizes = {group.size for group in groups if group.kind == "window"}
    if kinds.count("full") < 1 or {*kinds} - {"full", "window"} or len(sizes) > 1:
        text = f"SGLang's profile has full attention, and windows of one size, got {len(groups)} groups: {kinds}"
        raise BadInput(text, needed=tuple(kinds))
    if not sizes:
        return num_blocks // len(kinds), 0, 0
    full = int(num_blocks / (kinds.count("full") + ratio * kinds.count("window")))
    return full, int(full * ratio), sizes.pop()


class WindowTree(TextTree):
    """A ``TextTree`` of which some edges have their windows. ``width``: the blocks of a window. ``num_windows``: the blocks
    with windows, which ``num_evicted`` counts too; ``num_idle``: those whose windows no request holds.

    Windows are evicted edge by edge in the order of their own last use; a leaf that no request holds leaves with them as a
    whole. A use is one of the last ``width`` + 1 blocks of a text; an edge that is cut leaves two of the same age, of which
    the upper is the older."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.num_windows, self.num_idle = width, 0, 0
        self._idle: list[tuple[int, int, int, Edge]] = []  # a heap, as ``_leaves``
        self._order = count()

    def resume(self, blocks: Ints) -> tuple[Edge, int]:
        """Return the edge at whose end the text ``blocks`` can be resumed, and use it; and how many of ``blocks`` are cached
        in full attention."""
        whole, deepest = self._walk(blocks, at_once=False)
        at, run = self.root, self.width  # the beginning of a text needs nothing before it
        for on in deepest.path:
            run = run + len(on.blocks) if on.has_window else 0
            at = on if run >= self.width else at
        for on in at.path:
            self._use(on)
        self._use_windows(at)
        return at, whole

    def peek(self, blocks: Ints) -> int:
        """See ``TextTree``: up to where they can be resumed."""
        place, at, run = 0, 0, self.width
        for edge, same in self._follow(blocks):
            at += same
            run = run + same if edge.has_window else 0
            place = at if run >= self.width else place
        return place

    def publish(self, blocks: Ints, held: int, first: int) -> tuple[int, Edge, int]:
        """Add ``blocks`` and the windows of those from ``first`` on, where they have none. ``held``: blocks that the request
        has from the tree. Return how many blocks were there, the edge that ends where they end, and how many got windows."""
        found, edge = self.insert(blocks)
        before = self.num_windows
        for on in edge.path:
            begin = max(first, on.end - len(on.blocks))
            if on.has_window or on.end <= max(held, begin):
                continue
            if begin > on.end - len(on.blocks):
                self._split(on, begin - (on.end - len(on.blocks)))
            if on.end > found and len(on.blocks) > self.width:
                self._keep(self._split(on, len(on.blocks) - self.width))
            self._keep(on)
        self._use_windows(edge)
        return found, edge, self.num_windows - before

    def evict_windows(self, num_blocks: int) -> None:
        """Evict until the windows of at least ``num_blocks`` blocks are free, or no window is left that no request holds."""
        aim = self.num_windows - num_blocks
        while self.num_windows > aim and self._idle:
            used, _, _, edge = heappop(self._idle)
            if used != edge.window_used or not edge.has_window or edge.window_locks:
                continue
            if self._is_leaf(edge):
                self._remove(edge)
            else:
                self._lose(edge)

    def _is_leaf(self, edge: Edge) -> bool:
        return not edge.children and not edge.locks

    def lock_windows(self, edge: Edge) -> int:
        """Keep the windows of the last ``width`` blocks before the end of ``edge``; return where the first of these edges
        begins, in blocks, for ``unlock_windows``."""
        first = edge.end
        for on in reversed(edge.path):
            if edge.end - on.end >= self.width:
                break
            first = on.end - len(on.blocks)
            self._lock_window(on)
        return first

    def unlock_windows(self, edge: Edge, first: int) -> None:
        """Undo one ``lock_windows`` of an edge that ends where ``edge`` ends, which returned ``first``."""
        for on in edge.path:
            if on.end > first:
                self._unlock_window(on)

    def _lock_window(self, edge: Edge) -> None:
        self.num_idle -= self._weight(edge) if edge.has_window and not edge.window_locks else 0
        edge.window_locks += 1

    def _unlock_window(self, edge: Edge) -> None:
        assert edge.window_locks > 0
        edge.window_locks -= 1
        if edge.has_window and not edge.window_locks:
            self.num_idle += self._weight(edge)
            self._offer_windows(edge)

    def _weight(self, edge: Edge) -> int:
        return len(edge.blocks)

    def _use_windows(self, edge: Edge) -> None:
        for on in edge.path:
            if on.has_window and edge.end - on.end < self.width + 1:
                on.window_used = next(self._ticks)
                self._offer_windows(on)

    def _offer_windows(self, edge: Edge) -> None:
        if edge.has_window and not edge.window_locks:
            heappush(self._idle, (edge.window_used, edge.end, next(self._order), edge))

    def _keep(self, edge: Edge) -> None:
        """Give ``edge`` its windows."""
        edge.has_window, edge.window_used = True, next(self._ticks)
        self.num_windows += self._weight(edge)
        self.num_idle += self._weight(edge) if not edge.window_locks else 0
        self._offer_windows(edge)

    def _lose(self, edge: Edge) -> None:
        assert not edge.window_locks
        edge.has_window = False
        self.num_windows -= self._weight(edge)
        self.num_idle -= self._weight(edge)
        self.num_evicted += self._weight(edge)

    def _remove(self, edge: Edge) -> None:
        if edge.has_window:
            self._lose(edge)
        super()._remove(edge)

    def _split(self, edge: Edge, at: int) -> Edge:
        upper = super()._split(edge, at)
        upper.has_window, upper.window_used, upper.window_locks = edge.has_window, edge.window_used, edge.window_locks
        self._offer_windows(upper)
        return upper

    def check(self) -> None:
        """See ``TextTree``; of windows too."""
        super().check()
        seen = idle = 0
        edges = [*self.root.children.values()]
        offered = {id(edge) for used, _, _, edge in self._idle if used == edge.window_used}
        while edges:
            edge = edges.pop()
            assert edge.window_locks <= edge.locks
            seen += self._weight(edge) if edge.has_window else 0
            if edge.has_window and not edge.window_locks:
                idle += self._weight(edge)
                assert id(edge) in offered
            edges += edge.children.values()
        assert (seen, idle) == (self.num_windows, self.num_idle)


@dataclass
class _Windowed(EdgeRequest):
    """A running request. ``slid``: blocks whose windows it has freed; ``first``: see ``lock_windows``. ``branch``:
    blocks after which it leaves the cached text, where its windows are published first, or 0."""

    slid: int = 0
    first: int = 0
    branch: int = 0


class WindowLRU(EdgeLRU):
    """Serves requests of ``chains`` with ``num_blocks`` blocks in full attention and ``num_windows`` in windows of ``size``
    tokens. See ``driver.Manager`` and ``EdgeLRU``.

    A block of a running request has its windows until they are slid over: those of a prompt when a chunk is published, those
    of an output every ``INTERVAL`` tokens. A prompt that is cached further in full attention than it can be resumed is
    published up to there first, with its windows, and the rest with what follows."""

    tree: WindowTree
    running: dict[int, _Windowed]  # type: ignore[assignment]

    def __init__(self, chains: Chains, num_blocks: int, num_windows: int, size: int) -> None:
        super().__init__(chains, num_blocks)
        self.window = size - 1  # the tokens before the newest that are read
        self.width = ceil_div(self.window, self.size)
        self.tree = WindowTree(self.width)
        self.free_apart = num_windows
        self._branch = 0

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``; but the edges on its way count as used. O(blocks)."""
        keys = self.chains.keys(request)
        edge, whole = self.tree.resume(keys[: (known - 1) // self.size])
        self._branch = whole if whole > edge.end else 0
        self._asked = request, keys, edge.end, edge
        return edge.end * self.size

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``: the whole prompt must fit, and the windows of the chunk."""
        asked, keys, found, edge = self._asked
        assert asked == request, "a request is looked up before it starts"
        self.tree.lock(edge)
        first = self.tree.lock_windows(edge)
        if not self._fits(ceil_div(known, self.size) - found, ceil_div(end, self.size) - found):
            self.tree.unlock_windows(edge, first)
            self.tree.unlock(edge)
            return False
        self.running[request] = _Windowed(keys, edge, found, found, found * self.size, known, 0, first, self._branch)
        self._promise(request, end)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``. What left the window of an output is freed first, even if there is no room then."""
        one = self.running[request]
        is_due = one.length - self.window >= one.slid * self.size + INTERVAL
        if one.length > one.known and is_due:
            self._slide(one, one.length)
        more = ceil_div(end, self.size) - one.count
        if not self._fits(more, more):
            return False
        self._promise(request, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``."""
        one = self.running[request]
        super().stop(request, is_complete)
        self.free_apart += one.count - max(one.held, one.slid)
        self.tree.unlock_windows(one.edge, one.first)

    def _fits(self, blocks: int, windows: int) -> bool:
        """Whether so many blocks, and windows of blocks, are free or can be evicted."""
        return blocks <= self.free + self.tree.num_unlocked and windows <= self.free_apart + self.tree.num_idle

    def _promise(self, request: int, end: int) -> None:
        before = self.free
        super()._promise(request, end)
        self.free_apart -= before - self.free

    def _evict(self, spare: int) -> None:
        blocks, windows = self.tree.num_blocks, self.tree.num_windows
        self.tree.evict(spare - self.free)
        self.tree.evict_windows(spare - self.free_apart - (windows - self.tree.num_windows))
        self.free += blocks - self.tree.num_blocks
        self.free_apart += windows - self.tree.num_windows
        assert self.free >= 0 and self.free_apart >= 0

    def _slide(self, one: _Windowed, length: int) -> None:
        """Free the windows of ``one`` that the token after ``length`` tokens does not read, but for those of a whole block."""
        if length - self.window < one.slid * self.size + 1:
            return
        one.slid = max(one.slid, one.held)
        to = max(one.slid, length // self.size - self.width)
        self.free_apart += to - one.slid
        one.slid = to

    def _publish(self, request: int, complete: int = -1) -> None:
        end, one = self._computed.pop(request), self.running[request]
        if end > one.known and request != complete:
            return
        is_branch = one.held < one.branch <= end // self.size
        upto = one.branch * self.size if is_branch else end
        if request != complete:
            self._slide(one, upto - 1)
        keys = one.keys[: upto // self.size]
        mine = max(one.held, one.slid)
        found, edge, given = self.tree.publish(keys, one.held, one.slid)
        self.free += found - one.held
        self.free_apart += max(0, len(keys) - mine) - given
        one.held = len(keys)
        self.tree.lock(edge)
        first = self.tree.lock_windows(edge)
        self.tree.unlock_windows(one.edge, one.first)
        self.tree.unlock(one.edge)
        one.edge, one.first = edge, first
        if is_branch:
            one.branch = 0
            if request != complete:
                self._slide(one, end - 1)
