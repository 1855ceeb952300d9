"""What users ask of cached texts without a request: look one up, pin it, invalidate namespaces, forget everything."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from kvpagoda.arrays import Ids, TokenIds, Tokens, as_tokens
from kvpagoda.core.cache.checkpoints import Checkpointer
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.prefix_cache import MOST_PRIORITY, Pin
from kvpagoda.core.cache.request import RequestState, State
from kvpagoda.core.prefix import Match
from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater
from kvpagoda.namespace import Namespace, with_media
from kvpagoda.units import utf8

# -- pins and invalidation -------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
AnyNamespace = Namespace | str | bytes | None


class PrefixReuse:
    """Pins and invalidation for the prefix cache of ``core``."""

    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core, self._lifecycle = core, lifecycle

    def pin(self, keys: Ids, namespace: bytes) -> Pin:
        """Pin what is cached of the text ``keys``; see ``KVCache.pin``. Raises OutOfBlocks and StaleHandle, pinning
        nothing."""
        self._core.check_open()
        return self.pin_match(self._core.prefix.tree.match(keys, namespace))

    def pin_match(self, match: Match, priority: int = MOST_PRIORITY, ended: deque[Pin] | None = None) -> Pin:
        """Pin the blocks of ``match``, which was found just now. Raises OutOfBlocks, pinning nothing."""
        core = self._core
        pin = core.guard.change(core.prefix.pin, match, priority, ended)
        try:
            if core.capacity.fits([0] * len(core.groups)):
                return pin
            text = f"cannot pin {match.num_blocks} cached blocks: running requests have reserved the memory they take"
            raise OutOfBlocks.with_hint(text, "close a sequence first", needed=match.num_blocks)
        except BaseException:
            core.guard.change(core.prefix.unpin, pin)
            raise

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held. Raises BadInput for what is not a pin."""
        if not isinstance(pin, Pin):
            raise BadInput(f"unpin takes what pin returned, got {type(pin).__name__}")
        self._core.guard.change(self._core.prefix.unpin, pin)

    def invalidate(self, namespaces: tuple[AnyNamespace, ...], weights: str | None) -> None:
        """Stop finding what was cached in ``namespaces``, or in all if none are given; see ``KVCache.invalidate``."""
        core = self._core
        epoch = None if weights is None else utf8(weights, "weights, a digest of them,")
        if weights is not None and namespaces:
            text = f"new weights are those of all namespaces, got {len(namespaces)} of them; give none"
            raise BadInput(text, needed=0, available=len(namespaces))
        self._lifecycle.settler.settle_waiting()
        requests = [*core.running.values(), *core.suspended]
        in_use = core.prefix.tree.namespaces() | {request.namespace for request in requests}
        core.guard.is_torn = True
        try:
            old = core.namespaces.renew(namespaces, in_use) if namespaces else core.namespaces.renew_all(in_use, epoch)
        except Exception:
            core.guard.is_torn = False
            raise
        core.stale = {name for name in core.stale | old if not core.namespaces.is_current(name)}
        if core.observers.evicted and (old or not namespaces):
            core.observers.note_invalidated(old if namespaces else ())
        for request in requests:
            if namespaces:
                request.publishes = request.publishes and request.namespace not in old
            elif not request.stays:
                request.enter_epoch(core.namespaces.epoch)
        for pin in core.prefix.pins_of(old):
            core.prefix.unpin(pin)
        if weights is not None:
            core.tiers.set_weights(weights)
        core.guard.is_torn = False
        self._lifecycle.ending.clear_stale()
        _log.info(
            "invalidated %s; epoch %d", f"{len(namespaces)} namespaces" if namespaces else "all", core.namespaces.epoch
        )

    def reset(self) -> None:
        """Forget everything that is cached. Raises RetryLater while a request runs or is suspended; but after an
        interrupt tore the cache, forget every request too."""
        core = self._core
        if core.guard.is_torn:
            core.clear()
            return
        if core.dropped:
            self._lifecycle.ending.close_dropped()
        if core.suspended or core.running:
            slots = sorted(core.running)
            text = f"{len(slots)} requests run, in slots {slots[:16]}, {len(core.suspended)} are suspended"
            raise RetryLater.with_hint(text, "close them first", available=slots)
        core.memory.restart()
        for pin in core.prefix.pins_of():
            core.guard.change(core.prefix.unpin, pin)
        core.capacity.forget(core.prefix.clear, reason="dropped")
        core.capacity.tidy()
        core.media.clear()


# -- lookup ----------------------------------------------------------------------------------------------------------

_Running = dict[tuple[bytes, bytes], list[RequestState]]


@dataclass(frozen=True)
class Lookup:
    """What a cache has of a text now. Nothing of it is pinned: it may be evicted a moment later. All counts are in
    tokens, at most all but the last token of the text."""

    cached: int
    """Leading tokens that are in the prefix tree."""
    resumable: int
    """Of the ``cached`` tokens, those that a request with this text would not have to compute, where there is room for it
    beside them: else ``open`` starts from fewer, and ``PrefixMatch.limited_by`` is ``memory``."""
    pending: int
    """Tokens after ``cached``, to a whole block, that a running request is about to publish: a request that waits for
    these can share them."""
    groups: Mapping[str, int]
    """Group -> the length of the longest prefix for which the group has what a request needs."""
    limited_by: str
    """What makes ``resumable`` smaller than the text; see ``PrefixMatch.limited_by``."""


