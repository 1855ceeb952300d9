"""vLLM: its ``KVCacheManager``, called as its scheduler calls it, with SHA-256 block hashes, its default."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from benchmarks.peers import stubs
from benchmarks.workload import Tokens

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
stubs.install("torchvision", "xgrammar", "llguidance")

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

VERSION = version("vllm")
LEAST_BLOCK = 16


class Peer:
    """vLLM's ``KVCacheManager`` with one group. The calls are described in ``benchmarks.peers``."""

    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16)
        config = KVCacheConfig(
            num_blocks=capacity // block_size + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
        )
        self.manager = KVCacheManager(
            config, max_model_len=longest, scheduler_block_size=block_size, hash_block_size=block_size,
            enable_caching=True, log_stats=False,
        )  # fmt: skip
        hashed_by = get_hash_fn_by_name("sha256")
        init_none_hash(hashed_by)
        self._hasher = get_request_block_hasher(block_size, hashed_by)
        self._sampling = SamplingParams(max_tokens=longest)
        self._running: dict[int, Request] = {}

    @staticmethod
    def tokens(ids: Tokens) -> list[int]:
        return list(ids.tolist())

    def _request(self, prompt: list[int]) -> Request:
        return Request("request", prompt, self._sampling, None, block_hasher=self._hasher)

    def admit(self, i: int, prompt: list[int], num_output: int) -> int:
        request = Request(str(i), prompt, self._sampling, None, block_hasher=self._hasher)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(prompt) - hit, hit, blocks) is not None
        request.num_computed_tokens = len(prompt)
        self._running[i] = request
        return int(hit)

    def append(self, i: int, output: list[int]) -> None:
        request = self._running[i]
        request.append_output_token_ids(output)
        assert self.manager.allocate_slots(request, len(output)) is not None
        request.num_computed_tokens += len(output)

    def finish(self, i: int) -> None:
        self.manager.free(self._running.pop(i))

    def lookup(self, prompt: list[int]) -> int:
        return int(self.manager.get_computed_blocks(self._request(prompt))[1])

    def step(self) -> None:
        """Allocate a token for every request. Index arrays are left out: the worker makes them on the GPU."""
        for request in self._running.values():
            request.append_output_token_ids(1)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1

    def take(self, num_blocks: int) -> Any:
        return self.manager.block_pool.get_new_blocks(num_blocks)

    def give(self, blocks: Any) -> None:
        self.manager.block_pool.free_blocks(reversed(blocks))

    def evict(self, num_blocks: int) -> Any:
        """Allocate ``num_blocks`` blocks, which evicts cached ones: vLLM's free list is its eviction order."""
        return self.manager.block_pool.get_new_blocks(num_blocks)

    def check(self) -> None:
        pool = self.manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
