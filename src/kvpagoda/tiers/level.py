"""One tier as a cache uses it: the layout and keys of its records, and the staging memory that they pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from threading import get_ident
from time import monotonic
from typing import NamedTuple

from kvpagoda.abc import Status
from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks
from kvpagoda.pages import Bytes
from kvpagoda.tiers.driver import FAULTS
from kvpagoda.tiers.health import Histogram
from kvpagoda.tiers.keys import layout_fingerprint, record_key
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.tiers.tier import Tier
from kvpagoda.units import ceil_div, format_bytes, parse_bytes

BLOCKS = b"blocks"
_STAGING = 64 << 20
_BATCH_NBYTES = 8 << 20
LAYOUT = 1
"""Version of the payload's layout: adjacent blocks, or a block of a checkpoint, which begins with a new record."""


@dataclass(frozen=True)
class RecordIdentity:
    """What the bytes in a tier belong to: weights, schema (with its formats), block size and parallel rank."""

    weights: str
    schema: str
    block_size: int
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.weights, str) or not 0 <= self.rank < self.num_ranks:
            raise BadInput(
                f"weights are text, and rank is one of 0..num_ranks - 1; got {self.weights!r}, rank {self.rank} of "
                f"{self.num_ranks}"
            )

    def fingerprint(self, unit: int, payload_nbytes: int) -> bytes:
        """Return the fingerprint, 32 bytes, of records of ``unit`` blocks in payloads of ``payload_nbytes``."""
        return layout_fingerprint(**asdict(self), formats=f"{unit} in {payload_nbytes}", layout=LAYOUT)


@dataclass(frozen=True)
class CallStats:
    """The calls of one kind to a tier.

    Args:
        call: which kind.
        outcomes: number of records by the value of their ``Status``.
        nbytes: bytes of the records that were OK.
        seconds: durations of the calls, from the request to the answer.
    """

    call: str
    outcomes: dict[str, int]
    nbytes: int
    seconds: Histogram


@dataclass(frozen=True)
class LevelStats:
    """What a tier holds, and the outcomes of its calls, in records.

    Args:
        name: of the tier.
        num_records: records that it has.
        nbytes: their bytes.
        capacity_nbytes: the most bytes.
        staging_nbytes: host memory for records on their way.
        stored: records that were stored.
        loaded: loads that verified.
        missed: lookups and loads of records that it did not have.
        failed: calls that were late, unavailable or corrupt, stores included.
        dropped: records not stored because staging memory was short or the tier rejected them.
        is_available: whether no call is refused.
        last_fault: the kind of the last call that failed, and why.
    """

    name: str
    num_records: int
    nbytes: int
    capacity_nbytes: int
    staging_nbytes: int
    stored: int
    loaded: int
    missed: int
    failed: int
    dropped: int
    is_available: bool
    last_fault: str = ""
    loaded_tokens: int = 0
    """Prompt tokens whose blocks were loaded from this tier."""
    calls: tuple[CallStats, ...] = ()
    """Stores, lookups (which move no bytes) and loads."""
    unavailable_shards: tuple[str, ...] = ()
    """The failing parts of the store, such as servers of a cluster as host:port. Keys of other parts are served."""


def call_now(call: Callable[[], None]) -> None:
    """Call ``call``: for records that lie in their rows already."""
    call()


class Loading(NamedTuple):
    """Records that are being read into staging memory."""

    begin: float
    rows: tuple[int, ...]
    future: Future[list[Status]]


class LevelPart(NamedTuple):
    """A record of a checkpoint's blocks of one group. ``back``: how many blocks before the checkpoint the text ends by
    which it is found. ``number``: of the records that are found so. ``num_blocks``: that begin in it. ``nbytes``: of its
    payload."""

    back: int
    number: int
    num_blocks: int
    nbytes: int


