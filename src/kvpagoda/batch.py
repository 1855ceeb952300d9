"""One step's index arrays, in static buffers, in the spellings that attention kernels take."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvpagoda.blocks import BlockTable
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.compat.layer_handle import LayerCacheHandle
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.memory.device_table import DeviceTable
from kvpagoda.memory.pool import Pool
from kvpagoda.schema import Layer
from kvpagoda.sequence import Sequence
from kvpagoda.step import Step

Tensor = torch.Tensor
Array = np.ndarray[Any, np.dtype[Any]]


class Shown:
    """What a step shows of a block table: of each row its slot, the version of what it holds, and its cells
    ``first .. end - 1``, int64 ``[B]`` each; ``starts`` int64 ``[B + 1]``: where they begin if they lie row behind row.
    """

    def __init__(self, columns: tuple[Array, ...], keys: list[bytes]) -> None:
        self.slots, self.versions, self.first, self.end = self.columns = columns
        self.keys = keys  # the columns as bytes
        self.starts = np.zeros(len(self.slots) + 1, np.int64)
        np.cumsum(self.end - self.first, out=self.starts[1:])
        self._since: tuple[Shown, Change] | None = None
        self._last_cells: Array | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def last_cells(self, table: BlockTable) -> Array:
        """int64 ``[B]``: the last cell of each row that is shown."""
        if self._last_cells is None:
            self._last_cells = table.cells[self.slots, self.end - 1].astype(np.int64)
        return self._last_cells

    def since(self, before: Shown, table: BlockTable) -> Change:
        """How to come here from ``before``."""
        if self._since is None or self._since[0] is not before:
            self._since = before, self._change(before, table)
        return self._since[1]

    def _change(self, before: Shown, table: BlockTable) -> Change:
        slots, first, end = self.slots, self.first, self.end
        same = [now is old for now, old in zip(self.columns, before.columns)]
        if same == [True, True, True, False]:
            goes_on, begin = np.ones(len(self), np.bool_), before.end
        else:
            n = min(len(self), len(before))
            goes_on, begin = np.zeros(len(self), np.bool_), end.copy()
            goes_on[:n] = (slots[:n] == before.slots[:n]) & (self.versions[:n] == before.versions[:n])
            goes_on[:n] &= first[:n] >= before.first[:n]
            old_end = np.where(first[:n] > before.first[:n], before.first[:n], before.end[:n])
            begin[:n] = np.where(goes_on[:n], old_end, end[:n])
        grown = np.flatnonzero(end > begin)
        rows, columns = _cells(begin[grown], end[grown])
        rows = grown[rows]
        values = table.cells[slots[rows], columns] * (columns >= first[rows])
        only_grew = len(self) == len(before) and same[2] and bool(goes_on.all()) and not (end < begin).any()
        return Change(np.flatnonzero(~goes_on), rows, columns, values, grown if only_grew else None)

    def first_change(self, before: Shown) -> int:
        """The first row that is not just as in ``before``."""
        n = min(len(self), len(before))
        same = np.zeros(n + 1, np.bool_)
        same[:n] = True
        for now, old in zip(self.columns, before.columns):
            same[:n] &= now[:n] == old[:n]
        return int(same.argmin())


class Change(NamedTuple):
    """How a table is shown differently from before."""

    renewed: Array
    """Rows that mean something else, or are new."""
    rows: Array
    columns: Array
    values: Array
    """Cells of the other rows that are shown now, and 0 for those that are no longer shown, left of the rest."""
    grown: Array | None
    """If all rows hold what they held, and only at the end more: which do."""


NOTHING = Shown((np.empty(0, np.int64),) * 4, [b""] * 4)
LONG = 64
"""Cells of a row from which on rows are copied one by one rather than all in one go."""


class StepBuffers:
    """Device tensors with fixed addresses, one for each name; they move only if a step is larger than any before.

    What did not change since it was put there is not copied again. The host's side is not page-locked: a copy from such
    memory has read its source when it returns, so that the next step may fill it while this one still runs.
    ``number`` counts the batches whose arrays lay here; only those of the last one still do.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.number = device, 0
        self._on_host = device.type == "cpu"
        self._buffers: dict[str, tuple[Array, Tensor]] = {}  # the host's and the device's: on the CPU one memory
        self._put: dict[str, tuple[Array, Tensor]] = {}  # what was put last, and the part of the buffer that holds it
        self._shown: dict[str, Shown] = {}  # of each table
        self._held: dict[str, tuple[Shown, Tensor]] = {}  # what of a table a buffer holds, and the part that does

    def put(self, name: str, values: Array, dtype: type = np.int32) -> Tensor:
        """Copy ``values`` ``[n]``, which nobody may change afterwards, into the buffer of that name; returns the part that
        holds them."""
        n, known = len(values), self._put.get(name)
        if known is not None and (known[0] is values or (not self._on_host and np.array_equal(known[0], values))):
            return known[1]
        host, target = self._buffer(name, (n,), dtype)
        host[:n] = values
        part = known[1] if known is not None and len(known[0]) == n else target[:n]
        if not self._on_host:
            part.copy_(torch.from_numpy(host[:n]))
        self._put[name] = values, part
        return part

    def shown(self, name: str, table: BlockTable, slots: Array, first: Array, end: Array) -> Shown:
        """What a step shows of ``table`` now: the same object as the last time, if nothing of it changed."""
        last = self._shown.get(name, NOTHING)
        now: tuple[Array, ...] = (slots, table.version[slots], first, end)
        keys = [column.tobytes() for column in now]
        if keys != last.keys:
            both = zip(now, last.columns, keys, last.keys)
            now = tuple(old if key == old_key else new for new, old, key, old_key in both)
            last = self._shown[name] = Shown(now, keys)
        return last

    def put_rows(self, name: str, table: BlockTable, shown: Shown) -> Tensor:
        """The cells that are ``shown`` of each row, 0 left of them: int32 ``[B, most columns]``, a part of a buffer as wide as
        the table. O(B + cells that changed; all of a row that means something else)."""
        host, target = self._buffer(name, (len(shown), table.cells.shape[1]), np.int32)
        held, part = self._held.get(name, (NOTHING, None))
        if part is not None and shown is held:
            return part
        change = shown.since(held, table)
        for row in change.renewed.tolist():
            slot, first, end = int(shown.slots[row]), int(shown.first[row]), int(shown.end[row])
            host[row, :first] = 0
            host[row, first:end] = table.cells[slot, first:end]
            if not self._on_host:
                target[row].copy_(torch.from_numpy(host[row]))
        host[change.rows, change.columns] = change.values
        if not self._on_host and len(change.rows):
            rows, columns, values = torch.from_numpy(np.stack(change[1:4])).to(self.device)
            target[rows, columns] = values.int()
        shape = len(shown), int(shown.end.max())
        if part is None or part.shape != shape:
            part = target[: shape[0], : shape[1]]
        if len(held) > len(shown):  # rows behind these are still there
            rest = tuple(np.concatenate((now, old[len(now) :])) for now, old in zip(shown.columns, held.columns))
            shown = Shown(rest, [])
        self._held[name] = shown, part
        return part

    def put_runs(self, name: str, table: BlockTable, shown: Shown) -> Tensor:
        """The cells that are ``shown``, row behind row: int32 ``[starts[-1]]``. O(B + cells from the first change on); where
        rows only grew these are moved, not read again."""
        host, target = self._buffer(name, (len(shown) * table.cells.shape[1],), np.int32)
        held, part = self._held.get(name, (NOTHING, None))
        if part is not None and shown is held:
            return part
        first, end, starts, total = shown.first, shown.end, shown.starts, int(shown.starts[-1])
        change = shown.since(held, table)
        row = shown.first_change(held) if change.grown is None else int(change.grown[0])
        begin = int(starts[row])
        if change.grown is not None:
            sources = held.starts[change.grown + 1].tolist()
            for source, stop, to in zip(
                reversed(sources),
                (int(held.starts[-1]), *reversed(sources)),
                reversed(starts[change.grown + 1].tolist()),
            ):
                host[to : to + stop - source] = host[source:stop]
            host[starts[change.rows] + change.columns - first[change.rows]] = change.values
        elif total - begin < LONG * (len(shown) - row):
            rows, columns = _cells(first[row:], end[row:])
            host[begin:total] = table.cells[shown.slots[row:][rows], columns]
        elif row < len(shown):
            runs = zip(shown.slots[row:].tolist(), first[row:].tolist(), end[row:].tolist())
            np.concatenate([table.cells[slot, left:right] for slot, left, right in runs], out=host[begin:total])
        if not self._on_host:
            target[begin:total].copy_(torch.from_numpy(host[begin:total]))
        part = target[:total]
        self._held[name] = shown, part
        return part

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: type) -> tuple[Array, Tensor]:
        found = self._buffers.get(name)
        if found is None or found[0].shape[0] < shape[0]:
            host: Array = np.zeros((1 << max(6, (shape[0] - 1).bit_length()), *shape[1:]), dtype)
            target = torch.from_numpy(host)
            found = self._buffers[name] = (host, target if self._on_host else target.to(self.device, copy=True))
            self._put.pop(name, None)
            self._held.pop(name, None)
        return found


