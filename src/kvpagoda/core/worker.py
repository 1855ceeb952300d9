"""A worker: it has the memory of a cache whose scheduler, a ``KVCache(device="none")``, runs in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from kvpagoda.core.batch.batch import LayerView
from kvpagoda.core.cache.guard import exclusive
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.core.memory.copies import Copies, Copy
from kvpagoda.errors import BadInput, NeedsReset, StaleHandle
from kvpagoda.schema import Plan
from kvpagoda.units import instance_of

if TYPE_CHECKING:
    import torch


class Worker:
    """The memory of a scheduler in another process, which makes all decisions.

        scheduler = KVCache(schema, device="none", **sizes)      worker = Worker(KVCache(schema, **sizes))
        batch = scheduler.batch(sequences, counts)
        batch.copies.to_json(), its arrays                  ──►  worker.apply(copies)
                                                                 write and read worker.layer(i) by the arrays

    The copies of every batch must be applied, in the order of the batches and before the step is computed, also those
    without operations and those of a batch that is not computed. One scheduler may have several workers, for example
    tensor-parallel ranks. Use a worker from one thread at a time.

    Args:
        cache: a new cache with memory and the scheduler's settings; the worker closes it, so that it opens no requests
            of its own.

    Raises:
        BadInput: the cache is without memory, has tiers or sleeps; and what closing it raises.
    """

    def __init__(self, cache: KVCache) -> None:
        core = instance_of(cache, KVCache, "the cache").core
        if not core.memory.has_memory or core.tiers.levels or core.guard.aside is not None:
            text = "a worker needs a cache with memory that is awake and has no tiers; make it with device="
            raise BadInput(text, needed="memory")
        cache.close()
        self._cache, self._core, self._guard = cache, core, core.guard
        self._scheduler: str | None = None
        self._resets = self._number = self._done = 0
        memory, self._swap = core.memory, core.swap
        sanitize = (lambda _: None) if core.sanitizer is None else core.sanitizer.apply
        self._calls: dict[str, Callable[[Copy], object]] = {
            "block": lambda one: memory.copy(one.group, one.source, one.target),
            "move": lambda one: memory.move(one.group, one.source, one.target),
            "state": lambda one: memory.convert(one.group, one.source, one.into, one.target),
            "swap_out": lambda one: memory.to_host(one.group, one.source, self._swap.table(), one.target.tolist()),
            "swap_in": lambda one: memory.from_host(one.group, one.target, self._swap.table(), one.source.tolist()),
            "reset": lambda one: memory.reset(one.group, one.target),
            "round": lambda one: memory.round(one.group, one.target, one.into),
            "clear": lambda one: memory.clear_sectors(one.target),
            "poison": lambda one: memory.freed(one.group, one.target),
            **dict.fromkeys(("wrote", "reads"), sanitize),
        }

    @property
    def plan(self) -> Plan:
        """The ``Plan`` of the memory."""
        return self._cache.plan

    @property
    def device(self) -> torch.device | None:
        """The torch device of the memory."""
        return self._cache.device

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._cache.block_size

    def layer(self, index: SupportsIndex) -> LayerView:
        """Return the memory of a layer; see ``KVCache.layer``.

        Args:
            index: of the layer.

        Raises:
            BadInput: the model has no such layer.
        """
        return self._cache.layer(index)

    @exclusive
    def apply(self, copies: Copies | str | bytes) -> None:
        """Do what must be done before a step.

        If it raises what a copy raises, such as OutOfBlocks, call it again with the same copies: it goes on where it
        stopped. Otherwise nothing was done.

        Args:
            copies: ``batch.copies``, or these as JSON.

        Raises:
            BadInput: they are no copies, or those of another plan.
            StaleHandle: they were applied already.
            NeedsReset: they are of another scheduler, which needs a worker of its own; or those of an earlier batch are
                missing: apply them first, or, if they are lost, close the scheduler's requests and ``reset`` it, after
                which it begins anew.
            CheckFailed: both caches sanitize, and the step would read what is not as the scheduler expects it.
        """
        core = self._core
        given = Copies.from_json(copies) if isinstance(copies, str | bytes) else instance_of(copies, Copies, "copies")
        if given.plan != core.agreement:
            raise BadInput.with_hint(
                f"the copies are for {given.plan}, this memory is {core.agreement}",
                "give scheduler and worker the same schema, sizes, block size and options",
                needed=given.plan, available=core.agreement,
            )  # fmt: skip
        if self._scheduler not in (None, given.scheduler):
            hint = "make a new Worker for a scheduler that was started again"
            raise NeedsReset.with_hint(
                f"the copies are of scheduler {given.scheduler!r}, those before them were of {self._scheduler!r}", hint,
                needed=self._scheduler, available=given.scheduler,
            )  # fmt: skip
        due, number = (self._resets, self._number), (given.resets, given.number)
        begins = given.resets > self._resets and not given.number
        if number < due:
            text = f"the copies of batch {number} (resets, number) were applied already; {due} is next"
            raise StaleHandle(text, needed=number, available=due)
        if number != due and not begins:
            hint = "apply those first, or close the scheduler's requests and reset() it"
            raise NeedsReset.with_hint(
                f"the copies of batch {number} (resets, number) came, but those of {due} are next", hint,
                needed=due, available=number,
            )  # fmt: skip
        given.check(core.plan, self._swap.num_rows, self._swap.width)
        self._scheduler = given.scheduler
        if begins:
            core.memory.forget_copies()  # what could not be poisoned
            core.memory.clear_sectors(np.arange(1, max(1, core.plan.num_sectors), dtype=np.int32))
            for index, group in enumerate(core.plan.groups) if core.sanitizer is not None else ():
                core.memory.freed(index, np.arange(group.first_id, group.num_rows, dtype=np.int32))
            core.memory.poison_freed()
            self._resets, self._number, self._done = given.resets, 0, 0
        for one in given.operations[self._done :]:
            self._calls[one.kind](one)
            core.memory.poison_freed()
            self._done += 1
        self._number, self._done = self._number + 1, 0
