"""SGLang's pool of recurrent states for ``benchmarks.peers.sglang_oracle``, without the states, and how many requests its
scheduler runs beside it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers import sglang_settings

pool = import_module("sglang.srt.mem_cache.memory_pool")
slots = import_module("sglang.srt.mem_cache.allocator.mamba")
planning = import_module("sglang.srt.mem_cache.kv_cache_configurator").KVCacheConfigurator


class States(pool.HybridReqToTokenPool):  # type: ignore[misc, name-defined]
    """A table of ``size`` requests of at most ``longest`` tokens, and ``num_slots`` states."""

    def __init__(self, size: int, longest: int, num_slots: int) -> None:
        self._num_slots = num_slots
        super().__init__(
            size=size, mamba_size=num_slots, mamba_spec_state_size=0, max_context_len=longest, device="cpu",
            enable_memory_saver=False, cache_params=None, mamba_layer_ids=[], enable_mamba_extra_buffer=True,
        )  # fmt: skip

    def _init_mamba_pool(self, **unused: Any) -> None:
        self.mamba_pool = SimpleNamespace(replayssm_write_pos=None, replayssm_spec_write_pos=None, size=self._num_slots)
        self.mamba_allocator = slots.MambaSlotAllocator(size=self._num_slots, device="cpu")
        self.mamba_ckpt_pool, self.device, rows = None, "cpu", self.req_to_token.shape[0]
        self.req_index_to_mamba_index_mapping = torch.zeros(rows, dtype=torch.int32)
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros((rows, 2), dtype=torch.int64)


def most_requests(num_tokens: int, num_slots: int) -> int:
    """Return how many requests may run in a cache of ``num_tokens`` tokens and ``num_slots`` states."""
    asked = SimpleNamespace(attn_dp_size=1, mambaish_config=True, model_config=SimpleNamespace(context_len=1 << 17))
    asked._calculate_mamba_ratio = lambda: planning._calculate_mamba_ratio(asked)
    sglang_settings.context.get_context().override("the judge", max_mamba_cache_size=num_slots)
    try:
        return int(planning.resolve_max_num_reqs(asked, num_tokens))
    except RuntimeError:  # too few states for a request
        return 0
