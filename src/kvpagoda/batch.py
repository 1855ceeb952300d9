"""One step's index arrays, in static buffers, in the spellings that attention kernels take."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from kvpagoda.alloc import BlockTable
from kvpagoda.alloc.held import Ids
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.ledger import GroupLedger
from kvpagoda.schema import Compressed, Layer
from kvpagoda.sequence import Sequence
from kvpagoda.storage.handle import LayerCacheHandle, Step
from kvpagoda.storage.pool import Pool
from kvpagoda.storage.tables import DeviceTable

Tensor = torch.Tensor
Array = np.ndarray[Any, np.dtype[Any]]


class StepBuffers:
    """Device tensors with fixed addresses, one for each name; they move only if a step is larger than any before.

    The host's side is not page-locked: a copy from such memory has read its source when it returns, so that the next step
    may fill it while this one still runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self._shown: dict[str, tuple[Array, Array]] = {}  # slots and versions of the rows that a buffer holds
        self._addresses: dict[str, int] = {}

    def put(self, name: str, values: Array, width: int = 1) -> Tensor:
        """Copy ``values`` ``[n, ...]`` into the buffer of that name; returns the part of it that holds them.

        A matrix is copied to the left of rows of ``width``, whose stride never changes; cells further right keep what
        earlier steps left there, and the result is ``[n, width]``.
        """
        source = torch.from_numpy(np.ascontiguousarray(values)).reshape(len(values), -1)
        host, target = self._buffer(name, len(values), max(width, source.shape[1]), source.dtype)
        host[: len(values), : source.shape[1]] = source
        if target is not host:
            target[: len(values)].copy_(host[: len(values)])
        filled = target[: len(values)]
        return filled if values.ndim == 2 else filled[:, 0]

    def put_rows(self, name: str, table: BlockTable, slots: Array, columns: int) -> Tensor:
        """The first ``columns`` cells of the rows ``slots`` of ``table``: int32 ``[n, columns]``, a part of a buffer as wide
        as the table. Rows that hold what they held the last time are not copied again. O(rows + cells copied)."""
        width = table.cells.shape[1]
        host, target = self._buffer(name, len(slots), width, torch.int32)
        versions = table.version[slots]
        shown_slots, shown = self._shown.get(name, (slots[:0], versions[:0]))
        n = min(len(shown), len(slots))
        stale = np.ones(len(slots), np.bool_)
        if target.data_ptr() == self._addresses.get(name):
            stale[:n] = (shown_slots[:n] != slots[:n]) | (shown[:n] != versions[:n])
        rows = np.flatnonzero(stale)
        if len(rows):
            host.numpy()[rows] = table.cells[slots[rows]]
            if target is not host:
                for row in rows.tolist():
                    target[row].copy_(host[row])
        kept = len(slots) if len(slots) >= len(shown) else len(shown)
        merged_slots, merged = np.full(kept, -2, np.int64), np.zeros(kept, np.int64)
        merged_slots[: len(shown)], merged[: len(shown)] = shown_slots, shown
        merged_slots[: len(slots)], merged[: len(slots)] = slots, versions
        self._shown[name], self._addresses[name] = (merged_slots, merged), target.data_ptr()
        return target[: len(slots), :columns]

    def _buffer(self, name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = self._buffers.get(name)
        if found is None or found[0].shape[0] < rows:
            on_gpu = self.device.type != "cpu"
            shape = (1 << max(6, (rows - 1).bit_length()), width)
            host = torch.zeros(shape, dtype=dtype)
            found = self._buffers[name] = (host, torch.zeros_like(host, device=self.device) if on_gpu else host)
        return found


class GroupArrays:
    """One group's index arrays for one step of ``B`` rows (padded rows last) and ``T`` new tokens; each is made when it is
    first asked for, in a static buffer. Raises StaleHandle when the batch is over.

    ``cache_seqlens`` counts the new tokens too: write them by ``slot_mapping``, then attend. A window group's
    ``kv_indices`` start at the first block that the row's first new token still reads, ``kv_start`` is that block's
    first position; earlier cells of ``block_table`` are 0.
    """

    def __init__(self, batch: Batch, ledger: GroupLedger) -> None:
        self._batch, self._ledger = batch, ledger
        self._columns = -(-batch.lengths // batch.block_size)

    @cached_property
    def block_table(self) -> Tensor:
        """int32 ``[B, columns]``: block ids (FlashAttention's page table); cells past a row's last block hold no meaning."""
        return self._batch.table_rows(self._ledger, int(self._columns.max()))

    @cached_property
    def cache_seqlens(self) -> Tensor:
        """int32 ``[B]``: tokens of the row after this step; 0 for padded rows."""
        return self._put("cache_seqlens", self._batch.lengths)

    @cached_property
    def slot_mapping(self) -> Tensor:
        """int32 ``[T]`` (int64 where it could pass 2^31): block id times block_size plus row; padded tokens map to 0."""
        batch, size = self._batch, self._batch.block_size
        wide = np.int64 if self._ledger.plan.num_rows * size >= 2**31 else np.int32
        columns, within = np.divmod(np.where(batch.is_padding, 0, batch.host_positions), size)
        cells = self._ledger.table.cells[batch.slots[batch.row_of], columns].astype(np.int64)
        return self._put("slot_mapping", np.where(batch.is_padding, 0, cells * size + within), wide)

    @cached_property
    def kv_indptr(self) -> Tensor:
        """int32 ``[B + 1]``: where each row's part of ``kv_indices`` starts (FlashInfer)."""
        return self._put("kv_indptr", self._indptr)

    @cached_property
    def kv_indices(self) -> Tensor:
        """int32 ``[kv_indptr[-1]]``: block ids of all rows, one behind another. O(blocks): ask for it only if it is used."""
        cells, slots = self._ledger.table.cells, self._batch.slots.tolist()
        parts = zip(slots, self._first.tolist(), self._columns.tolist())
        return self._put("kv_indices", np.concatenate([cells[slot, first:end] for slot, first, end in parts]))

    @cached_property
    def kv_last_page_len(self) -> Tensor:
        """int32 ``[B]``: rows in use of each row's last block; 0 for padded rows."""
        lengths = self._batch.lengths
        return self._put("kv_last_page_len", np.where(lengths > 0, (lengths - 1) % self._batch.block_size + 1, 0))

    @cached_property
    def kv_start(self) -> Tensor:
        """int32 ``[B]``: position of the first row of the first block in ``kv_indices``."""
        return self._put("kv_start", self._first * self._batch.block_size)

    @cached_property
    def _first(self) -> Array:
        needed = np.array([self._ledger.growth.first_needed(n) for n in self._batch.before.tolist()], np.int64)
        first: Array = np.minimum(needed // self._batch.block_size, self._columns)
        return first

    @cached_property
    def _indptr(self) -> Array:
        starts: Array = np.concatenate(([0], np.cumsum(self._columns - self._first)))
        return starts

    def _put(self, what: str, values: Array, dtype: type = np.int32) -> Tensor:
        return self._batch.put(f"{what} of {self._ledger.name}", values.astype(dtype, copy=False))


class BatchSource(Protocol):
    """What a batch needs of its cache."""

    buffers: StepBuffers
    batch_number: int
    num_closed: int
    block_size: int

    def state_rows(self, slots: Array) -> Ids: ...

    def layer_view(self, batch: Batch, index: int) -> LayerView: ...


_ARRAYS = frozenset(name for name in vars(GroupArrays) if not name.startswith("_"))


class LayerView:
    """What one layer's kernels need for one step: its pools, its group's arrays, and who the tokens belong to.

    ``view["k"]`` is a field of the layer's blocks ``[blocks, rows, *shape]`` or of its states, by ``state_indices``.
    Valid until the next ``KVCache.batch`` or the close of one of its sequences; makes no copies.
    """

    def __init__(
        self,
        batch: Batch,
        layer: Layer,
        blocks: Pool | None,
        state: Pool | None,
        group: tuple[GroupLedger, DeviceTable] | None,
    ) -> None:
        self.layer, self.blocks, self.state = layer, blocks, state
        self.step, self.state_indices, self.qo_indptr = batch.step, batch.state_indices, batch.qo_indptr
        self.block_size = batch.block_size
        self._arrays = None if group is None else batch.arrays(*group)
        self._slot_table = None if group is None else group[1].tensor

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
        kind = next((kind for kind in self.layer.kinds if isinstance(kind, Compressed)), None)
        if kind is None or self.state is None:
            raise BadInput(f"layer {self.layer.index} ({self.layer.label}) has no compressed attention")
        return LayerCacheHandle(kind, self.blocks, self.state, self._slot_table, self.step)


class Batch:
    """A step over ``sequences``, ``new_tokens[i]`` tokens each, with room already made. Made by ``KVCache.batch``."""

    def __init__(
        self, cache: BatchSource, sequences: Many[Sequence], new_tokens: Many[int], pad_to: int | None
    ) -> None:
        if len(sequences) != len(new_tokens) or not sequences or min(new_tokens) < 1:
            raise BadInput(f"{len(sequences)} sequences need as many positive new_tokens, got {list(new_tokens)[:16]}")
        if pad_to is not None and pad_to < len(sequences):
            raise BadInput(f"pad_to={pad_to} is less than the {len(sequences)} sequences of the batch")
        for sequence, new in zip(sequences, new_tokens):
            if sequence.length + new > sequence.room:
                raise BadInput(
                    f"slot {sequence.slot} has room for {sequence.room} tokens, not {sequence.length} + {new}; extend first"
                )
        self._cache, self._number, self._closed = cache, cache.batch_number + 1, cache.num_closed
        self._sequences = tuple(sequences)
        self.block_size = cache.block_size
        rows = pad_to or len(sequences)
        padding = rows - len(sequences)
        slots = np.array([s.slot for s in sequences] + [-1] * padding, np.int64)
        if len(np.unique(slots[: len(sequences)])) != len(sequences):
            raise BadInput("a sequence appears twice in the batch")
        for sequence, new in zip(sequences, new_tokens):
            sequence.written = max(sequence.written, sequence.length + new)
        before = np.array([s.length for s in sequences] + [0] * padding, np.int64)
        counts = np.array([*new_tokens] + [1] * padding, np.int64)
        self.slots, self.before = slots, before
        self.lengths = np.where(slots < 0, 0, before + counts)
        indptr = np.concatenate(([0], np.cumsum(counts)))
        self.row_of = np.repeat(np.arange(rows), counts)
        self.is_padding = self.row_of >= len(sequences)
        self.host_positions = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - before, counts)
        put = cache.buffers.put
        token_slots = slots[self.row_of].astype(np.int32)
        self.qo_indptr = put("qo_indptr", indptr.astype(np.int32))
        states = cache.state_rows(slots)
        self.state_indices = put("state_indices", states)
        self.step = Step(
            put("request_slots", token_slots),
            put("positions", self.host_positions.astype(np.int32)),
            put("request_ids", self.row_of.astype(np.int32)),
            put("state_rows", states[self.row_of]),
        )
        self._arrays: dict[str, GroupArrays] = {}

    @property
    def positions(self) -> Tensor:
        """int32 ``[T]``: the position of each new token."""
        return self.step.positions

    def layer(self, index: int) -> LayerView:
        """Views and index arrays of layer ``index`` (of its owner, if it shares one). Raises BadInput, StaleHandle."""
        self._check_current()
        return self._cache.layer_view(self, index)

    def _check_current(self) -> None:
        is_newest = self._number == self._cache.batch_number
        if not is_newest or (self._closed != self._cache.num_closed and not all(s.is_open for s in self._sequences)):
            raise StaleHandle("this batch is over: a newer one was made, or one of its sequences was closed")

    def put(self, name: str, values: Array) -> Tensor:
        """Copy ``values`` into the static buffer of that name. Raises StaleHandle when the batch is over."""
        self._check_current()
        return self._cache.buffers.put(name, values)

    def table_rows(self, ledger: GroupLedger, columns: int) -> Tensor:
        """The rows of the batch in the table of ``ledger``, as far as ``columns``; copies only what changed since the last
        batch. Raises StaleHandle when the batch is over."""
        self._check_current()
        return self._cache.buffers.put_rows(f"block_table of {ledger.name}", ledger.table, self.slots, columns)

    def arrays(self, ledger: GroupLedger, table: DeviceTable) -> GroupArrays:
        """The index arrays of one group, shared by its layers; brings the group's table on the device up to date."""
        if ledger.name not in self._arrays:
            self._arrays[ledger.name] = GroupArrays(self, ledger)
            table.upload()
        return self._arrays[ledger.name]
