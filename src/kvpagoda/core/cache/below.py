"""What a cache asks of the tiers below its device, and of its sender. ``kvpagoda.core.offload`` and ``kvpagoda.handover``
answer; a cache without them has ``NoTiers`` and ``NoHandOvers``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup, BlockPlaces
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.groups.base import CachedPart, Freed
from kvpagoda.core.memory.copies import Copy
from kvpagoda.errors import BadInput


class Hit(Protocol):
    """What tiers have of a text, from block ``begin`` to block ``end``, until it is released. ``layerwise``: whether blocks
    may be copied to the device layer by layer, when a layer is asked for."""

    begin: int
    end: int
    layerwise: bool

    def release(self) -> None:
        """Give back what is held for it."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RowChecker(Protocol):
    """Checks what a step reads, before it reads it: the ``Sanitizer`` of a cache."""

    def check(self, requests: Many[RequestState], before: Many[int], counts: Many[int]) -> None: ...

    def follow(self, requests: Many[RequestState]) -> None: ...

    def apply(self, one: Copy) -> None: ...


class NoTiers:
    """The tiers of a cache without any: nothing is stored, nothing is found."""

    levels: tuple[Any, ...] = ()
    """The tiers, the fastest first."""
    parts: tuple[object, ...] = ()
    """Their ``observable`` methods can be observed."""
    watches: Mapping[Any, Any] = MappingProxyType({})
    """Level -> who is told what it stored: ``kvpagoda.events`` follows tiers too."""

    def find(
        self, request: RequestState, length: int, num_cached: int, resumable: int, prefetch: Any = None
    ) -> Hit | None:
        """Return what tiers have of all but the last of the first ``length`` tokens of ``request``, if that lets it start
        after more than ``resumable`` blocks. ``num_cached``: blocks of its text that are cached. ``prefetch``: what
        ``prefetch`` returned for the same text. The caller releases the hit."""
        return None

    def load(self, hit: Hit, own: Many[BlockPlaces], first: int) -> int:
        """Fill ``own``, free blocks by group, with what ``hit`` has of its text from block ``first`` on, and with its
        checkpoint. Return the number of blocks of the full group that were filled. Raises what copying raises."""
        return 0

    def prefetch(
        self, namespace: bytes, tokens: Ids, media_ids: Mapping[int, int], num_cached: int, resumable: int
    ) -> Any:
        """Begin to read what tiers have of a text, ``tokens``, for ``find``. Raises BadInput without tiers."""
        raise BadInput("this cache has no tiers to prefetch from; give it tiers=[...]", needed="tiers")

    def on_cached(self, request: RequestState, begin: int, source: Hit | None = None) -> None:
        """Store blocks ``begin ..`` of ``request``, which are cached from now on, in the levels that write at commit.
        ``source``: where the blocks were loaded from, if they were."""

    def on_hit(self, request: RequestState, checkpoint: int | None) -> None:
        """Store the cached blocks that ``request`` starts from, and ``checkpoint``, in the levels that write at reuse,
        unless they have them."""

    def checkpoint_saved(self, checkpoint: int, request: RequestState, num_blocks: int) -> None:
        """Record that ``checkpoint`` has what a text needs to resume after the first ``num_blocks`` blocks of
        ``request``."""

    def store_checkpoint(self, checkpoint: int, kept: CachedPart, when: str) -> None:
        """Store ``checkpoint``, which keeps ``kept``, in the levels that write ``when``."""

    def on_evicted(self, freed: Freed, is_stored: bool) -> None:
        """Store what is ``freed`` in the levels that write at eviction (``is_stored``); forget its checkpoints. Memory must
        still hold it; it is copied before this returns."""

    def num_storable(self, deadline: float) -> int | None:
        """Wait until ``deadline`` for what is being stored, and return how many records ``on_evicted`` can store at once then;
        None if no level writes at eviction."""
        return None

    def records(self) -> dict[Any, dict[bytes, tuple[int, int]]]:
        """Return for each level the keys under which it has what is cached now, if it has that, and how many blocks and
        bytes each stands for. O(blocks)."""
        return {}

    def on_freed(self, group: BlockGroup, places: BlockPlaces) -> None:
        """Forget the blocks at ``places`` of ``group``, which are no longer cached."""

    def set_weights(self, weights: str) -> None:
        """Store and find records of ``weights`` from now on. Forget what waits to be stored."""

    def computed(self, request: RequestState) -> None:
        """Report how long the prompt of ``request`` took, once it is computed, so that loading can be compared with
        computing."""

    def took(self, seconds_per_token: float) -> None:
        """Compare loading with computing that takes ``seconds_per_token``, as a scheduler measured it."""

    def clear(self) -> None:
        """Forget everything that is cached, and drop what waits to be stored."""

    def check(self) -> None:
        """Prove that only cached blocks and kept checkpoints have hashes, and that every staging row in use has an owner
        that still needs it. Raises CheckFailed naming those that do not."""

    def stats(self) -> tuple[Any, ...]:
        """Return the counters of each tier, without I/O."""
        return ()

    def flush(self, timeout: float) -> bool:
        """Store what waits, for at most ``timeout`` seconds. Return whether all of it is stored. Raises BadInput."""
        return True

    def close(self, timeout: float) -> bool:
        """Store what waits and close all tiers, within ``timeout`` seconds in all. Return whether all of it is done.
        What a tier is still doing then ends in its own threads. Raises BadInput."""
        return True


class NoHandOvers:
    """The sender of a cache that hands nothing over."""

    def hand_over(self, request: RequestState, ttl: float, after: int, goes_on: bool, upto: int | None) -> Any:
        """Hand ``request`` over; see ``Sequence.hand_over``. Raises BadInput without a sender."""
        raise BadInput("this cache hands nothing over; make a sender first: cache.sender(transfer)", needed="sender")
