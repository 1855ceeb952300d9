"""What drivers (``kvpagoda.abc.Driver``) share: closing while calls are in progress, and forked processes.

A forked child has the memory of its parent, but not its threads, and must not use its files and locks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Protocol
from weakref import WeakSet

from kvpagoda.abc import Driver, DriverStats, Lease, Status

__all__ = ["FAULTS", "Calls", "Driver", "DriverStats", "Forkable", "Lease", "Status", "watch_forks"]


FAULTS = frozenset({Status.TIMEOUT, Status.UNAVAILABLE})


class Calls:
    """Counts the calls in progress. After ``close`` none begins.

    Args:
        end: called once, by the last one to finish.
    """

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
        with self._lock:
            is_last = not self.is_closed and not self._count
            self.is_closed = True
        if is_last:
            self._end()


class Forkable(Protocol):
    """An object that a child process must disable before it continues."""

    def after_fork(self) -> None:
        """Disable this object in the child, where no other thread runs. Threads of the parent may hold its locks."""


_ALIVE: WeakSet[Forkable] = WeakSet()


def watch_forks(one: Forkable) -> None:
    """Make every child process that is forked from now on call ``after_fork()`` first.

    Args:
        one: whose method is called, as long as it lives.
    """
    _ALIVE.add(one)


def _begin_child() -> None:
    for forkable in [*_ALIVE]:
        forkable.after_fork()


os.register_at_fork(after_in_child=_begin_child)