def _cells(begin: Array, end: Array) -> tuple[Array, Array]:
    """Row and column of each cell ``begin .. end - 1`` of each row: int64 ``[n]``, in order."""
    counts = np.maximum(end - begin, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts - begin)[rows]


class StepRows:
    """Which rows a step has, and which of them each new token belongs to.

    ``slots`` int64 ``[B]``, -1 for padded rows, which come last; ``counts`` int64 ``[B]``: new tokens. Nobody changes these
    arrays: arrays that are the same object as in the step before are not put again.
    """

    def __init__(self, slots: Array, counts: Array, num_sequences: int) -> None:
        self.slots, self.counts, self.num_sequences = slots, counts, num_sequences
        self.indptr = np.concatenate(([0], np.cumsum(counts)))
        self.row_of = np.repeat(np.arange(len(slots)), counts)
        self.offsets = np.arange(len(self.row_of)) - self.indptr[self.row_of]
        self.slot_of = slots[self.row_of]
        self.last = self.indptr[1:] - 1
        self.one_each = len(self.row_of) == len(slots)
        self.zeros = np.zeros(len(slots), np.int64)


class GroupArrays:
    """One group's index arrays for one step of ``B`` rows (padded rows last) and ``T`` new tokens; each is made when it is
    first asked for, in a static buffer. Raises StaleHandle when the batch is over.

    ``cache_seqlens`` counts the new tokens too: write them by ``slot_mapping``, then attend. A window group's
    ``kv_indices`` start at the first block that the row's first new token still reads, ``kv_start`` is that block's
    first position; earlier cells of ``block_table`` are 0.
    """

    def __init__(self, batch: Batch, ledger: BlockGroup) -> None:
        self._batch, self._ledger = batch, ledger

    @cached_property
    def block_table(self) -> Tensor:
        """int32 ``[B, columns]``: block ids (FlashAttention's page table); cells past a row's last block hold no meaning."""
        return self._batch.buffers.put_rows(self._named("block_table"), self._ledger.table, self._shown)

    @cached_property
    def cache_seqlens(self) -> Tensor:
        """int32 ``[B]``: tokens of the row after this step; 0 for padded rows."""
        return self._put("cache_seqlens", self._batch.lengths)

    @cached_property
    def slot_mapping(self) -> Tensor:
        """int32 ``[T]`` (int64 where it could pass 2^31): block id times block_size plus row; padded tokens map to 0."""
        batch, size = self._batch, self._batch.block_size
        wide = np.int64 if self._ledger.plan.num_rows * size >= 2**31 else np.int32
        if batch.rows.one_each:
            cells = self._shown.last_cells(self._ledger.table)
        else:
            cells = self._ledger.table.cells[batch.rows.slot_of, batch.token_columns].astype(np.int64)
        return self._put("slot_mapping", cells * size + batch.within, wide)

    @cached_property
    def kv_indptr(self) -> Tensor:
        """int32 ``[B + 1]``: where each row's part of ``kv_indices`` starts (FlashInfer)."""
        return self._put("kv_indptr", self._shown.starts)

    @cached_property
    def kv_indices(self) -> Tensor:
        """int32 ``[kv_indptr[-1]]``: block ids of all rows, one behind another. Where blocks were added since the last step,
        O(all that lie behind): ask for it only if it is used."""
        return self._batch.buffers.put_runs(self._named("kv_indices"), self._ledger.table, self._shown)

    @cached_property
    def kv_last_page_len(self) -> Tensor:
        """int32 ``[B]``: rows in use of each row's last block; 0 for padded rows."""
        return self._put("kv_last_page_len", self._batch.last_page_len)

    @cached_property
    def kv_start(self) -> Tensor:
        """int32 ``[B]``: position of the first row of the first block in ``kv_indices``."""
        return self._put("kv_start", self._shown.first * self._batch.block_size)

    @cached_property
    def _shown(self) -> Shown:
        batch, ledger = self._batch, self._ledger
        first = batch.rows.zeros
        if ledger.growth.is_bounded:
            first = np.minimum(ledger.growth.first_needed(batch.before) // batch.block_size, batch.columns)
        return batch.buffers.shown(ledger.name, ledger.table, batch.rows.slots, first, batch.columns)

    def _put(self, what: str, values: Array, dtype: type = np.int32) -> Tensor:
        return self._batch.buffers.put(self._named(what), values, dtype)

    def _named(self, what: str) -> str:
        self._batch.check_current()
        return f"{what} of {self._ledger.name}"


class BatchSource(Protocol):
    """What a batch needs of its cache."""

    num_moves: int
    num_stopped: int
    block_size: int

    has_states: bool

    def state_rows(self, slots: Array) -> Ids: ...

    def layer_view(self, batch: Batch, index: int) -> LayerView: ...


_ARRAYS = frozenset(name for name in vars(GroupArrays) if not name.startswith("_"))


class LayerView:
    """What one layer's kernels need for one step: its pools, its group's arrays, and who the tokens belong to.

    ``view["k"]`` is a field of the layer's blocks ``[blocks, rows, *shape]`` or of its states, by ``state_indices``.
    ``slot_table``: int32 ``[slots + 1, columns]``, the group's block table by request slot (None: a layer without blocks).
    Valid until the next ``KVCache.batch`` or the close of one of its sequences; makes no copies.
    """

    def __init__(
        self,
        batch: Batch,
        layer: Layer,
        blocks: Pool | None,
        state: Pool | None,
        group: tuple[BlockGroup, DeviceTable] | None,
    ) -> None:
        self.layer, self.blocks, self.state = layer, blocks, state
        self.step, self.state_indices, self.qo_indptr = batch.step, batch.state_indices, batch.qo_indptr
        self.block_size = batch.block_size
        self._arrays = None if group is None else batch.arrays(*group)
        self.slot_table = None if group is None else group[1].tensor

    @property
    def arrays(self) -> GroupArrays:
        """The group's index arrays. Raises BadInput for a layer that keeps nothing per token."""
        if self._arrays is None:
            raise BadInput(f"layer {self.layer.index} ({self.layer.label}) keeps no blocks, so it has no block table")
        return self._arrays

    def __getattr__(self, name: str) -> Tensor:
        if name in _ARRAYS:
            found: Tensor = getattr(self.arrays, name)
            return found
        raise AttributeError(name)

    def __getitem__(self, field: str) -> Tensor:
        pool = self.blocks if self.blocks is not None and field in self.blocks.fields else self.state
        if pool is None:
            raise BadInput(f"layer {self.layer.index} ({self.layer.label}) keeps no field {field!r}")
        return pool[field]

    def handle(self) -> LayerCacheHandle:
        """The handle of a compressed-attention layer. Raises BadInput for any other kind."""
        return LayerCacheHandle.of(self)


class Batch:
    """A step over ``sequences`` that computes ``rows.counts[i]`` tokens after the first ``before[i]`` of each, int64 ``[B]``;
    there is room for them. Its arrays lie in ``buffers``. Made by ``KVCache.batch`` and ``PersistentBatch.extend``."""

    def __init__(
        self, cache: BatchSource, buffers: StepBuffers, sequences: Many[Sequence], rows: StepRows, before: Array
    ) -> None:
        buffers.number += 1
        self._cache, self._sequences, self._current = cache, sequences, (buffers.number, cache.num_moves)
        self._stopped, self.block_size = cache.num_stopped, cache.block_size
        self.buffers, self.rows, self.before = buffers, rows, before
        positions = before if rows.one_each else before[rows.row_of] + rows.offsets
        self.token_columns, self.within = np.divmod(positions, self.block_size)
        last_column, last_within = self.token_columns, self.within
        if not rows.one_each:
            last_column, last_within = last_column[rows.last], last_within[rows.last]
        self.lengths, self.columns, self.last_page_len = before + rows.counts, last_column + 1, last_within + 1
        for column in (self.lengths, self.columns, self.last_page_len):
            column[rows.num_sequences :] = 0
        self.qo_indptr = buffers.put("qo_indptr", rows.indptr)
        states = cache.state_rows(rows.slots) if cache.has_states else rows.zeros
        self.state_indices = buffers.put("state_indices", states)
        self.step = Step(
            buffers.put("request_slots", rows.slot_of),
            buffers.put("positions", positions),
            buffers.put("request_ids", rows.row_of),
            buffers.put("state_rows", states if rows.one_each else states[rows.row_of]),
        )
        self._arrays: dict[str, GroupArrays] = {}

    @property
    def positions(self) -> Tensor:
        """int32 ``[T]``: the position of each new token."""
        return self.step.positions

    def layer(self, index: int) -> LayerView:
        """Views and index arrays of layer ``index`` (of its owner, if it shares one). Raises BadInput, StaleHandle."""
        self.check_current()
        return self._cache.layer_view(self, index)

    def check_current(self) -> None:
        """Raises StaleHandle when the batch is over."""
        is_newest = self._current == (self.buffers.number, self._cache.num_moves)
        stopped = self._stopped
        if not is_newest or (
            stopped != self._cache.num_stopped and not all(s.runs_since(stopped) for s in self._sequences)
        ):
            raise StaleHandle(
                "this batch is over: a newer one was made, or one of its sequences was closed or suspended"
            )

    def arrays(self, ledger: BlockGroup, table: DeviceTable) -> GroupArrays:
        """The index arrays of one group, shared by its layers; brings the group's table on the device up to date."""
        if ledger.name not in self._arrays:
            self._arrays[ledger.name] = GroupArrays(self, ledger)
            table.upload()
        return self._arrays[ledger.name]
