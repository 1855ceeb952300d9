"""Make the n-th call inside the library raise: a signal at any call, or MemoryError where memory can really run out.

``Interruption(n, is_point, error)`` is a context. Inside, the n-th point of this thread for which ``is_point`` returns
a name raises ``error`` instead of the call. Worker threads are not interrupted. ``count``: the points seen so far;
``where``: the name of the point that raised.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

import kvpagoda

Point = Callable[[FrameType, str, Any], str]
"""(frame, event of ``sys.setprofile``, its argument) -> what is called, or "" where nothing may be raised."""

SOURCE = str(Path(kvpagoda.__file__).parent) + "/"
LIBRARIES = tuple(str(Path(str(module.__file__)).parent) + "/" for module in (numpy, torch))

CAN_FAIL = (
    "kvpagoda.core.memory.arena:Arena.copy",
    "kvpagoda.core.memory.arena:Arena.reset",
    "kvpagoda.core.memory.arena:Arena.poison",
    "kvpagoda.core.memory.host_copy:copy_to_host",
    "kvpagoda.core.memory.host_copy:copy_from_host",
    "kvpagoda.pages:pages",
    "kvpagoda.tiers.tier:Tier.store",
    "kvpagoda.tiers.tier:Tier.lookup",
    "kvpagoda.tiers.tier:Tier.load",
    "kvpagoda.tiers.tier:Tier.discard",
)
"""Functions of the library that can run out of memory, as module:name. So can every call of numpy and torch from inside
the library that is not in ``CANNOT_FAIL``: zeroing a sector (``fill_``), a copy, a new array."""

CANNOT_FAIL = {
    "item", "tolist", "any", "all", "min", "max", "argmin", "argmax", "sum", "count_nonzero", "searchsorted", "fill",
    "view", "reshape", "ravel", "data_ptr", "numel", "is_contiguous", "setflags", "dtype", "tobytes", "__len__", "array_equal",
    "divmod", "is_floating_point", "is_complex", "size", "stride", "dim", "as_strided", "numpy", "current_stream",
}  # fmt: skip
"""Calls of numpy and torch that need almost no memory: they read a number, or return a view of the same memory."""


@cache
def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(SOURCE)


@cache
def is_of_a_library(code: CodeType) -> bool:
    return code.co_filename.startswith(LIBRARIES)


@cache
def failing_functions() -> dict[CodeType, str]:
    """Return code object -> name for the functions of ``CAN_FAIL``."""
    found = {}
    for name in CAN_FAIL:
        module, _, path = name.partition(":")
        thing = import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
        found[thing.__code__] = path
    return found


def any_call(frame: FrameType, event: str, argument: Any) -> str:
    """Points are all calls of the library's functions, and all resumptions of its generators. Not ``__del__``, whose
    errors Python ignores.
    """
    if event != "call" or not is_ours(frame.f_code) or frame.f_code.co_name == "__del__":
        return ""
    return getattr(frame.f_code, "co_qualname", frame.f_code.co_name)


def failing_call(frame: FrameType, event: str, argument: Any) -> str:
    """Points are the calls that can really run out of memory; see ``CAN_FAIL``."""
    if event == "call":
        code, caller = frame.f_code, frame.f_back
        if code in failing_functions():
            return failing_functions()[code]
        if caller is None or not is_ours(caller.f_code) or not is_of_a_library(code) or code.co_name in CANNOT_FAIL:
            return ""
        return f"{code.co_name} in {caller.f_code.co_name}"
    if event == "c_call" and is_ours(frame.f_code):
        owner = getattr(argument, "__self__", None)
        module = argument.__module__ or type(owner).__module__
        name = argument.__name__
        if module.partition(".")[0] in ("numpy", "torch") and name not in CANNOT_FAIL:
            return f"{name} in {frame.f_code.co_name}"
    return ""


class Interruption:
    """Raises ``error`` at the ``n``-th point; with ``n`` 0 only counts the points."""

    def __init__(self, n: int, is_point: Point, error: type[BaseException]) -> None:
        self._n, self._is_point, self.error = n, is_point, error
        self.count, self.where = 0, ""
        self.is_ignored = False
        """Whether Python itself ignored the error, as it does when it closes an unused generator."""

    def __enter__(self) -> Interruption:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.unraisablehook = self._hook

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        if self.where and isinstance(what.exc_value, self.error):
            self.is_ignored = True
        else:
            self._hook(what)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.where or event not in ("call", "c_call"):
            return
        what = self._is_point(frame, event, argument)
        if what:
            self.count += 1
            if self.count == self._n:
                self.where = what
                raise self.error(f"call {self._n}: {what}")


class Hung(Exception):
    """A block took longer than ``at_most`` allows."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Hung in this thread, which must be the main one, if the block takes longer."""
    if threading.current_thread() is not threading.main_thread():  # pragma: no cover
        yield
        return

    def hung(*_: object) -> None:
        raise Hung(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
