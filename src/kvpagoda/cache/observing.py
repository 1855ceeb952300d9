"""The methods of a cache that can be wrapped from outside: by spans, by a profiler, by a test that makes one fail.

A method is marked where it is defined, and otherwise unchanged: a mark costs nothing, and a cache that is not observed
has no code for observers.

    open      Admission.open        admit a request
    resume    Admission.resume      run a suspended request again, from its copy or from the start
    suspend   Lifecycle.suspend     copy a request to host memory
    find      TierReader.find       look in tiers for what the device lacks, and read the checkpoint
    load      TierReader.load       read records into blocks
    forget    Capacity.forget       remove entries of the prefix cache; ``is_evicted=True`` where that makes room
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvpagoda.errors import BadInput

Call = Callable[..., Any]
C = TypeVar("C", bound=Call)


def observable(method: C) -> C:
    """Mark ``method``, of a class whose objects are among ``Core.parts``, and return it."""
    method.__dict__["is_observable"] = True
    return method


def observe(parts: Iterable[object], around: Callable[[str, Call], Call]) -> Callable[[], None]:
    """Replace every marked method of ``parts`` by ``around(name, call)``, and return a function that undoes this.

    ``call``: the bound method. ``around`` returns a function that calls it and returns its result. Undoing twice does
    no harm. Raises BadInput if the methods are wrapped already, and whatever ``around`` raises; nothing changed then.
    """
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
