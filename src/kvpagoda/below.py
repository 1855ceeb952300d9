"""A cache's blocks and checkpoints below the device: named, and stored when they are published, reused or evicted.

    commit   new blocks, checkpoints of prompts ──► backlog ──► staging memory ──► level that writes at commit
    evict    blocks and checkpoints that go     ────────────► staging memory ──► level that writes at eviction

``finding`` is the way back up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.finding import Finder, Memory, Offer, checkpoint_part
from kvpagoda.tiers.checksum import xxh3_128
from kvpagoda.tiers.keys import KEY_NBYTES, prefix_hashes, prefix_root
from kvpagoda.tiers.level import Identity, Level
from kvpagoda.tiers.spec import TierSpec, When
from kvpagoda.units import table_rows

Unit = tuple[Ids, bytes]
"""The blocks of one record, and their prefix hashes one after the other."""
_NONE: Mapping[int, bytes] = {}


class Text(Protocol):
    """A request's text: ``chain`` is filled here, and nobody else writes there."""

    chain: list[bytes]
    namespace: bytes
    stand_ins: Mapping[int, int]

    def raw_tokens(self, first: int, end: int) -> Ids: ...


class Below:
    """The levels below one cache: what is called how, and what is to be stored. Used by the cache's own thread.

    ``full``: the ledger whose blocks a tree shares, ``bounded``: those that checkpoints copy. ``secret``: without it nobody
    can guess from a key what a text was.
    """

    def __init__(
        self,
        specs: Many[TierSpec],
        identity: Identity,
        full: BlockGroup | None,
        bounded: Many[BlockGroup],
        memory: Memory,
        digests: Callable[[Mapping[int, int], int], Mapping[int, bytes]],
        secret: bytes = b"",
    ) -> None:
        self._full, self._bounded, self._memory = full, tuple(bounded), memory
        self._identity, self._size, self._secret, self._digests = identity, identity.block_size, secret, digests
        block_nbytes = 0 if full is None else self._nbytes(full)
        odd = [spec for spec in specs if not isinstance(spec, TierSpec)]
        if odd:
            raise BadInput(f"tiers are made by host_tier, disk_tier and others, or are a TierSpec; got {odd[0]!r}")
        xxh3_128(b"")
        parts = [(_most_copies(ledger), self._nbytes(ledger)) for ledger in self._bounded]
        prefix_root(b"", secret)
        outlasting = [spec.name for spec in specs if not spec.is_private]
        if outlasting and not identity.weights:
            raise BadInput(
                f"what lies in tier {outlasting[0]!r} is found by other processes, which must know of which weights it is: "
                f"give weights=, a digest of them (kvpagoda.hf.weights_digest)"
            )
        self.levels: tuple[Level, ...] = ()
        try:
            for spec in specs:
                self.levels += (Level(spec, identity, block_nbytes, parts, memory.host_memory),)
        except BaseException:
            for level in self.levels:
                level.close(0.0)
            raise
        num_rows = 0 if full is None else full.plan.num_rows
        self._hashes: npt.NDArray[np.uint8] = np.zeros((num_rows, KEY_NBYTES), np.uint8)
        """The prefix hash of every cached block, by id; zeros: not cached, or not known."""
        self._names: dict[int, bytes] = {}  # checkpoint -> prefix hash
        self._stored: set[int] = set()  # checkpoints that levels which write what is reused were given
        self._backlog: dict[Level, deque[Unit]] = {level: deque() for level in self.levels}
        self._sent = {level: np.zeros(num_rows, np.bool_) for level in self.levels if level.spec.write == "reuse"}
        self.finder = Finder(self.levels, full, self._bounded, self._size, memory)

    def rename(self, weights: str) -> None:
        """From now on what is stored and found is that of ``weights``; what waits to be stored is forgotten."""
        self._identity = replace(self._identity, weights=weights)
        for level in self.levels:
            self._backlog[level].clear()
            level.rename(self._identity)
        self._hashes[:] = 0
        self._names.clear()

    # -- names -------------------------------------------------------------------------------------------------------

    def hashes(self, namespace: bytes, tokens: Ids, stand_ins: Mapping[int, int]) -> list[bytes]:
        """The chain of a text: its root, then one hash for each whole block. O(n)."""
        root = prefix_root(namespace, self._secret)
        extras = self._digests(stand_ins, self._size) if stand_ins else _NONE
        return [root, *prefix_hashes(root, tokens, self._size, extras)]

    def chain(self, text: Text, end: int) -> list[bytes]:
        """The chain of the first ``end`` blocks of ``text``."""
        return self._extend(text, end)[: end + 1]

    def _extend(self, text: Text, end: int) -> list[bytes]:
        """The chain of ``text``, at least up to block ``end``."""
        chain, size = text.chain, self._size
        if not chain:
            chain.append(prefix_root(text.namespace, self._secret))
        first = len(chain) - 1
        extras = self._digests(text.stand_ins, size) if text.stand_ins else _NONE
        extras = {block - first: digest for block, digest in extras.items() if block >= first}
        chain += prefix_hashes(chain[-1], text.raw_tokens(first * size, max(first, end) * size), size, extras)
        return chain

    # -- storing -----------------------------------------------------------------------------------------------------

    def published(self, text: Text, begin: int, end: int, ids: Ids, source: Offer | None = None) -> None:
        """Blocks ``begin .. end - 1`` of ``text`` are cached; ``ids``, int32 ``[end]``: all its blocks in the full group.
        ``source``: where they were loaded from, if they were."""
        chain = self._extend(text, end)
        if self._full is None:
            return
        new = np.frombuffer(b"".join(chain[begin + 1 : end + 1]), np.uint8)
        self._hashes[ids[begin:]] = new.reshape(-1, KEY_NBYTES)
        for level in self.levels:
            if level.spec.write == "commit" and (source is None or level is not self._deepest(source)):
                self._queue(level, chain, begin, ids)
        self.drain()

    def reused(self, chain: Many[bytes], ids: Ids, checkpoint: int | None, copies: Many[Ids]) -> None:
        """A request begins with the cached blocks ``ids``, the first of its text, and with the copies of ``checkpoint``."""
        for level, sent in self._sent.items():
            new = ~sent[ids]
            if new.any():
                sent[ids] = True
                self._queue(level, chain, int(new.argmax()), ids)
        if self._sent:
            self.drain()
            if checkpoint is not None and checkpoint not in self._stored:
                self._stored.add(checkpoint)
                self.store_checkpoint(checkpoint, copies, "reuse")

    @staticmethod
    def _deepest(source: Offer) -> Level | None:
        """The level that has all that was loaded, if one alone has."""
        levels = {level for level, _ in source.records}
        return levels.pop() if len(levels) == 1 else None

    def _queue(self, level: Level, chain: Many[bytes], begin: int, ids: Ids) -> None:
        """Of the blocks ``ids`` of a text those from ``begin`` on are to be stored, in whole records."""
        unit, backlog = level.unit, self._backlog[level]
        for last in range(begin + unit - 1 - begin % unit, len(ids), unit):
            if len(backlog) * unit >= len(self._hashes):  # as many as there are blocks: some wait twice, or in vain
                level.dropped += 1
            else:
                first = last + 1 - unit
                backlog.append((ids[first : last + 1].copy(), b"".join(chain[first + 1 : last + 2])))

    def drain(self) -> None:
        """Store what waits, and is still cached, as far as there is staging memory."""
        for level, backlog in self._backlog.items():
            while backlog and level.num_writable:
                count = min(len(backlog), level.num_writable, level.batch)
                units = [backlog.popleft() for _ in range(count)]
                self._store_blocks(level, [one for one in units if self._hashes[one[0]].tobytes() == one[1]])

    def _store_blocks(self, level: Level, units: Many[Unit]) -> None:
        keys = {level.key(hashes[-KEY_NBYTES:]): ids for ids, hashes in units}
        if keys and self._full is not None:
            self._store(level, [*keys], [(self._full, np.concatenate([*keys.values()]), len(keys))])

    def _store(
        self, level: Level, keys: Many[bytes], parts: Many[tuple[BlockGroup, Ids, int]], sizes: Many[int] | None = None
    ) -> None:
        """Copy ``parts``, (group, blocks, records), to staging memory, for which there is room, and store them as ``keys``. If
        that fails, it was not to be."""
        rows, at = level.buffer.acquire(len(keys)), 0
        try:
            for ledger, ids, count in parts:
                self._memory.blocks_out(ledger, ids, level.buffer.payloads, rows[at : at + count])
                at += count
        except Exception:  # a GPU without room to pack them, say
            level.buffer.release(rows)
            level.dropped += len(keys)
            return
        level.store(keys, rows, sizes)

    def evicted(self, ids: Ids) -> None:
        """Cached blocks ``ids`` of the full group go, those deepest in their texts first; their memory is still theirs."""
        for level in self.levels:
            if level.spec.write == "evict":
                known = ids[self._hashes[ids].any(axis=1)][::-1]  # parents before children
                room = level.num_writable
                level.dropped += max(0, len(known) - room)
                units = [(known[i : i + 1], self._hashes[known[i]].tobytes()) for i in range(min(room, len(known)))]
                for at in range(0, len(units), level.batch):
                    self._store_blocks(level, units[at : at + level.batch])

    def freed(self, ids: Ids) -> None:
        """Blocks ``ids`` of the full group are cached no more."""
        self._hashes[ids] = 0
        for sent in self._sent.values():
            sent[ids] = False

    def renamed(self, names: Ids) -> None:
        """Block ``i`` of the full group is called ``names[i]`` from now on."""
        moved = np.flatnonzero(names != np.arange(len(names)))
        for table in (self._hashes, *self._sent.values()):
            rows = table[moved].copy()
            table[moved] = 0
            table[names[moved]] = rows
        for level, backlog in self._backlog.items():
            self._backlog[level] = deque((names[ids], hashes) for ids, hashes in backlog)

    def checkpoint_saved(self, text: Text, name: int, num_tokens: int) -> None:
        """Checkpoint ``name`` holds what ``text`` needs to go on after ``num_tokens`` tokens, which are published."""
        end = num_tokens // self._size
        self._names[name] = self._extend(text, end)[end]

    def store_checkpoint(self, name: int, copies: Many[Ids], when: When) -> None:
        """Store checkpoint ``name``, whose blocks of each bounded group are ``copies``, in levels that write ``when``."""
        prefix_hash = self._names.get(name)
        for level in self.levels:
            if prefix_hash is None or level.spec.write != when:
                continue
            parts = [
                (ledger, ids, table_rows(len(ids), self._nbytes(ledger), level.payload_nbytes))
                for ledger, ids in zip(self._bounded, copies)
            ]
            count = sum(rows for _, _, rows in parts)
            if count > level.num_writable:
                level.dropped += count
                continue
            sizes = [size for ledger, ids, _ in parts for size in self._sizes(ledger, len(ids), level)]
            self._store(level, [level.key(prefix_hash, checkpoint_part(i)) for i in range(count)], parts, sizes)

    def checkpoint_dropped(self, name: int) -> None:
        """Checkpoint ``name`` is no more."""
        self._names.pop(name, None)
        self._stored.discard(name)

    def _nbytes(self, ledger: BlockGroup) -> int:
        return self._memory.record_nbytes(ledger)

    def _sizes(self, ledger: BlockGroup, n: int, level: Level) -> list[int]:
        """Bytes in each row that ``n`` blocks of ``ledger`` take."""
        width, payload = self._nbytes(ledger), level.payload_nbytes
        if width > payload:
            return [min(payload, width - at) for _ in range(n) for at in range(0, width, payload)]
        each = payload // width
        return [min(each, n - at) * width for at in range(0, n, each)]

    def check(self, owned_ids: Ids, checkpoints: Collection[int]) -> None:
        """Prove that only cached blocks and kept checkpoints have names, and that staging memory is in one place. Raises
        CheckFailed naming them."""
        named = np.flatnonzero(self._hashes.any(axis=1))
        loose = [*np.setdiff1d(named, owned_ids).tolist(), *(self._names.keys() - checkpoints)]
        if loose:
            raise CheckFailed(f"blocks or checkpoints that are not cached have names below: {loose[:16]}")
        for level in self.levels:
            level.buffer.check()

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, deadline: float) -> bool:
        """Store what waits, until ``deadline`` (of ``time.monotonic``); whether all of it is done."""
        self.drain()
        while any(self._backlog.values()) and monotonic() < deadline:
            for level, backlog in self._backlog.items():
                if backlog:
                    level.settle_one(deadline)
            self.drain()
        return all([level.settle(deadline) for level in self.levels]) and not any(self._backlog.values())  # noqa: C419

    def close(self, deadline: float) -> bool:
        """Let go of all levels; see ``Tier.close``."""
        self.finder.close()
        closed = [level.close(deadline) for level in self.levels]
        return all(closed)


def _most_copies(ledger: BlockGroup) -> int:
    """The most blocks of a bounded group in one checkpoint."""
    most = ledger.growth.most_blocks(ledger.block_size, 1)
    assert most is not None, "a bounded group"
    return most
