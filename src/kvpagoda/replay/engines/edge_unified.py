"""SGLang's ``--enable-unified-memory`` for a model with recurrent states, without memory: blocks and states share its bytes.

Blocks grow from one end and states from the other, and are moved together when either needs room, so that what counts is how
many bytes are free. What the ratio divides says only how much memory there is, and how many requests may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.edge_states import OWN, StateLRU
from kvpagoda.replay.engines.groups import Group
from kvpagoda.units import ceil_div


class OneMemory(NamedTuple):
    """One memory: ``nbytes`` of it that can hold something, in bytes (or in units) of which a block takes ``block`` and a
    state ``state``; ``num_ids``: the most states."""

    nbytes: int
    block: int
    state: int
    num_ids: int


def shared(nbytes: int, block: int, state: int) -> OneMemory:
    """Return what can be held in ``nbytes``: in whole blocks of them, without whole states at its beginning, which hold
    nothing and have the bytes of a block or of a state, whichever is more.

    >>> shared(1_000, 30, 100)
    OneMemory(nbytes=890, block=30, state=100, num_ids=9)
    """
    nothing = ceil_div(max(block, state), state) * state
    return OneMemory(nbytes // block * block - nothing, block, state, nbytes // state - 1)


def check_groups(engine: str, groups: Sequence[Group], has_edges: bool) -> None:
    """Raise BadInput if ``engine`` has no one memory for ``groups``, or if it has no profile. ``has_edges``: it is SGLang."""
    kinds = {group.kind for group in groups}
    if not has_edges or kinds <= {"full"}:
        text = f"{engine} with unified_memory: it is SGLang's, for states beside full attention, got {sorted(kinds)}"
        raise BadInput(text, needed=engine, available=len(groups))
    if "window" in kinds:
        text = f"{engine} with unified_memory has no profile for windows: for states beside full attention, as full+3*state"
        raise BadInput(text, needed=engine, available=len(groups))


class UnifiedLRU(StateLRU):
    """A ``StateLRU`` whose blocks and slots share ``memory``; ``num_slots``: what would be set apart otherwise, by which the
    requests that run are limited.

    Blocks need leaves, the one used longest ago first, whose states leave too. A state needs leaves as well, so that states
    leave by themselves only where no leaf can leave, or if there are as many as can be. Of the memory a request keeps room for
    ``OWN`` slots and one more."""

    _rest = _ids = 0

    def __init__(
        self, chains: Chains, num_blocks: int, num_slots: int, memory: OneMemory, per_path: int | None = None
    ) -> None:
        self.memory = memory
        super().__init__(chains, num_blocks, num_slots, per_path)
        self._rest, self._ids = memory.nbytes, memory.num_ids

    @property
    def free(self) -> int:
        """Blocks for which there is room beside those that are promised."""
        return self._rest // self.memory.block

    @free.setter
    def free(self, value: int) -> None:
        self._rest += (value - self.free) * self.memory.block

    @property
    def free_slots(self) -> int:
        """Slots for which there is room."""
        return self._rest // self.memory.state

    @free_slots.setter
    def free_slots(self, value: int) -> None:
        more = value - self.free_slots
        self._ids, self._rest = self._ids + more, self._rest + more * self.memory.state

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
        return slots * ceil_div(self.memory.state, self.memory.block) * self.memory.block

    def _take(self, count: int) -> None:
        promised = sum(blocks for _, blocks in self._due.values())  # which they get after the slots
        self.free += promised
        for _ in range(count - self._ids):
            self._lose_state(count)
        while self.free_slots < count and (self._lose_leaf() or self._lose_state(count)):
            pass
        self.free -= promised
        self.free_slots -= count
        assert self._rest + promised * self.memory.block >= 0

    def _evict(self, spare: int) -> None:
        while self.free < spare and self._lose_leaf():
            pass
        assert self._rest >= 0

    def _lose_leaf(self) -> bool:
        """Evict a leaf, or return that there is none."""
        return self._lost(self.tree.evict)

    def _lose_state(self, count: int) -> bool:
        """Evict a state if fewer than ``count`` slots are free, or return that there is none."""
        return self.free_slots < count and self._lost(self.tree.evict_windows)

    def _lost(self, evict: Callable[[int], object]) -> bool:
        blocks, states = self.tree.num_blocks, self.tree.num_windows
        evict(1)
        blocks, states = blocks - self.tree.num_blocks, states - self.tree.num_windows
        self.free += blocks
        self.free_slots += states
        return blocks + states > 0
