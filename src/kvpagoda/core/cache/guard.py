"""The lock of a cache: one thread at a time, no use after an interrupt in the middle of a change, and little use while
it sleeps. At the end of a call it has observers told what happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvpagoda.errors import Asleep, BadInput, ConcurrentUse, NeedsReset

# -- the guard -------------------------------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")


class Shut:
    """What calls find in place of the lock ``own`` of a cache that sleeps: it cannot be taken. ``aside``: what the cache
    needs to wake."""

    __slots__ = ("_own", "aside")

    def __init__(self, own: Any, aside: Any) -> None:
        self._own, self.aside = own, aside

    def acquire(self, blocking: bool) -> bool:
        """Return False."""
        return False

    def release(self) -> None:
        """Release the lock, for the call that shut the cache."""
        self._own.release()


class Telling:
    """What calls find in place of the lock of a cache that tells its observers what happened: it cannot be taken."""

    __slots__ = ()

    def acquire(self, blocking: bool) -> bool:
        """Return False."""
        return False


class Guard:
    """The lock of one cache, whether its state is consistent, and whether it sleeps.

    ``lock``: what a call takes; while the cache sleeps, a ``Shut``. ``own``: the lock itself, for calls that are allowed
    then. ``noted``: what observers are to be told at the end of a call, by ``tell`` (``observers.py``). ``over``: the
    namespaces that are over their quotas, of which ``evict_over`` evicts something before that (``capacity.py``).

    ``is_torn`` is set before the first of several assignments that belong together, and cleared after the last. If an
    exception leaves it set, the cache refuses every call but ``close`` and ``reset``.

    Calls prepare first, where anything may raise. The code between setting and clearing is short and allocates nothing,
    so only a signal, such as Ctrl-C, can interrupt it."""

    __slots__ = ("evict_over", "is_torn", "lock", "noted", "over", "own", "tell")

    def __init__(self) -> None:
        self.own, self.is_torn = RLock(), False
        self.lock: Any = self.own
        self.noted = deque[Any]()
        self.over: Collection[object] = ()
        self.tell: Callable[[], None]
        self.evict_over: Callable[[], None]

    @property
    def aside(self) -> Any:
        """What the cache needs to wake; None if it is awake."""
        return self.lock.aside if isinstance(self.lock, Shut) else None

    def shut(self, aside: Any) -> None:
        """Let calls that need memory raise Asleep from now on."""
        self.lock = Shut(self.own, aside)

    def open(self) -> None:
        """Let all calls run again."""
        self.lock = self.own

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

    def end(self, lock: Any) -> None:
        """Keep namespaces within their quotas, and have observers told what is noted, unless a change stopped halfway;
        release ``lock``."""
        try:
            if not self.is_torn:
                for _ in range(2):  # of a request's end an observer may be told that ends a pin then, as hints do
                    if self.over and self.lock is self.own:
                        self.evict_over()
                    self.tell()
        finally:
            lock.release()

    def raise_refused(self, call: str) -> None:
        """Raise what says why ``lock`` could not be taken. ``call``: the name of the refused method."""
        if isinstance(self.lock, Telling):
            if not self.own.acquire(blocking=False):  # another thread's call is telling
                self.raise_busy(call)
            self.own.release()
            hint = "do it after the call that it is told of"
            raise BadInput.with_hint(f"an observer called {call} of the cache that it observes", hint, needed=call)
        if self.lock is not self.own:
            raise Asleep.with_hint(f"this cache sleeps, so {call} has no memory", "call wake() first", needed=call)
        self.raise_busy(call)

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
    """Wrap ``method`` so that it raises ConcurrentUse while another thread is in a method of the same cache, Asleep while
    the cache sleeps, and NeedsReset after an interrupt in the middle of a change."""

    @wraps(method)
    def guarded(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard = self._guard
        if not guard.lock.acquire(False):
            guard.raise_refused(method.__qualname__)
        try:
            if guard.is_torn:
                guard.raise_torn()
            return method(self, *args, **kwargs)
        finally:
            if guard.noted or guard.over:
                guard.end(guard.lock)
            else:
                guard.lock.release()

    return guarded


def even_asleep(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Wrap ``method``, which needs no memory, like ``exclusive``, but let it run also while the cache sleeps."""
    return _at_any_time(method)


def either_way(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Wrap ``method`` like ``even_asleep``, but let it run also after an interrupt in the middle of a change."""
    return _at_any_time(method, even_torn=True)


def _at_any_time(method: Callable[Concatenate[G, P], T], *, even_torn: bool = False) -> Callable[Concatenate[G, P], T]:
    @wraps(method)
    def guarded(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard = self._guard
        if not guard.own.acquire(False):
            guard.raise_busy(method.__qualname__)
        try:
            if guard.is_torn and not even_torn:
                guard.raise_torn()
            return method(self, *args, **kwargs)
        finally:
            if guard.noted or guard.over:
                guard.end(guard.own)
            else:
                guard.own.release()

    return guarded
