"""How the parts of a packed row lie in a page: codes, scales, and elements that are kept. Plain data, no torch.

inline   page = | row 0: codes, scales, kept | row 1 | .. | row N-1 |                               656, 352, GQA cells
footer   page = | data 0: codes, kept | data 1 | .. | data N-1 | scales 0 | scales 1 | .. | scales N-1 |    584, 132, 68, 384
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.units import align_up


@dataclass(frozen=True)
class Place:
    """Where one part of every row lies in a page, in bytes: row t of head h, cell c begins at ``base + h * head + t * row +
    c * cell`` and takes ``nbytes``."""

    base: int
    head: int
    row: int
    cell: int
    nbytes: int


@dataclass(frozen=True)
class Packing:
    """The geometry of one packed format.

    ``coded``        elements of a cell that have codes, in groups of ``group``; ``code_bits`` bits each
    ``kept``         elements after them that have none; ``kept_nbytes`` each: 2 bfloat16, 1 e4m3 without a scale
    ``order``        the parts of a row, in the order in which they lie
    ``footer``       the scales lie behind the data of their page, not in the row
    ``scale_nbytes`` bytes of one scale, ``scale_pad`` bytes of zeros after those of a row
    ``scale_lanes``  scale s lies at place (s mod lanes) * (groups / lanes) + s // lanes
    ``cells``        vectors side by side in a row that are coded each for itself: 2 where K and V share a row
    ``page_multiple`` what kernels want the page stride to be a multiple of, in bytes

    A row of several heads, ``[cells, heads, coded + kept]`` elements, lies head after head in the page, as if each head had a
    page of its own.
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
        """Scales of a cell."""
        return self.coded // self.group

    @property
    def width(self) -> int:
        """Elements of one row of one head."""
        return self.cells * (self.coded + self.kept)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one head, its scales included wherever they lie."""
        return self.cells * sum(self._part_nbytes(part) for part in self.order)

    def payload_nbytes(self, page_size: int, heads: int = 1) -> int:
        """Bytes of a page of ``page_size`` rows without what pads it."""
        return page_size * heads * self.row_nbytes

    def page_stride(self, page_size: int, heads: int = 1) -> int:
        """Bytes from page to page that every reader of the format takes. DSV4: 37,376 -> 37,440 for 64 rows."""
        return align_up(self.payload_nbytes(page_size, heads), self.page_multiple)

    def places(self, page_size: int) -> dict[str, Place]:
        """Where "codes", "scales" and "kept" lie in a page of ``page_size`` rows; a part that takes no bytes is left out."""
        in_row = [part for part in self.order if not (self.footer and part == "scales")]
        cell = sum(map(self._part_nbytes, in_row))
        head = page_size * self.row_nbytes
        found, at = {}, 0
        for part in in_row:
            found[part] = Place(at, head, self.cells * cell, cell, self._part_nbytes(part))
            at += self._part_nbytes(part)
        if self.footer:
            nbytes = self._part_nbytes("scales")
            found["scales"] = Place(page_size * self.cells * cell, head, self.cells * nbytes, nbytes, nbytes)
        return {part: place for part, place in found.items() if place.nbytes}

    def _part_nbytes(self, part: str) -> int:
        if part == "codes":
            return self.coded * self.code_bits // 8
        return self.groups * self.scale_nbytes + self.scale_pad if part == "scales" else self.kept * self.kept_nbytes
