"""Tests of parts that others write: the rules of ``Driver`` as functions that raise CheckFailed if a driver breaks one.

    from kvpagoda.testing import DRIVER_CHECKS

    @pytest.mark.parametrize("check", DRIVER_CHECKS)
    def test_my_driver_conforms(check):
        check(lambda buffer: MyDriver(buffer))

``make(buffer)`` returns an empty driver with room for 8 to 64 records of ``buffer``, whose payloads have ``PAYLOAD``
bytes. Each check makes its own driver and closes it. A check takes at most about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from time import monotonic

import numpy as np

from kvpagoda.abc import Driver, Lease, Status
from kvpagoda.errors import CheckFailed
from kvpagoda.tiers.records import RecordBuffer, pack_record, verify_record

PAYLOAD = 10_000
Make = Callable[[RecordBuffer], Driver]
OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE, REJECTED = Status
KEYS = [sha256(str(i).encode()).digest() for i in range(256)]
_FINGERPRINT = sha256(b"conformance").digest()


def what_was_stored_is_loaded(make: Make) -> None:
    """Loaded bytes equal the stored ones, other rows are not changed, and a key that was not stored is a MISS."""
    with _Trial(make) as trial:
        trial.expect("storing", trial.store(0, 1, 2, 3), OK, OK, OK, OK)
        others = trial.buffer.records[4:].copy()
        trial.expect("loading", trial.load(9, 2, 3, 8), MISS, OK, OK, MISS)
        if not np.array_equal(trial.buffer.records[4:], others):
            raise CheckFailed("a load wrote to records that it was not given")
        trial.expect("storing nothing", trial.store())


def a_record_is_written_once(make: Make) -> None:
    """Storing a key again returns OK and does not change its record."""
    with _Trial(make) as trial:
        trial.store(1)
        trial.fill(0, KEYS[1], content=KEYS[2])
        trial.expect("storing again", trial.driver.store([KEYS[1]], [0], _soon()), OK)
        trial.expect("loading", trial.load(1), OK)


def what_was_discarded_is_gone(make: Make) -> None:
    """A discarded key is a MISS and can be stored again."""
    with _Trial(make) as trial:
        trial.store(1, 2)
        trial.expect("discarding", trial.discard(1, 3), OK, MISS)
        trial.expect("loading", trial.load(1, 2), MISS, OK)
        trial.expect("storing again", trial.store(1), OK)
        trial.expect("loading", trial.load(1), OK)


def a_lookup_tells_what_is_there(make: Make) -> None:
    """A lookup has the statuses in the order of its keys; a lease may be released twice, or after its time."""
    with _Trial(make) as trial:
        trial.store(1, 2)
        lease = trial.lookup(2, 1, 3, 2)
        trial.expect("looking up", lease.statuses, OK, OK, MISS, OK)
        if lease.num_found != 2:
            raise CheckFailed(f"two keys in a row are there, the driver found {lease.num_found}")
        trial.discard(1)
        trial.expect("loading", trial.load(1, 2), MISS, OK)
        lease.release()
        lease.release()
        trial.lookup(2, hold=0.0).release()


def bytes_stay_within_the_bound(make: Make) -> None:
    """Storing many times what fits never exceeds the capacity, and the records that remain are right."""
    with _Trial(make) as trial:
        for i in range(0, 256, 4):
            trial.store(*range(i, i + 4))
            stats = trial.driver.stats()
            if stats.nbytes > stats.capacity_nbytes:
                raise CheckFailed(f"the driver holds {stats.nbytes} bytes; its capacity is {stats.capacity_nbytes}")
        for i in range(0, 256, 4):
            trial.load(*range(i, i + 4))


def late_is_said_and_not_raised(make: Make) -> None:
    """With a deadline in the past every key is a TIMEOUT, and nothing was done."""
    with _Trial(make) as trial:
        trial.store(1)
        past = monotonic() - 1
        trial.expect("storing late", trial.driver.store([KEYS[2]], [0], past), TIMEOUT)
        trial.expect("loading late", trial.driver.load([KEYS[1]], [0], past), TIMEOUT)
        trial.expect("looking up late", trial.driver.lookup([KEYS[1]], past, 1.0).statuses, TIMEOUT)
        trial.expect("loading", trial.load(2, 1), MISS, OK)


def many_threads_see_whole_records(make: Make) -> None:
    """While four threads store, look up and load the same keys, every load returns the record of its key."""
    _at_once(make, with_discards=False)


def many_threads_discard_what_others_load(make: Make) -> None:
    """The same with discards: a load may then read other bytes, but never bytes that pass the checksum by mistake."""
    _at_once(make, with_discards=True)


def _at_once(make: Make, with_discards: bool) -> None:
    """Store, look up and load the same keys from four threads, and discard some of them if ``with_discards``."""
    with _Trial(make) as trial, ThreadPoolExecutor(4) as pool:

        def work(row: int) -> None:
            random = np.random.default_rng(row)
            for _ in range(100):
                stored, loaded, discarded = (int(i) for i in random.integers(24, size=3))
                trial.store(stored, first_row=row)
                lease = trial.lookup(loaded, hold=0.05)
                trial.load(loaded, first_row=row, is_raced=with_discards)
                if random.integers(2):
                    lease.release()
                if with_discards and random.integers(3) == 0:
                    trial.discard(discarded)

        for done in [pool.submit(work, row) for row in range(4)]:
            done.result()


def a_closed_driver_is_unavailable(make: Make) -> None:
    """After ``close`` every call returns UNAVAILABLE; closing again does nothing."""
    with _Trial(make) as trial:
        trial.store(1)
        trial.driver.close()
        trial.driver.close()
        trial.expect("storing", trial.store(2), UNAVAILABLE)
        trial.expect("loading", trial.load(1), UNAVAILABLE)
        trial.expect("looking up", trial.lookup(1).statuses, UNAVAILABLE)
        trial.expect("discarding", trial.discard(1), UNAVAILABLE)


DRIVER_CHECKS: tuple[Callable[[Make], None], ...] = (
    what_was_stored_is_loaded,
    a_record_is_written_once,
    what_was_discarded_is_gone,
    a_lookup_tells_what_is_there,
    bytes_stay_within_the_bound,
    late_is_said_and_not_raised,
    many_threads_see_whole_records,
    many_threads_discard_what_others_load,
    a_closed_driver_is_unavailable,
)


class _Trial:
    """A driver over a buffer whose payloads are made from their keys. Calls name keys by their index in ``KEYS``."""

    def __init__(self, make: Make) -> None:
        self.buffer = RecordBuffer(8, PAYLOAD)
        self.driver = make(self.buffer)

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def fill(self, row: int, key: bytes, content: bytes) -> None:
        """Write a record with ``key`` to ``row``, with a payload made from ``content``."""
        self.buffer.payloads[row] = _payload(content)
        pack_record(self.buffer.rows[row], key, _FINGERPRINT, PAYLOAD)

    def store(self, *which: int, first_row: int = 0) -> list[Status]:
        for row, i in enumerate(which, first_row):
            self.fill(row, KEYS[i], KEYS[i])
        return self.driver.store([KEYS[i] for i in which], range(first_row, first_row + len(which)), _soon())

    def lookup(self, *which: int, hold: float = 5.0) -> Lease:
        return self.driver.lookup([KEYS[i] for i in which], _soon(), hold)

    def discard(self, *which: int) -> list[Status]:
        return self.driver.discard([KEYS[i] for i in which], _soon())

    def load(self, *which: int, first_row: int = 0, is_raced: bool = False) -> list[Status]:
        """Load records and verify those with status OK.

        With ``is_raced`` (a race with discards) a record may be mixed, but must then fail the checksum.
        """
        keys, rows = [KEYS[i] for i in which], range(first_row, first_row + len(which))
        self.buffer.records[rows.start : rows.stop] = 0xEE
        statuses = self.driver.load(keys, rows, _soon())
        for key, row, status in zip(keys, rows, statuses):
            verifies = verify_record(self.buffer.rows[row], key, _FINGERPRINT) == PAYLOAD
            is_right = verifies and np.array_equal(self.buffer.payloads[row], _payload(key))
            is_mixed = is_raced and not verifies and (self.buffer.records[row] != 0xEE).any()
            if status is OK and not (is_right or is_mixed):
                raise CheckFailed(f"OK, but the bytes of {key.hex()[:8]} are not those that were stored")
        return statuses

    def expect(self, what: str, got: Sequence[Status], *wanted: Status) -> None:
        """Raise CheckFailed unless the statuses that the driver returned are ``wanted``."""
        if tuple(got) != wanted:
            raise CheckFailed(f"{what}: {wanted} was expected, the driver returned {got}")


def _payload(key: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.resize(np.frombuffer(key, np.uint8), PAYLOAD)


def _soon() -> float:
    return monotonic() + 5.0
