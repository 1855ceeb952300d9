"""``KVCache``: a schema, a budget, and the requests that live off it."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.alloc.held import Ids
from kvpagoda.batch import Batch, LayerView, StepBuffers
from kvpagoda.books import Books
from kvpagoda.errors import BadInput
from kvpagoda.ledger import GroupLedger
from kvpagoda.schema import Schema
from kvpagoda.sequence import Sequence
from kvpagoda.storage.arena import Arena, Device, default_device
from kvpagoda.storage.pool import Pool
from kvpagoda.storage.tables import DeviceTable


class KVCache(Books):
    """The cache of one model on one device.

    ``budget`` (bytes or text) or ``num_blocks`` sets its size; every byte is allocated here and none later.
    ``max_requests`` may run at once. ``max_context``: the longest request in tokens (default: what fits, at most the
    model's own limit). ``step_tokens``: the most tokens of one request between two commits that window groups keep
    room for. ``checkpoints``: how many are kept for reuse where layers keep states or windows (default
    ``max_requests``); ``checkpoint_every``: see ``Books``. ``order``: see ``Arena``. ``poison`` fills all memory that
    nobody holds with NaN, to catch stale reads. Raises BadInput, NeverFits. The life of a request is that of ``Books``.
    """

    def __init__(
        self,
        schema: Schema,
        budget: int | str | None = None,
        *,
        num_blocks: int | None = None,
        device: Device = None,
        max_requests: int = 64,
        block_size: int | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        step_tokens: int = 512,
        order: str | None = None,
        poison: bool = False,
        checkpoints: int | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        self.schema = schema if dtype is None else schema.cast(str(dtype).removeprefix("torch."))
        plan = self.schema.plan(
            budget, max_requests, block_size, num_blocks=num_blocks, step_tokens=step_tokens, checkpoints=checkpoints
        )
        super().__init__(plan, schema.vocab_size, max_context, checkpoint_every)
        self.device = default_device(device)
        self.dummy_slot = plan.num_states - 1
        self._arenas = {
            ledger.name: Arena(group.demand.layout, group.num_rows, device=self.device, order=order)
            for ledger, group in zip(self.ledgers, plan.groups)
        }
        self._states = Arena(self.schema.state_layout, plan.num_states, device=self.device, order=order)
        self._tables = {ledger.name: DeviceTable(ledger.table, self.device) for ledger in self.ledgers}
        self._pools: dict[int, tuple[Pool | None, Pool, tuple[GroupLedger, DeviceTable] | None]] = {}
        self.buffers = StepBuffers(self.device)
        self.batch_number = 0
        self._poison = poison
        if poison:
            for arena in (*self._arenas.values(), self._states):
                arena.buffer.fill_(0xFF)

    @property
    def nbytes(self) -> int:
        """Bytes that the arenas take: ``plan.nbytes``."""
        return sum(arena.nbytes for arena in (*self._arenas.values(), self._states))

    def batch(self, sequences: Many[Sequence], new_tokens: Many[int], pad_to: int | None = None) -> Batch:
        """Index arrays for a step that computes ``new_tokens[i]`` tokens of ``sequences[i]``, for which there is room.

        ``pad_to`` rows in all (CUDA graphs): padded rows have one token, slot -1, length 0 and write to block 0. The
        arrays lie in static buffers: they are valid until the next ``batch``. Raises BadInput.
        """
        batch = Batch(self, sequences, new_tokens, pad_to)
        self.batch_number += 1
        return batch

    def layer_view(self, batch: Batch, index: int) -> LayerView:
        """The view of one layer for ``batch``; ``batch.layer(index)`` is the way to call it."""
        layer = self.schema.by_index.get(index)
        if layer is None:
            raise BadInput(f"layer {index} is not in this schema; it has {sorted(self.schema.by_index)}")
        layer = self.schema.by_index[layer.owner]
        if layer.index not in self._pools:
            state = Pool(self._states, layer.index, layer.state_rows())
            ledger = next((one for one in self.ledgers if one.growth == layer.growth), None)
            if ledger is None:
                self._pools[layer.index] = (None, state, None)
            else:
                blocks = Pool(self._arenas[ledger.name], layer.index, layer.block_rows())
                self._pools[layer.index] = (blocks, state, (ledger, self._tables[ledger.name]))
        return LayerView(batch, layer, *self._pools[layer.index])

    def slot_opened(self, slot: int) -> None:
        self._states.reset(slot)

    def copy_state(self, source: int, target: int) -> None:
        self._states.copy(np.array([source], np.int32), np.array([target], np.int32))

    def copy_blocks(self, ledger: GroupLedger, sources: Ids, targets: Ids) -> None:
        self._arenas[ledger.name].copy(sources, targets)

    def state_freed(self, row: int) -> None:
        if self._poison:
            self._states.poison(np.array([row], np.int32))

    def blocks_freed(self, ledger: GroupLedger, ids: Ids) -> None:
        super().blocks_freed(ledger, ids)
        if self._poison and len(ids):
            self._arenas[ledger.name].poison(ids)
