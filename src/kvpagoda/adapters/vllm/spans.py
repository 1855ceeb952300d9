"""States in runs of units: who has which ids where vLLM's memory is divided by ``"memory": "exact"``.

    ids     0 ..      m ..             2m ..            3m ..
            | null    | state          | unit|unit|     | unit| ..             sectors of m ids

A block of attention is one *unit*, a state takes a whole *sector* and is named by its first id. Blocks of vLLM's never move,
so units are handed out sector after sector, the one whose content was used longest ago first: a sector that holds one unit
of a running text has no room for a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvpagoda.adapters.vllm.eviction import EvictionQueue
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.units import ceil_div

_EMPTY, _HELD = -(1 << 62), 1 << 62
"""Since when a unit is free, in the queue's clock: it has no content, it is in use."""
_ALONE = 3
"""Sectors that a request which runs alone takes at most for states: the last ones of two steps, and a new one."""


class SpanQueue(EvictionQueue):
    """The free ids of ``pool``, a block pool of vLLM, whose states take ``units`` ids each.

    ``num_free_blocks`` counts units. What is cold, and marks of blocks, are ``EvictionQueue``'s; the order is by sector.
    """

    def __init__(self, pool: Any, units: int, bounded: dict[int, int]) -> None:
        super().__init__([], len(pool.blocks), bounded)
        self._blocks, self._evict, self._units = pool.blocks, pool._maybe_evict_cached_block, units
        number = len(self._blocks) // units
        self._since = np.full((number, units), _EMPTY, np.int64)
        self._since[0] = _HELD  # the null block is a state, too
        self._by_id = self._since.reshape(-1)
        self._youngest = np.full(number, _EMPTY, np.int64)  # of each sector's units: the last that became free, ..
        self._oldest = self._youngest.copy()  # .. the first, ..
        self._youngest_free = self._youngest.copy()  # .. and the last of those that are free; HELD if none is
        self._changed = {0}  # sectors of which these are to be counted again
        self._is_state = np.arange(number) == 0
        self._is_cold = np.zeros(number, np.bool_)
        # units to hand out next, the next one last, and since when they are free
        self._filling: list[tuple[int, int]] = []
        self.num_free_blocks = (number - 1) * units

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self.clock += 1
            self._give(block, self.clock)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self._give(block, _EMPTY)

    def _give(self, block: KVCacheBlock, since: int) -> None:
        sector, unit = divmod(block.block_id, self._units)
        self._changed.add(sector)
        if not self._is_state[sector]:
            self._since[sector, unit] = since
            self.num_free_blocks += 1
            return
        self._since[sector] = since
        self._is_cold[sector] = since != _EMPTY and self.is_cold(block)
        self._is_state[sector] = since != _EMPTY
        self.num_free_blocks += self._units

    def remove(self, block: KVCacheBlock) -> None:
        sector, unit = divmod(block.block_id, self._units)
        self._changed.add(sector)
        if self._is_state[sector]:
            self._since[sector], self._is_cold[sector] = _HELD, False
            self.num_free_blocks -= self._units
        else:
            self._since[sector, unit] = _HELD
            self.num_free_blocks -= 1

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Hand out ``n`` units. At least so many are free."""
        taken: list[KVCacheBlock] = []
        while len(taken) < n:
            if not self._filling:
                self._filling = self._next_units()
            number, since = self._filling.pop()
            if self._by_id[number] == since:
                self._by_id[number] = _HELD
                self._changed.add(number // self._units)
                self._kept[number] = 0
                self.num_free_blocks -= 1
                taken.append(self._blocks[number])
        return taken

    def _next_units(self) -> list[tuple[int, int]]:
        """Return the free units of the sector to fill next, the one to hand out first last. O(sectors), in numpy."""
        self._count_again()
        since = self._since
        is_begun = (self._youngest == _HELD) & (self._oldest == _EMPTY)
        if is_begun.any():  # without taking content from anyone
            sector = int(is_begun.argmax())
            units = np.flatnonzero(since[sector] == _EMPTY)
        else:
            sector = int(self._due(self._youngest_free).argmin())
            if self._is_state[sector]:  # its first id is handed out first, by a call that evicts what it names
                self._is_state[sector] = self._is_cold[sector] = False
                since[sector] = _EMPTY
                self._changed.add(sector)
            units = np.flatnonzero(since[sector] != _HELD)
        units = units[np.argsort(since[sector, units], kind="stable")][::-1]
        return [*zip((sector * self._units + units).tolist(), since[sector, units].tolist())]

    def pop_state(self) -> KVCacheBlock:
        """Hand out a sector, whose content was used longest ago; return its first block. One is free as a whole."""
        self._count_again()
        due = self._due(self._youngest)
        sector = int(due.argmin())
        assert due[sector] != _HELD, "no sector is free as a whole: the caller asks num_sectors"
        first = sector * self._units
        if not self._is_state[sector]:
            for unit in np.flatnonzero(self._since[sector] != _EMPTY).tolist():
                self._evict(self._blocks[first + unit])
                self._kept[first + unit] = 0
        self._since[sector], self._is_state[sector], self._is_cold[sector] = _HELD, True, False
        self._kept[first] = 0
        self._changed.add(sector)
        self.num_free_blocks -= self._units
        block: KVCacheBlock = self._blocks[first]
        return block

    def _count_again(self) -> None:
        """Bring what is known of each sector up to date. O(units of those that changed)."""
        if self._changed:
            sectors = [*self._changed]
            since = self._since[sectors]
            self._youngest[sectors], self._oldest[sectors] = since.max(1), since.min(1)
            free = np.where(since == _HELD, _EMPTY, since).max(1)
            self._youngest_free[sectors] = np.where(self._oldest[sectors] == _HELD, _HELD, free)
            self._changed.clear()

    def _due(self, since: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ``since``, of each sector, in which cold states are as much older as ``cold_aging`` says."""
        due: npt.NDArray[np.int64] = since.copy()
        cold = np.flatnonzero(self._is_cold)
        due[cold] = self.clock - (self.cold_aging.factor * (self.clock - since[cold])).astype(np.int64)
        return due

    def num_sectors(self, without: Iterable[KVCacheBlock] = ()) -> int:
        """Return how many sectors are free as a whole when the blocks ``without`` are held."""
        self._count_again()
        is_free = self._youngest != _HELD
        is_free[[block.block_id // self._units for block in without]] = False
        return int(np.count_nonzero(is_free))

    def is_state(self, block: KVCacheBlock) -> bool:
        """Return whether ``block`` is a state, free with its content or in use."""
        return bool(self._is_state[block.block_id // self._units])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [self._blocks[number] for number in np.flatnonzero(self._by_id != _HELD).tolist()]

    def inside(self) -> set[int]:
        """Return the ids that name nothing now: behind the first of a state in use, and behind the last sector."""
        inside = np.repeat(self._is_state & (self._since[:, 0] == _HELD), self._units)
        inside[:: self._units] = False
        return {*np.flatnonzero(inside).tolist(), *range(len(self._by_id), len(self._blocks))}

    def check(self) -> None:
        """Prove that sectors of states are free or in use as a whole, and count what is free. Raises CheckFailed."""
        apart = np.flatnonzero(self._is_state & (self._since.min(1) != self._since.max(1)))
        if len(apart):
            raise CheckFailed(f"states of which a part is free: sectors {apart[:16].tolist()}")
        counted = int(np.count_nonzero(self._by_id != _HELD))
        if counted != self.num_free_blocks:
            raise CheckFailed(f"{counted} units are free, {self.num_free_blocks} are counted", needed=counted)
        self._count_again()
        if (self._youngest != self._since.max(1)).any() or (self._oldest != self._since.min(1)).any():
            raise CheckFailed("what is known of sectors is not what their units say")
        starts = np.repeat(self._is_state, self._units)
        starts[:: self._units] = False
        wrong = [number for number in np.flatnonzero(starts).tolist() if self._blocks[number].block_hash is not None]
        if wrong:
            raise CheckFailed(f"units inside of states that have content of their own: {wrong[:16]}")


class StatePool:
    """The pool as vLLM's manager of states sees it: a block is a sector."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As vLLM's."""
        pool = self._pool
        blocks = [pool.free_block_queue.pop_state() for _ in range(num_blocks)]
        for block in blocks:
            pool._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            if pool.metrics_collector:
                pool.metrics_collector.on_block_allocated(block)
        return blocks


class Spans:
    """The rules of admission where a state takes ``units`` ids: whether there are sectors, not only ids.

    Makes the managers of vLLM's ``coordinator`` ask for sectors.

    Raises:
        BadInput: hashes inside of blocks, or memory in which a text of ``max_model_len`` tokens has no room.
    """

    def __init__(self, coordinator: Any, units: int, max_model_len: int) -> None:
        self.units, self._longest = units, max_model_len
        self._pool = coordinator.block_pool
        states, attention = coordinator.single_type_managers
        self._states, self._block_size = states, attention.block_size
        self._check_hashes(attention)
        sectors = len(self._pool.blocks) // units
        needed = 1 + _ALONE + ceil_div(ceil_div(max_model_len, self._block_size), units)
        if sectors < needed:
            raise BadInput.with_hint(
                f'"memory": "exact": a text of {max_model_len} tokens needs {needed * units} blocks of {self._block_size} '
                f"tokens, {units} for each state; there are {len(self._pool.blocks)}",
                "lower --max-model-len, or give the cache more memory",
                needed=needed * units, available=len(self._pool.blocks),
            )  # fmt: skip
        self._pool.num_gpu_blocks = (sectors - 1) * units + 1  # the null block counts as one
        self._asked = 0
        self._at_end = set[str]()  # requests whose next token begins a block, for which they need a second state
        self._own, self._own_of_states = coordinator.get_num_blocks_to_allocate, states.get_num_blocks_to_allocate
        coordinator.get_num_blocks_to_allocate = self._num_units
        states.get_num_blocks_to_allocate = self._note_states
        states.block_pool = StatePool(self._pool)

    def _check_hashes(self, attention: Any) -> None:
        if self._pool.enable_caching and self._pool.hash_block_size != attention.block_size:
            raise BadInput.with_hint(
                f'"memory": "exact": texts have a hash after every {self._pool.hash_block_size} tokens, and blocks have '
                f"{attention.block_size}: vLLM would copy a block that ends inside over the blocks beside it",
                "leave out --prefix-match-unit",
                needed=attention.block_size, available=self._pool.hash_block_size,
            )  # fmt: skip

    def size(self, block: KVCacheBlock) -> int:
        """Return the units of ``block``, which is in use."""
        return self.units if self._pool.free_block_queue.is_state(block) else 1

    def may_begin(self, request: Request, found: tuple[Many[KVCacheBlock], ...]) -> bool:
        """Return whether ``request`` can run to its end from the cached blocks that it ``found``, if nothing else runs.

        These may lie in so many sectors that none is left for its states. Then they are forgotten, so that it begins again
        without them: no other request will ever make room."""
        hits = [block for block in chain.from_iterable(found) if not block.is_null]
        if not hits or self._pool.num_gpu_blocks - 1 > self._pool.get_num_free_blocks():
            return True
        most = min(self._longest, request.num_prompt_tokens + (request.max_tokens or 0))
        left = ceil_div(max(0, ceil_div(most, self._block_size) - len(found[1])), self.units)
        if self._pool.free_block_queue.num_sectors(hits) >= _ALONE + left:
            return True
        self._pool.evict_blocks({block.block_id for block in hits})
        return False

    def goes_to(self, name: str, num_tokens: int) -> None:
        """Note that request ``name`` has room for its first ``num_tokens`` tokens; 0: that it has none any more."""
        if num_tokens and num_tokens % self._block_size == 0:
            self._at_end.add(name)
        else:
            self._at_end.discard(name)

    def _note_states(self, *args: Any, **kwargs: Any) -> int:
        self._asked = int(self._own_of_states(*args, **kwargs))
        return self._asked

    def _num_units(self, request_id: str, num_tokens: int, new_computed_blocks: Any, *args: Any, **kwargs: Any) -> int:
        """Return as many ids as a request needs; more than there are if it needs more sectors than are free."""
        total = int(self._own(request_id, num_tokens, new_computed_blocks, *args, **kwargs))
        never: int = self._pool.num_gpu_blocks + 1
        if self._asked >= never:
            return never
        hits = [block for block in chain.from_iterable(new_computed_blocks) if not block.is_null]
        found = sum(block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks[0])
        new = max(0, self._asked - found)
        spare = 0
        if request_id not in self._states.num_cached_block:  # it begins: so many sectors stay free for those that run
            spare = 1 + len(self._at_end) + len(self._states.num_cached_block) // self._block_size
        if new and self._pool.free_block_queue.num_sectors(hits) < new + spare:
            return never
        return total - self._asked + int(new + found) * self.units
