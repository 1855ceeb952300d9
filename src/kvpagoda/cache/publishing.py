"""What follows from a commit: whole blocks become shareable, windows slide, checkpoints are kept, tiers are told."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.core import Core
from kvpagoda.cache.request import Request
from kvpagoda.cache.tier_hit import TierHit
from kvpagoda.errors import OutOfBlocks
from kvpagoda.units import ceil_div

_NONE: Ids = np.empty(0, np.int32)


class Publisher:
    """Publishes what the requests of ``core`` committed. All of it can be done later: a commit never fails for it."""

    def __init__(self, core: Core) -> None:
        self._core, self._every = core, core.settings.retention.checkpoint_every * core.block_size

    def settle(self, request: Request) -> None:
        """Publish the whole blocks of ``request``, let its windows slide, keep a checkpoint if one is due. While a step or a
        copy of it is in flight all of that waits; where memory for it lacks, it is tried again with the next commit."""
        request.is_settled = False
        if request.num_fences:
            return
        try:
            self._publish(request, request.own_length, None)
            if self._core.bounded:
                self._slide(request)
                self._keep_checkpoint(request)
        except (MemoryError, RuntimeError):
            return
        request.is_settled = True

    def begun(self, request: Request, hit: TierHit | None) -> None:
        """What ``request`` begins with was loaded: it is cached from now on. Or it was cached: it is in use again."""
        core, found = self._core, request.match
        if core.offloader is None:
            return
        if found.loaded:
            core.counters.loaded += found.loaded
            try:
                self._publish(request, found.resumable, hit)
                self._save(request, found.resumable)
            except (MemoryError, RuntimeError):
                return
        elif found.resumable:
            name = found.checkpoint
            copies = None if name is None else core.prefix.copies_of(name)
            core.offloader.reused(request.block_hashes, self._ids(request), name, copies or ())

    def next_checkpoint(self, request: Request) -> int | None:
        """The next position in the prompt at which a checkpoint should be kept; None where there is none."""
        if not self._core.bounded:
            return None
        length, size = request.length, self._core.block_size
        due = [
            self._prompt_end(request),
            request.match.num_tokens // size * size,
            (length // self._every + 1) * self._every if self._every else 0,
        ]
        return min((at for at in due if length < at < request.prompt_length), default=None)

    def store_last_checkpoint(self, request: Request) -> None:
        """``request`` ends: what its output can be resumed from is worth keeping below."""
        self._store(request.last_checkpoint)

    # -- steps of it -------------------------------------------------------------------------------------------------

    def _publish(self, request: Request, length: int, source: TierHit | None) -> None:
        """Make the whole blocks of the first ``length`` tokens shareable, here and below. ``source``: where they were loaded
        from. Raises MemoryError, changing nothing."""
        core, size, begin = self._core, self._core.block_size, request.lease.num_blocks
        end = length // size
        if begin == end:
            return
        offloader, prefix, guard = core.offloader, core.prefix, core.guard
        keys = request.keys(begin * size, end * size)
        hashes = None if offloader is None else core.hashes_of(request, end)
        guard.is_torn = True
        try:
            spared = prefix.publish(request.slot, request.lease, keys, request.text, request.priority)
        except Exception:
            guard.is_torn = False
            raise
        if len(spared) and core.full is not None:
            core.capacity.release(core.full, spared)
        guard.is_torn = False
        if core.full is None:
            core.capacity.forget(prefix.evict_unbacked, is_evicted=True)
        if offloader is not None and hashes is not None and request.namespace not in core.stale:
            offloader.published(hashes, begin, self._ids(request), source)

    def _ids(self, request: Request) -> Ids:
        """The blocks that ``request`` shares with the prefix cache, int32."""
        full = self._core.full
        return _NONE if full is None else full.table.cells[request.slot, : request.lease.num_blocks]

    def _slide(self, request: Request) -> None:
        core = self._core
        for group in core.bounded:
            leaving = group.leaving(request.slot, request.own_length)
            if leaving is not None:
                core.guard.is_torn = True
                group.slide(request.slot, leaving[0])
                core.capacity.release(group, leaving[1])
                core.guard.is_torn = False

    def _keep_checkpoint(self, request: Request) -> None:
        """Keep one if the request is where one is due: in a prompt at its end, where it parts from what was cached, and every
        so many blocks; of an output only the newest is worth its place."""
        length, size = request.own_length, self._core.block_size
        if length % size or not length:
            return
        in_prompt = length < request.prompt_length
        due = self._prompt_end(request), request.match.num_tokens // size * size
        if in_prompt and length not in due and (not self._every or length % self._every):
            return
        name = self._save(request, length)
        if name is None:
            return
        if in_prompt:
            self._store(name)
            return
        core, last = self._core, request.last_checkpoint
        request.last_checkpoint = name
        core.capacity.forget(core.prefix.drop, last)

    def _save(self, request: Request, length: int) -> int | None:
        """Keep a checkpoint at ``length``, the end of what is published; returns its name. None if there is one already, or no
        room: the least recently used one gives up its place, but what requests have reserved is not touched."""
        core, capacity, prefix, slot = self._core, self._core.capacity, self._core.prefix, request.slot
        if not core.bounded or length != request.lease.num_blocks * core.block_size:
            return None
        if prefix.is_kept_at(request.lease, length):
            return None
        needs = [0] * len(core.groups)
        for group in core.bounded:
            first = max(group.first[slot], group.growth.first_needed(length) // group.block_size)
            needs[group.index] = ceil_div(length, group.block_size) - first
        if any(needs[group.index] > capacity.available(group) for group in core.bounded):
            return None  # what is kept here can be evicted again, so that nothing is reserved for it
        if prefix.is_full:
            capacity.forget(prefix.evict_checkpoint, is_evicted=True)
            if prefix.is_full:
                return None
        try:
            capacity.ensure_free(needs, needs)
        except OutOfBlocks:
            return None
        copies = []
        for group in core.bounded:
            count, end = needs[group.index], ceil_div(length, group.block_size)
            copies.append(group.peek(count))
            if count:
                core.memory.copy(group.index, group.table.cells[slot, end - count : end].copy(), copies[-1])
        core.guard.is_torn = True
        for group, ids in zip(core.bounded, copies):
            group.take(ids)
        name = prefix.save(request.lease, length, copies)
        core.guard.is_torn = False
        if core.offloader is not None:
            end = length // core.block_size
            core.offloader.checkpoint_saved(name, core.hashes_of(request, end)[end])
        return name

    def _store(self, name: int) -> None:
        """Checkpoint ``name``, if it is still kept, is worth keeping below."""
        core = self._core
        copies = core.prefix.copies_of(name)
        if core.offloader is not None and copies is not None:
            core.offloader.store_checkpoint(name, copies, "commit")

    def _prompt_end(self, request: Request) -> int:
        """The last boundary from which the same prompt can be resumed with a token left to compute."""
        size = self._core.block_size
        return (request.prompt_length - 1) // size * size
