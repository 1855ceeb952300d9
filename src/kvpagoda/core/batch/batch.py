"""The index arrays of one step, in static buffers, in the forms that FlashAttention and FlashInfer kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cached_property, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeVar, overload

import numpy as np

from kvpagoda.core.batch.encoder_parts import EncoderParts, PartArrays, part_of
from kvpagoda.core.batch.shared_prefix import SharedPrefix, SharingTree, levels_of, sharing_tree
from kvpagoda.core.batch.step import Step, StepRows
from kvpagoda.core.batch.step_buffers import Cells, PagedCells, StepArray, StepBuffers, TableSnapshot
from kvpagoda.core.blocks.group import BlockGroup, BlockNames
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.request import RequestState, State
from kvpagoda.core.groups.state import Named
from kvpagoda.core.memory.copies import Copies, Noted
from kvpagoda.core.memory.writes import Array
from kvpagoda.errors import BadInput, NeedsReset, StaleHandle, shown, unknown_name
from kvpagoda.layouts.judge import judge
from kvpagoda.schema import Layer, Schema
from kvpagoda.schema.kernel_forms import rows_named
from kvpagoda.text import in_brackets
from kvpagoda.units import MOST, items_of, whole_number

if TYPE_CHECKING:
    from torch import Tensor

S = TypeVar("S", bound="Batch | GroupArrays")
T = TypeVar("T")
ROW_BITS = 20
"""A step has fewer than 2^20 rows: a thousand times what engines run at once."""
_LEVEL_BITS = 10


def _sent_together(make: Callable[[S], T]) -> Callable[[S], T]:
    """Let a property of a ``Batch`` or its ``GroupArrays`` be made by ``make`` when it is read; with a device, with the batch
    if it is expected to be read (``StepBuffers``), else it is sent by itself."""
    name = make.__name__

    @wraps(make)
    def read(of: S) -> T:
        of.check_current()
        buffers = of.buffers
        if buffers.arrays.is_host:
            return make(of)
        array = of._group, name
        if array in buffers.made:
            made: T = buffers.made.pop(array)
            return made
        try:
            found = make(of)
            buffers.send()
        except BaseException:
            buffers.forget()
            raise
        buffers.expected[array] = make
        return found

    return read


class GroupArrays:
    """The index arrays of one group for one step of ``B`` rows (padded rows last) and ``T`` new tokens. Made by ``Batch``.

    Each array is built on first access or before, in a static buffer, and is valid until the next batch. Accessing one
    for the first time after that raises StaleHandle.

    ``cache_seqlens`` counts the new tokens too: write their rows by ``slot_mapping`` first, then run attention. In a
    window group ``kv_indices`` start at the first block that the row's first new token still reads. ``kv_start`` is the
    first position of that block, and the cells of ``block_table`` before it are 0. If the plan divides a block into
    several kernel pages, ``block_table``, ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len`` are in kernel pages
    instead of blocks (``PagedCells``).
    """

    def __init__(self, batch: Batch, group: BlockGroup) -> None:
        self._batch, self._group, self.buffers = batch, group, batch.buffers
        self.check_current = batch.check_current

    @cached_property
    @_sent_together
    def block_table(self) -> StepArray:
        """int32 ``[B, columns]``: block ids (FlashAttention's page table). Cells after a row's end are undefined."""
        name, is_fixed = self._named("block_table"), self._batch.rows.is_fixed
        return self.buffers.put_rows(name, self._cells, self._pages, is_fixed)

    @cached_property
    @_sent_together
    def cache_seqlens(self) -> StepArray:
        """int32 ``[B]``: number of tokens of each row after this step; 0 for padded rows."""
        return self._put("cache_seqlens", self._batch.lengths)

    @cached_property
    @_sent_together
    def slot_mapping(self) -> StepArray:
        """int32 ``[T]``: for each new token, ``block id * block_size + row of the block``; 0 for padded tokens.

        int64 if the group has 2^31 rows or more.
        """
        batch, size = self._batch, self._batch.block_size
        wide = np.int64 if self._group.plan.num_rows * size >= 2**31 else np.int32
        if batch.rows.one_each:
            cells = self._shown.last_cells(self._group.table.cells)
        else:
            cells = self._group.table.cells[batch.rows.slot_of, batch.token_columns].astype(np.int64)
        return self._put("slot_mapping", cells * size + batch.within, wide)

    @cached_property
    @_sent_together
    def kv_indptr(self) -> StepArray:
        """int32 ``[B + 1]``: where each row's part of ``kv_indices`` starts (FlashInfer)."""
        return self._put("kv_indptr", self._pages.starts)

    @cached_property
    def kv_indices(self) -> StepArray:
        """int32 ``[kv_indptr[-1]]``: the block ids of all rows, one row after another (FlashInfer).

        If blocks were added since the last step, the whole array is rebuilt, O(all cells); with a device, the device
        rebuilds it from ``block_table``. Access it only if the kernels need it.
        """
        self.check_current()
        batch, on_device = self._batch, None
        if not self.buffers.arrays.is_host:
            on_device = self.block_table, self.kv_start, self.kv_indptr, batch.core.plan.kernel_page
        name, is_fixed = self._named("kv_indices"), batch.rows.is_fixed
        return self.buffers.put_runs(name, self._pages, self._cells, is_fixed, on_device)

    @cached_property
    @_sent_together
    def kv_last_page_len(self) -> StepArray:
        """int32 ``[B]``: number of tokens in the last block of each row; 0 for padded rows (FlashInfer)."""
        return self._put("kv_last_page_len", self._last_page_len)

    @cached_property
    @_sent_together
    def kv_start(self) -> StepArray:
        """int32 ``[B]``: for each row, the position of the first token of its first block in ``kv_indices``."""
        return self.buffers.put(self._named("kv_start"), self._shown.first, times=self._batch.block_size)

    def shared_prefix(self, num_levels: int) -> SharedPrefix:
        """Return what the rows share; see ``Batch.shared_prefix``.

        Args:
            num_levels: of the cascade, from 1.
        """
        self.check_current()
        batch, tree, on_host = self._batch, self._sharing_tree, self.buffers.arrays.on_host
        slots, counts, indptr = batch.rows.slots, batch.rows.counts, batch.rows.indptr
        page_size = batch.core.plan.kernel_page
        levels = levels_of(tree, self._cells, slots, counts, self._last_page_len, page_size, num_levels)
        order: StepArray | None = None
        if (tree.order[1:] < tree.order[:-1]).any():
            counts = counts[tree.order]
            offsets = np.arange(indptr[-1]) - np.repeat(np.cumsum(counts) - counts, counts)
            order = self._put("order", np.repeat(indptr[tree.order], counts) + offsets)
            if not self.buffers.arrays.is_host:
                self.buffers.send()
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len = ([on_host(one) for one in each] for each in zip(*levels))
        return SharedPrefix(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, order)

    def encoder_parts(self, tokens: Array, begin: Array) -> EncoderParts:
        """Return the two parts of the rows; see ``Batch.encoder_parts``.

        Args:
            tokens: int64 ``[B]``, positions of the input of each row's encoder; 0 for padded rows.
            begin: int64 ``[B]``, where the decoder's text begins: ``tokens``, up to a whole block.
        """
        self.check_current()
        batch, page_size = self._batch, self._batch.core.plan.kernel_page
        num_columns = self._cells.shape[1] if batch.rows.is_fixed else None
        parts: list[PartArrays] = []
        for name, first, lengths in (("cross", begin * 0, tokens), ("own", begin, batch.lengths - begin)):
            arrays = part_of(self._cells, batch.rows.slots, first // page_size, lengths, page_size, num_columns)
            sent = [self._put(f"{name} {what}", one.ravel()) for what, one in zip(PartArrays._fields, arrays)]
            parts.append(PartArrays(sent[0].reshape(arrays[0].shape), *sent[1:]))
        at = batch.before[batch.rows.row_of] + batch.rows.offsets - begin[batch.rows.row_of]
        found = EncoderParts(parts[0], parts[1], self._put("own positions", at))
        if not self.buffers.arrays.is_host:
            self.buffers.send()
        return found

    @cached_property
    def _sharing_tree(self) -> SharingTree:
        """Which of the kernel pages that this step shows its rows share. A row shares its first page, and those after it,
        only if all of its new tokens read the whole of it, and no page that has one of them."""
        batch, growth, shown = self._batch, self._group.growth, self._pages
        page_size = batch.core.plan.kernel_page
        are_read = growth.first_needed(batch.lengths - 1) <= shown.first * page_size
        most = np.where(are_read, batch.before // page_size, 0)
        return sharing_tree(self._cells, shown, most, is_proven=growth.is_bounded)

    @cached_property
    def _last_page_len(self) -> Array:
        """int64 ``[B]``: see ``kv_last_page_len``."""
        batch, size = self._batch, self._batch.core.plan.kernel_page
        last: Array = batch.last_page_len
        if size == batch.block_size:
            return last
        last = np.where(batch.lengths > 0, batch.lengths - (self._pages.end - 1) * size, 0)
        return last

    @cached_property
    def _cells(self) -> Cells:
        """The cells of the group's block table, in kernel pages."""
        pages_per_block, cells = self._group.plan.layout.kernel_pages, self._group.table.cells
        return cells if pages_per_block == 1 else PagedCells(cells, pages_per_block)

    @cached_property
    def _pages(self) -> TableSnapshot:
        """The range of each row's cells that this step shows, in kernel pages."""
        batch, factor, shown = self._batch, self._group.plan.layout.kernel_pages, self._shown
        if factor == 1:
            return shown
        end, name = -(-batch.lengths * factor // batch.block_size), f"{self._group.name} in kernel pages"
        return self.buffers.snapshot(name, self._group.table.version, shown.slots, shown.first * factor, end)

    @cached_property
    def _shown(self) -> TableSnapshot:
        """The range of each row's cells that this step shows, in blocks."""
        batch, group = self._batch, self._group
        first = batch.rows.zeros
        if group.growth.is_bounded:
            first = np.minimum(group.growth.first_needed(batch.before) // batch.block_size, batch.columns)
            if batch.rows.goes_back:  # to tokens whose windows began before what the row has
                first = np.maximum(first, [group.first[slot] if slot >= 0 else 0 for slot in batch.rows.slots])
        return self.buffers.snapshot(group.name, group.table.version, batch.rows.slots, first, batch.columns)

    def _put(self, what: str, values: Array, dtype: type = np.int32) -> StepArray:
        return self.buffers.put(self._named(what), values, dtype)

    def _named(self, what: str) -> str:
        return f"{what} of {self._group.name}"


class _OfGroup:
    """A property of ``LayerView`` that reads the array ``name`` of the layer's group."""

    def __init__(self, name: str) -> None:
        self._name, self.__doc__ = name, getattr(GroupArrays, name).__doc__

    @overload
    def __get__(self, view: None, owner: type) -> _OfGroup: ...
    @overload
    def __get__(self, view: LayerView, owner: type) -> StepArray: ...
    def __get__(self, view: LayerView | None, owner: type) -> StepArray | _OfGroup:
        if view is None:
            return self
        array: StepArray = getattr(view.arrays, self._name)
        return array


class LayerView:
    """The memory of one layer and, in a batch, the index arrays of its group. Made by ``Batch.layer`` and
    ``KVCache.layer``.

    Nothing is copied. ``view["k"]``: a field of the layer's blocks, ``[kernel pages, rows, *shape]``, or of its states,
    indexed by ``state_indices`` and ``state_writes``. ``page_size``: tokens per kernel page, the unit of fields and
    tables. ``blocks`` and ``state``: the layer's pools, None for a kind that the layer does not keep; their addresses
    do not change while the cache lives.

    ``step``, ``qo_indptr``, ``state_indices`` and the arrays below are described in ``Batch`` and valid as long as the
    batch is. A view from ``KVCache.layer`` belongs to no batch: its ``step`` is None, and accessing an index array
    raises BadInput.
    """

    block_table = _OfGroup("block_table")
    cache_seqlens = _OfGroup("cache_seqlens")
    slot_mapping = _OfGroup("slot_mapping")
    kv_indptr = _OfGroup("kv_indptr")
    kv_indices = _OfGroup("kv_indices")
    kv_last_page_len = _OfGroup("kv_last_page_len")
    kv_start = _OfGroup("kv_start")

    def __init__(self, core: Core, layer: Layer, batch: Batch | None = None) -> None:
        self.layer, self.block_size, self._batch = layer, core.block_size, batch
        self.page_size = core.plan.kernel_page
        self.blocks, self.state = core.memory.pools(layer)
        self.step: Step | None = None if batch is None else batch.step
        self.state_indices: StepArray | None = None if batch is None else batch.state_indices
        self.qo_indptr: StepArray | None = None if batch is None else batch.qo_indptr
        self._has_memory = core.memory.has_memory
        self._group = next((group for group in core.groups if group.growth == layer.growth), None)

    @in_brackets
    def __repr__(self) -> str:
        fields = [*(self.blocks.fields if self.blocks else ()), *(self.state.fields if self.state else ())]
        memory = f"fields {', '.join(fields)}" if self._has_memory else "without memory"
        return f"of {self._name}: {memory}, pages of {self.page_size} tokens, of {self._batch or 'no batch'}"

    @property
    def state_writes(self) -> StepArray:
        """int32 ``[B, places]``: where the step leaves states; see ``Batch``.

        Raises:
            BadInput: the view has no batch.
            StaleHandle: the batch is over.
        """
        if self._batch is None:
            raise self._without_batch()
        return self._batch.state_writes

    @property
    def checkpoints(self) -> StepCheckpoints:
        """Where the step leaves states at positions inside of it.

        Raises:
            BadInput: the view has no batch.
            StaleHandle: the batch is over.
        """
        if self._batch is None:
            raise self._without_batch()
        return self._batch.checkpoints

    @property
    def arrays(self) -> GroupArrays:
        """The index arrays of the layer's group.

        Raises:
            BadInput: the layer has no blocks, or the view no batch.
        """
        if self._group is None:
            raise BadInput(f"{self._name} keeps no blocks, so it has no block table", needed=self._name)
        if self._batch is None:
            raise self._without_batch()
        return self._batch.arrays(self._group)

    def _without_batch(self) -> BadInput:
        return BadInput(
            f"this view of {self._name} is of no batch; KVCache.batch(...).layer({self.layer.index}) has arrays",
            needed=self.layer.index,
        )

    def _check_memory(self, what: str) -> None:
        """Raise BadInput if the cache has no memory, so that this layer has no ``what``."""
        if not self._has_memory:
            text = f"this cache has no memory (device='none'), so {self._name} has no {what}"
            raise BadInput.with_hint(
                text, "make a KVCache with another device=, such as 'cpu' or 'cuda'", needed=what, available=self._name
            )

    def write(self, **rows: Tensor) -> None:
        """Write the rows of the step's ``T`` new tokens to the slots in ``slot_mapping``: ``write(k=.., v=..)``.

        Values are encoded in the layer's format; K and V, or a latent and its RoPE key, are joined if the layer packs
        them in one row. Rows of padded tokens are written to block 0. No state is kept between calls, so a CUDA graph
        may capture this call.

        Args:
            **rows: the rows that the layer's blocks have, by name, each ``[T, *shape]``, or with several axes in place
                of ``T``; an axis of a single head may be left out.

        Raises:
            BadInput: no such rows, another shape, rows that hold several tokens, K without V or a latent without its
                RoPE key if the layer keeps both; nothing is written.
            StaleHandle: the batch is no longer valid; nothing is written.
        """
        slots, pool = self.slot_mapping, self.blocks
        assert self._batch is not None
        self._batch.check_current()
        self._check_memory("rows to write")
        kept = {} if pool is None else pool.rows
        joined = rows if pool is None else pool.joined(rows)
        for name, values in joined.items():
            if name not in kept or kept[name].tokens_per_row > 1:
                text = f"{self._name} has no row {name!r} for every token in memory; it has {[*kept]}"
                raise BadInput(text, needed=name, available=(*kept,))
            shape = kept[name].shape
            inner = shape[1:] if shape[0] == 1 else shape
            if values.shape[values.ndim - len(inner) :] != inner or values.numel() != len(slots) * math.prod(shape):
                got = ", ".join(f"{name} {[*one.shape]}" for name, one in rows.items())
                text = f"rows {name!r} of {self._name} are {[len(slots), *shape]}, one for each new token; got {got}"
                raise BadInput(text, needed=[len(slots), *shape], available=got)
        assert pool is not None  # a layer with a block table has one
        for name in joined:
            if not joined.keys() >= pool.together.get(name, frozenset()):
                raise BadInput(
                    f"{self._name} keeps {' and '.join(sorted(pool.together[name]))}; write them in one call, got {[*rows]}",
                    needed=sorted(pool.together[name]), available=[*rows],
                )  # fmt: skip
        for name, values in joined.items():
            pool.write_slots(name, slots, values.reshape(len(slots), *kept[name].shape))

    def tensor(self, rows: str) -> Tensor:
        """Return the one tensor in which kernels take ``rows`` and their neighbours: see ``Pool.tensor``.

        Args:
            rows: their name.

        Returns:
            The tensor; its first axis is the kernel page or the state slot.

        Raises:
            BadInput: the rows are not in memory or have no such tensor.
        """
        self._check_memory(f"tensor of {shown(rows)}")
        pools = [pool for pool in (self.blocks, self.state) if pool is not None and rows in pool]
        if not pools:
            raise BadInput(f"{self._name} has no rows {rows!r} in memory", needed=rows, available=self._name)
        return pools[0].tensor(rows)

    def kernel_tensors(self, kernel: str) -> dict[str, Any]:
        """Return the tensors that a kernel takes of this layer.

        Args:
            kernel: one of ``kvpagoda.layouts.demands.kernels``, or an alias. A prefix such as "trtllm" means the first
                kernel that takes it.

        Returns:
            Tensors by the kernel's names, such as "k" and "v", "kv" or "state", with axes in the kernel's order. They
            alias the memory, and their addresses do not change. Under "declared" are the facts that shapes cannot tell,
            such as {"layout": "HND"}. ``judge`` takes this as it is, and says whether the kernel reads it.

        Raises:
            BadInput: the kernel is unknown or takes no rows of this layer in their form.
        """
        rows, arch = rows_named(kernel)
        self._check_memory(f"tensors for kernel {kernel!r}")
        found = [
            (row, tensors)
            for row in rows
            for pool in (self.blocks, self.state)
            if pool and (tensors := pool.kernel_tensors(row))
        ]
        if not found:
            raise BadInput(
                f"kernel {kernel!r} takes no rows of {self._name} as they are in memory; schema.plan(.., kernels={kernel!r}) "
                "says why, and which layout fits",
                needed=kernel, available=self._name,
            )  # fmt: skip
        fitting = [
            tensors for row, tensors in found if len(found) > 1 and judge(row.name, tensors, arch).expect == "ok"
        ]
        chosen: dict[str, Any] = fitting[0] if fitting else found[0][1]
        return chosen

    def kernel_tensor(self, kernel: str) -> Tensor:
        """Return the one tensor that a kernel takes of this layer.

        Args:
            kernel: see ``kernel_tensors``.

        Returns:
            That of ``kernel_tensors``; of FlashInfer and trtllm-gen, which take K and V joined, ``[kernel pages, 2,
            *axes in the kernel's order]``.

        Raises:
            BadInput: as ``kernel_tensors``, and if the kernel takes several tensors, or K and V lie differently in a
                page.
        """
        tensors: dict[str, Tensor] = {
            name: one for name, one in self.kernel_tensors(kernel).items() if name != "declared"
        }
        if len(tensors) == 1:
            (tensor,) = tensors.values()
            return tensor
        is_joined = all(row.is_joined for row in rows_named(kernel)[0] if {"k", "v"} in row.needed)
        if not is_joined or {*tensors} != {"k", "v"}:
            raise BadInput(
                f"kernel {kernel!r} takes {' and '.join(tensors)}, not one tensor; kernel_tensors({kernel!r}) has them",
                needed=tuple(tensors), available=kernel,
            )  # fmt: skip
        k, v = tensors["k"], tensors["v"]
        apart, size = v.data_ptr() - k.data_ptr(), k.element_size()
        if (k.shape, k.stride(), k.dtype) != (v.shape, v.stride(), v.dtype) or apart <= 0 or apart % size:
            raise BadInput(
                f"K and V of {self._name} have other shapes or strides, so they are no one tensor; take kernel_tensors",
                needed=list(k.shape), available=list(v.shape),
            )  # fmt: skip
        strides = (k.stride(0), apart // size, *k.stride()[1:])
        return k.as_strided((k.shape[0], 2, *k.shape[1:]), strides)

    def flat_indices(self, rows: StepArray, rows_per_page: int | None = None) -> StepArray:
        """Return the flat index ``kernel page * rows per page + row`` of each chosen row, for sparse kernels.

        O(T * k); nothing is read back from the device.

        Args:
            rows: integers ``[T, k]``: for each new token, k positions of its request or, with ``rows_per_page``, k
                compressed rows of it; -1 for none, also in the result. A tensor on the cache's device, or a numpy array
                if the cache has no memory. The caller leaves out positions that the group no longer keeps.
            rows_per_page: compressed rows of a kernel page; None: ``rows`` are positions.

        Returns:
            A new array of the same kind, shape and dtype.

        Raises:
            BadInput: the memory has flat indices that the dtype of ``rows`` cannot hold.
        """
        size, table = rows_per_page or self.page_size, self.block_table
        assert self._group is not None  # else there is no table
        last = self._group.plan.num_rows * self._group.plan.layout.kernel_pages * size - 1
        if last >= 2 ** (8 * rows.dtype.itemsize - 1):
            text = f"flat indices of {self._name} go up to {last}, past {rows.dtype}; give rows as int64"
            raise BadInput(text, needed=last, available=rows.dtype)
        index = rows.clip(0)
        one = index * 0 + 1  # in the dtype of rows
        is_chosen = (rows >= 0) * one
        assert self.step is not None
        pages = table[self.step.request_ids[:, None], index // size]
        return (pages * (size * one) + index % size) * is_chosen + is_chosen - 1

    def __getitem__(self, field: str) -> Tensor:
        pool = self.blocks if self.blocks is not None and field in self.blocks.fields else self.state
        if pool is None or field not in pool.fields:
            self._check_memory(f"field {shown(field)}")
            fields = [*(self.blocks.fields if self.blocks else ()), *(self.state.fields if self.state else ())]
            raise unknown_name(f"field of {self._name}", field, fields)
        return pool[field]

    @property
    def _name(self) -> str:
        return f"layer {self.layer.index} ({self.layer.label})"


class StepCheckpoints(NamedTuple):
    """Where a step leaves states at positions inside of it, so that it need not end there.

    A recurrence that passes token ``tokens[i]`` leaves its states after this token in the record ``places[i]`` of the
    state pools, in every layer. The commit of the row then names the position: ``sequence.commit(ids,
    sequence.step_checkpoints)``. An engine that does not, or that leaves out a position, loses no more than the
    checkpoint. Empty unless ``Limits.step_checkpoints`` is above 0.

    Args:
        rows: int32 ``[n]``, the row in which each token lies.
        tokens: int32 ``[n]``, the number of a new token in the step.
        places: int32 ``[n]``, a record of the state pools.
    """

    rows: StepArray
    tokens: StepArray
    places: StepArray


class Batch:
    """The index arrays of one step: ``B`` rows (padded rows last) and ``T`` new tokens, one row after another.

    Made by ``KVCache.batch`` and ``PersistentBatch.extend``.

         of the step             shape        meaning
      1  qo_indptr               [B + 1]      where the new tokens of each row begin
      2  positions               [T]          the position of each new token in its request
      3  state_indices           [B]          the state that each row begins with: its record in the state pools; 0
                                              for padded rows. Of a new request: the initial values of its fields,
                                              mostly zeros
      4  state_writes            [B, places]  the records for the states that the step leaves; 0 for padded rows
      5  step.request_ids        [T]          the row of each new token
      6  step.request_slots      [T]          the slot of its request; -1 for padded rows
      7  step.state_rows         [T]          state_indices of its row

         of a layer: batch.layer(i), the same for all layers of a group
      8  block_table             [B, columns] block ids                                              FlashAttention
      9  cache_seqlens           [B]          tokens of the row, the new ones included; 0 if padded  FlashAttention
     10  slot_mapping            [T]          the slot that each new token is written to             both; see write
     11  kv_indptr               [B + 1]      where each row begins in kv_indices                    FlashInfer
     12  kv_indices              [cells]      block ids, one row after another                       FlashInfer
     13  kv_last_page_len        [B]          tokens in the row's last block; 0 if padded            FlashInfer
     14  kv_start                [B]          position of the row's first token in kv_indices        windows and chunks

    All are int32 (10 is int64 in groups of 2^31 rows or more), on the cache's device, or numpy arrays if the cache has
    no memory; then a worker applies ``copies`` before the step. They are in static buffers and valid until the next
    batch; 4 and 8 to 14 are built on first access, or with the batch if the batches before were asked for them, so that
    all go to the device in one copy, for which nothing waits. ``shared_prefix`` has 11 to 13 in levels. A persistent batch
    with ``tokens_per_row`` has the same shapes in every step: 8 then has all columns of the table, 12 as many cells as all
    rows can have.

    ``places`` is 1, and 4 is 3 as a column, unless the schema can rewind states (``Schema.rewindable``). Then it is
    ``verify_width + 1``. A step reads the state of a row once, from 3, and leaves the states after each of its last
    ``places`` new tokens: of a row with n of them, the state after token j is written to column j if n <= places, else
    that after token ``n - places + j``. Columns from n on are not written. In rows with n <= places the last column is
    the record of 3, so it must be read before it is written.
    """

    _group = None  # its arrays are of no group

    def __init__(
        self,
        core: Core,
        buffers: StepBuffers,
        schema: Schema,
        requests: Many[RequestState],
        rows: StepRows,
        before: Array,
        named: Many[Named] = (),
    ) -> None:
        """Prepare a step of ``rows.counts[i]`` tokens of row ``i`` after its first ``before[i]``, int64 ``[B]``.

        ``requests``: those of the rows that are not padded. The caller has made room for the new tokens. ``named``: see
        ``Checkpointer.name_states``.
        """
        if core.sanitizer is not None:
            core.sanitizer.check(requests, before.tolist(), rows.counts.tolist())
        buffers.begin()
        self.core, self._schema, self._requests = core, schema, requests
        self._named = named
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
        kept = core.states
        states = buffers.no_states(len(before)) if kept is None else kept.rows(rows.slots, before)
        self.state_indices = buffers.put("state_indices", states)
        slots, positions = buffers.put("request_slots", rows.slot_of), buffers.put("positions", positions)
        ids = buffers.put("request_ids", rows.row_of)
        state_rows = buffers.put("state_rows", states if rows.one_each else states[rows.row_of])
        self.step = Step(slots, positions, ids, state_rows, is_by_id=True)
        self._arrays: dict[str, GroupArrays] = {}
        if not buffers.arrays.is_host:
            for array, make in buffers.expected.items():
                buffers.made[array] = make(self if array[0] is None else self.arrays(array[0]))
            buffers.send()
        self.noted: Noted | None = None  #: set last, so that a call that raises loses none of it

    @property
    def copies(self) -> Copies:
        """What must be done to the memory before the step, where a worker has it: for ``Worker.apply``.

        Each batch has those since the batch before it, also after it is over. Empty in a cache with memory, which has
        done all.

        Raises:
            BadInput: the cache has tiers but no memory.
            NeedsReset: there were too many to be kept.
        """
        core, noted = self.core, self.noted
        if noted is None and not core.memory.has_memory:
            hint = "keep the cache in the process that has the memory, or leave out tiers"
            raise BadInput(f"what tiers load and store, a worker's memory lacks; {hint}", hint=hint, needed="memory")
        if noted is None:
            return Copies(core.agreement, "", 0, 0, ())
        if noted.operations is None:
            raise NeedsReset.with_hint(
                f"batch {noted.number} has more copies before it than are kept: too much was run without a batch",
                "close all requests and call reset() before the first batch for a worker", needed=noted.number,
            )  # fmt: skip
        return Copies(core.agreement, noted.scheduler, noted.resets, noted.number, tuple(noted.operations))

    @in_brackets
    def __repr__(self) -> str:
        rows = self.rows
        padded, tokens = len(rows.slots) - rows.num_sequences, int(rows.indptr[rows.num_sequences])
        text = f"of {len(rows.slots):,} rows ({padded:,} padded), {tokens:,} new tokens"
        return text if self._is_current() else f"{text}, over"

    @property
    def positions(self) -> StepArray:
        """int32 ``[T]``: the position of each new token in its request."""
        return self.step.positions

    @cached_property
    @_sent_together
    def state_writes(self) -> StepArray:
        """int32 ``[B, places]``: the records for the states that the step leaves; see the class.

        Raises:
            StaleHandle: the batch is over.
        """
        states, rows = self.core.states, self.rows
        written = np.zeros((len(rows.slots), 1), np.int32)
        if states is not None:
            written = states.written(rows.slots, self.before, self.before + rows.counts)
        return self.buffers.put("state_writes", written.reshape(-1)).reshape(written.shape)

    @cached_property
    @_sent_together
    def checkpoints(self) -> StepCheckpoints:
        """Where the step leaves states at positions inside of it; see ``StepCheckpoints``.

        Raises:
            StaleHandle: the batch is over.
        """
        put, group = self.buffers.put, self.core.states
        rows = np.array([row for row, _, _, _ in self._named], np.int64)
        tokens = np.array([depth * self.block_size for _, depth, _, _ in self._named], np.int64) - 1
        tokens += self.rows.indptr[rows] - self.before[rows]
        places = np.empty(0, np.int32)
        if group is not None and self._named:
            places = group.places_of(BlockNames(np.concatenate([block for _, _, block, _ in self._named])))
        return StepCheckpoints(
            put("checkpoint_rows", rows), put("checkpoint_tokens", tokens), put("checkpoint_places", places)
        )

    def layer(self, index: SupportsIndex) -> LayerView:
        """Return the view of a layer.

        Args:
            index: of the layer; of one that shares its rows, the view is that of their owner.

        Raises:
            BadInput: the model has no such layer.
            StaleHandle: the batch is over.
        """
        self.check_current()
        return LayerView(self.core, self._schema.owner_of(index), self)

    def shared_prefix(self, layer: SupportsIndex = 0, num_levels: SupportsIndex = 2) -> SharedPrefix:
        """Return what the rows of this step share in a group of layers, for kernels that read it once: in levels, as
        FlashInfer's ``MultiLevelCascadeAttentionWrapper(num_levels, ..)`` takes them.

        Rows share a run of blocks that is the same in their tables (a prompt that was found or forked), that lies before the
        new tokens of each, and that every new token of each reads as a whole. So rows of full attention share whatever their
        tables share. Of a window or a chunk a row shares the blocks from its first one in ``kv_indices`` on, with rows that
        begin at the same position; and where a new token does not read all of this first block, because its window begins
        inside of it or behind, the row shares nothing: all that it reads is in the last level, as in ``kv_indices``.
        ``window_left`` of ``plan`` is then the same as without levels, as is a mask of chunks in the last level, where a row
        that shares nothing begins at its ``kv_start``; a row that shares something needs none. States are not shared: their
        layers have no blocks.

        A tree that has more levels is cut to those with which the fewest pages are read; one that has fewer leaves the first
        levels empty. Rows that share are adjacent in the levels, not always in the step: see ``SharedPrefix.order``. Computed
        when it is called, once a step for each group, on the host: O(B * log(columns)) for each level of the tree, and
        O(pages in all levels).

        Args:
            layer: a layer of the group.
            num_levels: of the cascade, the last one included, which is each row's own.

        Raises:
            BadInput: the layer has no blocks, or ``num_levels`` is below 1.
            StaleHandle: the batch is over.
        """
        num_levels = whole_number(num_levels, "num_levels", 1, bits=_LEVEL_BITS)
        return self.layer(layer).arrays.shared_prefix(num_levels)

    def encoder_parts(self, encoder_tokens: Many[SupportsIndex], layer: SupportsIndex = 0) -> EncoderParts:
        """Return the index arrays of cross-attention and those of self-attention, for a model with an encoder.

        The text of a request has a token for each position of its encoder's input, rounded up to a whole block, and then
        those of the decoder. What cross-attention keeps of the input is written by ``slot_mapping``, in a step of its own
        before the first one with tokens of the decoder. Computed on the host when it is called: O(pages of all rows).

        Args:
            encoder_tokens: positions of the encoder's input of each sequence, before they are rounded up.
            layer: a layer of the group.

        Raises:
            BadInput: not one number for each sequence, a sequence that lacks rows of its encoder's input, or a layer
                whose blocks slide out or that has none.
            StaleHandle: the batch is over.
        """
        view, rows = self.layer(layer), self.rows
        asked = islice(items_of(encoder_tokens), rows.num_sequences + 1)
        given = [whole_number(n, "encoder_tokens of a sequence", 1, bits=31) for n in asked]
        if len(given) != rows.num_sequences:
            text = f"{rows.num_sequences} sequences need as many encoder_tokens, got {given[:16]}"
            raise BadInput(text, needed=rows.num_sequences, available=len(given))
        arrays, growth = view.arrays, view.layer.growth
        if growth is not None and growth.is_bounded:
            text = f"{view._name} keeps {growth.name}, and what cross-attention reads must not slide out"
            raise BadInput(text, needed="full", available=growth.name)
        tokens = np.array(given + [0] * (len(rows.slots) - len(given)), np.int64)
        whole = -(-tokens // self.block_size) * self.block_size
        if (lacking := np.flatnonzero(whole > self.before)).size:
            row = int(lacking[0])
            text = f"row {row} begins this step after {self.before[row]} tokens, its encoder's input takes {whole[row]}"
            hint = "write and commit the rows of the input in a step of their own first"
            raise BadInput.with_hint(text, hint, needed=int(whole[row]), available=int(self.before[row]))
        return arrays.encoder_parts(tokens, whole)

    def check_current(self) -> None:
        """Raise StaleHandle if a newer batch was made, blocks have moved, or a sequence was closed or suspended."""
        if not self._is_current():
            text = "this batch is over: a newer one was made, or one of its sequences was closed or suspended"
            raise StaleHandle(text, needed="batch", available="over")

    def _is_current(self) -> bool:
        core, stopped = self.core, self._stopped
        is_newest = self._current == (self.buffers.number, core.capacity.num_moves)
        return is_newest and (
            stopped == core.counters.stopped
            or all(request.state is State.RUNNING and request.resumed_at <= stopped for request in self._requests)
        )

    def arrays(self, group: BlockGroup) -> GroupArrays:
        """Return the index arrays that the layers of a group share.

        Args:
            group: of the cache.
        """
        if group.name not in self._arrays:
            self._arrays[group.name] = GroupArrays(self, group)
        return self._arrays[group.name]


def batch_of(
    lifecycle: Lifecycle,
    buffers: StepBuffers,
    schema: Schema,
    requests: Many[RequestState],
    new_tokens: Many[SupportsIndex],
    pad_to: SupportsIndex | None,
    firsts: Many[SupportsIndex] | None = None,
) -> Batch:
    """Return the batch of a step of ``requests``; see ``KVCache.batch``. Raises BadInput, StaleHandle."""
    given = islice(items_of(new_tokens), len(requests) + 1)
    counts = [n if type(n) is int and 0 < n < MOST else whole_number(n, "new_tokens of a sequence", 1) for n in given]
    if len(requests) != len(counts) or not requests:
        raise BadInput(f"{len(requests)} sequences need as many positive new_tokens, at least one; got {counts[:16]}")
    rows = len(requests) if pad_to is None else whole_number(pad_to, "pad_to", 1, bits=ROW_BITS)
    if rows < len(requests):
        text = f"pad_to={pad_to} is less than the {len(requests)} sequences of the batch"
        raise BadInput(text, needed=len(requests), available=rows)
    if len({*requests}) != len(requests):
        raise BadInput("a sequence appears twice in the batch", needed=len(requests), available=len({*requests}))
    ends: list[int] = []
    starts = [request.length for request in requests] if firsts is None else _starts(requests, firsts)
    for request, start, new in zip(requests, starts, counts):
        request.check_running()
        ends.append(start + new)
        if ends[-1] > (capacity := request.capacity):
            text = f"slot {request.slot} has room for {capacity} tokens, not {start} + {new}; extend first"
            raise BadInput(text, needed=ends[-1], available=capacity)
    padding = rows - len(requests)
    slots = np.array([request.slot for request in requests] + [-1] * padding, np.int64)
    step = StepRows(slots, np.array(counts + [1] * padding, np.int64), len(requests), goes_back=firsts is not None)
    before = np.array(ends + [1] * padding, np.int64) - step.counts
    names = lifecycle.core.settings.limits.step_checkpoints and firsts is None
    named = lifecycle.settler.checkpoints.name_states(requests, ends) if names else []
    try:
        batch = Batch(lifecycle.core, buffers, schema, requests, step, before, named)
        lifecycle.settler.checkpoints.named(requests if names else (), named)
    except BaseException:
        lifecycle.settler.checkpoints.unname(requests, named)
        raise
    for request, end in zip(requests, ends):
        request.written = max(request.written, end)
    batch.noted = lifecycle.core.memory.take()
    return batch


def _starts(requests: Many[RequestState], firsts: Many[SupportsIndex]) -> list[int]:
    """Return ``firsts`` as the positions where the tokens of a step begin. Raises BadInput."""
    given = [*islice(items_of(firsts), len(requests) + 1)]
    if len(given) != len(requests):
        raise BadInput(f"{len(requests)} sequences need as many firsts, got {len(given)}")
    return [whole_number(first, "firsts of a sequence", 0) for first in given]
