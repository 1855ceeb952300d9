"""What tiers have left in a folder, and how it is deleted: for people and scripts, beside the engines that use it."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvpagoda.errors import BadInput
from kvpagoda.memory.pages import PAGE
from kvpagoda.tiers.disk import FILE_NAME, slot_nbytes_of
from kvpagoda.tiers.records import HEADER_NBYTES, read_header


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
            slot, nbytes = slot_nbytes_of(opened.fileno()), os.fstat(opened.fileno()).st_size
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
    root = Path(folder)
    if not root.is_dir():
        raise BadInput(f"no folder {root}; give the FOLDER of disk:FOLDER:SIZE")
    return [path for path in sorted(root.rglob(FILE_NAME)) if path.is_file() and not path.is_symlink()]


def _locks(file: int, how: int) -> bool:
    """Return whether ``file`` could be locked, which lasts until it is closed."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
