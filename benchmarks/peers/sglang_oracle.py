"""SGLang's own cache as a judge: its radix tree, paged allocator and request table, called as its scheduler calls them.

``Peer`` has the calls of ``kvpagoda.replay.driver`` for ``benchmarks.oracle``. SGLang is taken from the environment of
this process, or from the folder of ``make consumers``; packages that it imports and never calls on this path are stand-ins.
"""

from __future__ import annotations

import sys
from array import array
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data

from benchmarks.peers import ROOT, stubs
from kvpagoda.replay import Group
from kvpagoda.replay.chains import Chains
from kvpagoda.replay.edge_states import slots as state_slots
from kvpagoda.replay.edge_windows import pools

_UNUSED = (
    "orjson", "psutil", "pybase64", "starlette", "IPython", "sentencepiece", "compressed_tensors", "gguf", "openai",
    "partial_json_parser",
)  # fmt: skip


def _make_importable() -> None:
    """Let ``import sglang`` find the package of ``make consumers``, and stand-ins for what is missing beside it."""
    from importlib.util import find_spec

    sys.path += [str(path) for path in (ROOT / ".venv-consumers").glob("lib/python3*/site-packages")]
    stubs.install(*(name for name in _UNUSED if find_spec(name) is None))
    if find_spec("dill") is None:  # it pickles classes of samplers while they are imported
        dill: Any = ModuleType("dill")
        dill.__spec__ = ModuleSpec("dill", None)
        dill.dumps = lambda thing: b""
        dill.extend = lambda **options: None
        sys.modules["dill"] = dill


_make_importable()
from benchmarks.peers import sglang as peer  # noqa: E402
from benchmarks.peers import sglang_states  # noqa: E402

allocation = import_module("sglang.srt.mem_cache.allocation")  # after the peer, which stands in for kernels
windows = import_module("sglang.srt.mem_cache.allocator.swa")
environ = import_module("sglang.srt.environ")
VERSION = peer.VERSION
LEAST_BLOCK = 1
AT_ONCE = 64
"""Requests that may run at once."""
FREE = 1 << 62
"""Pages of a pool that there is not."""


