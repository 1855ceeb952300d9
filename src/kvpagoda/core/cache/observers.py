"""Who is told of changes of a cache, and when.

    the change, while the guard marks it ──► its tiers, at once ──► noted, as arrays
    the end of the outermost call        ──► observers, one after another: what is noted, in its order

So what observers do runs after the commit, while nothing is changed. Where nobody listens to an event, nothing is noted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Many
from typing import Any, TypeVar

import numpy as np

from kvpagoda.abc import BlockIds, CachedText, CacheObserver
from kvpagoda.arrays import NO_TOKEN, AnyIds, Ids, are_media
from kvpagoda.core.blocks.group import BlockGroup, BlockNames, BlockPlaces
from kvpagoda.core.cache.guard import Guard, Telling
from kvpagoda.core.cache.prefix_cache import PrefixCache
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.groups.base import Freed
from kvpagoda.errors import BadInput
from kvpagoda.namespace import Media, Namespaces, with_media

_log = logging.getLogger(__name__)
EVENTS = ("on_start", "on_hit", "on_cached", "on_evicted", "on_freed", "on_end")
T = TypeVar("T", bound=CacheObserver)
_NO_MEDIA: Mapping[int, bytes] = {}


class RequestSnapshot:
    """The ``RequestView`` of ``request`` as it is now. ``tokens`` that are published are never written again."""

    __slots__ = (
        "_media_ids", "_request", "_tokens", "cached_tokens", "is_findable", "length", "loaded_tokens", "media", "namespace",
        "priority", "prompt_length", "slot",
    )  # fmt: skip

    def __init__(self, request: RequestState, media: Media, is_findable: bool) -> None:
        match = request.match
        self._request, self._tokens, self._media_ids = request, request.tokens, request.media_ids
        self.namespace, self.priority, self.slot = request.namespace, request.priority, request.slot
        self.length, self.prompt_length = request.own_length, request.prompt_length
        self.cached_tokens, self.loaded_tokens, self.is_findable = match.resumable, match.loaded, is_findable
        self.media = _NO_MEDIA
        if self._media_ids:
            self.media = {media_id: media.digest(media_id) for media_id in self._media_ids.values()}

    def __eq__(self, other: object) -> bool:
        return other is self._request or (isinstance(other, RequestSnapshot) and other._request is self._request)

    def __hash__(self) -> int:
        return hash(self._request)

    @property
    def token_ids(self) -> Ids:
        """See ``RequestView``."""
        view: Ids = self._tokens[: self.length].view()
        view.flags.writeable = False
        return view

    def keys(self, first: int, end: int) -> Ids:
        """See ``RequestView``."""
        keys: Ids = self._tokens[first : min(end, self.length)]
        if self._media_ids:
            keys = with_media(keys, first, self._media_ids)
        if end <= self.length:
            return keys
        padded: Ids = np.concatenate([keys, np.full(end - max(first, self.length), NO_TOKEN, np.int32)])
        return padded


class Observers:
    """The observers of a cache with the ``prefix`` cache. ``started``, ``hit``, ``cached``, ``evicted``, ``freed``,
    ``ended``: whether somebody listens to that event.

    What is noted waits in ``guard.noted`` until the guard calls ``tell``. A note is made while the guard marks a change, so
    it must not fail: if memory lacks for it, observers are told so."""

    def __init__(self, guard: Guard, prefix: PrefixCache, namespaces: Namespaces, media: Media) -> None:
        self._guard, self._prefix, self._namespaces, self._media = guard, prefix, namespaces, media
        self._noted: deque[tuple[int, tuple[Any, ...]]] = guard.noted
        self._observers: list[CacheObserver] = []
        self._calls: list[list[tuple[CacheObserver, Callable[..., None]]]] = [[] for _ in EVENTS]
        self._has_lost = False
        self._hear()
        guard.tell = self.tell

    # -- the list ----------------------------------------------------------------------------------------------------

    def add(self, observer: object) -> Callable[[], None]:
        """Append ``observer``, and return what removes it again. Raises BadInput for what is none, or is there already."""
        if not isinstance(observer, CacheObserver):
            text = f"an observer is a kvpagoda.abc.CacheObserver, got {type(observer).__name__}"
            raise BadInput.with_hint(text, "make it a subclass", field="observers", needed=observer)
        if any(one is observer for one in self._observers):
            text = f"this {type(observer).__name__} observes this cache already"
            raise BadInput.with_hint(text, "give it once", field="observers", needed=observer)
        self._observers.append(observer)
        self._hear()

        def end() -> None:
            self._remove(observer)

        return end

    def find(self, kind: type[T]) -> T | None:
        """Return the first observer that is a ``kind``."""
        return next((one for one in self._observers if isinstance(one, kind)), None)

    def _remove(self, observer: CacheObserver) -> None:
        self._observers = [one for one in self._observers if one is not observer]
        self._hear()

    def _hear(self) -> None:
        self._calls = [
            [(one, getattr(one, name)) for one in self._observers if _overrides(one, name)] for name in EVENTS
        ]
        self.started, self.hit, self.cached, self.evicted, self.freed, self.ended = map(bool, self._calls)

    # -- notes: made while the guard marks a change --------------------------------------------------------------------

    def note_start(self, request: RequestState, columns: Many[range], names: Many[BlockNames]) -> None:
        """Note that ``request`` got a slot, and shares the blocks ``names`` of each group, which are its ``columns``."""
        try:
            view = RequestSnapshot(request, self._media, True)
            if self.started:
                self._noted.append((0, (view,)))
            if self.hit:
                parts = zip(self._prefix.groups, columns, names)
                blocks = tuple([BlockIds(group.plan.name, ids, span.start) for group, span, ids in parts if len(ids)])
                if blocks:
                    self._noted.append((1, (view, blocks)))
        except MemoryError:
            self._has_lost = True

    def note_cached(self, request: RequestState, begin: int, is_findable: bool) -> None:
        """Note that the blocks of ``request`` from ``begin`` on are shared."""
        try:
            prefix, slot, end, low = self._prefix, request.slot, request.lease.num_blocks, begin
            blocks: list[BlockIds] = []
            for group in prefix.windows:
                first = group.first[slot]
                ids = group.names_between(slot, first, min(end, group.shared[slot]))
                if len(ids):
                    blocks.append(BlockIds(group.plan.name, ids, first))
                    low = min(low, first)
            self._note_cached(request, low, end, blocks, begin, is_findable)
        except MemoryError:
            self._has_lost = True

    def note_checkpoint(self, request: RequestState, num_blocks: int, copy: BlockNames, is_findable: bool) -> None:
        """Note a checkpoint after the first ``num_blocks`` blocks of ``request``, with its states in block ``copy``: ``[1]``,
        ``[0]`` without states."""
        states = self._prefix.states
        if states is not None:
            try:
                blocks = [BlockIds(states.plan.name, copy, num_blocks - 1)]
                self._note_cached(request, num_blocks - 1, num_blocks, blocks, num_blocks - 1, is_findable)
            except MemoryError:
                self._has_lost = True

    def _note_cached(
        self, request: RequestState, low: int, end: int, blocks: list[BlockIds], begin: int, is_findable: bool
    ) -> None:
        prefix, above = self._prefix, low - 1 if low else 0
        if prefix.full is not None:
            ids: AnyIds = prefix.full.names_between(request.slot, above, end)
            blocks.insert(0, BlockIds(prefix.full.plan.name, ids, above))
        elif prefix.is_numbered:
            blocks.insert(0, BlockIds("", prefix.tree.ids_between(request.lease, above, end)[-1], above))
        view = RequestSnapshot(request, self._media, is_findable)
        self._noted.append((2, (view, tuple(blocks), begin)))

    def note_evicted(self, freed: Freed, reason: str) -> None:
        """Note what the prefix cache ``freed``."""
        try:
            groups = self._prefix.groups
            blocks = [BlockIds(groups[number].plan.name, names) for number, names in freed.blocks if len(names)]
            if freed.numbers is not None and len(freed.numbers):
                blocks.append(BlockIds("", freed.numbers))
            if blocks:
                self._noted.append((3, (tuple(blocks), reason, frozenset())))
        except MemoryError:
            self._has_lost = True

    def note_invalidated(self, namespaces: Collection[bytes]) -> None:
        """Note that nothing that was cached in ``namespaces``, or in any, can be found any more."""
        try:
            self._noted.append((3, ((), "invalidated", frozenset(namespaces))))
        except MemoryError:
            self._has_lost = True

    def note_reset(self) -> None:
        """Note that everything is forgotten; what is noted and not told does not matter any more."""
        self._noted.clear()
        if self.evicted:
            self._noted.append((3, ((), "reset", frozenset())))

    def note_freed(self, group: BlockGroup, places: BlockPlaces) -> None:
        """Note that the blocks at ``places`` have no owner any more."""
        try:
            if len(places):
                self._noted.append((4, ((BlockIds(group.plan.name, group.names_at(places)),),)))
        except MemoryError:
            self._has_lost = True

    def note_end(self, request: RequestState) -> None:
        """Note that ``request`` ended."""
        try:
            self._noted.append((5, (RequestSnapshot(request, self._media, True),)))
        except MemoryError:
            self._has_lost = True

    # -- telling -----------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Tell the observers what is noted. One that raises an Exception is removed."""
        guard, noted = self._guard, self._noted
        if isinstance(guard.lock, Telling):
            return
        lock = guard.lock
        try:
            guard.lock = Telling()
            if self._has_lost:
                self._has_lost = False
                self._tell(3, ((), "lost", frozenset()))
            while noted:
                self._tell(*noted[0])
                noted.popleft()  # not before: an interrupt tells it again
        finally:
            guard.lock = lock

    def _tell(self, event: int, arguments: tuple[Any, ...]) -> None:
        for observer, call in self._calls[event]:
            try:
                call(*arguments)
            except Exception as error:
                text = "%s.%s failed; this observer is told nothing any more"
                _log.error(text, type(observer).__name__, EVENTS[event], exc_info=error)
                self._remove(observer)

    # -- for observers that must know all that is cached ---------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """See ``CacheView``."""
        return sum(event in (2, 3) for event, _ in [*self._noted])

    def texts(self) -> list[CachedText]:
        """See ``CacheView``."""
        prefix, found = self._prefix, list[CachedText]()
        row = 0 if prefix.full is not None else prefix.tree.num_groups - 1
        name = "" if prefix.full is None else prefix.full.plan.name
        states, namespace = prefix.states, b""
        for node in prefix.tree.nodes():
            namespace = namespace if node.root is None else node.root[1]
            if not node.num_blocks or not self._namespaces.is_current(namespace):
                continue
            assert node.parent is not None
            above = node.parent.ids[row, -1:] if node.start else node.ids[row, :0]
            first = node.start - len(above)
            blocks = [BlockIds(name, np.concatenate((above, node.ids[row])), first)]
            for group in prefix.windows:
                cells = group.cells_of(node.ids)
                blocks.append(BlockIds(group.plan.name, cells[0] * group.are_there(cells), node.start))
            if states is not None:
                for one in node.checkpoints.all if node.checkpoints is not None else ():
                    copy = prefix.kept[one.state_id].states
                    blocks.append(BlockIds(states.plan.name, copy, one.depth - 1))
            keys = node.tokens.copy()
            ids = np.unique(keys[are_media(keys)]).tolist()
            media = {media_id: self._media.digest(media_id) for media_id in ids}
            found.append(CachedText(namespace, node.start, keys, media, tuple(blocks)))
        return found


def _overrides(observer: CacheObserver, name: str) -> bool:
    """Return whether ``observer`` has a method ``name`` of its own."""
    return getattr(getattr(observer, name), "__func__", None) is not getattr(CacheObserver, name)
