"""Forked processes: a child has the memory of its parent, but neither its threads nor a right to its files and locks."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """What a child process must put out of use before it goes on."""

    def after_fork(self) -> None:
        """Called in the child, where no other thread runs. Locks may be held by threads that do not exist there."""


_ALIVE: WeakSet[Forkable] = WeakSet()


def watch_forks(one: Forkable) -> None:
    """From now on a child process calls ``one.after_fork()`` when it begins, as long as ``one`` lives."""
    _ALIVE.add(one)


def _begin_child() -> None:
    for one in [*_ALIVE]:
        one.after_fork()


os.register_at_fork(after_in_child=_begin_child)
