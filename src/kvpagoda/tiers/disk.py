"""A driver that keeps records in one preallocated file, and what such drivers have left in a folder.

    | superblock, one page | slot 0 | slot 1 | ...        a slot: one record, or a first page of zeros

The index is rebuilt from the headers when the file is opened. A write of a record begins with its second page; its
first page, with the header and the checksum of the whole record, comes last. So whatever a crash, a power loss or
another program leaves in a slot, in whatever order it reached the disk, verifies only if it is the record that was
stored. Nothing is ever synced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvpagoda.errors import BadInput
from kvpagoda.pages import PAGE, Bytes, pages
from kvpagoda.tiers.records import HEADER_NBYTES, RecordBuffer, read_header, xxh3_128
from kvpagoda.tiers.slots import SlotDriver
from kvpagoda.units import format_bytes, parse_bytes, path_of

FILE_NAME = "records.slab"
_SUPERBLOCK = struct.Struct("<8sIIQ")


class SlabFile:
    """The medium of ``disk_driver``: slots in one file, which one process at a time has locked."""

    def __init__(self, folder: Path, buffer: RecordBuffer, nbytes: int, *, direct: bool = False) -> None:
        self.slot_nbytes = buffer.record_nbytes
        self.num_slots = (nbytes - PAGE) // self.slot_nbytes
        if self.num_slots < 1:
            raise BadInput(f"{format_bytes(nbytes)} holds no record of {format_bytes(self.slot_nbytes)}; give it more")
        self._rows = buffer.rows
        self._zeros = pages(PAGE)
        self._files: list[int] = []
        path = folder / FILE_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            found = _proven(self._files[0])
            if direct:
                self._files.append(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW))
                if not os.path.samestat(found, _proven(self._files[1])):
                    raise OSError(0, f"another {FILE_NAME} took its place")
            self._open(self._files[0])
        except OSError as error:
            self.close()
            raise BadInput(
                f"no disk tier of {format_bytes(nbytes)} in {folder}: {error.strerror}; give it a folder that no other "
                f"process uses, with room, on a file system {'with O_DIRECT' if direct else 'that can be written'}",
                needed=nbytes, available=error.strerror,
            ) from error  # fmt: skip
        self._data = self._files[-1]
        self._is_dirty = bytearray(b"\1" * self.num_slots)  # whether the first page of the slot may not be zero

    def _open(self, file: int) -> None:
        """Lock the file and set its size. Its records are kept if its slots have the same size as now."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        old_size = os.fstat(file).st_size
        start = _SUPERBLOCK.pack(b"KVPGSLAB", 1, PAGE, self.slot_nbytes)
        start += xxh3_128(start)
        size = PAGE + self.num_slots * self.slot_nbytes
        is_ours = os.pread(file, len(start), 0) == start
        os.ftruncate(file, min(size, old_size) if is_ours else 0)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError:
            os.ftruncate(file, min(size, old_size) if is_ours else 0)
            raise
        os.pwrite(file, start, 0)

    def scan(self) -> list[tuple[bytes, int]]:
        """See ``Medium``. Reads one header per slot."""
        found: dict[bytes, int] = {}
        for slot in range(self.num_slots):
            try:
                header = os.pread(self._files[0], HEADER_NBYTES, self._start(slot))
            except OSError:
                continue
            self._is_dirty[slot] = any(header)
            parsed = read_header(header)
            if parsed is not None and parsed[1] <= self.slot_nbytes - HEADER_NBYTES:
                found.setdefault(parsed[0], slot)
        return list(found.items())

    def write(self, slot: int, row: int) -> bool:
        """See ``Medium``. Clears the old header first; without O_DIRECT, writes the new one last."""
        record, start = self._rows[row], self._start(slot)
        if self._is_dirty[slot]:
            self._put(self._zeros, start)
        self._is_dirty[slot] = True
        head = len(record) if len(self._files) > 1 else PAGE  # with O_DIRECT a kill does not tear a write
        self._put(record[head:], start + head)
        self._put(record[:head], start)
        return True

    def read(self, slot: int, row: int) -> bool:
        """See ``Medium``."""
        record, start = self._rows[row], self._start(slot)
        while len(record):
            done = os.preadv(self._data, [record.data], start)
            if not done:
                return False
            record, start = record[done:], start + done
        return True

    def clear(self, slot: int) -> bool:
        self._put(self._zeros, self._start(slot))
        self._is_dirty[slot] = False
        return True

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _start(self, slot: int) -> int:
        return PAGE + slot * self.slot_nbytes

    def _put(self, data: Bytes, start: int) -> None:
        """Write all of ``data`` at offset ``start`` of the file. Raises OSError."""
        while len(data):
            done = os.pwrite(self._data, data.data, start)
            if not done:
                raise OSError(errno.EIO, "nothing was written")
            data, start = data[done:], start + done


