"""Static buffers for the index arrays of steps: fixed addresses, and of block tables only what changed is copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kvpagoda.core.memory.no_memory import HostArrays
from kvpagoda.core.memory.writes import Array, Writes

Cells = Any
if TYPE_CHECKING:
    import torch

StepArray: TypeAlias = "torch.Tensor"
"""An index array of a step, as kernels take it: a tensor on the device. A cache without memory has numpy arrays of the same
shapes and dtypes; there ``numpy.asarray`` tells a type checker so."""
"""The cells of a ``BlockTable``, or ``PagedCells``: int32, indexed by ``[row, first:end]`` or ``[rows, columns]``."""


class PagedCells:
    """A block table ``cells``, int32 ``[rows, columns]``, read as a table ``[rows, columns * many]`` of kernel pages.

    ``many``: kernel pages per block; page ``p`` of block ``b`` has the id ``b * many + p``. Slots are the same numbers in
    both units: ``block * block_size + row`` equals ``page * page_size + row of the page``. Only the cells that are
    indexed are computed.

    >>> PagedCells(np.array([[7, 3]], np.int32), 2)[0, 1:4].tolist()
    [15, 6, 7]
    """

    def __init__(self, cells: Array, many: int) -> None:
        self._cells, self._many, self.shape = cells, many, (cells.shape[0], cells.shape[1] * many)

    def __getitem__(self, at: tuple[Any, Any]) -> Array:
        """Return cells as a new int32 array: index with ``[row, first:end]``, or with arrays ``[rows, columns]``."""
        rows, columns = at
        columns = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
        blocks = self._cells[rows, columns // self._many]
        pages: Array = blocks * self._many + (columns % self._many).astype(blocks.dtype)
        return pages


class TableSnapshot:
    """For each of the ``B`` rows of a step, the cells of the block table that the step shows.

    Columns, int64 ``[B]`` each: ``slots``, ``versions`` of their cells, and the range ``first .. end - 1`` of cells.
    ``keys``: the columns as bytes.
    """

    def __init__(self, columns: tuple[Array, ...], keys: list[bytes]) -> None:
        self.slots, self.versions, self.first, self.end = self.columns = columns
        self.keys = keys
        self._last_cells: Array | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def starts(self) -> Array:
        """int64 ``[B + 1]``: where the cells of each row begin if the rows follow one another in one array."""
        return np.concatenate((_ZERO, np.cumsum(self.end - self.first)))

    def last_cells(self, cells: Cells) -> Array:
        """Return the last cell that is shown of each row, int64 ``[B]``."""
        if self._last_cells is None:
            self._last_cells = cells[self.slots, self.end - 1].astype(np.int64)
        return self._last_cells

    def since(self, before: TableSnapshot, cells: Cells) -> TableDelta:
        """Return how a copy of ``cells`` as shown ``before`` must be changed to show this snapshot.

        O(B + cells in the difference).
        """
        slots, first, end = self.slots, self.first, self.end
        same = [now is old for now, old in zip(self.columns, before.columns)]
        hidden = hides = _NO_ROWS  # rows with cells that are shown no more, and up to which column
        if same == [True, True, True, False]:
            renewed, begin = _NO_ROWS, before.end
        else:
            n = min(len(self), len(before))
            is_same, begin = np.zeros(len(self), np.bool_), end.copy()
            is_same[:n] = (slots[:n] == before.slots[:n]) & (self.versions[:n] == before.versions[:n])
            is_same[:n] &= first[:n] >= before.first[:n]
            begin[:n] = np.where(is_same[:n], before.end[:n], end[:n])
            renewed = np.flatnonzero(~is_same)
            hides = np.minimum(first[:n], before.end[:n])
            hidden = (is_same[:n] & (hides > before.first[:n])).nonzero()[0]
        grown = (end > begin).nonzero()[0]
        begun, ends = begin[grown], end[grown]
        if len(hidden):
            grown = np.concatenate((hidden, grown))
            begun = np.concatenate((before.first[hidden], begun))
            ends = np.concatenate((hides[hidden], ends))
        columns, counts = begun, ends - begun
        if not np.count_nonzero(counts != 1):  # one cell of each row
            rows = grown
        else:
            rows, columns = cells_between(begun, ends)
            rows = grown[rows]
        values = cells[slots[rows], columns]
        if first is not before.first:
            values *= columns >= first[rows]
        return TableDelta(renewed, rows, columns, values, grown, begun, counts)


class TableDelta(NamedTuple):
    """The difference between two snapshots of a table; int64 arrays."""

    renewed: Array
    """Rows that are new, or hold another slot or version: all their cells must be copied."""
    rows: Array
    columns: Array
    values: Array
    """Cells of the other rows to write: newly shown ones, and 0 for those left of the range that are hidden now."""
    grown: Array
    begun: Array
    counts: Array
    """The same cells as runs: the row, its first cell to write, and how many, one run after another in ``values``."""


_NO_ROWS, _ZERO = np.empty(0, np.int64), np.zeros(1, np.int64)
_STEPS = 8
"""In so many batches an array is made after it was read, although nobody reads it again."""
Key: TypeAlias = tuple[Any, str]
"""An array that is made when it is read: the group that it is of, or None, and its name."""
EMPTY = TableSnapshot((np.empty(0, np.int64),) * 4, [b""] * 4)


def cells_between(begin: Array, end: Array) -> tuple[Array, Array]:
    """Return the rows and columns of the cells ``begin[i] .. end[i] - 1`` of all rows ``i``: int64 ``[n]``, in
    order."""
    counts = np.maximum(end - begin, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts - begin)[rows]


class StepBuffers:
    """One array with a fixed address for each name: tensors on the device, or numpy arrays if the cache has no memory.

    An array gets another address only when a step is larger than all before. ``number`` counts the batches that used
    these buffers; only the arrays of the last one are valid.

    Where host and kernels use the same memory, arrays are written at once, when they are put here. Else they are put
    together, and ``send`` writes them on the device in stream order, in one copy and one launch for all. A batch cannot
    know which arrays will be read, so it makes those that were read in the batches before it (``expected``), and sends
    them together; one that is read without having been expected is sent by itself. Arrays that are the same objects as
    in the step before, and the cells of tables that did not change, are not sent again.
    """

    def __init__(self, arrays: HostArrays) -> None:
        self.arrays, self.number = arrays, 0
        self._no_states: Array = np.zeros(0, np.int32)
        # host side and device side: the same memory on the CPU, else there is no host side
        self._buffers: dict[str, tuple[Array | None, StepArray]] = {}
        self._put: dict[
            str, tuple[Array, StepArray]
        ] = {}  # the values put last, and the part of the buffer that holds them
        self._snapshots: dict[str, TableSnapshot] = {}  # the last snapshot of each table
        self._held: dict[
            str, tuple[TableSnapshot, StepArray]
        ] = {}  # the snapshot that a buffer holds, and the part with it
        self._writes = Writes()  # what was put here since the last ``send``
        self.expected: dict[Key, Callable[[Any], Any]] = {}  #: arrays that will probably be read -> what makes them
        self.made: dict[Key, Any] = {}  #: those of the current batch that were made and not read yet
        self._unread: dict[Key, int] = {}  # array -> in how many batches it was made and not read

    def begin(self) -> None:
        """Begin a batch: the arrays of the one before are no longer valid."""
        self.number += 1
        if self._writes:  # of a batch that raised before they were sent
            self.forget()
        if self.made:
            self._unread = {array: self._unread.get(array, 0) + 1 for array in self.made}
            for array in [array for array, batches in self._unread.items() if batches == _STEPS]:
                del self.expected[array]
            self.made.clear()

    def no_states(self, num_rows: int) -> Array:
        """Return the records of states of ``num_rows`` rows of a model without states: 0, int32. The same array while there
        are as many rows."""
        if len(self._no_states) != num_rows:
            self._no_states = np.zeros(num_rows, np.int32)
        return self._no_states

    def send(self) -> None:
        """Write on the device what was put here: kernels that are launched from now on, on the current stream, find it."""
        if self._writes:
            self.arrays.send(self._writes)
            self._writes.clear()

    def forget(self) -> None:
        """Let all that is put here next be written, as something raised and it is unknown what the device has."""
        self._put.clear()
        self._held.clear()
        self._writes.clear()

    def put(self, name: str, values: Array, dtype: type = np.int32, times: int = 1) -> StepArray:
        """Copy ``times`` the ``values`` ``[n]`` into the buffer ``name`` and return the part of it that holds them.

        The caller must not change ``values`` afterwards: the same object is not copied again.
        """
        n, known = len(values), self._put.get(name)
        if known is not None and known[0] is values:
            return known[1]
        host, target = self._buffer(name, (n,), dtype)
        self._put.pop(name, None)
        part = known[1] if known is not None and len(known[0]) == n else target[:n]
        products = values if times == 1 else values * times
        if host is not None:
            host[:n] = products
        elif n:
            if name in self._writes:
                self.send()  # a word must not be written twice
            words = products if dtype is np.int32 else np.ascontiguousarray(products, dtype).view(np.int32)
            self._writes.put(name, target, words)
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

    def put_rows(self, name: str, cells: Cells, shown: TableSnapshot, is_fixed: bool = False) -> StepArray:
        """Copy the ``shown`` cells of each row into the buffer ``name`` and return them, int32 ``[B, columns]``.

        Cells before the first shown one are 0. The buffer is as wide as the table; the result has as many columns as
        the longest row needs, or with ``is_fixed`` all. O(B + cells that changed), where all cells of a row count if it
        has another request or version.
        """
        host, target = self._buffer(name, (len(shown), cells.shape[1]), np.int32)
        held, part = self._held.get(name, (EMPTY, None))
        if part is not None and shown is held:
            return part
        delta, width = shown.since(held, cells), int(target.shape[1])
        self._held.pop(name, None)  # until the buffer is complete
        renewed = []
        for row in delta.renewed.tolist():
            slot, first, end = int(shown.slots[row]), int(shown.first[row]), int(shown.end[row])
            if host is not None:
                host[row, :first] = 0
                host[row, first:end] = cells[slot, first:end]
            elif first:
                renewed.append(np.concatenate((np.zeros(first, np.int32), cells[slot, first:end])))
            else:
                renewed.append(cells[slot, first:end])
        if host is not None:
            host[delta.rows, delta.columns] = delta.values
        elif len(delta.counts) or renewed:
            if name in self._writes:
                self.send()
            starts, counts = delta.grown * width + delta.begun, delta.counts
            if renewed:
                starts = np.concatenate((delta.renewed * width, starts))
                counts = np.concatenate((shown.end[delta.renewed], counts))
            self._writes.put_runs(name, target, starts, counts, [*renewed, delta.values])
        shape = len(shown), width if is_fixed else int(shown.end.max())
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
        on_device: tuple[StepArray, StepArray, StepArray, int] | None,
    ) -> StepArray:
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
            assert host is not None
            runs = zip(shown.slots.tolist(), shown.first.tolist(), shown.end.tolist())
            np.concatenate([cells[slot, left:right] for slot, left, right in runs], out=host[:total])
        self._held[name] = shown, part
        return part

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: type) -> tuple[Array | None, StepArray]:
        """Return the host and device side of the buffer ``name``, replaced by larger ones if it has too few rows."""
        found = self._buffers.get(name)
        if found is None or found[1].shape[0] < shape[0]:
            size = 1 << max(6, (shape[0] - 1).bit_length()), *shape[1:]
            host: Array | None = np.zeros(size, dtype) if self.arrays.is_host else None
            found = host, self.arrays.zeros(size, dtype) if host is None else self.arrays.twin(host)
            self._put.pop(name, None)
            self._held.pop(name, None)
            self._buffers[name] = found
        return found
