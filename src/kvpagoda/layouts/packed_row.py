"""Packed rows as the encoding of a layer's rows: format, dialect, and the places of their parts in a page."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.errors import LayoutError
from kvpagoda.formats.rule import SUFFIXES
from kvpagoda.layouts.dialects import Dialect, dialect_for_heads
from kvpagoda.layouts.packings import Packing

Parts = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class PackedRow:
    """Rows in the packed ``format`` of a kernel, written by the rules of ``dialect``.

    Both are part of the identity of rows: engines whose dialects differ, even by a floor, cannot share rows.
    ``head_dim``: elements of a head in formats with heads, else None. Raises BadInput for unknown names and sizes.

    >>> PackedRow("v32_656", "flashmla").parts((1, 576), "bfloat16")
    (('_fp8', (1, 512), 'uint8'), ('_rope', (1, 64), 'bfloat16'), ('_inv_scale', (1, 4), 'float32'))
    >>> nbytes, places = PackedRow("v32_656", "flashmla").arrange(64, (1, 576))
    >>> nbytes, places[2]  # scales: offset, and the strides of rows and axes, in bytes
    (41984, (512, (656, 656, 4)))
    """

    format: str
    dialect: str
    head_dim: int | None = None

    def __post_init__(self) -> None:
        _ = self.rules

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.format

    @property
    def rules(self) -> Dialect:
        """The geometry and the numeric rule of the rows."""
        return dialect_for_heads(self.format, self.dialect, self.head_dim)

    @property
    def packing(self) -> Packing:
        """The places of the parts of a row in a page."""
        return self.rules.packing

    @property
    def kept(self) -> int:
        """Elements at the end of a row that are not encoded."""
        return self.packing.kept

    @property
    def page_multiple(self) -> int:
        """Kernels demand that the bytes from page to page are a multiple of this number."""
        return self.packing.page_multiple

    def parts(self, shape: tuple[int, ...], dtype: str) -> Parts:
        """Return (suffix, shape, dtype) of each array that stores one row of ``shape``: codes, kept elements, scales.

        ``shape``: ``[.., width]``, or ``[2, heads, head_dim]`` for formats with K and V in one row. Raises LayoutError
        for another size.
        """
        packing = self.packing
        if shape[-1] != packing.coded + packing.kept or (packing.cells > 1 and len(shape) != 3):
            raise LayoutError.of(
                "size",
                f"{self.format} holds rows of {packing.coded} + {packing.kept} elements, not of {list(shape)}; choose another "
                f"layout for this model",
            )
        lead, codes = shape[:-1], packing.coded * packing.code_bits // 8
        parts: Parts = ((SUFFIXES[self.rules.rule.codes], (*lead, codes), "uint8"),)
        if packing.kept:
            parts += (("_rope", (*lead, packing.kept), "bfloat16" if packing.kept_nbytes == 2 else "uint8"),)
        if packing.scale_nbytes == 4:
            return (*parts, ("_inv_scale", (*lead, packing.groups), "float32"))
        return (*parts, ("_scales", (*lead, packing.groups + packing.scale_pad), "uint8"))

    def page_shape(self, count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a page of ``count`` rows as kernels take it, in bytes.

        It is ``[rows, 1, bytes of a row]``, or ``[heads, rows, bytes]`` for formats with heads.
        """
        row = self.packing.row_nbytes
        return (shape[1], count, row) if self.packing.cells > 1 else (count, 1, row)

    def arrange(self, count: int, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
        """Return (bytes of a page of ``count`` rows, [(offset, strides) of each part]).

        The parts are in the order of ``parts``. The strides are those from row to row, then along each axis of the
        part. All numbers are in bytes.
        """
        places, heads = self.packing.places(count), shape[1] if self.packing.cells > 1 else 1
        names = [name for name in ("codes", "kept", "scales") if name in places]
        placed = []
        for name, (_, part, dtype) in zip(names, self.parts(shape, "")):
            place, last = places[name], {"float32": 4, "bfloat16": 2}.get(dtype, 1)
            lead = (place.cell, place.head) if self.packing.cells > 1 else (place.row,) * (len(part) - 1)
            placed.append((place.base, (place.row, *lead, last)))
        return self.packing.payload_nbytes(count, heads), placed
