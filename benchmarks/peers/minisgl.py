"""mini-sglang: its ``CacheManager``, from ``KVPAGODA_BENCH_MINISGL`` (a checkout, or its ``python`` folder)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers import from_path, stubs
from benchmarks.workload import Tokens

stubs.install("flashinfer", "sgl_kernel")
core = from_path("minisgl", "minisgl.core")
CacheManager = from_path("minisgl", "minisgl.scheduler.cache").CacheManager
VERSION, LEAST_BLOCK = "-", 1
_empty = torch.empty
torch.empty = lambda *shape, pin_memory=False, **options: _empty(*shape, **options)  # no pinned memory without a GPU


class Peer:
    """mini-sglang's radix cache and request table. The calls are described in ``benchmarks.peers``."""

    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        core.get_global_ctx = lambda: SimpleNamespace(page_size=block_size)
        from_path("minisgl", "minisgl.kvcache.radix_cache").get_global_ctx = core.get_global_ctx
        self.table = torch.zeros((at_once, longest + block_size), dtype=torch.int32)
        self.manager = CacheManager(capacity // block_size, block_size, self.table, "radix")
        self._rows = list(range(at_once))
        self._running: dict[int, Any] = {}

    @staticmethod
    def tokens(ids: Tokens) -> torch.Tensor:
        return torch.from_numpy(ids)

    def admit(self, i: int, prompt: torch.Tensor, num_output: int) -> int:
        n, row = len(prompt), self._rows.pop()
        handle = self.manager.match_req(SimpleNamespace(input_len=n, input_ids=prompt)).cuda_handle
        self.manager.lock(handle)
        hit = handle.cached_len
        if hit:
            self.table[row, :hit] = handle.get_matched_indices()
        request = SimpleNamespace(table_idx=row, input_ids=prompt, cached_len=hit, device_len=n, cache_handle=handle)
        self._running[i] = request
        self.manager.allocate_paged([request])
        request.cached_len = n
        self.manager.cache_req(request, finished=False)
        return int(hit)

    def append(self, i: int, output: torch.Tensor) -> None:
        request = self._running[i]
        request.device_len += len(output)
        self.manager.allocate_paged([request])
        request.cached_len = request.device_len
        request.output = output

    def finish(self, i: int) -> None:
        request = self._running.pop(i)
        request.input_ids = torch.cat((request.input_ids, request.output))
        self.manager.cache_req(request, finished=True)
        self._rows.append(request.table_idx)

    def lookup(self, prompt: torch.Tensor) -> int:
        return int(
            self.manager.match_req(SimpleNamespace(input_len=len(prompt), input_ids=prompt)).cuda_handle.cached_len
        )

    def check(self) -> None:
        self.manager.check_integrity()
