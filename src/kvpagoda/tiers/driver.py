"""What a driver of a tier is. One of the three replaceable parts of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from threading import Lock
from typing import Protocol


class Status(Enum):
    """What became of one item. Everything but OK means: compute it again."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    REJECTED = "rejected"


FAULTS = frozenset({Status.TIMEOUT, Status.UNAVAILABLE})


@dataclass(frozen=True)
class Lease:
    """What a lookup found: ``statuses[i]`` is OK if the record of ``keys[i]`` is there.

    It stays until ``until`` (of ``time.monotonic``) or ``release``. A hint all the same: what a load says counts.
    """

    keys: tuple[bytes, ...]
    statuses: tuple[Status, ...]
    until: float
    release: Callable[[], None] = lambda: None

    @property
    def num_found(self) -> int:
        """How many keys from the first on are there without a gap."""
        return len(list(takewhile(lambda status: status is Status.OK, self.statuses)))


@dataclass(frozen=True)
class DriverStats:
    """What a driver holds. ``nbytes``, records that are being written included, never exceeds ``capacity_nbytes``."""

    num_records: int
    nbytes: int
    capacity_nbytes: int
    num_leases: int = 0
    evicted: int = 0
    rejected: int = 0


class Driver(Protocol):
    """Keeps whole records under opaque keys of 32 bytes: synchronous, batched, thread-safe.

    A driver is made over a ``RecordBuffer``, which it may register with a device or an engine; ``rows`` are numbers of its
    records, and a driver touches them only while its call lasts. Every call returns one status for each key, in their
    order, and raises nothing for I/O. ``deadline`` is a time of ``time.monotonic``: what was not begun by then is TIMEOUT.
    Records are written once: a key that is there is OK and stays as it was. A record is invisible until it is complete,
    and a driver that outlives its process finds complete records again. ``kvpagoda.tiers.conformance`` is the proof.

    A tier gives a driver all that it has to move in one call, so that a call costs one round trip. A driver that would rather
    have less at a time says so with an attribute ``part_nbytes``.
    """

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Keep the records ``rows`` under ``keys``, parents before children. OK is no promise that they stay."""

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """Which of ``keys`` are there; these are not evicted for ``hold`` seconds, or until ``Lease.release``."""

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """Read the records of ``keys`` into ``rows``. A row whose status is not OK holds anything.

        So may one that is discarded meanwhile: what was read counts once its checksum does.
        """

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Drop the records of ``keys``, leased or not: OK, or MISS for what was not there."""

    def stats(self) -> DriverStats:
        """Counts, without I/O."""

    def close(self) -> None:
        """Give everything back. Calls after it say UNAVAILABLE; a second one does nothing."""


class Calls:
    """The calls that a driver is in: none begins after ``close``, and then the last one that is over calls ``end``, once."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._lock, self._count, self.is_closed = end, Lock(), 0, False

    def begin(self) -> bool:
        """Whether a call may begin; ``done`` ends it then."""
        with self._lock:
            self._count += not self.is_closed
            return not self.is_closed

    def done(self) -> None:
        """A call is over."""
        with self._lock:
            self._count -= 1
            is_last = self.is_closed and not self._count
        if is_last:
            self._end()

    def close(self) -> None:
        """Let no more calls begin; a second time does nothing."""
        if self.begin():
            self.is_closed = True
            self.done()
