"""A transfer between processes of one machine and one user, over memory that they share. Linux.

The exported memory is a file without a name (``memfd_create``), which others open through ``/proc``: the system frees it when
the last process that has it open ends, also after a kill. Nothing is left behind, and there is no name to guess.
"""

from __future__ import annotations

import mmap
import os
from typing import Any
from weakref import finalize

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.handover.transfer import numbers_in
from kvpagoda.pages import Bytes, pages
from kvpagoda.units import format_bytes, parse_bytes

_KIND, _NAME = "shared memory", "kvpagoda-handover"
_MOST_OPEN = 16


class SharedMemory:
    """A ``Transfer`` over shared memory. The processes must see each other in ``/proc``: one user, one namespace of
    processes.

    Args:
        nbytes: of the exported memory, as a number or as text such as ``"1GiB"``; 0 on a side that only receives.

    Raises:
        BadInput: on systems without ``memfd_create``.
    """

    def __init__(self, nbytes: int | str = 0) -> None:
        size = parse_bytes(nbytes) if nbytes else 0
        if not hasattr(os, "memfd_create"):
            raise BadInput("shared memory for hand-overs needs memfd_create (Linux); use another transfer")
        self._file = os.memfd_create(_NAME) if size else -1
        self.memory: Bytes = np.empty(0, np.uint8)
        if size:
            self._close = finalize(self, os.close, self._file)  # also of one that is forgotten
            os.ftruncate(self._file, size)
            self.memory = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        self._landing: Bytes = np.empty(0, np.uint8)
        self._others: dict[tuple[int, ...], Bytes] = {}

    def address(self) -> dict[str, Any]:
        """See ``Transfer``. The number of the process, and that of its open file."""
        inode = os.fstat(self._file).st_ino if self._file >= 0 else 0
        return {"kind": _KIND, "process": os.getpid(), "file": self._file, "inode": inode}

    def landing(self, nbytes: int) -> Bytes:
        """See ``Transfer``. Ordinary memory, kept for the next call."""
        if len(self._landing) < nbytes:
            self._landing = pages(nbytes, large=True)
        return self._landing[:nbytes]

    def read(self, address: dict[str, Any], offset: int, into: Bytes) -> None:
        """See ``Transfer``."""
        into[:] = self._inside(address, offset, len(into))

    def write(self, address: dict[str, Any], offset: int, data: Bytes) -> None:
        """See ``Transfer``."""
        self._inside(address, offset, len(data))[:] = data

    def close(self) -> None:
        """See ``Transfer``. The memory lives on as long as a process has it open."""
        if self._file >= 0:
            self._close()
            self._file = -1
        self._others.clear()

    def _inside(self, address: dict[str, Any], offset: int, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes from ``offset`` on of the memory at ``address``. Raises OSError."""
        memory = self._open(address)
        if not 0 <= offset <= len(memory) - nbytes:
            raise OSError(f"bytes {offset}..{offset + nbytes} of {format_bytes(len(memory))} of shared memory")
        return memory[offset : offset + nbytes]

    def _open(self, address: dict[str, Any]) -> Bytes:
        process, number, inode = key = tuple(numbers_in(address, _KIND, "process", "file", "inode"))
        path = f"/proc/{process}/fd/{number}"
        if key in self._others and not _is_open(path, inode):  # its bytes are mapped here, but nobody answers for them
            del self._others[key]
        if key not in self._others:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                raise OSError(f"{path} is not the memory of a hand-over; its sender has ended")
            file = os.open(path, os.O_RDWR)
            try:
                found = os.fstat(file)
                if found.st_ino != inode:
                    raise OSError(f"{path} is the memory of another sender")
                memory = np.frombuffer(mmap.mmap(file, found.st_size), np.uint8)
            finally:
                os.close(file)
            if len(self._others) >= _MOST_OPEN:
                del self._others[next(iter(self._others))]
            self._others[key] = memory
        return self._others[key]


def _is_open(path: str, inode: int) -> bool:
    """Return whether a process still has file ``inode`` open as ``path``."""
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False
