"""The arena: ``num_rows`` records of one layout in one allocation, in either order.

    block-major   | record 0: all fields | record 1: all fields | ..      a block is one byte range
    layer-major   | field 0 of all rows | field 1 of all rows | ..        a field is one dense tensor

Both orders are the same arithmetic: a field starts somewhere and its rows are a stride apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.kernels.copy_rows import copy_rows
from kvpagoda.memory.id_tensors import Device, default_device, integers
from kvpagoda.memory.pages import pages
from kvpagoda.schema import Page, Place, RowLayout
from kvpagoda.schema.fields import itemsize
from kvpagoda.schema.layout import ALIGN

__all__ = ["Arena", "Device", "default_device", "dtype_name"]

Tensor = torch.Tensor
LONG_ROW = 16 << 10
"""Bytes from which rows are copied sooner one by one than by torch's index (measured on an AVX-512 CPU)."""
Region = tuple[slice, Tensor]
"""Bytes of a record, and the same bytes of every row."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` -> ``"float16"``, as a ``Field`` spells it."""
    return str(dtype).removeprefix("torch.")


def zeros(nbytes: int, device: torch.device) -> Tensor:
    """New uint8 ``[nbytes]``, on a CPU in large pages, where the system has them."""
    if device.type == "cpu" and nbytes:
        return torch.from_numpy(pages(nbytes, large=True))
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class Arena:
    """Memory for ``num_rows`` records of ``layout``. One allocation, made here and never again.

    ``order``: ``"block"`` (the default, on every device) or ``"layer"``. In either order it takes
    exactly ``num_rows * layout.nbytes`` bytes; a layer-major arena that is ``packed`` has no padding, so that it takes
    ``num_rows * layout.payload_nbytes``. New memory is zero; ``reset`` writes the initial values. ``within``: uint8 memory
    that others use too, and the bytes from one record to the next: block-major then.
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
    ) -> None:
        self.layout, self.num_rows = layout, num_rows
        self.device = default_device(device) if within is None else within[0].device
        self.order = order or "block"
        if self.order not in ("block", "layer") or num_rows < 0:
            raise BadInput(f"order is 'block' or 'layer' and num_rows >= 0, got {order!r} and {num_rows}")
        self.row_nbytes = layout.nbytes if within is None else within[1]
        if within is None:
            pin = pin_memory and self.device.type == "cpu" and torch.cuda.is_available()
            nbytes = num_rows * (layout.payload_nbytes if packed else layout.nbytes)
            self.buffer = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) if pin else zeros(nbytes, self.device)
        else:
            self.buffer = within[0][: num_rows * self.row_nbytes]
        self.num_pages = num_rows * layout.kernel_pages
        """Kernel pages: ``layout.kernel_pages`` for each record."""
        # layer, bytes of a kernel page's record, the same of all pages
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
            self._pieces += [(page.layer, *one) for one in zip(ranges, pieces)]
            for name in page.rows:
                self._page_of.setdefault((page.layer, name), (page, pieces[0]))
            for place in page.places:
                self._views.setdefault(place.layer, {})[place.field.name] = self._view(place, start, stride)
            end += page.nbytes

    def _view(self, place: Place, start: int, stride: int) -> Tensor:
        """``[num_pages, count, *shape]`` of one field, whose pages begin at byte ``start``, ``stride`` bytes apart."""
        field, size = place.field, itemsize(place.field.dtype)
        if any(step % size for step in (start + place.offset, stride, *place.strides)):
            raise BadInput(f"packed memory would have {field.name!r} ({field.dtype}) at byte {start + place.offset}")
        memory = self.buffer[start + place.offset :]
        typed = memory[: len(memory) // size * size].view(getattr(torch, field.dtype))
        strides = [step // size for step in (stride, *place.strides)]
        return typed.as_strided((self.num_pages, field.count, *field.shape), strides)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.buffer.numel()

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Field name -> view ``[num_pages, count, *shape]`` of that field of ``layer``; a record has one page, or
        ``layout.kernel_pages``, one behind another.

        Views alias the arena and live as long as it does. Empty for a layer without fields here.
        """
        return self._views.get(layer, {})

    def page(self, layer: int, name: str) -> tuple[Page, Tensor]:
        """The page that rows ``name`` of ``layer`` lie in, beside others or alone, and all of them: uint8 ``[num_pages,
        nbytes]``; of several (codes, and scales apart) the first. KeyError if there is none."""
        return self._page_of[layer, name]

    def all_layers(self, name: str) -> Tensor:
        """Field ``name`` of every layer that has it, in one view ``[layers, num_rows, count, *shape]`` of the arena. The
        field must be alike in these layers, and they equally far apart in the layout."""
        views = [fields[name] for fields in self._views.values() if name in fields]
        starts = [view.storage_offset() for view in views]
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        assert starts == [starts[0] + i * step for i in range(len(starts))], (
            f"layers of {name!r} are not equally far apart"
        )
        return views[0].as_strided((len(views), *views[0].shape), (step, *views[0].stride()))

    def regions(self, layer: int | None = None) -> list[Region]:
        """What ``layer`` keeps, or all layers do, as bytes, a few of them: where it lies in a record, and uint8
        ``[num_rows, bytes]``, a strided view."""
        mine = [(at, rows) for of, at, rows in self._pieces if layer in (None, of)]
        if not mine:
            return []
        many, width = self.layout.kernel_pages, self.layout.nbytes // self.layout.kernel_pages
        starts = range(0, self.layout.nbytes, width)
        if self.order == "layer":
            return [
                (slice(start + at.start, start + at.stop), rows[number::many])
                for number, start in enumerate(starts)
                for at, rows in mine
            ]
        runs: list[list[int]] = []
        for begin, end in sorted((at.start, at.stop) for at, _ in mine):
            if not runs or begin - runs[-1][1] >= ALIGN:
                runs.append([begin, end])
            runs[-1][1] = end
        found = [slice(start + begin, start + end) for start in starts for begin, end in runs]
        found = found if layer is not None else [slice(found[0].start, found[-1].stop)]
        records = self.buffer.as_strided((self.num_rows, self.layout.nbytes), (self.row_nbytes, 1))
        return [(at, records[:, at]) for at in found]

    def reset(self, ids: Tensor | npt.NDArray[np.integer[Any]] | Sequence[int] | int) -> None:
        """Set rows ``ids`` of every field to the field's initial value. Raises NotOwned for an id out of range."""
        index = self.page_index(self.row_index([ids] if isinstance(ids, int) else ids))
        for place in self.layout.places:
            self._views[place.layer][place.field.name][index] = place.field.fill

    def copy(self, sources: Tensor | npt.NDArray[np.int32], targets: Tensor | npt.NDArray[np.int32]) -> None:
        """Copy rows ``sources`` to rows ``targets``, all fields, bit for bit; of a field all sources are read before one is
        written. The ids are the caller's to have proven."""
        source, target = (torch.as_tensor(ids).to(self.device, torch.int64) for ids in (sources, targets))
        is_long = self.device.type == "cpu" and self.layout.nbytes >= LONG_ROW
        are_apart = is_long and not torch.isin(source, target).any()
        for _, rows in self.regions():
            if are_apart and rows.shape[1] >= LONG_ROW:
                copy_rows(rows, rows, torch.stack((source, target), 1))
            else:
                rows[target] = rows[source]

    def poison(self, ids: npt.NDArray[np.int32]) -> None:
        """Set every byte of rows ``ids`` to 0xFF: NaN in all float formats, -1 in the integers."""
        index = torch.from_numpy(ids).to(self.device, torch.int64)
        for _, rows in self.regions():
            rows[index] = 0xFF

    def row_index(
        self, ids: Tensor | npt.NDArray[np.integer[Any]] | Sequence[int], *, is_proven: bool = False
    ) -> Tensor:
        """``ids`` as int64 ``[n]`` on the arena's device, fit for addressing.

        Raises NotOwned for an id out of range and BadInput for anything but a vector of whole numbers. Ids on a GPU are
        waited for; ``is_proven`` skips the range and the wait.
        """
        index = integers(ids, "row ids").to(torch.int64)
        if index.ndim != 1:
            raise BadInput(f"row ids must be a vector, got shape {list(index.shape)}")
        if len(index) and not is_proven and not 0 <= int(index.min()) <= int(index.max()) < self.num_rows:
            raise NotOwned(f"row ids {int(index.min())}..{int(index.max())} are not all in 0..{self.num_rows - 1}")
        return index.to(self.device)

    def page_index(self, index: Tensor) -> Tensor:
        """int64 rows ``[n]`` -> their kernel pages, int64 ``[n * kernel_pages]``."""
        many = self.layout.kernel_pages
        return index if many == 1 else (index[:, None] * many + torch.arange(many, device=index.device)).flatten()
