"""Our eviction policies for vLLM's CPU tier, by its configuration alone:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "cpu_bytes_to_use": .., "eviction_policy": "S3FIFO", "cache_policy_module_path": "kvpagoda.adapters.vllm.cpu_policy"}}'

``eviction_policy`` is the name of a class here. vLLM's manager owns the memory of chunks, and asks which are evicted next:

    stored or found by a request that runs ──► it finishes ──► known to the policy
       evicted last, ends of texts first                         evicted by its order

So a request counts once, however many steps store or read its chunks, and ends of texts are older than their beginnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import ClassVar

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvpagoda.arrays import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.free_list import IdPool
from kvpagoda.policies.names import as_policy

__all__ = ["ARC", "FIFO", "LFU", "LFUDA", "S3FIFO", "SIEVE", "Auto"]


class _OurPolicy(CachePolicy):  # type: ignore[misc]
    """vLLM's ``CachePolicy`` over the policy of ours that ``name`` names, for ``cache_capacity`` chunks.

    A chunk has a number for the policy, from when its request has finished. A number that the policy remembers after the
    chunk was evicted belongs to its key: if it is stored again, it comes back.
    """

    name: ClassVar[str]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Remove all chunks, also those that a transfer reads, and what is remembered of others."""
        order = as_policy(self.name, max(1, self.cache_capacity))
        assert order is not None
        self._order, self._ids = order, IdPool()
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._evictable = set[OffloadKey]()  # chunks that no transfer reads or writes
        self._leaves = set[OffloadKey]()  # those among them that the policy may choose
        self._young: dict[str, dict[OffloadKey, int]] = {}  # request, oldest first -> key -> where it ends in the text
        self._rank: dict[str, int] = {}  # these requests, by the time of the first chunk
        self._holder: dict[OffloadKey, str] = {}  # young chunk -> the youngest request that has it
        self._number: dict[OffloadKey, int] = {}  # of chunks that the policy knows
        self._numbers: dict[OffloadKey, int] = {}  # the same, and of chunks that the policy remembers
        self._key: dict[int, OffloadKey] = {}  # the other way
        self._clock = 0
        self._storing: ReqContext | None = None  # who stores, for vLLM 0.32, whose ``insert`` does not say

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the chunk of ``key``, if there is one."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Add a chunk that a request stores."""
        self._chunks[key] = chunk
        self._hold(key, req_context or self._storing)
        if chunk.ref_cnt == 0:
            self._evictable.add(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk whose store has failed."""
        del self._chunks[key]
        self._evictable.discard(key)
        self._drop(key, evicted=False)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note which request stores what comes next: a policy hears of a miss when the chunk is stored."""
        self._storing = req_context

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Keep what a request has found until it finishes."""
        for key in keys:
            if key in self._chunks:
                self._hold(key, req_context)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of the chunks of ``keys`` that are known, from the begin of a text to its end."""
        known = [key for key in keys if key in self._number]
        if known:
            self._order.touch(np.array([self._number[key] for key in known], np.int32), 0)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Make what the request stored, and what it found of others, known to the policy; count a use of what it found."""
        own = self._young.get(req_context.req_id, {})
        keys = [key for group in key_groups for key in group if key in self._chunks]
        ends = {key: req_context.get_offload_key_position(key) for key in keys}
        if None not in ends.values():
            keys.sort(key=ends.__getitem__)
        keys += [key for key in own if key not in ends]
        self._know([key for key in keys if key not in self._number])
        self.touch((key for key in keys if key in reused_keys), req_context)
        for key in [*own]:
            self._release(key)
            self._settle(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict ``n`` chunks that no transfer reads and that are not ``protected``; None, and nothing changed, if there are
        not so many."""
        spared = self._evictable & protected
        if len(self._evictable) - len(spared) < n:
            return None
        self._evictable -= spared
        for key in spared:
            self._settle(key)
        evicted = list[tuple[OffloadKey, ChunkStatus]]()
        while len(evicted) < n:
            if self._leaves:
                victims = [self._key[int(self._order.choose(_alone)[0])]]
            else:  # of running requests, those of the oldest first, and ends before beginnings
                idle = chain.from_iterable(
                    sorted(self._evictable & keys.keys(), key=keys.__getitem__, reverse=True)
                    for keys in self._young.values()
                )
                victims = [*islice(idle, n - len(evicted))]
            for key in victims:
                self._evictable.remove(key)
                self._drop(key, evicted=True)
                evicted.append((key, self._chunks.pop(key)))
        self._evictable |= spared
        for key in spared:
            self._settle(key)
        return evicted

    def mark_evictable(self, key: OffloadKey) -> None:
        """Called when the last transfer that reads or writes the chunk has ended."""
        self._evictable.add(key)
        self._settle(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Called when a transfer begins to read the chunk."""
        self._evictable.discard(key)
        self._settle(key)

    def check(self) -> None:
        """Prove that every chunk is young or known, and that the policy has the same chunks. Raises CheckFailed. O(n)."""
        young = {key for keys in self._young.values() for key in keys}
        if young != self._holder.keys() or young | self._number.keys() != self._chunks.keys():
            text = f"{len(self._chunks)} chunks, {len(young)} young, {len(self._number)} known"
            raise CheckFailed(text, needed=len(self._chunks), available=len(young | self._number.keys()))
        idle = {key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0}
        if idle != self._evictable or idle - young != self._leaves:
            text = f"{len(idle)} chunks are idle, {len(self._evictable)} evictable, {len(self._leaves)} leaves"
            raise CheckFailed(text, needed=len(idle), available=len(self._evictable))
        numbers = np.array([*self._number.values()], np.int32)
        self._order.check(numbers, {self._number[key] for key in self._leaves})

    def _hold(self, key: OffloadKey, req_context: ReqContext | None) -> None:
        """Note that a request, which runs, has stored or found the chunk."""
        request, holder = "" if req_context is None else req_context.req_id, self._holder.get(key)
        self._clock += 1
        if holder is not None and self._rank.get(request, self._clock) < self._rank[holder]:
            return
        if holder != request:
            self._release(key)
        self._rank.setdefault(request, self._clock)
        held = self._young.setdefault(request, {})
        end = None if req_context is None else req_context.get_offload_key_position(key)
        held[key] = len(held) if end is None else end
        self._holder[key] = request
        self._settle(key)

    def _release(self, key: OffloadKey) -> None:
        """Note that no running request has the chunk."""
        request = self._holder.pop(key, None)
        if request is not None:
            del self._young[request][key]
            if not self._young[request]:
                del self._young[request], self._rank[request]

    def _know(self, keys: list[OffloadKey]) -> None:
        """Add ``keys``, from the begin of a text to its end, to the policy."""
        if not keys:
            return
        new = [key for key in keys if key not in self._numbers]
        for key, number in zip(new, map(int, self._ids.peek(len(new)))):
            self._numbers[key], self._key[number] = number, key
        self._ids.advance(len(new))
        self._number.update((key, self._numbers[key]) for key in keys)
        self._order.add(np.array([self._number[key] for key in keys], np.int32), 0)

    def _settle(self, key: OffloadKey) -> None:
        """Tell the policy whether it may choose the chunk."""
        is_leaf = key in self._evictable and key in self._number and key not in self._holder
        if is_leaf != (key in self._leaves):
            self._order.set_leaf(self._number[key], is_leaf)
            (self._leaves.add if is_leaf else self._leaves.remove)(key)

    def _drop(self, key: OffloadKey, *, evicted: bool) -> None:
        """Forget the chunk, which is no longer evictable."""
        self._release(key)
        self._settle(key)
        number = self._number.pop(key, None)
        if number is not None:
            for gone in map(int, self._order.remove(np.array([number], np.int32), evicted=evicted)):
                del self._numbers[self._key.pop(gone)]
                self._ids.give(np.array([gone], np.int32))


def _alone(leaf: int) -> Ids:
    """Return what is evicted with ``leaf``: nothing else, because chunks have no tree."""
    return np.array([leaf], np.int32)


class FIFO(_OurPolicy):
    """First stored, first evicted."""

    name = "fifo"


class LFU(_OurPolicy):
    """The least often used first."""

    name = "lfu"


class LFUDA(_OurPolicy):
    """The least often used first, with ageing."""

    name = "lfuda"


class SIEVE(_OurPolicy):
    """SIEVE: a hand passes over chunks that were used since it came by last."""

    name = "sieve"


class S3FIFO(_OurPolicy):
    """S3-FIFO: a small queue for chunks that are used once, and ghosts."""

    name = "s3fifo"


class ARC(_OurPolicy):
    """Our ARC; ``"arc"`` is vLLM's."""

    name = "arc"


class Auto(_OurPolicy):
    """LRU or ARC, whichever hits more often."""

    name = "auto"
