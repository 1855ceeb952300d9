"""One owner at a time, and no use of a cache that was interrupted in the middle of a change."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvpagoda.errors import ConcurrentUse, NeedsReset

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """``is_torn``: set before the first of several assignments that belong together, and cleared after the last. What an
    exception finds set stays set: the cache then refuses everything but ``close`` and ``reset``.

    Calls prepare first, where anything may raise; what is between the two assignments is short and allocates nothing. So only
    a signal, such as Ctrl-C, that falls into it tears a cache.
    """

    __slots__ = ("is_torn", "lock")

    def __init__(self) -> None:
        self.lock, self.is_torn = RLock(), False

    def change(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``call``, which either does all it says or raises an Exception and changes nothing."""
        self.is_torn = True
        try:
            result = call(*args, **kwargs)
        except Exception:
            self.is_torn = False
            raise
        self.is_torn = False
        return result

    def raise_busy(self, call: str) -> None:
        """Raises ConcurrentUse."""
        raise ConcurrentUse(
            f"another thread is inside this cache; {call} must wait for it: one owner at a time, or a lock of the caller's "
            f"own around every call"
        )

    def raise_torn(self) -> None:
        """Raises NeedsReset."""
        raise NeedsReset(
            "an interrupt came in the middle of a change of this cache, so that its blocks have no certain owners; call "
            "reset(), which forgets every request and everything cached, or close it"
        )


class Guarded(Protocol):
    """An object whose public methods are ``exclusive``."""

    _guard: Guard


G = TypeVar("G", bound=Guarded)


def exclusive(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """``method``, which raises ConcurrentUse while another thread is in a method of the same cache, and NeedsReset where the
    cache was torn."""

    @wraps(method)
    def guarded(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard = self._guard
        if not guard.lock.acquire(False):
            guard.raise_busy(method.__qualname__)
        try:
            if guard.is_torn:
                guard.raise_torn()
            return method(self, *args, **kwargs)
        finally:
            guard.lock.release()

    return guarded


def either_way(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, exclusive, for a cache that was torn as well."""

    @wraps(method)
    def guarded(self: Guarded, /, *args: Any, **kwargs: Any) -> Any:
        if not self._guard.lock.acquire(False):
            self._guard.raise_busy(method.__qualname__)
        try:
            return method(self, *args, **kwargs)
        finally:
            self._guard.lock.release()

    return guarded