class Peer:
    """SGLang's cache of ``num_blocks`` blocks over the requests of ``chains``. See ``driver.Manager``, and ``EdgeLRU``, which
    is to find the same.

    ``core``: "rust" (what it serves with) or "python" of its unified tree; "old": the older ``RadixCache``. ``groups``: as
    ``kvpagoda.replay.Group.from_text`` reads them: full attention, and windows or states. The memory of a step is allocated
    for all its requests together, as ``alloc_for_extend`` does."""

    def __init__(self, chains: Chains, num_blocks: int, *, core: str = "rust", groups: str = "full") -> None:
        torch.set_num_threads(1)
        self.chains, self.page = chains, chains.block_size
        kinds, longest = Group.from_text(groups), int(chains.totals.max()) + 1
        self.has_states = Group("state") in kinds
        blocks, window_blocks, size = (
            (*state_slots(num_blocks, kinds), 0) if self.has_states else pools(num_blocks, kinds)
        )
        self.window = size - 1 if size else 0  # as its models give it: the tokens before the newest that are read
        self.tokens, self.window_tokens = blocks * self.page, window_blocks * self.page if size else 0
        self.rows = (
            sglang_states.States(AT_ONCE, longest, window_blocks, self.page)
            if self.has_states
            else peer.ReqToTokenPool(AT_ONCE, longest, "cpu", False)
        )
        self.allocator = self._allocator()
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
        self.running: dict[int, peer.Request] = {}
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
            if end <= self.running[request].known:  # ``checkpoint_kv_cache``, after a chunk of a prompt
                self._checkpoint(request, end)
        self._computed.clear()

    def find(self, request: int, known: int) -> int:
        """Match, as ``init_next_round_input`` does."""
        text = tokens_of(self.chains, request)
        made = peer.Request(str(request), text[: int(self.chains.prompts[request])])
        made.full_untruncated_fill_ids, made.known = text, known
        key = peer.RadixKey(text, limit=known - 1)
        match = self.tree.match_prefix(peer.MatchPrefixParams(key=key, req=made, cow_mamba=self.has_states))
        made.mamba_branching_seqlen = match.mamba_branching_seqlen
        made.prefix_len = made.kv.cache_protected_len = match.device_prefix_len
        made.last_node, made.swa_branching_seqlen = match.last_device_node, match.swa_branching_seqlen
        made.kv.kv_allocated_len = made.prefix_len
        self._asked = request, made
        return int(match.device_prefix_len)

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """End a chunk within a prompt with a page, as ``floor_chunked_tokens`` does."""
        whole = end // self.page * self.page
        is_output = request in self.running and end > self.running[request].known
        return whole if begin < whole and end < known and not is_output else end

    def start(self, request: int, end: int, known: int) -> bool:
        """Lock what was matched, and see whether the rest of the prompt fits, as ``PrefillAdder`` does."""
        asked, made = self._asked
        assert asked == request
        made.lock = self.tree.lock(made.last_node)
        found = self._pages(made.prefix_len)
        fits = self._pages(known) - found <= self._left() and self._pages(end) - found <= self._left_in_windows()
        if not fits or (self.has_states and not self.rows.fits(len(self.running) + 1)):
            self.tree.unlock(made.lock)
            if self.has_states:
                self.rows.revert(made)
            return False
        self.running[request] = made
        self._promise(request, end)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        made = self.running[request]
        self._slide(made)
        if self._pages(end) - self._pages(made.kv.kv_allocated_len) > min(self._left(), self._left_in_windows()):
            return False
        self._promise(request, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """``release_kv_cache``, of a complete request after what the batch computed before it was put in the tree."""
        made = self.running[request]
        if is_complete:
            self._allocate()
            while request in self._computed:
                other = next(iter(self._computed))
                end = self._computed.pop(other)
                if other == request:
                    made.finished_reason = peer.FINISH_LENGTH(length=0)
                if other == request or end <= self.running[other].known:
                    self._checkpoint(other, end)
        elif request in self._due:
            begin, end = self._due.pop(request)
            self.promised -= self._pages(end) - self._pages(begin)
        self._computed.pop(request, None)
        if self.has_states:
            self.tree.on_release(made, checkpointed=is_complete)
        if made.kv.req_pool_idx is not None:
            self.tree.free_kv_row(made.kv, [(made.kv.cache_protected_len, made.kv.kv_allocated_len)])
            self.rows.free(made)
        self.tree.unlock(made.lock)
        del self.running[request]

    def check(self) -> None:
        assert not self.running and not self.promised
        if self.has_states:
            assert self.rows.mamba_allocator.available_size() + self.tree.mamba_evictable_size() == self.rows._num_slots
        assert (self._left(), self._left_in_windows()) == (
            self.tokens // self.page,
            self.window_tokens // self.page or FREE,
        )

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

    def _slide(self, made: Any) -> None:
        """Free what left the window of an output, as ``maybe_evict_swa`` does before a step of outputs."""
        length, interval = made.kv.kv_allocated_len, environ.envs.SGLANG_SWA_EVICTION_INTERVAL.get()
        decoded = length - made.known
        if self.window and decoded >= 1:
            if length - self.window >= made.kv.get_evicted_seqlen(peer.ComponentType.SWA) + interval:
                self.tree.evict_sliding_windows(made, length)
            if environ.envs.SGLANG_OPT_RELEASE_PREFILL_SWA.get() and decoded >= self.window:
                self.tree.release_swa_prefix_lock(made)

    def _checkpoint(self, request: int, end: int) -> None:
        made = self.running[request]
        made.extend_end = end
        self.tree.checkpoint(made, up_to=end)

    def _promise(self, request: int, end: int) -> None:
        begin = self.running[request].kv.kv_allocated_len
        self._due[request] = begin, end
        self.promised += self._pages(end) - self._pages(begin)

    def _allocate(self) -> None:
        if not self._due:
            return
        lasts = []
        if self.has_states:
            due = [self.running[request] for request in self._due]
            allocation.ensure_mamba_capacity(self.rows, due, self.tree)
            fresh = [made for made in due if made.kv.req_pool_idx is None]
            if fresh:
                self.rows.alloc(fresh)
            for made in fresh:
                if made.prefix_len:
                    self.rows.write(
                        (made.kv.req_pool_idx, slice(0, made.prefix_len)), self.tree.prefix_device_indices(made)
                    )
        for request, (begin, _) in self._due.items():
            made = self.running[request]
            if made.kv.req_pool_idx is None:
                made.kv.req_pool_idx = self.rows.alloc_rows(1)[0]
                if begin:
                    self.rows.write((made.kv.req_pool_idx, slice(0, begin)), self.tree.prefix_device_indices(made))
            row = self.rows.req_to_token[made.kv.req_pool_idx]
            lasts.append(row[begin - 1 : begin].to(torch.int64) if begin else torch.full((1,), -1))
        before, after = (torch.tensor(column) for column in zip(*self._due.values()))
        count = int((after - before).sum())
        if self.page == 1:
            places = allocation.alloc_token_slots(self.tree, count)
        else:
            last = torch.cat(lasts)
            places = allocation.alloc_paged_token_slots_extend(self.tree, before, before, after, after, last, count)
        for (request, (begin, end)), slots in zip(self._due.items(), places.split((after - before).tolist())):
            made = self.running[request]
            self.rows.write((made.kv.req_pool_idx, slice(begin, end)), slots.to(torch.int32))
            made.kv.kv_allocated_len = made.kv.kv_committed_len = end
            self._computed[request] = end
            if self.has_states:
                self.rows.track(made, begin, end)
        self._due.clear()
        self.promised = 0


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
