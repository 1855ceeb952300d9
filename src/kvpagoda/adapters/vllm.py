"""vLLM's ``KVCacheManager`` over a prefix tree, for its scheduler in a simulation and for simulators that make its calls.

    import vllm.v1.core.sched.scheduler
    from kvpagoda.adapters.vllm import KVCacheManager

    vllm.v1.core.sched.scheduler.KVCacheManager = KVCacheManager      # before the scheduler is made

The calls of vLLM 0.33 that a scheduler makes without speculative decoding, KV connectors and events, for models with one group
of full attention layers; ``kvpagoda.KVCache`` itself serves the others. What differs: no block hashes are needed; a block is
shared once its tokens are computed, not from the moment on when they are scheduled; ends of texts are evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.prefix import EvictionPolicy, Lease, Match
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.units import ceil_div, whole_number


class Request(Protocol):
    """What is read of a request. ``num_computed_tokens`` counts the tokens of steps that are not done yet too, of which
    there are ``num_in_flight_tokens``."""

    request_id: str
    all_token_ids: Many[int]
    num_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    skip_reading_prefix_cache: bool
    cache_salt: str | None
    lora_request: Any
    mm_features: Many[Any]
    status: Any


class Block(NamedTuple):
    """One block, as connectors and tests look at it."""

    block_id: int


@dataclass(frozen=True)
class KVCacheBlocks:
    """Ids of blocks of the one group, in the order of the text; ``match``: where they were found."""

    ids: tuple[int, ...] = ()
    match: Match | None = field(default=None, compare=False, repr=False)

    @property
    def blocks(self) -> tuple[tuple[Block, ...]]:
        """``blocks[group][column]``."""
        return (tuple(map(Block, self.ids)),)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Many[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """A list of ids for each group; None, if that is allowed, where there are none."""
        return None if allow_none and not self.ids else tuple([*self.ids] for _ in (group_ids or (0,)))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(self.ids + other.ids)

    def new_empty(self) -> KVCacheBlocks:
        """No blocks."""
        return KVCacheBlocks()


@dataclass
class PrefixCacheStats:
    """Counts since they were last taken: ``queries`` tokens of ``requests`` new requests were looked up, ``hits`` were found;
    and the same of requests that had been preempted. ``reset``: whether the cache was reset."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[Any, int] = field(default_factory=dict)


class Running:
    """A request that has blocks: their ids in the order of its text, and the lease of what of it is cached. ``doubles``:
    blocks of its own whose text others cached first; the worker knows them, so that it keeps them until its end."""

    def __init__(self, lease: Lease, shared: list[int]) -> None:
        self.lease, self.ids = lease, shared
        self.doubles: list[Ids] = []

    def own_ids(self) -> Ids:
        """The blocks that nobody else has."""
        return np.concatenate([*self.doubles, np.array(self.ids[self.lease.num_blocks :], np.int32)])


_REFUSED = {
    "use_eagle": False, "enable_kv_cache_events": False, "metrics_collector": None, "num_hash_lookahead_tokens": 0,
    "num_prefill_lookahead": 0, "dcp_world_size": 1, "pcp_world_size": 1, "enable_mamba_shared_prefix_checkpoint": False,
}  # fmt: skip
"""Arguments of vLLM's constructor, and the only value of each that is taken here."""
_UNUSED = {"max_in_flight_tokens", "scheduler_block_size", "hash_block_size"}


