"""Where every field lies in a record: pages, offsets, strides and sizes. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from kvpagoda.layouts.packed_row import PackedRow
from kvpagoda.layouts.pages import PageRows, arrange, order_of
from kvpagoda.schema.fields import Field, Rows, itemsize
from kvpagoda.units import align_up

ALIGN = 16
"""Bytes to which every page starts and every record ends: one vector load of a kernel."""


@dataclass(frozen=True)
class Place:
    """One field of one layer: it begins ``offset`` bytes behind the beginning of its page (in a ``RowLayout``, of the record),
    and ``strides`` are the bytes from row to row and along each axis of its shape."""

    layer: int
    field: Field
    offset: int
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.field.nbytes


@dataclass(frozen=True)
class KernelTensor:
    """A page as a kernel takes it: names and sizes of its axes, strides in elements, and the byte of its page where it begins.
    The axis of pages, or of state slots, comes before these."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int


_AXES = {"": "one", "H": "head", "K": "key", "V": "value", "R": "dstate", "C": "channel", "W": "column"}
"""What kernels call the axes of rows; any other is ``dim``."""


@dataclass(frozen=True)
class Page:
    """What one layer keeps side by side of one kernel page of a block, or of one state: ``nbytes`` bytes from ``offset`` of
    the record. ``rows``: names of the rows in it. ``multiple``: what kernels want the bytes from page to page to be one of.

    Where heads lie outside of blocks or layers, they cut it into ``heads`` equal pieces, ``step`` bytes apart, and arenas must
    have ``order``."""

    rows: tuple[str, ...]
    nbytes: int
    places: tuple[Place, ...]
    multiple: int = 1
    offset: int = 0
    axes: tuple[str, ...] = ()
    packed: tuple[int, ...] = ()
    heads: int = 1
    step: int = 0
    order: str = ""

    @property
    def piece(self) -> int:
        """Bytes that lie together: all of it, or those of one head."""
        return self.nbytes // self.heads

    @property
    def ranges(self) -> list[slice]:
        """The bytes of a record that it takes: a range for each of its pieces."""
        starts = (self.offset + head * self.step for head in range(self.heads))
        return [slice(start, start + self.piece) for start in starts]

    def apart(self, pieces: int) -> Page:
        """The same with its heads so many ``pieces`` from each other."""
        if not self.order:
            return self
        step = pieces * self.piece
        places = (replace(one, strides=(one.strides[0], step, *one.strides[2:])) for one in self.places)
        return replace(self, places=tuple(places), step=step)

    @property
    def layer(self) -> int:
        return self.places[0].layer

    @cached_property
    def whole(self) -> KernelTensor | None:
        """All of it as the one tensor that kernels take; None where its parts have no such form, and are tensors of their own.

        Packed rows are uint8 ``[rows, 1, bytes of a row]`` or ``[heads, rows, bytes]``, wherever scales really lie.
        """
        if self.packed:
            _, middle, row = self.packed
            names = ("token", "one", "dim") if middle == 1 else ("head", "token", "dim")
            return KernelTensor(names, self.packed, (middle * row, row, 1), "uint8", 0)
        tensors = [self.tensor(place) for place in self.places]
        first, end, width = tensors[0], tensors[0].offset, sum(one.shape[-1] for one in tensors)
        if len(tensors) == 1:
            return first
        strides = tuple(width if n == 1 else step for n, step in zip(first.shape[:-1], first.strides))
        for one in tensors:
            same = tuple(width if n == 1 else step for n, step in zip(one.shape[:-1], one.strides)) == strides
            if (one.dtype, one.offset, one.strides[-1]) != (first.dtype, end, 1) or not same:
                return None
            end += one.shape[-1] * itemsize(one.dtype)
        return replace(first, shape=(*first.shape[:-1], width), strides=(*strides, 1))

    def tensor(self, place: Place) -> KernelTensor:
        """One field of it as a tensor of its own."""
        size = itemsize(place.field.dtype)
        strides = tuple(stride // size for stride in place.strides)
        return KernelTensor(
            ("token", *self.axes), (place.field.count, *place.field.shape), strides, place.field.dtype, place.offset
        )


def dense(layer: int, field: Field) -> Page:
    """A page that holds one field alone, without gaps."""
    strides = [itemsize(field.dtype)]
    for size in reversed(field.shape):
        strides.append(strides[-1] * size)
    return Page((field.name,), field.nbytes, (Place(layer, field, 0, tuple(reversed(strides))),))


def pages_of(layer: int, rows: Iterable[Rows], count: Callable[[Rows], int]) -> Iterator[Page]:
    """The pages of ``layer``, with ``count(one)`` of each of its rows: rows that name the same page lie together, and every
    field of rows that name none has a page of its own. Raises LayoutError."""
    for page, together in groupby(rows, key=lambda one: one.page or one.name):
        members = [*together]
        first, number = members[0], count(members[0])
        fields = [field for one in members for field in one.fields(number)]
        axes = tuple(_AXES.get(axis, "dim") for axis in first.axes or ("dim",) * len(first.shape))
        packed: tuple[int, ...] = ()
        if isinstance(first.encoding, PackedRow):
            nbytes, found = first.encoding.arrange(number, first.shape)
            multiple, packed = first.encoding.page_multiple, first.encoding.page_shape(number, first.shape)
        elif first.page:
            multiple = 1
            rows_of = [PageRows(one.name, one.axes, one.shape, one.dtype) for one in members]
            nbytes, found = arrange(page, number, rows_of)
        else:
            yield from (replace(dense(layer, field), rows=(first.name,), axes=axes) for field in fields)
            continue
        places, order = tuple(Place(layer, field, *place) for field, place in zip(fields, found)), order_of(first.page)
        heads, names = first.shape[0] if order else 1, tuple(one.name for one in members)
        yield Page(names, nbytes, places, multiple, axes=axes, packed=packed, heads=heads, order=order).apart(1)


@dataclass(frozen=True)
class RowLayout:
    """The record of one block, or of one request's state: all layers, all fields, once for each of its ``kernel_pages``.

        record  | kernel page 0: layer 0: page, page, .. | layer 1: .. | .. | pad | kernel page 1: .. |
                0                                                         nbytes / kernel_pages    nbytes

    Every page starts at a multiple of ``ALIGN``; ``pages`` are those of the first kernel page. The bytes from kernel page to
    kernel page are a multiple of ``multiple``.

    >>> layout = RowLayout.build([(0, Field("scales", 3, (4,), "uint8")), (0, Field("k", 3, (8,), "bfloat16"))])
    >>> [(place.field.name, place.offset) for place in layout.places], layout.nbytes, layout.payload_nbytes
    ([('scales', 0), ('k', 16)], 64, 60)
    """

    pages: tuple[Page, ...]
    nbytes: int
    kernel_pages: int = 1
    multiple: int = ALIGN

    @classmethod
    def build(cls, fields: Iterable[tuple[int, Field]]) -> RowLayout:
        """Lay the (layer, field) pairs one behind another, in the order given."""
        return cls.of(dense(layer, field) for layer, field in fields)

    @classmethod
    def of(cls, pages: Iterable[Page], kernel_pages: int = 1, order: str = "block", multiple: int = ALIGN) -> RowLayout:
        """Lay ``pages`` one behind another. What kernels want page strides to be multiples of, records are, and, where the
        arena's ``order`` is ``"layer"``, each page; and records are a ``multiple`` of bytes. Neighbours whose heads lie
        outside of layers are laid head by head."""
        placed: list[Page] = []
        offset = 0
        for _, alike in groupby(pages, key=lambda page: page.nbytes if page.order == "block" else page.places):
            mates = [*alike]
            for number, page in enumerate(mates):
                nbytes = align_up(page.nbytes, page.multiple) if order == "layer" else page.nbytes
                at = offset + number * page.piece
                placed.append(replace(page.apart(len(mates)), offset=at, nbytes=nbytes))
                multiple = multiple if order == "layer" else math.lcm(multiple, page.multiple)
            offset = align_up(offset + len(mates) * nbytes, ALIGN)
        return cls(tuple(placed), align_up(offset, multiple) * kernel_pages, kernel_pages, multiple)

    def spread(self, nbytes: int) -> RowLayout:
        """The same for records of ``nbytes`` bytes: several kernel pages are equally far apart in them."""
        return self if self.kernel_pages == 1 else replace(self, nbytes=nbytes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every field of the first kernel page, with its offset in the record."""
        return tuple(replace(one, offset=page.offset + one.offset) for page in self.pages for one in page.places)

    @property
    def payload_nbytes(self) -> int:
        """Bytes that carry data."""
        return sum(place.nbytes for place in self.places) * self.kernel_pages
