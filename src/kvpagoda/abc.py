"""The contracts that a user, or a part of this library beside the core, implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt

from kvpagoda.errors import BadInput

__all__ = ["BlockIds", "CacheObserver", "CacheView", "CachedText", "RequestView", "wrap_calls"]

# -- observers -------------------------------------------------------------------------------------------------------


class BlockIds(NamedTuple):
    """Blocks of one group."""

    group: str
    """Its name, as in ``cache.plan.groups``; ``""`` for blocks of texts where no group keeps all tokens."""
    ids: npt.NDArray[Any]
    """Block ids ``[n]``, int32 or intp; yours to keep. A block keeps its id as long as it is cached, also where its bytes
    move."""
    first: int = -1
    """Where the blocks are consecutive blocks of one text: which block of it ``ids[0]`` is; else -1."""


class RequestView(Protocol):
    """What a request was when something happened to it, read only. Two views of one request are equal, and have one hash."""

    @property
    def namespace(self) -> bytes:
        """The key of its namespace; equal for requests that may share blocks."""

    @property
    def prompt_length(self) -> int:
        """Tokens in its prompt."""

    @property
    def length(self) -> int:
        """Committed tokens: those whose rows are written."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that it need not compute: it started, or was resumed, after them."""

    @property
    def loaded_tokens(self) -> int:
        """Those of ``cached_tokens`` that came from tiers or from another cache."""

    @property
    def slot(self) -> int:
        """Its row in block tables; -1 if it has none."""

    @property
    def priority(self) -> int:
        """As ``open`` was given it."""

    @property
    def is_findable(self) -> bool:
        """Whether others can find what it shares; False once its namespace was invalidated."""

    @property
    def token_ids(self) -> npt.NDArray[Any]:
        """Its committed tokens, int32 ``[length]``, read only."""

    @property
    def media(self) -> Mapping[int, bytes]:
        """Media id -> digest of the images in its text."""

    def keys(self, first: int, end: int) -> npt.NDArray[Any]:
        """Return tokens ``first .. end - 1`` as texts are compared, int32: a media id, below 0, where an image begins, and
        ``NO_TOKEN`` behind the committed ones."""


class CacheObserver:
    """Is told what happens in a cache: ``KVCache(observers=[..])``. Override the methods that you want; the others cost
    nothing.

    They are called at the end of the call of the cache in which something happened, in the order in which it happened: all
    of it is done and cannot be undone. A cache tells one observer after another, in the order in which they were given;
    its own tiers hear of an eviction before them, while memory still holds the bytes. One may ask ``stats`` and ``lookup``,
    and other calls of the cache raise BadInput. If a method raises an Exception, that is logged, and the observer is called
    no more: the cache is as it would be without it.

    What is cached is what ``on_cached`` told of and ``on_evicted`` did not. An interrupt may let a change be told twice.
    """

    def on_start(self, request: RequestView) -> None:
        """``request`` got a slot: it was opened, forked, received from another cache, or resumed."""

    def on_hit(self, request: RequestView, blocks: tuple[BlockIds, ...]) -> None:
        """``request`` starts with these cached blocks, which it shares: what was found, or its parent's. Told after
        ``on_start``, if there are any."""

    def on_cached(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> None:
        """Blocks of ``request`` can be shared from now on: those of its text from block ``first`` on. Also told are the one
        before, and what windows hold of earlier ones. A block with a copy of states is told when a checkpoint is kept.

        Told when whole blocks are published: some time after their tokens are committed, at the latest before anybody could
        find them."""

    def on_evicted(self, blocks: tuple[BlockIds, ...], reason: str, namespaces: frozenset[bytes]) -> None:
        """``blocks`` are not cached any more; those of texts come deepest first.

        ``reason``: ``evicted``: to make room, or because a hint, ``sleep`` or a limit asked for it. ``dropped``: nobody can
        find them, or they are replaced. Without blocks: ``invalidated``: nothing that was cached in ``namespaces`` (none: in
        any) can be found from now on; its blocks are told as ``dropped`` when no request uses them. ``reset``: everything is
        forgotten, requests too, without an ``on_end``. ``lost``: memory lacked to note what happened; some was not told."""

    def on_freed(self, blocks: tuple[BlockIds, ...]) -> None:
        """``blocks``, cached or not, have no owner any more; others may get them."""

    def on_end(self, request: RequestView) -> None:
        """``request`` ended. What it shared stays cached."""


class CachedText(NamedTuple):
    """Cached blocks of one text, from block ``first`` on."""

    namespace: bytes
    first: int
    keys: npt.NDArray[Any]
    """int32: their tokens, as ``RequestView.keys``."""
    media: Mapping[int, bytes]
    """Media id -> digest, for the media ids in ``keys``."""
    blocks: tuple[BlockIds, ...]
    """As ``on_cached`` tells them; in groups of windows, id 0 is a block that is not cached."""


class CacheView(Protocol):
    """What an observer that must know all that is cached can ask, at any time between two calls of the cache or while it is
    told of one: ``EventLog``."""

    @property
    def num_waiting(self) -> int:
        """Changes that are not told yet, the one that is being told included. Any thread may ask."""

    def texts(self) -> list[CachedText]:
        """Return everything that is cached and can be found, parents before their children. O(blocks)."""


# -- calls that can be wrapped ---------------------------------------------------------------------------------------

Call = Callable[..., Any]
Around = Callable[[str, Call], Call]
C = TypeVar("C", bound=Call)


def observable(method: C) -> C:
    """Mark ``method``, of a class whose objects are among the parts of a cache, and return it. A mark costs nothing."""
    method.__dict__["is_observable"] = True
    return method


def wrap_calls(parts: Iterable[object], around: Around, kind: str = "an observer") -> Callable[[], None]:
    """Replace the marked methods of ``parts``, ``cache.core.parts``, by ``around(name, call)``, and return a function that
    undoes this: for spans, a profiler, a test that makes one fail. An observer hears what happened; this measures how long
    it took.

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

    Args:
        parts: the objects that have these methods.
        around: gets the name of a method and the bound method, or what an earlier caller of another ``kind`` made of it.
            Returns that, or a function that calls it and returns its result. Is called again when an earlier one ends.
        kind: what this is, for the error; there is one of each kind.

    Returns: what undoes it; twice does no harm.

    Raises:
        BadInput: there is one of this kind already. It, and what ``around`` raises, leave everything as it was.
    """
    places = [
        (part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if getattr(method, "is_observable", False)
    ]
    if any(kind in vars(part).get("wrappers", ()) for part, _ in places):
        raise BadInput(f"the calls of this cache are wrapped by {kind} already; end that first", needed=kind)
    for (part, name), call in [(place, around(place[1], getattr(*place))) for place in places]:
        vars(part).setdefault("wrappers", {})[kind] = around
        setattr(part, name, call)

    def end() -> None:
        for part, name in places:
            others: dict[str, Around] = vars(part).get("wrappers", {})
            if others.get(kind) is around:
                del others[kind]
            vars(part).pop(name, None)
            if not others:
                vars(part).pop("wrappers", None)
            for other in others.values():
                setattr(part, name, other(name, getattr(part, name)))

    return end
