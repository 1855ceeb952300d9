"""SGLang as a judge: its requests, radix tree, pools and request table, and the functions of its scheduler that use them.

``Peer`` has the calls of ``kvpagoda.replay.engines.driver`` for ``benchmarks.oracle``, which decides the order of admission
and of chunks. SGLang is taken from the environment of this process, or from the folder of ``make consumers``; packages that it
imports and never calls on this path are stand-ins.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from benchmarks.one_budget import GPT_OSS_120B, QWEN3_NEXT_80B
from benchmarks.peers import look_in_consumers, stubs
from kvpagoda.replay import Group
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.edge_states import OWN
from kvpagoda.replay.engines.edge_states import slots as state_slots
from kvpagoda.replay.engines.edge_windows import pools

_UNUSED = (
    "orjson", "psutil", "pybase64", "starlette", "IPython", "sentencepiece", "compressed_tensors", "gguf", "openai",
    "partial_json_parser",
)  # fmt: skip


def _make_importable() -> None:
    """Let ``import sglang`` find the package of ``make consumers``, and stand-ins for what is missing beside it."""
    from importlib.util import find_spec

    look_in_consumers()
    stubs.install(*(name for name in _UNUSED if find_spec(name) is None))
    if find_spec("dill") is None:  # it pickles classes of samplers while they are imported
        dill: Any = ModuleType("dill")
        dill.__spec__ = ModuleSpec("dill", None)
        dill.dumps = lambda thing: b""
        dill.extend = lambda **options: None
        sys.modules["dill"] = dill


_make_importable()
from benchmarks.peers import sglang as peer  # noqa: E402
from benchmarks.peers import sglang_settings, sglang_states, sglang_unified  # noqa: E402

allocation = import_module("sglang.srt.mem_cache.allocation")  # after the peer, which stands in for kernels
common = import_module("sglang.srt.mem_cache.common")
windows = import_module("sglang.srt.mem_cache.allocator.swa")
batches = import_module("sglang.srt.managers.schedule_batch")
results = import_module("sglang.srt.managers.scheduler_components.batch_result_processor")
Mode = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
Speculation = import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
Sampling = import_module("sglang.srt.sampling.sampling_params").SamplingParams
VERSION = peer.VERSION
LEAST_BLOCK = 1
AT_ONCE = 64
"""Requests that may run at once."""
WITH_STATES, IN_ONE_MEMORY = QWEN3_NEXT_80B, GPT_OSS_120B
"""With states, and with windows in one memory, SGLang gets the settings that it chooses for this model."""
FREE = 1 << 62
"""Pages of a pool that there is not."""


class Peer:
    """SGLang's cache of ``num_blocks`` blocks over the requests of ``chains``. See ``driver.Manager``, and ``EdgeLRU``, which
    is to find the same.

    ``core``: "rust" (what it serves with) or "python" of its unified tree; "old": the older ``RadixCache``. ``groups``: as
    ``kvpagoda.replay.Group.from_text`` reads them: full attention, and windows or states. ``memory_ratio``,
    ``states_per_path``, ``unified_memory``: see ``EngineSettings``. The memory of a step is allocated
    for all its requests together, as ``alloc_for_extend`` does."""

    finds_all = False

    def __init__(
        self,
        chains: Chains,
        num_blocks: int,
        *,
        core: str = "rust",
        groups: str = "full",
        memory_ratio: float | None = None,
        states_per_path: int | None = None,
        unified_memory: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        self.chains, self.page = chains, chains.block_size
        kinds, longest = Group.from_text(groups), int(chains.totals.max()) + 1
        self.has_states = Group("state") in kinds
        ratio = () if memory_ratio is None else (memory_ratio,)
        blocks, window_blocks, size = (
            (*state_slots(num_blocks, kinds, *ratio), 0) if self.has_states else pools(num_blocks, kinds, *ratio)
        )
        self.window = size - 1 if size else 0  # as its models give it: the tokens before the newest that are read
        self.tokens, self.window_tokens = blocks * self.page, window_blocks * self.page if size else 0
        settings = WITH_STATES if self.has_states else IN_ONE_MEMORY if unified_memory else None
        most: dict[str, Any] = {} if states_per_path is None else {"mamba_max_states_per_path": states_per_path}
        most |= {"enable_unified_memory": True} if unified_memory else {}
        attention = "triton" if unified_memory else "torch_native"  # calls no kernel
        model = sglang_settings.publish(settings, self.page, attention=attention, **most)
        self.most = sglang_states.most_requests(self.tokens, window_blocks) if self.has_states else AT_ONCE
        self.unified, full = unified_memory, kinds.count(Group())
        apart = len(kinds) - full
        if unified_memory and self.has_states:
            units = blocks * full + (window_blocks + 1) * apart
            memory = sglang_unified.Unified(AT_ONCE, longest, self.page, units, full, apart)
            self.rows, self.allocator = memory.rows, memory.allocator
        else:
            self.rows = (
                sglang_states.States(AT_ONCE, longest, window_blocks)
                if self.has_states
                else peer.ReqToTokenPool(AT_ONCE, longest, "cpu", False)
            )
            beside = sglang_unified.beside_windows
            self.allocator = beside(self.page, num_blocks, full, apart) if unified_memory else self._allocator()
        self._empty = int(self.allocator.available_size()) // self.page
        params = peer.CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=self.page,
            eviction_policy="lru", tree_core_backend=core, sliding_window_size=self.window or None,
            enable_mamba_extra_buffer=self.has_states, tree_components=(
                peer.ComponentType.FULL, *([peer.ComponentType.SWA] if self.window else []),
                *([peer.ComponentType.MAMBA] if self.has_states else []),
            ),
        )  # fmt: skip
        self.tree: Any = peer.RadixCache(params) if core == "old" else peer.UnifiedRadixCache(params)
        assert core == "old" or (core == "rust") == ("Rust" in type(self.tree.tree_core).__name__), "its other core"
        self.batch = batches.ScheduleBatch(
            reqs=[], req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree,
            model_config=model, device="cpu", enable_overlap=True, spec_algorithm=Speculation.NONE,
        )  # fmt: skip
        self.results = object.__new__(results.SchedulerBatchResultProcessor)
        object.__setattr__(self.results, "tree_cache", self.tree)
        self.running: dict[int, Any] = {}
        self.promised = 0
        self._asked: Any = None
        self._due: dict[int, tuple[int, int]] = {}
        self._computed: dict[int, int] = {}

    def _allocator(self) -> Any:
        options = torch.float16, "cpu", None, False
        if self.window:
            return windows.SWATokenToKVPoolAllocator(
                self.tokens, self.window_tokens, self.page, torch.float16, "cpu", NoMemory(), False
            )
        if self.page == 1:
            return peer.TokenToKVPoolAllocator(self.tokens, *options)
        return peer.PagedTokenToKVPoolAllocator(self.tokens, self.page, *options)

    def step_starts(self) -> None:
        self._allocate()
        for request, end in self._computed.items():
            if end <= self.running[request].known:  # after a chunk of a prompt
                common.checkpoint_kv_cache(self.running[request], self.tree)
        self._computed.clear()

    def find(self, request: int, known: int) -> int:
        text, prompt = tokens_of(self.chains, request), int(self.chains.prompts[request])
        made = batches.Req(str(request), "", text[:prompt], Sampling(max_new_tokens=0))
        made.text, made.known, made.output_ids = text, known, text[prompt:known]
        made.init_next_round_input(self.tree)
        self._asked = request, made
        return int(made.prefix_len)

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """End a chunk within a prompt with a page, as ``PrefillAdder`` does when it admits a request."""
        whole = end // self.page * self.page
        is_output = request in self.running and end > self.running[request].known
        return whole if begin < whole and end < known and not is_output else end

    def start(self, request: int, end: int, known: int) -> bool:
        """Lock what was matched, and see whether the rest of the prompt fits."""
        asked, made = self._asked
        assert asked == request
        made.lock = self.tree.lock(made.last_node)
        found = self._pages(made.prefix_len)
        fits = self._fits(self._pages(known) - found, self._pages(end) - found, [*self.running.values(), made])
        if not fits or len(self.running) >= self.most:
            self.tree.unlock(made.lock)
            if self.has_states:
                common.release_kv_cache(made, self.tree, checkpoint=False)
            return False
        self.running[request] = made
        self._promise(request, end)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        made = self.running[request]
        length = made.kv.kv_allocated_len
        if length >= made.known:
            self._answer(made, length + 1)
            self.batch.reqs, self.batch.forward_mode = [made], Mode.DECODE
            made.decode_batch_idx = length - made.known
            self.batch.maybe_evict_swa()
        more = self._pages(end) - self._pages(length)
        if not self._fits(more, more, self.running.values()):
            return False
        self._promise(request, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """Release a complete request after what the batch computed before it was put in the tree."""
        made = self.running[request]
        if is_complete:
            self._allocate()
            while request in self._computed:
                other = next(iter(self._computed))
                end = self._computed.pop(other)
                if other == request:
                    self._answer(made, end)
                    made.finished_reason = peer.FINISH_LENGTH(length=0)
                elif end <= self.running[other].known:
                    common.checkpoint_kv_cache(self.running[other], self.tree)
        elif request in self._due:
            begin, end = self._due.pop(request)
            self.promised -= self._pages(end) - self._pages(begin)
        self._computed.pop(request, None)
        common.release_kv_cache(made, self.tree, checkpoint=is_complete)
        del self.running[request]

    def check(self) -> None:
        assert not self.running and not self.promised
        if self.has_states:
            assert self.rows.mamba_allocator.available_size() + self.tree.mamba_evictable_size() == self.rows._num_slots
        assert not self.unified or not self.allocator.verify_byte_accounting()
        if self.unified:  # what is kept beside blocks takes room
            self.tree.evict(peer.EvictParams(num_tokens=self.tree.full_evictable_size()))
            self.tokens = self._empty * self.page
        if self.unified and self.window:
            assert self.allocator.ensure_capacity(self.tokens, self.tokens), "an empty memory can be moved together"
            assert self.allocator.available_size() == self.tokens
            return
        assert (self._left(), self._left_in_windows()) == (
            self.tokens // self.page,
            self.window_tokens // self.page or FREE,
        )

    def _fits(self, pages: int, in_windows: int, requests: Iterable[Any]) -> bool:
        """Whether there is room for so many pages beside what the step has promised, and for what ``requests`` keep."""
        if not self.unified or not self.window:
            return pages <= self._left() - self._kept(requests) and in_windows <= self._left_in_windows()
        return bool(
            self.allocator.can_reserve(
                (pages + self.promised) * self.page, (in_windows + self.promised) * self.page,
                full_evictable_tokens=self.tree.full_evictable_size(),
                swa_evictable_tokens=self.tree.swa_evictable_size(),
            )
        )  # fmt: skip

    def _kept(self, requests: Iterable[Any]) -> int:
        """Pages for which requests keep room in one memory: of the slots of each, and one more."""
        if not self.unified:
            return 0
        held = (int(one.kv.holds_mamba) + 2 * (one.kv.mamba_ping_pong_track_buffer is not None) for one in requests)
        return sum(OWN + 1 - slots for slots in held) * self._pages(self.allocator.mamba_slot_full_token_cost())

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _left(self) -> int:
        """Pages that are free or could be evicted, without those that the step has promised."""
        if not self.window:
            held = self.tree.full_evictable_size() if self.has_states else self.tree.evictable_size()
            return int(self.allocator.available_size() + held) // self.page - self.promised
        tokens = self.allocator.full_available_size() + self.tree.full_evictable_size()
        return int(tokens) // self.page - self.promised

    def _left_in_windows(self) -> int:
        """The same of the pool of the layers with windows."""
        if not self.window:
            return FREE
        tokens = self.allocator.swa_available_size() + self.tree.swa_evictable_size()
        return int(tokens) // self.page - self.promised

    def _promise(self, request: int, end: int) -> None:
        made = self.running[request]
        begin = made.kv.kv_allocated_len if made.kv.holds_kv else made.prefix_len
        self._due[request] = begin, end
        self.promised += self._pages(end) - self._pages(begin)

    def _answer(self, made: Any, end: int) -> None:
        """Give ``made`` its output up to its token ``end``."""
        prompt = len(made.origin_input_ids)
        made.output_ids.extend(made.text[prompt + len(made.output_ids) : end])

    def _allocate(self) -> None:
        """Allocate the memory of a step, and note where states are copied."""
        if not self._due:
            return
        batch = self.batch
        batch.reqs, batch.forward_mode = [self.running[request] for request in self._due], Mode.EXTEND
        for made, (begin, end) in zip(batch.reqs, self._due.values()):
            made.prefix_len, made.extend_end = begin, end
        batch.prefix_lens, ends = (list(column) for column in zip(*self._due.values()))
        batch.extend_lens = [made.extend_len for made in batch.reqs]
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor(ends)
        batch.extend_num_tokens = sum(batch.extend_lens)
        allocation.alloc_for_extend(batch)
        for request, (begin, end) in self._due.items():
            self._computed[request] = end
            if self.has_states:
                self._track(self.running[request], begin, end)
        self._due.clear()
        self.promised = 0

    def _track(self, made: Any, begin: int, end: int) -> None:
        if end <= made.known:
            self.batch._mamba_radix_cache_v2_req_prepare_for_extend(made)
            return
        self.batch.mamba_decode_batch_idx_cpu = [made.decode_batch_idx]
        for length in range(begin + 1, end + 1):  # of an output each token by itself
            made.kv.kv_committed_len = length
            self.results._mamba_prefix_cache_update(made, self.batch, None, 0)


class NoMemory(windows.BaseSWAKVPool):  # type: ignore[misc, name-defined]
    """What SGLang's allocator for windows asks of the memory behind it."""

    def __init__(self) -> None:
        self.full_kv_pool = self.swa_kv_pool = None

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[kv_indices]

    def _unused(self, *args: Any) -> Any:
        raise NotImplementedError

    get_state_buf_infos = get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _unused


def tokens_of(chains: Chains, request: int) -> array[int]:
    """Return the text of a request as SGLang takes it: that of its whole blocks by their keys, then a token that occurs
    nowhere else."""
    size = chains.block_size
    whole = (chains.keys(request)[:, None] * size + np.arange(size)).ravel()
    rest = np.full(int(chains.totals[request]) - len(whole), -1, np.int64)
    return array("q", np.concatenate([whole, rest]).tobytes())
