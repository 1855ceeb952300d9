"""The way up from the tiers: a text is looked up in all of them at once, read ahead, and loaded into blocks.

    open     block hashes ──► look up in all levels at once ──► TierHit: what could be loaded, and from where
             room made as for any request ──► load into its own blocks, a few records at a time ──► publish

What is loaded lies in private blocks of the request that wanted it until it is published, like what a model computed. A fault
of a tier is a miss: the request computes what did not come. An exception of the device side, where blocks are copied to,
is raised.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, product
from time import monotonic

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.observing import observable
from kvpagoda.cache.swap import Rate
from kvpagoda.cache.tier_hit import Prefetch, Record, TierHit
from kvpagoda.memory.no_memory import NoMemory, Part
from kvpagoda.tiers.driver import Status
from kvpagoda.tiers.level import Level, Loading
from kvpagoda.units import ceil_div, table_rows

_HOLD = 10.0  # seconds that what was found stays in its tier, to be loaded
_FIRST_STEP = 64  # blocks that are asked for first; four times as many each time that all are there
_LEAST_TOKENS = 4096  # computed, before loading is compared with computing
_AGING = 0.9  # of what loading is thought to cost, each time that it is left for that: so it is tried again


class TierReader:
    """Looks for texts in ``levels``, the fastest first, and loads what they have.

    ``full``: the group whose blocks the prefix tree shares, ``bounded``: those that checkpoints copy. An ``open`` spends at
    most the largest timeout of the levels here, whatever it asks.
    """

    def __init__(
        self, levels: Many[Level], full: BlockGroup | None, bounded: Many[BlockGroup], block_size: int, memory: NoMemory
    ) -> None:
        self._levels, self._full, self._bounded = tuple(levels), full, tuple(bounded)
        self._size, self._memory = block_size, memory
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()  # whose thread it is
        self._hit: TierHit | None = None  # the latest of a request
        self._computing, self._num_computed = Rate(), 0
        self.seconds_per_token: float | None = None
        """What a scheduler says that it takes to compute a token; None: what ``computed`` told. Loading is worth it if it is
        faster."""

    def computed(self, seconds: float, num_tokens: int) -> None:
        """A model took so long for so many tokens of prompts."""
        self._computing.add(seconds, num_tokens)
        self._num_computed += num_tokens

    def close(self) -> None:
        """Nothing more is read ahead; what is being read goes on until its tiers answer."""
        if self._reader is not None and self._process == os.getpid():
            self._reader.shutdown(wait=False, cancel_futures=True)

    # -- finding -------------------------------------------------------------------------------------------------------

    @observable
    def find(
        self, block_hashes: list[bytes], num_cached: int, resumable: int, prefetch: Prefetch | None = None
    ) -> TierHit | None:
        """What tiers have of a text that lets it start further on than after ``resumable`` blocks, where the first
        ``num_cached`` are cached. ``block_hashes``: the root of the text, then one for each of its whole blocks.

        What ``prefetch`` found of the same text is taken, be it nothing: it is not looked up again. The hit is the caller's,
        to be released; the next ``find`` releases it at the latest.
        """
        started = monotonic()
        if self._hit is not None:
            self._hit.release()  # an interrupted request may have left it
        if prefetch is not None and not prefetch.is_used:
            is_same = prefetch.block_hashes == block_hashes
            hit = prefetch.take(started + max(level.spec.timeout for level in self._levels) if is_same else 0.0)
            if is_same and (hit is None or hit.begin <= num_cached):
                if hit is not None:
                    hit.started = started
                self._hit = hit
                return hit
            if hit is not None:
                hit.release()
        self._hit = self._find(block_hashes, num_cached, resumable, started)
        return self._hit

    def prefetch(self, block_hashes: list[bytes], num_cached: int, resumable: int) -> Prefetch:
        """``find``, in a thread of its own, and read what is there as far as half the staging memory goes."""

        def read() -> TierHit | None:
            hit = self._find(block_hashes, num_cached, resumable, None)
            if hit is not None:
                self._read_ahead(hit, hit.records)
            return hit

        if self._reader is None or self._process != os.getpid():
            self._reader, self._process = ThreadPoolExecutor(1, "kvpagoda-prefetch"), os.getpid()
        return Prefetch(block_hashes, self._reader.submit(read))

    def _find(
        self, block_hashes: list[bytes], num_cached: int, resumable: int, started: float | None
    ) -> TierHit | None:
        last, is_useful = len(block_hashes) - 1, False
        end = num_cached if self._full is not None else last
        hit = TierHit(self._levels, block_hashes, num_cached, end, started)
        try:
            if self._full is not None:
                self._find_blocks(hit, last)
            if self._bounded:
                self._find_checkpoint(hit, resumable)
            is_useful = hit.end > resumable and self._is_worth_it(hit, resumable)
        finally:
            if not is_useful:
                hit.release()
        hit.records = [(level, number) for level, number in hit.records if number * level.unit < hit.end]
        return hit if is_useful else None

    def _find_blocks(self, hit: TierHit, end: int) -> None:
        """Ask for more and more blocks at a time, up to the first that no level has."""
        at, step = hit.begin, _FIRST_STEP
        while at < end:
            stop, step = min(end, at + step), 4 * step
            asked = {
                level: range(at // level.unit, min(ceil_div(stop, level.unit), end // level.unit))
                for level in self._levels
            }
            there = self._look_up(hit, asked, hit.key)
            while at < stop:
                level = next((one for one in self._levels if at // one.unit in there[one]), None)
                if level is None:
                    hit.end = at
                    return
                hit.records.append((level, at // level.unit))
                at = (at // level.unit + 1) * level.unit
        hit.end = at

    @staticmethod
    def _look_up(
        hit: TierHit, asked: Mapping[Level, Many[int]], key: Callable[[Level, int], bytes]
    ) -> dict[Level, set[int]]:
        """Which of the records that each level is asked for it has, by their numbers; all are asked at once."""
        futures = {
            level: level.tier.lookup([key(level, number) for number in numbers], hit.deadline(level), _HOLD)
            for level, numbers in asked.items()
            if numbers
        }
        found: dict[Level, set[int]] = {level: set() for level in asked}
        for level, future in futures.items():
            lease = future.result()
            hit.leases.append(lease)
            found[level] = {n for n, status in zip(asked[level], lease.statuses) if status is Status.OK}
        return found

    def _find_checkpoint(self, hit: TierHit, resumable: int) -> None:
        """Read the furthest checkpoint behind ``resumable`` that the blocks reach; ``hit.end`` is then there."""
        ends, hit.end = range(hit.end, resumable, -1), 0
        there = self._look_up(hit, dict.fromkeys(self._levels, ends), hit.checkpoint_key)
        for end, level in product(ends, self._levels):
            is_first = level is self._levels[0]  # where nothing is needed, it will do
            if end not in there[level] and (not is_first or any(rows for _, rows in self._checkpoint(level, end))):
                continue
            num_rows, deadline = sum(rows for _, rows in self._checkpoint(level, end)), hit.deadline(level)
            rows = level.acquire(num_rows, hit, deadline)
            if rows is None:
                continue
            hit.checkpoint, hit.end = (level, rows), end
            keys = [hit.checkpoint_key(level, end, part) for part in range(num_rows)]
            if not level.finish_load(level.start_load(keys, rows, deadline)):
                return
            hit.checkpoint, hit.end = None, 0
            level.buffer.release(rows)

    def _checkpoint(self, level: Level, end: int) -> list[tuple[int, int]]:
        """How many blocks of each bounded group a checkpoint after ``end`` blocks holds, and in how many staging rows."""
        at, found = end * self._size, []
        for group in self._bounded:
            count = ceil_div(at, group.block_size) - group.growth.first_needed(at) // group.block_size
            width = self._memory.record_nbytes(group.index)
            found.append((count, table_rows(count, width, level.payload_nbytes)))
        return found

    def _is_worth_it(self, hit: TierHit, resumable: int) -> bool:
        """Whether loading is expected to be faster than computing, as far as both were measured; and in time, where the blocks
        are worth nothing without their checkpoint."""
        levels = {level for level, _ in hit.records}
        loading = sum(level.payload_nbytes * (level.seconds_per_byte or 0.0) for level, _ in hit.records)
        computing = self.seconds_per_token
        if computing is None and self._num_computed >= _LEAST_TOKENS:
            computing = self._computing.seconds
        allowed = [] if computing is None else [(hit.end - resumable) * self._size * computing]
        if self._bounded and hit.started is not None:
            allowed += [hit.deadline(level) - monotonic() for level in levels]
        if loading <= min(allowed, default=loading):
            return True
        for level in levels:
            level.seconds_per_byte = _AGING * (level.seconds_per_byte or 0.0)
        return False

    # -- reading into staging memory -----------------------------------------------------------------------------------

    def _read_ahead(self, hit: TierHit, records: Many[Record]) -> None:
        """Read ``records``, and keep them in staging memory, as far as the part of it for that goes."""
        for _ in self._read(hit, records, is_ahead=True):
            pass

    def _read(self, hit: TierHit, records: Many[Record], *, is_ahead: bool = False) -> Iterator[list[Record]]:
        """Read those of ``records`` that are not held, several batches at once; yields them as they are held, in their order,
        up to the first that cannot be read."""
        batches, begun = deque(_batches(records)), deque[tuple[list[Record], list[Record], Loading]]()
        while batches or begun:
            while batches and len(begun) < batches[0][0][0].spec.workers:
                level, lacking = batches[0][0][0], [one for one in batches[0] if one not in hit.held]
                if is_ahead and len(lacking) > level.num_readable_ahead:
                    break
                rows = level.acquire(len(lacking), hit, 0.0 if begun else hit.deadline(level))
                if rows is None:
                    break
                keys = [hit.key(*record) for record in lacking]
                begun.append((batches.popleft(), lacking, level.start_load(keys, rows, hit.deadline(level))))
            if not begun:
                return
            batch, lacking, loading = begun.popleft()
            bad = batch[0][0].finish_load(loading)
            hit.held.update((record, row) for record, row in zip(lacking, loading.rows) if row not in bad)
            good = next((i for i, record in enumerate(batch) if record not in hit.held), len(batch))
            if good:
                yield batch[:good]
            if good < len(batch):
                return

    # -- loading into blocks -------------------------------------------------------------------------------------------

    @observable
    def load(self, hit: TierHit, ids: Ids, first: int) -> int:
        """Fill blocks ``first ..`` of the hit's text, which are ``ids`` of the full group; how many could be filled.

        A few records at a time, the next ones being read while these are copied; or, if the hit may come in layer after layer
        and half the staging memory holds all of it, all at once. Raises what copying to the device raises.
        """
        done, full = 0, self._full
        if not len(ids):  # all of it is cached, but for the checkpoint
            return 0
        assert full is not None and hit.begin <= first, "a hit has nothing of what was cached when it was made"
        wanted = [(level, number) for level, number in hit.records if (number + 1) * level.unit > first]
        if hit.layerwise:
            self._read_ahead(hit, wanted)
            if wanted and all(record in hit.held for record in wanted):
                self._load_later(full, hit, wanted, ids, first)
                _count(wanted, first, first + len(ids))
                return len(ids)
        for records in self._read(hit, wanted):
            for part in self._parts_of(hit, records, ids, first):
                self._memory.from_host(full.index, *part)
            level, number = records[-1]
            level.buffer.release([hit.held.pop(record) for record in records])
            _count(records, first, first + len(ids))
            done = min(len(ids), (number + 1) * level.unit - first)
        return done

    def _load_later(self, full: BlockGroup, hit: TierHit, wanted: Many[Record], ids: Ids, first: int) -> None:
        parts = [
            part for _, some in groupby(wanted, lambda one: one[0]) for part in self._parts_of(hit, [*some], ids, first)
        ]
        hit.is_arriving = True
        try:
            self._memory.from_host_later(full.index, parts, hit.arrived)
        except BaseException:
            hit.is_arriving = False
            raise

    @staticmethod
    def _parts_of(hit: TierHit, records: Many[Record], ids: Ids, first: int) -> Iterator[Part]:
        """Of ``records`` of one level, which are held, what belongs to blocks ``ids``, from the ``first`` on."""
        level, rows = records[0][0], np.array([hit.held[record] for record in records])
        width = level.payload_nbytes // level.unit
        columns = np.array([number for _, number in records]) * level.unit - first
        for place in range(level.unit):
            inside = (columns + place >= 0) & (columns + place < len(ids))
            if inside.any():
                payloads = level.buffer.payloads[:, place * width : (place + 1) * width]
                yield ids[(columns + place)[inside]], payloads, rows[inside].tolist()

    def load_checkpoint(self, hit: TierHit, targets: Many[Ids]) -> None:
        """Fill the first of ``targets``, blocks of each bounded group, with the hit's checkpoint. Raises what copying
        raises."""
        assert hit.checkpoint is not None
        level, rows = hit.checkpoint
        for group, ids, (count, num_rows) in zip(self._bounded, targets, self._checkpoint(level, hit.end)):
            if count:
                self._memory.from_host(group.index, ids[:count], level.buffer.payloads, rows[:num_rows])
            rows = rows[num_rows:]


def _count(records: Many[Record], first: int, end: int) -> None:
    """Of blocks ``first .. end - 1`` of a text those that lie in ``records`` came from their levels."""
    for level, number in records:
        level.loaded_blocks += min(end, (number + 1) * level.unit) - max(first, number * level.unit)


def _batches(records: Many[Record]) -> Iterator[list[Record]]:
    """``records`` a few of one level at a time."""
    for level, run in groupby(records, key=lambda one: one[0]):
        some = [*run]
        for at in range(0, len(some), level.batch):
            yield some[at : at + level.batch]
