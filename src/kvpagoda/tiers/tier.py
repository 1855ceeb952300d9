"""What every tier needs above its driver, once: futures, deadlines that hold, bounds, proof of what was read.

caller ── store / lookup / load / discard ──► queue ──► worker threads ──► driver (synchronous, may fail or hang)
   ▲                                                        │
   └── future: done by the driver, or at the deadline by the watch, whichever is first
       records and bytes in flight: given back when the driver is really done
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from threading import TIMEOUT_MAX, Condition, Thread
from time import monotonic
from typing import Any, Generic, TypeVar

from kvpagoda.errors import BadInput
from kvpagoda.tiers.breaker import Breaker
from kvpagoda.tiers.driver import FAULTS, Driver, Lease, Status
from kvpagoda.tiers.keys import KEY_NBYTES
from kvpagoda.tiers.records import HEADER_NBYTES, RecordBuffer, pack_record, verify_record
from kvpagoda.units import ceil_div, parse_bytes

T = TypeVar("T", list[Status], Lease)
Rows = Sequence[int]
_PART_NBYTES = 2 << 20


@dataclass
class _Operation(Generic[T]):
    kind: str
    work: Callable[[], T]
    refuse: Callable[[Status], T]
    deadline: float
    rows: Rows
    nbytes: int
    future: Future[T] = field(default_factory=Future)
    is_over: bool = False


@dataclass(frozen=True)
class TierStats:
    """Keys by what the caller was told of them. ``last_error``: what the driver raised, which it must not."""

    stores: dict[Status, int]
    lookups: dict[Status, int]
    loads: dict[Status, int]
    discards: dict[Status, int]
    nbytes_in_flight: int
    is_available: bool
    last_error: str


class Tier:
    """A driver that always answers in time. Nothing it says but OK and a record that proves itself counts as found.

    Every call returns a future that is done by its ``deadline`` (of ``time.monotonic``), whatever the driver does: what is not
    known by then is TIMEOUT. ``rows`` are records that the caller acquired from ``buffer``. The driver may touch them until it
    is really done, which may be later. Release them and acquire others: that is safe at any time; to name them again before
    is REJECTED.

    More than ``in_flight`` bytes at once are REJECTED, not queued. What is UNAVAILABLE is tried once more. After ``faults``
    calls of one kind in a row that failed or were late, such calls are UNAVAILABLE at once, but for one ``pause`` seconds
    after the last, until one succeeds: a full disk is still read. Without ``checksum`` payloads are not summed: for memory of
    this process. Callbacks of futures run in the tier's threads and must be short.
    """

    def __init__(
        self, driver: Driver, buffer: RecordBuffer, fingerprint: bytes, *,
        in_flight: int | str = "256MiB", workers: int = 2, faults: int = 5, pause: float = 1.0, checksum: bool = True,
    ) -> None:  # fmt: skip
        if len(fingerprint) != KEY_NBYTES or workers < 1 or faults < 1 or pause <= 0:
            raise BadInput(
                f"a tier needs a fingerprint of {KEY_NBYTES} bytes, workers and faults of at least 1, and a pause; got "
                f"{len(fingerprint)} bytes, {workers} workers, {faults} faults, {pause} s"
            )
        self.driver, self.buffer = driver, buffer
        self.fingerprint = fingerprint  #: of the records that later calls name
        self._checksum = checksum
        self._part_nbytes: int = getattr(driver, "part_nbytes", _PART_NBYTES)
        self._most_in_flight, self._in_flight = parse_bytes(in_flight), 0
        self._breakers = {kind: Breaker(faults, pause) for kind in ("store", "lookup", "load", "discard")}
        self._counts: dict[str, Counter[Status]] = {kind: Counter() for kind in self._breakers}
        self._last_error = ""
        self._changed = Condition()
        self._queue: SimpleQueue[_Operation[Any] | None] = SimpleQueue()
        self._waiting: list[tuple[float, int, _Operation[Any]]] = []
        self._submitted = 0
        self._is_closed = self._is_done = False
        self._workers = workers
        for target in (self._watch, *[self._serve] * workers):
            Thread(target=target, name="kvpagoda-tier", daemon=True).start()

    def store(
        self, keys: Sequence[bytes], rows: Rows, deadline: float, nbytes: Sequence[int] | None = None
    ) -> Future[list[Status]]:
        """Make records of ``rows``, with payloads of ``nbytes`` (default: whole), and store them, parents before children.

        One status a key. Raises BadInput and NotOwned, before anything is done.
        """
        keys, rows = self._prove(keys, rows)
        sizes = [self.buffer.payload_nbytes] * len(keys) if nbytes is None else list(nbytes)
        if len(sizes) != len(keys) or not all(0 <= size <= self.buffer.payload_nbytes for size in sizes):
            raise BadInput(f"{len(keys)} payloads of 0..{self.buffer.payload_nbytes} bytes, got {sizes[:16]}")
        return self._start(
            "store", partial(self._store, self.fingerprint, keys, rows, sizes, deadline), list, deadline, keys, rows
        )

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float = 10.0) -> Future[Lease]:
        """Which of ``keys`` are there, and stay for ``hold`` seconds. Raises BadInput."""
        keys, _ = self._prove(keys)
        work = partial(self.driver.lookup, keys, deadline, hold)
        return self._start("lookup", work, lambda statuses: Lease(keys, tuple(statuses), 0.0), deadline, keys)

    def load(self, keys: Sequence[bytes], rows: Rows, deadline: float) -> Future[list[Status]]:
        """Read and prove the records of ``keys``; payloads are in ``buffer.payloads[rows]`` where the status is OK.

        CORRUPT records are discarded. Raises BadInput and NotOwned, before anything is done.
        """
        keys, rows = self._prove(keys, rows)
        return self._start(
            "load", partial(self._load, self.fingerprint, keys, rows, deadline), list, deadline, keys, rows
        )

    def discard(self, keys: Sequence[bytes], deadline: float) -> Future[list[Status]]:
        """Drop the records of ``keys``. Raises BadInput."""
        keys, _ = self._prove(keys)
        return self._start("discard", partial(self.driver.discard, keys, deadline), list, deadline, keys)

    def stats(self) -> TierStats:
        """Counts, without I/O."""
        with self._changed:
            is_open = any(breaker.is_open for breaker in self._breakers.values())
            stores, lookups, loads, discards = (dict(self._counts[kind]) for kind in self._breakers)
            is_available = not (self._is_closed or is_open)
            return TierStats(stores, lookups, loads, discards, self._in_flight, is_available, self._last_error)

    def close(self, deadline: float = 0.0) -> bool:
        """Take no more calls, and wait for those in flight until ``deadline``; whether all are done.

        The driver is closed when it is done with all of them, if need be later, by the thread that waits for it.
        """
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._workers):
                    self._queue.put(None)
                self._changed.notify_all()
            return self._changed.wait_for(lambda: self._is_done, max(0.0, deadline - monotonic()))

    # -- in the caller's thread ----------------------------------------------------------------------------------------

    @staticmethod
    def _prove(keys: Sequence[bytes], rows: Rows | None = None) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        if any(len(key) != KEY_NBYTES for key in keys) or len(set(keys)) < len(keys):
            raise BadInput(
                f"keys have {KEY_NBYTES} bytes, each named once; got lengths {[len(key) for key in keys][:16]}"
            )
        if rows is not None and len(rows) != len(keys):
            raise BadInput(f"one record for each key: {len(keys)} keys, {len(rows)} records")
        return tuple(keys), tuple(rows or ())

    def _start(
        self, kind: str, work: Callable[[], T], told: Callable[[list[Status]], T], deadline: float,
        keys: Sequence[bytes], rows: Rows = (),
    ) -> Future[T]:  # fmt: skip
        """Queue it, or refuse it at once."""
        nbytes = len(rows) * self.buffer.record_nbytes + len(keys) * HEADER_NBYTES
        operation = _Operation(kind, work, lambda status: told([status] * len(keys)), deadline, rows, nbytes)
        operation.future.set_running_or_notify_cancel()  # it cannot be cancelled: it will be done soon enough
        now = monotonic()
        with self._changed:
            refusal = None
            if self._is_closed:
                refusal = Status.UNAVAILABLE
            elif now >= operation.deadline:
                refusal = Status.TIMEOUT
            elif self._in_flight + operation.nbytes > self._most_in_flight:
                refusal = Status.REJECTED
            elif not self._breakers[operation.kind].allows(now):
                refusal = Status.UNAVAILABLE
            elif not self.buffer.hold(operation.rows):
                refusal = Status.REJECTED
            if refusal is None:
                self._in_flight += operation.nbytes
                self._submitted += 1
                heappush(self._waiting, (operation.deadline, self._submitted, operation))
                self._queue.put(operation)
                if self._waiting[0][2] is operation:
                    self._changed.notify_all()
                return operation.future
        self._answer(operation, operation.refuse(refusal))
        return operation.future

    # -- in the tier's threads -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Give up what is past its deadline."""
        while True:
            late = []
            with self._changed:
                while not self._waiting and not self._is_done:
                    self._changed.wait()
                if not self._waiting:
                    return
                now = monotonic()
                while self._waiting and (self._waiting[0][0] <= now or self._waiting[0][2].is_over):
                    operation = heappop(self._waiting)[2]
                    if not operation.is_over:
                        operation.is_over = True
                        self._breakers[operation.kind].record(True, now)
                        late.append(operation)
                if not late and self._waiting:
                    self._changed.wait(min(self._waiting[0][0] - now, TIMEOUT_MAX))
            for operation in late:
                self._answer(operation, operation.refuse(Status.TIMEOUT))

    def _answer(self, operation: _Operation[T], result: T) -> None:
        with self._changed:
            self._counts[operation.kind].update(_statuses(result))
        operation.future.set_result(result)

    def _serve(self) -> None:
        """Do what is queued, one after the other."""
        while (operation := self._queue.get()) is not None:
            self._do(operation)
        with self._changed:
            self._workers -= 1
            if self._workers:
                return
        self.driver.close()
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _do(self, operation: _Operation[Any]) -> None:
        result = None
        if not operation.is_over:
            try:
                result = operation.work()
            except Exception as error:  # a driver must not raise; if it does, that is a fault like any other
                self._last_error = repr(error)
                result = operation.refuse(Status.UNAVAILABLE)
        self.buffer.drop(operation.rows)
        with self._changed:
            self._in_flight -= operation.nbytes
            is_late, operation.is_over = operation.is_over, True
            if result is not None:
                breaker, is_fault = self._breakers[operation.kind], not FAULTS.isdisjoint(_statuses(result))
                if not is_late:
                    breaker.record(is_fault, monotonic())
                elif not is_fault:
                    breaker.retry_now()
        if result is None:
            return
        if not is_late:
            self._answer(operation, result)
        elif isinstance(result, Lease):
            result.release()

    def _store(
        self, fingerprint: bytes, keys: Sequence[bytes], rows: Rows, sizes: Sequence[int], deadline: float
    ) -> list[Status]:
        statuses, leases, parts = list[Status](), list[Lease](), self._parts(len(keys))
        for part in parts:
            for key, row, size in zip(keys[part], rows[part], sizes[part]):
                pack_record(self.buffer.rows[row], key, fingerprint, size, checksum=self._checksum)
            statuses += _twice(self.driver.store, keys[part], rows[part], deadline)
            # No part goes for a deeper one, and in the end the deepest counts as used first. Who holds nothing is asked once.
            if len(parts) > 1 and (not leases or leases[-1].until > monotonic()):
                leases.append(self.driver.lookup(keys[part], deadline, deadline - monotonic()))
        if leases:
            leases.append(self.driver.lookup(keys, deadline, 0.0))
        for lease in leases:
            lease.release()
        return statuses

    def _load(self, fingerprint: bytes, keys: Sequence[bytes], rows: Rows, deadline: float) -> list[Status]:
        statuses = []
        for part in self._parts(len(keys)):
            for key, row, status in zip(
                keys[part], rows[part], _twice(self.driver.load, keys[part], rows[part], deadline)
            ):
                if status is Status.OK:
                    record = self.buffer.rows[row]
                    if verify_record(record, key, fingerprint, checksum=self._checksum) is None:
                        status = Status.CORRUPT
                statuses.append(status)
        corrupt = [key for key, status in zip(keys, statuses) if status is Status.CORRUPT]
        if corrupt:
            self.driver.discard(corrupt, deadline)
        return statuses

    def _parts(self, n: int) -> list[slice]:
        """What of ``n`` records goes to the driver at a time: as much as it wants, or as the processor's cache still has when
        it is summed."""
        step = ceil_div(self._part_nbytes, self.buffer.record_nbytes)  # a record is a little larger than what it holds
        return [slice(start, start + step) for start in range(0, n, step)]


def _statuses(result: list[Status] | Lease) -> Sequence[Status]:
    return result.statuses if isinstance(result, Lease) else result


def _twice(
    call: Callable[[Sequence[bytes], Rows, float], list[Status]], keys: Sequence[bytes], rows: Rows, deadline: float
) -> list[Status]:
    """The statuses of ``call``; what was UNAVAILABLE is asked for once more."""
    statuses = call(keys, rows, deadline)
    again = [i for i, _ in enumerate(keys) if statuses[i] is Status.UNAVAILABLE]
    if again:
        second = call([keys[i] for i in again], [rows[i] for i in again], deadline)
        for i, status in zip(again, second):
            statuses[i] = status
    return statuses
