"""One step's index arrays, in static buffers, in the spellings that attention kernels take."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

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

    def _buffer(self, name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = self._buffers.get(name)
        if found is None or found[0].shape[0] < rows:
            on_gpu = self.device.type != "cpu"
            shape = (1 << max(6, (rows - 1).bit_length()), width)
            host = torch.zeros(shape, dtype=dtype)
            found = self._buffers[name] = (host, torch.zeros_like(host, device=self.device) if on_gpu else host)
        return found


@dataclass(frozen=True)
class GroupArrays:
    """One group's index arrays for one step of ``B`` rows (padded rows last) and ``T`` new tokens.

    ``cache_seqlens`` counts the new tokens too: write them by ``slot_mapping``, then attend. A window group's
    ``kv_indices`` start at the first block that the row's first new token still reads, ``kv_start`` is that block's
    first position; earlier cells of ``block_table`` are 0.
    """

    block_table: Tensor
    """int32 ``[B, columns]``: block ids (FlashAttention's page table); cells past a row's last block hold no meaning."""
    cache_seqlens: Tensor
    """int32 ``[B]``: tokens of the row after this step; 0 for padded rows."""
    slot_mapping: Tensor
    """int32 ``[T]`` (int64 where it could pass 2^31): block id times block_size plus row; padded tokens map to 0."""
    kv_indptr: Tensor
    """int32 ``[B + 1]``: where each row's part of ``kv_indices`` starts (FlashInfer)."""
    kv_indices: Tensor
    """int32 ``[kv_indptr[-1]]``: block ids of all rows, one behind another."""
    kv_last_page_len: Tensor
    """int32 ``[B]``: rows in use of each row's last block; 0 for padded rows."""
    kv_start: Tensor
    """int32 ``[B]``: position of the first row of the first block in ``kv_indices``."""


class BatchSource(Protocol):
    """What a batch needs of its cache."""

    buffers: StepBuffers
    batch_number: int
    num_closed: int
    block_size: int
    dummy_slot: int

    def layer_view(self, batch: Batch, index: int) -> LayerView: ...


class LayerView:
    """What one layer's kernels need for one step: its pools, its group's arrays, and who the tokens belong to.

    ``view["k"]`` is a field of the layer's blocks ``[blocks, rows, *shape]`` or of its state rows ``[slots + 1, ...]``.
    Valid until the next ``KVCache.batch`` or the close of one of its sequences; makes no copies.
    """

    def __init__(
        self,
        batch: Batch,
        layer: Layer,
        blocks: Pool | None,
        state: Pool,
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
        if name in GroupArrays.__dataclass_fields__:
            found: Tensor = getattr(self.arrays, name)
            return found
        raise AttributeError(name)

    def __getitem__(self, field: str) -> Tensor:
        if self.blocks is not None and field in self.blocks.fields:
            return self.blocks[field]
        return self.state[field]

    def handle(self) -> LayerCacheHandle:
        """The handle of a compressed-attention layer. Raises BadInput for any other kind."""
        kind = next((kind for kind in self.layer.kinds if isinstance(kind, Compressed)), None)
        if kind is None:
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
        self._slots, self._before, self._padding = slots, before, padding
        self._lengths = np.where(slots < 0, 0, before + counts)
        indptr = np.concatenate(([0], np.cumsum(counts)))
        self._row_of = np.repeat(np.arange(rows), counts)
        self._positions = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - before, counts)
        put = cache.buffers.put
        token_slots = slots[self._row_of].astype(np.int32)
        self.qo_indptr = put("qo_indptr", indptr.astype(np.int32))
        self.state_indices = put("state_indices", np.where(slots < 0, cache.dummy_slot, slots).astype(np.int32))
        self.step = Step(
            put("request_slots", token_slots),
            put("positions", self._positions.astype(np.int32)),
            put("request_ids", self._row_of.astype(np.int32)),
        )
        self._arrays: dict[str, GroupArrays] = {}

    @property
    def positions(self) -> Tensor:
        """int32 ``[T]``: the position of each new token."""
        return self.step.positions

    def layer(self, index: int) -> LayerView:
        """Views and index arrays of layer ``index`` (of its owner, if it shares one). Raises BadInput, StaleHandle."""
        is_newest = self._number == self._cache.batch_number
        if not is_newest or (self._closed != self._cache.num_closed and not all(s.is_open for s in self._sequences)):
            raise StaleHandle("this batch is over: a newer one was made, or one of its sequences was closed")
        return self._cache.layer_view(self, index)

    def arrays(self, ledger: GroupLedger, table: DeviceTable) -> GroupArrays:
        """The index arrays of one group, computed once a step; brings the group's table on the device up to date."""
        if ledger.name not in self._arrays:
            self._arrays[ledger.name] = self._make_arrays(ledger)
            table.upload()
        return self._arrays[ledger.name]

    def _make_arrays(self, ledger: GroupLedger) -> GroupArrays:
        size, lengths = self.block_size, self._lengths
        columns = -(-lengths // size)
        table = ledger.table.cells[self._slots, : int(columns.max())]
        first = np.array([ledger.growth.first_needed(int(n)) for n in self._before], np.int64) // size
        first = np.minimum(first, columns)
        counts = columns - first
        indptr = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - first, counts)
        wide = np.int64 if ledger.plan.num_rows * size >= 2**31 else np.int32
        is_padding = self._row_of >= len(lengths) - self._padding
        cells = table[self._row_of, np.where(is_padding, 0, self._positions // size)].astype(np.int64)
        mapping = np.where(is_padding, 0, cells * size + self._positions % size)

        def put(what: str, values: Array, dtype: type = np.int32, width: int = 1) -> Tensor:
            return self._cache.buffers.put(f"{what} of {ledger.name}", values.astype(dtype), width)

        return GroupArrays(
            block_table=put("block_table", table, width=ledger.table.cells.shape[1]),
            cache_seqlens=put("cache_seqlens", lengths),
            slot_mapping=put("slot_mapping", mapping, wide),
            kv_indptr=put("kv_indptr", indptr),
            kv_indices=put("kv_indices", table[rows, within]),
            kv_last_page_len=put("kv_last_page_len", np.where(lengths > 0, (lengths - 1) % size + 1, 0)),
            kv_start=put("kv_start", first * size),
        )
