"""One step's index arrays, in static buffers, in the spellings that attention kernels take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np

from kvpagoda.batch.kernel_pages import PagedCells
from kvpagoda.batch.step import Step, StepRows
from kvpagoda.batch.step_buffers import StepBuffers
from kvpagoda.batch.table_snapshot import Array, Cells, TableSnapshot
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.cache.core import Core
from kvpagoda.cache.lifecycle import Lifecycle
from kvpagoda.cache.request import Request, State
from kvpagoda.errors import BadInput, StaleHandle, unknown_name
from kvpagoda.schema import Layer, Schema
from kvpagoda.units import whole_number


class GroupArrays:
    """One group's index arrays for one step of ``B`` rows (padded rows last) and ``T`` new tokens; each is made when it is
    first asked for, in a static buffer. Raises StaleHandle when the batch is over.

    ``cache_seqlens`` counts the new tokens too: write them by ``slot_mapping``, then attend. A window group's
    ``kv_indices`` start at the first block that the row's first new token still reads, ``kv_start`` is that block's
    first position; earlier cells of ``block_table`` are 0. Where the plan has several kernel pages in a block, tables,
    ``kv_indptr`` and ``kv_last_page_len`` are in kernel pages (``batch/kernel_pages.py``).
    """

    def __init__(self, batch: Batch, group: BlockGroup) -> None:
        self._batch, self._group = batch, group

    @cached_property
    def block_table(self) -> Any:
        """int32 ``[B, columns]``: block ids (FlashAttention's page table); cells past a row's last block hold no meaning."""
        name, is_fixed = self._named("block_table"), self._batch.rows.is_fixed
        return self._batch.buffers.put_rows(name, self._cells, self._pages, is_fixed)

    @cached_property
    def cache_seqlens(self) -> Any:
        """int32 ``[B]``: tokens of the row after this step; 0 for padded rows."""
        return self._put("cache_seqlens", self._batch.lengths)

    @cached_property
    def slot_mapping(self) -> Any:
        """int32 ``[T]`` (int64 where it could pass 2^31): block id times block_size plus row; 0 for padded tokens."""
        batch, size = self._batch, self._batch.block_size
        wide = np.int64 if self._group.plan.num_rows * size >= 2**31 else np.int32
        if batch.rows.one_each:
            cells = self._shown.last_cells(self._group.table.cells)
        else:
            cells = self._group.table.cells[batch.rows.slot_of, batch.token_columns].astype(np.int64)
        return self._put("slot_mapping", cells * size + batch.within, wide)

    @cached_property
    def kv_indptr(self) -> Any:
        """int32 ``[B + 1]``: where each row's part of ``kv_indices`` starts (FlashInfer)."""
        return self._put("kv_indptr", self._pages.starts)

    @cached_property
    def kv_indices(self) -> Any:
        """int32 ``[kv_indptr[-1]]``: block ids of all rows, one behind another. Where blocks were added since the last step it
        is made anew, O(all cells), from ``block_table`` by the device itself: ask for it only if it is used."""
        batch, on_device = self._batch, None
        if not batch.buffers.arrays.is_host:
            on_device = self.block_table, self.kv_start, self.kv_indptr, batch.core.plan.kernel_page
        name, is_fixed = self._named("kv_indices"), batch.rows.is_fixed
        return batch.buffers.put_runs(name, self._pages, self._cells, is_fixed, on_device)

    @cached_property
    def kv_last_page_len(self) -> Any:
        """int32 ``[B]``: rows in use of each row's last block; 0 for padded rows."""
        batch, size = self._batch, self._batch.core.plan.kernel_page
        if size == batch.block_size:
            return self._put("kv_last_page_len", batch.last_page_len)
        last = np.where(batch.lengths > 0, batch.lengths - (self._pages.end - 1) * size, 0)
        return self._put("kv_last_page_len", last)

    @cached_property
    def kv_start(self) -> Any:
        """int32 ``[B]``: position of the first row of the first block in ``kv_indices``."""
        return self._put("kv_start", self._shown.first * self._batch.block_size)

    @cached_property
    def _cells(self) -> Cells:
        """The group's table in kernel pages."""
        many, cells = self._group.plan.layout.kernel_pages, self._group.table.cells
        return cells if many == 1 else PagedCells(cells, many)

    @cached_property
    def _pages(self) -> TableSnapshot:
        """What is shown of it."""
        batch, many, shown = self._batch, self._group.plan.layout.kernel_pages, self._shown
        if many == 1:
            return shown
        end, name = -(-batch.lengths * many // batch.block_size), f"{self._group.name} in kernel pages"
        return batch.buffers.snapshot(name, self._group.table.version, shown.slots, shown.first * many, end)

    @cached_property
    def _shown(self) -> TableSnapshot:
        batch, group = self._batch, self._group
        first = batch.rows.zeros
        if group.growth.is_bounded:
            first = np.minimum(group.growth.first_needed(batch.before) // batch.block_size, batch.columns)
        return batch.buffers.snapshot(group.name, group.table.version, batch.rows.slots, first, batch.columns)

    def _put(self, what: str, values: Array, dtype: type = np.int32) -> Any:
        return self._batch.buffers.put(self._named(what), values, dtype)

    def _named(self, what: str) -> str:
        self._batch.check_current()
        return f"{what} of {self._group.name}"


def _of_group(name: str) -> Any:
    """A property of a layer's view: the array of that name of its group."""
    return property(lambda view: getattr(view.arrays, name), doc=getattr(GroupArrays, name).__doc__)


class LayerView:
    """What one layer's kernels need: its memory, and, as part of a batch, its group's arrays and whose the tokens are.

    ``view["k"]`` is a field of the layer's blocks ``[kernel pages, rows, *shape]`` or of its states, by ``state_indices``;
    ``page_size``: tokens of a kernel page, by which fields and tables go. ``blocks`` and ``state``: their pools, None for what
    the layer does not keep; they lie where they lie as long as the cache lives. ``step``, ``qo_indptr``, ``state_indices`` and
    the arrays below: see ``Batch``, valid as long as that is. A view from ``KVCache.layer`` belongs to no batch: there
    ``step`` is None and asking for an array raises BadInput. No copies.
    """

    block_table = _of_group("block_table")
    cache_seqlens = _of_group("cache_seqlens")
    slot_mapping = _of_group("slot_mapping")
    kv_indptr = _of_group("kv_indptr")
    kv_indices = _of_group("kv_indices")
    kv_last_page_len = _of_group("kv_last_page_len")
    kv_start = _of_group("kv_start")

    def __init__(self, core: Core, layer: Layer, batch: Batch | None = None) -> None:
        self.layer, self.block_size, self._batch = layer, core.block_size, batch
        self.page_size = core.plan.kernel_page
        self.blocks, self.state = core.memory.pools(layer)
        self.step: Any = None if batch is None else batch.step
        self.state_indices = None if batch is None else batch.state_indices
        self.qo_indptr = None if batch is None else batch.qo_indptr
        self._group = next((one for one in core.groups if one.growth == layer.growth), None)

    @property
    def arrays(self) -> GroupArrays:
        """The group's index arrays. Raises BadInput for a layer that keeps nothing per token, and without a batch."""
        if self._group is None:
            raise BadInput(f"{self._name} keeps no blocks, so it has no block table")
        if self._batch is None:
            raise BadInput(
                f"this view of {self._name} is of no step; KVCache.batch(...).layer({self.layer.index}) has arrays"
            )
        return self._batch.arrays(self._group)

    def write(self, **rows: Any) -> None:
        """Write the rows of the step's ``T`` new tokens where ``slot_mapping`` says: ``write(k=.., v=..)``, or whatever rows
        the layer's blocks have, each ``[T, *shape]``, or with more axes in place of ``T``. They are encoded as the layer keeps
        them, K and V together where they are packed in one row; what padded tokens have goes to block 0. Nothing is kept from
        call to call, so that a graph may hold it.

        Raises BadInput (no such rows, another shape, rows of several tokens), StaleHandle; nothing is written then.
        """
        slots, pool, size = self.slot_mapping, self.blocks, self.block_size
        assert self._batch is not None
        self._batch.check_current()
        kept = {} if pool is None else pool.rows
        rows = rows if pool is None else pool.joined(rows)
        for name, values in rows.items():
            if name not in kept or kept[name].tokens_per_row > 1:
                raise BadInput(f"{self._name} has no row {name!r} for every token in memory; it has {[*kept]}")
            shape = kept[name].shape
            if values.shape[values.ndim - len(shape) :] != shape or values.numel() != len(slots) * math.prod(shape):
                raise BadInput(
                    f"rows {name!r} of {self._name} are {[len(slots), *shape]}, one for each new token; got {[*values.shape]}"
                )
        for name, values in rows.items():
            pool.write(name, (slots // size, slots % size), values.reshape(len(slots), *kept[name].shape))

    def tensor(self, rows: str) -> Any:
        """The one tensor in which kernels take ``rows`` and what lies beside them, by kernel page or state slot: see
        ``Pool.tensor``. Raises BadInput for rows that are not in memory, or have no such form."""
        pools = [pool for pool in (self.blocks, self.state) if pool is not None and rows in pool]
        if not pools:
            raise BadInput(f"{self._name} has no rows {rows!r} in memory")
        return pools[0].tensor(rows)

    def flat_indices(self, rows: Any, rows_per_page: int | None = None) -> Any:
        """Where chosen rows of the texts lie, as sparse kernels name them: kernel page * rows of a page + row; -1 for none.

        ``rows``: whole numbers ``[T, k]``, of each new token k positions of its text, or with ``rows_per_page`` k of its
        compressed rows, -1 for none; a tensor on the cache's device, or numpy without memory. The result is new and like it.
        Positions that are not kept any more are the caller's to leave out. O(T * k), nothing is read back.
        """
        size, at = rows_per_page or self.page_size, rows.clip(0)
        one = at * 0 + 1  # in the dtype of rows
        is_there = (rows >= 0) * one
        pages = self.block_table[self.step.request_ids[:, None], at // size]
        return (pages * (size * one) + at % size) * is_there + is_there - 1

    def __getitem__(self, field: str) -> Any:
        pool = self.blocks if self.blocks is not None and field in self.blocks.fields else self.state
        if pool is None or field not in pool.fields:
            fields = [*(self.blocks.fields if self.blocks else ()), *(self.state.fields if self.state else ())]
            raise unknown_name(f"field of {self._name}", field, fields)
        return pool[field]

    @property
    def _name(self) -> str:
        return f"layer {self.layer.index} ({self.layer.label})"


class Batch:
    """The index arrays of one step: ``B`` rows, of which the last may be padded, and ``T`` new tokens, row behind row. Made by
    ``KVCache.batch`` and ``PersistentBatch.extend``.

         of the step             shape        what it says
      1  qo_indptr               [B + 1]      where the new tokens of each row begin
      2  positions               [T]          the position of each new token in its text
      3  state_indices           [B]          the record of each row in the state pools; 0 for padded rows
      4  step.request_ids        [T]          the row of each new token
      5  step.request_slots      [T]          the slot of its request; -1 for padded rows
      6  step.state_rows         [T]          state_indices of its row

         of a layer: batch.layer(i), alike for all layers of a group
      7  block_table             [B, columns] block ids                                              FlashAttention
      8  cache_seqlens           [B]          tokens of the row, the new ones included; 0 if padded  FlashAttention
      9  slot_mapping            [T]          where the rows of each new token go                    both, see view.write
     10  kv_indptr               [B + 1]      where each row begins in kv_indices                    FlashInfer
     11  kv_indices              [cells]      block ids, row behind row                              FlashInfer
     12  kv_last_page_len        [B]          rows in use of the last block; 0 if padded             FlashInfer
     13  kv_start                [B]          position of the first row of the first of kv_indices   windows and chunks

    All int32 (9 is int64 in caches of 2^31 rows and more), on the cache's device, or numpy where it has no memory. They lie
    in static buffers and are valid until the next batch; 7 to 13 are made when they are first asked for. A persistent
    batch with ``tokens_per_row`` has the same shapes in every step: then 7 has all columns, 11 all cells that there can be.
    """

    def __init__(
        self,
        core: Core,
        buffers: StepBuffers,
        schema: Schema,
        requests: Many[Request],
        rows: StepRows,
        before: Array,
    ) -> None:
        """``rows.counts[i]`` tokens after the first ``before[i]``, int64 ``[B]``, of each of ``requests``; there is room."""
        buffers.number += 1
        self.core, self._schema, self._requests = core, schema, requests
        self._current = buffers.number, core.capacity.num_moves
        self._stopped, self.block_size = core.counters.stopped, core.block_size
        self.buffers, self.rows, self.before = buffers, rows, before
        positions = before if rows.one_each else before[rows.row_of] + rows.offsets
        self.token_columns = positions // self.block_size
        self.within = positions - self.token_columns * self.block_size  # faster than divmod
        last_column, last_within = self.token_columns, self.within
        if not rows.one_each:
            last_column, last_within = last_column[rows.last], last_within[rows.last]
        self.lengths, self.columns, self.last_page_len = before + rows.counts, last_column + 1, last_within + 1
        if rows.num_sequences < len(before):
            for column in (self.lengths, self.columns, self.last_page_len):
                column[rows.num_sequences :] = 0
        self.qo_indptr = buffers.put("qo_indptr", rows.indptr)
        states = rows.zeros if core.states is None else core.state_rows(rows.slots)
        self.state_indices = buffers.put("state_indices", states)
        slots, positions = buffers.put("request_slots", rows.slot_of), buffers.put("positions", positions)
        ids = buffers.put("request_ids", rows.row_of)
        state_rows = buffers.put("state_rows", states if rows.one_each else states[rows.row_of])
        self.step = Step(slots, positions, ids, state_rows, is_by_id=True)
        self._arrays: dict[str, GroupArrays] = {}

    @property
    def positions(self) -> Any:
        """int32 ``[T]``: the position of each new token."""
        return self.step.positions

    def layer(self, index: int) -> LayerView:
        """Views and index arrays of layer ``index`` (of its owner, if it shares one). Raises BadInput, StaleHandle."""
        self.check_current()
        return LayerView(self.core, self._schema.owner_of(index), self)

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


def batch_of(
    lifecycle: Lifecycle,
    buffers: StepBuffers,
    schema: Schema,
    requests: Many[Request],
    new_tokens: Many[SupportsIndex],
    pad_to: SupportsIndex | None,
) -> Batch:
    """A step of ``requests``; see ``KVCache.batch``. Raises BadInput, StaleHandle."""
    given = new_tokens if isinstance(new_tokens, Iterable) else (new_tokens,)
    counts = [whole_number(n, "new_tokens of a sequence", 1) for n in given]
    if len(requests) != len(counts) or not requests:
        raise BadInput(f"{len(requests)} sequences need as many positive new_tokens, at least one; got {counts[:16]}")
    rows = len(requests) if pad_to is None else whole_number(pad_to, "pad_to", 1)
    if rows < len(requests):
        raise BadInput(f"pad_to={pad_to} is less than the {len(requests)} sequences of the batch")
    if len({*requests}) != len(requests):
        raise BadInput("a sequence appears twice in the batch")
    ends: list[int] = []
    for request, new in zip(requests, counts):
        request.check_running()
        ends.append(request.length + new)
        if ends[-1] > (capacity := lifecycle.capacity_of(request)):
            text = f"slot {request.slot} has room for {capacity} tokens, not {request.length} + {new}; extend first"
            raise BadInput(text)
    padding = rows - len(requests)
    slots = np.array([request.slot for request in requests] + [-1] * padding, np.int64)
    step = StepRows(slots, np.array(counts + [1] * padding, np.int64), len(requests))
    before = np.array(ends + [1] * padding, np.int64) - step.counts
    for request, end in zip(requests, ends):
        if end > request.written:
            request.written = end
    return Batch(lifecycle.core, buffers, schema, requests, step, before)
