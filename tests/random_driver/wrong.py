"""Operations: calls with invalid arguments. Each raises a typed error and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpagoda import Namespace
from kvpagoda.errors import KVPagodaError

from .faults import Fault
from .life import close, started

if TYPE_CHECKING:
    from .driver import Driver

OPENS: tuple[Callable[[int], dict[str, Any]], ...] = (
    lambda n: {"reserve": n * 1.5},
    lambda n: {"reserve": float(n)},
    lambda n: {"reserve": str(n)},
    lambda n: {"reserve": np.int32(n + 7)},
    lambda n: {"reserve": np.int64(n)},
    lambda n: {"capacity": 2.5},
    lambda n: {"capacity": float(n)},
    lambda n: {"capacity": "3"},
    lambda n: {"capacity": np.int32(n), "reserve": np.int16(n)},
    lambda n: {"priority": None},
    lambda n: {"priority": "high"},
    lambda n: {"priority": 2**70},
    lambda n: {"priority": -(2**70)},
    lambda n: {"priority": 1.5},
    lambda n: {"priority": np.int32(2)},
    lambda n: {"prefetch": object()},
    lambda n: {"prefetch": 5},
    lambda n: {"media": {0: "x" * 16}},
    lambda n: {"media": {0.0: b"x" * 16}},
    lambda n: {"media": {n: b"x" * 16}},
    lambda n: {"media": [1]},
    lambda n: {"namespace": 5},
    lambda n: {"namespace": ["a"]},
    lambda n: {"namespace": Namespace(epoch=10**6)},
    lambda n: {"namespace": Namespace(epoch=-1)},
)
"""Arguments of ``open`` for a prompt of ``n`` tokens. Numpy integers may be accepted; all others are invalid."""
CALLS: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("extend(1.5)", lambda cache, one: one.extend(1.5)),
    ("extend('1')", lambda cache, one: one.extend("1")),
    ("extend(None)", lambda cache, one: one.extend(None)),
    ("extend(-1)", lambda cache, one: one.extend(-1)),
    ("extend(10**12)", lambda cache, one: one.extend(10**12)),
    ("commit(None)", lambda cache, one: one.commit(None)),
    ("commit('ab')", lambda cache, one: one.commit("ab")),
    ("commit([1.5])", lambda cache, one: one.commit([1.5])),
    ("commit([[1]])", lambda cache, one: one.commit([[1]])),
    ("commit([-1])", lambda cache, one: one.commit([-1])),
    ("commit([2**40])", lambda cache, one: one.commit([2**40])),
    ("commit(200 tokens)", lambda cache, one: one.commit([1] * 200)),
    ("rewind(1.5)", lambda cache, one: one.rewind(1.5)),
    ("rewind('a')", lambda cache, one: one.rewind("a")),
    ("rewind(None)", lambda cache, one: one.rewind(None)),
    ("rewind(-1)", lambda cache, one: one.rewind(-1)),
    ("rewind(10**6)", lambda cache, one: one.rewind(10**6)),
    ("fork(reserve=30.5)", lambda cache, one: one.fork(reserve=30.5)),
    ("fork(reserve='a')", lambda cache, one: one.fork(reserve="a")),
    ("fork(reserve=10**9)", lambda cache, one: one.fork(reserve=10**9)),
    ("resume()", lambda cache, one: one.resume()),
    ("batch([], [])", lambda cache, one: cache.batch([], [])),
    ("batch([s], [0])", lambda cache, one: cache.batch([one], [0])),
    ("batch([s], [1.5])", lambda cache, one: cache.batch([one], [1.5])),
    ("batch([s], ['1'])", lambda cache, one: cache.batch([one], ["1"])),
    ("batch([s, s], [1, 1])", lambda cache, one: cache.batch([one, one], [1, 1])),
    ("persistent_batch([s, s])", lambda cache, one: cache.persistent_batch([one, one])),
    ("persistent_batch((), 0)", lambda cache, one: cache.persistent_batch((), 0)),
    ("persistent_batch((), 1.5)", lambda cache, one: cache.persistent_batch((), 1.5)),
    ("open([])", lambda cache, one: cache.open([])),
    ("open([1.5])", lambda cache, one: cache.open([1.5])),
    ("open([-1])", lambda cache, one: cache.open([-1])),
    ("open('ab')", lambda cache, one: cache.open("ab")),
    ("open(200 tokens)", lambda cache, one: cache.open([1] * 200)),
    ("open(capacity=-1)", lambda cache, one: cache.open([1, 2], capacity=-1)),
    ("pin('x')", lambda cache, one: cache.pin("x")),
    ("pin([5000])", lambda cache, one: cache.pin([5000])),
    ("unpin(None)", lambda cache, one: cache.unpin(None)),
    ("invalidate(5)", lambda cache, one: cache.invalidate(5)),
    ("invalidate(weights=5)", lambda cache, one: cache.invalidate(weights=5)),
    ("prefetch('x')", lambda cache, one: cache.prefetch("x")),
    ("fence([None])", lambda cache, one: cache.fence([None]).__enter__()),
)


def wrong_open(driver: Driver) -> None:
    """Call ``open`` with one invalid argument: it must raise and lose no slot. Numpy integers may be accepted."""
    tokens, media = driver.documents.prompt()
    settings = driver.one(*OPENS)(len(tokens))
    media = settings.pop("media", media)
    namespace = settings.pop("namespace", None)
    before, line = driver.facts(), f"open({tokens.tolist()}, {namespace!r}, media={media}, {settings})"
    number = driver.next_number()
    driver.log.append(f"#{number} = {line}")
    try:
        handle = driver.cache.open(tokens, namespace, media=media, **settings)
    except Exception as error:
        refused(driver, before, line, error)
        return
    numbers = [value for value in settings.values() if isinstance(value, np.integer)]
    plain = all(isinstance(value, np.integer) for value in settings.values())
    may_take = plain or ("prefetch" in settings and not driver.tier_drivers)
    total = max([len(tokens), *map(int, numbers)])
    request = started(driver, number, handle, namespace, tokens, media, total)
    if not may_take:
        close(driver, request)
        driver.check()
        raise Fault(f"{line} was taken")


def wrong_call(driver: Driver) -> None:
    """Make another call with an invalid argument."""
    request = driver.pick()
    line, call = driver.one(*CALLS)
    before = driver.facts()
    driver.log.append(f"#{request.number}: {line}")
    try:
        call(driver.cache, request.handle)
    except Exception as error:
        refused(driver, before, line, error)
        return
    raise Fault(f"{line} was taken")


def refused(driver: Driver, before: list[Any], told: str, error: Exception) -> None:
    """Check that nothing changed, and that ``error`` is one of the library's."""
    driver.log[-1] += f" -> {type(error).__name__}: {error}"
    driver.unchanged(before, told)
    driver.check()
    if not isinstance(error, KVPagodaError):
        raise Fault(f"{told} raised {type(error).__name__}, which is no error of this library: {error}") from error


OPERATIONS = {"wrong open": (1.0, wrong_open), "wrong call": (1.0, wrong_call)}
