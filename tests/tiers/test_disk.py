"""The disk tier: found again by the next process, and every fault of the file a miss. Wrong bytes: never."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from time import monotonic
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda.errors import BadInput
from kvpagoda.pages import PAGE
from kvpagoda.tiers import RecordBuffer, Status, Tier, disk_driver
from kvpagoda.tiers.disk import FILE_NAME
from kvpagoda.tiers.records import HEADER_NBYTES
from kvpagoda.tiers.slots import SlotDriver
from raises import raises

OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE, REJECTED = Status
PRINT = sha256(b"layout").digest()
KEYS = [sha256(bytes([i])).digest() for i in range(64)]
PAYLOAD, SLOTS = 9000, 8
SIZE = RecordBuffer.nbytes_for(1, PAYLOAD)
NBYTES = PAGE + SLOTS * SIZE
KILLING = Path(__file__).parent / "killing.py"


class Disk:
    """A tier on a file; every record that it calls OK is compared."""

    def __init__(self, folder: Path, nbytes: int = NBYTES, print_: bytes = PRINT, payload: int = PAYLOAD) -> None:
        self.path, self.buffer = folder / FILE_NAME, RecordBuffer(SLOTS, payload)
        self.driver: SlotDriver = disk_driver(folder, self.buffer, nbytes, admit_all=True)
        self.tier = Tier(self.driver, self.buffer, print_)

    def store(self, which: Sequence[int]) -> list[Status]:
        rows = self.buffer.acquire(len(which))
        for row, i in zip(rows, which):
            self.buffer.payloads[row] = self.content(i)
        statuses = self.tier.store([KEYS[i] for i in which], rows, monotonic() + 5).result(6)
        self.buffer.release(rows)
        return statuses

    def load(self, which: Sequence[int]) -> list[Status]:
        rows = self.buffer.acquire(len(which))
        statuses = self.tier.load([KEYS[i] for i in which], rows, monotonic() + 5).result(6)
        for row, i, status in zip(rows, which, statuses):
            assert status is not OK or np.array_equal(self.buffer.payloads[row], self.content(i))
        self.buffer.release(rows)
        self.driver.check()
        return statuses

    def content(self, i: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.random.default_rng(i).integers(0, 256, self.buffer.payload_nbytes, np.uint8)

    def close(self) -> None:
        assert self.tier.close(monotonic() + 5)


ALL = range(SLOTS)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with a full tier that nobody has open."""
    disk = Disk(tmp_path)
    assert disk.store(ALL) == [OK] * SLOTS
    disk.close()
    return tmp_path


def start(slot: int) -> int:
    return PAGE + slot * SIZE


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_the_next_process_finds_what_was_stored(filled: Path) -> None:
    again = Disk(filled)
    assert again.load(ALL) == [OK] * SLOTS
    assert again.tier.discard(KEYS[:2], monotonic() + 5).result() == [OK, OK]
    again.close()
    third = Disk(filled)
    assert third.load(ALL) == [MISS, MISS] + [OK] * (SLOTS - 2)
    third.close()


def test_no_other_layout_finds_it(filled: Path) -> None:
    other = Disk(filled, print_=KEYS[9])
    assert other.load(ALL) == [CORRUPT] * SLOTS
    other.close()


def test_files_are_private_and_bounded(filled: Path) -> None:
    path = filled / FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == NBYTES
    assert path.stat().st_blocks * 512 >= NBYTES  # preallocated
    folder = filled / "deep" / "er"
    disk_driver(folder, RecordBuffer(1, 10), 3 * PAGE).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_budget_keeps_what_fits(filled: Path) -> None:
    larger = Disk(filled, NBYTES + 4 * SIZE)
    assert larger.load(ALL) == [OK] * SLOTS and larger.store(range(10, 14)) == [OK] * 4
    larger.close()
    smaller = Disk(filled, PAGE + 3 * SIZE + 5)
    assert Counter(smaller.load(ALL)) == {OK: 3, MISS: SLOTS - 3}
    assert smaller.path.stat().st_size == PAGE + 3 * SIZE
    smaller.close()


def test_records_of_another_size_start_an_empty_file(filled: Path) -> None:
    other = Disk(filled, payload=PAYLOAD + PAGE)
    assert other.load(ALL) == [MISS] * SLOTS and other.store([1]) == [OK] and other.load([1]) == [OK]
    other.close()


