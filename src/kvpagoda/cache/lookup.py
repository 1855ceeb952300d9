"""What a cache has of a text, without admitting a request: for routers and schedulers."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from kvpagoda.cache.core import Core
from kvpagoda.cache.namespace import with_media
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.request import Request, Tokens
from kvpagoda.cache.reuse import AnyNamespace
from kvpagoda.errors import BadInput
from kvpagoda.prefix.tokens import TokenIds, as_tokens

_Running = dict[tuple[bytes, bytes], list[Request]]


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
    running = _running_by_beginning(core)
    if not _are_texts(token_ids):
        return _look_up(core, running, token_ids, namespace, media)
    given = [_for_each(value, len(token_ids), name) for value, name in ((namespace, "namespaces"), (media, "media"))]
    return [_look_up(core, running, *text) for text in zip(token_ids, *given)]


def _look_up(core: Core, running: _Running, token_ids: Any, namespace: Any, media: Any) -> Lookup:
    found, common, _ = _found_and_running(core, running, token_ids, namespace, media)
    return Lookup(found.num_tokens, found.resumable, max(0, common - found.num_tokens), found.groups, found.limited_by)


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


def checkpoint_at_divergence(
    core: Core, token_ids: Any, namespace: AnyNamespace, media: Mapping[int, bytes] | None
) -> bool:
    """Make the running request with the longest common prefix keep a checkpoint where its text and this one diverge.

    For models with states. Return False if nothing of this text is pending, if the checkpoint would save nothing, or if
    the running request is past that position already. Costs as much as ``look_up``."""
    running = _running_by_beginning(core)
    found, common, request = _found_and_running(core, running, token_ids, namespace, media)
    grid = core.prefix.points.grid
    at = common // core.block_size // grid * grid
    is_pending = common > found.num_tokens
    if request is None or not is_pending or at * core.block_size <= max(request.length, found.resumable):
        return False
    if at not in request.due:
        insort(request.due, at)
        request.settle_at = min(request.settle_at, at * core.block_size)
    return True


def _running_by_beginning(core: Core) -> _Running:
    """Return the running requests whose blocks others may share, by namespace and first block, in the order in which
    they began. O(requests)."""
    running, size = _Running(), core.block_size
    for request in core.running.values():
        if request.publishes and max(request.prompt_length, request.own_length) >= size:
            running.setdefault((request.namespace, request.keys(0, size).tobytes()), []).append(request)
    return running


def _found_and_running(
    core: Core, running: _Running, token_ids: Any, namespace: AnyNamespace, media: Mapping[int, bytes] | None
) -> tuple[PrefixMatch, int, Request | None]:
    """Return what is cached of a text, and how much of it a running request has.

    The second result is the largest number of leading tokens, in whole blocks and at most all but the last token, that
    one request of ``running`` has in its prompt or has committed; the third is this request (None: no common block)."""
    tokens = as_tokens(token_ids, core.vocab_size)
    keys, key = with_media(tokens, 0, core.media.ids(media, len(tokens))), core.namespaces.key(namespace)
    _, found = core.prefix.find(keys, key)
    keys = keys[: max(0, len(keys) - 1)]
    longest, nearest, size = 0, None, core.block_size
    for request in running.get((key, keys[:size].tobytes()), ()):
        known = request.keys(0, min(len(keys), max(request.prompt_length, request.own_length)))
        same = known == keys[: len(known)]
        at = int(same.argmin())
        common = (len(known) if same[at] else at) // size * size
        if common > longest:
            longest, nearest = common, request
    return found, longest, nearest
