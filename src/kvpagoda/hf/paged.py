"""The cache that a transformers model is given for one forward pass; its rows are in kvpagoda's pools.

The layers below have the methods of transformers' ``Cache`` layers. Each writes the step's rows through the layer's
view and returns all rows that the step may read, gathered through the block tables; ``attend`` then masks by position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from kvpagoda import Batch, LayerView
from kvpagoda.schema import Growth, Layer, Schema, Shared

Tensor = torch.Tensor
ATTENTION = "kvpagoda"
"""The name under which ``attend`` is registered with transformers' attention interface."""


class PageRuns(Protocol):
    """Which pages each row of a step reads: ``GroupArrays`` of the batch, or one part of its ``encoder_parts``."""

    @property
    def kv_indptr(self) -> Tensor: ...

    @property
    def kv_indices(self) -> Tensor: ...

    @property
    def cache_seqlens(self) -> Tensor: ...


class GroupGather:
    """The index tensors with which one group's rows are gathered, for a step of ``B`` rows with ``S`` new tokens each.

    ``blocks`` int64 ``[B, most blocks]``: block ids, 0 for padding. ``absent`` bool ``[B, length]``: gathered rows that
    are padding. ``first``: the position of the first gathered row of the first request.
    """

    def __init__(self, arrays: PageRuns, starts: Tensor, positions: Tensor, growth: Growth) -> None:
        """``starts`` ``[B]``: the position of the first row of each request. ``positions`` ``[B * S]``: of the new tokens."""
        counts = arrays.kv_indptr[1:] - arrays.kv_indptr[:-1]
        most, self.first = int(counts.max()), int(starts[0])
        self.length = int((arrays.cache_seqlens - starts).max())
        """The number of rows that are read, of the longest request."""
        column = torch.arange(most, device=counts.device)
        index = (arrays.kv_indptr[:-1, None] + column).clamp(max=len(arrays.kv_indices) - 1)
        self.blocks = torch.where(column < counts[:, None], arrays.kv_indices[index.long()], 0).long()
        kv = starts[:, None].long() + torch.arange(self.length, device=counts.device)
        self.absent = kv >= arrays.cache_seqlens[:, None]
        query = positions.long().view(len(counts), -1, 1)
        self.visible: Tensor = growth.reads(query, kv[:, None]) & ~self.absent[:, None]
        """bool ``[B, S, T]``: whether each new token attends to each gathered row."""


class StepContext:
    """One forward pass: its batch, and each group's gather, computed once.

    ``schema``: of the model's layers alone; they are layers ``first_layer ..`` of the batch.
    ``is_aligned``: all rows begin at the same position. Then the model sees the same cache length as with transformers'
    own cache, and its own masks and positions are right. Otherwise the model is told that there is no past.
    """

    def __init__(
        self, batch: Batch, schema: Schema, columns: dict[tuple[int, int], int], is_aligned: bool, holders: Mapping[int, Any],
        first_layer: int,
    ) -> None:  # fmt: skip
        self.batch, self.schema, self._first_layer = batch, schema, first_layer
        first = int(batch.positions[0])
        self.is_aligned, self.past = is_aligned, first if is_aligned else 0
        """``past``: the number of tokens before this step that the model is told."""
        self.holders = holders
        """Layer -> the module that holds the layer's states itself."""
        self.columns = columns
        """(Layer, state) -> columns of its convolution tail in transformers; known after the first step of a request that
        begins with nothing."""
        num_tokens = len(batch.positions) // len(batch.state_indices)
        written = batch.state_writes.long()
        self.num_tokens, self.last = num_tokens, written[:, min(num_tokens, written.shape[1]) - 1]
        """``num_tokens``: new tokens of each row. ``last``: the records for the states after these, int64 ``[B]``."""
        self.left = _left_states(batch, num_tokens, written)
        """Number of first tokens of the rows -> (rows, records of these for the states after so many tokens), for the states
        that the pass leaves before its end: int64 ``[n]`` each."""
        self.is_first = first == 0
        """Whether the step starts its (one) request, so that there is no state to read yet."""
        self.masked_layer = 0
        """The layer for which ``get_mask_sizes`` was called last: models call it before they make a mask."""
        self.reads_encoder = False
        """Whether the rows that a layer read last are those of an encoder's input, so that it attends to them."""
        self.last_stored = -1
        """The layer that stored rows last: an attention module that several layers share does not know its layer."""
        self._gathers: dict[Growth, GroupGather] = {}

    def view(self, layer: int) -> LayerView:
        """Return the view of the model's ``layer``."""
        return self.batch.layer(self._first_layer + layer)

    def gather(self, layer: int) -> GroupGather:
        """Return the gather of the group that ``layer`` (or its owner) belongs to."""
        view = self.view(layer)
        growth = view.layer.growth
        assert growth is not None
        if growth not in self._gathers:
            arrays, step = view.arrays, view.step
            assert step is not None
            self._gathers[growth] = GroupGather(arrays, arrays.kv_start, step.positions, growth)
        return self._gathers[growth]


