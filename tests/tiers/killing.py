"""Kill a process that writes to a disk tier, with SIGKILL, and see what the next one finds. A program: no threads, many forks.

    killing.py FOLDER random ROUNDS     at random moments, opening included
    killing.py FOLDER direct ROUNDS     the same, past the page cache
    killing.py FOLDER points            before, in the middle of and after every write that an open or a store makes

Prints the number of rounds, of records found and of records acknowledged; fails on a wrong byte or a lost acknowledged record.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

import numpy as np

from kvpagoda.tiers import RecordBuffer, Status, disk_driver
from kvpagoda.tiers.disk import SlabFile
from kvpagoda.tiers.records import pack_record, verify_record
from kvpagoda.tiers.slots import SlotDriver

PRINT, NUM_KEYS, PAYLOAD = bytes(32), 48, 60_000
KEYS = [sha256(bytes([i])).digest() for i in range(NUM_KEYS)]
CONTENT = np.random.default_rng(1).integers(0, 256, (NUM_KEYS, PAYLOAD), np.uint8)
BUFFER = RecordBuffer(1, PAYLOAD)
ROW = BUFFER.rows[0]
ROOMY, TIGHT = ((NUM_KEYS + 1) * BUFFER.record_nbytes, 9 * BUFFER.record_nbytes)


def open_driver(folder: Path, nbytes: int) -> SlotDriver:
    return disk_driver(folder, BUFFER, nbytes, admit_all=True, direct=sys.argv[2] == "direct")


def store(driver: SlotDriver, i: int) -> Status:
    BUFFER.payloads[0] = CONTENT[i]
    pack_record(ROW, KEYS[i], PRINT, PAYLOAD)
    return driver.store([KEYS[i]], [0], time.monotonic() + 10)[0]


def whole(driver: SlotDriver) -> set[int]:
    """What is there, and right; what is there and wrong must be seen to be."""
    found = set()
    for i in range(NUM_KEYS):
        if (
            driver.load([KEYS[i]], [0], time.monotonic() + 10) == [Status.OK]
            and verify_record(ROW, KEYS[i], PRINT) == PAYLOAD
        ):
            assert np.array_equal(BUFFER.payloads[0], CONTENT[i]), f"wrong bytes of key {i}"
            found.add(i)
    return found


def in_a_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(1)


def random_kills(folder: Path, rounds: int) -> None:
    random = np.random.default_rng(rounds)
    records = acknowledged = 0
    for round_ in range(rounds):
        is_roomy = bool(round_ % 2)  # nothing is evicted: what was acknowledged has to be there
        place, nbytes = (folder / "roomy", ROOMY) if is_roomy else (folder / "tight", TIGHT)
        if is_roomy:
            rmtree(place, ignore_errors=True)
        told, tell = os.pipe()
        seed = int(random.integers(2**31))

        def write(
            place: Path = place, nbytes: int = nbytes, is_roomy: bool = is_roomy, tell: int = tell, seed: int = seed
        ):  # type: ignore[no-untyped-def]
            mine, driver = np.random.default_rng(seed), open_driver(place, nbytes)
            while True:
                i = int(mine.integers(NUM_KEYS))
                if not is_roomy and mine.integers(8) == 0:
                    driver.discard([KEYS[i]], time.monotonic() + 10)
                elif store(driver, i) is Status.OK:
                    os.write(tell, bytes([i]))

        child = in_a_child(write)
        acked = {os.read(told, 1)[0] for _ in range(random.integers(6))}  # so far, however slow the machine is
        time.sleep(float(random.random()) * 0.008)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"
        os.close(tell)
        with os.fdopen(told, "rb") as pipe:
            acked |= set(pipe.read())
        driver = open_driver(place, nbytes)
        found = whole(driver)
        driver.check()
        driver.close()
        assert not is_roomy or acked <= found, f"lost: {sorted(acked - found)}"
        assert (place / "records.slab").stat().st_size <= nbytes
        records += len(found)
        acknowledged += len(acked)
    print(rounds, records, acknowledged)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def named_points(folder: Path) -> None:
    """A store that replaces a record, killed around each of its writes; an open, killed around each of its steps."""
    rounds = 0
    full = set(range(8))
    for step, name in enumerate(("clear", "payload", "header")):
        for moment in ("before", "half", "after"):
            rmtree(folder, ignore_errors=True)
            driver = open_driver(folder, TIGHT)
            assert {store(driver, i) for i in full} == {Status.OK}
            driver.close()

            def replace(step: int = step, moment: str = moment) -> None:
                driver, put, done = open_driver(folder, TIGHT), SlabFile._put, 0

                def dying(slab: SlabFile, data: np.ndarray, start: int) -> None:  # type: ignore[type-arg]
                    nonlocal done
                    done += 1
                    if done <= step or moment == "after":
                        put(slab, data, start)
                    elif moment == "half":
                        put(slab, data[: len(data) // 2 if step else 64], start)
                    if done == step + 1:
                        kill()

                SlabFile._put = dying  # type: ignore[method-assign]
                store(driver, 20)

            child = in_a_child(replace)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"{moment} {name} was not reached"
            driver = open_driver(folder, TIGHT)
            is_listed, found = KEYS[20] in driver._slots, whole(driver)
            is_untouched, is_complete = (name, moment) == ("clear", "before"), (name, moment) == ("header", "after")
            assert is_listed == (name == "header" and moment != "before"), (
                "visible before it was complete, or not after"
            )
            assert (20 in found) == is_complete, (name, moment, found)
            assert (full <= found) == is_untouched and len(full - found) <= 1, (name, moment, found)
            assert store(driver, 30) is Status.OK and 30 in whole(driver)
            driver.check()
            driver.close()
            rounds += 1
    for call in ("ftruncate", "posix_fallocate", "pwrite"):
        for moment in ("before", "after"):
            for old in (None, ROOMY, TIGHT):
                rmtree(folder, ignore_errors=True)
                kept = set()
                if old:
                    driver = open_driver(folder, old)
                    kept = {i for i in full if store(driver, i) is Status.OK}
                    driver.close()

                def reopen(call: str = call, moment: str = moment) -> None:
                    real = getattr(os, call)

                    def dying(*arguments: object) -> None:
                        if moment == "after":
                            real(*arguments)
                        kill()

                    setattr(os, call, dying)
                    open_driver(folder, TIGHT)

                child = in_a_child(reopen)
                assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"{moment} {call} was not reached"
                driver = open_driver(folder, TIGHT)
                assert whole(driver) == kept, (call, moment, old)
                driver.close()
                rounds += 1
    print(rounds, 0, 0)


if __name__ == "__main__":
    if sys.argv[2] == "points":
        named_points(Path(sys.argv[1]))
    else:
        random_kills(Path(sys.argv[1]), int(sys.argv[3]))
