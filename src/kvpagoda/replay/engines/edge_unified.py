"""SGLang's ``--enable-unified-memory``, without memory: blocks share its bytes with the windows, or the states, beside them.

Blocks grow from one end and the others from the other end, and are moved together when either needs room, so that what counts
is how many bytes are free. What a ratio would divide says at most how many requests may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.edge_states import OWN, StateLRU
from kvpagoda.replay.engines.edge_windows import WindowLRU, WindowTree
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.profiles import profile
from kvpagoda.units import ceil_div


class OneMemory(NamedTuple):
    """One memory: ``nbytes`` of it that can hold something, in bytes (or in units) of which a block takes ``block``, and a
    state or the windows of a block ``each``; ``num_ids``: the most states."""

    nbytes: int
    block: int
    each: int
    num_ids: int


def shared(nbytes: int, block: int, each: int) -> OneMemory:
    """Return what can be held in ``nbytes``: in whole blocks of them, without whole states (or windows of blocks) at its
    beginning, which hold nothing and have the bytes of a block or of a state, whichever is more. Too few bytes hold nothing.

    >>> shared(1_000, 30, 100)
    OneMemory(nbytes=890, block=30, each=100, num_ids=9)
    >>> shared(50, 30, 100)
    OneMemory(nbytes=0, block=30, each=100, num_ids=0)
    """
    nothing = ceil_div(max(block, each), each) * each
    return OneMemory(max(0, nbytes // block * block - nothing), block, each, max(0, nbytes // each - 1))


def check_groups(engine: str, groups: Sequence[Group]) -> None:
    """Raise BadInput if ``engine`` has no one memory for ``groups``."""
    kinds = {group.kind for group in groups}
    if profile(engine).store != "edges" or not kinds & {"window", "state"}:
        text = f"{engine} with unified_memory: it is SGLang's, for windows or states beside full attention"
        raise BadInput(f"{text}, got {sorted(kinds)}", needed=engine, available=len(groups))


class InOneMemory:
    """The two counts of an ``EdgeLRU`` that sets something apart, over the one rest of ``memory``."""

    memory: OneMemory
    _rest = _ids = 0

    @property
    def free(self) -> int:
        """Blocks for which there is room beside those that are promised."""
        return self._rest // self.memory.block

    @free.setter
    def free(self, value: int) -> None:
        self._rest += (value - self.free) * self.memory.block

    @property
    def free_apart(self) -> int:
        """States, or windows of blocks, for which there is room."""
        return self._rest // self.memory.each

    @free_apart.setter
    def free_apart(self, value: int) -> None:
        more = value - self.free_apart
        self._ids, self._rest = self._ids + more, self._rest + more * self.memory.each

    def _lose(self, tree: WindowTree, is_apart: bool = False) -> bool:
        """Evict a leaf of ``tree``, or only what an edge has apart, or return that there is none."""
        blocks, apart = tree.num_blocks, tree.num_windows
        if is_apart:
            tree.evict_windows(1)
        else:
            tree.evict(1)
        blocks, apart = blocks - tree.num_blocks, apart - tree.num_windows
        self.free += blocks
        self.free_apart += apart
        return blocks + apart > 0


class UnifiedWindows(InOneMemory, WindowLRU):
    """A ``WindowLRU`` whose blocks and their windows share ``memory``.

    Leaves are evicted, with their windows, until the step has room for its own blocks, and no more. Windows leave by
    themselves only for what all leaves together would not make room for."""

    def __init__(self, chains: Chains, num_blocks: int, num_windows: int, size: int, memory: OneMemory) -> None:
        self.memory = memory
        super().__init__(chains, num_blocks, num_windows, size)
        self._rest, self._ids = memory.nbytes, memory.num_ids

    def _fits(self, blocks: int, windows: int) -> bool:
        room = self._rest + self.tree.num_unlocked * self.memory.block + self.tree.num_idle * self.memory.each
        return blocks * self.memory.block + windows * self.memory.each <= room

    def _evict(self, spare: int) -> None:
        tree, (_, block, each, _) = self.tree, self.memory
        windows = max(0, ceil_div(-self._rest - tree.num_unlocked * block, each))
        leaves = max(0, ceil_div(-self._rest - windows * each, block))  # windows are whole: a leaf less can do
        least = tree.num_blocks - leaves
        while self._rest < 0 and tree.num_blocks > least and self._lose(tree):
            pass
        while self._rest < 0 and self._lose(tree, is_apart=True):
            pass
        assert self._rest >= 0


class UnifiedStates(InOneMemory, StateLRU):
    """A ``StateLRU`` whose blocks and slots share ``memory``; ``num_slots``: what would be set apart otherwise, by which the
    requests that run are limited.

    Blocks need leaves, the one used longest ago first, whose states leave too. A state needs leaves as well, so that states
    leave by themselves only where no leaf can leave, or if there are as many as can be. Of the memory a request keeps room for
    ``OWN`` slots and one more."""

    def __init__(
        self, chains: Chains, num_blocks: int, num_slots: int, memory: OneMemory, per_path: int | None = None
    ) -> None:
        self.memory = memory
        super().__init__(chains, num_blocks, num_slots, per_path)
        self._rest, self._ids = memory.nbytes, memory.num_ids

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``StateLRU``; but there must be room for its slots beside its prompt."""
        keep = self._keep((OWN + 1) * (len(self.running) + 1) - self._copied)
        self._rest -= keep
        started = super().start(request, end, known)
        self._rest += keep
        return started

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``, and ``start``."""
        keep = self._keep((OWN + 1) * len(self.running))
        self._rest -= keep
        grown = super().grow(request, end, known)
        self._rest += keep
        return grown

    def _keep(self, slots: int) -> int:
        """Return the bytes of whole blocks for ``slots``, but for those that running requests have."""
        slots -= sum(one.slots for one in self.running.values())
        return slots * ceil_div(self.memory.each, self.memory.block) * self.memory.block

    def _take(self, count: int) -> None:
        promised = sum(blocks for _, blocks in self._due.values())  # which they get after the slots
        self.free += promised
        for _ in range(count - self._ids):
            self._lose_state(count)
        while self.free_apart < count and (self._lose_leaf() or self._lose_state(count)):
            pass
        self.free -= promised
        self.free_apart -= count
        assert self._rest + promised * self.memory.block >= 0

    def _evict(self, spare: int) -> None:
        while self.free < spare and self._lose_leaf():
            pass
        assert self._rest >= 0

    def _lose_leaf(self) -> bool:
        """Evict a leaf, or return that there is none."""
        return self._lose(self.tree)

    def _lose_state(self, count: int) -> bool:
        """Evict a state if fewer than ``count`` slots are free, or return that there is none."""
        return self.free_apart < count and self._lose(self.tree, is_apart=True)
