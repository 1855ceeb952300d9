"""A cache's blocks and checkpoints below the device: stored when they are published, reused or evicted, and found again.

    open     chain of prefix hashes ──► look up in all levels at once ──► Offer: what could be loaded, and from where
             room made as for any request ──► load into its own blocks, a few records at a time ──► publish
    commit   new blocks, checkpoints of prompts ──► backlog ──► staging memory ──► level that writes at commit
    evict    blocks and checkpoints that go     ────────────► staging memory ──► level that writes at eviction

What is loaded lies in private blocks of the request that wanted it until it is published, like what a model computed. So
nobody owns anything in a new way, and whatever goes wrong below, the request computes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpagoda.alloc.held import Ids
from kvpagoda.alloc.pages import Bytes
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.ledger import GroupLedger
from kvpagoda.tiers.checksum import xxh3_128
from kvpagoda.tiers.driver import Lease, Status
from kvpagoda.tiers.keys import KEY_NBYTES, prefix_hashes, prefix_root
from kvpagoda.tiers.level import Identity, Level, Loading
from kvpagoda.tiers.spec import TierSpec, When
from kvpagoda.units import ceil_div, table_rows

_HOLD = 10.0  # seconds that what was found may take to be asked for
_FIRST_STEP = 64  # blocks that are asked for first; four times as many each time that all are there
Part = tuple[Ids, Bytes, Many[int]]
"""Blocks, and the rows of host memory that they come from."""
Unit = tuple[Ids, bytes]
"""The blocks of one record, and their prefix hashes one after the other."""
_NONE: Mapping[int, bytes] = {}


class Memory(Protocol):
    """Who moves the bytes, to and from rows of uint8 ``[M, width]`` in host memory."""

    def blocks_out(self, ledger: GroupLedger, ids: Ids, payloads: Bytes, rows: Many[int]) -> None: ...

    def blocks_in(self, ledger: GroupLedger, ids: Ids, payloads: Bytes, rows: Many[int]) -> None: ...

    def blocks_in_later(self, ledger: GroupLedger, parts: Many[Part], done: Callable[[], None]) -> None: ...

    def host_memory(self, nbytes: int) -> Bytes: ...

    def record_nbytes(self, ledger: GroupLedger) -> int: ...


class Text(Protocol):
    """A request's text: ``chain`` is filled here, and nobody else writes there."""

    chain: list[bytes]
    namespace: bytes
    stand_ins: Mapping[int, int]

    def raw_tokens(self, first: int, end: int) -> Ids: ...


@dataclass(eq=False)
class Offer:
    """What lies below of a text, from block ``begin`` of it up to ``end``: found and, where it is ``held``, read already."""

    chain: list[bytes]
    begin: int
    end: int
    records: list[tuple[Level, int]]
    """(level, number of the record in the text), in the order of the text."""
    checkpoint: tuple[Level, list[int]] | None = None
    """The staging rows that hold the checkpoint at ``end``."""
    leases: list[Lease] = field(default_factory=list)
    held: dict[tuple[Level, int], int] = field(default_factory=dict)
    layerwise: bool = False
    """Whether blocks may come in layer after layer, when they are asked for."""

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give back staging memory and leases. Does no harm twice."""
        rows = [(level, [row]) for (level, _), row in self.held.items()]
        for level, taken in [*rows, *([self.checkpoint] if self.checkpoint else [])]:
            level.buffer.release(taken)
        for lease in self.leases:
            lease.release()
        self.held, self.checkpoint, self.leases = {}, None, []


class Prefetch:
    """Records of one text that are being read into host memory. Made by ``Books.prefetch``; ``open`` takes what it has."""

    def __init__(self, future: Future[Offer | None]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether all that can be read ahead is read: opening the request waits for nothing then."""
        return self._future.done()

    def take(self, chain: list[bytes], num_cached: int) -> Offer | None:
        """What was found, for the text of ``chain`` of which ``num_cached`` blocks are cached by now; None if it was another
        text, or if what is cached became less. Waits for it. The offer is the caller's; the second time there is none."""
        offer, self._future = self._future.result(), Future()
        self._future.set_result(None)
        if offer is not None and (offer.chain != chain or offer.begin > num_cached):
            offer.release()
            return None
        return offer

    def close(self) -> None:
        """Give back what was read."""
        offer = self.take([], 0)
        assert offer is None, "no text has no chain"


