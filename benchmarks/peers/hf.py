"""transformers: the paged cache of its continuous batching, called as its scheduler calls it. Rows are tiny, so that
only the bookkeeping takes time."""

from __future__ import annotations

import os
from importlib.metadata import version

from benchmarks.workload import Tokens

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from transformers import LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

VERSION = version("transformers")
LEAST_BLOCK = 16
MARGIN = 0.15
"""The share of the cache that its scheduler keeps free. If less is free, it evicts all unused blocks."""


class Peer:
    """transformers' ``PagedAttentionCache`` with prefix sharing. The calls are described in ``benchmarks.peers``."""

    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        head_dim = max(2, 128 // block_size)
        config = LlamaConfig(
            hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=head_dim, vocab_size=16,
        )  # fmt: skip
        config._attn_implementation = "flash_attention_2"
        batching = ContinuousBatchingConfig(
            page_size=block_size, num_blocks=capacity // block_size, max_batch_tokens=8192, max_memory_percent=0.9,
            max_blocks_per_request=16, max_requests_per_batch=256, use_async_batching=False,
        )  # fmt: skip
        self.cache = PagedAttentionCache(config, batching, "cpu", DistributedHelper(None, None), dtype=torch.float16)
        assert self.cache.use_prefix_sharing
        self._running: dict[int, RequestState] = {}

    @staticmethod
    def tokens(ids: Tokens) -> list[int]:
        return list(ids.tolist())

    def _keep_margin(self) -> None:
        """Evict all unused blocks if less than ``MARGIN`` of the cache is free, as its scheduler does."""
        cache = self.cache
        cache.pool.try_to_free_sectors()
        if cache.compute_free_capacity() < MARGIN and cache.evict_cached_blocks():
            cache.pool.try_to_free_sectors()
            cache.compute_free_capacity()

    def _store(self, request: RequestState, n: int) -> None:
        """Allocate blocks for ``n`` tokens of ``request``; evict unused blocks if there are too few."""
        if not self.cache.can_store_request_tokens(request, n):
            self.cache.evict_cached_blocks()
            self.cache.pool.try_to_free_sectors()
            assert self.cache.can_store_request_tokens(request, n)

    def admit(self, i: int, prompt: list[int], num_output: int) -> int:
        self._keep_margin()
        request, n = RequestState(str(i), prompt), len(prompt)
        hit = self.cache.search_prefix_match(request.request_id, request.remaining_prefill_tokens)
        if hit:
            request.remaining_prefill_tokens = request.remaining_prefill_tokens[hit:]
            request.position_offset += hit
        self._store(request, n - hit)
        complete = self.cache.count_new_complete_blocks(request, n - hit)
        request.position_offset = n
        request._status = RequestStatus.DECODING
        self.cache.mark_complete_blocks(request, complete)
        self._running[i] = request
        return int(hit)

    def append(self, i: int, output: list[int]) -> None:
        request = self._running[i]
        self._store(request, len(output))
        complete = self.cache.count_new_complete_blocks(request, len(output))
        request.generated_tokens.extend(output)
        request.position_offset += len(output)
        self.cache.mark_complete_blocks(request, complete)

    def finish(self, i: int) -> None:
        self.cache.free_blocks(self._running.pop(i).request_id)

    def step(self) -> None:
        """Allocate a token for every request and mark blocks that became full. Index arrays are left out."""
        for i in self._running:
            self.append(i, [1])

    def check(self) -> None: ...
