"""Static buffers for a step's index arrays: addresses that never change, and no byte copied twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.batch.table_snapshot import EMPTY, Array, Cells, TableSnapshot
from kvpagoda.memory.no_memory import HostArrays


class StepBuffers:
    """Arrays with fixed addresses, one for each name: tensors on the device, or numpy arrays where there is no memory. They
    move only if a step is larger than any before.

    What did not change since it was put there is not copied again. The host's side is not page-locked: a copy from such
    memory has read its source when it returns, so that the next step may fill it while this one still runs.
    ``number`` counts the batches whose arrays lay here; only those of the last one still do.
    """

    def __init__(self, arrays: HostArrays) -> None:
        self.arrays, self.number = arrays, 0
        self._buffers: dict[str, tuple[Array, Any]] = {}  # the host's side and the device's: on the CPU one memory
        self._put: dict[str, tuple[Array, Any]] = {}  # what was put last, and the part of the buffer that holds it
        self._snapshots: dict[str, TableSnapshot] = {}  # of each table
        self._held: dict[str, tuple[TableSnapshot, Any]] = {}  # what of a table a buffer holds, and the part that does

    def put(self, name: str, values: Array, dtype: type = np.int32) -> Any:
        """Copy ``values`` ``[n]``, which nobody may change afterwards, into the buffer of that name; returns the part that
        holds them."""
        n, known = len(values), self._put.get(name)
        if known is not None and (known[0] is values or (not self.arrays.is_host and np.array_equal(known[0], values))):
            return known[1]
        host, target = self._buffer(name, (n,), dtype)
        self._put.pop(name, None)
        host[:n] = values
        part = known[1] if known is not None and len(known[0]) == n else target[:n]
        if not self.arrays.is_host:
            self.arrays.upload(part, host[:n])
        self._put[name] = values, part
        return part

    def snapshot(self, name: str, versions: Array, slots: Array, first: Array, end: Array) -> TableSnapshot:
        """What a step shows now of a table whose rows have ``versions``: the same object as the last time, if nothing of it
        changed."""
        last = self._snapshots.get(name, EMPTY)
        now: tuple[Array, ...] = (slots, versions[slots], first, end)
        both = zip(now, last.columns, last.keys)
        keys = [key if column is old else column.tobytes() for column, old, key in both]
        if keys != last.keys:
            same = zip(now, last.columns, keys, last.keys)
            now = tuple([old if key == old_key else new for new, old, key, old_key in same])
            last = self._snapshots[name] = TableSnapshot(now, keys)
        return last

    def put_rows(self, name: str, cells: Cells, shown: TableSnapshot, is_fixed: bool = False) -> Any:
        """The cells that are ``shown`` of each row, 0 left of them: int32 ``[B, most columns]``, a part of a buffer as wide as
        the table, or with ``is_fixed`` all columns. O(B + cells that changed; all of a row that means something else)."""
        host, target = self._buffer(name, (len(shown), cells.shape[1]), np.int32)
        held, part = self._held.get(name, (EMPTY, None))
        if part is not None and shown is held:
            return part
        delta = shown.since(held, cells)
        self._held.pop(name, None)  # until all of it is there
        for row in delta.renewed.tolist():
            slot, first, end = int(shown.slots[row]), int(shown.first[row]), int(shown.end[row])
            host[row, :first] = 0
            host[row, first:end] = cells[slot, first:end]
            if not self.arrays.is_host:
                self.arrays.upload(target, host[row], row)
        host[delta.rows, delta.columns] = delta.values
        if not self.arrays.is_host and len(delta.rows):
            self.arrays.upload(target, delta.values, (delta.rows, delta.columns))
        shape = len(shown), host.shape[1] if is_fixed else int(shown.end.max())
        if part is None or part.shape != shape:
            part = target[: shape[0], : shape[1]]
        if len(held) > len(shown):  # rows behind these are still there
            rest = tuple(np.concatenate((now, old[len(now) :])) for now, old in zip(shown.columns, held.columns))
            shown = TableSnapshot(rest, [])
        self._held[name] = shown, part
        return part

    def put_runs(
        self,
        name: str,
        shown: TableSnapshot,
        cells: Cells,
        is_fixed: bool,
        on_device: tuple[Any, Any, Any, int] | None,
    ) -> Any:
        """The cells that are ``shown``, row behind row: int32 ``[starts[-1]]``, or with ``is_fixed`` the whole buffer, as many
        as all rows can have. ``on_device``: what ``HostArrays.flatten`` makes them from where kernels read them, so that
        the host copies nothing. O(B + cells), nothing where nothing changed."""
        most, total = len(shown) * cells.shape[1], int(shown.starts[-1])
        host, target = self._buffer(name, (most,), np.int32)
        held, part = self._held.get(name, (EMPTY, None))
        if part is not None and shown is held:
            return part
        self._held.pop(name, None)  # until all of it is there
        part = target[: most if is_fixed else total]
        if on_device is not None:
            self.arrays.flatten(*on_device, part)
        else:
            runs = zip(shown.slots.tolist(), shown.first.tolist(), shown.end.tolist())
            np.concatenate([cells[slot, left:right] for slot, left, right in runs], out=host[:total])
        self._held[name] = shown, part
        return part

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: type) -> tuple[Array, Any]:
        found = self._buffers.get(name)
        if found is None or found[0].shape[0] < shape[0]:
            host: Array = np.zeros((1 << max(6, (shape[0] - 1).bit_length()), *shape[1:]), dtype)
            found = host, self.arrays.twin(host)
            self._put.pop(name, None)
            self._held.pop(name, None)
            self._buffers[name] = found
        return found
