"""Stores blocks and checkpoints of a cache in tiers: when they are published, reused or evicted.

    commit   new blocks, checkpoints of prompts ──► backlog ──► staging memory ──► level that writes at commit
    evict    evicted blocks and checkpoints     ────────────► staging memory ──► level that writes at eviction

``reader`` loads them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from time import monotonic, perf_counter, sleep
from typing import Any, Protocol
from weakref import finalize

import numpy as np
import numpy.typing as npt

from kvpagoda.abc import observable
from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup, BlockNames, BlockPlaces
from kvpagoda.core.cache.below import NoTiers
from kvpagoda.core.cache.prefix_cache import PrefixCache
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.groups.base import CachedPart, Freed
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.core.offload.reader import Prefetch, TierHit, TierReader, bounded_part
from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks
from kvpagoda.namespace import Media
from kvpagoda.tiers.keys import KEY_NBYTES, prefix_hashes, prefix_root
from kvpagoda.tiers.level import Level, LevelStats, RecordIdentity
from kvpagoda.tiers.records import xxh3_128
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.units import real_number

_NONE = BlockNames(np.empty(0, np.int32))
Unit = tuple[BlockNames, bytes]
"""The names of the blocks of one record, and their hashes concatenated."""


class Watch(Protocol):
    """Is told what one level stores, from the level's threads."""

    def stored(self, hashes: Mapping[bytes, bytes]) -> None:
        """Tell which of the records with the keys of ``hashes`` are stored. The hashes of a record are those of its blocks,
        concatenated."""


StoredPart = tuple[BlockGroup, BlockPlaces, int]
"""A group, the places of its blocks, and the number of records that they take."""
_CLOSING = 0.1  # share of its timeout that close() keeps for closing the tiers


