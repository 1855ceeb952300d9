"""The cache of an engine that keeps the texts in a radix tree and evicts whole edges of it, as SGLang does, without memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.text_tree import Edge, TextTree
from kvpagoda.replay.trace import Ints
from kvpagoda.units import ceil_div


@dataclass
class EdgeRequest:
    """A running request. ``edge``: the deepest one that it holds; ``held``: blocks up to there, which are the tree's;
    ``count``: all its blocks; ``length``: its computed tokens; ``known``: the tokens up to which they are a prompt."""

    keys: Ints
    edge: Edge
    held: int
    count: int
    length: int
    known: int


class EdgeLRU:
    """Serves requests of ``chains`` with ``num_blocks`` blocks. See ``driver.Manager``.

    The requests of a step get their blocks together, when all of them have been looked up. Before that, edges are evicted
    until a block more for each request is free than is needed (with blocks of one token: none more). What a step
    computed is put in the tree after it, request by request; an output when its request is complete.
    """

    finds_all = False

    def __init__(self, chains: Chains, num_blocks: int) -> None:
        self.chains, self.size, self.tree = chains, chains.block_size, TextTree()
        self.free = num_blocks  # below 0 while blocks are promised that are still to be evicted
        self.running: dict[int, EdgeRequest] = {}
        self._asked: tuple[int, Ints, int, Edge] = -1, chains.prompts[:0], 0, self.tree.root
        self._due: dict[int, tuple[int, int]] = {}  # request -> tokens and blocks that it gets in this step
        self._computed: dict[int, int] = {}  # request -> the end of its chunk, which is not in the tree yet

    def step_starts(self) -> None:
        """See ``driver.Manager``."""
        self._allocate()
        for request in [*self._computed]:
            self._publish(request)

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``; but the edges on its way count as used. O(blocks)."""
        keys = self.chains.keys(request)
        found, edge = self.tree.match(keys[: (known - 1) // self.size])
        self._asked = request, keys, found, edge
        return found * self.size

    def peek(self, request: int) -> int:
        """See ``driver.Manager``. O(blocks)."""
        keys = self.chains.keys(request)[: (int(self.chains.prompts[request]) - 1) // self.size]
        return self.tree.peek(keys) * self.size

    @property
    def num_evicted(self) -> int:
        """See ``driver.Manager``."""
        return self.tree.num_evicted

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """See ``driver.Manager``: a chunk within a prompt ends with a block."""
        whole = end // self.size * self.size
        is_output = request in self.running and end > self.running[request].known
        return whole if begin < whole and end < known and not is_output else end

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``: the whole prompt must fit."""
        asked, keys, found, edge = self._asked
        assert asked == request, "a request is looked up before it starts"
        self.tree.lock(edge)
        if ceil_div(known, self.size) - found > self.free + self.tree.num_unlocked:
            self.tree.unlock(edge)
            return False
        self.running[request] = EdgeRequest(keys, edge, found, found, found * self.size, known)
        self._promise(request, end)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        if ceil_div(end, self.size) - self.running[request].count > self.free + self.tree.num_unlocked:
            return False
        self._promise(request, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``. What a preempted request computed last is not put in the tree."""
        if is_complete:
            self._allocate()
            while request in self._computed:
                self._publish(next(iter(self._computed)), request)
        self._due.pop(request, None)
        self._computed.pop(request, None)
        one = self.running.pop(request)
        self.free += one.count - one.held
        self.tree.unlock(one.edge)

    def check(self) -> None:
        """Raise AssertionError if blocks were lost. No request may run."""
        self.tree.check()
        assert not self.running and self.tree.num_unlocked == self.tree.num_blocks

    def _promise(self, request: int, end: int) -> None:
        one = self.running[request]
        more = ceil_div(end, self.size) - one.count
        self._due[request] = end - one.length, more
        one.count, one.length = one.count + more, end
        self.free -= more

    def _allocate(self) -> None:
        """Evict what the step needs."""
        if not self._due:
            return
        tokens, blocks = (sum(column) for column in zip(*self._due.values()))
        spare = self.size * len(self._due) if self.size > 1 else 0
        self._evict(ceil_div(tokens + spare, self.size) - blocks)
        self._computed |= {request: self.running[request].length for request in self._due}
        self._due.clear()

    def _evict(self, spare: int) -> None:
        """Evict until ``spare`` blocks are free beside those that are promised."""
        self.free += self.tree.evict(spare - self.free)
        assert self.free >= 0

    def _publish(self, request: int, complete: int = -1) -> None:
        """Put what ``request`` computed in the tree, unless that is an output and it is not ``complete``. Of blocks that
        another request put there meanwhile, its own are freed. An output is cut off from its prompt."""
        end, one = self._computed.pop(request), self.running[request]
        if end > one.known and request != complete:
            return
        keys = one.keys[: end // self.size]
        found, edge = self.tree.insert(keys)
        prompt = int(self.chains.prompts[request]) // self.size
        if 0 < prompt < len(keys):
            self.tree.insert(keys[:prompt])
        self.free += found - one.held
        one.held = len(keys)
        self.tree.lock(edge)
        self.tree.unlock(one.edge)
        one.edge = edge
