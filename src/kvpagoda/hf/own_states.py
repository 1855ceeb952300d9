"""Caches for models that pass their states around themselves, outside of transformers' cache interface.

Such a model changes the tensors that it is given in place. The tensors are copies of the requests' state rows, and are
written back after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvpagoda.hf.paged import StepContext

Tensor = torch.Tensor


class OwnStates:
    """The states of a step's ``B`` rows. ``by_layer``: for each layer its tensors ``[B, *shape]``, in the order of the
    schema. A request that begins has the fill values of the schema."""

    def __init__(self, context: StepContext) -> None:
        slots = context.batch.state_indices.long()
        self._cells = [
            [(pool, name, (slots,)) for name in pool.rows]
            for layer in context.schema.layers
            if (pool := context.batch.layer(layer.index).state) is not None
        ]
        self.by_layer = [[pool.read(name, cells)[:, 0] for pool, name, cells in layer] for layer in self._cells]
        if context.is_first:
            for tensors, layer in zip(self.by_layer, self._cells):
                for tensor, (pool, name, _) in zip(tensors, layer):
                    tensor.fill_(pool.rows[name].fill)

    def save_states(self) -> None:
        """Write the tensors back to their rows of the pools."""
        for tensors, layer in zip(self.by_layer, self._cells):
            for tensor, (pool, name, cells) in zip(tensors, layer):
                pool.write(name, cells, tensor[:, None])


class StackedStates(OwnStates, list[Tensor]):
    """A list with one tensor ``[B, channels, layers]`` for each kind of state, as RWKV takes it (arXiv 2305.13048)."""

    def __init__(self, context: StepContext) -> None:
        OwnStates.__init__(self, context)
        list.__init__(self, (torch.stack(each, dim=-1) for each in zip(*self.by_layer)))

    def save_states(self) -> None:
        self.by_layer = [list(each) for each in zip(*(tensor.unbind(-1) for tensor in self))]
        OwnStates.save_states(self)


class LayerStates(OwnStates):
    """A table from layers to their states, as xLSTM takes it (arXiv 2405.04517)."""

    def __init__(self, context: StepContext) -> None:
        OwnStates.__init__(self, context)
        self.rnn_state = dict(enumerate(map(tuple, self.by_layer)))
        self.seqlen_offset = context.past


FORMS: Mapping[str, Callable[[StepContext], OwnStates]] = {"stacked": StackedStates, "by_layer": LayerStates}
"""Value of ``Family.own_states`` -> class."""
