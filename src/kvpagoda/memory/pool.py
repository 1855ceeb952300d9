"""A pool: the rows of one layer with memory behind them. One class for K/V, latents, entries, rings and states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvpagoda.formats import decode, encode
from kvpagoda.memory.arena import Arena
from kvpagoda.schema import Rows

Tensor = torch.Tensor
Index = tuple[Tensor, ...]


class Pool:
    """Named rows of one layer over an arena; ``write`` and ``read`` go through each row's encoding.

    A row is addressed by (record id, row in the record): ``(block id, row of the block)`` for what grows with the text,
    ``(state row, ring row)`` for what a request has a fixed amount of. Negative ids count from the end, as in torch.
    The last ``num_hidden`` records absorb what padded rows write: addressable, but not among what ``shown`` gives.
    """

    def __init__(self, arena: Arena, layer: int, rows: Iterable[Rows], num_hidden: int = 0) -> None:
        self.arena, self.num_shown = arena, arena.num_rows - num_hidden
        self.rows: Mapping[str, Rows] = {one.name: one for one in rows}
        self.fields: Mapping[str, Tensor] = arena.layer(layer)

    def __getitem__(self, field: str) -> Tensor:
        """The view ``[records, rows, *shape]`` of one field; aliases the arena. KeyError if there is none."""
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

    def write(self, name: str, index: Index, values: Tensor) -> None:
        """Encode ``values`` ``[*index, *shape]`` and store them. One writer a row: duplicate indices are undefined."""
        for field, part in zip(self.parts(name), encode(self.rows[name].encoding, values)):
            field[index] = part.to(field.dtype)

    def read(self, name: str, index: Index) -> Tensor:
        """Rows ``index``, decoded to the rows' dtype: ``[*index, *shape]``, owned by the caller."""
        rows = self.rows[name]
        return decode(rows.encoding, [field[index] for field in self.parts(name)], getattr(torch, rows.dtype))

    def stored(self, name: str, values: Tensor) -> Tensor:
        """``values`` as they will read back: encoded and decoded. Attention must see these, not the originals."""
        rows = self.rows[name]
        return decode(rows.encoding, encode(rows.encoding, values), getattr(torch, rows.dtype)).to(values.dtype)
