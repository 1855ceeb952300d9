"""vLLM's cache manager with our rules of what stays cached.

vLLM's own code keeps its books: tables, reference counts, hashes, connectors, drafts, media, events. Ours decides which
free block is used again (``eviction``), at which positions of a text windows and states are kept (the rule of
``kvpagoda.retention``, with its parameters for vLLM), and skips the steps of a request in which nothing can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_manager
from vllm.v1.core import single_type_kv_cache_manager as groups
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from kvpagoda.adapters.vllm.eviction import EvictionQueue, PolicyQueue
from kvpagoda.adapters.vllm.memory import units_per_state
from kvpagoda.adapters.vllm.options import Options
from kvpagoda.adapters.vllm.promises import PoolPromises
from kvpagoda.adapters.vllm.recent import Recent
from kvpagoda.adapters.vllm.spans import SpanQueue, Spans
from kvpagoda.errors import CheckFailed
from kvpagoda.policies import as_policy
from kvpagoda.retention import RetentionRule
from kvpagoda.units import ceil_div

_PREDICTABLE_KINDS = {
    groups.FullAttentionManager, groups.SinkFullAttentionManager, groups.SlidingWindowManager,
    groups.ChunkedLocalAttentionManager, groups.MambaManager, groups.CrossAttentionManager,
}  # fmt: skip
"""Kinds of groups of which it is known what changes them next."""
_UNHASHED = (kv_cache_interface.CrossAttentionSpec, kv_cache_interface.EncoderOnlyAttentionSpec)
_TOUCH_INTERVAL = 64
"""A position is as recently used as it was until this part of the memory has become free."""
_TEXTS = 4
"""How many blocks of texts are remembered for each block of memory of a group, in each of two generations."""


class UnchangedUntil(NamedTuple):
    """Until when a running request changes nothing: while its tokens have ``room`` in its blocks, no block before
    ``whole`` tokens becomes whole, and fewer than ``slides`` tokens are processed."""

    room: int
    whole: int
    slides: int


class KVCacheManager(kv_cache_manager.KVCacheManager):  # type: ignore[misc]
    """vLLM's ``KVCacheManager``, with all its arguments.

    Differences, where prefixes are cached. Every whole block that was computed can be found until it is used again. Of
    groups with windows, chunks or states, blocks that left their window are used again sooner, but for those at
    positions where a text stays resumable: where a request ended, until another one goes on there; where texts part, or
    one was resumed in the middle; and after every ``checkpoint_every`` tokens. These are evicted with the texts.

    Args:
        *args: vLLM's.
        options: see ``Options``; None for the default.
        **kwargs: vLLM's.
    """

    def __init__(self, *args: Any, options: Options | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options or Options()
        managers = self.coordinator.single_type_managers
        self._bounded = [manager for manager in managers if self._is_bounded(manager)]
        config = self.kv_cache_config
        units = units_per_state(config.kv_cache_groups) if config.kv_cache_tensors else 1  # placed by us, or not at all
        self._spans = Spans(self.coordinator, units, self.max_model_len) if units > 1 else None
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        self._hashed = [
            i for i, spec in enumerate(specs) if spec.prefix_cacheable and not isinstance(spec, _UNHASHED)
        ]  # the groups whose blocks have hashes
        self._is_predictable = {type(manager) for manager in managers} <= _PREDICTABLE_KINDS and not getattr(
            self.block_pool, "num_hash_lookahead_tokens", 0
        )
        self._missed: tuple[Request | None, int, int] = None, 0, 0  # the last one looked up, and what it did not find
        self._unchanged: dict[str, UnchangedUntil] = {}
        self._positions: dict[str, list[int]] = {}  # request -> after how many tokens to keep it, the next one last
        most = _TEXTS * self.block_pool.num_gpu_blocks // max(1, len(managers))
        self._seen = Recent(most) if self._bounded else None
        self._resumable = Recent(most)  # ends of texts at positions that stay
        self._held_at: dict[Any, int] = {}  # such an end -> the queue's clock when a request held it last
        self._alike: dict[Any, list[Any]] = {}  # the bounded groups, those that need the same blocks together
        for manager in self._bounded:
            self._alike.setdefault((manager.kv_cache_spec, manager.use_eagle), []).append(manager)
        every = self.options.checkpoint_every or self.coordinator.retention_interval or 0
        unit = self.coordinator.scheduler_block_size if self._bounded else 1  # also where hits end inside a block
        self.rule = RetentionRule(unit, every, keeps_prompt_end=False)
        if self._bounded:
            self.coordinator.retention_interval = None  # all blocks can be found; which ones stay is decided here
        size = None if self._spans is None else self._spans.size
        self.promises = PoolPromises(self.block_pool, self.options.promised, size=size)
        self._order()

    def _is_bounded(self, manager: Any) -> bool:
        """Return whether a group keeps less than a whole text, so that its blocks leave requests before these end."""
        is_cached = self.enable_caching and manager.kv_cache_spec.prefix_cacheable
        return is_cached and _skips(manager) and manager.block_pool is self.block_pool

    def _order(self) -> None:
        """Give the pool, in which nothing is cached, the order in which its blocks are used again."""
        pool, policy = self.block_pool, None
        self._has_order = False
        if self.enable_caching:
            policy = as_policy(self.options.policy, pool.num_gpu_blocks)
        bounded = {manager.kv_cache_group_id: manager.block_size for manager in self._bounded}
        if self._spans is not None:
            self._has_order = bool(bounded)
            pool.free_block_queue = SpanQueue(pool, self._spans.units, bounded)
            return
        if not self._bounded and policy is None:
            return  # vLLM's own queue: least recently used, ends of texts first
        self._has_order = True
        free = pool.free_block_queue.get_all_free_blocks()
        if policy is None:
            pool.free_block_queue = EvictionQueue(free, pool.num_gpu_blocks, bounded)
        else:
            pool.free_block_queue = PolicyQueue(free, pool.num_gpu_blocks, bounded, policy)

    # -- a request's life --------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request, *most: int | None) -> tuple[KVCacheBlocks, int, int]:
        """As vLLM's. The boundary is also where texts that were evicted since part from that of ``request``."""
        blocks, num_tokens, boundary = super().get_computed_blocks(request, *most)
        if self._seen is not None and self.prefix_cache_lookup_enabled(request):
            unit, aligned = self.block_pool.hash_block_size, self.coordinator.scheduler_block_size
            known = self._seen.num_known(request.block_hashes, num_tokens // unit) * unit // aligned * aligned
            text = max(num_tokens, boundary)
            self._missed = request, text - num_tokens, max(0, known - text)
            if known > text:
                boundary = known
        return blocks, num_tokens, boundary

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *others: Any,
        **more: Any,
    ) -> KVCacheBlocks | None:
        """As vLLM's."""
        name = request.request_id
        unchanged = self._unchanged.get(name)
        computed = request.num_computed_tokens
        if unchanged is not None and new_computed_blocks is None and not (more or others):
            end = computed + num_new_tokens
            if (
                end + num_lookahead_tokens <= unchanged.room
                and end < unchanged.whole
                and computed - request.num_in_flight_tokens < unchanged.slides
                and num_new_tokens
            ):
                return self.empty_kv_cache_blocks
        if (
            more.get("full_sequence_must_fit")
            and computed + num_new_computed_tokens + num_new_tokens >= request.num_tokens
        ):
            more["full_sequence_must_fit"] = False  # it is what has to fit anyway: once is enough
        args = (request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, *others)
        spans, found = self._spans, new_computed_blocks
        if spans is not None and found is not None and not spans.may_begin(request, found.blocks):
            return None
        added: KVCacheBlocks | None = super().allocate_slots(*args, **more)
        while added is None and self.promises.drop_lowest_promise():  # running requests come first
            added = super().allocate_slots(*args, **more)
        if added is None:
            return None
        if spans is not None:
            spans.goes_to(name, computed + num_new_computed_tokens + num_new_tokens)
        if new_computed_blocks is not None and getattr(request, "kv_hints", None) is not None:
            self.promises.began(request)
        if self._has_order:
            if name not in self._positions:
                self._begin(request, num_new_computed_tokens, new_computed_blocks)
            self._keep_positions(request, computed + num_new_computed_tokens + num_new_tokens)
        if self._is_predictable and request.status is RequestStatus.RUNNING:
            self._predict(request, num_new_tokens)
        return added

    def _begin(self, request: Request, num_found: int, found: KVCacheBlocks | None) -> None:
        """Note that ``request`` has its first blocks, of which ``found`` were cached, and at which positions to keep it."""
        queue = self.block_pool.free_block_queue
        if found is not None:
            begun: list[KVCacheBlock] = []
            for needed, managers in self._needed(num_found):
                for manager in managers:
                    begun += found.blocks[manager.kv_cache_group_id][needed]
            if queue.found(begun):
                self._stays(request, num_found)
            queue.used(block for blocks in found.blocks for block in blocks if not block.is_null)
        positions: list[int] = []
        if self._seen is not None:
            self._seen.add(request.block_hashes)
            if self._missed[0] is request:
                queue.cold_aging.missed(*self._missed[1:])
            positions = self.rule.positions(request.num_prompt_tokens, num_found, request.shared_prefix_boundary or 0)
        self._positions[request.request_id] = positions[::-1]

    def _needed(self, position: int) -> Iterator[tuple[slice, list[Any]]]:
        """Yield which blocks of a request are needed to resume it after ``position`` tokens, and by which groups."""
        for managers in self._alike.values():
            size = managers[0].block_size
            first = max(0, managers[0].get_num_skipped_tokens(position)) // size
            yield slice(first, ceil_div(position, size) + managers[0].use_eagle), managers

    def _keep_positions(self, request: Request, num_tokens: int) -> None:
        """Mark what the positions of ``request`` among its first ``num_tokens`` tokens need."""
        positions = self._positions.get(request.request_id)
        while positions and positions[-1] <= num_tokens:
            position = positions.pop()
            self._stays(request, position)
            for needed, managers in self._needed(position):
                for manager in managers:
                    self.block_pool.free_block_queue.keep(manager.req_to_blocks[request.request_id][needed])

    def _stays(self, request: Request, position: int) -> None:
        """Note that the text of ``request`` stays resumable after ``position`` tokens, as long as it is used."""
        units = position // self.block_pool.hash_block_size
        self._resumable.add(request.block_hashes[max(0, units - 1) : units])

    def _hold(self, request: Request, position: int) -> None:
        """Let ``request`` hold again what resuming it after ``position`` tokens needs, if that is still cached.

        Windows leave their request as it goes on, a state when the next one is written. They are as recently used as the
        text around them."""
        pool, name = self.block_pool, request.request_id
        for needed, managers in self._needed(position):
            for manager in managers:
                table = manager.req_to_blocks.get(name, [])
                for index in [i for i, block in enumerate(table[needed], needed.start) if block.is_null]:
                    hashes = BlockHashListWithBlockSize(request.block_hashes, pool.hash_block_size, manager.block_size)
                    if index < len(hashes):
                        cached = pool.get_cached_block(hashes[index], [manager.kv_cache_group_id])
                        if cached is not None:
                            pool.touch(cached)
                            table[index] = cached[0]

    def _hold_positions(self, request: Request) -> None:
        """Let ``request`` hold what its text's positions need, but for those that were held a moment ago."""
        queue, unit, hashes = self.block_pool.free_block_queue, self.block_pool.hash_block_size, request.block_hashes
        if len(self._held_at) > self.block_pool.num_gpu_blocks:
            self._held_at.clear()
        for index in self._resumable.which(hashes):
            held_at = self._held_at.get(hashes[index])
            if held_at is None or queue.clock - held_at > self.block_pool.num_gpu_blocks // _TOUCH_INTERVAL:
                self._held_at[hashes[index]] = queue.clock
                self._hold(request, (index + 1) * unit)

    def _predict(self, request: Request, num_new_tokens: int) -> None:
        """Note until when ``request``, which has blocks for ``num_new_tokens`` more tokens, changes nothing."""
        name, computed = request.request_id, request.num_computed_tokens
        self._unchanged.pop(name, None)
        if computed + num_new_tokens < request.num_tokens:
            return  # the next step is long, and changes something
        room, slides = self.max_model_len, 1 << 62
        for manager in self.coordinator.single_type_managers:
            if name in manager._partial_hit_reqs or name in getattr(manager, "_checkpoints", ()):
                return
            if not isinstance(manager, groups.CrossAttentionManager):
                spare = getattr(manager, "num_speculative_blocks", 0)
                room = min(room, (len(manager.req_to_blocks[name]) - spare) * manager.block_size)
        processed = computed - request.num_in_flight_tokens
        for manager in self.coordinator.single_type_managers:
            size = manager.block_size
            if isinstance(manager, groups.ChunkedLocalAttentionManager):
                slides = min(slides, (processed // size + 1) * size)
            elif _skips(manager):
                slides = min(slides, processed + size - manager.get_num_skipped_tokens(processed) % size)
        whole = 1 << 62
        if self.enable_caching:
            unit = self.block_pool.hash_block_size
            whole = (min(computed + num_new_tokens, request.num_tokens) // unit + 1) * unit
        self._unchanged[name] = UnchangedUntil(room, whole, slides)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """As vLLM's."""
        unchanged = self._unchanged.get(request.request_id)
        if unchanged is not None and num_computed_tokens < unchanged.whole:
            return
        super().cache_blocks(request, num_computed_tokens)
        if self._has_order:
            self._keep_positions(request, num_computed_tokens)

    def estimate_cached_tokens(self, request: Request) -> int:
        """As vLLM's: the last block of a group that has a hash ends furthest in the text."""
        ends = []
        for index in self._hashed:
            blocks = self.coordinator.single_type_managers[index].req_to_blocks.get(request.request_id, ())
            known = (block.block_hash_num_tokens for block in reversed(blocks))
            ends.append(next(filter(None, known), 0))
        return min(ends, default=0)

    def free(self, request: Request) -> None:
        """As vLLM's: the blocks at the end of the text are used again first, in all groups alike."""
        self.promises.expire()
        if request.is_finished():
            self.promises.at_end(request, partial(self._blocks_of, request))
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request)))

    def _blocks_of(self, request: Request, num_tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of ``request`` from which its first ``num_tokens`` can be resumed, in the order of their
        positions."""
        position = num_tokens // self.rule.unit * self.rule.unit
        columns: list[list[KVCacheBlock]] = []
        sizes: list[int] = []
        if self._bounded:
            self._hold(request, position)
        for manager in self.coordinator.single_type_managers:
            if not manager.kv_cache_spec.prefix_cacheable:
                continue
            size, blocks = manager.block_size, manager.req_to_blocks.get(request.request_id, [])
            first = max(0, manager.get_num_skipped_tokens(position)) // size if manager in self._bounded else 0
            columns.append(blocks[first : position // size])
            sizes.append(size)
        return _by_position(columns, sizes)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """As vLLM's. The blocks of all groups are in the order of their positions; those of windows are kept."""
        name = request.request_id
        self._unchanged.pop(name, None)
        if self._spans is not None:
            self._spans.goes_to(name, 0)
        if self._positions.pop(name, None) is None or self._seen is None:
            blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
            return blocks
        self._seen.add(request.block_hashes)
        end = min(request.num_computed_tokens, request.num_tokens) // self.rule.unit * self.rule.unit
        self._hold(request, end)
        for needed, managers in self._needed(end):
            for manager in managers:
                held = manager.req_to_blocks.get(name, [])[needed.start :]
                self.block_pool.free_block_queue.keep(held, once=True)
        self._hold_positions(request)
        managers = self.coordinator.single_type_managers
        columns = [manager.pop_blocks_for_free(name) for manager in managers]
        return _by_position(columns, [manager.block_size for manager in managers])

    # -- the prefix cache --------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """As vLLM's."""
        self.promises.clear()
        is_reset: bool = super().reset_prefix_cache()
        if is_reset:
            if self._seen is not None:
                self._seen.clear()
            self._resumable.clear()
            self._held_at.clear()
            self._order()
        return is_reset

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """As vLLM's.

        Raises:
            CheckFailed: a block would be copied where a state takes several ids, over the blocks beside it.
        """
        copies, retained = super().take_kv_cache_block_copies()
        if copies and self._spans is not None:
            pairs = [tuple(copy) for copy in copies[:16]]
            raise CheckFailed(
                f'"memory": "exact": blocks would be copied over their neighbours: {pairs}', available=pairs
            )
        return copies, retained

    def check(self) -> None:
        """Prove that the free blocks are those that nobody uses, in their order. O(blocks).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        pool = self.block_pool
        queue = pool.free_block_queue
        if isinstance(queue, EvictionQueue):
            queue.check()
        idle = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null}
        idle -= queue.inside() if isinstance(queue, SpanQueue) else set()
        free = {block.block_id for block in queue.get_all_free_blocks()}
        if idle != free or queue.num_free_blocks != len(free):
            raise CheckFailed(f"blocks that are free or unused, but not both: {sorted(idle ^ free)[:16]}")


def _skips(manager: Any) -> bool:
    """Return whether a group keeps less than a whole text."""
    return type(manager).get_num_skipped_tokens is not groups.SingleTypeKVCacheManager.get_num_skipped_tokens


def _by_position(columns: Many[list[KVCacheBlock]], sizes: Many[int]) -> list[KVCacheBlock]:
    """Return the blocks of all groups in the order of their positions. ``columns``: those of each group, which end
    together. ``sizes``: the tokens in a block of each."""
    if len(columns) == 1:
        return columns[0]
    if len({*sizes}) == 1:
        backwards = chain.from_iterable(zip_longest(*map(reversed, columns)))
        return [block for block in backwards if block is not None and not block.is_null][::-1]
    placed = [
        (-index * size, block)
        for blocks, size in zip(columns, sizes)
        for index, block in enumerate(reversed(blocks))
        if not block.is_null
    ]
    return [block for _, block in sorted(placed, key=lambda entry: entry[0])]
