"""What lies below the device of a text: found in several levels at once, read ahead, and loaded into blocks.

    open     chain of prefix hashes ──► look up in all levels at once ──► Offer: what could be loaded, and from where
             room made as for any request ──► load into its own blocks, a few records at a time ──► publish

What is loaded lies in private blocks of the request that wanted it until it is published, like what a model computed. So
nobody owns anything in a new way, and whatever goes wrong below, the request computes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.memory.pages import Bytes
from kvpagoda.tiers.driver import Lease, Status
from kvpagoda.tiers.level import Level, Loading
from kvpagoda.units import ceil_div, table_rows

_HOLD = 10.0  # seconds that what was found may take to be asked for
_FIRST_STEP = 64  # blocks that are asked for first; four times as many each time that all are there
Part = tuple[Ids, Bytes, Many[int]]
"""Blocks, and the rows of host memory that they come from."""


class Memory(Protocol):
    """Who moves the bytes, to and from rows of uint8 ``[M, width]`` in host memory."""

    def blocks_out(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None: ...

    def blocks_in(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None: ...

    def blocks_in_later(self, ledger: BlockGroup, parts: Many[Part], done: Callable[[], None]) -> None: ...

    def host_memory(self, nbytes: int) -> Bytes: ...

    def record_nbytes(self, ledger: BlockGroup) -> int: ...


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


class Finder:
    """Looks for texts in ``levels``, the fastest first, and loads what they have. ``find`` may be called by any thread.

    ``full``: the ledger whose blocks a tree shares, ``bounded``: those that checkpoints copy.
    """

    def __init__(
        self, levels: Many[Level], full: BlockGroup | None, bounded: Many[BlockGroup], block_size: int, memory: Memory
    ) -> None:
        self._levels, self._full, self._bounded = tuple(levels), full, tuple(bounded)
        self._size, self._memory = block_size, memory
        self._reader: ThreadPoolExecutor | None = None
        self.seconds_per_token: float | None = None
        """What it takes to compute a token, if anybody measured it: loading is worth it if it is faster."""

    def close(self) -> None:
        """Wait for what is being read ahead; nothing more will be."""
        if self._reader is not None:
            self._reader.shutdown()

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
        for level in self._levels:
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
            (level, level.lookup([level.key(offer.chain[end], checkpoint_part(0)) for end in ends], _HOLD))
            for level in (self._levels if len(ends) else ())
        ]
        found: list[tuple[int, Level]] = []
        for level, future in asked:
            lease = future.result()
            offer.leases.append(lease)
            found += [(end, level) for end, status in zip(ends, lease.statuses) if status is Status.OK]
        found += [(end, self._levels[0]) for end in ends if not any(count for _, count in self._counts(end))]
        for end, level in sorted(found, key=lambda one: (-one[0], self._levels.index(one[1]))):
            num_rows = sum(
                table_rows(count, self._memory.record_nbytes(ledger), level.payload_nbytes)
                for ledger, count in self._counts(end)
            )
            rows = level.acquire(num_rows)
            if rows is None:
                continue
            offer.checkpoint, offer.end = (level, rows), end
            statuses = level.load([level.key(offer.chain[end], checkpoint_part(i)) for i in range(num_rows)], rows)
            if all(status is Status.OK for status in statuses):
                return
            offer.checkpoint, offer.end = None, 0
            level.buffer.release(rows)

    def _counts(self, end: int) -> list[tuple[BlockGroup, int]]:
        """How many blocks of each bounded group a checkpoint after ``end`` blocks of the text holds."""
        num_tokens = end * self._size
        return [
            (
                ledger,
                ceil_div(num_tokens, ledger.block_size) - ledger.growth.first_needed(num_tokens) // ledger.block_size,
            )
            for ledger in self._bounded
        ]

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
        self, full: BlockGroup, offer: Offer, wanted: Many[tuple[Level, int]], ids: Ids, first: int
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
            here = table_rows(count, self._memory.record_nbytes(ledger), level.payload_nbytes)
            if other == number:
                self._memory.blocks_in(ledger, ids, level.buffer.payloads, rows[at : at + here])
            at += here


def checkpoint_part(number: int) -> bytes:
    """The kind of a checkpoint's records."""
    return b"checkpoint %d" % number
