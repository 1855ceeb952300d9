"""Above a driver: answers in time whatever it does, never a wrong byte, and the tier in use again when the driver is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from gc import collect
from hashlib import sha256
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any
from weakref import ref

import numpy as np
import pytest

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.tiers import DriverStats, Lease, RecordBuffer, Status, Tier, host_driver

OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE, REJECTED = Status
PRINT = sha256(b"layout").digest()
KEYS = [sha256(bytes([i])).digest() for i in range(64)]
PAYLOAD = 5000


def soon(seconds: float = 5.0) -> float:
    return monotonic() + seconds


class Faulty:
    """A driver of host memory that can hang, fail, raise, and spoil what it reads."""

    def __init__(self, buffer: RecordBuffer) -> None:
        self.inner, self.buffer = host_driver(buffer, "1MiB"), buffer
        self.is_well = Event()
        self.is_well.set()
        self.fault: Callable[[], Status] | None = None
        self.spoil: Callable[[np.ndarray[Any, Any]], None] | None = None
        self.calls = 0
        self.lock, self.leases, self.is_closed = Lock(), 0, False

    def _call(self, count: int) -> list[Status] | None:
        with self.lock:
            self.calls += 1
        self.is_well.wait(20)
        return [self.fault()] * count if self.fault else None

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        return self._call(len(keys)) or self.inner.store(keys, rows, soon())

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        fault = self._call(len(keys))
        return Lease(tuple(keys), tuple(fault), 0.0) if fault else self.inner.lookup(keys, soon(), hold)

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        fault = self._call(len(keys))
        statuses = fault or self.inner.load(keys, rows, soon())
        for row in rows:
            if self.spoil:
                self.spoil(self.buffer.rows[row])
        return statuses

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return self._call(len(keys)) or self.inner.discard(keys, soon())

    def stats(self) -> DriverStats:
        return self.inner.stats()

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A tier over a faulty driver, and records that say whose they are."""

    def __init__(self, make: Callable[[RecordBuffer], Any] = Faulty, **options: Any) -> None:
        self.buffer = RecordBuffer(16, PAYLOAD)
        self.driver = make(self.buffer)
        self.tier = Tier(self.driver, self.buffer, PRINT, **options)

    def store(self, *which: int, seconds: float = 5.0) -> list[Status]:
        rows = self.buffer.acquire(len(which))
        for row, i in zip(rows, which):
            self.buffer.payloads[row] = i
        return self.done(self.tier.store([KEYS[i] for i in which], rows, soon(seconds)), seconds, rows)

    def load(self, *which: int, seconds: float = 5.0) -> list[Status]:
        """Load in time; whatever is OK has the right bytes."""
        rows = self.buffer.acquire(len(which))
        future = self.tier.load([KEYS[i] for i in which], rows, soon(seconds))
        return self.done(future, seconds, rows, which)

    def recovers(self) -> None:
        """Wait until the tier's own threads have seen that the driver is well, by loads and lookups."""
        end = soon()
        while any(self.tier._health.breakers[kind].open_ones for kind in ("load", "lookup")):
            assert monotonic() < end
            sleep(0.005)

    def done(
        self, future: Future[list[Status]], seconds: float, rows: list[int], which: Sequence[int] = ()
    ) -> list[Status]:
        statuses = future.result(1.1 * seconds + 0.5)  # and what a busy machine takes to wake somebody
        for row, i, status in zip(rows, which, statuses):
            assert status is not OK or (self.buffer.payloads[row] == i).all()
        self.buffer.release(rows)
        return statuses


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(faults=3, pause=0.2)
    yield made
    made.driver.is_well.set()
    assert made.tier.close(soon()) and made.driver.is_closed
    assert made.buffer.num_free == 16 and made.tier.stats().nbytes_in_flight == 0
    made.buffer.check()
    made.driver.inner.check()


def test_what_was_stored_comes_back(bench: Bench) -> None:
    assert bench.store(1, 2, 3) == [OK] * 3
    assert bench.tier.lookup(KEYS[1:5], soon()).result().num_found == 3
    assert bench.load(3, 9, 1) == [OK, MISS, OK]
    assert bench.tier.discard([KEYS[1], KEYS[9]], soon()).result() == [OK, MISS]
    assert bench.load(1) == [MISS]
    stats = bench.tier.stats()
    assert stats.stores == {OK: 3} and stats.lookups == {OK: 3, MISS: 1} and stats.loads == {OK: 2, MISS: 2}
    assert stats.discards == {OK: 1, MISS: 1} and stats.is_available


