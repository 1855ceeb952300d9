"""SGLang's one memory (``--enable-unified-memory``) for blocks and windows, or states, for ``benchmarks.peers.sglang_oracle``:
its buffer, allocators and slots on the device "meta", which has sizes and no bytes. On a CPU they call its own references of
kernels."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers.sglang_states import States

memory = import_module("sglang.srt.mem_cache.unified_memory_pool")
mamba = import_module("sglang.srt.mem_cache.allocator.unified_mamba")
swa = import_module("sglang.srt.mem_cache.allocator.unified_hybrid_swa")
ends = import_module("sglang.srt.mem_cache.allocator.unified_sub_pool")
paged = import_module("sglang.srt.mem_cache.allocator.paged")
UNIT = 64
"""Bytes of a token in a layer, the fewest that SGLang can align."""


def _extend(prefixes: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    paged.alloc_extend_naive(prefixes, lengths, last, free, out, page, "cpu")


ends.alloc_extend_kernel = {(rows,): _extend for rows in range(1_000)}  # a kernel is taken by the size of its grid


def buffer(units: int, page: int, specs: list[Any]) -> Any:
    """The memory of ``units`` blocks of ``page`` tokens of one layer for the pools of ``specs``."""
    return memory.UnifiedKVPool(
        total_bytes=units * page * UNIT, sub_pool_specs=specs, device="meta", enable_memory_saver=False, page_size=page
    )


def rows_of(name: str, layers: int, direction: str) -> Any:
    """The pool of the keys and values of ``layers`` layers, which grows in ``direction``."""
    spec = memory.MHASubPoolSpec(
        name=name, layer_num=layers, grow_direction=direction, head_num=1, head_dim=UNIT // 4, store_dtype=torch.float16
    )
    assert spec.entry_bytes() == UNIT * layers, "the bytes of the profile"
    return spec


class Unified:
    """An allocator and a table of ``size`` requests of at most ``longest`` tokens, in the memory of ``units`` blocks of
    ``page`` tokens of one layer, for ``full`` layers and ``states`` layers, of which a state has the bytes of a block."""

    def __init__(self, size: int, longest: int, page: int, units: int, full: int, states: int) -> None:
        kept = {"conv_dtype": torch.float16, "temporal_dtype": torch.float16}
        shapes = {"conv_state_shapes": ((8 * page,),), "temporal_state_shape": (24 * page,)}
        state = memory.MambaSubPoolSpec(name="mamba", layer_num=states, grow_direction="up", **kept, **shapes)
        assert state.entry_bytes() == UNIT * states * page, "the bytes of the profile"
        made = SimpleNamespace(full_kv_pool=NoBytes(), mamba_pool=NoBytes())
        self.allocator: Any = mamba.UnifiedMambaTokenToKVPoolAllocator(
            unified_buffer=buffer(units, page, [rows_of("full", full, "down"), state]), kvcache=made, device="cpu",
            page_size=page, lazy_compaction=True,
        )  # fmt: skip
        self.rows = States(size, longest, self.allocator.size_mamba)
        end = self.allocator.mamba_allocator
        self.rows.mamba_allocator = memory.UnifiedMambaSlotAllocator(end, self.allocator.size_mamba, "cpu")


def beside_windows(page: int, units: int, full: int, windows: int) -> Any:
    """An allocator in the memory of ``units`` blocks of ``page`` tokens of one layer, for ``full`` layers and ``windows``
    layers with windows."""
    made = SimpleNamespace(full_kv_pool=NoBytes(), swa_kv_pool=NoBytes(), attach_allocators=lambda **given: None)
    return swa.UnifiedSWATokenToKVPoolAllocator(
        unified_buffer=buffer(units, page, [rows_of("full", full, "down"), rows_of("swa", windows, "up")]), kvcache=made,
        device="cpu", page_size=page, lazy_compaction=True,
    )  # fmt: skip


class NoBytes:
    """What moves when blocks and states need room, but for its bytes."""

    def move_physical_pages(self, *given: Any) -> None:
        """Move nothing."""

    move_kv_cache = zero_physical_pages = move_physical_pages
