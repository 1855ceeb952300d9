"""The arena: ``num_rows`` records of one layout in one allocation, in one of two orders.

    block-major   | record 0: all fields | record 1: all fields | ..      a block is one byte range
    layer-major   | field 0 of all rows | field 1 of all rows | ..        a field is one dense tensor

Both orders use the same arithmetic: a field has a start, and its rows are a stride apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.core.kernels.copy_rows import copy_rows, copy_tables
from kvpagoda.core.kernels.fill_rows import fill_rows
from kvpagoda.core.memory.staging import Staging
from kvpagoda.errors import BadInput, Exhausted, NotOwned
from kvpagoda.id_tensors import Device, default_device, integers
from kvpagoda.pages import pages
from kvpagoda.schema import Page, Place, RowLayout
from kvpagoda.schema.fields import itemsize
from kvpagoda.schema.layout import ALIGN
from kvpagoda.units import format_bytes

Tensor = torch.Tensor
LONG_ROW = 16 << 10
"""Bytes from which copying rows one by one is faster than torch's indexing (measured on an AVX-512 CPU)."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Region = tuple[slice, Tensor]
"""A byte range of a record, and these bytes of every row."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as a ``Field`` spells it: ``torch.float16`` -> ``"float16"``.

    Args:
        dtype: of torch.
    """
    return str(dtype).removeprefix("torch.")


def zeros(nbytes: int, device: torch.device) -> Tensor:
    """Allocate zeroed uint8 ``[nbytes]``; on a CPU in large pages, if the system has them. Raises Exhausted."""
    try:
        if device.type == "cpu" and nbytes:
            return torch.from_numpy(pages(nbytes, large=True))
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError) as error:
        text = f"{device} cannot allocate {format_bytes(nbytes)} ({' '.join(str(error).split())[:120]})"
        raise Exhausted.with_hint(text, "lower the budget", needed=nbytes) from None


