"""The Protocol of tier drivers, one of the three replaceable parts of the library, the types of its calls, and what
drivers share: closing while calls are in progress, and forked processes.

A forked child has the memory of its parent, but not its threads, and must not use its files and locks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from threading import Lock
from typing import Protocol
from weakref import WeakSet


class Status(Enum):
    """The outcome for one key of a call. Any status except OK means that the block must be computed again."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    REJECTED = "rejected"


FAULTS = frozenset({Status.TIMEOUT, Status.UNAVAILABLE})


@dataclass(frozen=True)
class Lease:
    """The result of a lookup: ``statuses[i]`` is OK if the driver has the record of ``keys[i]``.

    The driver does not evict these records until the time ``until`` (of ``time.monotonic``) or ``release``. That is a
    hint: only the status of a load says whether a record could be read.
    """

    keys: tuple[bytes, ...]
    statuses: tuple[Status, ...]
    until: float
    release: Callable[[], None] = lambda: None

    @property
    def num_found(self) -> int:
        """The number of keys before the first one that was not found."""
        return len(list(takewhile(lambda status: status is Status.OK, self.statuses)))


@dataclass(frozen=True)
class DriverStats:
    """What a driver holds. ``nbytes`` includes records that are being written and never exceeds ``capacity_nbytes``."""

    num_records: int
    nbytes: int
    capacity_nbytes: int
    num_leases: int = 0
    evicted: int = 0
    rejected: int = 0


class Driver(Protocol):
    """Stores whole records under opaque keys of 32 bytes. Its calls are synchronous, batched and thread-safe.

    A driver is made over a ``RecordBuffer``, which it may register with a device or an engine. ``rows`` are the numbers
    of records in that buffer; a driver touches them only during the call. Every call returns one status per key, in the
    order of ``keys``, and raises nothing for I/O errors. ``deadline`` is a time of ``time.monotonic``: work not begun
    by then is TIMEOUT.

    A record is written once: storing a key that the driver already has returns OK and changes nothing. A record is
    invisible until it is complete. A driver whose records outlive the process finds the complete ones again.
    ``kvpagoda.testing`` tests all of this.

    A tier passes all records of a request in one call, so that it costs one round trip. A driver that prefers smaller
    calls has an attribute ``part_nbytes``: the bytes per call.

    A driver whose store has shards, parts that can fail one by one, has a method ``shard_of(key)`` that returns the
    name of the shard that has ``key``, without I/O and without waiting for a lock. A tier then leaves alone only the
    shard that fails. A call that asks several shards returns before the deadline what the working ones answered.
    """

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Store the records ``rows`` under ``keys``, parents before children. OK does not promise that they stay."""

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """Find which ``keys`` have records; these are not evicted for ``hold`` seconds, or until ``Lease.release``."""

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Read the records of ``keys`` into ``rows``. The content of a row whose status is not OK is undefined.

        So is that of a record that is discarded during the call: the caller must verify the checksum of what was read.
        """

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Delete the records of ``keys``, leased or not: OK, or MISS for a key without a record."""

    def stats(self) -> DriverStats:
        """Return the counts, without I/O."""

    def close(self) -> None:
        """Free all resources. Later calls return UNAVAILABLE; a second ``close`` does nothing."""


class Calls:
    """Counts the calls in progress. After ``close`` none begins, and the last one to finish calls ``end``, once."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._lock, self._count, self.is_closed = end, Lock(), 0, False

    def begin(self) -> bool:
        """Return whether a call may begin; if so, the caller must call ``done`` when it is over."""
        with self._lock:
            self._count += not self.is_closed
            return not self.is_closed

    def done(self) -> None:
        """Note that a call is over."""
        with self._lock:
            self._count -= 1
            is_last = self.is_closed and not self._count
        if is_last:
            self._end()

    def close(self) -> None:
        """Let no more calls begin. A second ``close`` does nothing."""
        if self.begin():
            self.is_closed = True
            self.done()


class Forkable(Protocol):
    """An object that a child process must disable before it continues."""

    def after_fork(self) -> None:
        """Disable this object in the child, where no other thread runs. Threads of the parent may hold its locks."""


_ALIVE: WeakSet[Forkable] = WeakSet()


def watch_forks(one: Forkable) -> None:
    """Make every child process that is forked from now on call ``one.after_fork()`` first, as long as ``one`` lives."""
    _ALIVE.add(one)


def _begin_child() -> None:
    for forkable in [*_ALIVE]:
        forkable.after_fork()


os.register_at_fork(after_in_child=_begin_child)
