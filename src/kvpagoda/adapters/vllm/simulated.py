"""A replacement for vLLM's ``KVCacheManager``, over a prefix tree, for its scheduler in simulations and for simulators.

    import vllm.v1.core.sched.scheduler
    from kvpagoda.adapters.vllm import KVCacheManager

    vllm.v1.core.sched.scheduler.KVCacheManager = KVCacheManager      # before the scheduler is made

It has the methods that a scheduler of vLLM 0.33 calls without speculative decoding, KV connectors and events, for
groups of full attention, windows, chunks and states ("align" mode). Differences: it needs no block hashes; a block is
shared once its tokens are computed, not when they are scheduled; ends of texts are evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvpagoda.adapters.group_blocks import LAST_STATE, GroupBlocks, Table
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.prefix import EvictionPolicy, Match
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.schema import Growth
from kvpagoda.units import whole_number


class Request(Protocol):
    """The attributes of a request that are read here.

    ``num_computed_tokens`` includes ``num_in_flight_tokens``, the tokens of steps that are not done yet.
    """

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
    """One block, in the form that connectors and tests expect."""

    block_id: int


@dataclass(frozen=True)
class KVCacheBlocks:
    """Block ids: ``ids[group]`` in order of position, 0 where there is no block. ``match``: where they were found."""

    ids: tuple[tuple[int, ...], ...]
    match: Match | None = field(default=None, compare=False, repr=False)

    @property
    def blocks(self) -> tuple[tuple[Block, ...], ...]:
        """``blocks[group][column]``."""
        return tuple(tuple(map(Block, ids)) for ids in self.ids)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Many[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return a list of ids for each group (of ``group_ids``); None if there are none and ``allow_none`` is set."""
        chosen = self.ids if group_ids is None else [self.ids[group] for group in group_ids]
        return None if allow_none and not any(chosen) else tuple([*ids] for ids in chosen)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(tuple(mine + more for mine, more in zip(self.ids, other.ids)))

    def new_empty(self) -> KVCacheBlocks:
        """Return an object with the same groups and no blocks."""
        return KVCacheBlocks(((),) * len(self.ids))


@dataclass
class PrefixCacheStats:
    """Counts since the last ``make_prefix_cache_stats``. ``queries``: tokens looked up for ``requests`` new requests;
    ``hits``: those found. ``preempted_..``: the same for preempted requests. ``reset``: whether the cache was reset."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[Any, int] = field(default_factory=dict)


_REFUSED = {
    "use_eagle": False, "enable_kv_cache_events": False, "metrics_collector": None, "num_hash_lookahead_tokens": 0,
    "num_prefill_lookahead": 0, "dcp_world_size": 1, "pcp_world_size": 1, "enable_mamba_shared_prefix_checkpoint": False,
}  # fmt: skip
"""Arguments of vLLM's constructor, and the only value of each that is accepted here."""
_UNUSED = {"scheduler_block_size", "hash_block_size"}