class Offloader(NoTiers):
    """Stores what one cache has in its levels; ``reader`` loads it back. Used by the thread of the cache.

    ``prefix``: what is cached, by name. ``media``: the digests of images in texts. ``memory``: copies the bytes.
    ``secret``: part of every key, so that the text cannot be guessed from a key without it. ``watches``: by level, is told
    which blocks it stored.

    The cache may report changes (``on_cached``, ``on_freed`` and others) after it has changed its own state:
    tables are assigned after all that can fail, and a store that fails is counted as dropped."""

    def __init__(
        self,
        specs: Many[TierSpec],
        identity: RecordIdentity,
        prefix: PrefixCache,
        media: Media,
        memory: NoMemory,
        secret: bytes = b"",
    ) -> None:
        full = prefix.full
        self._prefix, self._media, self._memory = prefix, media, memory
        self._full, self._bounded = full, prefix.bounded
        self._identity, self._secret = identity, secret
        specs = _proven(specs, identity)
        prefix_root(b"", secret)
        block_nbytes = 0 if full is None else memory.record_nbytes(full.index)
        most = [group.growth.checkpoint_blocks(group.block_size) or 0 for group in self._bounded]
        self._widths = [memory.record_nbytes(group.index) for group in self._bounded]
        parts = [*zip(most, self._widths)]
        self.levels = ()
        try:
            for spec in specs:
                self.levels += (Level(spec, identity, block_nbytes, parts, memory.host_memory),)
        except BaseException:
            _close(self.levels, 0.0)
            raise
        finalize(self, _close, self.levels, 0.0).atexit = False
        self.watches: Mapping[Level, Watch] = {}
        num_rows = 0 if full is None else full.plan.num_rows
        writers = [level for level in self.levels if level.spec.write == "reuse"]
        self._blocks = np.zeros(num_rows, [("hash", np.uint8, KEY_NBYTES), ("sent", np.bool_, len(writers))])
        """By block name: the block's hash (zeros if it is not cached or not known), and to which of the levels that write
        at reuse it was sent."""
        self._hashes: npt.NDArray[np.uint8] = self._blocks["hash"]
        self._sent = {level: self._blocks["sent"][:, i] for i, level in enumerate(writers)}
        self._checkpoints: dict[int, list[bytes]] = {}
        """Checkpoint -> hashes of the last blocks before it, as many as it keeps."""
        self._reused: set[int] = set()  # checkpoints sent to levels that write at reuse
        self._backlog: dict[Level, deque[Unit]] = {level: deque() for level in self.levels}
        self._due: dict[Level, dict[int, None]] = {level: {} for level in self.levels}
        """Checkpoints that wait for staging memory, the oldest first; blocks are stored after them."""
        self.reader = TierReader(self.levels, full, self._bounded, identity.block_size, memory, prefix.points.grid)
        self.parts = (self.reader,)

    def set_weights(self, weights: str) -> None:
        self._identity = replace(self._identity, weights=weights)
        self.clear()
        for level in self.levels:
            level.set_identity(self._identity)

    def hashes_of(self, request: RequestState, end: int) -> list[bytes]:
        """Return the list of block hashes of ``request``: the root, then one for each of at least ``end`` blocks."""
        if len(request.records.block_hashes) <= end:
            tokens = request.raw_tokens(0, end * self._identity.block_size)
            self.extend_hashes(request.records.block_hashes, request.namespace, tokens, request.media_ids)
        return request.records.block_hashes

    def extend_hashes(
        self, block_hashes: list[bytes], namespace: bytes, tokens: Ids, media_ids: Mapping[int, int]
    ) -> None:
        """Append the missing hashes to ``block_hashes``, which is empty or has those of the first blocks of a text.

        They are the root of the text, then one hash for each whole block of ``tokens``: all tokens of the text from the
        first on, int32 ``[n]``. ``media_ids``: offset in the text -> media id. O(new tokens)."""
        media = self._media.digests(media_ids, self._identity.block_size) if media_ids else None
        size, first = self._identity.block_size, max(0, len(block_hashes) - 1)
        root = block_hashes[-1] if block_hashes else prefix_root(namespace, self._secret)
        new_media = {block - first: digest for block, digest in (media or {}).items() if block >= first}
        new = prefix_hashes(root, tokens[first * size :], size, new_media)
        block_hashes += new if block_hashes else [root, *new]

    # -- finding and loading -----------------------------------------------------------------------------------------

    def find(
        self, request: RequestState, length: int, num_cached: int, resumable: int, prefetch: Prefetch | None = None
    ) -> TierHit | None:
        end = max(0, length - 1) // self._identity.block_size
        return self.reader.find(self.hashes_of(request, end)[: end + 1], num_cached, resumable, prefetch)

    def load(self, hit: Any, own: Many[BlockPlaces], first: int) -> int:
        if self._bounded:
            self.reader.load_checkpoint(hit, [own[group.index] for group in self._bounded])
        if self._full is None:
            return 0
        # last, since layers may still arrive afterwards
        return self.reader.load(hit, own[self._full.index][: hit.end - first], first)

    def prefetch(
        self, namespace: bytes, tokens: Ids, media_ids: Mapping[int, int], num_cached: int, resumable: int
    ) -> Prefetch:
        hashes: list[bytes] = []
        self.extend_hashes(hashes, namespace, tokens[: max(0, len(tokens) - 1)], media_ids)
        return self.reader.prefetch(hashes, num_cached, resumable)

    # -- storing -----------------------------------------------------------------------------------------------------

    def on_cached(self, request: RequestState, begin: int, source: Any = None) -> None:
        if self._full is None:
            return
        names = self._full.names_between(request.slot, 0, request.lease.num_blocks)
        block_hashes = self.hashes_of(request, len(names))
        new = np.frombuffer(b"".join(block_hashes[begin + 1 : len(names) + 1]), np.uint8).reshape(-1, KEY_NBYTES)
        self._hashes[names[begin:]] = new
        levels = set() if source is None else {level for level, _ in source.records}
        for level in self.levels:
            if level.spec.write == "commit" and levels != {level}:  # it has all blocks if all were loaded from it
                self._queue(level, block_hashes, begin, names)
        self.drain()

    def on_hit(self, request: RequestState, checkpoint: int | None) -> None:
        if not self._sent:
            return
        names = _NONE
        if self._full is not None:
            names = self._full.names_between(request.slot, 0, request.lease.num_blocks)
        for level, sent in self._sent.items():
            new = ~sent[names]
            if new.any():
                self._queue(level, self.hashes_of(request, len(names)), int(new.argmax()), names)
                sent[names] = True
        self.drain()
        if checkpoint is not None and checkpoint not in self._reused:
            self._reused.add(checkpoint)
            self.store_checkpoint(checkpoint, self._prefix.kept[checkpoint], "reuse")

    def _queue(self, level: Level, block_hashes: Many[bytes], begin: int, names: BlockNames) -> None:
        """Queue blocks ``names[begin:]`` of a text to be stored in ``level``, in whole records."""
        unit, backlog = level.unit, self._backlog[level]
        for last in range(begin + unit - 1 - begin % unit, len(names), unit):
            if len(backlog) * unit >= len(self._hashes):  # longer than the cache: some wait twice, or are evicted
                level.dropped += 1
            else:
                first = last + 1 - unit
                backlog.append(
                    (BlockNames(names[first : last + 1].copy()), b"".join(block_hashes[first + 1 : last + 2]))
                )

    def drain(self) -> None:
        """Store queued checkpoints and blocks that are still cached, as far as there is staging memory."""
        for level, backlog in self._backlog.items():
            due, is_storing = self._due[level], level.is_storing
            while due and self._store_checkpoint(level, first := next(iter(due)), self._prefix.kept[first]):
                del due[first]
                is_storing = True
            if due and not is_storing:  # readers have the staging memory, and may have it for long
                level.dropped += sum(self._num_needed(level, self._prefix.kept[one]) for one in due)
                due.clear()
            while backlog and level.num_writable and not due:
                count = min(len(backlog), level.num_writable, level.batch)
                units = [backlog.popleft() for _ in range(count)]
                self._store_blocks(level, [unit for unit in units if self._hashes[unit[0]].tobytes() == unit[1]])

    def on_evicted(self, freed: Freed, is_stored: bool) -> None:
        try:
            if is_stored:
                self._store_evicted(freed)
        finally:
            for checkpoint, _ in freed.checkpoints:
                self._checkpoints.pop(checkpoint, None)
                self._reused.discard(checkpoint)
                for due in self._due.values():
                    due.pop(checkpoint, None)

    def _store_evicted(self, freed: Freed) -> None:
        for number, names in freed.blocks:
            if self._full is not None and number == self._full.index:
                self._store_blocks_evicted(names)
        for checkpoint, kept in freed.checkpoints:
            for level, due in self._due.items():
                level.dropped += self._num_needed(level, kept) if checkpoint in due else 0
            self.store_checkpoint(checkpoint, kept, "evict")

    def num_storable(self, deadline: float) -> int | None:
        levels = [level for level in self.levels if level.spec.write == "evict"]
        for level in levels:
            level.settle(deadline)
        return min((level.num_writable for level in levels), default=None)

    def records(self) -> dict[Level, dict[bytes, tuple[int, int]]]:
        names = _NONE if self._full is None else self._full.cached_ids()
        hashes, index = self._hashes[names], self._prefix
        texts = [one.tobytes() for one in hashes[hashes.any(axis=1)]]
        width = 0 if self._full is None else self._full.plan.layout.nbytes
        found = {
            level: dict.fromkeys([level.key(one) for one in texts], (level.unit, level.unit * width))
            for level in self.levels
        }
        for name, ends in self._checkpoints.items():
            for number, (blocks, needed) in enumerate(index.blocks_of(self._prefix.kept[name])):
                layout, width = self._bounded[number].plan.layout, self._widths[number]
                for level, keys in found.items():
                    for one in level.parts_of(len(blocks) if level.is_apart(width) else needed, width):
                        key = level.key(ends[-1 - one.back], bounded_part(number, one.number))
                        keys[key] = one.num_blocks, one.nbytes * layout.nbytes // width
        return found

    def _store_blocks_evicted(self, names: BlockNames) -> None:
        """Store ``names``, blocks of the full group, the deepest in their texts first."""
        for level in self.levels:
            if level.spec.write == "evict":
                known = names[self._hashes[names].any(axis=1)][::-1]  # parents before children
                room = level.num_writable
                level.dropped += max(0, len(known) - room)
                units = [
                    (BlockNames(known[i : i + 1]), self._hashes[known[i]].tobytes())
                    for i in range(min(room, len(known)))
                ]
                for at in range(0, len(units), level.batch):
                    self._store_blocks(level, units[at : at + level.batch])

    def _store_blocks(self, level: Level, units: Many[Unit]) -> None:
        keys = {level.key(hashes[-KEY_NBYTES:]): unit for unit in units for hashes in unit[1:]}
        if keys and self._full is not None:
            names = BlockNames(np.concatenate([names for names, _ in keys.values()]))
            watch = self.watches.get(level)
            told = None if watch is None else partial(watch.stored, {key: hashes for key, (_, hashes) in keys.items()})
            part = self._full, self._full.places_of(names), len(keys)
            self.store(level, [*keys], [part], told=told)

    @observable
    def store(
        self,
        level: Level,
        keys: Many[bytes],
        parts: Many[StoredPart],
        sizes: Many[int] | None = None,
        told: Callable[[], None] | None = None,
    ) -> None:
        """Copy ``parts`` to staging memory, and store them under ``keys`` once they are there; their blocks may be given away
        when this returns. They are dropped if that fails. ``sizes``: bytes of each record (None: whole records). ``told``: see
        ``Level.store``."""
        try:
            rows, at = level.buffer.acquire(len(keys), owner=level), 0
        except OutOfBlocks:  # another thread was faster
            level.dropped += len(keys)
            return
        try:
            targets = level.buffer.places_of(rows)
            for group, places, count in parts:
                self._memory.to_host(group.index, places, level.buffer.payloads, targets[at : at + count])
                at += count
            level.store(keys, rows, sizes, told, self._memory.when_copied)
        except BaseException as error:
            with suppress(Exception):
                level.release_when(rows, self._memory.when_copied)  # some of them may be written by now, or soon
            level.dropped += len(keys)
            if not isinstance(error, Exception):  # an Exception is not raised: a GPU without room to pack, say
                raise

    def computed(self, request: RequestState) -> None:
        if request.records.opened_at and request.own_length >= request.prompt_length:
            num_tokens = request.prompt_length - request.match.resumable
            self.reader.computed(perf_counter() - request.records.opened_at, num_tokens)
            request.records.opened_at = 0.0

    def took(self, seconds_per_token: float) -> None:
        self.reader.seconds_per_token = seconds_per_token

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint_saved(self, checkpoint: int, request: RequestState, num_blocks: int) -> None:
        blocks = self._prefix.blocks_of(self._prefix.kept[checkpoint])
        first = num_blocks - max((len(names) for names, _ in blocks), default=0)
        self._checkpoints[checkpoint] = self.hashes_of(request, num_blocks)[first + 1 : num_blocks + 1]

    def store_checkpoint(self, checkpoint: int, kept: CachedPart, when: str) -> None:
        """As ``NoTiers`` says. Blocks before those that are needed, which serve texts that part a little earlier, are stored
        as far as staging memory goes, the last first; but a quarter of it is left for what later texts need. One of a prompt
        waits for staging memory; one that is evicted cannot."""
        for level in self.levels if checkpoint in self._checkpoints else ():
            if level.spec.write == when and not self._store_checkpoint(level, checkpoint, kept):
                if when == "evict":
                    level.dropped += self._num_needed(level, kept)
                else:
                    self._due[level][checkpoint] = None

    def _num_needed(self, level: Level, kept: CachedPart) -> int:
        """Return how many records of ``level`` a text needs to be resumed at a checkpoint with ``kept``."""
        blocks = self._prefix.blocks_of(kept)
        return sum(len(level.parts_of(n, width)) for (_, n), width in zip(blocks, self._widths))

    def _store_checkpoint(self, level: Level, checkpoint: int, kept: CachedPart) -> bool:
        """Store ``checkpoint`` in ``level``; return False, doing nothing, if there is too little staging memory."""
        count = self._num_needed(level, kept)
        if count > level.num_writable:
            return False
        hashes, blocks = self._checkpoints[checkpoint], self._prefix.blocks_of(kept)
        apart = [level.is_apart(width) for width in self._widths]
        one_more = sum(len(level.parts_of(1, width)) for width, is_apart in zip(self._widths, apart) if is_apart)
        more = max(0, level.num_readable_ahead - count) // max(1, one_more)
        keys, parts, sizes = list[bytes](), list[StoredPart](), list[int]()
        for number, (group, (names, n)) in enumerate(zip(self._bounded, blocks)):
            last = BlockNames(names[max(0, len(names) - n - more * apart[number]) :])
            records = level.parts_of(len(last), self._widths[number])
            keys += [level.key(hashes[-1 - one.back], bounded_part(number, one.number)) for one in records]
            parts.append((group, group.places_of(last), len(records)))
            sizes += [one.nbytes for one in records]
        self.store(level, keys, parts, sizes)
        return True

    # -- blocks that are freed ---------------------------------------------------------------------------------------

    def on_freed(self, group: BlockGroup, places: BlockPlaces) -> None:
        if group is self._full:
            try:
                self._blocks[group.names_at(places)] = 0
            except MemoryError:  # blocks that are freed must lose their hashes, and this cannot be undone
                self.clear()

    def clear(self) -> None:
        for level in self.levels:
            self._backlog[level].clear()
            self._due[level].clear()
        self._blocks[:] = 0
        self._checkpoints.clear()
        self._reused.clear()

    # -- proof, counters, closing ------------------------------------------------------------------------------------

    def check(self) -> None:
        cached = _NONE if self._full is None else self._full.cached_ids()
        hashed = np.flatnonzero(self._hashes.any(axis=1))
        known = self._checkpoints.keys()
        loose = [
            *np.setdiff1d(hashed, cached).tolist(),
            *(known - self._prefix.kept),
            *({*chain(*self._due.values())} - known),
        ]
        if loose:
            text = f"blocks or checkpoints that are not cached have hashes: {loose[:16]}"
            raise CheckFailed(text, available=loose[:16])
        for level in self.levels:
            level.check()

    def stats(self) -> tuple[LevelStats, ...]:
        return tuple(level.stats() for level in self.levels)

    def flush(self, timeout: float) -> bool:
        deadline = monotonic() + real_number(timeout, "a timeout in seconds")
        self.drain()
        while self._is_behind and monotonic() < deadline:
            if all(level.tier.is_closed for level in self.levels):
                break
            sleep(0.001)
            self.drain()
        return all([level.settle(deadline) for level in self.levels]) and not self._is_behind  # noqa: C419

    @property
    def _is_behind(self) -> bool:
        """Whether anything waits to be stored."""
        return any(self._backlog.values()) or any(self._due.values())

    def close(self, timeout: float) -> bool:
        begun, timeout = monotonic(), real_number(timeout, "a timeout in seconds")
        self.reader.close()
        is_stored = self.flush((1 - _CLOSING) * timeout)
        return _close(self.levels, begun + timeout) and is_stored


def _close(levels: Many[Level], deadline: float) -> bool:
    for level in levels:
        level.tier.close()  # starts closing; all levels close at the same time
    return all([level.tier.close(deadline) for level in levels])  # noqa: C419


def _proven(specs: Many[TierSpec], identity: RecordIdentity) -> Many[TierSpec]:
    xxh3_128(b"")
    shared = [spec.name for spec in specs if not spec.is_private]
    if shared and not identity.weights:
        raise BadInput(
            f"other processes can read tier {shared[0]!r}, and must know with which weights its records were computed: "
            f"give Identity(weights=...), a digest of the weights (kvpagoda.hf.weights_digest)",
            needed="weights", available=shared[0],
        )  # fmt: skip
    return specs
