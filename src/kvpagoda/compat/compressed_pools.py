"""The two pools of one compressed-attention layer: entries by block, and window and tails by request slot.

Both have one record more than requested, the last one: padded rows (block -1, slot -1) write to it, and no attribute
shows it. An attribute that the layer or its encoding does not have is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsIndex

import torch

from kvpagoda.compat.deepseek_v4 import LayerSchema
from kvpagoda.errors import BadInput
from kvpagoda.free_list import IdSet
from kvpagoda.id_tensors import Device
from kvpagoda.pools import Arena, Pool
from kvpagoda.units import positive_numbers

Tensor = torch.Tensor

_ENTRIES = "entries entries_fp8 entries_rope entries_scales indexer_keys indexer_keys_fp4 indexer_keys_scales".split()
_SWA = "swa swa_fp8 swa_rope swa_inv_scale swa_scales swa_pos".split()
_TAILS = "tail_ka tail_za tail_kb tail_zb overlap_k overlap_z".split()
ENTRY_FIELDS = {name: name for name in _ENTRIES} | {"inv_scale": "entries_inv_scale"}
"""Attribute of ``PagedKVPool`` -> the field that it shows."""
STATE_FIELDS = {name: name for name in (*_SWA, *_TAILS, *(f"idx_{name}" for name in _TAILS))}
"""Attribute of ``StateCachePool`` -> the field that it shows."""


class PagedKVPool(Pool):
    """Entries and indexer keys of one CSA or HCA layer, for ``num_blocks`` blocks of 128 tokens.

    With e entries per block (CSA 32, HCA 1), d = head_dim, r = rope_dim, i = indexer dim; HCA has no indexer keys:

        entries_fp8      [blocks, e, d - r] uint8 (E4M3)      inv_scale       [blocks, e] float32
        entries_rope     [blocks, e, r]     bfloat16          entries_scales  [blocks, e, 8] uint8 (584-byte form)
        indexer_keys_fp4 [blocks, e, i / 2] uint8, two codes per byte, the even element in the low half
        indexer_keys_scales [blocks, e, i / 32] uint8, powers of two (NVFP4: i / 16, E4M3)
        entries          [blocks, e, d] and indexer_keys [blocks, e, i]: the raw form

    All are views of the pool's memory.

    Args:
        schema: of the layer.
        num_blocks: of 128 tokens each.
        device: None: CUDA when a GPU is there, else the CPU.

    Raises:
        BadInput: a layer without entries.

    Examples:
        >>> from kvpagoda import DSV4Config, build_schedule, build_schema
        >>> config = DSV4Config.flash()
        >>> csa, hca = (build_schema(config, spec) for spec in build_schedule(config)[2:4])
        >>> pool = PagedKVPool(csa, num_blocks=4, device="cpu")
        >>> pool.entries_fp8.shape, pool.indexer_keys_fp4.shape
        (torch.Size([4, 32, 448]), torch.Size([4, 32, 64]))
        >>> print(PagedKVPool(hca, 4, device="cpu").indexer_keys_fp4)
        None
    """

    def __init__(self, schema: LayerSchema, num_blocks: int, device: Device = None) -> None:
        if not schema.entries_per_block:
            text = f"layer {schema.layer_idx} ({schema.attn.name}) has no compressed entries, so no paged pool"
            raise BadInput(text, needed=schema.layer_idx)
        (self.num_blocks,) = positive_numbers(num_blocks=num_blocks)
        arena = Arena(schema.block_layout(), self.num_blocks + 1, device=device, order="layer")
        super().__init__(arena, schema.layer_idx, schema.kind.block_rows(), num_hidden=1)
        self.schema = schema

    def __getattr__(self, name: str) -> Tensor | None:
        return _shown(self, name, ENTRY_FIELDS)

    def memory_bytes(self) -> int:
        """Return the bytes allocated, including the hidden record and alignment."""
        return self.arena.nbytes


class StateCachePool(Pool):
    """The state of one layer for each of ``max_requests`` requests; its size does not depend on their length.

    With w = window, t = tail_buffer_size (CSA 3, HCA 127), o = overlap_size (CSA 4), d = head_dim, r = rope_dim:

        swa_fp8  [requests, w, d - r] uint8 (E4M3)    swa_rope [requests, w, r] bfloat16    swa_pos [requests, w] int32,
        swa_inv_scale [requests, w] float32           (584-byte form: swa_scales)           -1 where never written
        tail_ka, tail_za  [requests, t, d] float32    keys and scores of the open window; SWA: None
        tail_kb, tail_zb  [requests, t, d] float32    the second stream; HCA and SWA: None
        overlap_k, overlap_z [requests, o, d] float32 stream a of the last closed window; HCA and SWA: None
        idx_tail_.., idx_overlap_..                   the same for the indexer, d = indexer dim; CSA only
        swa      [requests, w, d]                     the raw form
        swa_head [requests] int32                     one more than the newest position that ``write_swa`` wrote

    A ring row is addressed by position modulo the number of rows. All attributes above are views of the pool's memory.

    Args:
        schema: of the layer.
        max_requests: how many have a state.
        device: None: CUDA when a GPU is there, else the CPU.

    Examples:
        >>> from kvpagoda import DSV4Config, build_schedule, build_schema
        >>> config = DSV4Config.flash()
        >>> pool = StateCachePool(build_schema(config, build_schedule(config)[2]), max_requests=3, device="cpu")
        >>> pool.swa_fp8.shape, pool.tail_ka.shape, pool.overlap_k.shape
        (torch.Size([3, 128, 448]), torch.Size([3, 3, 512]), torch.Size([3, 4, 512]))
        >>> pool.swa_head[1] = 7                        # as write_swa does for a request of 7 tokens
        >>> pool.swa_head.tolist(), pool.tail_len.tolist()
        ([0, 7, 0], [0, 3, 0])
        >>> pool.reset_slot(1)
        >>> pool.swa_head.tolist()
        [0, 0, 0]
    """

    def __init__(self, schema: LayerSchema, max_requests: int, device: Device = None) -> None:
        (self.max_requests,) = positive_numbers(max_requests=max_requests)
        arena = Arena(schema.state_layout(), self.max_requests + 1, device=device, order="layer")
        super().__init__(arena, schema.layer_idx, schema.kind.state_rows(), num_hidden=1)
        self.schema = schema
        self._ids = IdSet(self.max_requests, 0, "request slots")
        arena.reset(torch.arange(arena.num_rows))

    def __getattr__(self, name: str) -> Tensor | None:
        return _shown(self, name, STATE_FIELDS)

    @property
    def swa_head(self) -> Tensor:
        """int32 ``[requests]``: one more than the newest position that ``write_swa`` wrote; a view."""
        return self["swa_head"][: self.max_requests, 0]

    @property
    def tail_len(self) -> Tensor | None:
        """int32 ``[requests]``: tokens in the open window, ``swa_head % ratio``; None for SWA. A new tensor."""
        ratio = self.schema.kind.ratio
        return self.swa_head % ratio if ratio else None

    def reset_slot(self, slot: SupportsIndex) -> None:
        """Reset the row of a request to its initial values.

        Args:
            slot: of the request.

        Raises:
            NotOwned: ``slot`` is out of range.
        """
        self.arena.reset(self._ids.in_range(slot))

    def memory_bytes(self) -> int:
        """Return the bytes allocated, including the hidden record and alignment."""
        return self.arena.nbytes


def _shown(pool: Pool, name: str, fields: Mapping[str, str]) -> Tensor | None:
    """Return the field behind attribute ``name``, ``[records, rows, *shape]`` without the hidden record.

    None if the layer has no such field. Raises AttributeError for a name that is not in ``fields``.
    """
    if name not in fields:
        raise AttributeError(f"{type(pool).__name__!r} object has no attribute {name!r}")
    field = pool.fields.get(fields[name])
    return None if field is None else field[: pool.num_shown]
