"""Page-locked host memory: what a device copies to and from at the speed of the bus, without the processor.

    memory   | locked: the device reaches it | ahead: a thread locks it now | not yet: copied through the processor |
             0                           locked                          wanted

Locking gives every page memory and keeps it there, which takes 0.04 s a GiB of written pages and 0.7 s of others (measured,
H100). So memory is locked from its start on, piece by piece and by a thread of its own, as far as it is used and as much
again; and never more than a budget.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Protocol
from weakref import finalize, ref

import numpy as np

from kvpagoda.pages import PAGE, Bytes
from kvpagoda.threads import submit
from kvpagoda.units import format_bytes

PIECE = 64 << 20
"""Bytes that are locked at a time."""
_log = logging.getLogger(__name__)


class LockRuntime(Protocol):
    """What locks pages. Both raise RuntimeError if they cannot."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock ``nbytes`` bytes from ``address`` on, and let devices read and write them at these addresses."""

    def unregister(self, address: int) -> None:
        """Undo ``register(address, ..)``."""


def machine_nbytes() -> int:
    """Return the bytes of memory that this machine has; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


class _LockedRange:
    """Watched memory from ``begin`` to ``end``: locked up to ``locked``, to be locked up to ``wanted``; in ``pieces``."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = ref(memory)
        self.begin = self.locked = self.wanted = memory.ctypes.data
        self.end = self.begin + memory.nbytes
        self.pieces: list[tuple[int, int]] = []
        self.is_running = False


class PageLocks:
    """Locks watched memory ahead of its use, at most ``most`` bytes in all. Thread-safe.

    A piece that is refused ends the locking until something is unlocked, and is logged once; what is not locked is copied
    through the processor. What is locked is unlocked with its memory, or by ``close``. A forked child has nothing locked."""

    def __init__(self, runtime: LockRuntime, most: int) -> None:
        self._runtime, self.most = runtime, most
        self._process = os.getpid()
        self.nbytes = 0
        """Bytes that are locked now."""
        self._lock = RLock()  # reentrant: memory may be collected, and unlocked, at any point of its own thread
        self._ranges: dict[int, _LockedRange] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._is_full = self._has_told = False

    def watch(self, memory: Bytes) -> None:
        """Lock ``memory``, contiguous uint8 ``[n]`` on a page, from its start on: the first piece now, further ones as they
        are used, until it is collected. Of a view, the memory that it is a part of. Watching it again changes nothing; memory
        that begins within a page stays as it is."""
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        address = memory.ctypes.data
        with self._lock:
            known = self._ranges.get(address)
            is_known = known is not None and known.end >= address + memory.nbytes
            if not memory.nbytes or address % PAGE or is_known or os.getpid() != self._process:
                return
            if known is not None:  # collected, but not unlocked yet
                self._unlock(known)
            one = self._ranges[address] = _LockedRange(memory)
        finalize(memory, self._forget, one).atexit = False
        self._want(one, one.begin + 1)

    def num_rows(self, table: Bytes, last: int) -> int:
        """Return how many of the first rows of ``table``, uint8 ``[n, width]`` in watched memory, are locked; and have rows up
        to ``last``, which are about to be used, and as many again locked soon."""
        begin = table.ctypes.data
        if os.getpid() != self._process:
            return 0
        with self._lock:
            one = next((one for one in self._ranges.values() if one.begin <= begin < one.end), None)
            if one is None:
                return 0
            step, width = table.strides[0], table.shape[1]
            self._want(one, begin + last * step + width)
            room = one.locked - begin - width
            return 0 if room < 0 else min(len(table), 1 + room // max(1, step))

    def close(self) -> None:
        """Unlock everything. The caller has waited for copies. Memory that is used afterwards is locked again."""
        with self._lock:
            for one in self._ranges.values():
                one.wanted = one.begin
                self._unlock(one)
        self.settle()

    def settle(self) -> None:
        """Wait until everything that was wanted is locked or refused."""
        while self._thread is not None and any(one.is_running for one in [*self._ranges.values()]):
            self._thread.submit(int).result()

    def _want(self, one: _LockedRange, end: int) -> None:
        """Have ``one`` locked up to ``end``, rounded up to pieces, and as much again."""
        used = end - one.begin
        wanted = min(one.end, one.begin + -(-used // PIECE) * PIECE + (used if used > PIECE else 0))
        with self._lock:
            one.wanted = max(one.wanted, wanted)
            if one.is_running or one.locked >= one.wanted or self._is_full:
                return
            one.is_running = True
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "kvpagoda-lock")
            try:
                submit(self._thread, partial(self._advance, one))
            except RuntimeError:  # the system has no thread to start; the next use tries again
                one.is_running = False

    def _advance(self, one: _LockedRange) -> None:
        """Lock ``one`` up to what is wanted, piece by piece: the thread."""
        while True:
            memory = one.memory()  # keeps it while it is locked
            with self._lock:
                begin = one.locked
                nbytes = min(PIECE, one.end - begin)
                is_over = memory is None or one.locked >= one.wanted or self._is_full
                if is_over or self.nbytes + nbytes > self.most:
                    one.is_running = False
                    if not is_over:
                        self._refuse(f"{format_bytes(self.most)} are locked, and Limits.page_locked allows no more")
                    return
                self.nbytes += nbytes
            try:
                self._runtime.register(begin, nbytes)
            except Exception as error:
                with self._lock:
                    self.nbytes -= nbytes
                    one.is_running = False
                    self._refuse(str(error) or repr(error))
                return
            with self._lock:
                one.pieces.append((begin, nbytes))
                if one.locked == begin < one.wanted:
                    one.locked = begin + nbytes
                else:  # it was unlocked meanwhile, but for this piece
                    self._unlock(one)
            del memory

    def _refuse(self, why: str) -> None:
        self._is_full = True
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "no more host memory is page-locked than %s (%s); the rest is copied through the processor",
                format_bytes(self.nbytes), why,
            )  # fmt: skip

    def _unlock(self, one: _LockedRange) -> None:
        """Unlock what is locked of ``one``."""
        pieces, one.pieces, one.locked = one.pieces, [], one.begin
        for address, nbytes in pieces:
            self.nbytes -= nbytes
            self._is_full = False  # there is room again
            with _logged():
                self._runtime.unregister(address)

    def _forget(self, one: _LockedRange) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            self._unlock(one)
            if self._ranges.get(one.begin) is one:
                del self._ranges[one.begin]


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        _log.warning("page-locked memory could not be unlocked: %s", error)
