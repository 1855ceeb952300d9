"""A pool: the rows of one layer with memory behind them. One class for K/V, latents, entries, rings and states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats import decode, encode
from kvpagoda.formats.encoding import Encoding
from kvpagoda.kernels.packed_rows import append_rows, decode_parts, gather_rows, round_trip
from kvpagoda.layouts.packed_row import PackedRow
from kvpagoda.memory.arena import Arena
from kvpagoda.schema import Rows

Tensor = torch.Tensor
Index = tuple[Tensor, ...]


def decoded(encoding: Encoding | PackedRow, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows ``[.., dim]`` of ``dtype`` that ``parts``, as ``Pool.parts`` gives them, hold."""
    read = decode_parts if isinstance(encoding, PackedRow) else decode
    return read(encoding, parts, dtype)  # type: ignore[arg-type]


class Pool:
    """Named rows of one layer over an arena; ``write`` and ``read`` go through each row's encoding.

    A row is addressed by (record id, row in the record): ``(block id, row of the block)`` for what grows with the text,
    ``(state row, ring row)`` for what a request has a fixed amount of. Ids alone are of kernel pages, as tables have them, and
    name all of their rows. A negative id is for what nobody reads: it writes to the end, as in torch, or, in packed rows,
    nowhere. ``fields`` show each record as its kernel pages, one behind another, and alias the arena.

    The last ``num_hidden`` records absorb what padded rows write: addressable, but not among what ``shown`` gives.
    """

    def __init__(self, arena: Arena, layer: int, rows: Iterable[Rows], num_hidden: int = 0) -> None:
        self.arena, self.layer, self.num_shown = arena, layer, arena.num_rows - num_hidden
        self.rows: Mapping[str, Rows] = {one.name: one for one in rows}
        self.fields: Mapping[str, Tensor] = arena.layer(layer)

    def __getitem__(self, field: str) -> Tensor:
        """The view ``[kernel pages, rows, *shape]`` of one field; aliases the arena. KeyError if there is none."""
        return self.fields[field]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def parts(self, name: str) -> Sequence[Tensor]:
        """The fields that the encoding of rows ``name`` is made of, in the encoding's order."""
        rows = self.rows[name]
        return [self.fields[name + suffix] for suffix, _, _ in rows.encoding.parts(rows.shape, rows.dtype)]

    def shown(self, name: str) -> tuple[Tensor, ...]:
        """``parts`` without the hidden records: what views give to callers."""
        return tuple(part[: self.num_shown] for part in self.parts(name))

    def joined(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """``rows`` under the names that they have here: K and V ``[.., heads, dim]`` of one shape, or a latent and its RoPE
        key ``[.., dim]``, are put together where this pool keeps them packed in one row."""
        if rows.keys() == {"k", "v"} and "kv" in self.rows and rows["k"].shape == rows["v"].shape:
            return {"kv": torch.stack((rows["k"], rows["v"]), dim=-3)}
        is_packed = "latent" in self.rows and "k_rope" not in self.rows
        if is_packed and rows.keys() == {"latent", "k_rope"} and rows["latent"].shape[:-1] == rows["k_rope"].shape[:-1]:
            return {"latent": torch.cat((rows["latent"], rows["k_rope"]), dim=-1)}
        return rows

    def write(self, name: str, index: Index, values: Tensor) -> None:
        """Encode ``values`` ``[*index, *shape]`` and store them; packed rows as bfloat16. One writer a row: duplicate indices
        are undefined."""
        encoding, parts = self.rows[name].encoding, self.parts(name)
        if isinstance(encoding, PackedRow):
            slots = self._slots(index, parts[0].shape[1])
            slots = slots.expand(values.shape[: values.ndim - len(self.rows[name].shape)])
            flat = values.reshape(slots.numel(), math.prod(self.rows[name].shape)).to(torch.bfloat16)
            append_rows(flat, slots.flatten(), self.pages(name), **_packed(encoding, parts[0]))
            return
        cells = self._cells(index, parts[0].shape[1])
        for field, part in zip(parts, encode(encoding, values)):
            field[cells] = part.to(field.dtype)

    def read(self, name: str, index: Index) -> Tensor:
        """Rows ``index``, decoded to the rows' dtype: ``[*index, *shape]``, owned by the caller."""
        rows, parts = self.rows[name], self.parts(name)
        dtype = getattr(torch, rows.dtype)
        if isinstance(rows.encoding, PackedRow):
            slots = self._slots(index, parts[0].shape[1])
            exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            out = torch.empty(slots.numel(), math.prod(rows.shape), dtype=exact, device=slots.device)
            gather_rows(self.pages(name), slots.flatten(), out, **_packed(rows.encoding, parts[0]))
            return out.to(dtype).view(*slots.shape, *rows.shape)
        cells = self._cells(index, parts[0].shape[1])
        return decode(rows.encoding, [field[cells] for field in parts], dtype)

    def stored(self, name: str, values: Tensor) -> Tensor:
        """``values`` as they will read back: encoded and decoded. Attention must see these, not the originals."""
        rows = self.rows[name]
        if isinstance(rows.encoding, PackedRow):
            flat = values.reshape(-1, math.prod(rows.shape)).to(torch.bfloat16)
            return round_trip(flat, rows.encoding).to(values.dtype).view(values.shape)
        return decode(rows.encoding, encode(rows.encoding, values), getattr(torch, rows.dtype)).to(values.dtype)

    def tensor(self, name: str) -> Tensor:
        """The one tensor in which kernels take rows ``name`` and what lies beside them: ``[kernel pages, rows, 1, 576]`` of a
        latent and its RoPE key, ``[slots, heads, value, key]`` of a state, uint8 ``[kernel pages, rows, 1, 656]`` or ``[kernel
        pages, heads, rows, bytes]`` of packed rows (with the strides that kernels are told, wherever scales lie). An alias,
        with its axes in the order of memory. Raises BadInput where what lies there has no such form."""
        page, memory = self.arena.page(self.layer, name)
        if (whole := page.whole) is None:
            raise BadInput(f"rows {', '.join(page.rows)} lie side by side as tensors of their own: {[*self.fields]}")
        dtype = getattr(torch, whole.dtype)
        typed = memory.view(dtype) if whole.dtype != "uint8" else memory
        shape, strides = (len(typed), *whole.shape), (typed.stride(0), *whole.strides)
        start = typed.storage_offset() + whole.offset // dtype.itemsize
        found = typed.as_strided(shape, strides, start)
        if page.places[0].field.count == 1 and name in self.rows and self.rows[name].count == 1 and not page.packed:
            found = found.squeeze(1)
        strides = found.stride()
        return found.permute(0, *sorted(range(1, found.ndim), key=lambda axis: (-strides[axis], axis)))

    def pages(self, name: str) -> Tensor:
        """The pages that rows ``name`` lie in, as kernels address them: uint8 ``[kernel pages, nbytes]``, an alias."""
        return self.arena.page(self.layer, name)[1]

    def _slots(self, index: Index, per_page: int) -> Tensor:
        """Number of each row that ``index`` names among all rows of the pages, int64 or int32."""
        if len(index) == 1:
            return index[0][..., None] * per_page + _arange(per_page, index[0].device)
        return index[0] * (per_page * self.arena.layout.kernel_pages) + index[1]

    def _cells(self, index: Index, per_page: int) -> Index:
        """(kernel page, row of it) of each row that ``index`` names."""
        if self.arena.layout.kernel_pages == 1 or len(index) == 1:
            return index
        slots = self._slots(index, per_page)
        return torch.div(slots, per_page, rounding_mode="floor"), slots % per_page


def _packed(encoding: PackedRow, codes: Tensor) -> dict[str, Any]:
    """What the kernels of packed rows are told of them."""
    return {
        "format": encoding.format, "dialect": encoding.dialect, "head_dim": encoding.head_dim, "page_size": codes.shape[1],
    }  # fmt: skip


@lru_cache(maxsize=64)
def _arange(count: int, device: torch.device) -> Tensor:
    """int64 ``[count]``. Shared; do not write to it."""
    return torch.arange(count, device=device)
