"""What every tier adds to its driver: futures, deadlines that hold, limits, and verification of what was read.

caller ── store / lookup / load / discard ──► queue ──► worker threads ──► driver (synchronous, may fail or hang)
   ▲                                                        │
   └── future: done by the driver, or at the deadline by the watcher thread, whichever is first
       records and bytes in flight: released when the driver has really finished
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic
from typing import Any

from kvpagoda.abc import Driver, Lease, Status
from kvpagoda.errors import BadInput, OutOfBlocks
from kvpagoda.tiers.driver import watch_forks
from kvpagoda.tiers.health import Breaker, Health, TierStats
from kvpagoda.tiers.keys import KEY_NBYTES
from kvpagoda.tiers.records import HEADER_NBYTES, RecordBuffer, pack_record, verify_record
from kvpagoda.units import ceil_div, parse_bytes

Rows = Sequence[int]
_LONGEST_WAIT = 3600.0


@dataclass(eq=False)
class _Operation:
    """One call of a tier, from the request until the driver has finished with it.

    ``keys`` are those that the driver is asked for. The other ones of ``all_keys`` are UNAVAILABLE.
    """

    kind: str
    all_keys: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    deadline: float
    nbytes: int
    work: Callable[[], list[Status] | Lease]
    probed: Breaker | None = None
    """The breaker for which this is a probe; None for a call of a user."""
    begun: float = field(init=False, default_factory=monotonic)
    future: Future[Any] = field(init=False, default_factory=Future)
    is_over: bool = field(init=False, default=False)
    """Whether its result is known; the driver may still be working on it."""

    def refused(self, status: Status) -> list[Status] | Lease:
        """Return the result that has ``status`` for every key."""
        statuses = [status] * len(self.keys)
        return Lease(self.keys, tuple(statuses), 0.0) if self.kind == "lookup" else statuses

    def completed(self, result: list[Status] | Lease) -> list[Status] | Lease:
        """Return ``result``, which is of ``keys``, as a result of all keys."""
        if len(self.keys) == len(self.all_keys):
            return result
        known = dict(zip(self.keys, _statuses(result)))
        statuses = [known.get(key, Status.UNAVAILABLE) for key in self.all_keys]
        if isinstance(result, Lease):
            return replace(result, keys=self.all_keys, statuses=tuple(statuses))
        return statuses


class Tier:
    """A driver with deadlines that hold. A record counts as found only if its status is OK and its header verifies it.

    Every call returns a future that is done by its ``deadline`` (of ``time.monotonic``), whatever the driver does; a
    result not known by then is TIMEOUT. ``rows`` are records that the caller acquired from ``buffer``. The driver may
    use them after the deadline, until it has really finished. The caller may release them at any time and acquire
    others; naming rows that the driver still uses is REJECTED.

    A store or load that is UNAVAILABLE is tried once more. After ``faults`` failed or late calls of one kind in a row,
    calls of that kind are UNAVAILABLE at once; other kinds go on, so a full disk can still be read. If the driver names
    shards (``Driver.shard_of``), this holds for each shard by itself: only keys of a failing shard are UNAVAILABLE. The
    tier probes lookups and loads, in threads of their own, every ``pause`` seconds; one store or discard of the caller
    passes ``pause`` seconds later and at intervals that double, or as soon as a probe succeeded. One success ends this.

    Callbacks of futures run in the tier's threads and must be short. In a forked child the tier is closed.

    Args:
        driver: that stores the records.
        buffer: the records, over which the driver was made.
        fingerprint: 32 bytes (``layout_fingerprint``), in the header of each record.
        in_flight: calls that exceed so many bytes in all are REJECTED, not queued.
        workers: threads that call the driver.
        faults: failed or late calls of one kind in a row after which it is UNAVAILABLE at once.
        pause: seconds between probes then.
        checksum: whether payloads get one; only records in memory of this process may do without.

    Raises:
        BadInput: a fingerprint of another length, ``workers`` or ``faults`` below 1, or a ``pause`` that is not above
            0.
    """

    def __init__(
        self, driver: Driver, buffer: RecordBuffer, fingerprint: bytes, *,
        in_flight: int | str = "256MiB", workers: int = 2, faults: int = 5, pause: float = 0.5, checksum: bool = True,
    ) -> None:  # fmt: skip
        if len(fingerprint) != KEY_NBYTES or workers < 1 or faults < 1 or not 0 < pause < inf:
            raise BadInput(
                f"a tier needs a fingerprint of {KEY_NBYTES} bytes, workers and faults of at least 1, and a pause; got "
                f"{len(fingerprint)} bytes, {workers} workers, {faults} faults, {pause} s"
            )
        self.driver, self.buffer = driver, buffer
        self.fingerprint = fingerprint  #: fingerprint of the records in calls from now on
        self._checksum = checksum
        nbytes = getattr(driver, "part_nbytes", None)  # None: no limit per call
        self._part = buffer.num_records if nbytes is None else ceil_div(nbytes, buffer.record_nbytes)
        self._most_in_flight = parse_bytes(in_flight)
        self._health = Health(driver, faults, pause)
        self.name = type(driver).__name__  #: in logs
        self._changed = Condition()
        self._queue: SimpleQueue[_Operation | None] = SimpleQueue()
        self._active: dict[_Operation, None] = {}  # the driver works on them, late ones included
        self._wakes_at = inf  # when the watcher wakes up next
        self.is_closed = self._is_done = False  #: whether calls are refused
        self._workers = workers
        for target in (self._watch, *[self._serve] * workers):
            Thread(target=target, name="kvpagoda-tier", daemon=True).start()
        watch_forks(self)

    def store(
        self, keys: Sequence[bytes], rows: Rows, deadline: float, nbytes: Sequence[int] | None = None,
        fingerprint: bytes | None = None,
    ) -> Future[list[Status]]:  # fmt: skip
        """Write the headers of records, and store them.

        Args:
            keys: 32 bytes each, none twice; parents come before children.
            rows: a record for each key.
            deadline: of ``time.monotonic``.
            nbytes: of the payload of each; None: all.
            fingerprint: that with which the keys were made; None: the tier's.

        Returns:
            A status for each key.

        Raises:
            BadInput: keys, rows and sizes of different numbers, a key of another length or named twice, a payload
                larger than a record, or a ``deadline`` that is not finite.
            NotOwned: rows that are not acquired, before anything is done.
        """
        sizes = [self.buffer.payload_nbytes] * len(keys) if nbytes is None else list(nbytes)
        if len(sizes) != len(keys) or not all(0 <= size <= self.buffer.payload_nbytes for size in sizes):
            raise BadInput(f"{len(keys)} payloads of 0..{self.buffer.payload_nbytes} bytes, got {sizes[:16]}")
        work = partial(self._store, fingerprint or self.fingerprint, dict(zip(keys, sizes)))
        return self._start("store", keys, rows, deadline, work)

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float = 10.0) -> Future[Lease]:
        """Find which keys have records, and hold these.

        Args:
            keys: 32 bytes each, none twice.
            deadline: of ``time.monotonic``.
            hold: seconds.

        Raises:
            BadInput: a key of another length or named twice, or a ``deadline`` that is not finite.
        """
        return self._start("lookup", keys, None, deadline, lambda keys, _, until: self.driver.lookup(keys, until, hold))

    def load(
        self, keys: Sequence[bytes], rows: Rows, deadline: float, fingerprint: bytes | None = None
    ) -> Future[list[Status]]:
        """Read and verify records; where the status is OK, ``buffer.payloads[rows]`` has the payload.

        CORRUPT records are discarded.

        Args:
            keys: 32 bytes each, none twice.
            rows: a record for each key.
            deadline: of ``time.monotonic``.
            fingerprint: that with which the keys were made; None: the tier's.

        Returns:
            A status for each key.

        Raises:
            BadInput: keys and rows of different numbers, a key of another length or named twice, or a ``deadline`` that
                is not finite.
            NotOwned: rows that are not acquired, before anything is done.
        """
        return self._start("load", keys, rows, deadline, partial(self._load, fingerprint or self.fingerprint))

    def discard(self, keys: Sequence[bytes], deadline: float) -> Future[list[Status]]:
        """Delete records.

        Args:
            keys: 32 bytes each, none twice.
            deadline: of ``time.monotonic``.

        Returns:
            A status for each key.

        Raises:
            BadInput: a key of another length or named twice, or a ``deadline`` that is not finite.
        """
        return self._start("discard", keys, None, deadline, lambda keys, _, until: self.driver.discard(keys, until))

    def stats(self) -> TierStats:
        """Return the counts, without I/O."""
        with self._changed:
            return self._health.stats(self._in_flight(), is_closed=self.is_closed)

    def close(self, deadline: float = 0.0) -> bool:
        """Refuse further calls, wait for those in flight, and return whether all are done.

        A thread of the tier closes the driver once it has finished with all of them, possibly after the deadline.

        Args:
            deadline: of ``time.monotonic``; 0: do not wait.
        """
        with self._changed:
            if not self.is_closed:
                self.is_closed, self._health.last_fault = True, "closed"
                for _ in range(self._workers):
                    self._queue.put(None)
                self._changed.notify_all()
            return self._changed.wait_for(lambda: self._is_done, min(max(0.0, deadline - monotonic()), _LONGEST_WAIT))

    def after_fork(self) -> None:
        """See ``Forkable``: closes the tier in the child, which has none of its threads and connections."""
        self._changed, self._queue = Condition(), SimpleQueue()
        self.is_closed = self._is_done = True
        self._active.clear()
        self._health.last_fault = "a forked process does not use the tiers of its parent"

    # -- in the caller's thread ----------------------------------------------------------------------------------------

    def _start(
        self, kind: str, keys: Sequence[bytes], rows: Rows | None, deadline: float,
        work: Callable[[Sequence[bytes], Rows, float], list[Status] | Lease],
    ) -> Future[Any]:  # fmt: skip
        """Queue a call of ``kind``, or refuse it at once."""
        if any(len(key) != KEY_NBYTES for key in keys) or len(set(keys)) < len(keys) or not isfinite(deadline):
            raise BadInput(
                f"keys have {KEY_NBYTES} bytes, each named once, and a deadline is a time of time.monotonic; got lengths "
                f"{[len(key) for key in keys][:16]}, deadline {deadline}"
            )
        if rows is not None and len(rows) != len(keys):
            raise BadInput(f"one record for each key: {len(keys)} keys, {len(rows)} records")
        keys, rows = tuple(keys), tuple(rows or ())
        with self._changed:
            allowed = self._health.allowed(kind, keys, monotonic())
            asked, taken = tuple(keys[i] for i in allowed), tuple(rows[i] for i in allowed if rows)
            operation = _Operation(
                kind, keys, asked, taken, deadline, self._nbytes(asked, taken), partial(work, asked, taken, deadline)
            )
            refusal = self._refusal(operation)
            operation.future.set_running_or_notify_cancel()  # so that it cannot be cancelled: it ends at the deadline
            if refusal is None:
                self._active[operation] = None
                self._queue.put(operation)
                if deadline < self._wakes_at:
                    self._changed.notify_all()
        if refusal is not None:
            self._answer(operation, operation.refused(refusal))
        return operation.future

    def _nbytes(self, keys: Sequence[bytes], rows: Rows) -> int:
        return len(rows) * self.buffer.record_nbytes + len(keys) * HEADER_NBYTES

    def _in_flight(self) -> int:
        return sum(operation.nbytes for operation in self._active)

    def _refusal(self, operation: _Operation) -> Status | None:
        """Return the status with which ``operation`` is refused; None if it may begin, and then hold its records."""
        if self.is_closed:
            return Status.UNAVAILABLE
        if operation.begun >= operation.deadline:
            return Status.TIMEOUT
        if self._in_flight() + operation.nbytes > self._most_in_flight:
            return Status.REJECTED
        if operation.all_keys and not operation.keys:
            return Status.UNAVAILABLE
        return None if self.buffer.hold(operation.rows) else Status.REJECTED

    # -- in the tier's threads -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """End operations at their deadline and probe calls that failed; after ``close``, close the driver."""
        while True:
            with self._changed:
                if self.is_closed and not self._active:
                    break
                now = monotonic()
                late = [one for one in self._active if one.deadline <= now and not one.is_over]
                for operation in late:
                    self._end(operation, [Status.TIMEOUT] * len(operation.keys), is_late=True)
                unprobed = [] if self.is_closed else self._health.unprobed()
                probes = [self._probe(*one) for one in unprobed if one[1].takes_probe(now)]
                if not late and not probes:
                    times = [one.deadline for one in self._active if not one.is_over]
                    times += [breaker.next_probe for _, breaker in unprobed]
                    self._wakes_at = min(times, default=inf)
                    self._changed.wait(min(max(1e-3, self._wakes_at - now), _LONGEST_WAIT))
                    self._wakes_at = 0.0
            for operation in late:
                self._answer(operation, operation.refused(Status.TIMEOUT))
            for probe in probes:
                if probe is not None:
                    self._do_apart(probe)
            self._health.tell(self.name)
        try:
            self.driver.close()
        except Exception as raised:  # as in ``_do``
            self._health.last_error = repr(raised)
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _probe(self, kind: str, breaker: Breaker) -> _Operation | None:
        """Return one more call of ``kind`` with a key of a shard for which it failed; None if no record is free.

        No request waits for it. It is in flight from now on.
        """
        deadline, keys, rows = monotonic() + breaker.seconds, (breaker.key,), list[int]()
        work: Callable[[], list[Status] | Lease] = partial(self.driver.lookup, keys, deadline, 0.0)
        if kind == "load":
            try:
                rows = self.buffer.acquire(1, owner=self)
            except OutOfBlocks:
                return None
            self.buffer.hold(rows)
            work = partial(self.driver.load, keys, rows, deadline)
        nbytes = self._nbytes(keys, rows)
        operation = _Operation(kind, keys, keys, tuple(rows), deadline, nbytes, work, breaker)
        operation.future.add_done_callback(lambda _: self.buffer.release(rows))
        breaker.is_probed = True
        self._active[operation] = None
        return operation

    def _do_apart(self, operation: _Operation) -> None:
        """Run ``operation`` in a thread of its own, so that no call of a user waits behind it."""
        try:
            Thread(target=self._do, args=(operation,), name="kvpagoda-probe", daemon=True).start()
        except RuntimeError:  # the system has no more threads for this process
            with self._changed:
                is_served = not self.is_closed  # else the workers end before they come to it
                if is_served:
                    self._queue.put(operation)
            if not is_served:
                self._do(operation)

    def _end(
        self, operation: _Operation, statuses: Sequence[Status], why: str = "", *, is_late: bool = False
    ) -> None:  # fmt: skip
        """Note that the ``statuses`` of the keys of ``operation`` are known; ``why`` it failed, if the driver raised."""
        operation.is_over, now = True, monotonic()
        outcomes = self._health.outcomes(operation.keys, statuses, operation.probed)
        if operation.probed is None:
            self._health.took(operation.kind, now - operation.begun)
        seconds = operation.deadline - operation.begun
        why = f"no answer in {seconds:.2g} s" if is_late else why
        if not self.is_closed and self._health.record(operation.kind, outcomes, seconds, now, why):
            self._changed.notify_all()  # so that the watcher plans the next probe

    def _answer(self, operation: _Operation, result: list[Status] | Lease) -> None:
        result = operation.completed(result)
        if operation.probed is None:
            with self._changed:
                self._health.count(operation.kind, _statuses(result))
        operation.future.set_result(result)

    def _serve(self) -> None:
        """Run the queued operations, one after another."""
        queue = self._queue
        while (operation := queue.get()) is not None:
            self._do(operation)
            del operation

    def _do(self, operation: _Operation) -> None:
        """Call the driver for ``operation``, unless its deadline is over, and answer it."""
        result: list[Status] | Lease | None = None
        why = ""
        if not operation.is_over:
            try:
                result = operation.work()
            except Exception as raised:  # a driver must not raise; if it does, that is a fault like any other
                result, why = operation.refused(Status.UNAVAILABLE), repr(raised)
                self._health.last_error = why
        self.buffer.drop(operation.rows)
        with self._changed:
            self._active.pop(operation, None)
            if operation.probed is not None:
                operation.probed.is_probed = False
            is_late = operation.is_over
            if result is not None and not is_late:
                self._end(operation, _statuses(result), why)
            elif result is not None:
                outcomes = self._health.outcomes(operation.keys, _statuses(result), operation.probed)
                self._health.record_late(operation.kind, outcomes)
            if is_late or self.is_closed:
                self._changed.notify_all()
        if result is not None and not is_late:
            self._answer(operation, result)
        elif isinstance(result, Lease):
            result.release()
        self._health.tell(self.name)

    def _store(
        self, fingerprint: bytes, sizes: Mapping[bytes, int], keys: Sequence[bytes], rows: Rows, deadline: float
    ) -> list[Status]:
        statuses, leases = list[Status](), list[Lease]()
        parts = self._parts(len(keys))
        for part in parts:
            for key, row in zip(keys[part], rows[part]):
                pack_record(self.buffer.rows[row], key, fingerprint, sizes[key], checksum=self._checksum)
            statuses += _twice(self.driver.store, keys[part], rows[part], deadline)
            # The lease keeps the driver from evicting a part for a deeper one; the last lookup marks the deepest part
            # as used first. A driver whose leases hold nothing is asked only once.
            if len(parts) > 1 and (not leases or leases[-1].until > monotonic()):
                leases.append(self.driver.lookup(keys[part], deadline, deadline - monotonic()))
        if leases:
            leases.append(self.driver.lookup(keys, deadline, 0.0))
        for lease in leases:
            lease.release()
        return statuses

    def _load(self, fingerprint: bytes, keys: Sequence[bytes], rows: Rows, deadline: float) -> list[Status]:
        statuses = list[Status]()
        for part in self._parts(len(keys)):
            loaded = _twice(self.driver.load, keys[part], rows[part], deadline)
            for key, row, status in zip(keys[part], rows[part], loaded):
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
        """Return the ranges of ``n`` records that go to the driver in one call each."""
        return [slice(start, start + self._part) for start in range(0, n, self._part)]


def _statuses(result: list[Status] | Lease) -> Sequence[Status]:
    return result.statuses if isinstance(result, Lease) else result


def _twice(
    call: Callable[[Sequence[bytes], Rows, float], list[Status]], keys: Sequence[bytes], rows: Rows, deadline: float
) -> list[Status]:
    """Return the statuses of ``call``, which is repeated once for keys that are UNAVAILABLE."""
    statuses = call(keys, rows, deadline)
    again = [i for i, status in enumerate(statuses) if status is Status.UNAVAILABLE]
    if again:
        second = call([keys[i] for i in again], [rows[i] for i in again], deadline)
        for i, status in zip(again, second):
            statuses[i] = status
    return statuses