class KVCacheManager:
    """The blocks of the requests of one engine, and the prefixes cached in them.

    ``kv_cache_config``: has ``num_blocks``, of which id 0 is never used, and ``kv_cache_groups``, each with a
    ``kv_cache_spec`` that has ``block_size``; all groups share one pool. ``max_model_len``: tokens of the longest
    request. ``max_in_flight_tokens``: the most tokens of one request in a step. ``watermark``: the share of the blocks
    that stays free when a request is admitted while others run. ``policy``: which cached text is evicted first. Raises
    SchemaError for groups that are not supported here, BadInput for ``others`` that ask for unsupported features.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        enable_caching: bool = True,
        log_stats: bool = False,
        watermark: float = 0.0,
        policy: str | EvictionPolicy = "lru",
        max_in_flight_tokens: int | None = None,
        **others: Any,
    ) -> None:
        asked = {name: value for name, value in others.items() if name not in _UNUSED}
        wrong = {name: value for name, value in asked.items() if name not in _REFUSED or value != _REFUSED[name]}
        if wrong or not 0 <= watermark < 1:
            raise BadInput(f"no KVCacheManager with {wrong or {'watermark': watermark}} here; leave it out")
        sizes, growths = zip(*(_growth(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups))
        if enable_caching and len({*sizes}) > 1:
            raise SchemaError(f"groups with blocks of {sorted({*sizes})} tokens share no prefixes here; one size does")
        self.max_model_len = whole_number(max_model_len, "max_model_len", 1)
        self.enable_caching, self.log_stats = enable_caching, log_stats
        self._blocks = GroupBlocks(kv_cache_config.num_blocks - 1, sizes, growths, policy)
        self.block_size, self._tree, self._growths = sizes[0], self._blocks.tree, growths
        self._step = self.max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        self._running: dict[str, Table] = {}
        self._asked: tuple[Request | None, Ids] = (None, np.empty(0, np.int32))  # the last one looked up, its tokens
        self._stats = PrefixCacheStats()
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.num_kv_cache_groups, self.empty_kv_cache_blocks = len(sizes), KVCacheBlocks(((),) * len(sizes))
        self._needs_zeros = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
        self._to_zero: list[int] = []
        self.mamba_shared_prefix_checkpoint = False
        self.coordinator = SimpleNamespace(single_type_managers=(), enable_partial_hash_hits=False)
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=kv_cache_config.num_blocks,
            get_num_free_blocks=lambda: self._blocks.num_available,
            get_usage=lambda: self.usage,
        )

    @property
    def usage(self) -> float:
        """The share of the blocks that are in use by requests, 0 to 1."""
        return 1 - self._blocks.num_available / self._blocks.num_blocks

    # -- a request's life --------------------------------------------------------------------------------------------

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Return the cached prefix of ``request``: (blocks, number of their tokens, boundary). Changes nothing.

        At most ``max_cache_hit_length`` tokens (None: all but the last), in whole blocks, up to where all groups can be
        resumed. ``boundary``: the number of tokens found in the tree, if a state is missing at their end and is worth
        keeping there; else 0. O(tokens).
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        before, tokens = self._asked
        if before is not request or len(tokens) != request.num_tokens:
            tokens = as_tokens(request.all_token_ids[:])
            self._asked = request, tokens
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        size = self.block_size
        match = self._tree.match(tokens, _namespace(request), most // size * size)
        end = self._blocks.resumable(match)
        is_late = end < match.num_blocks and any(growth.is_state for growth in self._growths)
        return self._blocks_of(match, end), end * size, match.num_blocks * size * is_late

    def _blocks_of(self, match: Match, num_blocks: int) -> KVCacheBlocks:
        """Return the blocks with which a request begins that resumes after ``num_blocks`` blocks of ``match``."""
        ids = tuple(tuple(column) for column in self._blocks.found(match, num_blocks))
        return KVCacheBlocks(ids, match)

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
        """Add blocks for ``num_new_tokens`` more tokens of ``request`` and return them; None if there is no room.

        The tokens follow the computed ones and the ``num_new_computed_tokens`` found in ``new_computed_blocks``. There
        must be room for them beside ``reserved_blocks``, and with ``full_sequence_must_fit`` for all tokens of
        ``request``; if not, nothing is allocated. Blocks computed so far become shareable. Raises BadInput for external
        tokens, encoder tokens and for no tokens; StaleHandle if blocks found before were evicted.
        """
        if num_external_computed_tokens or num_encoder_tokens or delay_cache_blocks:
            raise BadInput("tokens from connectors and encoders are not supported here; leave them out")
        if num_new_tokens + num_new_computed_tokens < 1:
            raise BadInput("num_new_tokens must be at least 1 where no computed tokens are added")
        known, computed = self._running.get(request.request_id), request.num_computed_tokens + num_new_computed_tokens
        blocks, processed = self._blocks, request.num_computed_tokens - request.num_in_flight_tokens
        if known is not None:
            self.cache_blocks(request, processed)
            blocks.slide(known, processed)
        table = known or self._pin(request, num_new_computed_tokens, new_computed_blocks)
        columns = blocks.lacking(table, min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len))
        most = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
        is_new = has_scheduled_reqs and getattr(request.status, "name", "") in ("WAITING", "PREEMPTED")
        spare = blocks.num_available - (self.watermark_blocks if is_new else 0)
        if blocks.num_needed(columns) > spare - reserved_blocks or blocks.most_needed(table, most, self._step) > spare:
            if known is None:
                blocks.undo(table)
            return None
        added = blocks.grow(table, columns)
        if known is None:
            blocks.admit(table)
            self._running[request.request_id] = table
            if self._asked[0] is request:
                table.text = self._asked[1]
            self._asked = None, self._asked[1][:0]
        if self._needs_zeros:
            self._to_zero += [id for ids, growth in zip(added, self._growths) if not growth.is_state for id in ids]
        return KVCacheBlocks(tuple(map(tuple, added)))

    def _pin(self, request: Request, num_tokens: int, found: KVCacheBlocks | None) -> Table:
        """Return a table that begins with the first ``num_tokens`` tokens, whole blocks, of ``found``."""
        num_blocks, rest = divmod(num_tokens, self.block_size)
        if rest or request.num_computed_tokens:
            raise BadInput(
                f"request {request.request_id} has no blocks yet: it begins with whole blocks of {self.block_size} tokens "
                f"that were found, not with {num_tokens} tokens and {request.num_computed_tokens} computed ones"
            )
        known = None if found is None else found.match
        match = known if num_blocks else None
        if match is None:
            match = self._tree.match(np.empty(0, np.int32), _namespace(request))
        table = self._blocks.begin(match, num_blocks)
        table.parting = 0 if known is None else known.num_blocks
        return table

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the whole blocks of the first ``num_computed_tokens`` tokens, which are computed, shareable.

        O(1) if no further block is whole.
        """
        table = self._running.get(request.request_id)
        if table is None or not self.enable_caching:
            return
        size, start = self.block_size, table.lease.num_blocks
        end = min(num_computed_tokens, request.num_tokens) // size
        if end > start:
            begin, stop = start * size, end * size
            is_known = stop <= len(table.text)
            tokens = table.text[begin:stop] if is_known else as_tokens(request.all_token_ids[begin:stop])
            self._blocks.publish(table, tokens, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Free the blocks of ``request``, which ended or is preempted; does nothing for one without blocks.

        Blocks that it computed stay cached until they are evicted.
        """
        if request.request_id not in self._running:
            return
        self.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
        self._blocks.end(self._running.pop(request.request_id))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return all blocks of a request."""
        table = self._running.get(request_id)
        return self.empty_kv_cache_blocks if table is None else KVCacheBlocks(tuple(map(tuple, table.ids)))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the block ids of a request, a list for each group."""
        return self.get_blocks(request_id).get_block_ids() or ()

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Release the window blocks that tokens after the first ``processed_computed_tokens`` do not read."""
        if request_id in self._running:
            self._blocks.slide(self._running[request_id], processed_computed_tokens)

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks that the worker must fill with zeros, if the config requires that: those added since the
        last call, except blocks of states."""
        ids, self._to_zero = self._to_zero, []
        return ids

    # -- the prefix cache --------------------------------------------------------------------------------------------

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Return whether cached blocks may be looked up for ``request``."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return the number of tokens of ``request`` that are cached for other requests."""
        table = self._running.get(request.request_id)
        return 0 if table is None else table.lease.num_blocks * self.block_size

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks and return True; return False, evicting none, while a request has blocks."""
        if self._running:
            return False
        self._blocks.clear()
        self._stats.reset = True
        return True

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count ``request``, which was admitted with ``num_hits`` cached tokens."""
        if self.log_stats and self.prefix_cache_lookup_enabled(request):
            kind, stats = "preempted_" if request.num_preemptions else "", self._stats
            for name, more in (("requests", 1), ("queries", request.num_tokens), ("hits", num_hits)):
                setattr(stats, kind + name, getattr(stats, kind + name) + more)

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the counts since the last call; None without ``log_stats``."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats if self.log_stats else None

    def check(self) -> None:
        """Prove that every block is free, cached, or held by a request. Raises CheckFailed. O(blocks)."""
        self._blocks.prove([*self._running.values()])

    # -- calls of the scheduler for features that are not supported here ---------------------------------------------

    def new_step_starts(self) -> None:
        """Do nothing; the scheduler calls this when a step begins."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return 0 for each group: common prefixes are not reported."""
        return [0] * self.num_kv_cache_groups

    def take_events(self) -> list[Any]:
        """Return no events."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no copies."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return no offloads, because there are no connectors."""
        return {}


_NOT_SERVED = {
    "CircularBufferSpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec", "HiSparseHotSpec", "HiSparseResidentSpec",
    "RSWASpec",
}  # fmt: skip


def _growth(spec: Any) -> tuple[int, Growth]:
    """Return the block size in tokens and the growth of a group with ``spec``. Raises SchemaError.

    A spec with both ``sliding_window`` and ``attention_chunk_size``, or neither, is full attention. Of several specs of
    one kind, the first is used.
    """
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    window, chunk = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
    mode, name = getattr(spec, "mamba_cache_mode", ""), type(spec).__name__
    more = ("extra_retained_tokens", "num_speculative_blocks", "num_prefill_checkpoint_blocks", "bounded_replay")
    is_odd = name in _NOT_SERVED or any(getattr(spec, option, 0) for option in more)
    if is_odd or mode not in ("", "align", "none") or not (mode or hasattr(spec, "head_size")):
        raise SchemaError(
            f"{name} is not supported here; full attention, windows, chunks and states are, without speculative decoding"
        )
    if mode:
        growth = LAST_STATE
    elif hasattr(spec, "sliding_window") and hasattr(spec, "attention_chunk_size"):
        growth = Growth()
    else:
        growth = Growth(window=window, chunk=chunk)
    return whole_number(spec.block_size, "a block size", 1), growth


def _namespace(request: Request) -> bytes:
    """Return the namespace of ``request``, which is made of its salt and adapter. Raises BadInput for media."""
    if request.mm_features:
        raise BadInput(f"request {request.request_id} has images or other media, which are not supported here")
    lora = request.lora_request
    is_shared = lora is None and request.cache_salt is None
    return b"" if is_shared else repr((request.cache_salt, lora and lora.lora_name)).encode()