def _left_states(batch: Batch, num_tokens: int, written: Tensor) -> dict[int, list[tuple[Any, Tensor]]]:
    """Return ``StepContext.left`` for a step of ``num_tokens`` tokens of each row: the columns of ``Batch.state_writes``
    but the last, which is ``written``, and ``Batch.checkpoints``."""
    count = min(num_tokens, written.shape[1])
    left: dict[int, list[tuple[Any, Tensor]]] = {
        num_tokens - count + 1 + column: [(slice(None), written[:, column])] for column in range(count - 1)
    }
    rows, tokens, places = (part.long() for part in batch.checkpoints)
    ends = tokens - batch.qo_indptr.long()[rows] + 1
    for end in sorted({*ends.tolist()}):
        left.setdefault(end, []).append((rows[ends == end], places[ends == end]))
    return left


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache layer of an attention layer: K and V per token, or MLA's latent and RoPE key, and an indexer's keys."""

    is_croppable = False

    def __init__(self, context: StepContext, index: int) -> None:
        CacheLayerMixin.__init__(self)
        layer = context.schema.by_index[index]
        self._context, self._index = context, index
        self._row_names = [rows.name for rows in layer.block_rows()]
        self.is_sliding = layer.growth is not None and layer.growth.window is not None
        self.indexer_position_ids: Tensor | None = None
        """``[3, B, past]`` positions of time, height and width, for indexers that read the positions of all tokens;
        None: no past."""
        if context.past:
            past = torch.arange(context.past, device=context.batch.positions.device)
            self.indexer_position_ids = past.expand(3, len(context.batch.state_indices), -1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store rows ``[B, H, S, D]``; return all rows of the step's requests, contiguous ``[B, H, T, D]``."""
        self._context.reads_encoder = False
        stored = self._store(**self.joined(key_states, value_states))
        return self.apart(stored, key_states.shape[-1])

    def joined(self, key_states: Tensor, value_states: Tensor) -> dict[str, Tensor]:
        """Return rows ``[B, H, S, D]`` as the pool has them, by name."""
        first, second = self._row_names[0], self._row_names[:2][-1]
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if first == "kv":
            return {first: torch.stack((keys, values), dim=2)}
        if first == "latent" and second != "k_rope":  # latent and RoPE key are packed into one row
            return {first: torch.cat((keys, values), dim=-1)}
        return {first: keys, second: values}

    def apart(self, stored: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return the rows of ``joined``, read again, as keys of ``width`` elements and values: contiguous ``[B, H, T, D]``."""
        if len(stored) == 2:
            keys, values = stored
        else:
            keys, values = (
                stored[0].unbind(2) if self._row_names[0] == "kv" else stored[0].tensor_split([width], dim=-1)
            )
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store indexer keys ``[B, S, D]``; return all keys of the step's requests, ``[B, T, D]``."""
        (keys,) = self._store(**{self._row_names[-1]: indexer_key_states})
        return keys

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Store keys ``[B, 1, S, D]`` of an indexer of blocks of tokens; return all keys, ``[B, 1, T, D]``."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    def _store(self, **rows: Tensor) -> list[Tensor]:
        """Store the step's rows; return, for each name in this order, all rows of the step's requests."""
        self._context.last_stored = self._index
        self._context.view(self._index).write(**rows)
        return [self._read(name, given.dtype) for name, given in rows.items()]

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the rows ``name`` of the step's requests."""
        gather, blocks = self._context.gather(self._index), self._context.view(self._index).blocks
        assert blocks is not None
        found: Tensor = blocks.read(name, (gather.blocks,)).flatten(1, 2)[:, : gather.length].to(dtype)
        return found.masked_fill(gather.absent.view(*gather.absent.shape, *(1,) * (found.ndim - 2)), 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is allocated already."""

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The state tensors of one layer for the step's rows: copied from the pool here, and to it by ``save``.

    In most models transformers keeps one convolution column more than it reads. The pool does not keep this column, so
    it is added here and cut off by ``save``.
    """

    def __init__(self, context: StepContext, index: int) -> None:
        names = [rows.name for rows in context.schema.by_index[index].state_rows()]
        LinearAttentionLayer.__init__(self, number_of_states=max(1, sum(name.startswith("conv") for name in names)))
        self._columns, self._layer = context.columns, index
        pool = context.view(index).state
        assert pool is not None
        slots = context.batch.state_indices.long()
        self._pool, self._context = pool, context
        self._state_of = {name: int(name.partition("_")[2] or 0) for name in names}
        if context.is_first:
            return
        for name, state in self._state_of.items():
            rows = self._pool.read(name, (slots,))[:, 0]
            if name.startswith("conv"):
                columns = context.columns[index, state]
                self.conv_states[state] = torch.nn.functional.pad(rows, (columns - rows.shape[-1], 0))
                self.conv_kernel_size[state] = columns
                self.is_conv_states_initialized[state] = True
            else:
                self.recurrent_states[state] = rows
                self.is_recurrent_states_initialized[state] = True
            self.has_previous_state[state] = True
            self.dtype, self.device = rows.dtype, rows.device

    def save(self, num_tokens: int) -> None:
        """Write the states as they are now, after ``num_tokens`` tokens of each row, to the records for them."""
        context = self._context
        if num_tokens == context.num_tokens:
            self._write(slice(None), context.last)
        else:
            for chosen, records in context.left[num_tokens]:
                self._write(chosen, records)

    def _write(self, chosen: Any, records: Tensor) -> None:
        """Write the states of the rows ``chosen`` to ``records`` of the pool."""
        for name, state in self._state_of.items():
            if name.startswith("conv"):
                rows = self.conv_states[state]
                self._columns[self._layer, state] = rows.shape[-1]
                rows = rows[..., -self._pool.rows[name].shape[-1] :]
            else:
                rows = self.recurrent_states[state]
            self._pool.write(name, (records,), rows[chosen][:, None])

    def end(self) -> None:
        """Do what follows the last ``save`` of a pass: nothing."""


class StateAndPagedLayer(StateLayer, PagedLayer):
    """A layer with both attention and a state."""

    def __init__(self, context: StepContext, index: int) -> None:
        PagedLayer.__init__(self, context, index)
        StateLayer.__init__(self, context, index)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class HeldStateLayer(StateLayer):
    """A layer whose module holds its own states between calls, as a Griffin block does (arXiv 2402.19427). They are set
    in the module before the pass, and removed from it after."""

    def __init__(self, context: StepContext, index: int) -> None:
        StateLayer.__init__(self, context, index)
        self._module: Any = context.holders[index]
        if context.is_first:
            rows = {name: torch.zeros_like(self._pool.read(name, (context.last,))[:, 0]) for name in self._state_of}
            self.conv_states[0], self.recurrent_states[0] = rows["conv"], rows["recurrent"]
        self._module.conv1d_state = self.conv_states[0]
        self._module.rg_lru.recurrent_states = self.recurrent_states[0]

    def save(self, num_tokens: int) -> None:
        self.conv_states[0], self.recurrent_states[0] = self._module.conv1d_state, self._module.rg_lru.recurrent_states
        StateLayer.save(self, num_tokens)

    def end(self) -> None:
        self._module.conv1d_state = self._module.rg_lru.recurrent_states = None


class StepCache(Cache):  # type: ignore[misc]
    """The cache of one forward pass over a batch. The model is given positions; if the rows are aligned,
    it may compute them itself from the length of the past."""

    def __init__(self, context: StepContext) -> None:
        Cache.__init__(self, layers=[_layer(context, layer) for layer in context.schema.layers])
        self._context, self._past = context, context.past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (number of rows that a query may read, position of the first of these rows)."""
        self._context.masked_layer = layer_idx
        if not self._context.is_aligned or self._context.view(layer_idx).layer.growth is None:
            return self._past + query_length, 0
        gather = self._context.gather(layer_idx)
        return gather.length, gather.first

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of a lightning attention layer (arXiv 2501.08313): ``[B, H, D, D]``, None at the first
        step."""
        state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Replace the state of a lightning attention layer."""
        self.layers[layer_idx].recurrent_states[0] = state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        layers = self.layers if layer_idx is None else [self.layers[layer_idx]]
        return any(isinstance(layer, StateLayer) and all(layer.has_previous_state.values()) for layer in layers)

    def leave_states(self, index: int, num_tokens: int) -> None:
        """Write the states of layer ``index`` as they are now, after ``num_tokens`` tokens of each row, to the pool."""
        self.layers[index].save(num_tokens)

    def save_states(self) -> None:
        """Write the states of all layers after the pass to the pool."""
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.save(self._context.num_tokens)
                layer.end()


def _layer(context: StepContext, layer: Layer) -> Any:
    """Return the cache layer for what ``layer`` keeps: rows per token, states, both or nothing."""
    has_blocks, has_states = bool(layer.block_rows()), bool(layer.state_rows())
    if any(isinstance(kind, Shared) for kind in layer.kinds) or not (has_blocks or has_states):
        nothing = DummyLayer()
        nothing.keys = nothing.values = torch.empty(0)  # some models read the number of rows
        return nothing
    made: type[CacheLayerMixin] = HeldStateLayer if layer.index in context.holders else StateLayer
    if has_blocks:
        made = StateAndPagedLayer if has_states else PagedLayer
    return made(context, layer.index)


def step_cache_class(model: Any) -> type[StepCache]:
    """Return ``StepCache``, or a subclass of it and of the model's own cache class, if ``model`` requires that
    class."""
    module = sys.modules[type(model).__module__]
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Cache)]
    own = [each for each in classes if each.__module__ == module.__name__ and hasattr(each, "set_linear_cache")]
    return type("OwnStepCache", (StepCache, own[0]), {}) if own else StepCache


class OwnStateCache:
    """The cache of a model that passes its states around itself, outside of transformers' cache interface: the states of
    a step's ``B`` rows.

    ``by_layer``: for each layer its tensors ``[B, *shape]``, in the order of the schema. The model changes these in
    place. They are copies of the requests' state rows, and are written back after the step. A request that begins has
    the fill values of the schema.
    """

    def __init__(self, context: StepContext) -> None:
        slots = context.batch.state_indices.long()
        self._written = context.last
        self._cells = [
            [(pool, name, (slots,)) for name in pool.rows]
            for layer in context.schema.layers
            if (pool := context.view(layer.index).state) is not None
        ]
        self.by_layer = [[pool.read(name, cells)[:, 0] for pool, name, cells in layer] for layer in self._cells]
        if context.is_first:
            for tensors, layer in zip(self.by_layer, self._cells):
                for tensor, (pool, name, _) in zip(tensors, layer):
                    tensor.fill_(pool.rows[name].fill)

    def leave_states(self, index: int, num_tokens: int) -> None:
        """Not called: these states are those after the last token of a pass."""
        raise NotImplementedError("a model that passes its states around itself keeps no older ones")

    def save_states(self) -> None:
        """Write the tensors back to their rows of the pools."""
        for tensors, layer in zip(self.by_layer, self._cells):
            for tensor, (pool, name, _) in zip(tensors, layer):
                pool.write(name, (self._written,), tensor[:, None])


class StackedStates(OwnStateCache, list[Tensor]):
    """A list with one tensor ``[B, channels, layers]`` for each kind of state, as RWKV takes it (arXiv 2305.13048)."""

    def __init__(self, context: StepContext) -> None:
        OwnStateCache.__init__(self, context)
        list.__init__(self, (torch.stack(each, dim=-1) for each in zip(*self.by_layer)))

    def save_states(self) -> None:
        self.by_layer = [list(each) for each in zip(*(tensor.unbind(-1) for tensor in self))]
        OwnStateCache.save_states(self)


class LayerStates(OwnStateCache):
    """A table from layers to their states, as xLSTM takes it (arXiv 2405.04517)."""

    def __init__(self, context: StepContext) -> None:
        OwnStateCache.__init__(self, context)
        self.rnn_state = dict(enumerate(map(tuple, self.by_layer)))
        self.seqlen_offset = context.past


OWN_STATES: Mapping[str, Callable[[StepContext], OwnStateCache]] = {"stacked": StackedStates, "by_layer": LayerStates}
"""Value of ``Family.own_states`` -> class."""


_step: ContextVar[StepContext] = ContextVar("kvpagoda_step")


class SavesStates(Protocol):
    """The cache that a model is given for one forward pass."""

    def leave_states(self, index: int, num_tokens: int) -> None: ...

    def save_states(self) -> None: ...


@contextmanager
def in_step(
    context: StepContext, cache_class: Callable[[StepContext], SavesStates] = StepCache
) -> Iterator[SavesStates]:
    """Give the cache for a forward pass over ``context``'s batch. Inside, ``attend`` reads its block tables from
    ``context``. At the end states are saved."""
    token = _step.set(context)
    try:
        cache = cache_class(context)
        yield cache
        cache.save_states()
    finally:
        _step.reset(token)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of ``query`` ``[B, H, S, D]`` over gathered rows ``key``, ``value`` ``[B, H_kv, T, D]``, masked
    by position.

    This is the reference: one matrix product; one softmax, with the sinks ``s_aux`` ``[H]`` or ``sinks`` ``[B, H, S,
    1]`` as one more column; one product. ``position_bias`` ``[B, H, S, T]`` is added to the scores. ``indices`` ``[B,
    S, k]``: the rows that an indexer selected; ``block_indices`` ``[B, .., S, k]``: the blocks of rows that it
    selected, as the indexer of ``module`` cuts and masks them. Returns ``[B, S, H, D_v]``, and None in place of
    weights.
    """
    context, own = _step.get(), getattr(module, "layer_idx", None)
    if own is None and not getattr(module, "is_causal", True):
        visible = query.new_ones(
            1, dtype=torch.bool
        )  # over parts of one token (blocks of layers), not over cached rows
    else:
        layer = own if isinstance(own, int) and own in context.schema.by_index else context.last_stored
        visible = context.gather(layer).visible[:, None, -query.shape[2] :]  # some models drop queries without a logit
    if indices is not None:
        visible = visible & torch.zeros_like(visible).scatter(-1, indices[:, None].long(), True)
    if block_indices is not None:
        blocks: Any = module.indexer
        attention_mask = blocks.build_block_mask(
            block_indices, visible, key.shape[2], query.dtype, query.device, position_ids=None
        )
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        visible = visible & attention_mask
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        scores = scores + attention_mask
    if sinks is None and s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask for a model: bool ``[B, 1, S, T]`` if all layers share one mask or an indexer reads it, else
    None.

    ``attend`` masks by position itself, so only indexers depend on this mask. A model with an encoder asks for one of its
    own tokens and one of its encoder's input, by calls that look alike.
    """
    context = _step.get()
    layer = context.schema.by_index[context.masked_layer]
    if context.schema.encoder_positions is not None:
        return None
    if len(context.schema.groups) == 1:
        layer = context.schema.groups[0].layers[0]
    elif all(rows.name != "index_key" for rows in layer.block_rows()):
        return None
    return context.gather(layer.index).visible[:, None]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, mask)
