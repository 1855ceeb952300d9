"""One step's index arrays, in static buffers, in the spellings that attention kernels take."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property
from typing import Any

import numpy as np

from kvpagoda.batch.step import Step, StepRows
from kvpagoda.batch.step_buffers import StepBuffers
from kvpagoda.batch.table_snapshot import Array, TableSnapshot
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.cache.core import Core
from kvpagoda.cache.request import Request, State
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.schema import Layer, Schema


class GroupArrays:
    """One group's index arrays for one step of ``B`` rows (padded rows last) and ``T`` new tokens; each is made when it is
    first asked for, in a static buffer. Raises StaleHandle when the batch is over.

    ``cache_seqlens`` counts the new tokens too: write them by ``slot_mapping``, then attend. A window group's
    ``kv_indices`` start at the first block that the row's first new token still reads, ``kv_start`` is that block's
    first position; earlier cells of ``block_table`` are 0.
    """

    def __init__(self, batch: Batch, group: BlockGroup) -> None:
        self._batch, self._group = batch, group

    @cached_property
    def block_table(self) -> Any:
        """int32 ``[B, columns]``: block ids (FlashAttention's page table); cells past a row's last block hold no meaning."""
        return self._batch.buffers.put_rows(self._named("block_table"), self._group.table, self._shown)

    @cached_property
    def cache_seqlens(self) -> Any:
        """int32 ``[B]``: tokens of the row after this step; 0 for padded rows."""
        return self._put("cache_seqlens", self._batch.lengths)

    @cached_property
    def slot_mapping(self) -> Any:
        """int32 ``[T]`` (int64 where it could pass 2^31): block id times block_size plus row; padded tokens map to 0."""
        batch, size = self._batch, self._batch.block_size
        wide = np.int64 if self._group.plan.num_rows * size >= 2**31 else np.int32
        if batch.rows.one_each:
            cells = self._shown.last_cells(self._group.table)
        else:
            cells = self._group.table.cells[batch.rows.slot_of, batch.token_columns].astype(np.int64)
        return self._put("slot_mapping", cells * size + batch.within, wide)

    @cached_property
    def kv_indptr(self) -> Any:
        """int32 ``[B + 1]``: where each row's part of ``kv_indices`` starts (FlashInfer)."""
        return self._put("kv_indptr", self._shown.starts)

    @cached_property
    def kv_indices(self) -> Any:
        """int32 ``[kv_indptr[-1]]``: block ids of all rows, one behind another. Where blocks were added since the last step,
        O(all that lie behind): ask for it only if it is used."""
        return self._batch.buffers.put_runs(self._named("kv_indices"), self._group.table, self._shown)

    @cached_property
    def kv_last_page_len(self) -> Any:
        """int32 ``[B]``: rows in use of each row's last block; 0 for padded rows."""
        return self._put("kv_last_page_len", self._batch.last_page_len)

    @cached_property
    def kv_start(self) -> Any:
        """int32 ``[B]``: position of the first row of the first block in ``kv_indices``."""
        return self._put("kv_start", self._shown.first * self._batch.block_size)

    @cached_property
    def _shown(self) -> TableSnapshot:
        batch, group = self._batch, self._group
        first = batch.rows.zeros
        if group.growth.is_bounded:
            first = np.minimum(group.growth.first_needed(batch.before) // batch.block_size, batch.columns)
        return batch.buffers.snapshot(group.name, group.table, batch.rows.slots, first, batch.columns)

    def _put(self, what: str, values: Array, dtype: type = np.int32) -> Any:
        return self._batch.buffers.put(self._named(what), values, dtype)

    def _named(self, what: str) -> str:
        self._batch.check_current()
        return f"{what} of {self._group.name}"


_ARRAYS = frozenset(name for name in vars(GroupArrays) if not name.startswith("_"))


class LayerView:
    """What one layer's kernels need for one step: its memory, its group's arrays, and who the tokens belong to.

    ``view["k"]`` is a field of the layer's blocks ``[blocks, rows, *shape]`` or of its states, by ``state_indices``.
    ``blocks`` and ``state``: their pools, None for what the layer does not keep. Valid until the next ``KVCache.batch`` or the
    close of one of its sequences; makes no copies.
    """

    def __init__(self, batch: Batch, layer: Layer, group: BlockGroup | None) -> None:
        self.layer, self.block_size = layer, batch.block_size
        self.blocks, self.state = batch.core.memory.pools(layer)
        self.step, self.state_indices, self.qo_indptr = batch.step, batch.state_indices, batch.qo_indptr
        self._arrays = None if group is None else batch.arrays(group)

    @property
    def arrays(self) -> GroupArrays:
        """The group's index arrays. Raises BadInput for a layer that keeps nothing per token."""
        if self._arrays is None:
            raise BadInput(f"layer {self.layer.index} ({self.layer.label}) keeps no blocks, so it has no block table")
        return self._arrays

    def __getattr__(self, name: str) -> Any:
        if name in _ARRAYS:
            return getattr(self.arrays, name)
        raise AttributeError(name)

    def __getitem__(self, field: str) -> Any:
        pool = self.blocks if self.blocks is not None and field in self.blocks.fields else self.state
        if pool is None or field not in pool.fields:
            fields = [*(self.blocks.fields if self.blocks else ()), *(self.state.fields if self.state else ())]
            raise BadInput(
                f"layer {self.layer.index} ({self.layer.label}) has no field {field!r} in memory; it has {fields}"
            )
        return pool[field]


class Batch:
    """A step of ``requests`` that computes ``rows.counts[i]`` tokens after the first ``before[i]`` of each, int64 ``[B]``;
    there is room for them. Its arrays lie in ``buffers``. Made by ``KVCache.batch`` and ``PersistentBatch.extend``."""

    def __init__(
        self,
        core: Core,
        buffers: StepBuffers,
        schema: Schema,
        requests: Many[Request],
        rows: StepRows,
        before: Array,
    ) -> None:
        buffers.number += 1
        self.core, self._schema, self._requests = core, schema, requests
        self._current = buffers.number, core.capacity.num_moves
        self._stopped, self.block_size = core.counters.stopped, core.block_size
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
        states = rows.zeros if core.states is None else core.state_rows(rows.slots)
        self.state_indices = buffers.put("state_indices", states)
        self.step = Step(
            buffers.put("request_slots", rows.slot_of),
            buffers.put("positions", positions),
            buffers.put("request_ids", rows.row_of),
            buffers.put("state_rows", states if rows.one_each else states[rows.row_of]),
            is_by_id=True,
        )
        self._arrays: dict[str, GroupArrays] = {}

    @property
    def positions(self) -> Any:
        """int32 ``[T]``: the position of each new token."""
        return self.step.positions

    def layer(self, index: int) -> LayerView:
        """Views and index arrays of layer ``index`` (of its owner, if it shares one). Raises BadInput, StaleHandle."""
        self.check_current()
        layer = self._schema.owner_of(index)
        return LayerView(self, layer, next((one for one in self.core.groups if one.growth == layer.growth), None))

    def check_current(self) -> None:
        """Raises StaleHandle when the batch is over."""
        core, stopped = self.core, self._stopped
        is_newest = self._current == (self.buffers.number, core.capacity.num_moves)
        if not is_newest or (
            stopped != core.counters.stopped
            and not all(one.state is State.RUNNING and one.resumed_at <= stopped for one in self._requests)
        ):
            raise StaleHandle(
                "this batch is over: a newer one was made, or one of its sequences was closed or suspended"
            )

    def arrays(self, group: BlockGroup) -> GroupArrays:
        """The index arrays of one group, shared by its layers."""
        if group.name not in self._arrays:
            self._arrays[group.name] = GroupArrays(self, group)
        return self._arrays[group.name]
