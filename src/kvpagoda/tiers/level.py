"""One tier as a cache uses it: what a record holds, what it is called, and the staging memory it passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from time import monotonic
from typing import NamedTuple

from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks
from kvpagoda.memory.pages import Bytes
from kvpagoda.tiers.driver import FAULTS, Status
from kvpagoda.tiers.keys import layout_fingerprint, record_key
from kvpagoda.tiers.latency import Histogram
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.tiers.tier import Tier
from kvpagoda.units import ceil_div, format_bytes, parse_bytes, table_rows

BLOCKS = b"blocks"
_STAGING = 64 << 20
_BATCH_NBYTES = 8 << 20
LAYOUT = 1
"""The version of what a record's payload is: blocks side by side, or a checkpoint group by group in whole records."""


@dataclass(frozen=True)
class RecordIdentity:
    """What bytes in a tier mean: of which weights, schema (with its formats), block size and parallel rank."""

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
        """32 bytes for records of ``unit`` blocks in payloads of ``payload_nbytes``."""
        return layout_fingerprint(**asdict(self), formats=f"{unit} in {payload_nbytes}", layout=LAYOUT)


@dataclass(frozen=True)
class CallStats:
    """One kind of call to a tier: records by what became of them (``Status``), bytes of those that were OK, and how
    long the calls took, from the request to the answer."""

    call: str
    outcomes: dict[str, int]
    nbytes: int
    seconds: Histogram


@dataclass(frozen=True)
class LevelStats:
    """What a tier holds and what became of what was asked of it, in records; ``dropped``: not stored for want of
    staging memory. ``loaded`` counts what proved itself; ``failed`` what was late, unavailable or corrupt, stores
    included. ``last_fault``: which call failed last, and why."""

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
    """Of prompts: their blocks came from here."""
    calls: tuple[CallStats, ...] = ()
    """Stores, lookups, which move no bytes, and loads."""


class Loading(NamedTuple):
    """Records on their way to staging memory."""

    begin: float
    rows: tuple[int, ...]
    future: Future[list[Status]]


