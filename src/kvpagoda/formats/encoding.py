"""How one row of numbers is stored, as plain data: its rule, its parts, and the place of each part. ``codec`` applies it.

inline   x_fp8 | .. | x_rope | .. | x_scales | ..     each part an array of its own, ``Encoding("fp8", kept=64)``
packed   page = | codes, scales, kept | .. |          all parts in the page of a kernel, ``Encoding("v32_656", ..)``
tensor   x                                            one code for each element and nothing else: one scale serves the
                                                      whole tensor, ``Encoding("fp8_e4m3", scale=0.02)``
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any

from kvpagoda.errors import LayoutError, SchemaError, shown, unknown_name
from kvpagoda.formats.dialects import DIALECTS, SUFFIXES, TABLE, Dialect, Packing, Rule, dialect_for_heads
from kvpagoda.units import align_up

INLINE = {name: Rule(**row["rule"]) for name, row in TABLE["inline"].items()}
"""Name of an inline encoding -> how it computes codes and scales. The size of a group is a field of ``Encoding``."""
TENSOR = {name: (row["dtype"], float(row["top"])) for name, row in TABLE["tensor"].items()}
"""Name of an encoding with one scale for a whole tensor -> (dtype of a code, largest magnitude of a code)."""
Parts = tuple[tuple[str, tuple[int, ...], str], ...]
"""(suffix, shape, dtype) of each array that stores a row: codes, kept elements if there are any, scales."""


MOST_SCALE = 3.4028234663852886e38
"""The largest float32."""


@dataclass(frozen=True)
class Encoding:
    """How one row of numbers is stored. ``kvpagoda.formats.encode`` and ``decode`` apply it.

    ``name`` is one of:

    - ``raw``: the elements as they are.
    - ``fp8``: E4M3 codes with one float32 inverse scale for each ``group`` elements (None: one per row); the last
      ``kept`` elements stay bfloat16 (the RoPE part).
    - ``fp8_ue8m0``: E4M3 codes with one power-of-two scale byte for each ``group``, the scale bytes padded to a multiple
      of 8; the last ``kept`` elements stay bfloat16. With 448 + 64 elements: the 584-byte row of FlashMLA.
    - ``mxfp4``: E2M1 codes, two per byte, with one power-of-two scale byte for each 32 elements.
    - ``nvfp4``: E2M1 codes, two per byte, with one E4M3 scale for each 16 elements.
    - ``int8``: integers of -127 .. 127 with one float32 scale for each ``group`` elements (None: one per row).

    The last three may leave their last ``kept`` elements unencoded too. The parts of such a row are arrays of their
    own.

    Two have one ``scale`` for all rows, for example all K rows of a layer, and keep the shape of a row:

    - ``fp8_e4m3``: float8_e4m3fn codes, the nearest to x / scale; magnitudes above 448 become 448, and NaN stays NaN.
    - ``fp8_e5m2``: float8_e5m2 codes, the same with 57344.

    Or it is the packed format of a kernel (``dialects.DIALECTS``), which has places for all parts in one page. Then the
    format decides ``kept`` and ``group``. Format and dialect are part of the identity of rows: engines whose dialects
    differ, even by a floor, cannot share rows.

    Args:
        name: one of the above.
        kept: how many last elements are not encoded.
        group: elements that share a scale.
        dialect: of a packed format, the engine whose rules write the rows; "": the default of the format.
        head_dim: of a packed format with heads, the elements of a head; None: 64.
        scale: of all rows, held as the nearest float32 and part of the identity of rows; None: 1.0.

    Raises:
        SchemaError: a scale that is not finite or not above 0.
        BadInput: an unknown dialect.
        LayoutError: a ``head_dim`` that the format cannot have.

    Examples:
        >>> Encoding("fp8_ue8m0", kept=64, group=64).parts((512,), "bfloat16")
        (('_fp8', (448,), 'uint8'), ('_rope', (64,), 'bfloat16'), ('_scales', (8,), 'uint8'))
        >>> packed = Encoding("v32_656", dialect="flashmla")
        >>> packed.parts((1, 576), "bfloat16")
        (('_fp8', (1, 512), 'uint8'), ('_rope', (1, 64), 'bfloat16'), ('_inv_scale', (1, 4), 'float32'))
        >>> nbytes, places = packed.arrange(64, (1, 576))
        >>> nbytes, places[2]  # scales: offset, and the strides of rows and axes, in bytes
        (41984, (512, (656, 656, 4)))
    """

    name: str = "raw"
    kept: int = 0
    group: int | None = None
    dialect: str = ""
    head_dim: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.is_scaled or self.scale is not None:
            object.__setattr__(self, "scale", self._checked_scale())
        if self.is_packed or self.dialect or self.head_dim is not None:
            packing = dialect_for_heads(self.name, self.dialect or None, self.head_dim).packing
            decided = {
                "kept": packing.kept,
                "group": packing.group,
                "dialect": self.dialect or next(iter(DIALECTS[self.name])),
            }
            for name, value in decided.items():
                object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        # part of the fingerprint of a schema, and so of the names of stored records
        if self.is_packed:
            return f"Encoding(name={self.name!r}, dialect={self.dialect!r}, head_dim={self.head_dim!r})"
        if self.is_scaled:
            return f"Encoding(name={self.name!r}, scale={self.scale!r})"
        return f"Encoding(name={self.name!r}, kept={self.kept!r}, group={self.group!r})"

    def _checked_scale(self) -> float:
        """Return the scale, 1.0 if none was given, as a float32. Raises SchemaError."""
        scale = 1.0 if self.scale is None else self.scale
        if not self.is_scaled:
            text = f"encoding {self.name!r} has no scale for a whole tensor, got {shown(scale)}; leave it out"
            raise SchemaError(text, field=self.name, needed=scale)
        given: Any = scale
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        exact = struct.unpack("f", struct.pack("f", float(scale)))[0] if is_number and abs(scale) <= MOST_SCALE else 0.0
        if not exact > 0:
            raise SchemaError(
                f"the scale of {self.name!r} is {shown(scale)}; expected a finite number above 0 that float32 can hold",
                field=self.name, needed=scale, available=0,
            )  # fmt: skip
        return float(exact)

    @property
    def is_scaled(self) -> bool:
        """Whether one scale serves all rows: a row has one code for each element, and nothing else."""
        return self.name in TENSOR

    @property
    def keeps_shape(self) -> bool:
        """Whether a row is stored as one array of its own shape, so that every layout of raw rows can hold it."""
        return self.name == "raw" or self.is_scaled

    def with_scale(self, scale: float) -> Encoding:
        """Return this encoding with another scale for the whole tensor.

        Args:
            scale: the new one.

        Raises:
            SchemaError: a scale that is not finite or not above 0.
        """
        return replace(self, scale=scale)

    @property
    def is_packed(self) -> bool:
        """Whether all parts of a row have places in one page, as a kernel reads them."""
        return self.name in DIALECTS

    @property
    def rules(self) -> Dialect:
        """The geometry of a packed row and the rule of its dialect, as a launch follows it."""
        return _launched(self.name, self.dialect, self.head_dim)

    @property
    def rule(self) -> Rule:
        """How groups become scales and codes.

        Raises:
            SchemaError: "raw", which has no rule, or an unknown name.
        """
        if self.is_packed:
            return self.rules.rule
        if self.name not in INLINE:
            raise unknown_name("encoding", self.name, ("raw", *INLINE, *TENSOR), SchemaError)
        return INLINE[self.name]

    @property
    def page_multiple(self) -> int:
        """Kernels demand that the bytes from page to page are a multiple of this number."""
        return self.rules.packing.page_multiple if self.is_packed else 1

    def packing(self, dim: int) -> Packing:
        """Return the geometry of a vector. Not for "raw".

        Args:
            dim: its elements.

        Raises:
            SchemaError: an unknown encoding, or a ``dim`` that does not divide into groups.
            LayoutError: a ``dim`` that a packed format does not hold.
        """
        return _packing(self, dim)

    def vector(self, dim: int) -> Parts:
        """Return ``parts`` of one vector; "raw" has none. Raises as ``packing``.

        Args:
            dim: its elements.
        """
        packing, rule = self.packing(dim), self.rule
        codes: Parts = ((SUFFIXES[rule.codes], (packing.coded * packing.code_bits // 8,), "uint8"),)
        if packing.kept:
            codes += (("_rope", (packing.kept,), "bfloat16" if packing.kept_nbytes == 2 else "uint8"),)
        if rule.scale == "float32":
            return (*codes, ("_inv_scale", () if self.group is None else (packing.groups,), "float32"))
        return (*codes, ("_scales", (packing.groups + packing.scale_pad,), "uint8"))

    def parts(self, shape: tuple[int, ...], dtype: str) -> Parts:
        """Return (suffix, shape, dtype) of each array that stores one row. Raises as ``packing``.

        Args:
            shape: of the row, whose last axis is encoded. Packed formats with K and V in one row take ``[2, heads,
                head_dim]``, or ``[heads, head_dim]`` if K and V are apart.
            dtype: of its elements.
        """
        if self.name == "raw":
            return (("", shape, dtype),)
        if self.is_scaled:
            return (("", shape, TENSOR[self.name][0]),)
        parts = self.vector(shape[-1])
        if self.is_packed:
            self.geometry(shape)
        return tuple((suffix, (*shape[:-1], *part), kind) for suffix, part, kind in parts)

    def page_shape(self, count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a page of packed rows as kernels take it, in bytes.

        It is ``[rows, 1, bytes of a row]``, or ``[heads, rows, bytes]`` for formats with heads; in planes K's heads,
        then V's.

        Args:
            count: rows.
            shape: of a row.
        """
        packing, heads = self.geometry(shape)
        if not packing.has_heads:
            return (count, 1, packing.row_nbytes)
        if packing.planes:
            return (packing.cells * heads, count, packing.row_nbytes // packing.cells)
        return (heads, count, packing.row_nbytes)

    def arrange(self, count: int, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
        """Return how packed rows lie in a page. All numbers are in bytes.

        Args:
            count: rows.
            shape: of a row.

        Returns:
            (bytes of the page, [(offset, strides) of each part]): the parts in the order of ``parts``, the strides from
            row to row, then along each axis of the part.
        """
        packing, heads = self.geometry(shape)
        places = packing.places(count, heads)
        names = [name for name in ("codes", "kept", "scales") if name in places]
        placed = []
        for name, (_, part, dtype) in zip(names, self.parts(shape, "")):
            place, last = places[name], {"float32": 4, "bfloat16": 2}.get(dtype, 1)
            lead = (place.cell, place.head)[3 - len(part) :] if packing.has_heads else (place.row,) * (len(part) - 1)
            placed.append((place.base, (place.row, *lead, last)))
        return packing.payload_nbytes(count, heads), placed

    def geometry(self, shape: tuple[int, ...]) -> tuple[Packing, int]:
        """Return the geometry of packed rows, with as many cells as these rows have, and their heads.

        Args:
            shape: of a row.

        Raises:
            LayoutError: a ``shape`` that the format does not hold.
        """
        packing = self.rules.packing
        if not packing.has_heads:
            return packing, 1
        if len(shape) == 2:
            return replace(packing, cells=1), shape[0]
        if len(shape) != 3 or shape[0] != packing.cells:
            raise _other_size(self, shape)
        return packing, shape[1]


@lru_cache(maxsize=256)
def packed_row(format: str, dialect: str | None = None, head_dim: int | None = None) -> Encoding:
    """Return the encoding of rows of packed ``format``, the same object for the same arguments.

    Raises BadInput for an unknown format or dialect (None: the default), LayoutError for a ``head_dim`` it cannot have.
    """
    if format not in DIALECTS:
        raise unknown_name("packed format", format, DIALECTS)
    return Encoding(format, dialect=dialect or "", head_dim=head_dim)


@lru_cache(maxsize=256)
def _launched(format: str, dialect: str, head_dim: int | None) -> Dialect:
    """Return the dialect with its rule as a launch follows it: the same object for the same arguments."""
    chosen = dialect_for_heads(format, dialect, head_dim)
    return replace(chosen, rule=chosen.rule.launched)


@lru_cache(maxsize=1024)
def _packing(encoding: Encoding, dim: int) -> Packing:
    """Return ``encoding.packing(dim)``."""
    if encoding.is_packed:
        packing = encoding.rules.packing
        if dim != packing.coded + packing.kept:
            raise _other_size(encoding, (dim,))
        return packing
    rule, coded = encoding.rule, dim - encoding.kept
    group, per_byte = encoding.group or coded, rule.codes_per_byte
    if coded <= 0 or coded % group or coded % per_byte:
        raise SchemaError(
            f"encoding {encoding.name!r} cannot hold a row of {dim} elements: "
            f"{coded} to encode is not a positive multiple of {max(group, per_byte)}",
            field=encoding.name, needed=dim, available=max(group, per_byte),
        )  # fmt: skip
    groups = coded // group
    pad = align_up(groups, TABLE["inline"][encoding.name].get("scales_multiple", 1)) - groups
    return Packing(coded, group, 8 // per_byte, rule.scale_nbytes, pad, kept=encoding.kept)


def _other_size(encoding: Encoding, shape: tuple[int, ...]) -> LayoutError:
    """Return the error for rows of ``shape``, which the packed format of ``encoding`` does not hold."""
    packing = encoding.rules.packing
    return LayoutError.of(
        "size",
        f"{encoding.name} holds rows of {packing.coded} + {packing.kept} elements, not of {list(shape)}; choose another "
        f"layout for this model",
    )


RAW = Encoding()
MXFP4 = Encoding("mxfp4", group=32)
NVFP4 = Encoding("nvfp4", group=16)
