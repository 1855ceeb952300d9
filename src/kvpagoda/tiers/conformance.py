"""What any driver must do, as functions that raise CheckFailed where it does not.

    from kvpagoda.tiers.conformance import CHECKS

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_driver_conforms(check):
        check(lambda buffer: MyDriver(buffer))

``make(buffer)`` gives a driver, empty at first, with room for 8 to 64 records of ``buffer``, whose payloads have ``PAYLOAD``
bytes. Each check makes its own and closes it. A check takes about a second at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from threading import Thread
from time import monotonic

import numpy as np

from kvpagoda.errors import CheckFailed
from kvpagoda.tiers.driver import Driver, Status
from kvpagoda.tiers.records import RecordBuffer, pack_record, verify_record

PAYLOAD = 10_000
Make = Callable[[RecordBuffer], Driver]
_FINGERPRINT = sha256(b"conformance").digest()


def what_was_stored_is_loaded(make: Make) -> None:
    """Bytes are equal, rows that were not named are not touched, and what was not stored is a MISS in its own place."""
    with _Trial(make) as trial:
        keys = [_key(i) for i in range(4)]
        trial.expect("storing", trial.store(keys), [Status.OK] * 4)
        others = trial.buffer.records[4:].copy()
        trial.expect(
            "loading", trial.load([_key(9), *keys[2:], _key(8)]), [Status.MISS, Status.OK, Status.OK, Status.MISS]
        )
        if not np.array_equal(trial.buffer.records[4:], others):
            raise CheckFailed("a load wrote to records that it was not given")
        trial.expect("nothing", trial.driver.store([], [], _soon()), [])


def a_record_is_written_once(make: Make) -> None:
    """Storing a key again is OK and changes nothing."""
    with _Trial(make) as trial:
        trial.store([_key(1)])
        trial.fill(0, _key(1), content=_key(2))
        trial.expect("storing again", trial.driver.store([_key(1)], [0], _soon()), [Status.OK])
        trial.expect("loading", trial.load([_key(1)]), [Status.OK])


def what_was_discarded_is_gone(make: Make) -> None:
    """Discarded, it is a MISS, and can be stored again."""
    with _Trial(make) as trial:
        trial.store([_key(1), _key(2)])
        trial.expect("discarding", trial.driver.discard([_key(1), _key(3)], _soon()), [Status.OK, Status.MISS])
        trial.expect("loading", trial.load([_key(1), _key(2)]), [Status.MISS, Status.OK])
        trial.expect("storing again", trial.store([_key(1)]), [Status.OK])
        trial.expect("loading", trial.load([_key(1)]), [Status.OK])


def a_lookup_tells_what_is_there(make: Make) -> None:
    """In order; released twice or after its time a lease does no harm."""
    with _Trial(make) as trial:
        trial.store([_key(1), _key(2)])
        lease = trial.driver.lookup([_key(2), _key(1), _key(3), _key(2)], _soon(), 5.0)
        trial.expect("lookup", lease.statuses, [Status.OK, Status.OK, Status.MISS, Status.OK])
        trial.expect("found in a row", lease.num_found, 2)
        trial.driver.discard([_key(1)], _soon())
        trial.expect("loading", trial.load([_key(1), _key(2)]), [Status.MISS, Status.OK])
        lease.release()
        lease.release()
        trial.driver.lookup([_key(2)], _soon(), 0.0).release()


def bytes_stay_within_the_bound(make: Make) -> None:
    """Many times what fits: never more bytes than the capacity, and what is still there is right."""
    with _Trial(make) as trial:
        for i in range(0, 256, 4):
            trial.store([_key(j) for j in range(i, i + 4)])
            stats = trial.driver.stats()
            if stats.nbytes > stats.capacity_nbytes:
                raise CheckFailed(f"{stats.nbytes} bytes are kept, {stats.capacity_nbytes} may be")
        for i in range(0, 256, 4):
            trial.load([_key(j) for j in range(i, i + 4)])


def late_is_said_and_not_raised(make: Make) -> None:
    """A deadline in the past: TIMEOUT for every key, and nothing was done."""
    with _Trial(make) as trial:
        trial.store([_key(1)])
        past = monotonic() - 1
        trial.expect("storing late", trial.driver.store([_key(2)], [0], past), [Status.TIMEOUT])
        trial.expect("loading late", trial.driver.load([_key(1)], [0], past), [Status.TIMEOUT])
        trial.expect("looking late", trial.driver.lookup([_key(1)], past, 1.0).statuses, [Status.TIMEOUT])
        trial.expect("loading", trial.load([_key(2), _key(1)]), [Status.MISS, Status.OK])


def many_threads_see_whole_records(make: Make) -> None:
    """Four threads store, look up and load the same keys: every record that is loaded is the one asked for."""
    with _Trial(make) as trial:
        _at_once(trial, with_discards=False)


def many_threads_discard_what_others_load(make: Make) -> None:
    """The same with discards: a load that one overtakes may give other bytes, and none that the checksum takes for right."""
    with _Trial(make) as trial:
        _at_once(trial, with_discards=True)


def _at_once(trial: _Trial, with_discards: bool) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        random, row = np.random.default_rng(number), number
        try:
            for _ in range(100):
                key = _key(int(random.integers(24)))
                trial.fill(row, key)
                trial.driver.store([key], [row], _soon())
                key = _key(int(random.integers(24)))
                lease = trial.driver.lookup([key], _soon(), 0.05)
                trial.load([key], [row], is_raced=with_discards)
                if random.integers(2):
                    lease.release()
                if with_discards and random.integers(3) == 0:
                    trial.driver.discard([key], _soon())
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def a_closed_driver_is_unavailable(make: Make) -> None:
    """After ``close`` every call says so; closing again does nothing."""
    with _Trial(make) as trial:
        trial.store([_key(1)])
        trial.driver.close()
        trial.driver.close()
        gone = [Status.UNAVAILABLE]
        trial.expect("storing", trial.driver.store([_key(2)], [0], _soon()), gone)
        trial.expect("loading", trial.driver.load([_key(1)], [0], _soon()), gone)
        trial.expect("looking", trial.driver.lookup([_key(1)], _soon(), 1.0).statuses, gone)
        trial.expect("discarding", trial.driver.discard([_key(1)], _soon()), gone)


CHECKS: tuple[Callable[[Make], None], ...] = (
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
    """A driver over a buffer whose payloads are what their keys say."""

    def __init__(self, make: Make) -> None:
        self.buffer = RecordBuffer(8, PAYLOAD)
        self.driver = make(self.buffer)

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def fill(self, row: int, key: bytes, content: bytes | None = None) -> None:
        self.buffer.payloads[row] = _payload(content or key)
        pack_record(self.buffer.rows[row], key, _FINGERPRINT, PAYLOAD)

    def store(self, keys: Sequence[bytes]) -> list[Status]:
        for row, key in enumerate(keys):
            self.fill(row, key)
        return self.driver.store(keys, range(len(keys)), _soon())

    def load(self, keys: Sequence[bytes], rows: Sequence[int] | None = None, *, is_raced: bool = False) -> list[Status]:
        """Load, and prove what is said to be there; in a race with discards it may be mixed, and has to show it."""
        rows = range(len(keys)) if rows is None else rows
        for row in rows:
            self.buffer.records[row] = 0xEE
        statuses = self.driver.load(keys, rows, _soon())
        for key, row, status in zip(keys, rows, statuses):
            verifies = verify_record(self.buffer.rows[row], key, _FINGERPRINT) == PAYLOAD
            is_right = verifies and np.array_equal(self.buffer.payloads[row], _payload(key))
            is_mixed = is_raced and not verifies and (self.buffer.records[row] != 0xEE).any()
            if status is Status.OK and not (is_right or is_mixed):
                raise CheckFailed(f"OK, but the bytes of {key.hex()[:8]} are not those that were stored")
        return statuses

    def expect(self, what: str, got: object, wanted: object) -> None:
        if (list(got) if isinstance(got, tuple) else got) != wanted:
            raise CheckFailed(f"{what}: {wanted} was expected, the driver said {got}")


def _key(i: int) -> bytes:
    return sha256(str(i).encode()).digest()


def _payload(key: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.resize(np.frombuffer(key, np.uint8), PAYLOAD)


def _soon() -> float:
    return monotonic() + 5.0
