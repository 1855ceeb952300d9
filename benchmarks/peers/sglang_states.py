"""SGLang's pool of recurrent states for ``benchmarks.peers.sglang_oracle``, without the states, called as its scheduler does.

What its scheduler decides is here: how many slots a request holds, and where a state is copied. SGLang's strategy is
``extra_buffer``, which it chooses for models that it can keep several pages of: two more slots a request.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

pool = import_module("sglang.srt.mem_cache.memory_pool")
slots = import_module("sglang.srt.mem_cache.allocator.mamba")
CHUNK, INTERVAL = 64, 256
"""Tokens of a chunk of the kernel (``FLA_CHUNK_SIZE``), and ``--mamba-track-interval``."""


class States(pool.HybridReqToTokenPool):  # type: ignore[misc, name-defined]
    """A table of ``size`` requests of at most ``longest`` tokens, and ``num_slots`` states."""

    def __init__(self, size: int, longest: int, num_slots: int, page: int) -> None:
        self._num_slots, self.grid = num_slots, max(CHUNK, page)
        settings = SimpleNamespace(mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False)
        for name in ("unified_cache.components.mamba", "rust_tree_core.adapter"):  # they ask the arguments of a server
            module: Any = import_module(f"sglang.srt.mem_cache.{name}")
            module.get_exec = lambda: SimpleNamespace(mamba=settings)
            module.mamba_cache_chunk_size = lambda: self.grid
            module.mamba_checkpoint_grid = lambda page: self.grid
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

    def fits(self, requests: int) -> bool:
        """Return whether so many may run: each holds three slots and locks one state, and one is to spare for each use."""
        return 4 * requests + 2 <= self._num_slots

    def revert(self, made: Any) -> None:
        """Free the slot that a look-up took for a request that is not admitted."""
        if made.kv.holds_mamba:
            self.mamba_allocator.free(made.kv.mamba_pool_idx.unsqueeze(-1))
            made.kv.mamba_pool_idx = None

    def track(self, made: Any, begin: int, end: int) -> None:
        """Note where a state is copied in a chunk, as ``_mamba_radix_cache_v2_req_prepare_for_extend`` and
        ``_mamba_prefix_cache_update`` do."""
        kv, grid = made.kv, self.grid
        if end > made.known:
            every = max(grid, INTERVAL)
            if end // every * every > begin:
                kv.mamba_last_track_idx, kv.mamba_next_track_idx = kv.mamba_next_track_idx, kv.mamba_last_track_idx
                kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
                kv.mamba_last_track_seqlen = end // every * every
            return
        more = end - begin
        if more < grid:
            return
        at = begin + more // grid * grid
        upto = end if more // CHUNK * CHUNK == more // grid * grid else at + 1
        kv.mamba_last_track_idx, kv.mamba_next_track_idx = kv.mamba_next_track_idx, 1 - kv.mamba_next_track_idx
        branch = made.mamba_branching_seqlen
        if branch is not None and begin < branch < upto and (branch - begin) % grid == 0:
            at = branch
        kv.mamba_last_track_seqlen = at