def _slot_nbytes_of(file: int) -> int:
    """Return the bytes of a slot in the ``file`` of a disk tier; 0 if it is not one."""
    start = os.pread(file, _SUPERBLOCK.size + 16, 0)
    fields, digest = start[: _SUPERBLOCK.size], start[_SUPERBLOCK.size :]
    if len(digest) < 16 or xxh3_128(fields) != digest:
        return 0
    nbytes: int = _SUPERBLOCK.unpack(fields)[3]
    return 0 if nbytes % PAGE else nbytes


def _proven(file: int) -> os.stat_result:
    """Return the ``fstat`` of a regular file that only this user can open and that has one name.

    Raises OSError for any other file, before it is read or written.
    """
    found = os.fstat(file)
    faults = {
        "is not a regular file": not stat.S_ISREG(found.st_mode),
        f"belongs to user {found.st_uid}, not to {os.geteuid()}": found.st_uid != os.geteuid(),
        f"has {found.st_nlink} names": found.st_nlink != 1,
        f"is open to others (mode {stat.S_IMODE(found.st_mode):o}, not 600)": found.st_mode & 0o077 != 0,
    }
    for what, is_so in faults.items():
        if is_so:
            raise OSError(0, f"{FILE_NAME} {what}; it is not used")
    return found


def disk_driver(
    folder: str | os.PathLike[str],
    buffer: RecordBuffer,
    nbytes: int | str,
    *,
    direct: bool = False,
    admit_all: bool = False,
) -> SlotDriver:
    """Return a driver that keeps records in a file, which the next process that opens it finds again.

    Most blocks are used once, so a full file admits a record in place of another only when it is stored a second time.
    The file is preallocated, so opening it may take a moment; opening reads one header for each record.

    Args:
        folder: of the file.
        buffer: the records.
        nbytes: the most bytes of the file.
        direct: bypass the page cache (O_DIRECT).
        admit_all: a full file admits every record.

    Raises:
        BadInput: another user owns the file or can open it, it has a second name, another process uses it, or there is
            no room, no write access or no O_DIRECT.
    """
    slab = SlabFile(path_of(folder, "the folder of a disk tier"), buffer, parse_bytes(nbytes), direct=direct)
    return SlotDriver(slab, remember=0 if admit_all else slab.num_slots)


@dataclass(frozen=True)
class TierFile:
    """The file of one disk tier: its size, its complete records, and whether a process uses it."""

    path: Path
    nbytes: int
    num_records: int
    record_nbytes: int
    is_in_use: bool


def tier_files(folder: str | os.PathLike[str]) -> list[TierFile]:
    """Return the files of disk tiers in ``folder`` and below it, one for each engine and rank. Raises BadInput, OSError.

    Reads one header for each record.
    """
    found = []
    for path in _paths(folder):
        with path.open("rb") as opened:
            slot, nbytes = _slot_nbytes_of(opened.fileno()), os.fstat(opened.fileno()).st_size
            starts = range(PAGE, nbytes - slot + 1, slot) if slot else ()
            headers = [os.pread(opened.fileno(), HEADER_NBYTES, start) for start in starts]
            count = sum(any(header) and read_header(header) is not None for header in headers)
            found.append(TierFile(path, nbytes, count, slot, not _locks(opened.fileno(), fcntl.LOCK_SH)))
    return found


def delete_tier_files(folder: str | os.PathLike[str]) -> int:
    """Delete the files of disk tiers in ``folder`` and below it; return their bytes. The next engine begins empty.

    Raises BadInput, before anything is deleted, if a process uses one of them; OSError.
    """
    nbytes, paths = 0, _paths(folder)
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) for path in paths]
        busy = [str(path) for path, file in zip(paths, files) if not _locks(file.fileno(), fcntl.LOCK_EX)]
        if busy:
            raise BadInput(f"{busy[0]} is used by a process; stop it first. Nothing was deleted", needed=busy)
        for path, file in zip(paths, files):
            nbytes += os.fstat(file.fileno()).st_blocks * 512
            path.unlink()
    return nbytes


def _paths(folder: str | os.PathLike[str]) -> list[Path]:
    root = path_of(folder, "the folder of disk tiers")
    if not root.is_dir():
        raise BadInput(f"no folder {root}; give the FOLDER of disk:FOLDER:SIZE", needed=str(root))
    return [path for path in sorted(root.rglob(FILE_NAME)) if path.is_file() and not path.is_symlink()]


def _locks(file: int, how: int) -> bool:
    """Return whether ``file`` could be locked, which lasts until it is closed."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