class Below:
    """The levels below one cache. Used by the cache's own thread, but for ``find``, which any thread may call.

    ``full``: the ledger whose blocks a tree shares, ``bounded``: those that checkpoints copy. ``secret``: without it nobody
    can guess from a key what a text was.
    """

    def __init__(
        self,
        specs: Many[TierSpec],
        identity: Identity,
        full: GroupLedger | None,
        bounded: Many[GroupLedger],
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
        parts = [(self._most_copies(ledger), self._nbytes(ledger)) for ledger in self._bounded]
        prefix_root(b"", secret)
        outlasting = [spec.name for spec in specs if not spec.is_private]
        if outlasting and not identity.weights:
            raise BadInput(
                f"what lies in tier {outlasting[0]!r} is found by other processes, which must know of which weights it is: "
                f"give weights=, a digest of them (kvpagoda.hf.weights_digest)"
            )
        self._reader: ThreadPoolExecutor | None = None
        self.levels: tuple[Level, ...] = ()
        try:
            for spec in specs:
                self.levels += (Level(spec, identity, block_nbytes, parts, memory.host_memory),)
        except BaseException:
            self.close(0.0)
            raise
        num_rows = 0 if full is None else full.plan.num_rows
        self._hashes: npt.NDArray[np.uint8] = np.zeros((num_rows, KEY_NBYTES), np.uint8)
        """The prefix hash of every cached block, by id; zeros: not cached, or not known."""
        self._names: dict[int, bytes] = {}  # checkpoint -> prefix hash
        self._stored: set[int] = set()  # checkpoints that levels which write what is reused were given
        self._backlog: dict[Level, deque[Unit]] = {level: deque() for level in self.levels}
        self._sent = {level: np.zeros(num_rows, np.bool_) for level in self.levels if level.spec.write == "reuse"}
        self.seconds_per_token: float | None = None
        """What it takes to compute a token, if anybody measured it: loading is worth it if it is faster."""

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
        self, level: Level, keys: Many[bytes], parts: Many[tuple[GroupLedger, Ids, int]], sizes: Many[int] | None = None
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
            self._store(level, [level.key(prefix_hash, _part(i)) for i in range(count)], parts, sizes)

    def checkpoint_dropped(self, name: int) -> None:
        """Checkpoint ``name`` is no more."""
        self._names.pop(name, None)
        self._stored.discard(name)

    def _nbytes(self, ledger: GroupLedger) -> int:
        return self._memory.record_nbytes(ledger)

    def _sizes(self, ledger: GroupLedger, n: int, level: Level) -> list[int]:
        """Bytes in each row that ``n`` blocks of ``ledger`` take."""
        width, payload = self._nbytes(ledger), level.payload_nbytes
        if width > payload:
            return [min(payload, width - at) for _ in range(n) for at in range(0, width, payload)]
        each = payload // width
        return [min(each, n - at) * width for at in range(0, n, each)]

    # -- finding -----------------------------------------------------------------------------------------------------

    def find(self, chain: list[bytes], num_cached: int, resumable: int, *, hold: bool = False) -> Offer | None:
        """What lies below of the text of ``chain`` that lets it start further on than after ``resumable`` blocks, where the
        first ``num_cached`` are cached. ``hold``: read it now, as far as half the staging memory goes. None: nothing.

        Takes at most the timeouts of the levels. The offer is the caller's, to be released.
        """
        offer = Offer(chain, num_cached, num_cached if self._full is not None else len(chain) - 1, [])
        try:
            if self._full is not None:
                self._find_blocks(offer, num_cached, len(chain) - 1)
            if self._bounded:
                self._find_checkpoint(offer, resumable)
            if offer.end <= resumable or not self._is_worth_it(offer, resumable):
                offer.release()
                return None
            offer.records = [(level, number) for level, number in offer.records if number * level.unit < offer.end]
            if hold:
                self._read_ahead(offer)
        except BaseException:
            offer.release()
            raise
        return offer

    def prefetch(self, chain: list[bytes], num_cached: int, resumable: int) -> Prefetch:
        """``find`` with ``hold``, in a thread of its own."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "kvpagoda-prefetch")
        return Prefetch(self._reader.submit(self.find, chain, num_cached, resumable, hold=True))

    def _find_blocks(self, offer: Offer, begin: int, end: int) -> None:
        """Ask for more and more blocks at a time, up to the first that no level has."""
        at, step = begin, _FIRST_STEP
        while at < end:
            stop, step = min(end, at + step), 4 * step
            there = self._look_up(offer, at, stop, end)
            while at < stop:
                level = next((level for level, found in there if at // level.unit in found), None)
                if level is None:
                    offer.end = at
                    return
                offer.records.append((level, at // level.unit))
                at = (at // level.unit + 1) * level.unit
        offer.end = at

    def _look_up(self, offer: Offer, begin: int, stop: int, end: int) -> list[tuple[Level, set[int]]]:
        """Which records with blocks ``begin .. stop - 1``, and none behind ``end``, each level has."""
        asked = list[tuple[Level, range, Future[Lease]]]()
        for level in self.levels:
            numbers = range(begin // level.unit, min(ceil_div(stop, level.unit), end // level.unit))
            if len(numbers):
                asked.append((level, numbers, level.lookup(self._keys(offer, level, numbers), _HOLD)))
        there = []
        for level, numbers, future in asked:
            lease = future.result()
            offer.leases.append(lease)
            there.append((level, {n for n, status in zip(numbers, lease.statuses) if status is Status.OK}))
        return there

    def _find_checkpoint(self, offer: Offer, resumable: int) -> None:
        """Read the furthest checkpoint behind ``resumable`` that the blocks reach; ``offer.end`` is then there."""
        ends, offer.end = range(offer.end, resumable, -1), 0
        asked = [
            (level, level.lookup([level.key(offer.chain[end], _part(0)) for end in ends], _HOLD))
            for level in (self.levels if len(ends) else ())
        ]
        found: list[tuple[int, Level]] = []
        for level, future in asked:
            lease = future.result()
            offer.leases.append(lease)
            found += [(end, level) for end, status in zip(ends, lease.statuses) if status is Status.OK]
        found += [(end, self.levels[0]) for end in ends if not any(count for _, count in self._counts(end))]
        for end, level in sorted(found, key=lambda one: (-one[0], self.levels.index(one[1]))):
            num_rows = sum(
                table_rows(count, self._nbytes(ledger), level.payload_nbytes) for ledger, count in self._counts(end)
            )
            rows = level.acquire(num_rows)
            if rows is None:
                continue
            offer.checkpoint, offer.end = (level, rows), end
            statuses = level.load([level.key(offer.chain[end], _part(i)) for i in range(num_rows)], rows)
            if all(status is Status.OK for status in statuses):
                return
            offer.checkpoint, offer.end = None, 0
            level.buffer.release(rows)

    def _counts(self, end: int) -> list[tuple[GroupLedger, int]]:
        """How many blocks of each bounded group a checkpoint after ``end`` blocks of the text holds."""
        num_tokens = end * self._size
        return [
            (
                ledger,
                ceil_div(num_tokens, ledger.block_size) - ledger.growth.first_needed(num_tokens) // ledger.block_size,
            )
            for ledger in self._bounded
        ]

    @staticmethod
    def _most_copies(ledger: GroupLedger) -> int:
        """The most blocks of a bounded group in one checkpoint."""
        most = ledger.growth.most_blocks(ledger.block_size, 1)
        assert most is not None, "a bounded group"
        return most

    def _is_worth_it(self, offer: Offer, resumable: int) -> bool:
        """Whether loading is expected to be faster than computing, as far as both were measured."""
        if self.seconds_per_token is None:
            return True
        loading = sum(level.payload_nbytes * (level.seconds_per_byte or 0.0) for level, _ in offer.records)
        return loading <= (offer.end - resumable) * self._size * self.seconds_per_token

    def _read_ahead(self, offer: Offer) -> None:
        for level, numbers in self._batches(offer, offer.records):
            if len(numbers) > level.num_writable:
                return
            rows = level.acquire(len(numbers))
            if rows is None:
                return
            statuses = level.load(self._keys(offer, level, numbers), rows)
            for number, row, status in zip(numbers, rows, statuses):
                if status is Status.OK:
                    offer.held[level, number] = row
                else:
                    level.buffer.release([row])

    @staticmethod
    def _batches(offer: Offer, records: Many[tuple[Level, int]]) -> Iterator[tuple[Level, list[int]]]:
        """``records`` a few of one level at a time."""
        for level, run in groupby(records, key=lambda one: one[0]):
            numbers = [number for _, number in run]
            for at in range(0, len(numbers), level.batch):
                yield level, numbers[at : at + level.batch]

    @staticmethod
    def _keys(offer: Offer, level: Level, numbers: Many[int]) -> list[bytes]:
        return [level.key(offer.chain[(number + 1) * level.unit]) for number in numbers]

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, offer: Offer, ids: Ids, first: int) -> int:
        """Fill blocks ``first ..`` of the offer's text, which are ``ids`` of the full group; how many could be filled.

        A few records at a time, the next ones being read while these are copied; or, if the offer may come in layer after
        layer and half the staging memory holds all of it, all at once.
        """
        done, full = 0, self._full
        assert full is not None and offer.begin <= first, "an offer has nothing of what was cached when it was made"
        wanted = [(level, number) for level, number in offer.records if (number + 1) * level.unit > first]
        if offer.layerwise:
            self._read_ahead(offer)
            if wanted and all(record in offer.held for record in wanted):
                self._load_later(full, offer, wanted, ids, first)
                return len(ids)
        for level, numbers, rows in self._read(offer, wanted):
            try:
                for part in self._parts_of(level, numbers, rows, ids, first):
                    self._memory.blocks_in(full, *part)
            except Exception:  # these will be computed
                break
            done = min(len(ids), (numbers[-1] + 1) * level.unit - first)
        return done

    def _load_later(
        self, full: GroupLedger, offer: Offer, wanted: Many[tuple[Level, int]], ids: Ids, first: int
    ) -> None:
        parts, taken = list[Part](), list[tuple[Level, list[int]]]()
        for level, records in groupby(wanted, key=lambda one: one[0]):
            numbers = [number for _, number in records]
            rows = [offer.held.pop((level, number)) for number in numbers]
            taken.append((level, rows))
            parts += self._parts_of(level, numbers, rows, ids, first)

        def release() -> None:
            for level, rows in taken:
                level.buffer.release(rows)

        self._memory.blocks_in_later(full, parts, release)

    @staticmethod
    def _parts_of(level: Level, numbers: Many[int], rows: Many[int], ids: Ids, first: int) -> Iterator[Part]:
        """Of the records ``numbers``, which lie in ``rows``, what belongs to blocks ``ids``, from the ``first`` on."""
        width, columns = level.payload_nbytes // level.unit, np.array(numbers) * level.unit - first
        for place in range(level.unit):
            inside = (columns + place >= 0) & (columns + place < len(ids))
            if inside.any():
                payloads = level.buffer.payloads[:, place * width : (place + 1) * width]
                yield ids[(columns + place)[inside]], payloads, np.array(rows)[inside].tolist()

    def _read(self, offer: Offer, wanted: Many[tuple[Level, int]]) -> Iterator[tuple[Level, list[int], list[int]]]:
        """(level, records, staging rows) of what could be read of ``wanted``, in order, up to the first that could not."""
        batches = deque(self._batches(offer, wanted))
        begun: deque[tuple[Level, list[int], list[int], Loading | None]] = deque()
        is_whole = True
        try:
            while is_whole and (batches or begun):
                while batches and len(begun) < 2:
                    level, numbers = batches[0]
                    rows = [offer.held.pop((level, number), -1) for number in numbers]
                    lacking = [i for i, row in enumerate(rows) if row < 0]
                    taken = level.acquire(len(lacking), patient=not begun)
                    if taken is None:
                        offer.held.update({(level, number): row for number, row in zip(numbers, rows) if row >= 0})
                        break
                    for i, row in zip(lacking, taken):
                        rows[i] = row
                    keys = self._keys(offer, level, [numbers[i] for i in lacking])
                    begun.append((level, numbers, rows, level.start_load(keys, taken) if lacking else None))
                    batches.popleft()
                if not begun:
                    return
                level, numbers, rows, loading = begun.popleft()
                try:
                    bad = level.finish_load(loading) if loading is not None else set[int]()
                    good = next((i for i, row in enumerate(rows) if row in bad), len(rows))
                    is_whole = good == len(rows)
                    if good:
                        yield level, numbers[:good], rows[:good]
                finally:
                    level.buffer.release(rows)
        finally:
            for level, _, rows, _ in begun:
                level.buffer.release(rows)

    def restore(self, offer: Offer, number: int, ids: Ids) -> None:
        """Fill ``ids``, what the ``number``-th bounded group has in the offer's checkpoint."""
        assert offer.checkpoint is not None
        level, rows = offer.checkpoint
        at = 0
        for other, (ledger, count) in enumerate(self._counts(offer.end)):
            here = table_rows(count, self._nbytes(ledger), level.payload_nbytes)
            if other == number:
                self._memory.blocks_in(ledger, ids, level.buffer.payloads, rows[at : at + here])
            at += here

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
        if self._reader is not None:
            self._reader.shutdown()
        closed = [level.close(deadline) for level in self.levels]
        return all(closed)


def _part(number: int) -> bytes:
    """The kind of a checkpoint's records."""
    return b"checkpoint %d" % number
