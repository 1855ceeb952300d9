"""The numeric rules, the geometries and the dialects of encoded rows, as plain data; the table is ``encodings.json``.

Every kernel of a packed format can read rows of all its dialects; the dialect decides which bytes a row gets when it is
written. Engines whose dialects differ in a floor write different bytes for rows of small numbers, so the dialect is
part of a layout's identity. The first dialect of a format is its default. For V3.2 that is the dialect with
power-of-two scales, because only these are read correctly on sm90 *and* sm100.

inline   page = | row 0: codes, scales, kept | row 1 | .. | row N-1 |                               656, 352, GQA cells
footer   page = | data 0: codes, kept | data 1 | .. | data N-1 | scales 0 | scales 1 | .. | scales N-1 |    584, 132, 68, 384
planes   page = | codes of K, all heads and rows | scales of K | codes of V | scales of V |             GQA in NVFP4
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpagoda.errors import LayoutError, unknown_name
from kvpagoda.loading import read_json
from kvpagoda.units import align_up, whole_number

TOPS = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}
"""Kind of code -> its largest magnitude, to which the largest element of a group is scaled."""
SUFFIXES = {"e4m3": "_fp8", "e2m1": "_fp4", "int8": "_int8", "int4": "_int4"}
"""Kind of code -> suffix of the name of an array of such codes."""


@dataclass(frozen=True)
class Rule:
    """How a group of elements becomes one scale and one code for each element.

        amax = max |x|, at least ``floor`` if ``floor_on`` is "amax"
        s    = amax / top, at least ``floor`` if ``floor_on`` is "scale"; then rounded to what ``scale`` can hold
        y    = x / s, x * (1 / s) or x * (top / amax), depending on ``by``
        code = y rounded to ``codes``; magnitudes above top become top

    ``codes``         "e4m3", "e2m1", "int8" or "int4" (two's complement)
    ``scale``         how s is stored: "float32", "e8m0" (one exponent byte) or "e4m3"
    ``power_of_two``  s is rounded up to a power of two although it is a float32; for e8m0 it always is
    ``scale_up``      s is rounded up to the next e4m3 number, not to the nearest
    ``by``            "quotient", "reciprocal" (x * (1 / s)) or "inverse" (x * (top / amax))
    ``ties``          "even", "down" (towards zero) or "away" (from zero)
    ``signed_zero``   a negative element that rounds to 0 gets the code of -0
    ``zero_groups``   "formula"; "zero": a group whose s rounds to 0 gets codes of 0; or "apart": a group of zeros gets
                      codes of 0, and if s of another group rounds to 0, all its elements get the top code
    ``non_finite``    result for a group with inf or NaN: "marked" (codes 0, a NaN scale), "computed" (the result of the
                      formulas, which a reader spreads further) or "refused" (``layouts.pack`` raises)
    ``skips_nan``     NaN does not take part in amax (Triton's ``max``)
    ``subnormals``    how a bfloat16 below 2^-126 is read: "exact", or "unshifted": its mantissa normalised without its
                      leading bit and not shifted back, as Triton's interpreter reads it (3.6). No GPU does this. It is
                      visible only where s has no floor, and groups that small have no right bytes there anyway
    """

    codes: str
    scale: str
    floor: float = 0.0
    floor_on: str = "amax"
    power_of_two: bool = False
    scale_up: bool = False
    by: str = "quotient"
    ties: str = "even"
    signed_zero: bool = True
    zero_groups: str = "formula"
    non_finite: str = "marked"
    skips_nan: bool = False
    subnormals: str = "exact"

    @property
    def has_power_of_two_scales(self) -> bool:
        """Whether every scale is a power of two; some readers accept no other scales."""
        return self.power_of_two or self.scale == "e8m0"

    @property
    def top(self) -> float:
        """The largest magnitude of a code."""
        return TOPS[self.codes]

    @property
    def codes_per_byte(self) -> int:
        """2 for codes of 4 bits (low nibble first), 1 for codes of 8 bits."""
        return 2 if self.codes in ("e2m1", "int4") else 1

    @property
    def scale_nbytes(self) -> int:
        """Bytes of one scale."""
        return 4 if self.scale == "float32" else 1

    @property
    def launched(self) -> Rule:
        """This rule as a launch can follow it: no group is refused, and every bfloat16 is read exactly."""
        marks = "marked" if self.non_finite == "refused" else self.non_finite
        return replace(self, non_finite=marks, subnormals="exact")


@dataclass(frozen=True)
class PartPlace:
    """The place of one part of every row in a page, in bytes.

    In row t of head h, cell c begins at ``base + h * head + t * row + c * cell`` and takes ``nbytes``.
    """

    base: int
    head: int
    row: int
    cell: int
    nbytes: int


@dataclass(frozen=True)
class Packing:
    """The geometry of one packed format.

    ``coded``        elements of a cell that have codes, in groups of ``group``; ``code_bits`` bits each
    ``kept``         elements after them without codes; ``kept_nbytes`` each: 2 for bfloat16, 1 for e4m3 without a scale
    ``order``        the parts of a row, in memory order
    ``footer``       whether the scales of all rows follow the data of the page, instead of being in the rows
    ``scale_nbytes`` bytes of one scale, ``scale_pad`` bytes of zeros after the scales of a row
    ``scale_lanes``  scale s is at place (s mod lanes) * (groups / lanes) + s // lanes
    ``planes``       whether each part of each cell is a plane of the page, with all heads and rows, in memory order
    ``cells``        vectors in a row that are encoded separately: 2 if K and V share a row
    ``has_heads``    whether rows have several heads, all encoded separately, and heads of any width
    ``page_multiple`` kernels demand that the page stride is a multiple of so many bytes

    Rows of several heads, ``[cells, heads, coded + kept]`` elements, are stored head after head in the page, or in each
    plane of it, as if each head had a page of its own.
    """

    coded: int
    group: int
    code_bits: int = 8
    scale_nbytes: int = 1
    scale_pad: int = 0
    scale_lanes: int = 1
    kept: int = 0
    kept_nbytes: int = 2
    order: tuple[str, ...] = ("codes", "scales", "kept")
    footer: bool = False
    planes: bool = False
    cells: int = 1
    has_heads: bool = False
    page_multiple: int = 1

    @property
    def groups(self) -> int:
        """Number of groups, and so of scales, in a cell."""
        return self.coded // self.group

    @property
    def vector(self) -> int:
        """Elements of one cell of one head."""
        return self.coded + self.kept

    @property
    def width(self) -> int:
        """Elements of one row of one head."""
        return self.cells * self.vector

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one head, its scales included, also if they are in the footer."""
        return self.cells * sum(self._part_nbytes(part) for part in self.order)

    def payload_nbytes(self, page_size: int, heads: int = 1) -> int:
        """Return the bytes of a page of ``page_size`` rows, without the padding after it."""
        return page_size * heads * self.row_nbytes

    def page_stride(self, page_size: int, heads: int = 1) -> int:
        """Return bytes from page to page that all readers of the format accept. DSV4: 37,376 -> 37,440 for 64 rows."""
        return align_up(self.payload_nbytes(page_size, heads), self.page_multiple)

    def places(self, page_size: int, heads: int = 1) -> dict[str, PartPlace]:
        """Return the places of "codes", "scales" and "kept" in a page of ``page_size`` rows; no parts of 0 bytes."""
        in_row = [part for part in self.order if not (self.footer and part == "scales")]
        cell = sum(map(self._part_nbytes, in_row))
        head = page_size * self.row_nbytes
        places, offset = {}, 0
        for part in in_row:
            nbytes, rows = self._part_nbytes(part), page_size * heads
            if self.planes:
                places[part] = PartPlace(rows * offset, page_size * nbytes, nbytes, rows * cell, nbytes)
            else:
                places[part] = PartPlace(offset, head, self.cells * cell, cell, nbytes)
            offset += nbytes
        if self.footer:
            nbytes = self._part_nbytes("scales")
            places["scales"] = PartPlace(page_size * self.cells * cell, head, self.cells * nbytes, nbytes, nbytes)
        return {part: place for part, place in places.items() if place.nbytes}

    def _part_nbytes(self, part: str) -> int:
        """Return the bytes of "codes", "scales" or "kept" in one cell."""
        if part == "codes":
            return self.coded * self.code_bits // 8
        return self.groups * self.scale_nbytes + self.scale_pad if part == "scales" else self.kept * self.kept_nbytes


@dataclass(frozen=True)
class Dialect:
    """One way to write the rows of a format: the places of the bytes, the rule of the numbers, and its source."""

    packing: Packing
    rule: Rule
    source: str


TABLE = read_json("kvpagoda.formats", "encodings.json")


def _read() -> dict[str, dict[str, Dialect]]:
    """Return the packed formats of ``TABLE``: format -> dialect -> ``Dialect``, the default of a format first."""
    packings = {
        name: Packing(**{**fields, "order": tuple(fields.get("order", Packing.order))})
        for name, fields in TABLE["packings"].items()
    }
    return {
        format: {
            name: Dialect(packings[row["packing"]], Rule(**row["rule"]), row["source"]) for name, row in rows.items()
        }
        for format, rows in TABLE["dialects"].items()
    }


DIALECTS = _read()


def dialect_of(format: str, dialect: str | None = None) -> Dialect:
    """Return the ``dialect`` (None: the default) of ``format``. Raises BadInput, which lists the known names."""
    if format not in DIALECTS:
        raise unknown_name("packed format", format, DIALECTS)
    known = DIALECTS[format]
    if dialect is not None and dialect not in known:
        raise unknown_name(f"dialect of {format}", dialect, known)
    return known[dialect or next(iter(known))]


def dialect_for_heads(format: str, dialect: str | None = None, head_dim: int | None = None) -> Dialect:
    """Return ``dialect_of(format, dialect)`` for heads of ``head_dim`` elements, if the format has heads (None: 64).

    Raises BadInput for an unknown name, and LayoutError for a format without heads, or a ``head_dim`` that does not
    divide into groups.
    """
    chosen = dialect_of(format, dialect)
    if head_dim is None:
        return chosen
    packing = chosen.packing
    group = packing.group if packing.groups > 1 else head_dim
    if not packing.has_heads or whole_number(head_dim, "head_dim", at_least=1) % group:
        text = f"{format} has no heads of {head_dim} elements; leave head_dim out, or give a multiple of {group}"
        raise LayoutError.of("size", text, needed=head_dim, available=group)
    return replace(chosen, packing=replace(packing, coded=head_dim, group=group))
