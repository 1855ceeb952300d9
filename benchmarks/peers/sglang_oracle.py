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
from kvpagoda.replay.chains import Chains

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

allocation = import_module("sglang.srt.mem_cache.allocation")  # after the peer, which stands in for kernels
VERSION = peer.VERSION
LEAST_BLOCK = 1
AT_ONCE = 64
"""Requests that may run at once."""


class Peer:
    """SGLang's cache of ``num_blocks`` blocks over the requests of ``chains``. See ``driver.Manager``, and ``EdgeLRU``, which
    is to find the same.

    ``core``: "rust" (what it serves with) or "python" of its unified tree; "old": the older ``RadixCache``. The memory of a
    step is allocated for all its requests together, as ``alloc_for_extend`` does."""

    def __init__(self, chains: Chains, num_blocks: int, *, core: str = "rust") -> None:
        torch.set_num_threads(1)
        self.chains, self.page = chains, chains.block_size
        self.tokens = num_blocks * self.page
        self.rows = peer.ReqToTokenPool(AT_ONCE, int(chains.totals.max()) + 1, "cpu", False)
        options = torch.float16, "cpu", None, False
        self.allocator = (
            peer.TokenToKVPoolAllocator(self.tokens, *options)
            if self.page == 1
            else peer.PagedTokenToKVPoolAllocator(self.tokens, self.page, *options)
        )
        params = peer.CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=self.page,
            eviction_policy="lru", tree_components=(peer.ComponentType.FULL,), tree_core_backend=core,
        )  # fmt: skip
        self.tree: Any = peer.RadixCache(params) if core == "old" else peer.UnifiedRadixCache(params)
        assert core == "old" or (core == "rust") == ("Rust" in type(self.tree.tree_core).__name__), "its other core"
        self.running: dict[int, peer.Request] = {}
        self.promised = 0
        self._asked: Any = None
        self._due: dict[int, tuple[int, int]] = {}
        self._computed: dict[int, int] = {}

    def step_starts(self) -> None:
        self._allocate()
        for request, end in self._computed.items():
            if end <= self.running[request].known:  # ``checkpoint_kv_cache``, after a chunk of a prompt
                self.tree.checkpoint(self.running[request], up_to=end)
        self._computed.clear()

    def find(self, request: int, known: int) -> int:
        """Match, as ``init_next_round_input`` does."""
        text = tokens_of(self.chains, request)
        made = peer.Request(str(request), text[: int(self.chains.prompts[request])])
        made.full_untruncated_fill_ids, made.known = text, known
        key = peer.RadixKey(text, limit=known - 1)
        match = self.tree.match_prefix(peer.MatchPrefixParams(key=key, req=made))
        made.prefix_len = made.kv.cache_protected_len = match.device_prefix_len
        made.last_node = match.last_device_node
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
        if self._pages(known) - self._pages(made.prefix_len) > self._left():
            self.tree.unlock(made.lock)
            return False
        self.running[request] = made
        self._promise(request, end)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        if self._pages(end) - self._pages(self.running[request].kv.kv_allocated_len) > self._left():
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
                    self.tree.checkpoint(self.running[other], up_to=end)
        elif request in self._due:
            begin, end = self._due.pop(request)
            self.promised -= self._pages(end) - self._pages(begin)
        self._computed.pop(request, None)
        if made.kv.req_pool_idx is not None:
            self.tree.free_kv_row(made.kv, [(made.kv.cache_protected_len, made.kv.kv_allocated_len)])
            self.rows.free(made)
        self.tree.unlock(made.lock)
        del self.running[request]

    def check(self) -> None:
        assert self.tree.protected_size() == 0 and not self.running
        left = self.allocator.available_size() + self.tree.evictable_size()
        assert left == self.tokens, f"{left} of {self.tokens} tokens are free or evictable at the end"

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _left(self) -> int:
        """Pages that are free or could be evicted, without those that the step has promised."""
        return int(self.allocator.available_size() + self.tree.evictable_size()) // self.page - self.promised

    def _promise(self, request: int, end: int) -> None:
        begin = self.running[request].kv.kv_allocated_len
        self._due[request] = begin, end
        self.promised += self._pages(end) - self._pages(begin)

    def _allocate(self) -> None:
        if not self._due:
            return
        lasts = []
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
        self._due.clear()
        self.promised = 0


def tokens_of(chains: Chains, request: int) -> array[int]:
    """Return the text of a request as SGLang takes it: that of its whole blocks by their keys, then a token that occurs
    nowhere else."""
    size = chains.block_size
    whole = (chains.keys(request)[:, None] * size + np.arange(size)).ravel()
    rest = np.full(int(chains.totals[request]) - len(whole), -1, np.int64)
    return array("q", np.concatenate([whole, rest]).tobytes())
