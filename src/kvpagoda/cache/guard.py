"""The lock of a cache: one thread at a time, and no use after an interrupt in the middle of a change."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvpagoda.errors import ConcurrentUse, NeedsReset

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """The lock of one cache, and whether its state is consistent.

    ``is_torn`` is set before the first of several assignments that belong together, and cleared after the last. If an
    exception leaves it set, the cache refuses every call but ``close`` and ``reset``.

    Calls prepare first, where anything may raise. The code between setting and clearing is short and allocates nothing,
    so only a signal, such as Ctrl-C, can interrupt it."""

    __slots__ = ("is_torn", "lock")

    def __init__(self) -> None:
        self.lock, self.is_torn = RLock(), False

    def change(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``call`` with ``is_torn`` set, and return its result. ``call`` must either do all that it says, or raise
        an Exception and change nothing."""
        self.is_torn = True
        try:
            result = call(*args, **kwargs)
        except Exception:
            self.is_torn = False
            raise
        self.is_torn = False
        return result

    def raise_busy(self, call: str) -> None:
        """Raise ConcurrentUse. ``call``: the name of the refused method."""
        raise ConcurrentUse(
            f"another thread is inside this cache; {call} must wait for it: one owner at a time, or a lock of the "
            f"caller's own around every call"
        )

    def raise_torn(self) -> None:
        """Raise NeedsReset."""
        raise NeedsReset(
            "an interrupt stopped a change of this cache halfway, so that the owners of its blocks are not certain; "
            "call reset(), which forgets every request and everything cached, or close it"
        )


class Guarded(Protocol):
    """An object whose public methods are wrapped by ``exclusive`` and its kin."""

    _guard: Guard


G = TypeVar("G", bound=Guarded)


def exclusive(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Wrap ``method`` so that it raises ConcurrentUse while another thread is in a method of the same cache, and
    NeedsReset after an interrupt in the middle of a change."""
    return _locked(method)


def either_way(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Wrap ``method`` like ``exclusive``, but let it run also after an interrupt in the middle of a change."""
    return _locked(method, even_torn=True)


def _locked(method: Callable[Concatenate[G, P], T], *, even_torn: bool = False) -> Callable[Concatenate[G, P], T]:
    @wraps(method)
    def guarded(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard = self._guard
        if not guard.lock.acquire(False):
            guard.raise_busy(method.__qualname__)
        try:
            if guard.is_torn and not even_torn:
                guard.raise_torn()
            return method(self, *args, **kwargs)
        finally:
            guard.lock.release()

    return guarded
