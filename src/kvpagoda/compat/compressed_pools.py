"""The two pools of one compressed-attention layer: entries by block, and window and tails by request slot.

Both have one record more than asked for, the last one: it absorbs what padded rows write (block -1, slot -1) and no
attribute shows it. An attribute that this layer, or this encoding, does not have is None.
"""

from __future__ import annotations

from typing import overload

import torch

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.memory.arena import Arena, Device
from kvpagoda.memory.pool import Pool
from kvpagoda.schema.presets.deepseek_v4 import LayerSchema

Tensor = torch.Tensor


class Shown:
    """An attribute of a pool that is one of its fields: ``[records, rows, *shape]`` without the hidden record. It
    aliases the arena. None where there is no such field."""

    def __init__(self, field: str | None = None) -> None:
        self._field = field

    def __set_name__(self, owner: type[Pool], name: str) -> None:
        self._field = self._field or name

    @overload
    def __get__(self, pool: None, owner: type[Pool]) -> Shown: ...

    @overload
    def __get__(self, pool: Pool, owner: type[Pool]) -> Tensor | None: ...

    def __get__(self, pool: Pool | None, owner: type[Pool]) -> Shown | Tensor | None:
        if pool is None:
            return self
        assert self._field is not None
        field = pool.fields.get(self._field)
        return None if field is None else field[: pool.num_shown]


class PagedKVPool(Pool):
    """Entries and indexer keys of one CSA or HCA layer, for ``num_blocks`` blocks of 128 tokens.

    With e entries a block (CSA 32, HCA 1), d = head_dim, r = rope_dim, i = indexer dim; HCA has no indexer keys:

        entries_fp8      [blocks, e, d - r] uint8 (E4M3)      inv_scale       [blocks, e] float32
        entries_rope     [blocks, e, r]     bfloat16          entries_scales  [blocks, e, 8] uint8 (584-byte form)
        indexer_keys_fp4 [blocks, e, i / 2] uint8, two codes a byte, the even element in the low half
        indexer_keys_scales [blocks, e, i / 32] uint8, powers of two (NVFP4: i / 16, E4M3)
        entries          [blocks, e, d] and indexer_keys [blocks, e, i]: the raw form

    Raises BadInput for a layer without entries.
    """

    entries_fp8 = Shown()
    entries_rope = Shown()
    inv_scale = Shown("entries_inv_scale")
    entries_scales = Shown()
    entries = Shown()
    indexer_keys_fp4 = Shown()
    indexer_keys_scales = Shown()
    indexer_keys = Shown()

    def __init__(self, schema: LayerSchema, num_blocks: int, device: Device = None) -> None:
        if not schema.entries_per_block:
            raise BadInput(f"layer {schema.layer_idx} ({schema.attn.name}) has no compressed entries, so no paged pool")
        check_count("num_blocks", num_blocks)
        arena = Arena(schema.block_layout(), num_blocks + 1, device=device, order="layer")
        super().__init__(arena, schema.layer_idx, schema.kind.block_rows(), num_hidden=1)
        self.schema, self.num_blocks = schema, num_blocks

    def memory_bytes(self) -> int:
        """Bytes allocated, with the hidden record and alignment."""
        return self.arena.nbytes


class StateCachePool(Pool):
    """What one layer keeps for each of ``max_requests`` requests, whatever their length.

    With w = window, t = tail_buffer_size (CSA 3, HCA 127), o = overlap_size (CSA 4), d = head_dim, r = rope_dim:

        swa_fp8  [requests, w, d - r] uint8 (E4M3)    swa_rope [requests, w, r] bfloat16    swa_pos [requests, w] int32,
        swa_inv_scale [requests, w] float32           (584-byte form: swa_scales)           -1 where never written
        tail_ka, tail_za  [requests, t, d] float32    keys and scores of the open window; SWA: None
        tail_kb, tail_zb  [requests, t, d] float32    the second stream; HCA and SWA: None
        overlap_k, overlap_z [requests, o, d] float32 stream a of the last closed window; HCA and SWA: None
        idx_tail_.., idx_overlap_..                   the same for the indexer, d = indexer dim; CSA only
        swa      [requests, w, d]                     the raw form

    Ring rows are addressed by position modulo their number, so heads and lengths follow from ``swa_pos``.
    """

    swa_fp8 = Shown()
    swa_rope = Shown()
    swa_inv_scale = Shown()
    swa_scales = Shown()
    swa = Shown()
    tail_ka = Shown()
    tail_za = Shown()
    tail_kb = Shown()
    tail_zb = Shown()
    overlap_k = Shown()
    overlap_z = Shown()
    idx_tail_ka = Shown()
    idx_tail_za = Shown()
    idx_tail_kb = Shown()
    idx_tail_zb = Shown()
    idx_overlap_k = Shown()
    idx_overlap_z = Shown()

    def __init__(self, schema: LayerSchema, max_requests: int, device: Device = None) -> None:
        check_count("max_requests", max_requests)
        arena = Arena(schema.state_layout(), max_requests + 1, device=device, order="layer")
        super().__init__(arena, schema.layer_idx, schema.kind.state_rows(), num_hidden=1)
        self.schema, self.max_requests = schema, max_requests
        arena.reset(torch.arange(max_requests + 1, device=arena.device))

    @property
    def swa_pos(self) -> Tensor:
        """int32 ``[requests, window]``: the position each ring row holds, -1 where nothing was written. An alias."""
        return self["swa_pos"][: self.max_requests]

    @property
    def swa_head(self) -> Tensor:
        """int32 ``[requests]``: one past the highest position written. Derived from ``swa_pos``; the caller's own."""
        return self.swa_pos.amax(dim=1) + 1

    @property
    def tail_len(self) -> Tensor | None:
        """int32 ``[requests]``: tokens whose window is still open, ``swa_head % ratio``; None for SWA. Derived."""
        ratio = self.schema.kind.ratio
        return self.swa_head % ratio if ratio else None

    def reset_slot(self, slot: int) -> None:
        """Make the row of ``slot`` as new: nothing of the request before is left. Raises NotOwned if out of range."""
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < self.max_requests:
            raise NotOwned(f"slot {slot!r} is not one of the request slots 0..{self.max_requests - 1}")
        self.arena.reset(slot)

    def memory_bytes(self) -> int:
        """Bytes allocated, with the hidden record and alignment."""
        return self.arena.nbytes


def check_count(what: str, number: int) -> None:
    """Raises BadInput unless ``number`` is a positive whole number."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BadInput(f"{what} must be a positive whole number, got {number!r}")
