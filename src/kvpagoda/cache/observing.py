"""The methods of a cache that can be wrapped from outside: by spans, a recording, a profiler, a test that makes one fail.

A method is marked where it is defined, and otherwise unchanged: a mark costs nothing, and a cache that is not observed
has no code for observers.

    open      Admission.open        admit a request
    fork      Admission.fork        start a request beside a running one
    receive   Admission.receive     start a request that another cache handed over
    resume    Admission.resume      run a suspended request again, from its copy or from the start
    suspend   Lifecycle.suspend     copy a request to host memory
    close     Ending.close          end a request, or mark it as closing while a fence is around it
    find      TierReader.find       look in tiers for what the device lacks, and read the checkpoint
    load      TierReader.load       read records into blocks
    store     Offloader.store       copy blocks to staging memory, and begin to store them in a tier
    forget    Capacity.forget       remove entries of the prefix cache; ``is_evicted=True`` where that makes room
    vacate    Capacity.vacate       move blocks out of sectors that another group takes; None where none can be taken
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvpagoda.errors import BadInput

Call = Callable[..., Any]
Around = Callable[[str, Call], Call]
C = TypeVar("C", bound=Call)


def observable(method: C) -> C:
    """Mark ``method``, of a class whose objects are among ``Core.parts``, and return it."""
    method.__dict__["is_observable"] = True
    return method


def observe(parts: Iterable[object], around: Around, kind: str = "an observer") -> Callable[[], None]:
    """Replace every marked method of ``parts`` by ``around(name, call)``, and return a function that undoes this.

    ``call``: the bound method, or what an earlier observer of another ``kind`` made of it. ``around`` returns ``call``, or
    a function that calls it and returns its result; it is called again when an earlier observer ends. Undoing twice does no
    harm. Raises BadInput if an observer of this kind is there already, and whatever ``around`` raises; nothing changed
    then.
    """
    places = [
        (part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if getattr(method, "is_observable", False)
    ]
    if any(kind in vars(part).get("observers", ()) for part, _ in places):
        raise BadInput(f"the calls of this cache are observed by {kind} already; end that first", needed=kind)
    for (part, name), call in [(place, around(place[1], getattr(*place))) for place in places]:
        vars(part).setdefault("observers", {})[kind] = around
        setattr(part, name, call)

    def end() -> None:
        for part, name in places:
            others: dict[str, Around] = vars(part).get("observers", {})
            if others.get(kind) is around:
                del others[kind]
            vars(part).pop(name, None)
            if not others:
                vars(part).pop("observers", None)
            for other in others.values():
                setattr(part, name, other(name, getattr(part, name)))

    return end
