"""One tier as a cache uses it: what a record holds, what it is called, and the memory it passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any, NamedTuple

from kvpagoda.errors import BadInput, OutOfBlocks
from kvpagoda.memory.pages import Bytes
from kvpagoda.tiers.driver import FAULTS, DriverStats, Lease, Status
from kvpagoda.tiers.keys import layout_fingerprint, record_key
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
class Identity:
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
        return layout_fingerprint(
            weights=self.weights, schema=self.schema, formats=f"{unit} in {payload_nbytes}", layout=LAYOUT,
            block_size=self.block_size, rank=self.rank, num_ranks=self.num_ranks,
        )  # fmt: skip


@dataclass(frozen=True)
class LevelStats:
    """What a tier holds and what became of what was asked of it, in records; ``dropped``: not stored for want of staging
    memory. ``loaded`` counts what proved itself; ``failed`` what was late, unavailable or corrupt, stores included."""

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

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


class Loading(NamedTuple):
    """Records on their way to staging memory."""

    begin: float
    rows: tuple[int, ...]
    future: Future[list[Status]]


class Level:
    """A tier under a cache whose blocks have ``block_nbytes`` bytes (0: it has none) and whose checkpoints have ``parts``:
    (records, bytes of each) for every group in them. ``memory(nbytes)`` gives page-aligned host memory.

    Raises BadInput where staging memory is too small, and what the driver raises when it is made.
    """

    def __init__(
        self,
        spec: TierSpec,
        identity: Identity,
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
        checkpoint = sum(table_rows(n, nbytes, self.payload_nbytes) for n, nbytes in parts)
        record = RecordBuffer.nbytes_for(1, self.payload_nbytes)
        least_staging = max(2, 2 * checkpoint) * record
        staging = max(_STAGING, least_staging) if spec.staging is None else parse_bytes(spec.staging)
        if staging < least_staging:
            raise BadInput(
                f"staging of {format_bytes(staging)} is too small for tier {spec.name!r}: two checkpoints, or two records, "
                f"take {format_bytes(least_staging)}"
            )
        count = staging // record
        self.buffer = RecordBuffer(count, self.payload_nbytes, memory(count * record))
        self.batch = max(1, min(count // 4, _BATCH_NBYTES // record))  #: records in one call
        self._kept_free = count // 2  # for what is loaded
        fingerprint = identity.fingerprint(self.unit, self.payload_nbytes)
        driver = spec.make(self.buffer)
        try:
            self.tier = Tier(
                driver, self.buffer, fingerprint, in_flight=2 * count * record + (1 << 20), workers=spec.workers,
                checksum=spec.checksum,
            )  # fmt: skip
        except BaseException:
            driver.close()
            raise
        self.seconds_per_byte: float | None = None  #: of loads, lately
        self._storing: set[Future[list[Status]]] = set()
        self.dropped = 0

    def rename(self, identity: Identity) -> None:
        """From now on records are those of ``identity``."""
        self.tier.fingerprint = identity.fingerprint(self.unit, self.payload_nbytes)

    def key(self, prefix_hash: bytes, kind: bytes = BLOCKS) -> bytes:
        """The key of a record that ends with the block of ``prefix_hash``."""
        return record_key(self.tier.fingerprint, prefix_hash, kind)

    @property
    def num_writable(self) -> int:
        """Records that may be stored now; what is left is for loads."""
        return max(0, self.buffer.num_free - self._kept_free)

    def deadline(self) -> float:
        """When a call that begins now has to be done."""
        return monotonic() + self.spec.timeout

    def lookup(self, keys: Sequence[bytes], hold: float) -> Future[Lease]:
        """See ``Tier.lookup``."""
        return self.tier.lookup(keys, self.deadline(), hold)

    def store(self, keys: Sequence[bytes], rows: Sequence[int], nbytes: Sequence[int] | None = None) -> None:
        """Store records that were acquired; they are released when that is done. Nobody waits."""
        future = self.tier.store(keys, rows, self.deadline(), nbytes)
        self._storing.add(future)

        def done(future: Future[list[Status]]) -> None:
            self.buffer.release(rows)
            self._storing.discard(future)

        future.add_done_callback(done)

    def acquire(self, n: int, *, patient: bool = True) -> list[int] | None:
        """``n`` rows of staging memory, if ``patient`` after waiting for stores; None if they do not become free in time."""
        deadline = self.deadline() if patient else 0.0
        while self.buffer.num_free < n:
            if not self._storing or monotonic() >= deadline:
                return None
            wait([*self._storing], deadline - monotonic(), FIRST_COMPLETED)
        try:
            return self.buffer.acquire(n)
        except OutOfBlocks:  # another thread was faster
            return None

    def start_load(self, keys: Sequence[bytes], rows: Sequence[int]) -> Loading:
        """Begin to read the records of ``keys`` into ``rows``."""
        return Loading(monotonic(), tuple(rows), self.tier.load(keys, rows, self.deadline()))

    def finish_load(self, loading: Loading) -> set[int]:
        """Wait for it, by the deadline at most; the rows that hold no record. Learns how fast that was."""
        statuses = loading.future.result()
        bad = {row for row, status in zip(loading.rows, statuses) if status is not Status.OK}
        good = len(loading.rows) - len(bad)
        if good:
            now, before = (monotonic() - loading.begin) / (good * self.payload_nbytes), self.seconds_per_byte
            self.seconds_per_byte = now if before is None else 0.8 * before + 0.2 * now
        return bad

    def load(self, keys: Sequence[bytes], rows: Sequence[int]) -> list[Status]:
        """Read the records of ``keys``, by the deadline."""
        loading = self.start_load(keys, rows)
        self.finish_load(loading)
        return loading.future.result()

    def settle_one(self, deadline: float) -> None:
        """Wait for something that is being stored, or for a moment."""
        if self._storing:
            wait([*self._storing], max(0.0, deadline - monotonic()), FIRST_COMPLETED)
        else:
            sleep(0.001)

    def settle(self, deadline: float) -> bool:
        """Wait for what is being stored; whether it is done."""
        return not wait([*self._storing], max(0.0, deadline - monotonic())).not_done

    def stats(self) -> LevelStats:
        """Counts, without I/O."""
        held: DriverStats = self.tier.driver.stats()
        told = self.tier.stats()
        bad = [*FAULTS, Status.CORRUPT]
        return LevelStats(
            self.spec.name, held.num_records, held.nbytes, held.capacity_nbytes, self.buffer.records.nbytes,
            told.stores.get(Status.OK, 0), told.loads.get(Status.OK, 0), told.loads.get(Status.MISS, 0),
            sum(counts.get(status, 0) for counts in (told.stores, told.lookups, told.loads) for status in bad),
            self.dropped + told.stores.get(Status.REJECTED, 0), told.is_available,
        )  # fmt: skip

    def close(self, deadline: float) -> bool:
        """See ``Tier.close``."""
        return self.tier.close(deadline)
