"""Loads texts from the tiers: looks them up in all tiers at once, reads ahead, and fills blocks.

    open     block hashes ──► look up in all levels at once ──► TierHit: what could be loaded, and from where
             room made as for any request ──► load into its own blocks, a few records at a time ──► publish

Until they are published, loaded blocks are private blocks of the request, like those that a model computed. A fault of
a tier is a miss: the request computes what did not arrive. An exception on the device side, where blocks are copied to,
is raised."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import groupby, product
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpagoda.abc import Lease, Status, observable
from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.cache.swap import Rate
from kvpagoda.core.memory.no_memory import NoMemory, Part
from kvpagoda.threads import submit
from kvpagoda.tiers.level import Level, Loading
from kvpagoda.units import ceil_div

# -- what tiers have of one text -------------------------------------------------------------------------------------

Record = tuple[Level, int]
"""A record of a text: the level that has it, and the number of the record in the text."""


@dataclass(eq=False)
class TierHit:
    """What ``levels`` have of a text, from block ``begin`` to block ``end``; records in ``held`` are read already.

    It owns the staging rows that are acquired for it, until ``release`` gives all of them back."""

    levels: tuple[Level, ...]
    block_hashes: list[bytes]
    begin: int
    end: int
    started: float | None = None
    """When the request for this hit began (``monotonic``); None while no request waits for it."""
    layerwise: bool = field(init=False, default=False)
    """Whether blocks may be copied to the device layer by layer, when a layer is asked for."""
    records: list[Record] = field(init=False, default_factory=list)
    """The records to load, in the order of the text."""
    leases: list[Lease] = field(init=False, default_factory=list)
    checkpoint: tuple[Level, list[int]] | None = field(init=False, default=None)
    """The level and the staging rows that hold the checkpoint at ``end``; None without one."""
    held: dict[Record, int] = field(init=False, default_factory=dict)
    """Record -> staging row, for records that are read."""
    is_arriving: bool = field(init=False, default=False)
    """Whether layers are still to be copied from its staging rows."""
    is_released: bool = field(init=False, default=False)
    """Whether it owns no staging rows any more."""
    fingerprints: dict[Level, bytes] = field(init=False)
    """Of each level when the hit was made: another thread may change the weights meanwhile."""
    _is_over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.fingerprints = {level: level.tier.fingerprint for level in self.levels}

    def __enter__(self) -> TierHit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def key(self, level: Level, number: int) -> bytes:
        """Return the key of the text's record ``number`` in ``level``."""
        return level.key(self.block_hashes[(number + 1) * level.unit], fingerprint=self.fingerprints[level])

    def bounded_key(self, level: Level, group: int, end: int, part: int = 0) -> bytes:
        """Return the key of record ``part`` of what bounded group ``group`` has at the end of ``end`` blocks."""
        return level.key(self.block_hashes[end], bounded_part(group, part), self.fingerprints[level])

    def deadline(self, level: Level) -> float:
        """Return when a call to ``level`` must end: its timeout after the request began, however many calls there were
        before (without a request: after now)."""
        return level.spec.timeout + (monotonic() if self.started is None else self.started)

    def release(self) -> None:
        """Give back the leases, and the staging rows as soon as nothing is copied from them. Releasing twice does no
        harm."""
        while self.leases:
            self.leases.pop().release()
        self._is_over = True
        self._give_back()

    def arrived(self) -> None:
        """Note that all layers are copied, and give back the staging rows if the hit is released."""
        self.is_arriving = False
        self._give_back()

    def _give_back(self) -> None:
        if self._is_over and not self.is_arriving:
            self.held, self.checkpoint = {}, None
            for level in self.levels:
                level.buffer.release_all(self)
            self.is_released = True


class Prefetch:
    """Records of one text that are being read into host memory. ``KVCache.prefetch`` makes it; ``open`` takes what it
    has."""

    def __init__(self, block_hashes: list[bytes], future: Future[TierHit | None]) -> None:
        self.block_hashes, self._process = block_hashes, os.getpid()
        self._future: Future[TierHit | None] | None = future

    @property
    def is_used(self) -> bool:
        """Whether ``open`` took it, or it was closed."""
        return self._future is None

    @property
    def is_done(self) -> bool:
        """Whether everything that can be read ahead is read, so that ``open`` does not wait for it."""
        return self._future is None or self._future.done() or self._process != os.getpid()

    def take(self, deadline: float) -> TierHit | None:
        """Return what was found, for the caller to release; wait for it until ``deadline``. What comes later is given
        back. In a forked child the result is None: the reading thread does not exist there."""
        future, self._future = self._future, None
        if future is None or self._process != os.getpid():
            return None
        try:
            return future.result(max(0.0, deadline - monotonic()))
        except (CancelledError, FutureTimeout):
            if not future.cancel():
                future.add_done_callback(_release)
            return None

    def close(self) -> None:
        """Give back what was read, or is being read."""
        hit = self.take(0.0)
        if hit is not None:
            hit.release()


