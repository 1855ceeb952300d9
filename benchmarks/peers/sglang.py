"""SGLang: its radix cache, paged allocator and request table, called as its scheduler calls them, on ``device='cpu'``.

On a CPU, its allocator calls ``alloc_extend_naive`` in place of a GPU kernel; ``excluded`` is the time of these calls.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from array import array
from importlib.metadata import version
from typing import Any

from benchmarks.peers import stubs
from benchmarks.workload import Tokens

warnings.filterwarnings("ignore")
logging.disable(logging.INFO)

import torch  # noqa: E402
import torch._inductor.runtime.triton_heuristics  # noqa: E402
import torch._inductor.select_algorithm  # noqa: E402
import torch.utils._triton  # noqa: E402

torch.utils._triton.has_triton_package()  # call it now: it caches the answer for the real triton
torch.utils._triton.has_triton()
sys.modules["vllm"] = None  # type: ignore[assignment]  # otherwise SGLang would use parts of an installed vLLM
stubs.install("triton", "torchvision", "sgl_kernel", "flashinfer", "xgrammar", "torchao", "tvm_ffi")

import sglang.srt.mem_cache.allocator.paged as paged  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import evict_from_tree_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

VERSION = version("sglang")
LEAST_BLOCK = 1
_fallback = paged.alloc_extend_naive
_in_fallback = 0.0


def _timed_fallback(*args: Any) -> None:
    """Call the fallback and add its CPU time to ``_in_fallback``."""
    global _in_fallback
    start = time.process_time()
    _fallback(*args)
    _in_fallback += time.process_time() - start


paged.alloc_extend_naive = _timed_fallback


class Request:
    """The fields of SGLang's request that its caches read."""

    def __init__(self, name: str, ids: array[int]) -> None:
        self.rid, self.origin_input_ids, self.full_untruncated_fill_ids = name, ids, ids
        self.output_ids = array("q")
        self.kv = ReqKvInfo()
        self.extra_key = self.cache_salt = self.priority = self.session_id = self.session = self.kv_rotation_base = None
        self.lock: Any = None
        self.last_node: Any = None
        self.prefix_len = self.extend_end = 0
        self.swa_branching_seqlen: int | None = None
        self.mamba_branching_seqlen: int | None = None
        self.finished_reason: Any = None
        self.finished_len = None

    def finished(self) -> bool:
        return self.finished_reason is not None

    def get_fill_ids(self) -> array[int]:
        return self.full_untruncated_fill_ids[: self.extend_end]

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids


class Peer:
    """SGLang with its radix tree in Python. ``backend``: of its unified tree; None: the older ``RadixCache``."""

    backend: str | None = None

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        global _in_fallback
        _in_fallback = 0.0
        self.block_size, self.capacity = block_size, capacity // block_size * block_size
        self.rows = ReqToTokenPool(at_once, longest, "cpu", False)
        self.allocator = (
            TokenToKVPoolAllocator(capacity, torch.float16, "cpu", None, False)
            if block_size == 1
            else PagedTokenToKVPoolAllocator(capacity, block_size, torch.float16, "cpu", None, False)
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=block_size,
            eviction_policy="lru", tree_components=(ComponentType.FULL,), tree_core_backend=self.backend,
        )  # fmt: skip
        self.tree = RadixCache(params) if self.backend is None else UnifiedRadixCache(params)
        assert self.backend is None or "Rust" in type(self.tree.tree_core).__name__
        self._running: dict[int, Request] = {}

    @property
    def excluded(self) -> float:
        """Seconds in the fallback for the allocation kernel."""
        return _in_fallback

    @staticmethod
    def tokens(ids: Tokens) -> array[int]:
        return array("q", ids.astype("int64").tobytes())

    def _allocate(self, request: Request, begin: int, end: int, last: torch.Tensor) -> None:
        """Allocate slots for tokens ``begin .. end - 1`` and write them to the request table. ``last``: slot of the
        token before."""
        n = end - begin
        if self.block_size == 1:
            evict_from_tree_cache(self.tree, n)
            places = self.allocator.alloc(n)
        else:
            evict_from_tree_cache(self.tree, n + self.block_size)
            before, after = torch.tensor([begin]), torch.tensor([end])
            places = self.allocator.alloc_extend(before, before, after, after, last, n)
        assert places is not None
        self.rows.write((request.kv.req_pool_idx, slice(begin, end)), places)

    def admit(self, i: int, prompt: array[int], num_output: int) -> int:
        request, n = Request(str(i), prompt), len(prompt)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt, limit=n - 1), req=request))
        hit = request.prefix_len = match.device_prefix_len
        request.last_node = match.last_device_node
        request.kv.cache_protected_len = hit
        request.lock = self.tree.lock(request.last_node)
        request.kv.req_pool_idx = self.rows.alloc_rows(1)[0]
        last = torch.full((1,), -1)
        if hit:
            places = self.tree.prefix_device_indices(request)
            self.rows.write((request.kv.req_pool_idx, slice(0, hit)), places)
            last = places[-1:]
        self._allocate(request, hit, n, last)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = n
        self.tree.checkpoint(request, up_to=n)
        self._running[i] = request
        return int(hit)

    def append(self, i: int, output: array[int]) -> None:
        request = self._running[i]
        request.output_ids = output
        length = request.kv.kv_allocated_len
        last = self.rows.req_to_token[request.kv.req_pool_idx, length - 1 : length].to(torch.int64)
        self._allocate(request, length, length + len(output), last)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = length + len(output)

    def finish(self, i: int) -> None:
        request = self._running.pop(i)
        request.finished_reason = FINISH_LENGTH(length=0)
        request.refresh_fill_ids()
        length = request.kv.kv_committed_len
        self.tree.checkpoint(request, up_to=length)
        self.tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, length)])
        self.tree.unlock(request.lock)
        self.rows.free(request)

    def lookup(self, prompt: array[int]) -> int:
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt, limit=len(prompt) - 1), req=None))
        return int(match.device_prefix_len)

    def step(self) -> None:
        """Allocate a token for every request, as ``alloc_for_decode`` does. The request table serves as SGLang's
        index arrays."""
        requests = list(self._running.values())
        indices = torch.tensor([request.kv.req_pool_idx for request in requests])
        lengths = torch.tensor([request.kv.kv_allocated_len for request in requests])
        evict_from_tree_cache(self.tree, len(requests) * self.block_size)
        if self.block_size == 1:
            places = self.allocator.alloc(len(requests))
        else:
            last = self.rows.req_to_token[indices, lengths - 1].to(torch.int64)
            places = self.allocator.alloc_decode(lengths + 1, lengths + 1, last)
        self.rows.write((indices, lengths), places.to(torch.int32))
        for request in requests:
            request.kv.kv_allocated_len += 1
            request.kv.kv_committed_len += 1

    def take(self, num_blocks: int) -> Any:
        return self.allocator.alloc(num_blocks * self.block_size)

    def give(self, places: Any) -> None:
        self.allocator.free(places)

    def evict(self, num_blocks: int) -> None:
        self.tree.evict(EvictParams(num_tokens=num_blocks * self.block_size))

    def check(self) -> None:
        assert self.tree.protected_size() == 0
        total = self.allocator.available_size() + self.tree.evictable_size()
        assert total == self.capacity, (total, self.capacity)
