"""The queue of blocks with a state of each request that moves along with it: the setting ``state_cache`` of Dynamo's mocker.

A request computes its state in blocks of its own, which are taken from the same queue. Where a chunk of it ends at a block
boundary, others find the state there. Before it computes on, the state is copied to other blocks for them. The copy is free,
and is given up when the request comes to its next boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvpagoda.replay.engines.block_queue import BlockPool, Blocks
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.profiles import Profile
from kvpagoda.replay.engines.queued import QueuedManager, QueuedRequest
from kvpagoda.replay.trace import Ints
from kvpagoda.units import ceil_div

_NO_BLOCKS = np.empty(0, np.int32)


@dataclass
class _State:
    """The state of a running request. ``blocks`` int32 ``[states]``: where it is computed; ``is_found``: others find it there,
    until the request computes on. ``kept``: the blocks in which others could find its last state, that of the whole block
    number ``place``; ``lost``: how often each of them had been used again by then. ``text``: the tokens that were known when
    the request started."""

    blocks: Blocks
    is_found: bool = False
    kept: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    lost: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    place: int = 0
    text: int = 1 << 62


class MovedStates(QueuedManager):
    """Serves requests of ``chains`` with ``num_blocks`` blocks. See ``driver.Manager``. A state has ``num_states`` blocks,
    and can be found from the step after the one that gave it its blocks."""

    def __init__(
        self, chains: Chains, num_blocks: int, profile: Profile, num_states: int, step_tokens: int | None = None
    ) -> None:
        super().__init__(chains, num_blocks, profile, step_tokens=step_tokens)
        self.pool = BlockPool(num_blocks, chains.num_keys * (1 + num_states))
        self._offsets = chains.num_keys * np.arange(1, 1 + num_states, dtype=np.int64)
        self._states: dict[int, _State] = {}

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``. Up to the last state. O(blocks)."""
        count = super().find(request, known) // self.size
        asked = self._asked[request]
        keys = asked.keys[:count]
        places = np.flatnonzero((self.pool.find(keys[:, None] + self._offsets) > 0).all(axis=1))[::-1].tolist()
        count = next((place + 1 for place in places if int(keys[place]) not in self._fresh), 0)
        asked.blocks, asked.length, asked.slid, asked.shared = asked.blocks[:, :count], count * self.size, [0], count
        return asked.length

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        is_started = super().start(request, end, known)
        if is_started:
            self._states[request].text = known
        return is_started

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        state, own = self._running[request], self._states[request]
        if state.length % self.size and state.length < end < ceil_div(state.length, self.size) * self.size:
            state.length = end  # within a block, with nothing to take or to share
            return True
        copied = own.is_found or (end - 1) // self.size * self.size > max(state.length, own.text)
        more = ceil_div(end, self.size) - ceil_div(state.length, self.size) + copied * len(self._offsets)
        return more <= self.pool.queue.num_free and super().grow(request, end, known)

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``. The state is free before the other blocks."""
        self.pool.release(self._states.pop(request).blocks)
        super().stop(request, is_complete)

    def _needed(self, new: QueuedRequest, end: int, is_all: bool = False) -> int:
        """See ``QueuedManager``. The state that it starts from stays, and is copied."""
        return super()._needed(new, end, is_all) + len(self._offsets) + self.pool.num_idle(self._source(new))

    def _source(self, new: QueuedRequest) -> Blocks:
        """Return the blocks of the state that ``new`` starts from."""
        last = new.length // self.size - 1
        return self.pool.find(new.keys[last] + self._offsets) if new.length else _NO_BLOCKS

    def _extend(self, request: int, state: QueuedRequest, end: int) -> None:
        """Give ``state`` the blocks of its first ``end`` tokens. An output is computed token by token."""
        source = _NO_BLOCKS
        if request not in self._states:
            source = self._source(state)
            self.pool.hold(source)
            self._states[request] = _State(self.pool.take(len(self._offsets)))
        own = self._states[request]
        first = max(state.length, own.text) // self.size + 1
        for place in [*range(first * self.size, end, self.size), end]:
            self._compute(request, state, own, place)
        self.pool.release(source)

    def _compute(self, request: int, state: QueuedRequest, own: _State, end: int) -> None:
        """Compute up to ``end``: what others find is copied first; at a boundary the copy is given up."""
        copy = _NO_BLOCKS
        if own.is_found:
            copy = self.pool.take(len(self._offsets))
            self.pool.drop(own.blocks)
            self._let_find(state, own, copy)
            own.is_found = False
        super()._extend(request, state, end)
        self.pool.release(copy)
        if end % self.size == 0:
            self._give_up(own)
            own.place = end // self.size - 1
            self._let_find(state, own, own.blocks)
            own.is_found = True

    def _let_find(self, state: QueuedRequest, own: _State, blocks: Blocks) -> None:
        """Let others find the state of ``own.place`` in ``blocks``, from the next step on."""
        key = int(state.keys[own.place])
        self.pool.share(blocks, key + self._offsets)
        self._fresh.add(key)
        own.kept, own.lost = blocks, self.pool.lost[blocks]

    def _give_up(self, own: _State) -> None:
        """Let nobody find the last state of ``own``, where no request holds it and its blocks were not used for others."""
        is_there = (self.pool.counts[own.kept] == 0) & (self.pool.lost[own.kept] == own.lost)
        self.pool.drop(own.kept[is_there])