def _release(future: Future[TierHit | None]) -> None:
    hit = None if future.exception() is not None else future.result()
    if hit is not None:
        hit.release()


def bounded_part(group: int, part: int) -> bytes:
    """Return the kind (see ``Level.key``) of record ``part`` of a block of bounded group ``group``: a window's block, found
    by the text up to its last token, or a copy of states, found by the text that they are of."""
    return b"bounded %d %d" % (group, part)


def num_needed(group: BlockGroup, length: Any) -> Any:
    """Return how many blocks of bounded ``group`` a text reads to go on after ``length`` tokens, whole blocks of it. The
    last ends there. Takes ints or arrays."""
    return -(-length // group.block_size) - group.growth.first_needed(length) // group.block_size


# -- finding and loading it ------------------------------------------------------------------------------------------

Number = TypeVar("Number", int, tuple[int, int])
_HOLD = 10.0  # seconds that a tier keeps the records that a lookup found, to be loaded
_FIRST_STEP = 64  # blocks in the first lookup; four times as many in the next if all are found
_LEAST_TOKENS = 4096  # tokens computed before loading is compared with computing
_AGING = 0.9  # of the estimated cost of loading, each time that it is too high: so loading is tried again


class TierReader:
    """Looks for texts in ``levels``, the fastest first, and loads what they have.

    ``full``: the group whose blocks the prefix tree shares. ``bounded``: the groups whose blocks checkpoints keep. One
    ``open`` spends at most the largest timeout of the levels here, however many calls it makes. ``grid``: hits end at
    multiples of this many blocks."""

    def __init__(
        self,
        levels: Many[Level],
        full: BlockGroup | None,
        bounded: Many[BlockGroup],
        block_size: int,
        memory: NoMemory,
        grid: int = 1,
    ) -> None:
        self._levels, self._full, self._bounded, self._grid = tuple(levels), full, tuple(bounded), grid
        self._size, self._memory = block_size, memory
        self._widths = [memory.record_nbytes(group.index) for group in self._bounded]
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()  # the process that has the thread of _reader
        self._hit: TierHit | None = None  # result of the latest find()
        self._computing, self._num_computed = Rate(), 0
        self.seconds_per_token: float | None = None
        """Seconds to compute a token, set by a scheduler; None: as measured by ``computed``. Blocks are loaded only if
        that is expected to be faster."""

    def computed(self, seconds: float, num_tokens: int) -> None:
        """Record that a model took ``seconds`` to compute ``num_tokens`` tokens of prompts."""
        self._computing.add(seconds, num_tokens)
        self._num_computed += num_tokens

    def close(self) -> None:
        """Stop reading ahead. Reads in progress continue until their tiers answer."""
        if self._reader is not None and self._process == os.getpid():
            self._reader.shutdown(wait=False, cancel_futures=True)

    # -- finding -------------------------------------------------------------------------------------------------------

    @observable
    def find(
        self, block_hashes: list[bytes], num_cached: int, resumable: int, prefetch: Prefetch | None = None
    ) -> TierHit | None:
        """Return what tiers have of a text, if that lets it start after more than ``resumable`` blocks; else None.

        ``block_hashes``: the root of the text, then one hash for each of its whole blocks. ``num_cached``: the number
        of its first blocks that are cached. ``prefetch``: if it was made for the same text, its result is used, also if
        it found nothing, without another lookup, unless cached blocks before it were evicted since. The caller owns the
        hit and releases it; at the latest the next ``find`` does."""
        started = monotonic()
        if self._hit is not None:
            self._hit.release()  # left by a request that was interrupted
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
        """Do what ``find`` does in another thread, and read the records, as far as half the staging memory goes."""

        def read() -> TierHit | None:
            hit = self._find(block_hashes, num_cached, resumable, None)
            if hit is not None:
                self._read_ahead(hit, hit.records)
            return hit

        if self._reader is None or self._process != os.getpid():
            self._reader, self._process = ThreadPoolExecutor(1, "kvpagoda-prefetch"), os.getpid()
        return Prefetch(block_hashes, submit(self._reader, read))

    def _find(
        self, block_hashes: list[bytes], num_cached: int, resumable: int, started: float | None
    ) -> TierHit | None:
        last, is_useful = (len(block_hashes) - 1) // self._grid * self._grid, False
        end = num_cached if self._full is not None else last
        hit = TierHit(self._levels, block_hashes, num_cached, end, started)
        try:
            if self._full is not None:
                self._find_blocks(hit, last)
                hit.end -= hit.end % self._grid
            if self._bounded:
                self._find_checkpoint(hit, resumable)
            is_useful = hit.end > resumable and self._is_worth_it(hit, resumable)
        finally:
            if not is_useful:
                hit.release()
        hit.records = [(level, number) for level, number in hit.records if number * level.unit < hit.end]
        return hit if is_useful else None

    def _find_blocks(self, hit: TierHit, end: int) -> None:
        """Look up more and more blocks at a time, up to the first block that no level has."""
        at, step = hit.begin, _FIRST_STEP
        while at < end:
            stop, step = min(end, at + step), 4 * step
            asked = {
                level: range(at // level.unit, min(ceil_div(stop, level.unit), end // level.unit))
                for level in self._levels
            }
            found = self._look_up(hit, asked, hit.key)
            while at < stop:
                level = next((level for level in self._levels if at // level.unit in found[level]), None)
                if level is None:
                    hit.end = at
                    return
                hit.records.append((level, at // level.unit))
                at = (at // level.unit + 1) * level.unit
        hit.end = at

    @staticmethod
    def _look_up(
        hit: TierHit, asked: Mapping[Level, Many[Number]], key: Callable[[Level, Number], bytes]
    ) -> dict[Level, set[Number]]:
        """Return for each level the numbers of those records in ``asked`` that it has. All levels are asked at once."""
        futures = {
            level: level.tier.lookup([key(level, number) for number in numbers], hit.deadline(level), _HOLD)
            for level, numbers in asked.items()
            if numbers
        }
        found: dict[Level, set[Number]] = {level: set() for level in asked}
        for level, future in futures.items():
            lease = future.result()
            hit.leases.append(lease)
            found[level] = {n for n, status in zip(asked[level], lease.statuses) if status is Status.OK}
        return found

    def _find_checkpoint(self, hit: TierHit, resumable: int) -> None:
        """Read what the text needs of each bounded group to go on at the furthest position after ``resumable`` blocks that
        the found blocks reach, and set ``hit.end``, a multiple of the grid, to that position."""
        ends, hit.end = np.arange(hit.end, resumable, -self._grid), 0
        if not len(ends):
            return
        needed = [num_needed(group, ends * self._size) for group in self._bounded]
        spans = {
            level: [n if level.is_apart(width) else np.minimum(n, 1) for n, width in zip(needed, self._widths)]
            for level in self._levels
        }
        asked = {
            level: [(number, end) for number, counts in enumerate(each) for end in _last(ends, counts)]
            for level, each in spans.items()
        }
        found = self._look_up(hit, asked, lambda level, one: hit.bounded_key(level, *one))
        allowed = {level: _resumable(ends, spans[level], there) for level, there in found.items()}
        for at, level in product(range(len(ends)), self._levels):
            if not allowed[level][at]:
                continue
            end, deadline = int(ends[at]), hit.deadline(level)
            keys = [
                hit.bounded_key(level, number, end - one.back, one.number)
                for number, counts in enumerate(needed)
                for one in level.parts_of(int(counts[at]), self._widths[number])
            ]
            rows = level.acquire(len(keys), hit, deadline)
            if rows is None:
                continue
            hit.checkpoint, hit.end = (level, rows), end
            if not level.finish_load(level.start_load(keys, rows, deadline, hit.fingerprints[level])):
                return
            hit.checkpoint, hit.end = None, 0
            level.buffer.release(rows)

    def _is_worth_it(self, hit: TierHit, resumable: int) -> bool:
        """Return whether loading is expected to be faster than computing, as far as both were measured. Where the
        blocks are useless without their checkpoint, it must also end before the deadline."""
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
        """Read ``records`` and keep them in staging memory, as far as its share for reading ahead goes."""
        for _ in self._read(hit, records, is_ahead=True):
            pass

    def _read(self, hit: TierHit, records: Many[Record], *, is_ahead: bool = False) -> Iterator[list[Record]]:
        """Read those of ``records`` that are not held, several batches at once. Yield them in their order as soon as
        they are held, up to the first record that cannot be read."""
        batches, begun = deque(_batches(records)), deque[tuple[list[Record], list[Record], Loading]]()
        while batches or begun:
            while batches and len(begun) < batches[0][0][0].spec.workers:
                level, lacking = batches[0][0][0], [record for record in batches[0] if record not in hit.held]
                if is_ahead and len(lacking) > level.num_readable_ahead:
                    break
                rows = level.acquire(len(lacking), hit, 0.0 if begun else hit.deadline(level))
                if rows is None:
                    break
                keys = [hit.key(*record) for record in lacking]
                loading = level.start_load(keys, rows, hit.deadline(level), hit.fingerprints[level])
                begun.append((batches.popleft(), lacking, loading))
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
        """Fill ``ids``, int32 blocks of the full group, with blocks ``first ..`` of the text. Return the number filled.

        A few records are copied at a time, while the next ones are read. If the hit is ``layerwise`` and half the
        staging memory holds all of it, the records are read first, and copied layer by layer later. Raises what copying
        to the device raises."""
        done, full = 0, self._full
        if not len(ids):  # all blocks are cached; only the checkpoint is loaded
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
            level.release_when([hit.held.pop(record) for record in records], self._memory.when_copied)
            _count(records, first, first + len(ids))
            done = min(len(ids), (number + 1) * level.unit - first)
        return done

    def _load_later(self, full: BlockGroup, hit: TierHit, wanted: Many[Record], ids: Ids, first: int) -> None:
        parts = [
            part for _, run in groupby(wanted, lambda one: one[0]) for part in self._parts_of(hit, [*run], ids, first)
        ]
        hit.is_arriving = True
        try:
            self._memory.from_host_later(full.index, parts, hit.arrived)
        except BaseException:
            hit.is_arriving = False
            raise

    @staticmethod
    def _parts_of(hit: TierHit, records: Many[Record], ids: Ids, first: int) -> Iterator[Part]:
        """Yield the parts of ``records``, all held and of one level, that belong to blocks ``first ..`` of the text,
        for ``ids``."""
        level = records[0][0]
        rows = np.array(level.buffer.places_of([hit.held[record] for record in records]))
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
        level, held = hit.checkpoint
        rows = level.buffer.places_of(held)
        for group, width, ids in zip(self._bounded, self._widths, targets):
            count = num_needed(group, hit.end * self._size)
            num_rows = len(level.parts_of(count, width))
            if count:
                self._memory.from_host(group.index, ids[:count], level.buffer.payloads, rows[:num_rows])
            rows = rows[num_rows:]
        hit.checkpoint = None
        level.release_when(held, self._memory.when_copied)


def _last(ends: Ids, counts: Ids) -> list[int]:
    """Return the numbers that are among the last ``counts[i]`` up to ``ends[i]`` for any i, ascending. ``ends`` descend."""
    marks = np.zeros(int(ends[0]) + 2, np.intp)
    np.add.at(marks, ends + 1 - counts, 1)
    np.add.at(marks, ends + 1, -1)
    numbers: list[int] = np.flatnonzero(np.cumsum(marks)).tolist()
    return numbers


def _resumable(ends: Ids, needed: Many[Ids], there: set[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return after which of ``ends`` a text can go on with the blocks ``there``, (group, end of the block), if it needs the
    last ``needed[group][i]`` of each group there: bool ``[len(ends)]``."""
    allowed = np.ones(len(ends), np.bool_)
    for number, counts in enumerate(needed):
        missing = np.arange(int(ends[0]) + 1)
        missing[[end for group, end in there if group == number]] = 0
        allowed &= ends - np.maximum.accumulate(missing)[ends] >= counts
    return allowed


def _count(records: Many[Record], first: int, end: int) -> None:
    """Count blocks ``first .. end - 1`` of a text that lie in ``records`` as loaded from their levels."""
    for level, number in records:
        level.loaded_blocks += min(end, (number + 1) * level.unit) - max(first, number * level.unit)


def _batches(records: Many[Record]) -> Iterator[list[Record]]:
    """Yield ``records`` in batches: consecutive records of one level, at most ``level.batch`` of them."""
    for level, run in groupby(records, key=lambda one: one[0]):
        same = [*run]
        for at in range(0, len(same), level.batch):
            yield same[at : at + level.batch]
