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
from kvpagoda.memory.id_tensors import Device, default_device, integers
from kvpagoda.schema import Place, RowLayout
from kvpagoda.schema.fields import itemsize
from kvpagoda.schema.layout import ALIGN
from kvpagoda.units import align_up

__all__ = ["Arena", "Device", "default_device", "dtype_name"]

Tensor = torch.Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` -> ``"float16"``, as a ``Field`` spells it."""
    return str(dtype).removeprefix("torch.")


class Arena:
    """Memory for ``num_rows`` records of ``layout``. One allocation, made here and never again.

    ``order``: ``"block"`` or ``"layer"``; default layer-major on a GPU, block-major on the CPU. In either order it takes
    exactly ``num_rows * layout.nbytes`` bytes; with ``field_align`` the regions of a layer-major arena start at multiples
    of that many bytes instead, and it ends with the last one. New memory is zero; ``reset`` writes the initial values.
    ``within``: uint8 memory that others use too, and the bytes from one record to the next: block-major then.
    """

    def __init__(
        self,
        layout: RowLayout,
        num_rows: int,
        *,
        device: Device = None,
        order: str | None = None,
        field_align: int | None = None,
        pin_memory: bool = False,
        within: tuple[Tensor, int] | None = None,
    ) -> None:
        self.layout, self.num_rows = layout, num_rows
        self.device = default_device(device) if within is None else within[0].device
        self.order = order or ("block" if self.device.type == "cpu" or within is not None else "layer")
        if self.order not in ("block", "layer") or num_rows < 0:
            raise BadInput(f"order is 'block' or 'layer' and num_rows >= 0, got {order!r} and {num_rows}")
        self.row_nbytes = layout.nbytes if within is None else within[1]
        self._starts: list[tuple[Place, int, int]] = []
        end = 0
        for place in layout.places:
            start, stride = (place.offset, self.row_nbytes) if self.order == "block" else (end, place.nbytes)
            if start % itemsize(place.field.dtype):
                raise BadInput(
                    f"field_align {field_align} puts {place.field.name!r} ({place.field.dtype}) at byte {start}"
                )
            self._starts.append((place, start, stride))
            end = align_up(end + num_rows * place.nbytes, ALIGN if field_align is None else field_align)
        nbytes = num_rows * layout.nbytes if self.order == "block" or field_align is None else end
        pin = pin_memory and self.device.type == "cpu" and torch.cuda.is_available()
        if within is None:
            self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device, pin_memory=pin)
        else:
            self.buffer = within[0][: num_rows * self.row_nbytes]
        self._views: dict[int, dict[str, Tensor]] = {}
        for place, start, stride in self._starts:
            self._views.setdefault(place.layer, {})[place.field.name] = self._view(place, start, stride)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.buffer.numel()

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Field name -> view ``[num_rows, count, *shape]`` of that field of ``layer``.

        Views alias the arena and live as long as it does. Empty for a layer without fields here.
        """
        return self._views.get(layer, {})

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

    def layer_bytes(self, layer: int) -> list[tuple[slice, Tensor]]:
        """What ``layer`` keeps, as bytes: (where it lies in a record, uint8 ``[num_rows, bytes]``), a few of them."""
        mine = [(place, start, stride) for place, start, stride in self._starts if place.layer == layer]
        if self.order == "block" and mine:
            inside = slice(mine[0][0].offset, mine[-1][0].offset + mine[-1][0].nbytes)
            return [(inside, self.records[:, inside])]
        return [
            (slice(place.offset, place.offset + place.nbytes), self._bytes(place, start, stride))
            for place, start, stride in mine
        ]

    def pack(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows ``ids`` (int ``[n]``) as records ``[n, layout.nbytes]`` uint8, the same bytes in either order.

        Padding is zero. The result, ``out`` if given, is the caller's and on the arena's device. Raises NotOwned for an
        id out of range and BadInput for an ``out`` of another shape, dtype or device, before anything is read.
        """
        index = self.row_index(ids)
        if out is not None:
            self._check_records(out, len(index))
            if out.device != self.buffer.device:
                raise BadInput(f"out must be on {self.buffer.device}, got {out.device}")
        if self.order == "block":
            rows = self.records
            return torch.index_select(rows, 0, index, out=out) if out is not None else rows[index]
        if out is None:
            out = torch.zeros(len(index), self.layout.nbytes, dtype=torch.uint8, device=self.device)
        elif self.layout.payload_nbytes < self.layout.nbytes:
            out.zero_()
        for place, start, stride in self._starts:
            out[:, place.offset : place.offset + place.nbytes] = self._bytes(place, start, stride)[index]
        return out

    def unpack(self, ids: Tensor, records: Tensor) -> None:
        """Write ``records`` (uint8 ``[n, layout.nbytes]``, from ``pack``) to rows ``ids``. Raises before writing."""
        index = self.row_index(ids)
        self._check_records(records, len(index))
        if len(torch.unique(index)) != len(index):
            raise NotOwned(f"unpack would write a row twice: {index.tolist()[:16]}")
        records = records.to(self.device)
        if self.order == "block":
            self.records[index] = records
            return
        for place, start, stride in self._starts:
            self._bytes(place, start, stride)[index] = records[:, place.offset : place.offset + place.nbytes]

    def reset(self, ids: Tensor | npt.NDArray[np.integer[Any]] | Sequence[int] | int) -> None:
        """Set rows ``ids`` of every field to the field's initial value. Raises NotOwned for an id out of range."""
        one = isinstance(ids, int)
        index = self.row_index([ids] if isinstance(ids, int) else ids)
        for place, _, _ in self._starts:
            self._views[place.layer][place.field.name][ids if one else index] = place.field.fill

    def copy(self, sources: Tensor | npt.NDArray[np.int32], targets: Tensor | npt.NDArray[np.int32]) -> None:
        """Copy rows ``sources`` to rows ``targets``, all fields, bit for bit; of a field all sources are read before one is
        written. The ids are the caller's to have proven."""
        source, target = (torch.as_tensor(ids).to(self.device, torch.int64) for ids in (sources, targets))
        for place, start, stride in self._starts:
            rows = self._bytes(place, start, stride)
            rows[target] = rows[source]

    def poison(self, ids: npt.NDArray[np.int32]) -> None:
        """Set every byte of rows ``ids`` to 0xFF: NaN in all float formats, -1 in the integers."""
        rows = torch.from_numpy(ids).to(self.device, torch.int64)
        for place, start, stride in self._starts:
            self._bytes(place, start, stride)[rows] = 0xFF

    def row_index(
        self, ids: Tensor | npt.NDArray[np.integer[Any]] | Sequence[int], *, is_proven: bool = False
    ) -> Tensor:
        """``ids`` as int64 ``[n]`` on the arena's device, fit for addressing.

        Raises NotOwned for an id out of range and BadInput for anything but a vector of whole numbers. Ids on a GPU are
        waited for; ``is_proven`` skips the range and the wait.
        """
        index = integers(ids, "row ids")
        if index.ndim != 1:
            raise BadInput(f"row ids must be a vector, got shape {list(index.shape)}")
        index = index.to(torch.int64)
        if len(index) and not is_proven and not 0 <= int(index.min()) <= int(index.max()) < self.num_rows:
            raise NotOwned(f"row ids {int(index.min())}..{int(index.max())} are not all in 0..{self.num_rows - 1}")
        return index.to(self.device)

    def _check_records(self, records: Tensor, n: int) -> None:
        if records.dtype != torch.uint8 or tuple(records.shape) != (n, self.layout.nbytes):
            raise BadInput(
                f"records must be uint8 [{n}, {self.layout.nbytes}], got {records.dtype} {list(records.shape)}"
            )

    @property
    def records(self) -> Tensor:
        """uint8 ``[num_rows, layout.nbytes]``: the records of a block-major arena, a strided view."""
        return self.buffer.as_strided((self.num_rows, self.layout.nbytes), (self.row_nbytes, 1))

    def _bytes(self, place: Place, start: int, stride: int) -> Tensor:
        return self.buffer[start:].as_strided((self.num_rows, place.nbytes), (stride, 1))

    def _view(self, place: Place, start: int, stride: int) -> Tensor:
        field = place.field
        dtype: torch.dtype = getattr(torch, field.dtype)
        size = dtype.itemsize
        shape = (self.num_rows, field.count, *field.shape)
        inner = [1]
        for extent in reversed(shape[2:]):
            inner.append(inner[-1] * extent)
        strides = (stride // size, *reversed(inner))
        whole = self.buffer[: self.nbytes // size * size].view(dtype)
        return whole.as_strided(shape, strides, start // size)