def test_short_payloads_and_many_parts() -> None:
    buffer = RecordBuffer(8, 1 << 20)
    driver = host_driver(buffer, "6MiB")
    tier, rows = Tier(driver, buffer, PRINT), buffer.acquire(8)
    for i, row in enumerate(rows):
        buffer.payloads[row] = i
    assert tier.store(KEYS[:8], rows, soon(), [1000 * i for i in range(8)]).result() == [OK] * 5 + [REJECTED] * 3
    assert list(driver._slots) == KEYS[4::-1] and not driver.stats().num_leases  # parents are there, and the last to go
    buffer.records[:] = 99
    assert tier.load(KEYS[:5], rows[:5], soon()).result() == [OK] * 5
    for i, row in enumerate(rows[:5]):
        assert (buffer.payloads[row][: 1000 * i] == i).all() and not buffer.payloads[row][1000 * i :].any()
    assert tier.close(soon())


def test_a_driver_without_leases_is_not_asked_for_each_part() -> None:
    buffer = RecordBuffer(6, 700_000)
    driver = Faulty(buffer)
    driver.inner = host_driver(buffer, "8MiB")
    asked, plain = [], driver.lookup

    def lookup(keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        asked.append(len(keys))
        return Lease(tuple(keys), plain(keys, deadline, hold).statuses, monotonic())

    driver.lookup = lookup  # type: ignore[method-assign]
    driver.part_nbytes = 2 << 20  # type: ignore[attr-defined]
    tier, rows = Tier(driver, buffer, PRINT), buffer.acquire(6)
    assert tier.store(KEYS[:6], rows, soon()).result() == [OK] * 6 and asked == [3, 6]
    assert tier.close(soon())


def test_another_layout_sees_nothing() -> None:
    buffer = RecordBuffer(2, PAYLOAD)
    driver = host_driver(buffer, "64KiB")
    rows = buffer.acquire(2)
    Tier(driver, buffer, PRINT).store(KEYS[:1], rows[:1], soon()).result()
    assert Tier(driver, buffer, KEYS[5]).load(KEYS[:1], rows[1:], soon()).result() == [CORRUPT]


@pytest.mark.parametrize("at", [0, 10, 40, 70, 100, 127, 128, 3000, 128 + PAYLOAD - 1])
def test_a_spoilt_record_is_corrupt_and_discarded(bench: Bench, at: int) -> None:
    def spoil(record: np.ndarray[Any, Any]) -> None:
        record[at] ^= 4

    bench.store(1)
    bench.driver.spoil = spoil
    assert bench.load(1) == [CORRUPT]
    bench.driver.spoil = None
    assert bench.load(1) == [MISS] and bench.store(1) == [OK] and bench.load(1) == [OK]


def test_a_hung_driver_never_holds_anybody_up(bench: Bench) -> None:
    bench.store(1)
    bench.driver.is_well.clear()
    for _ in range(3):
        start = monotonic()
        assert bench.load(1, seconds=0.5) == [TIMEOUT]
        assert monotonic() - start < 0.55 + 0.05  # the deadline, a tenth, and a busy machine
    start = monotonic()
    assert bench.load(1, seconds=2.0) == [UNAVAILABLE] and monotonic() - start < 1
    assert not bench.tier.stats().is_available
    assert bench.buffer.num_free == 16 - 3  # the records of all three calls: two hang, one waits behind them
    assert bench.tier.stats().last_fault == "load: no answer in 0.5 s"
    for _ in range(10):  # probes are made meanwhile, and nobody waits for them
        start = monotonic()
        assert bench.load(1, seconds=0.5) == [UNAVAILABLE] and monotonic() - start < 0.05
        sleep(0.1)
    bench.driver.is_well.set()
    bench.recovers()
    assert bench.load(1) == [OK]
    while bench.buffer.num_free < 16:
        sleep(0.01)


def test_a_late_read_reaches_nobody_elses_record(bench: Bench) -> None:
    """A record that a hung driver may still write into is not handed out, and cannot be named again."""
    bench.store(1, 2)
    bench.driver.is_well.clear()
    (row,) = bench.buffer.acquire(1)
    assert bench.tier.load(KEYS[1:2], [row], soon(0.1)).result() == [TIMEOUT]
    assert bench.tier.load(KEYS[2:3], [row], soon(0.1)).result() == [REJECTED]
    bench.buffer.release([row])
    others = bench.buffer.acquire(15)
    assert row not in others
    bench.buffer.payloads[others] = 77
    bench.driver.is_well.set()
    while not bench.buffer.num_free:
        sleep(0.01)
    assert (bench.buffer.payloads[others] == 77).all() and (bench.buffer.payloads[row] == 1).all()
    bench.buffer.release(others)


def test_a_late_lease_is_released(bench: Bench) -> None:
    bench.store(1)
    bench.driver.is_well.clear()
    assert bench.tier.lookup(KEYS[1:2], soon(0.1), 60.0).result(1).statuses == (TIMEOUT,)
    bench.driver.is_well.set()
    assert bench.tier.close(soon())
    assert bench.driver.stats().num_leases == 0


def test_the_bound_in_flight_refuses_and_counts(bench: Bench) -> None:
    small = Bench(in_flight=3 * (bench.buffer.record_nbytes + 128))
    small.driver.is_well.clear()
    rows = small.buffer.acquire(4)
    futures = [small.tier.store([KEYS[i]], [rows[i]], soon()) for i in range(4)]
    assert futures[3].result(0) == [REJECTED] and not any(future.done() for future in futures[:3])
    assert small.tier.stats().nbytes_in_flight == 3 * (small.buffer.record_nbytes + 128)
    assert not futures[0].cancel()
    small.driver.is_well.set()
    assert [future.result(5) for future in futures[:3]] == [[OK]] * 3
    assert small.tier.close(soon()) and small.tier.stats().nbytes_in_flight == 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
def test_a_failing_driver_is_only_ever_a_miss(bench: Bench, rate: float) -> None:
    random, lock = np.random.default_rng(5), Lock()
    plain = bench.driver._call

    def sometimes(count: int) -> list[Status] | None:
        with lock:
            if random.random() >= rate:
                return plain(count)
            which = int(random.integers(3))
        if which == 0:
            raise RuntimeError("a driver must not raise")
        return [(UNAVAILABLE, TIMEOUT)[which - 1]] * count

    bench.driver._call = sometimes  # type: ignore[method-assign]
    seen = set()
    for i in range(200):
        seen |= {*bench.store(i % 50), *bench.load(i % 50, (i + 1) % 50)}
    assert seen <= {OK, MISS, TIMEOUT, UNAVAILABLE} and (OK in seen) == (rate < 1)
    bench.driver._call = plain  # type: ignore[method-assign]
    bench.recovers()
    while bench.store(61) != [OK]:
        sleep(0.05)
    assert bench.store(60) == [OK] and bench.load(60) == [OK] and bench.tier.stats().is_available
    assert "must not raise" in bench.tier.stats().last_error


@pytest.mark.parametrize("fault", [None, TIMEOUT])
def test_a_call_that_was_late_invites_the_next_if_it_succeeded(fault: Status | None) -> None:
    late = Bench(faults=3, pause=60.0, workers=3)
    late.driver.is_well.clear()
    late.driver.fault = None if fault is None else lambda: fault
    assert [late.load(1, seconds=0.05) for _ in range(3)] == [[TIMEOUT]] * 3 and not late.tier.stats().is_available
    late.driver.is_well.set()
    end = soon()
    while late.tier.stats().nbytes_in_flight:
        assert monotonic() < end
        sleep(0.001)
    late.driver.fault = None
    if fault is None:
        late.recovers()
    assert late.load(1) == [MISS if fault is None else UNAVAILABLE]
    assert late.tier.close(soon())


def test_many_callers_of_a_driver_that_is_often_late() -> None:
    """Whatever is OK is right, every answer is in time, and in the end every record is back."""
    bench, seen, failed = Bench(workers=3, faults=1000), Counter[Status](), []
    random, lock, plain = np.random.default_rng(9), Lock(), bench.driver._call

    def late(count: int) -> list[Status] | None:
        with lock:
            seconds = float(random.choice([0.0, 0.0, 0.002, 0.06]))
        sleep(seconds)
        return plain(count)

    bench.driver._call = late  # type: ignore[method-assign]

    def call(seed: int) -> None:
        mine = np.random.default_rng(seed)
        try:
            for _ in range(60):
                which = [int(i) for i in mine.permutation(12)[:2]]
                while bench.buffer.num_free < 10:  # as many as all callers take at once
                    sleep(0.001)
                seen.update((bench.store if mine.integers(2) else bench.load)(*which, seconds=0.05))
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed, failed
    assert min(seen[OK], seen[TIMEOUT], seen[MISS]) > 3 and set(seen) <= {OK, TIMEOUT, MISS, REJECTED}
    assert bench.tier.close(soon()) and bench.buffer.num_free == 16 and not bench.tier.stats().nbytes_in_flight
    bench.buffer.check()
    bench.driver.inner.check()


def test_the_breaker_asks_a_sick_driver_seldom(bench: Bench) -> None:
    bench.driver.fault = lambda: UNAVAILABLE
    for _ in range(100):
        assert bench.load(1) == [UNAVAILABLE]
    assert bench.driver.calls == 2 * 3  # three calls, each tried once more
    assert bench.store(1) == [UNAVAILABLE]  # stores have a breaker of their own
    sleep(0.9)
    assert bench.load(1) == [UNAVAILABLE] and 2 * 4 < bench.driver.calls <= 2 * 4 + 4  # a probe in 0.2 seconds
    bench.driver.fault = None
    bench.recovers()
    assert bench.load(1) == [MISS] and bench.tier.stats().is_available
    assert UNAVAILABLE not in bench.tier.stats().lookups  # of probes nothing is told


def test_a_store_is_let_through_now_and_then(bench: Bench) -> None:
    bench.driver.fault = lambda: UNAVAILABLE
    for _ in range(10):
        assert bench.store(1) == [UNAVAILABLE]
    assert bench.driver.calls == 2 * 3 and not bench.tier.stats().is_available
    bench.driver.fault = None
    assert bench.store(1) == [UNAVAILABLE]
    sleep(0.2)
    assert bench.store(1) == [OK] and bench.load(1) == [OK] and bench.tier.stats().is_available


class Sharded(Faulty):
    """A driver whose keys lie in three shards, each of which can fail, or hang until it is well."""

    def __init__(self, buffer: RecordBuffer) -> None:
        super().__init__(buffer)
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.asked = Counter[str]()

    def shard_of(self, key: bytes) -> str:
        return f"shard {key[0] % 3}"

    def _faults(self, keys: Sequence[bytes]) -> list[Status | None]:
        shards = [self.shard_of(key) for key in keys]
        self.asked.update(shards)
        if self.hanging & {*shards}:
            self.is_well.wait(20)
        return [
            UNAVAILABLE if shard in self.failing else TIMEOUT if shard in self.hanging else None for shard in shards
        ]

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        faults = self._faults(keys)
        return [fault or self.inner.store([key], [row], soon())[0] for fault, key, row in zip(faults, keys, rows)]

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        faults = self._faults(keys)
        return [fault or self.inner.load([key], [row], soon())[0] for fault, key, row in zip(faults, keys, rows)]

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        found = self.inner.lookup(keys, soon(), hold)
        statuses = [fault or status for fault, status in zip(self._faults(keys), found.statuses)]
        return Lease(tuple(keys), tuple(statuses), found.until, found.release)


@pytest.fixture
def sharded() -> Iterator[Bench]:
    made = Bench(Sharded, faults=3, pause=0.1, workers=1)
    yield made
    made.driver.is_well.set()
    assert made.tier.close(soon()) and made.buffer.num_free == 16
    made.buffer.check()
    assert not made.driver.inner.stats().num_leases


WHICH = range(12)
SHARD = f"shard {KEYS[0][0] % 3}"
IN_SHARD = [f"shard {KEYS[i][0] % 3}" == SHARD for i in WHICH]


def test_a_failing_shard_is_left_alone_and_the_others_are_served(sharded: Bench) -> None:
    assert any(IN_SHARD) and not all(IN_SHARD) and sharded.store(*WHICH) == [OK] * 12
    sharded.driver.failing = {SHARD}
    wanted = [UNAVAILABLE if is_in else OK for is_in in IN_SHARD]
    for _ in range(3):
        assert sharded.load(*WHICH) == wanted and sharded.store(*WHICH) == wanted
        assert list(sharded.tier.lookup(KEYS[:12], soon()).result().statuses) == wanted
    stats = sharded.tier.stats()
    assert stats.unavailable_shards == (SHARD,) and not stats.is_available
    assert stats.last_fault == f"lookup at {SHARD}: unavailable"
    sharded.tier._health.breakers["store"].open_ones[SHARD].next_probe = soon(100)
    for breaker in [sharded.tier._health.breakers[kind].open_ones[SHARD] for kind in ("load", "lookup")]:
        breaker.next_probe = soon(100)
    asked = sharded.driver.asked[SHARD]
    for _ in range(5):
        lease = sharded.tier.lookup(KEYS[:12], soon()).result()
        assert list(lease.statuses) == wanted and lease.keys == tuple(KEYS[:12])
        lease.release()
        assert sharded.load(*WHICH) == wanted and sharded.store(*WHICH) == wanted
    assert sharded.driver.asked[SHARD] == asked and sharded.load(0) == [UNAVAILABLE]
    sharded.driver.failing = set()
    sharded.tier._health.breakers["lookup"].retry_now(SHARD)
    sharded.tier.lookup([], soon(0.001)).result()  # wakes the thread that probes
    sharded.recovers()
    assert sharded.load(*WHICH) == [OK] * 12
    assert sharded.store(*WHICH) == [OK] * 12  # at once: a probe by the tier has succeeded
    assert sharded.tier.stats().is_available and not sharded.tier.stats().unavailable_shards
    sharded.driver.inner._leases.clear()


def test_a_shard_that_hangs_holds_up_few_calls_and_no_other_shard_is_blamed(sharded: Bench) -> None:
    """Also while it is probed, although only one thread serves calls."""
    assert sharded.store(*WHICH) == [OK] * 12
    sharded.driver.hanging = {SHARD}
    sharded.driver.is_well.clear()
    for _ in range(2):
        assert sharded.load(*WHICH, seconds=0.1) == [TIMEOUT] * 12
        sharded.driver.is_well.set()
        while sharded.tier.stats().nbytes_in_flight:
            sleep(0.001)
        sharded.driver.is_well.clear()
    assert not sharded.tier.stats().unavailable_shards
    assert sharded.load(*WHICH, seconds=0.1) == [TIMEOUT] * 12
    sharded.driver.is_well.set()
    while len(sharded.tier.stats().unavailable_shards) > 1 or sharded.tier.stats().nbytes_in_flight:
        sleep(0.001)
    sharded.driver.is_well.clear()
    assert sharded.tier.stats().unavailable_shards == (SHARD,)
    for _ in range(40):
        wanted = [UNAVAILABLE if is_in else OK for is_in in IN_SHARD]
        assert sharded.load(*WHICH, seconds=1.0) == wanted
        sleep(0.01)
    assert sharded.buffer.num_free >= 15, "one probe at a time"
    sharded.driver.hanging = set()
    sharded.driver.is_well.set()
    sharded.recovers()
    assert sharded.load(*WHICH) == [OK] * 12


def test_probes_go_on_where_no_thread_can_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench.driver.fault = lambda: UNAVAILABLE
    monkeypatch.setattr(Thread, "start", start)
    assert [bench.load(1) for _ in range(3)] == [[UNAVAILABLE]] * 3
    bench.driver.fault = None
    bench.recovers()


def test_a_probe_without_a_thread_beside_close_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers would end before they come to it, and nobody would close the driver."""
    bench = Bench(faults=3, pause=0.01)
    apart = bench.tier._do_apart

    def closed_just_then(operation: Any) -> None:
        bench.tier.close()
        apart(operation)

    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bench.tier, "_do_apart", closed_just_then)
    monkeypatch.setattr(Thread, "start", start)
    bench.driver.fault = lambda: UNAVAILABLE
    assert [bench.load(1) for _ in range(3)] == [[UNAVAILABLE]] * 3
    end = soon()
    while not bench.tier.is_closed:
        assert monotonic() < end
        sleep(0.001)
    assert bench.tier.close(soon()) and bench.driver.is_closed


def test_a_tier_is_closed_though_its_driver_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def close() -> None:
        raise OSError("the file is gone")

    bench = Bench()
    monkeypatch.setattr(bench.driver, "close", close)
    assert bench.tier.close(soon()) and "the file is gone" in bench.tier.stats().last_error


def test_the_watcher_sleeps_while_nothing_is_due(bench: Bench) -> None:
    """Also when stores fail, which nobody probes."""
    bench.driver.fault = lambda: UNAVAILABLE
    for _ in range(5):
        bench.store(1)
    sleep(0.3)
    condition, waits = bench.tier._changed, []
    plain = condition.wait
    condition.wait = lambda timeout=None: (waits.append(timeout), plain(timeout))[1]  # type: ignore[method-assign, func-returns-value]
    bench.tier.lookup([], soon(0.01)).result()
    sleep(0.3)
    assert len(waits) < 5


def test_no_operation_is_kept_when_it_is_done(bench: Bench) -> None:
    """Whatever its deadline was."""
    futures = [bench.tier.lookup(KEYS[i : i + 1], soon(1000)) for i in range(4)]
    assert all(future.result(5) for future in futures)
    gone = [ref(future) for future in futures]
    futures.clear()
    end = soon()
    while any(one() is not None for one in gone):
        assert monotonic() < end
        collect()
        sleep(0.01)


def test_a_driver_gets_all_of_an_operation_in_one_call() -> None:
    """Unless it asks for less at a time."""
    buffer = RecordBuffer(8, 1 << 20)
    driver = Faulty(RecordBuffer(1, 10))
    driver.inner, driver.buffer = host_driver(buffer, "12MiB"), buffer
    for part_nbytes, calls in (
        (None, 2),
        (2 << 20, 4 + 5 + 4),
    ):  # looked up for each part that is stored, and at the end
        driver.calls = 0
        if part_nbytes is not None:
            driver.part_nbytes = part_nbytes  # type: ignore[attr-defined]
        tier, rows = Tier(driver, buffer, PRINT), buffer.acquire(8)
        assert tier.store(KEYS[:8], rows, soon()).result() == [OK] * 8
        assert tier.load(KEYS[:8], rows, soon()).result() == [OK] * 8 and driver.calls == calls
        buffer.release(rows)
        assert tier.close(soon())


def test_what_fails_once_is_tried_once_more(bench: Bench) -> None:
    bench.store(1, 2)
    faults = iter([UNAVAILABLE])

    def once() -> Status:
        bench.driver.fault = None
        return next(faults)

    bench.driver.fault = once
    assert bench.load(1, 2) == [OK, OK]


def test_a_closed_tier_is_unavailable() -> None:
    bench = Bench()
    bench.driver.is_well.clear()
    rows = bench.buffer.acquire(1)
    future = bench.tier.store(KEYS[:1], rows, soon(0.3))
    while not bench.driver.calls:
        sleep(0.001)
    assert not bench.tier.close(soon(0.05)) and not bench.driver.is_closed
    assert bench.tier.load(KEYS[:1], rows, soon()).result(0) == [UNAVAILABLE]
    assert future.result(2) == [TIMEOUT] and not bench.driver.is_closed
    bench.driver.is_well.set()
    assert bench.tier.close(soon()) and bench.driver.is_closed and not bench.tier.stats().is_available


def test_bad_arguments_raise_before_anything_is_done(bench: Bench) -> None:
    rows = bench.buffer.acquire(2)
    for call in (
        lambda: bench.tier.store([b"short"], rows[:1], soon()),
        lambda: bench.tier.store(KEYS[:2], rows[:1], soon()),
        lambda: bench.tier.load([KEYS[0]] * 2, rows, soon()),
        lambda: bench.tier.store(KEYS[:2], rows, soon(), [1]),
        lambda: bench.tier.store(KEYS[:2], rows, soon(), [1, PAYLOAD + 1]),
        lambda: bench.tier.lookup([KEYS[0] + b"x"], soon()),
        lambda: bench.tier.lookup(KEYS[:1], float("inf")),
        lambda: bench.tier.load(KEYS[:2], rows, float("nan")),
        lambda: Tier(bench.driver, bench.buffer, PRINT, pause=float("nan")),
        lambda: Tier(bench.driver, bench.buffer, b"short"),
        lambda: Tier(bench.driver, bench.buffer, PRINT, workers=0),
    ):
        with pytest.raises(BadInput):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(NotOwned):
        bench.tier.load(KEYS[:2], [rows[0], rows[0]], soon())
    bench.buffer.release(rows)
    with pytest.raises(NotOwned):
        bench.tier.load(KEYS[:1], rows[:1], soon())
    assert not bench.driver.calls and bench.tier.stats().nbytes_in_flight == 0
