"""Static buffers for the index arrays of steps: fixed addresses, and only what changed is copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.batch.table_snapshot import EMPTY, Array, Cells, TableSnapshot
from kvpagoda.memory.no_memory import HostArrays


class StepBuffers:
    """One array with a fixed address for each name: tensors on the device, or numpy arrays if the cache has no memory.

    An array gets another address only when a step is larger than all before. Values that did not change since they were
    put here are not copied again. The host side is not page-locked: a copy from pageable memory has read its source
    when it returns, so the next step may fill the host side while this one still runs. ``number`` counts the batches
    that used these buffers; only the arrays of the last one are valid.
    """

    def __init__(self, arrays: HostArrays) -> None:
        self.arrays, self.number = arrays, 0
        self._buffers: dict[str, tuple[Array, Any]] = {}  # host side and device side; the same memory on the CPU
        self._put: dict[str, tuple[Array, Any]] = {}  # the values put last, and the part of the buffer that holds them
        self._snapshots: dict[str, TableSnapshot] = {}  # the last snapshot of each table
        self._held: dict[str, tuple[TableSnapshot, Any]] = {}  # the snapshot that a buffer holds, and the part with it

    def put(self, name: str, values: Array, dtype: type = np.int32) -> Any:
        """Copy ``values`` ``[n]`` into the buffer ``name`` and return the part of it that holds them.

        The caller must not change ``values`` afterwards: they are compared with what is put next.
        """
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
        """Return what a step shows of the table ``name``, whose rows have ``versions``.

        ``slots``, ``first``, ``end``, int64 ``[B]``: the cells ``first .. end - 1`` of each slot. Returns the object of
        the last call if nothing has changed since.
        """
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
        """Copy the ``shown`` cells of each row into the buffer ``name`` and return them, int32 ``[B, columns]``.

        Cells before the first shown one are 0. The buffer is as wide as the table; the result has as many columns as
        the longest row needs, or with ``is_fixed`` all. O(B + cells that changed), where all cells of a row count if it
        has another request or version.
        """
        host, target = self._buffer(name, (len(shown), cells.shape[1]), np.int32)
        held, part = self._held.get(name, (EMPTY, None))
        if part is not None and shown is held:
            return part
        delta = shown.since(held, cells)
        self._held.pop(name, None)  # until the buffer is complete
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
        if len(held) > len(shown):  # the buffer still holds the rows after these
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
        """Copy the ``shown`` cells, one row after another, into the buffer ``name`` and return them.

        The result is int32 ``[starts[-1]]``. With ``is_fixed`` the result is the whole buffer, with as many cells as
        all rows can have. ``on_device``: the arguments with which ``HostArrays.flatten`` builds the cells on the
        device, so that the host copies nothing; None builds them on the host. O(B + cells), or O(1) if nothing
        changed.
        """
        most, total = len(shown) * cells.shape[1], int(shown.starts[-1])
        host, target = self._buffer(name, (most,), np.int32)
        held, part = self._held.get(name, (EMPTY, None))
        if part is not None and shown is held:
            return part
        self._held.pop(name, None)  # until the buffer is complete
        part = target[: most if is_fixed else total]
        if on_device is not None:
            self.arrays.flatten(*on_device, part)
        else:
            runs = zip(shown.slots.tolist(), shown.first.tolist(), shown.end.tolist())
            np.concatenate([cells[slot, left:right] for slot, left, right in runs], out=host[:total])
        self._held[name] = shown, part
        return part

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: type) -> tuple[Array, Any]:
        """Return the host and device side of the buffer ``name``, replaced by larger ones if it has too few rows."""
        found = self._buffers.get(name)
        if found is None or found[0].shape[0] < shape[0]:
            host: Array = np.zeros((1 << max(6, (shape[0] - 1).bit_length()), *shape[1:]), dtype)
            found = host, self.arrays.twin(host)
            self._put.pop(name, None)
            self._held.pop(name, None)
            self._buffers[name] = found
        return found
