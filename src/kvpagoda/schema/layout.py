"""Where every field lies in a record: offsets, alignment and size. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpagoda.schema.fields import Field
from kvpagoda.units import align_up

ALIGN = 16
"""Bytes to which every field starts and every record ends: one vector load of a kernel."""


@dataclass(frozen=True)
class Place:
    """One field of one layer inside a record: ``nbytes`` bytes from ``offset``."""

    layer: int
    field: Field
    offset: int

    @property
    def nbytes(self) -> int:
        return self.field.nbytes


@dataclass(frozen=True)
class RowLayout:
    """The record of one block, or of one request's state: all layers, all fields.

        record  | layer 0: field, field, .. | layer 1: .. | .. | pad |
                0                                              nbytes

    Every field starts at a multiple of ``ALIGN``; ``payload_nbytes`` is what the fields hold without that padding.

    >>> layout = RowLayout.build([(0, Field("scales", 3, (4,), "uint8")), (0, Field("k", 3, (8,), "bfloat16"))])
    >>> [(place.field.name, place.offset) for place in layout.places], layout.nbytes, layout.payload_nbytes
    ([('scales', 0), ('k', 16)], 64, 60)
    """

    places: tuple[Place, ...]
    nbytes: int

    @classmethod
    def build(cls, fields: Iterable[tuple[int, Field]]) -> RowLayout:
        """Lay the (layer, field) pairs one behind another, in the order given."""
        places, offset = [], 0
        for layer, field in fields:
            places.append(Place(layer, field, offset))
            offset = align_up(offset + field.nbytes, ALIGN)
        return cls(tuple(places), offset)

    @property
    def payload_nbytes(self) -> int:
        """Bytes that carry data."""
        return sum(place.nbytes for place in self.places)