class Level:
    """A tier below a cache, with its staging memory.

    ``block_nbytes``: bytes of a block; 0 if the cache has no blocks. ``parts``: for every group of a checkpoint,
    (number of blocks, bytes of each). ``memory(nbytes)`` returns page-aligned host memory, in which a tier of this process
    keeps its records, too (``RecordBuffer.extend``).

    One thread stores; any thread loads. Raises BadInput if staging memory is too small, and whatever making the driver
    raises.
    """

    def __init__(
        self,
        spec: TierSpec,
        identity: RecordIdentity,
        block_nbytes: int,
        parts: Sequence[tuple[int, int]],
        memory: Callable[[int], Bytes],
    ) -> None:
        self.spec = spec
        least = parse_bytes(spec.record_nbytes)
        self.unit = ceil_div(least, block_nbytes) if block_nbytes else 0  #: blocks per record
        largest = max((nbytes for _, nbytes in parts), default=1)
        self.payload_nbytes = self.unit * block_nbytes if block_nbytes else max(least, largest)
        if self.unit > 1 and spec.write == "evict":
            raise BadInput(
                f"tier {spec.name!r} cannot store blocks as they are evicted where {self.unit} share a record; give it "
                f"write='commit', or record_nbytes of at most {block_nbytes}",
                field="write", needed="commit", available=self.unit,
            )  # fmt: skip
        record = RecordBuffer.nbytes_for(1, self.payload_nbytes)
        count = self._num_staged(record, sum(len(self.parts_of(n, nbytes)) for n, nbytes in parts))
        self.buffer = RecordBuffer(count, self.payload_nbytes, memory)
        self.batch = max(1, min(count // 4, _BATCH_NBYTES // record))  #: records per call
        self._kept_free = count // 2  # rows that stores leave free for loads
        self._kept_for_stores = max(1, count // 4)  # further rows not used for reading ahead, which holds rows for long
        fingerprint = identity.fingerprint(self.unit, self.payload_nbytes)
        driver = spec.make(self.buffer)
        self.tier = Tier(
            driver, self.buffer, fingerprint, in_flight=2 * count * record + (1 << 20), workers=spec.workers,
            checksum=spec.checksum,
        )  # fmt: skip
        self.tier.name = spec.name
        self.seconds_per_byte: float | None = None  #: of recent loads; None before the first
        self._measured_until = 0.0
        self._storing: dict[Future[None], Sequence[int]] = {}  # done when the rows, in use until then, are released
        self.dropped = self._dropped_later = self.loaded_blocks = 0  # later: by the thread that follows copies
        self._block_size = identity.block_size

    def _num_staged(self, record: int, checkpoint: int) -> int:
        """Return how many records of ``record`` bytes the staging memory has; a checkpoint takes ``checkpoint``
        records."""
        least = max(2, 2 * checkpoint) * record
        staging = max(_STAGING, least) if self.spec.staging is None else parse_bytes(self.spec.staging)
        if staging < least:
            raise BadInput(
                f"staging of {format_bytes(staging)} is too small for tier {self.spec.name!r}: two checkpoints, or two "
                f"records, take {format_bytes(least)}",
                field="staging", needed=least, available=staging,
            )  # fmt: skip
        return staging // record

    def set_identity(self, identity: RecordIdentity) -> None:
        """Store and load records of ``identity`` from now on."""
        self.tier.fingerprint = identity.fingerprint(self.unit, self.payload_nbytes)

    def is_apart(self, nbytes: int) -> bool:
        """Return whether each block of ``nbytes`` of a checkpoint has records of its own: no two fit into one."""
        return 2 * nbytes > self.payload_nbytes

    def parts_of(self, n: int, nbytes: int) -> list[LevelPart]:
        """Return the records of ``n`` blocks of ``nbytes``, the last ones before a checkpoint, in their order.

        One has records of its own, or several share one. Their own are found by the text up to their end, so that other
        checkpoints share them; those that share one are found by the text up to the checkpoint."""
        payload = self.payload_nbytes
        if self.is_apart(nbytes):
            pieces = [min(payload, nbytes - at) for at in range(0, nbytes, payload)]
            return [
                LevelPart(back, i, int(not i), one) for back in range(n - 1, -1, -1) for i, one in enumerate(pieces)
            ]
        each = payload // nbytes
        counts = [min(each, n - at) for at in range(0, n, each)]
        return [LevelPart(0, i, count, count * nbytes) for i, count in enumerate(counts)]

    def key(self, block_hash: bytes, kind: bytes = BLOCKS, fingerprint: bytes | None = None) -> bytes:
        """Return the key of the record of ``kind`` whose last block has ``block_hash``; ``fingerprint``: None is that of this
        moment."""
        return record_key(fingerprint or self.tier.fingerprint, block_hash, kind)

    # -- storing: one thread -------------------------------------------------------------------------------------------

    @property
    def num_writable(self) -> int:
        """The number of records that may be stored now; the other free rows are kept for loads."""
        return 0 if self.tier.is_closed else max(0, self.buffer.num_free - self._kept_free)

    @property
    def is_storing(self) -> bool:
        """Whether records are being stored, so that more staging memory will be free."""
        return bool(self._storing)

    @property
    def num_readable_ahead(self) -> int:
        """The number of records that may be read ahead of a request, or stored without need, now; the other free rows are for
        stores and loads."""
        return max(0, self.num_writable - self._kept_for_stores)

    def store(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        nbytes: Sequence[int] | None = None,
        told: Callable[[], None] | None = None,
        when: Callable[[Callable[[], None]], None] = call_now,
    ) -> None:
        """Store the records in ``rows``, which this level acquired, without waiting; they are released afterwards.
        ``told`` is then called, in another thread. ``when(begin)`` calls ``begin`` once the records are in ``rows``, now or in
        another thread. If this raises, the caller releases the rows."""
        released: Future[None] = Future()

        def done(_: Future[list[Status]]) -> None:
            try:
                self.buffer.release(rows)
                if told is not None:
                    told()
            finally:
                over()

        def over() -> None:
            if self._storing.pop(released, None) is not None:
                released.set_result(None)

        def begin() -> None:
            try:
                until = monotonic() + self.spec.timeout
                self.tier.store(keys, rows, until, nbytes, fingerprint).add_done_callback(done)
            except BaseException:
                if get_ident() != caller:
                    self._dropped_later += len(keys)
                    self.buffer.release(rows)
                    over()
                raise

        caller, fingerprint = get_ident(), self.tier.fingerprint
        self._storing[released] = rows
        try:
            when(begin)
        except BaseException:
            over()
            raise

    def release_when(self, rows: Sequence[int], when: Callable[[Callable[[], None]], None]) -> None:
        """Release ``rows``, which this level or a reader acquired, when what is copied from or to them is over:
        ``when(call)`` calls ``call`` then. Until then they count as being stored."""
        released: Future[None] = Future()  # owns them until then: what it releases twice is released once

        def over() -> None:
            self.buffer.release_all(released)
            if self._storing.pop(released, None) is not None:
                released.set_result(None)

        self._storing[released] = rows
        try:
            self.buffer.give_to(released, rows)
            when(over)
        except BaseException:
            over()
            raise

    def settle(self, deadline: float) -> bool:
        """Wait until ``deadline`` for the stores in progress; return whether they are done, their rows released. A forked
        child has none."""
        return self.tier.is_closed or not wait([*self._storing], max(0.0, deadline - monotonic())).not_done

    # -- loading: any thread -------------------------------------------------------------------------------------------

    def acquire(self, n: int, owner: object, deadline: float) -> list[int] | None:
        """Take ``n`` staging rows for ``owner``, waiting for stores until ``deadline``; None if too few are free."""
        while self.buffer.num_free < n:
            storing, now = [*self._storing], monotonic()
            if not storing or now >= deadline:
                return None
            wait(storing, deadline - now, FIRST_COMPLETED)
        try:
            return self.buffer.acquire(n, owner)
        except OutOfBlocks:  # another thread was faster
            return None

    def start_load(
        self, keys: Sequence[bytes], rows: Sequence[int], deadline: float, fingerprint: bytes | None = None
    ) -> Loading:
        """Begin to read the records of ``keys`` into ``rows``; pass the result to ``finish_load``. ``fingerprint``: as in
        ``key``."""
        return Loading(monotonic(), tuple(rows), self.tier.load(keys, rows, deadline, fingerprint))

    def finish_load(self, loading: Loading) -> set[int]:
        """Wait for ``loading``, at most until its deadline, and return the rows without a valid record. Measures
        speed."""
        statuses = loading.future.result()
        bad = {row for row, status in zip(loading.rows, statuses) if status is not Status.OK}
        good, now = len(loading.rows) - len(bad), monotonic()
        if good:
            began = max(loading.begin, self._measured_until)  # because loads overlap
            latest, before = max(0.0, now - began) / (good * self.payload_nbytes), self.seconds_per_byte
            self.seconds_per_byte = latest if before is None else 0.8 * before + 0.2 * latest
        self._measured_until = max(now, self._measured_until)
        return bad

    # -- check and stats -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every acquired staging row is being stored or has a live owner. Raises CheckFailed."""
        storing = {row for rows in [*self._storing.values()] for row in rows}
        suspects = {
            row: owner
            for row, owner in self.buffer.owners().items()
            if owner is not self.tier
            and (
                row not in storing
                if owner is self or isinstance(owner, Future)
                else getattr(owner, "is_released", True)
            )
        }
        owners = self.buffer.owners() if suspects else {}  # another thread may have given them back meanwhile
        lost = [row for row, owner in suspects.items() if owners.get(row) is owner]
        if lost:
            text = f"tier {self.spec.name!r}: staging records {lost[:16]} are without a live owner"
            raise CheckFailed(text, available=lost[:16])
        self.buffer.check()

    def stats(self) -> LevelStats:
        """Return the counts, without I/O."""
        held, tier = self.tier.driver.stats(), self.tier.stats()
        failed, moved, calls = 0, self.buffer.record_nbytes, list[CallStats]()
        for kind, counts, nbytes in (
            ("store", tier.stores, moved), ("lookup", tier.lookups, 0), ("load", tier.loads, moved)
        ):  # fmt: skip
            failed += sum(counts.get(status, 0) for status in (*FAULTS, Status.CORRUPT))
            outcomes = {status.value: n for status, n in counts.items()}
            calls.append(CallStats(kind, outcomes, counts.get(Status.OK, 0) * nbytes, tier.latencies[kind]))
        return LevelStats(
            self.spec.name, held.num_records, held.nbytes, held.capacity_nbytes, self.buffer.nbytes,
            tier.stores.get(Status.OK, 0), tier.loads.get(Status.OK, 0), tier.loads.get(Status.MISS, 0), failed,
            self.dropped + self._dropped_later + tier.stores.get(Status.REJECTED, 0), tier.is_available, tier.last_fault,
            self.loaded_blocks * self._block_size, tuple(calls), tier.unavailable_shards,
        )  # fmt: skip
