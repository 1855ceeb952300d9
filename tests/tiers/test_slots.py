"""Drivers over slots, in memory and in a file, are right; and what they do beyond that: order, leases, admission."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep

import numpy as np
import pytest

from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.testing import DRIVER_CHECKS, PAYLOAD, Make
from kvpagoda.tiers import Driver, RecordBuffer, Status, disk_driver, host_driver
from kvpagoda.tiers.slots import HostMemory, SlotDriver
from raises import raises

OK, MISS, REJECTED, TIMEOUT = Status.OK, Status.MISS, Status.REJECTED, Status.TIMEOUT
SIZE = RecordBuffer.nbytes_for(1, PAYLOAD)
KEYS = [sha256(bytes([i])).digest() for i in range(64)]


def has_direct(folder: Path) -> bool:
    try:
        disk_driver(folder / "probe", RecordBuffer(1, 10), "64KiB", direct=True).close()
    except BadInput:
        return False
    return True


@pytest.fixture(params=["host", "disk", "disk, direct"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "host":
        return lambda buffer: host_driver(buffer, 16 * SIZE)
    direct = "direct" in request.param
    if direct and not has_direct(tmp_path):
        pytest.skip("no O_DIRECT where temporary files are")
    return lambda buffer: disk_driver(tmp_path, buffer, 17 * SIZE, direct=direct)


@pytest.mark.parametrize("check", DRIVER_CHECKS)
def test_the_driver_conforms(check: Callable[[Make], None], make: Make) -> None:
    made: list[SlotDriver] = []

    def kept(buffer: RecordBuffer) -> Driver:
        driver = make(buffer)
        assert isinstance(driver, SlotDriver)
        made.append(driver)
        return driver

    check(kept)
    made[0].check()


def soon() -> float:
    return monotonic() + 5


def driver_of(slots: int, remember: int = 0) -> tuple[SlotDriver, RecordBuffer]:
    buffer = RecordBuffer(8, 100)
    return SlotDriver(HostMemory(buffer, slots * buffer.record_nbytes), remember=remember), buffer


def found(driver: SlotDriver, keys: list[bytes]) -> list[int]:
    """Which of KEYS are there, without using them."""
    return [KEYS.index(key) for key in keys if key in driver._slots]


def test_of_one_prefix_the_deepest_go_first() -> None:
    driver, _ = driver_of(4)
    assert driver.store(KEYS[:4], [0, 1, 2, 3], soon()) == [OK] * 4
    driver.store([KEYS[9]], [0], soon())
    assert found(driver, KEYS) == [0, 1, 2, 9]
    driver.lookup(KEYS[:2], soon(), 0.0)
    driver.store(KEYS[10:12], [0, 1], soon())
    assert found(driver, KEYS) == [0, 1, 10, 11]


def test_a_batch_larger_than_the_driver_keeps_the_parents() -> None:
    driver, _ = driver_of(3)
    assert driver.store(KEYS[:5], [0, 1, 2, 3, 4], soon()) == [OK, OK, OK, REJECTED, REJECTED]
    assert found(driver, KEYS) == [0, 1, 2] and driver.stats().rejected == 2
    assert driver.store([KEYS[2], *KEYS[7:10]], [0, 1, 2, 3], soon()) == [OK, OK, OK, REJECTED]
    assert found(driver, KEYS) == [2, 7, 8]
    driver.check()


def test_a_lease_keeps_records_until_it_is_released_or_over() -> None:
    driver, _ = driver_of(2)
    driver.store(KEYS[:2], [0, 1], soon())
    lease = driver.lookup(KEYS[:2], soon(), 60.0)
    short = driver.lookup(KEYS[:1], soon(), 0.05)
    assert driver.store(KEYS[2:3], [0], soon()) == [REJECTED] and driver.stats().num_leases == 2
    lease.release()
    assert driver.store(KEYS[2:4], [0, 1], soon()) == [OK, REJECTED] and found(driver, KEYS) == [0, 2]
    sleep(0.06)
    assert not driver.stats().num_leases
    assert driver.store(KEYS[3:5], [0, 1], soon()) == [OK, OK] and found(driver, KEYS) == [3, 4]
    short.release()
    driver.check()


def test_a_full_driver_takes_in_what_comes_again() -> None:
    driver, _ = driver_of(2, remember=2)
    assert driver.store(KEYS[:2], [0, 1], soon()) == [OK, OK]
    assert driver.store(KEYS[2:4], [0, 1], soon()) == [REJECTED, REJECTED] and found(driver, KEYS) == [0, 1]
    assert driver.store(KEYS[3:4], [0], soon()) == [OK] and found(driver, KEYS) == [0, 3]
    driver.store(KEYS[4:6], [0, 1], soon())  # 2 is forgotten now
    assert driver.store(KEYS[2:3], [0], soon()) == [REJECTED]


class Slow(HostMemory):
    """Moves when it is let."""

    def __init__(self, buffer: RecordBuffer, slots: int) -> None:
        super().__init__(buffer, slots * buffer.record_nbytes)
        self.may, self.begun, self.is_closed = Event(), Event(), False

    def read(self, slot: int, row: int) -> bool:
        self.begun.set()
        assert self.may.wait(5)
        return super().read(slot, row)

    def close(self) -> None:
        self.is_closed = True


def test_a_slot_that_is_read_is_not_given_away() -> None:
    buffer = RecordBuffer(4, 100)
    medium = Slow(buffer, 1)
    driver = SlotDriver(medium)
    buffer.payloads[0] = 7
    driver.store(KEYS[:1], [0], soon())
    thread = Thread(target=driver.load, args=(KEYS[:1], [1], soon()))
    thread.start()
    assert medium.begun.wait(5)
    assert driver.store(KEYS[1:2], [2], soon()) == [REJECTED]
    assert driver.discard(KEYS[:1], soon()) == [OK]
    assert driver.store(KEYS[1:2], [2], soon()) == [REJECTED] and driver.stats().nbytes == buffer.record_nbytes
    driver.check()
    driver.close()
    assert not medium.is_closed
    medium.may.set()
    thread.join(5)
    assert (buffer.payloads[1] == 7).all() and medium.is_closed
    driver.check()


def test_no_room_for_one_record_is_told() -> None:
    with raises(BadInput, needed=12288, available=4096):
        host_driver(RecordBuffer(1, PAYLOAD), 4096)


def test_check_names_what_is_wrong() -> None:
    driver, _ = driver_of(4)
    driver._free.append(0)
    with raises(CheckFailed, available=[0]):
        driver.check()


def test_random_calls_keep_the_books_right() -> None:
    random = np.random.default_rng(7)
    driver, buffer = driver_of(6, remember=4)
    leases = []
    for _ in range(2000):
        keys = [KEYS[i] for i in random.permutation(12)[: random.integers(1, 5)]]
        what = random.integers(5)
        if what == 0:
            leases.append(driver.lookup(keys, soon(), float(random.choice([0.0, 0.001, 60.0]))))
        elif what == 1 and leases:
            leases.pop(int(random.integers(len(leases)))).release()
        elif what == 2:
            driver.discard(keys, soon())
        elif what == 3:
            rows = list(range(len(keys)))
            for row, key in zip(rows, keys):
                buffer.records[row] = key[0]
            driver.store(keys, rows, soon())
        else:
            for row, (key, status) in enumerate(zip(keys, driver.load(keys, range(len(keys)), soon()))):
                assert status is MISS or (status is OK and (buffer.records[row] == key[0]).all())
        driver.check()