class KVCacheManager:
    """Blocks of the requests of one engine.

    ``kv_cache_config``: ``num_blocks``, of which id 0 is nobody's, and ``kv_cache_groups`` with one group of a
    ``kv_cache_spec`` that has ``block_size``. ``max_model_len``: tokens of the longest request. ``watermark``: the share of
    the blocks that stays free when a request is admitted beside others. ``policy``: which cached block goes first. Raises
    SchemaError for several groups and for windows, chunks and states; BadInput for ``others`` that ask for more than is here.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        enable_caching: bool = True,
        log_stats: bool = False,
        watermark: float = 0.0,
        policy: str | EvictionPolicy = "lru",
        **others: Any,
    ) -> None:
        asked = {name: value for name, value in others.items() if name not in _UNUSED}
        wrong = {name: value for name, value in asked.items() if name not in _REFUSED or value != _REFUSED[name]}
        if wrong or not 0 <= watermark < 1:
            raise BadInput(f"no KVCacheManager with {wrong or {'watermark': watermark}} here; leave it out")
        self.block_size = _block_size(kv_cache_config)
        self.max_model_len = whole_number(max_model_len, "max_model_len", 1)
        self.enable_caching, self.log_stats = enable_caching, log_stats
        self._blocks = SharedBlocks(kv_cache_config.num_blocks - 1, self.block_size, policy)
        self._tree = self._blocks.tree
        self._running: dict[str, Running] = {}
        self._asked: tuple[Request | None, Ids] = (None, np.empty(0, np.int32))  # who waits, and its tokens
        self._stats = PrefixCacheStats()
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.num_kv_cache_groups, self.empty_kv_cache_blocks = 1, KVCacheBlocks()
        self.mamba_shared_prefix_checkpoint = False
        self.coordinator = SimpleNamespace(single_type_managers=(), enable_partial_hash_hits=False)
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=kv_cache_config.num_blocks,
            get_num_free_blocks=lambda: self._blocks.num_available,
            get_usage=lambda: self.usage,
        )

    @property
    def usage(self) -> float:
        """The share of the blocks that requests use, 0 to 1."""
        return 1 - self._blocks.num_available / self._blocks.num_blocks

    # -- a request's life --------------------------------------------------------------------------------------------

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """(the leading blocks of ``request`` that are cached, their tokens, 0): at most ``max_cache_hit_length`` tokens (None:
        all but the last), whole blocks. Changes nothing. O(tokens)."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        before, tokens = self._asked
        if before is not request or len(tokens) != request.num_tokens:
            tokens = as_tokens(request.all_token_ids[:])
            self._asked = request, tokens
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        match = self._tree.match(tokens, _namespace(request), most // self.block_size * self.block_size)
        return KVCacheBlocks(tuple(match.ids[0].tolist()), match), match.num_blocks * self.block_size, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Blocks for ``num_new_tokens`` more tokens of ``request``, behind those that are computed and the
        ``num_new_computed_tokens`` that were found in ``new_computed_blocks``. Returns the blocks that are added; None, and
        nothing has changed, if there is no room: for them beside ``reserved_blocks``, or, if ``full_sequence_must_fit``, for
        all of its tokens.

        What it has computed so far may be shared from here on. Raises BadInput for what others computed, for encoders, and
        for nothing to do; StaleHandle if what was found has been evicted since.
        """
        if num_external_computed_tokens or num_encoder_tokens or delay_cache_blocks:
            raise BadInput("tokens from connectors and encoders have no blocks here; leave them out")
        if num_new_tokens + num_new_computed_tokens < 1:
            raise BadInput("num_new_tokens must be at least 1 where no computed tokens are added")
        known, computed = self._running.get(request.request_id), request.num_computed_tokens + num_new_computed_tokens
        if known is not None:
            self.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
        running = known or self._pin(request, num_new_computed_tokens, new_computed_blocks)
        ids = running.ids
        end = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        need = self._columns(end) - len(ids)
        most = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
        is_new = has_scheduled_reqs and getattr(request.status, "name", "") in ("WAITING", "PREEMPTED")
        spare = self._blocks.num_available - (self.watermark_blocks if is_new else 0)
        if need > spare - reserved_blocks or self._columns(most) - len(ids) > spare:
            if known is None:
                self._tree.unpin(running.lease)
            return None
        added = self._blocks.take(max(0, need)).tolist()
        if known is None:
            self._running[request.request_id] = running
            self._asked = None, self._asked[1][:0]
        ids.extend(added)
        return KVCacheBlocks(tuple(added))

    def _pin(self, request: Request, num_tokens: int, found: KVCacheBlocks | None) -> Running:
        """``request`` with the first ``num_tokens`` tokens, whole blocks, of what was ``found``, and nothing more."""
        num_blocks, rest = divmod(num_tokens, self.block_size)
        if rest or request.num_computed_tokens:
            raise BadInput(
                f"request {request.request_id} has no blocks yet: it begins with whole blocks of {self.block_size} tokens "
                f"that were found, not with {num_tokens} tokens and {request.num_computed_tokens} computed ones"
            )
        match = None if found is None or not num_blocks else found.match
        if match is None:
            match = self._tree.match(np.empty(0, np.int32), _namespace(request))
        lease = self._tree.pin(match, num_blocks)
        return Running(lease, match.ids[0, :num_blocks].tolist())

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The first ``num_computed_tokens`` tokens of ``request`` are computed: its whole blocks may be shared from here on.
        O(1) if none has become whole."""
        running = self._running.get(request.request_id)
        if running is None or not self.enable_caching:
            return
        size, start = self.block_size, running.lease.num_blocks
        end = min(num_computed_tokens, request.num_tokens, len(running.ids) * size) // size
        if end <= start:
            return
        ids = np.array([running.ids[start:end]], np.int32)
        inserted = self._tree.insert(running.lease, as_tokens(request.all_token_ids[start * size : end * size]), ids)
        if inserted.num_added < end - start:
            running.doubles.append(ids[inserted.duplicates])

    def free(self, request: Request) -> None:
        """``request`` ends or is preempted: what it computed stays cached while memory lasts. Nothing for one without
        blocks."""
        if request.request_id not in self._running:
            return
        self.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
        running = self._running[request.request_id]
        self._blocks.free.release(running.own_ids())
        self._tree.touch(running.lease)
        self._tree.unpin(running.lease)
        del self._running[request.request_id]

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request."""
        running = self._running.get(request_id)
        return self.empty_kv_cache_blocks if running is None else KVCacheBlocks(tuple(running.ids))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Their ids, for each group."""
        return self.get_blocks(request_id).get_block_ids() or ([],)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether what is cached may be looked up for ``request``."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of ``request`` that others find."""
        running = self._running.get(request.request_id)
        return 0 if running is None else running.lease.num_blocks * self.block_size

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached. False, forgetting nothing, while a request has blocks."""
        if self._running:
            return False
        self._blocks.free.release(self._tree.clear().ids[0])
        self._stats.reset = True
        return True

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count a request that was admitted with ``num_hits`` cached tokens."""
        if self.log_stats and self.prefix_cache_lookup_enabled(request):
            kind, stats = "preempted_" if request.num_preemptions else "", self._stats
            for name, more in (("requests", 1), ("queries", request.num_tokens), ("hits", num_hits)):
                setattr(stats, kind + name, getattr(stats, kind + name) + more)

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The counts since the last call; None without ``log_stats``."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats if self.log_stats else None

    def check(self) -> None:
        """Prove that every block is in one place. Raises CheckFailed. O(blocks)."""
        self._blocks.check(len(self._running))

    # -- what a scheduler asks, and there is none of here ------------------------------------------------------------

    def new_step_starts(self) -> None:
        """A step begins."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Full attention skips no blocks."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """None are told."""
        return [0]

    def take_events(self) -> list[Any]:
        """There are none."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """No block needs zeros."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """No block is copied."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """There are no states."""
        return {}

    def _columns(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)


def _block_size(config: Any) -> int:
    """Tokens in a block of the one group. Raises SchemaError."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    spans = ("sliding_window", "attention_chunk_size")
    if len(specs) != 1 or not hasattr(specs[0], "head_size") or any(getattr(specs[0], one, None) for one in spans):
        names = ", ".join(type(spec).__name__ for spec in specs)
        raise SchemaError(
            f"one group of full attention is served here, not [{names}]; kvpagoda.KVCache serves the others"
        )
    return whole_number(specs[0].block_size, "a block size", 1)


def _namespace(request: Request) -> bytes:
    """Only requests of one salt and adapter share blocks. Raises BadInput for images."""
    if request.mm_features:
        raise BadInput(f"request {request.request_id} has images or the like, which are not told apart here")
    lora = request.lora_request
    return (
        b""
        if lora is None and request.cache_salt is None
        else repr((request.cache_salt, lora and lora.lora_name)).encode()
    )
