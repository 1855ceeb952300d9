"""The place of every field in a record: pages, offsets, strides and sizes in bytes. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from kvpagoda.layouts.pages import PageRows, arrange, order_of
from kvpagoda.schema.fields import Field, Rows, itemsize
from kvpagoda.units import align_up

ALIGN = 16
"""Every page starts at, and every record ends at, a multiple of so many bytes: one vector load of a kernel."""


@dataclass(frozen=True)
class Place:
    """The place of one field of one layer.

    Args:
        layer: index of the layer.
        field: which one.
        offset: bytes from the start of its page (in ``RowLayout.places``: of the record).
        strides: bytes from row to row, then along each axis of the field's shape.
    """

    layer: int
    field: Field
    offset: int
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the field, without padding."""
        return self.field.nbytes


@dataclass(frozen=True)
class KernelTensor:
    """A tensor of one page in the form that kernels take, without the leading axis of pages or state slots.

    ``axes`` and ``shape``: names and sizes of its axes. ``strides``: in elements. ``offset``: its first byte in the
    page.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int


_AXES = {"": "one", "H": "head", "K": "key", "V": "value", "R": "dstate", "C": "channel", "W": "column"}
"""Letter of an axis -> the name that kernels have for it; all other axes are ``dim``."""


@dataclass(frozen=True)
class Page:
    """Rows of one layer that share a byte range of a record, of one kernel page of a block or of one state.

    Args:
        rows: names of the rows in it.
        nbytes: length of its range in the record.
        places: their fields.
        multiple: kernels demand that the bytes from page to page are a multiple of it.
        offset: start of its range in the record, in bytes.
        axes: kernels' names for the axes of a row.
        packed: the shape of packed rows in bytes; () for other rows.
        heads: equal pieces into which the page is cut, if a layout has heads outside of blocks or layers; else 1.
        step: bytes from piece to piece.
        order: that the arena must have then; else "".
    """

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
        """Bytes of one contiguous piece: the whole page, or its part for one head."""
        return self.nbytes // self.heads

    @property
    def ranges(self) -> list[slice]:
        """The byte ranges of the page in the record: one for each of its pieces."""
        starts = (self.offset + head * self.step for head in range(self.heads))
        return [slice(start, start + self.piece) for start in starts]

    def apart(self, pieces: int) -> Page:
        """Return the page with its pieces further apart; a page without ``order`` is returned as it is.

        Args:
            pieces: from head to head.
        """
        if not self.order:
            return self
        step = pieces * self.piece
        places = (replace(place, strides=(place.strides[0], step, *place.strides[2:])) for place in self.places)
        return replace(self, places=tuple(places), step=step)

    @property
    def layer(self) -> int:
        """Index of the layer whose rows it holds."""
        return self.places[0].layer

    @cached_property
    def whole(self) -> KernelTensor | None:
        """The whole page as one tensor; None if its fields cannot be viewed as one tensor.

        Packed rows are uint8 ``[rows, 1, bytes of a row]`` or ``[heads, rows, bytes]``, also if the scales of all rows
        lie at the end of the page.
        """
        if self.packed:
            _, middle, row = self.packed
            names = ("token", "one", "dim") if middle == 1 else ("head", "token", "dim")
            return KernelTensor(names, self.packed, (middle * row, row, 1), "uint8", 0)
        tensors = [self.tensor(place) for place in self.places]
        first, end, width = tensors[0], tensors[0].offset, sum(tensor.shape[-1] for tensor in tensors)
        if len(tensors) == 1:
            return first
        strides = tuple(width if n == 1 else step for n, step in zip(first.shape[:-1], first.strides))
        for tensor in tensors:
            same = tuple(width if n == 1 else step for n, step in zip(tensor.shape[:-1], tensor.strides)) == strides
            if (tensor.dtype, tensor.offset, tensor.strides[-1]) != (first.dtype, end, 1) or not same:
                return None
            end += tensor.shape[-1] * itemsize(tensor.dtype)
        return replace(first, shape=(*first.shape[:-1], width), strides=(*strides, 1))

    def tensor(self, place: Place) -> KernelTensor:
        """Return a field as a tensor of its own.

        Args:
            place: one of this page's places.
        """
        size = itemsize(place.field.dtype)
        strides = tuple(stride // size for stride in place.strides)
        return KernelTensor(
            ("token", *self.axes), (place.field.count, *place.field.shape), strides, place.field.dtype, place.offset
        )


def dense(layer: int, field: Field) -> Page:
    """Return a page that holds ``field`` alone, without gaps."""
    strides = [itemsize(field.dtype)]
    for size in reversed(field.shape):
        strides.append(strides[-1] * size)
    return Page((field.name,), field.nbytes, (Place(layer, field, 0, tuple(reversed(strides))),))


def pages_of(layer: int, rows: Iterable[Rows], count: Callable[[Rows], int]) -> Iterator[Page]:
    """Yield the pages of ``layer``, each with ``count(rows)`` rows of each of its ``Rows``.

    Neighbouring ``Rows`` with the same ``page`` expression share a page. Of ``Rows`` without one, every field has a
    page of its own. Raises LayoutError.
    """
    for page, together in groupby(rows, key=lambda member: member.page or member.name):
        members = [*together]
        first, number = members[0], count(members[0])
        fields = [field for member in members for field in member.fields(number)]
        axes = tuple(_AXES.get(axis, "dim") for axis in first.axes or ("dim",) * len(first.shape))
        packed: tuple[int, ...] = ()
        if first.encoding.is_packed:
            nbytes, placed = first.encoding.arrange(number, first.shape)
            multiple, packed = first.encoding.page_multiple, first.encoding.page_shape(number, first.shape)
        elif first.page:
            multiple = 1
            rows_of = [PageRows(rows.name, rows.axes, rows.shape, field.dtype) for rows, field in zip(members, fields)]
            nbytes, placed = arrange(page, number, rows_of)
        else:
            yield from (replace(dense(layer, field), rows=(first.name,), axes=axes) for field in fields)
            continue
        places, order = tuple(Place(layer, field, *place) for field, place in zip(fields, placed)), order_of(first.page)
        heads, names = first.shape[0] if order else 1, tuple(member.name for member in members)
        yield Page(names, nbytes, places, multiple, axes=axes, packed=packed, heads=heads, order=order).apart(1)


@dataclass(frozen=True)
class RowLayout:
    """The record of one block, or of one request's state: all fields of all layers, repeated for each kernel page.

        record  | kernel page 0: layer 0: page, page, .. | layer 1: .. | .. | pad | kernel page 1: .. |
                0                                                         nbytes / kernel_pages    nbytes

    Args:
        pages: those of the first of the ``kernel_pages``; each starts at a multiple of ``ALIGN``.
        nbytes: of the whole record.
        kernel_pages: equal parts of the record.
        multiple: the bytes from kernel page to kernel page are a multiple of it.

    Examples:
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
        """Return the record of some fields, placed one after another in the order given.

        Args:
            fields: pairs of layer and field.
        """
        return cls.of(dense(layer, field) for layer, field in fields)

    @classmethod
    def of(cls, pages: Iterable[Page], kernel_pages: int = 1, order: str = "block", multiple: int = ALIGN) -> RowLayout:
        """Return the record of some pages, placed one after another and repeated.

        Neighbouring pages whose heads lie outside of layers are interleaved head by head.

        Args:
            pages: of one kernel page.
            kernel_pages: how often they are repeated.
            order: of the arena. Where kernels demand a multiple (``Page.multiple``), records are padded to it in arenas
                of "block", pages in arenas of "layer".
            multiple: the size for one kernel page is a multiple of it.
        """
        placed: list[Page] = []
        offset = 0
        for _, alike in groupby(pages, key=lambda page: page.nbytes if page.order == "block" else page.places):
            mates = [*alike]
            for number, page in enumerate(mates):
                nbytes = align_up(page.nbytes, page.multiple) if order == "layer" else page.nbytes
                start = offset + number * page.piece
                placed.append(replace(page.apart(len(mates)), offset=start, nbytes=nbytes))
                multiple = multiple if order == "layer" else math.lcm(multiple, page.multiple)
            offset = align_up(offset + len(mates) * nbytes, ALIGN)
        return cls(tuple(placed), align_up(offset, multiple) * kernel_pages, kernel_pages, multiple)

    def spread(self, nbytes: int) -> RowLayout:
        """Return this layout for larger records, in which several kernel pages are equally far apart.

        Args:
            nbytes: of a record.
        """
        return self if self.kernel_pages == 1 else replace(self, nbytes=nbytes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every field of the first kernel page, with its offset in the record."""
        return tuple(replace(x, offset=page.offset + x.offset) for page in self.pages for x in page.places)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the record that hold data, without padding."""
        return sum(place.nbytes for place in self.places) * self.kernel_pages
