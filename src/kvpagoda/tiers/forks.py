"""Forked processes: a child has the memory of its parent, but not its threads, and must not use its files and locks."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


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