def look_up(core: Core, token_ids: Any, namespace: Any, media: Any) -> Lookup | list[Lookup]:
    """Return what ``core`` has of a text, or of each of several; see ``KVCache.lookup``.

    O(n) for a text of n tokens, and O(common tokens) for each running request that begins with the same block. All
    running requests are visited once for all texts."""
    core.check_open()
    running = _by_beginning(core, core.running.values())
    if not _are_texts(token_ids):
        return _look_up(core, running, token_ids, namespace, media)
    given = [_for_each(value, len(token_ids), name) for value, name in ((namespace, "namespaces"), (media, "media"))]
    return [_look_up(core, running, *text) for text in zip(token_ids, *given)]


def _look_up(core: Core, running: _Running, token_ids: Any, namespace: Any, media: Any) -> Lookup:
    keys, key, shared = _shared(core, running, token_ids, namespace, media)
    _, found = core.prefix.find(keys, key)
    pending = max([common - found.num_tokens for common, _ in shared], default=0)
    return Lookup(found.num_tokens, found.resumable, max(0, pending), found.groups, found.limited_by)


def _are_texts(token_ids: Any) -> bool:
    """Return whether ``token_ids`` are several texts, not one."""
    first = token_ids[0] if isinstance(token_ids, list | tuple) and token_ids else 0
    return hasattr(first, "__len__") and getattr(first, "ndim", 1) > 0


def _for_each(value: Any, count: int, name: str) -> Any:
    """Return ``value`` for each of ``count`` texts: its items if it is a list or tuple, else itself repeated. Raises
    BadInput."""
    if not isinstance(value, list | tuple):
        return repeat(value, count)
    if len(value) != count:
        raise BadInput(f"{len(value)} {name} for {count} texts; give one for each, or one for all", needed=count)
    return value


def prefetch(core: Core, token_ids: TokenIds, namespace: AnyNamespace, media: Mapping[int, bytes] | None) -> Any:
    """Begin to read what tiers have of a text; see ``KVCache.prefetch``. Raises BadInput if there are no tiers."""
    core.check_open()
    tokens = as_tokens(token_ids, core.vocab_size)
    return read_ahead(core, tokens, core.namespaces.key(namespace), core.media.ids(media, len(tokens)))


def read_ahead(core: Core, tokens: Tokens, key: bytes, media_ids: dict[int, int]) -> Any:
    """Begin to read what tiers have of ``tokens``, int32 ``[n]``, in the namespace of ``key``. Raises BadInput if there are
    no tiers."""
    match, found = core.prefix.find(with_media(tokens, 0, media_ids), key)
    return core.tiers.prefetch(key, tokens, media_ids, match.num_blocks, found.resumable // core.block_size)


def should_wait(
    core: Core, checkpoints: Checkpointer, token_ids: Any, namespace: AnyNamespace, media: Mapping[int, bytes] | None
) -> bool:
    """Return whether a text should wait for a running request, which then keeps its states where the two part; see
    ``KVCache.should_wait``. Costs as much as ``look_up``; O(requests) while none computes its prompt."""
    core.check_open()
    points = core.prefix.points
    computing = [request for request in core.running.values() if request.length < request.prompt_length]
    if not computing or (points.ends_steps and not core.prefix.most_checkpoints):
        return False
    keys, key, shared = _shared(core, _by_beginning(core, computing), token_ids, namespace, media)
    ahead = [(at, one) for common, one in shared if (at := points.rounded(common, is_bounded=True)) > one.length]
    resumable = core.prefix.find(keys, key)[1].resumable if ahead else 0
    return any(at > resumable and checkpoints.also_at(one, at) for at, one in sorted(ahead, key=lambda one: -one[0]))


def _by_beginning(core: Core, requests: Iterable[RequestState]) -> _Running:
    """Return those of ``requests`` that go on and whose blocks others may share, by namespace and first block, in their
    order. O(requests)."""
    running, size = _Running(), core.block_size
    for request in requests:
        goes_on = request.publishes and request.state is State.RUNNING and not request.is_dropped
        if goes_on and max(request.prompt_length, request.own_length) >= size:
            running.setdefault((request.namespace, request.keys(0, size).tobytes()), []).append(request)
    return running


def _shared(
    core: Core, running: _Running, token_ids: Any, namespace: AnyNamespace, media: Mapping[int, bytes] | None
) -> tuple[Ids, bytes, list[tuple[int, RequestState]]]:
    """Return a text and its namespace as the prefix tree takes them, and each request of ``running`` that begins with the
    same block, after how many of its leading tokens: in whole blocks and at most all but the last token, that the request
    has in its prompt or has committed."""
    tokens = as_tokens(token_ids, core.vocab_size)
    keys, key = with_media(tokens, 0, core.media.ids(media, len(tokens))), core.namespaces.key(namespace)
    most, shared, size = keys[: max(0, len(keys) - 1)], list[tuple[int, RequestState]](), core.block_size
    for request in running.get((key, most[:size].tobytes()), ()):
        known = request.keys(0, min(len(most), max(request.prompt_length, request.own_length)))
        same = known == most[: len(known)]
        at = int(same.argmin())
        shared.append(((len(known) if same[at] else at) // size * size, request))
    return keys, key, shared