class Arena:
    """Memory for records of a layout, allocated once, by the constructor.

    In either order the arena takes exactly ``num_rows * layout.nbytes`` bytes. New memory is zero; ``reset`` writes the
    initial values.

    Args:
        layout: of a record.
        num_rows: records.
        device: None: CUDA if there is a GPU, else the CPU.
        order: ``"block"`` (None, on every device) or ``"layer"``.
        packed: if layer-major, without padding: it takes ``num_rows * layout.payload_nbytes``.
        pin_memory: page-lock memory on the host.
        within: uint8 memory that other arenas use too, and the distance of two records in bytes. The arena then
            allocates nothing and is block-major.
        allocate: returns zeroed uint8 ``[nbytes]`` on ``device``; None: new memory of its own.
    """

    def __init__(
        self,
        layout: RowLayout,
        num_rows: int,
        *,
        device: Device = None,
        order: str | None = None,
        packed: bool = False,
        pin_memory: bool = False,
        within: tuple[Tensor, int] | None = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.layout, self.num_rows = layout, num_rows
        self.device = default_device(device) if within is None else within[0].device
        self.staging = Staging(self.device)
        """The way of ids to the device. Arenas of one cache share one."""
        self.order = order or "block"
        if self.order not in ("block", "layer") or num_rows < 0:
            raise BadInput(f"order is 'block' or 'layer' and num_rows >= 0, got {order!r} and {num_rows}")
        self.row_nbytes = layout.nbytes if within is None else within[1]
        if within is None:
            pin = pin_memory and self.device.type == "cpu" and torch.cuda.is_available()
            nbytes = num_rows * (layout.payload_nbytes if packed else layout.nbytes)
            if pin:
                self.buffer = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self.buffer = zeros(nbytes, self.device) if allocate is None else allocate(nbytes)
        else:
            self.buffer = within[0][: num_rows * self.row_nbytes]
        self.num_pages = num_rows * layout.kernel_pages
        """Kernel pages: ``layout.kernel_pages`` for each record."""
        # layer, byte range of a kernel page's record, these bytes of all pages
        self._pieces: list[tuple[int, slice, Tensor]] = []
        self._page_of: dict[tuple[int, str], tuple[Page, Tensor]] = {}
        self._views: dict[int, dict[str, Tensor]] = {}
        end = 0
        for page in layout.pages:
            start, stride, ranges = self.num_pages * (end if packed else page.offset), page.piece, page.ranges
            if self.order == "block":
                start, stride = page.offset, self.row_nbytes // layout.kernel_pages
            else:
                page = page.apart(self.num_pages)
            size = self.num_pages, page.piece
            pieces = [self.buffer[start + n * page.step :].as_strided(size, (stride, 1)) for n in range(page.heads)]
            self._pieces += [(page.layer, *piece) for piece in zip(ranges, pieces)]
            for name in page.rows:
                self._page_of.setdefault((page.layer, name), (page, pieces[0]))
            for place in page.places:
                self._views.setdefault(place.layer, {})[place.field.name] = self._view(place, start, stride)
            end += page.nbytes

    def _view(self, place: Place, start: int, stride: int) -> Tensor:
        """Return a view ``[num_pages, count, *shape]`` of the field of ``place``.

        Its pages begin at byte ``start`` and are ``stride`` bytes apart.
        """
        field, size = place.field, itemsize(place.field.dtype)
        if any(step % size for step in (start + place.offset, stride, *place.strides)):
            text = f"packed memory would misalign {field.name!r} ({field.dtype}): byte {start + place.offset}"
            raise BadInput(text, needed=size, available=start + place.offset)
        memory = self.buffer[start + place.offset :]
        typed = memory[: len(memory) // size * size].view(getattr(torch, field.dtype))
        strides = [step // size for step in (stride, *place.strides)]
        return typed.as_strided((self.num_pages, field.count, *field.shape), strides)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.buffer.numel()

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Return the fields of a layer: name -> view ``[num_pages, count, *shape]``. Empty if it has no fields here.

        A record has ``layout.kernel_pages`` pages (often 1), one after the other. Views alias the arena and live as
        long as it does.

        Args:
            layer: its index.
        """
        return self._views.get(layer, {})

    def page(self, layer: int, name: str) -> tuple[Page, Tensor]:
        """Return the page in which rows lie, alone or with others, and its memory, uint8 ``[num_pages, nbytes]``.

        If the rows lie in several pages (codes, and scales apart), this is the first.

        Args:
            layer: its index.
            name: of the rows.

        Raises:
            KeyError: there is none.
        """
        return self._page_of[layer, name]

    def all_layers(self, name: str) -> Tensor:
        """Return a field of all layers that have it, as one view ``[layers, num_rows, count, *shape]`` of the arena.

        The field must be the same in these layers, and their distance in the layout constant.

        Args:
            name: of the field.
        """
        views = [fields[name] for fields in self._views.values() if name in fields]
        starts = [view.storage_offset() for view in views]
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        assert starts == [starts[0] + i * step for i in range(len(starts))], (
            f"layers of {name!r} are not equally far apart"
        )
        return views[0].as_strided((len(views), *views[0].shape), (step, *views[0].stride()))

    def regions(self, layer: int | None = None) -> list[Region]:
        """Return the few byte regions that hold the data of a layer, or of all.

        Args:
            layer: its index; None: all.

        Returns:
            Byte ranges of a record, each with a strided view uint8 ``[num_rows, bytes]`` of the memory.
        """
        pieces = [(span, rows) for owner, span, rows in self._pieces if layer in (None, owner)]
        if not pieces:
            return []
        per_record, width = self.layout.kernel_pages, self.layout.nbytes // self.layout.kernel_pages
        starts = range(0, self.layout.nbytes, width)
        if self.order == "layer":
            return [
                (slice(start + span.start, start + span.stop), rows[number::per_record])
                for number, start in enumerate(starts)
                for span, rows in pieces
            ]
        runs: list[list[int]] = []
        for begin, end in sorted((span.start, span.stop) for span, _ in pieces):
            if not runs or begin - runs[-1][1] >= ALIGN:
                runs.append([begin, end])
            runs[-1][1] = end
        spans = [slice(start + begin, start + end) for start in starts for begin, end in runs]
        spans = spans if layer is not None else [slice(spans[0].start, spans[-1].stop)]
        records = self.buffer.as_strided((self.num_rows, self.layout.nbytes), (self.row_nbytes, 1))
        return [(span, records[:, span]) for span in spans]

    def reset(self, ids: Tensor | npt.NDArray[np.integer[Any]] | Sequence[int] | int) -> None:
        """Set all fields of some rows to their initial values.

        Args:
            ids: of the rows.

        Raises:
            NotOwned: an id is out of range.
        """
        index = self.row_index([ids] if isinstance(ids, int) else ids)
        for (_, rows), initial in zip(self.regions(), self._initial):
            fill_rows(rows, index, initial)

    @cached_property
    def _initial(self) -> list[Tensor | int]:
        """The initial bytes of each of ``regions()``: one byte where all are equal."""
        one = Arena(self.layout, 1, device="cpu")
        for place in self.layout.places:
            one._views[place.layer][place.field.name].fill_(place.field.fill)
        parts = [one.buffer[span] for span, _ in self.regions()]
        return [
            int(part[0]) if (part == part[0]).all() else self.staging.to_device(part.numpy()) for part in parts
        ]  # fmt: skip

    def copy(self, sources: Tensor | npt.NDArray[np.int32], targets: Tensor | npt.NDArray[np.int32]) -> None:
        """Copy rows, all fields, bit for bit. Of each field, all sources are read before a target is written.

        Args:
            sources: ids, which the caller has validated.
            targets: as many ids.
        """
        if isinstance(sources, np.ndarray) and isinstance(targets, np.ndarray):
            source, target = self.staging.to_device(np.stack((sources, targets)), np.int64)
        else:
            source, target = (torch.as_tensor(ids).to(self.device, torch.int64) for ids in (sources, targets))
        is_long = self.device.type == "cpu" and self.layout.nbytes >= LONG_ROW
        are_apart = is_long and not torch.isin(source, target).any()
        if self.device.type == "cuda" and isinstance(sources, np.ndarray) and not np.isin(sources, targets).any():
            copy_tables(
                [(rows, rows) for _, rows in self.regions()],
                torch.stack((source, target), 1),
                0,
                self.staging.to_device,
            )
            return
        for _, rows in self.regions():
            if are_apart and rows.shape[1] >= LONG_ROW:
                copy_rows(rows, rows, torch.stack((source, target), 1))
            else:
                rows[target] = rows[source]

    def warm_up(self) -> None:
        """Compile what ``copy`` launches on a GPU, by a call that moves nothing."""
        if self.device.type == "cuda":
            nowhere = torch.full((1, 2), -1, dtype=torch.int64, device=self.device)
            copy_tables([(rows, rows) for _, rows in self.regions()], nowhere, 0, self.staging.to_device)

    def poison(self, ids: npt.NDArray[np.int32]) -> None:
        """Set every byte of some rows to 0xFF: NaN in all float formats, -1 in integers.

        Args:
            ids: int32 ``[n]``.
        """
        index = self.staging.to_device(ids, np.int64)
        for _, rows in self.regions():
            fill_rows(rows, index, 0xFF)

    def is_poisoned(
        self, ids: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32] | None, width: int, *, again: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Return which rows have a field with no other byte than 0xFF, as ``poison`` leaves them: bool ``[n]``. No sound row
        has one: of floats all would be NaN, with the sign and all bits set. Fields that ``may_fill`` are not looked at.

        They are compared where they are, O(bytes of the rows), and a byte for each comes to the host.

        Args:
            ids: int32 ``[n]``, of records, at least one.
            tokens: int32 ``[n]``, which of the tokens of each record; None: all of it. Of fields with a row for several
                tokens, their last one has the row.
            width: tokens of a record.
            again: poison these rows first.
        """
        records, at = self.staging.to_device(np.stack((ids, ids if tokens is None else tokens)), np.int64)
        size, found = width // self.layout.kernel_pages, torch.zeros(len(ids), dtype=torch.bool, device=self.device)
        pages, within = records * self.layout.kernel_pages + at // size, at % size
        for place in self.layout.places:
            field = self._views[place.layer][place.field.name]
            bits = field.view(_INTEGERS[field.element_size()])  # all bytes are 0xFF: -1
            each = 1 if tokens is None else size // field.shape[1]
            has_row, index = (at + 1) % each == 0, (records,) if tokens is None else (pages, within // each)
            if again:
                bits[tuple(one[has_row] for one in index)] = -1
            found |= has_row & (bits[index] == -1).reshape(len(ids), -1).all(1) & (not place.field.may_fill)
        return found.cpu().numpy()

    def row_index(
        self, ids: Tensor | npt.NDArray[np.integer[Any]] | Sequence[int], *, is_proven: bool = False
    ) -> Tensor:
        """Return ids as int64 ``[n]`` on the arena's device, for indexing.

        Args:
            ids: ``[n]``.
            is_proven: skip the range check, which waits for ids on a GPU.

        Raises:
            NotOwned: an id is out of range.
            BadInput: ``ids`` is anything but a vector of whole numbers.
        """
        index = integers(ids, "row ids").to(torch.int64)
        if index.ndim != 1:
            raise BadInput(f"row ids must be a vector, got shape {list(index.shape)}")
        if len(index) and not is_proven and not 0 <= int(index.min()) <= int(index.max()) < self.num_rows:
            raise NotOwned(f"row ids {int(index.min())}..{int(index.max())} are not all in 0..{self.num_rows - 1}")
        return self.staging.to_device(index.numpy()) if index.device.type == "cpu" else index.to(self.device)

    def page_index(self, index: Tensor) -> Tensor:
        """Convert rows to their kernel pages, int64 ``[n * kernel_pages]``.

        Args:
            index: int64 ``[n]``.
        """
        count = self.layout.kernel_pages
        return index if count == 1 else (index[:, None] * count + torch.arange(count, device=index.device)).flatten()