class Level:
    """A tier under a cache whose blocks have ``block_nbytes`` bytes (0: it has none) and whose checkpoints have
    ``parts``: (records, bytes of each) for every group in them. ``memory(nbytes)`` gives page-aligned host memory.

    One thread stores; any thread loads. Raises BadInput where staging memory is too small, and what the driver raises
    when it is made.
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
        self.unit = ceil_div(least, block_nbytes) if block_nbytes else 0  #: blocks in a record
        largest = max((nbytes for _, nbytes in parts), default=1)
        self.payload_nbytes = self.unit * block_nbytes if block_nbytes else max(least, largest)
        if self.unit > 1 and spec.write == "evict":
            raise BadInput(
                f"tier {spec.name!r} cannot store blocks as they are evicted where {self.unit} share a record; give it "
                f"write='commit', or record_nbytes of at most {block_nbytes}"
            )
        record = RecordBuffer.nbytes_for(1, self.payload_nbytes)
        count = self._num_staged(record, sum(table_rows(n, nbytes, self.payload_nbytes) for n, nbytes in parts))
        self.buffer = RecordBuffer(count, self.payload_nbytes, memory(count * record))
        self.batch = max(1, min(count // 4, _BATCH_NBYTES // record))  #: records in one call
        self._kept_free = count // 2  # for what is loaded
        self._kept_for_stores = max(1, count // 4)  # of the rest: what is read ahead may lie there for long
        fingerprint = identity.fingerprint(self.unit, self.payload_nbytes)
        driver = spec.make(self.buffer)
        self.tier = Tier(
            driver, self.buffer, fingerprint, in_flight=2 * count * record + (1 << 20), workers=spec.workers,
            checksum=spec.checksum,
        )  # fmt: skip
        self.tier.name = spec.name
        self.seconds_per_byte: float | None = None  #: of loads, lately
        self._measured_until = 0.0
        self._storing: dict[Future[list[Status]], Sequence[int]] = {}
        self.dropped = self.loaded_blocks = 0
        self._block_size = identity.block_size

    def _num_staged(self, record: int, checkpoint: int) -> int:
        """How many records of ``record`` bytes staging memory has, where a checkpoint takes ``checkpoint``."""
        least = max(2, 2 * checkpoint) * record
        staging = max(_STAGING, least) if self.spec.staging is None else parse_bytes(self.spec.staging)
        if staging < least:
            raise BadInput(
                f"staging of {format_bytes(staging)} is too small for tier {self.spec.name!r}: two checkpoints, or two "
                f"records, take {format_bytes(least)}"
            )
        return staging // record

    def set_identity(self, identity: RecordIdentity) -> None:
        """From now on records are those of ``identity``."""
        self.tier.fingerprint = identity.fingerprint(self.unit, self.payload_nbytes)

    def key(self, block_hash: bytes, kind: bytes = BLOCKS) -> bytes:
        """The key of a record that ends with the block of ``block_hash``."""
        return record_key(self.tier.fingerprint, block_hash, kind)

    # -- storing: one thread -------------------------------------------------------------------------------------------

    @property
    def num_writable(self) -> int:
        """Records that may be stored now; what is left is for loads."""
        return 0 if self.tier.is_closed else max(0, self.buffer.num_free - self._kept_free)

    @property
    def num_readable_ahead(self) -> int:
        """Records that may be read before anybody asks for them now; what is left is for stores and loads."""
        return max(0, self.num_writable - self._kept_for_stores)

    def store(self, keys: Sequence[bytes], rows: Sequence[int], nbytes: Sequence[int] | None = None) -> None:
        """Store records in ``rows``, which this level acquired; they are released when that is done. Nobody waits."""
        future = self.tier.store(keys, rows, monotonic() + self.spec.timeout, nbytes)
        self._storing[future] = rows

        def done(future: Future[list[Status]]) -> None:
            self.buffer.release(rows)
            self._storing.pop(future, None)

        future.add_done_callback(done)

    def settle(self, deadline: float) -> bool:
        """Wait for what is being stored; whether it is done. In a forked child nothing is."""
        return self.tier.is_closed or not wait([*self._storing], max(0.0, deadline - monotonic())).not_done

    # -- loading: any thread -------------------------------------------------------------------------------------------

    def acquire(self, n: int, owner: object, deadline: float) -> list[int] | None:
        """``n`` rows of staging memory for ``owner``, after waiting for stores until ``deadline``; None: too few are
        free."""
        while self.buffer.num_free < n:
            storing, now = [*self._storing], monotonic()
            if not storing or now >= deadline:
                return None
            wait(storing, deadline - now, FIRST_COMPLETED)
        try:
            return self.buffer.acquire(n, owner)
        except OutOfBlocks:  # another thread was faster
            return None

    def start_load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> Loading:
        """Begin to read the records of ``keys`` into ``rows``."""
        return Loading(monotonic(), tuple(rows), self.tier.load(keys, rows, deadline))

    def finish_load(self, loading: Loading) -> set[int]:
        """Wait for it, by its deadline at most; the rows that hold no record. Measures how fast that was."""
        statuses = loading.future.result()
        bad = {row for row, status in zip(loading.rows, statuses) if status is not Status.OK}
        good, now = len(loading.rows) - len(bad), monotonic()
        if good:
            began = max(loading.begin, self._measured_until)  # loads overlap
            lately, before = (now - began) / (good * self.payload_nbytes), self.seconds_per_byte
            self.seconds_per_byte = lately if before is None else 0.8 * before + 0.2 * lately
        self._measured_until = now
        return bad

    # -- proof, figures, the end ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every staging row that is out is being stored, or its owner is not released. Raises
        CheckFailed."""
        storing = {row for rows in [*self._storing.values()] for row in rows}
        lost = [
            row
            for row, owner in self.buffer.owners().items()
            if owner is not self.tier and (row not in storing if owner is self else getattr(owner, "is_released", True))
        ]
        if lost:
            raise CheckFailed(f"tier {self.spec.name!r}: staging records {lost[:16]} are out, and nobody has them")
        self.buffer.check()

    def stats(self) -> LevelStats:
        """Counts, without I/O."""
        held, told = self.tier.driver.stats(), self.tier.stats()
        failed, moved, calls = 0, self.buffer.record_nbytes, list[CallStats]()
        for kind, counts, nbytes in (
            ("store", told.stores, moved), ("lookup", told.lookups, 0), ("load", told.loads, moved)
        ):  # fmt: skip
            failed += sum(counts.get(status, 0) for status in (*FAULTS, Status.CORRUPT))
            outcomes = {status.value: n for status, n in counts.items()}
            calls.append(CallStats(kind, outcomes, counts.get(Status.OK, 0) * nbytes, told.latencies[kind]))
        return LevelStats(
            self.spec.name, held.num_records, held.nbytes, held.capacity_nbytes, self.buffer.records.nbytes,
            told.stores.get(Status.OK, 0), told.loads.get(Status.OK, 0), told.loads.get(Status.MISS, 0), failed,
            self.dropped + told.stores.get(Status.REJECTED, 0), told.is_available, told.last_fault,
            self.loaded_blocks * self._block_size, tuple(calls),
        )  # fmt: skip
