"""What a simulation reads of a cache, and does to it, after every step."""

from __future__ import annotations

from kvpagoda.abc import Status
from kvpagoda.arrays import Tokens
from kvpagoda.core.cache.sequence import Sequence, requests_of
from kvpagoda.core.kv_cache import KVCache


class Probe:
    """One number of a cache at a time, of those that ``KVCache.stats`` counts together: O(groups) where nothing else is
    said, for simulations that ask after every step. ``evict`` and ``load_always`` change what a cache decides by
    itself: not for engines.

    Args:
        cache: that is asked.

    Examples:
        >>> from kvpagoda import KVCache, Schema
        >>> from kvpagoda.schema import Attention, Layer
        >>> schema = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
        >>> cache = KVCache(schema, num_blocks=4, block_size=2, max_requests=1, device="none")
        >>> with cache.open(range(5)) as sequence:
        ...     sequence.commit(range(5))
        >>> probe = Probe(cache)
        >>> probe.num_cached, probe.num_closed, probe.evict(1), probe.num_cached, probe.num_evicted
        (3, 1, None, 2, 1)
    """

    def __init__(self, cache: KVCache) -> None:
        self._core = cache.core

    @property
    def num_closed(self) -> int:
        """Requests that ended."""
        return self._core.counters.closed

    @property
    def num_evicted(self) -> int:
        """Blocks that were evicted."""
        return sum(self._core.prefix.num_evicted)

    @property
    def num_evicted_checkpoints(self) -> int:
        """Checkpoints that were evicted."""
        return self._core.prefix.num_evicted_checkpoints

    @property
    def num_cached(self) -> int:
        """Blocks of texts that are cached."""
        return self._core.prefix.tree.num_cached

    @property
    def is_plain(self) -> bool:
        """Whether one group keeps all tokens, and there are no tiers: then a commit does more only at ends of blocks."""
        return len(self._core.groups) == 1 and not self._core.bounded and not self._core.tiers.levels

    @property
    def num_loaded(self) -> list[int]:
        """For each tier, the records that were loaded, of blocks and of checkpoints."""
        return [level.tier.stats().loads.get(Status.OK, 0) for level in self._core.tiers.levels]

    def unusable_nbytes(self) -> int:
        """Return the bytes that are unused and that no group in need could use."""
        return self._core.unusable_nbytes()

    def runs(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many blocks a sequence has, and in how many runs of ids that follow one another. O(blocks).

        Args:
            sequence: of the cache.
        """
        counts = [group.runs((sequence.slot,)) for group in self._core.groups]
        return sum(blocks for blocks, _ in counts), sum(runs for _, runs in counts)

    def settles_at(self, sequence: Sequence) -> int:
        """Return the length from which on a commit to a sequence does more than append tokens: it publishes blocks, slides
        windows, or keeps copies of states. What is committed before may come together.

        Args:
            sequence: of the cache.
        """
        (request,) = requests_of(sequence, self._core)
        return request.settle_at

    def resumable(self, tokens: Tokens) -> int:
        """Return how many tokens a request without a namespace would find cached. O(tokens).

        Args:
            tokens: int32 ``[n]``.
        """
        return self._core.prefix.find(tokens, self._core.namespaces.key(None))[1].resumable

    def evict(self, num_blocks: int) -> None:
        """Evict blocks of texts that nobody uses or pins.

        Args:
            num_blocks: how many, or as many as can be.
        """
        self._core.capacity.forget(self._core.prefix.evict_texts, num_blocks)

    def load_always(self) -> None:
        """Load what tiers have, whatever this machine takes for it."""
        self._core.tiers.took(1.0)
