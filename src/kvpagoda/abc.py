"""The contracts that a user, or a part of this library beside the core, implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

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
