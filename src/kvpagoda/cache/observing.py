"""The calls of a cache around which others may stand: spans, a profiler, a test that makes one of them fail.

A method is marked where it is defined, and is otherwise as it was: marks cost nothing, and a cache that nobody observes
knows of nobody.

    open      Admission.open        a request is admitted
    resume    Admission.resume      it comes back, or begins again
    suspend   Lifecycle.suspend     it goes to host memory
    find      TierReader.find       tiers are asked for what the device has not; the checkpoint is read
    load      TierReader.load       records are read into blocks
    forget    Capacity.forget       the prefix cache gives something up; ``is_evicted=True`` where that makes room
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvpagoda.errors import BadInput

Call = Callable[..., Any]
C = TypeVar("C", bound=Call)


def observable(method: C) -> C:
    """``method``, marked, of a class whose objects are among ``Core.parts``."""
    method.__dict__["is_observable"] = True
    return method


def observe(parts: Iterable[object], around: Callable[[str, Call], Call]) -> Callable[[], None]:
    """Put ``around(name, call)``, which makes ``call`` and returns what it returned, in the place of every marked call of
    ``parts``; ``call`` is bound. Returns what takes all of that away again, once or twice. Raises BadInput where somebody
    stands there already, and whatever ``around`` raises; nothing changed then."""
    places = [
        (part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if getattr(method, "is_observable", False)
    ]
    if any(name in vars(part) for part, name in places):
        raise BadInput("the calls of this cache are observed already; end that first")
    for (part, name), call in [(place, around(place[1], getattr(*place))) for place in places]:
        setattr(part, name, call)

    def end() -> None:
        for part, name in places:
            vars(part).pop(name, None)

    return end
