"""The places of the parts of packed rows in a page: codes, scales, and kept (unencoded) elements. Needs no torch.

inline   page = | row 0: codes, scales, kept | row 1 | .. | row N-1 |                               656, 352, GQA cells
footer   page = | data 0: codes, kept | data 1 | .. | data N-1 | scales 0 | scales 1 | .. | scales N-1 |    584, 132, 68, 384
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.units import align_up


@dataclass(frozen=True)
class Place:
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
    ``cells``        vectors in a row that are encoded separately: 2 if K and V share a row
    ``page_multiple`` kernels demand that the page stride is a multiple of so many bytes

    Rows of several heads, ``[cells, heads, coded + kept]`` elements, are stored head after head in the page, as if each
    head had a page of its own.
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
    cells: int = 1
    page_multiple: int = 1

    @property
    def groups(self) -> int:
        """Number of groups, and so of scales, in a cell."""
        return self.coded // self.group

    @property
    def width(self) -> int:
        """Elements of one row of one head."""
        return self.cells * (self.coded + self.kept)

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

    def places(self, page_size: int) -> dict[str, Place]:
        """Return the places of "codes", "scales" and "kept" in a page of ``page_size`` rows; no parts of 0 bytes."""
        in_row = [part for part in self.order if not (self.footer and part == "scales")]
        cell = sum(map(self._part_nbytes, in_row))
        head = page_size * self.row_nbytes
        places, offset = {}, 0
        for part in in_row:
            places[part] = Place(offset, head, self.cells * cell, cell, self._part_nbytes(part))
            offset += self._part_nbytes(part)
        if self.footer:
            nbytes = self._part_nbytes("scales")
            places["scales"] = Place(page_size * self.cells * cell, head, self.cells * nbytes, nbytes, nbytes)
        return {part: place for part, place in places.items() if place.nbytes}

    def _part_nbytes(self, part: str) -> int:
        """Return the bytes of "codes", "scales" or "kept" in one cell."""
        if part == "codes":
            return self.coded * self.code_bits // 8
        return self.groups * self.scale_nbytes + self.scale_pad if part == "scales" else self.kept * self.kept_nbytes