def test_every_flipped_bit_of_a_header_is_a_miss(filled: Path) -> None:
    """In a file that is opened afterwards, every bit; in one that is open, every byte."""
    path = filled / FILE_NAME
    for bit in range(8 * HEADER_NBYTES):
        flip(path, start(2) + bit // 8, bit % 8)
        buffer = RecordBuffer(1, PAYLOAD)
        driver = disk_driver(filled, buffer, NBYTES)
        assert len(driver._slots) == SLOTS - 1 and driver.stats().num_records == SLOTS - 1, bit
        driver.close()
        flip(path, start(2) + bit // 8, bit % 8)
    for at in range(HEADER_NBYTES):
        disk = Disk(filled)
        flip(path, start(2) + at)
        assert sorted(disk.load(ALL), key=str) == [CORRUPT] + [OK] * (SLOTS - 1)
        missing = disk.load(ALL).index(MISS)
        assert disk.store([missing]) == [OK] and disk.load([missing]) == [OK]
        disk.close()


def test_every_flipped_bit_of_the_superblock_is_an_empty_file(filled: Path) -> None:
    kept = (filled / FILE_NAME).read_bytes()
    for bit in range(8 * 40):
        flip(filled / FILE_NAME, bit // 8, bit % 8)
        driver = disk_driver(filled, RecordBuffer(1, PAYLOAD), NBYTES)
        assert driver.stats().num_records == 0
        driver.close()
        (filled / FILE_NAME).write_bytes(kept)


@pytest.mark.parametrize("is_open", [True, False])
def test_random_damage_is_never_a_wrong_byte(filled: Path, is_open: bool) -> None:
    random, seen = np.random.default_rng(11), Counter[Status]()
    for _ in range(60):
        disk = Disk(filled)
        disk.store(ALL)
        if not is_open:
            disk.close()
        with disk.path.open("r+b", buffering=0) as file:
            for _ in range(int(random.integers(1, 4))):
                at, length = int(random.integers(PAGE, NBYTES)), int(random.integers(1, 6000))
                file.seek(at)
                file.write(random.bytes(min(length, NBYTES - at)))
        if not is_open:
            disk = Disk(filled)
        seen.update(disk.load(ALL))
        disk.close()
    assert seen[OK] and seen[CORRUPT] and set(seen) <= {OK, CORRUPT, MISS}


@pytest.mark.parametrize("is_open", [True, False])
def test_a_truncated_file_is_a_miss(filled: Path, is_open: bool) -> None:
    kept = (filled / FILE_NAME).read_bytes()
    lengths = [
        0,
        1,
        PAGE - 1,
        PAGE,
        start(1),
        start(2) + 1,
        start(2) + 127,
        start(2) + 128,
        start(3) - PAGE,
        NBYTES - PAGE,
    ]
    for length in lengths:
        (filled / FILE_NAME).write_bytes(kept)
        disk = Disk(filled) if is_open else None
        os.truncate(filled / FILE_NAME, length)
        disk = disk or Disk(filled)
        statuses = disk.load(ALL)
        whole = max(0, length - PAGE) // SIZE
        assert Counter(statuses)[OK] == whole, (length, statuses)
        assert disk.store(range(20, 20 + SLOTS)) == [OK] * SLOTS and disk.load(range(20, 20 + SLOTS)) == [OK] * SLOTS
        disk.close()


def test_swapped_records_are_found_out(filled: Path) -> None:
    def swap() -> None:
        data = bytearray((filled / FILE_NAME).read_bytes())
        one, two = slice(start(1), start(2)), slice(start(4), start(5))
        data[one], data[two] = data[two], data[one]
        with (filled / FILE_NAME).open("r+b") as file:
            file.write(data)

    disk = Disk(filled)
    swap()
    assert Counter(disk.load(ALL)) == {OK: SLOTS - 2, CORRUPT: 2}
    disk.store(ALL)
    disk.close()
    swap()
    disk = Disk(filled)
    assert disk.load(ALL) == [OK] * SLOTS  # they say themselves what they are
    disk.close()


def test_swapped_files_are_found_out(filled: Path) -> None:
    other = Disk(filled / "other")
    other.store(range(20, 20 + SLOTS))
    disk = Disk(filled)
    other.close()
    data = other.path.read_bytes()
    with disk.path.open("r+b") as file:
        file.write(data)
    assert disk.load(ALL) == [CORRUPT] * SLOTS
    disk.close()


def test_pages_that_reach_the_disk_in_any_order_are_never_a_wrong_byte(tmp_path: Path) -> None:
    """Power loss, as nothing is synced: each page of the file is from another moment."""
    disk, random, moments, seen = Disk(tmp_path), np.random.default_rng(2), [], Counter[Status]()
    for i in range(3 * SLOTS):
        disk.store([i])
        if i % 3 == 0:
            disk.tier.discard([KEYS[i]], monotonic() + 5).result()
        moments.append(np.fromfile(disk.path, np.uint8).reshape(-1, PAGE))
    disk.close()
    for round_ in range(150):
        recent = moments[-2 - round_ % SLOTS :]
        mixed = np.stack([recent[random.integers(len(recent))][page] for page in range(len(recent[0]))])
        mixed.tofile(disk.path)
        again = Disk(tmp_path)
        seen.update([*again.load(ALL), *again.load(range(8, 16)), *again.load(range(16, 24))])
        assert again.store([40]) == [OK] and again.load([40]) == [OK]
        again.close()
    assert min(seen[OK], seen[MISS], seen[CORRUPT]) > 100 and len(seen) == 3


def test_a_folder_has_one_process(filled: Path) -> None:
    disk = Disk(filled)
    with raises(BadInput, needed=102400, available=os.strerror(errno.EAGAIN)):
        Disk(filled)
    code = (
        "import sys; from kvpagoda.errors import BadInput; from kvpagoda.tiers import *\n"
        f"try: disk_driver({str(filled)!r}, RecordBuffer(1, {PAYLOAD}), {NBYTES})\n"
        "except BadInput: sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
    assert disk.load(ALL) == [OK] * SLOTS
    disk.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_links_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep me")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FILE_NAME).symlink_to(victim)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / FILE_NAME)
    (tmp_path / "c" / FILE_NAME).mkdir(parents=True)
    for name, why in (("a", errno.ELOOP), ("b", None), ("c", errno.EISDIR), ("victim", errno.EEXIST)):
        with raises(BadInput, needed=102400, available=os.strerror(why) if why else ANY):
            disk_driver(tmp_path / name, RecordBuffer(1, PAYLOAD), 100 * 1024)
    assert victim.read_bytes() == b"keep me"


def test_a_file_that_others_have_a_hand_in_is_not_touched(filled: Path) -> None:
    """A second name, another owner, or a mode that lets others in: told before anything is written."""
    path, kept = filled / FILE_NAME, (filled / FILE_NAME).read_bytes()
    other = filled / "elsewhere"
    tried = {
        "has 2 names": (lambda: other.hardlink_to(path), other.unlink),
        "mode 640": (lambda: path.chmod(0o640), lambda: path.chmod(0o600)),
        "mode 602": (lambda: path.chmod(0o602), lambda: path.chmod(0o600)),
    }
    if os.geteuid() == 0:
        tried["user 65534"] = (lambda: os.chown(path, 65534, -1), lambda: os.chown(path, 0, -1))
    for why, (spoil, mend) in tried.items():
        spoil()
        for nbytes in (NBYTES, 2 * NBYTES, NBYTES // 2):
            with raises(BadInput, needed=nbytes, available=ANY) as caught:
                disk_driver(filled, RecordBuffer(1, PAYLOAD), nbytes)
            assert why in caught.value.available
        assert path.read_bytes() == kept
        mend()
    again = Disk(filled)
    assert again.load(ALL) == [OK] * SLOTS
    again.close()


FORKED = """
import signal, warnings
warnings.simplefilter("ignore")
def make():
    buffer = RecordBuffer(2, 9000)
    return buffer, disk_driver(sys.argv[1], buffer, '1MiB')
buffer, driver = make()
tier, key, rows = Tier(driver, buffer, bytes(32)), bytes(32), buffer.acquire(2)
print(names(tier.store([key], rows[:1], late).result()))
told, tell = os.pipe()
locks = [buffer._lock, driver._lock, tier._changed]
for lock in locks: lock.acquire()  # as another thread may have them
child = os.fork()
if not child:
    signal.alarm(20)
    said = names(tier.load([key], rows[1:], late).result() + list(tier.lookup([key], late).result().statuses))
    said += ' ' + names(driver.store([key], [0], late)) + f' {tier.stats().is_available} {tier.stats().last_fault}'
    tier.close(late); driver.close()
    os.write(tell, said.encode())
    os._exit(0) if sys.argv[2] == "ends" else time.sleep(20)
for lock in locks: lock.release()
print(os.read(told, 999).decode())
if sys.argv[2] == "ends": os.waitpid(child, 0)
print(names(tier.load([key], rows[1:], late).result()))
try: make()
except BadInput as error: print('locked')
tier.close(late)
make()[1].close()
print('free')
if sys.argv[2] != "ends": os.kill(child, 9)
"""


@pytest.mark.parametrize("child", ["ends", "lives on"])
def test_a_forked_child_has_no_tier_and_no_lock(tmp_path: Path, child: str) -> None:
    """Its calls are UNAVAILABLE at once, and neither its end nor its life changes whose the folder is."""
    told = in_a_process(FORKED, tmp_path, child).splitlines()
    gone = "UNAVAILABLE UNAVAILABLE UNAVAILABLE False a forked process does not use the tiers of its parent"
    assert told == ["OK", gone, "OK", "locked", "free"]


def in_a_process(code: str, *arguments: object) -> str:
    prelude = (
        "import os, resource, sys, time\n"
        "from kvpagoda.errors import BadInput\n"
        "from kvpagoda.tiers import *\n"
        "late = time.monotonic() + 9\n"
        "def names(statuses): return ' '.join(one.name for one in statuses)\n"
    )
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_no_room_when_it_is_opened_is_told(tmp_path: Path) -> None:
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try: disk_driver(sys.argv[1], RecordBuffer(1, 9000), '1MiB')
except BadInput as error: print(error)
"""
    assert "File too large" in in_a_process(code, tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_size == 0


def test_a_disk_that_is_full_later_is_still_read(tmp_path: Path) -> None:
    code = """
buffer = RecordBuffer(2, 9000)
driver = disk_driver(sys.argv[1], buffer, 200_000)
tier = Tier(driver, buffer, bytes(32), faults=2, pause=60)
keys, rows = [bytes([i]) * 32 for i in range(9)], buffer.acquire(2)
buffer.payloads[:] = 5
print(names(tier.store(keys[:2], rows, late).result()))
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, -1))
for i in range(2, 6): print(names(tier.store(keys[i:i + 1], rows[:1], late).result()))
buffer.payloads[:] = 0
print(names(tier.load(keys[:2], rows, late).result()), (buffer.payloads == 5).all())
driver.check()
"""
    told = in_a_process(code, tmp_path).splitlines()
    assert told == ["OK OK", *["UNAVAILABLE"] * 4, "OK OK True"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code = """
if os.geteuid() == 0: os.setuid(65534)
try: disk_driver(sys.argv[1], RecordBuffer(1, 9000), '1MiB')
except BadInput as error: print(error)
"""
    try:
        assert "Permission denied" in in_a_process(code, tmp_path)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("number", [5, 28, 30], ids=["EIO", "ENOSPC", "EROFS"])
def test_errors_of_the_disk_are_misses(filled: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk = Disk(filled)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        assert disk.store([30]) == [UNAVAILABLE]
        assert Counter(disk.load(ALL)) == {OK: SLOTS - 1, MISS: 1}  # one had to go for it
        patched.setattr(os, "preadv", fail)
        assert set(disk.load(ALL)) == {UNAVAILABLE, MISS}
    assert disk.store([30]) == [OK] and disk.load([30]) == [OK]
    disk.close()


def test_a_write_of_nothing_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda file, data, at: 0)
        assert disk.store([1]) == [UNAVAILABLE]
    assert disk.store([1]) == [OK] and disk.load([1]) == [OK]
    disk.close()


def test_writes_that_come_back_short_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda file, data, at: preadv(file, [data[0][:777]], at))
    disk = Disk(tmp_path)
    assert disk.store(ALL) == [OK] * SLOTS and disk.load(ALL) == [OK] * SLOTS
    disk.close()


def test_blocks_that_are_used_once_do_not_push_others_out(tmp_path: Path) -> None:
    buffer = RecordBuffer(SLOTS, PAYLOAD)
    driver = disk_driver(tmp_path, buffer, NBYTES)
    later = monotonic() + 5
    assert driver.store(KEYS[:SLOTS], ALL, later) == [OK] * SLOTS
    assert driver.store(KEYS[20:28], ALL, later) == [REJECTED] * 8
    assert driver.store(KEYS[20:21], [0], later) == [OK]
    assert driver.stats().num_records == SLOTS and driver.stats().evicted == 1
    driver.close()


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [("points", 27), ("random", 60), ("direct", 40), pytest.param("random", 1000, marks=pytest.mark.slow)],
)
def test_a_killed_writer_leaves_no_wrong_byte(tmp_path: Path, mode: str, rounds: int) -> None:
    """And what it said was stored is there, as long as nothing had to go."""
    if mode == "direct":
        try:
            disk_driver(tmp_path, RecordBuffer(1, PAYLOAD), NBYTES, direct=True).close()
        except BadInput as error:
            pytest.skip(str(error))
    command = [sys.executable, str(KILLING), str(tmp_path / "killed"), mode, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    made, records, acknowledged = map(int, done.stdout.split())
    assert made == rounds and (mode == "points" or (records > rounds and acknowledged > rounds))
