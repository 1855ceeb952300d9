"""A pool: named rows of one layer in an arena. One class for K/V, latents, entries, rings and states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from kvpagoda.core.kernels.packed_rows import Parts, append_parts, gather_parts, warm_up_parts
from kvpagoda.core.kernels.scaled_rows import append_scaled, gather_scaled, warm_up_scaled
from kvpagoda.core.memory.arena import Arena
from kvpagoda.errors import BadInput
from kvpagoda.formats import decode, encode
from kvpagoda.formats.encoding import RAW
from kvpagoda.layouts.demands import Kernel
from kvpagoda.layouts.packed import by_part, bytes_of
from kvpagoda.schema import Rows
from kvpagoda.schema.kernel_forms import Argument, arguments, declared, kind_of, kinds_of
from kvpagoda.text import in_brackets

Tensor = torch.Tensor
Index = tuple[Tensor, ...]


class Pool:
    """Named rows of one layer in an arena. ``write`` and ``read`` apply the encoding of each row.

    A row is addressed by (record id, row in the record): ``(block id, row of the block)`` for rows that grow with the
    text, ``(state row, ring row)`` for rows of fixed size per request. Ids alone address kernel pages, as block tables
    have them, and name all rows of these. A negative id is for data that is never read: a write to it goes to the end
    of the arena, as in torch, or nowhere for encoded rows. ``fields`` show each record as its kernel pages, one after
    the other, and alias the arena.

    Args:
        arena: the memory.
        layer: whose rows these are.
        rows: that the pool has.
        num_hidden: the last records absorb the writes of padded rows. They can be addressed, but ``shown`` leaves them
            out.
    """

    def __init__(self, arena: Arena, layer: int, rows: Iterable[Rows], num_hidden: int = 0) -> None:
        self.arena, self.layer, self.num_shown = arena, layer, arena.num_rows - num_hidden
        self.rows: Mapping[str, Rows] = {named.name: named for named in rows}
        self.fields: Mapping[str, Tensor] = arena.layer(layer)
        self._encoded: dict[str, Parts] = {}
        pairs = [frozenset(self.rows) & pair for pair in (frozenset("kv"), frozenset(("latent", "k_rope")))]
        self.together: Mapping[str, frozenset[str]] = {name: pair for pair in pairs for name in pair}
        """Rows that mean nothing without each other: name -> names, itself included."""

    @in_brackets
    def __repr__(self) -> str:
        fields = (f"{name} {[*one.shape]} {str(one.dtype).removeprefix('torch.')}" for name, one in self.fields.items())
        return f"of layer {self.layer} on {self.arena.device}: {', '.join(fields)}"

    def __getitem__(self, field: str) -> Tensor:
        """Return the view ``[kernel pages, rows, *shape]`` of one field; it aliases the arena. Raises KeyError."""
        return self.fields[field]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def parts(self, name: str) -> Sequence[Tensor]:
        """Return the fields that the encoding of some rows consists of, in the encoding's order.

        Args:
            name: of the rows.
        """
        rows = self.rows[name]
        return [self.fields[name + suffix] for suffix, _, _ in rows.encoding.parts(rows.shape, rows.dtype)]

    def shown(self, name: str) -> tuple[Tensor, ...]:
        """Return ``parts`` without the hidden records, for views that callers get.

        Args:
            name: of the rows.
        """
        return tuple(part[: self.num_shown] for part in self.parts(name))

    def joined(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return rows under the names that they have in this pool.

        Args:
            rows: by name. K and V ``[.., heads, dim]`` of one shape, or a latent and its RoPE key ``[.., dim]``, are
                joined if this pool keeps them packed in one row.
        """
        if rows.keys() == {"k", "v"} and "kv" in self.rows and rows["k"].shape == rows["v"].shape:
            is_flat = self.rows["kv"].shape[1] == 1 != rows["k"].shape[-2]  # a single head is optional
            k, v = ((rows[name].unsqueeze(-2) if is_flat else rows[name]) for name in "kv")
            return {"kv": torch.stack((k, v), dim=-3)}
        is_packed = "latent" in self.rows and "k_rope" not in self.rows
        if is_packed and rows.keys() == {"latent", "k_rope"} and rows["latent"].shape[:-1] == rows["k_rope"].shape[:-1]:
            return {"latent": torch.cat((rows["latent"], rows["k_rope"]), dim=-1)}
        return rows

    def write(self, name: str, index: Index, values: Tensor) -> None:
        """Encode values and store them; packed rows are encoded from bfloat16. The pool keeps no gradient graph of them.

        Args:
            name: of the rows.
            index: their address. Each row may be written once in a call: the result of duplicates is undefined.
            values: ``[*index, *shape]``.
        """
        if self.rows[name].encoding == RAW:
            field = self.fields[name]
            field[self._cells(index, field.shape[1])] = values.detach().to(field.dtype)
        else:
            slots = self._slots(index, self.parts(name)[0].shape[1])
            self.write_slots(name, slots.expand(values.shape[: values.ndim - len(self.rows[name].shape)]), values)

    def write_slots(self, name: str, slots: Tensor, values: Tensor) -> None:
        """``write`` to rows counted through all records, as ``slot_mapping`` has them. One launch on a GPU, if they are
        encoded.

        Args:
            name: of the rows.
            slots: contiguous int32 or int64.
            values: ``[*slots.shape, *shape]``.
        """
        rows, values = self.rows[name], values.detach()
        if rows.encoding == RAW:
            field = self.fields[name]
            page = torch.div(slots, field.shape[1], rounding_mode="floor")
            field[page, slots % field.shape[1]] = values.to(field.dtype)
        elif rows.encoding.scale is not None:
            (field,) = self.parts(name)
            append_scaled(values.reshape(slots.numel(), *rows.shape), slots.flatten(), field, rows.encoding)
        else:
            flat = values.reshape(slots.numel(), math.prod(rows.shape))
            flat = flat.to(torch.bfloat16) if rows.encoding.is_packed else flat
            append_parts(flat, slots.flatten(), self.encoded(name))

    def read(self, name: str, index: Index) -> Tensor:
        """Return rows, decoded to the dtype of the rows: ``[*index, *shape]``, owned by the caller.

        Args:
            name: of the rows.
            index: their address.
        """
        rows = self.rows[name]
        dtype = getattr(torch, rows.dtype)
        if rows.encoding == RAW:
            field = self.fields[name]
            return field[self._cells(index, field.shape[1])].to(dtype)
        if rows.encoding.scale is not None:
            (field,) = self.parts(name)
            slots = self._slots(index, field.shape[1])
            out = torch.empty(slots.numel(), *rows.shape, dtype=dtype, device=slots.device)
            gather_scaled(field, slots.flatten(), out, rows.encoding)
            return out.view(*slots.shape, *rows.shape)
        parts = self.encoded(name)
        slots = self._slots(index, parts.form.grid.page)
        exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        out = torch.empty(slots.numel(), math.prod(rows.shape), dtype=exact, device=slots.device)
        gather_parts(out, slots.flatten(), parts)
        return out.to(dtype).view(*slots.shape, *rows.shape)

    def stored(self, name: str, values: Tensor) -> Tensor:
        """Return values as they would be read back: encoded and decoded. Attention must use these values.

        Args:
            name: of the rows.
            values: ``[.., *shape]``.
        """
        rows = self.rows[name]
        return decode(rows.encoding, encode(rows.encoding, values), getattr(torch, rows.dtype)).to(values.dtype)

    def encoded(self, name: str) -> Parts:
        """Return encoded rows as ``append_parts`` and ``gather_parts`` take them: the same object each time.

        Args:
            name: of the rows.
        """
        if name not in self._encoded:
            rows, parts = self.rows[name], self.parts(name)
            *cells, heads = (1, 1, *rows.shape[:-1])
            views = [bytes_of(part, 2 + len(rows.shape)) for part in parts]
            shapes = [(*one.shape[:2], math.prod(cells), heads, one.shape[-1]) for one in views]
            views = [one.view(shape).transpose(2, 3) for one, shape in zip(views, shapes)]
            self._encoded[name] = Parts.of(by_part(views), rows.encoding)
        return self._encoded[name]

    def warm_up(self) -> None:
        """Compile the Triton kernels that write and read the encoded rows; nothing is written. Nothing to do elsewhere."""
        for name, rows in self.rows.items():
            exact = rows.dtype == "bfloat16"
            reads = "gather half" if exact else "gather"
            writes = ("append",) if exact or rows.encoding.is_packed else ()
            for how in (*writes, reads) if rows.encoding != RAW else ():
                if rows.encoding.is_scaled:
                    warm_up_scaled(self.fields[name], rows.encoding, how)
                else:
                    warm_up_parts(self.encoded(name), how)

    def tensor(self, name: str) -> Tensor:
        """Return the one tensor in which kernels take some rows and those packed with them.

        Args:
            name: of the rows.

        Returns:
            ``[kernel pages, rows, 1, 576]`` for a latent and its RoPE key and ``[slots, heads, value, key]`` for a
            state. For packed rows it is uint8 ``[kernel pages, rows, 1, 656]`` or ``[kernel pages, heads, rows,
            bytes]``, with the strides that kernels expect, wherever the scales are. It aliases the arena, with its axes
            in the order of memory.

        Raises:
            BadInput: the page has no such form.
        """
        page, memory = self.arena.page(self.layer, name)
        if (whole := page.whole) is None:
            text = f"rows {', '.join(page.rows)} are separate tensors; take the fields {[*self.fields]}"
            raise BadInput(text, needed=tuple(page.rows))
        dtype = getattr(torch, whole.dtype)
        typed = memory.view(dtype) if whole.dtype != "uint8" else memory
        shape, strides = (len(typed), *whole.shape), (typed.stride(0), *whole.strides)
        start = typed.storage_offset() + whole.offset // dtype.itemsize
        found = typed.as_strided(shape, strides, start)
        if page.places[0].field.count == 1 and name in self.rows and self.rows[name].count == 1 and not page.packed:
            found = found.squeeze(1)
        strides = found.stride()
        return found.permute(0, *sorted(range(1, found.ndim), key=lambda axis: (-strides[axis], axis)))

    def kernel_tensors(self, kernel: Kernel) -> dict[str, Any]:
        """Return the tensors that a kernel takes, with the axes in its order. They alias the arena.

        Args:
            kernel: of the table of demands.

        Returns:
            Tensors by the names of the table, and as ``declared`` the facts about them that shapes cannot tell. Empty
            if it takes no rows of this pool, or not in their form.
        """
        pages = [self.arena.page(self.layer, name) for name in self.rows]
        for number, name in enumerate(self.rows):
            page = pages[number][0]
            if kind_of(page) not in kinds_of(kernel):
                continue
            if found := arguments(kernel, page, [mate for mate, _ in pages]):
                tensors: dict[str, Any] = {argument: self._as(one) for argument, one in found.items()}
                return {**tensors, "declared": declared(found, self.rows[name].encoding)}
        return {}

    def _as(self, argument: Argument) -> Tensor:
        """Return the view of the arena that ``argument`` describes."""
        memory = self.arena.page(self.layer, argument.page.rows[0])[1]
        dtype = getattr(torch, argument.dtype)
        typed = memory if argument.dtype == "uint8" else memory.view(dtype)
        start = typed.storage_offset() + argument.offset // dtype.itemsize
        return typed.as_strided((len(typed), *argument.shape), (typed.stride(0), *argument.strides), start)

    def pages(self, name: str) -> Tensor:
        """Return the pages in which some rows lie, as kernels address them: uint8 ``[kernel pages, nbytes]``. They alias
        the arena.

        Args:
            name: of the rows.
        """
        return self.arena.page(self.layer, name)[1]

    def _slots(self, index: Index, per_page: int) -> Tensor:
        """Return the number of each row that ``index`` addresses, among all rows of the pages: int64 or int32."""
        if len(index) == 1:
            return index[0][..., None] * per_page + _arange(per_page, index[0].device)
        return index[0] * (per_page * self.arena.layout.kernel_pages) + index[1]

    def _cells(self, index: Index, per_page: int) -> Index:
        """Return (kernel page, row in it) of each row that ``index`` addresses."""
        if self.arena.layout.kernel_pages == 1 or len(index) == 1:
            return index
        slots = self._slots(index, per_page)
        return torch.div(slots, per_page, rounding_mode="floor"), slots % per_page


@lru_cache(maxsize=64)
def _arange(count: int, device: torch.device) -> Tensor:
    """Return int64 ``[count]``. The tensor is shared; do not write to it."""
    return torch.arange(count, device=device)
