"""SGLang's one memory for blocks and states (``--enable-unified-memory``) for ``benchmarks.peers.sglang_oracle``: its buffer,
allocators and slots on the device "meta", which has sizes and no bytes. On a CPU they call its own references of kernels."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers.sglang_states import States

memory = import_module("sglang.srt.mem_cache.unified_memory_pool")
mamba = import_module("sglang.srt.mem_cache.allocator.unified_mamba")
ends = import_module("sglang.srt.mem_cache.allocator.unified_sub_pool")
paged = import_module("sglang.srt.mem_cache.allocator.paged")
UNIT = 64
"""Bytes of a token in a layer, the fewest that SGLang can align."""


def _extend(prefixes: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    paged.alloc_extend_naive(prefixes, lengths, last, free, out, page, "cpu")


ends.alloc_extend_kernel = {(rows,): _extend for rows in range(1_000)}  # a kernel is taken by the size of its grid


class Unified:
    """An allocator and a table of ``size`` requests of at most ``longest`` tokens, in the memory of ``blocks`` blocks of
    ``page`` tokens of ``full`` layers and ``slots`` + 1 slots of ``states`` layers, which have the bytes of a block each."""

    def __init__(self, size: int, longest: int, page: int, blocks: int, slots: int, full: int, states: int) -> None:
        layer = {"head_num": 1, "head_dim": UNIT // 4, "store_dtype": torch.float16}
        kept = {"conv_dtype": torch.float16, "temporal_dtype": torch.float16}
        shapes = {"conv_state_shapes": ((8 * page,),), "temporal_state_shape": (24 * page,)}
        specs = [
            memory.MHASubPoolSpec(name="full", layer_num=full, grow_direction="down", **layer),
            memory.MambaSubPoolSpec(name="mamba", layer_num=states, grow_direction="up", **kept, **shapes),
        ]
        token, state = (spec.entry_bytes() for spec in specs)
        assert (token, state) == (UNIT * full, UNIT * states * page), "the bytes of the profile"
        buffer = memory.UnifiedKVPool(
            total_bytes=blocks * page * token + (slots + 1) * state, sub_pool_specs=specs, device="meta",
            enable_memory_saver=False, page_size=page,
        )  # fmt: skip
        made = SimpleNamespace(full_kv_pool=NoBytes(), mamba_pool=NoBytes())
        self.allocator: Any = mamba.UnifiedMambaTokenToKVPoolAllocator(
            unified_buffer=buffer, kvcache=made, device="cpu", page_size=page, lazy_compaction=True
        )
        self.rows = States(size, longest, self.allocator.size_mamba)
        end = self.allocator.mamba_allocator
        self.rows.mamba_allocator = memory.UnifiedMambaSlotAllocator(end, self.allocator.size_mamba, "cpu")


class NoBytes:
    """What moves when blocks and states need room, but for its bytes."""

    def move_physical_pages(self, *given: Any) -> None:
        """Move nothing."""

    move_kv_cache = zero_physical_pages = move_physical_pages
