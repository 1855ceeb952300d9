"""``KVCache``: a schema, a budget, and the requests that live off it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from weakref import finalize

import numpy as np
import torch

from kvpagoda.batch import Array, Batch, LayerView, StepBuffers, StepRows
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.books import Books
from kvpagoda.errors import BadInput, OutOfBlocks
from kvpagoda.finding import Part
from kvpagoda.memory.arena import Arena, Device, default_device
from kvpagoda.memory.device_table import DeviceTable
from kvpagoda.memory.host_copy import copy_from_host, copy_to_host
from kvpagoda.memory.layerwise import LayerwiseCopy, side_stream
from kvpagoda.memory.pages import PAGE, Bytes
from kvpagoda.memory.pool import Pool
from kvpagoda.persistent_batch import PersistentBatch
from kvpagoda.prefix import EvictionPolicy
from kvpagoda.schema import Schema
from kvpagoda.sequence import Sequence
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.units import format_bytes


class KVCache(Books):
    """The cache of one model on one device.

    ``budget`` (bytes or text) or ``num_blocks`` sets its size; every byte is allocated here and none later.
    ``max_requests`` may run at once. ``max_context``: the longest request in tokens (default: what fits, at most the
    model's own limit). ``step_tokens``: the most tokens of one request between two commits that window groups keep
    room for. ``checkpoints``: how many are kept for reuse where layers keep states or windows: see ``Schema.plan``;
    ``checkpoint_every``, ``policy``, ``pin_share``, ``swap``, ``tiers`` and what they need: see ``Books``. ``order``: see
    ``Arena``; several groups share one block-major memory, unless it is ``"layer"``. ``poison`` fills all memory that nobody
    holds with NaN, to catch stale reads. Raises BadInput, NeverFits. The life of a request is that of ``Books``.
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
        policy: str | EvictionPolicy = "lru",
        pin_share: float = 0.5,
        swap: int | str | None = None,
        tiers: Many[TierSpec] = (),
        weights: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        tier_secret: bytes = b"",
    ) -> None:
        self.schema = schema if dtype is None else schema.cast(str(dtype).removeprefix("torch."))
        plan = self.schema.plan(
            budget, max_requests, block_size, num_blocks=num_blocks, step_tokens=step_tokens, checkpoints=checkpoints,
            shared=order != "layer",
        )  # fmt: skip
        self.device = default_device(device)
        shared = torch.zeros(plan.num_sectors * plan.sector_nbytes, dtype=torch.uint8, device=self.device)
        self._arenas = {
            group.name: Arena(
                group.demand.layout, group.num_rows, device=self.device, order=order,
                within=(shared, group.row_nbytes) if plan.num_sectors else None,
            )
            for group in plan.groups
        }  # fmt: skip
        self._buffers = [shared] if plan.num_sectors else [arena.buffer for arena in self._arenas.values()]
        super().__init__(
            plan, schema.vocab_size, max_context, checkpoint_every, policy=policy, pin_share=pin_share,
            fingerprint=self.schema.fingerprint, tiers=tiers, weights=weights, rank=rank, num_ranks=num_ranks,
            tier_secret=tier_secret, swap=swap,
        )  # fmt: skip
        self.page_offset = max((buffer.data_ptr() % PAGE for buffer in self._buffers), default=0)
        self._states = next((ledger for ledger in self.ledgers if ledger.growth.is_state), None)
        self.has_states = self._states is not None
        if self._states is not None:
            self._states.prepare = self._arenas[self._states.plan.name].reset
        self._tables = {ledger.plan.name: DeviceTable(ledger.table, self.device) for ledger in self.ledgers}
        self._pools: dict[int, tuple[Pool | None, Pool | None, tuple[BlockGroup, DeviceTable] | None]] = {}
        self._step_buffers = StepBuffers(self.device)
        self._fillings: list[LayerwiseCopy] = []
        self._copy_stream = side_stream(self.device) if tiers else None
        self.num_moves = 0  #: how often blocks were moved: index arrays from before name the old places
        self._poison = poison
        if poison:
            for buffer in self._buffers:
                buffer.fill_(0xFF)

    @property
    def nbytes(self) -> int:
        """Bytes that the arenas take: ``plan.nbytes``."""
        return sum(buffer.numel() for buffer in self._buffers)

    def state_rows(self, slots: Array) -> Ids:
        """The block that holds the state of each slot, int32; 0, the padding block, for slot -1 and without states."""
        if self._states is None:
            return np.zeros(len(slots), np.int32)
        rows: Ids = self._states.table.cells[slots, 0]
        return rows

    def batch(self, sequences: Many[Sequence], new_tokens: Many[int], pad_to: int | None = None) -> Batch:
        """Index arrays for a step that computes ``new_tokens[i]`` tokens of ``sequences[i]``, for which there is room.

        ``pad_to`` rows in all (CUDA graphs): padded rows have one token, slot -1, length 0 and write to block 0. The
        arrays lie in static buffers: they are valid until the next ``batch``. Raises BadInput.
        """
        if len(sequences) != len(new_tokens) or not sequences or min(new_tokens) < 1:
            raise BadInput(f"{len(sequences)} sequences need as many positive new_tokens, got {list(new_tokens)[:16]}")
        if pad_to is not None and pad_to < len(sequences):
            raise BadInput(f"pad_to={pad_to} is less than the {len(sequences)} sequences of the batch")
        for sequence, new in zip(sequences, new_tokens):
            if sequence.length + new > sequence.room:
                raise BadInput(
                    f"slot {sequence.slot} has room for {sequence.room} tokens, not {sequence.length} + {new}; extend first"
                )
        if len({id(sequence) for sequence in sequences}) != len(sequences):
            raise BadInput("a sequence appears twice in the batch")
        for sequence, new in zip(sequences, new_tokens):
            sequence.written = max(sequence.written, sequence.length + new)
        padding = (pad_to or len(sequences)) - len(sequences)
        slots = np.array([sequence.slot for sequence in sequences] + [-1] * padding, np.int64)
        counts = np.array([*new_tokens] + [1] * padding, np.int64)
        before = np.array([sequence.length for sequence in sequences] + [0] * padding, np.int64)
        rows = StepRows(slots, counts, len(sequences))
        return Batch(self, self._step_buffers, tuple(sequences), rows, before)

    def persistent_batch(self, sequences: Iterable[Sequence] = (), num_rows: int | None = None) -> PersistentBatch:
        """Run ``sequences``, whose prompts are committed, step by step: each step costs what changed. ``num_rows`` rows in all
        (default: as many as there are sequences, at least one), padded as ``batch`` does. Raises BadInput, StaleHandle."""
        members = tuple(sequences)
        return PersistentBatch(self, members, max(1, len(members)) if num_rows is None else num_rows)

    def layer_view(self, batch: Batch, index: int) -> LayerView:
        """The view of one layer for ``batch``; ``batch.layer(index)`` is the way to call it."""
        layer = self.schema.by_index.get(index)
        if layer is None:
            raise BadInput(f"layer {index} is not in this schema; it has {sorted(self.schema.by_index)}")
        layer = self.schema.by_index[layer.owner]
        if self._fillings:
            for filling in self._fillings:
                filling.wait(layer.index)
            self._fillings = [filling for filling in self._fillings if not filling.is_done]
        if layer.index not in self._pools:
            state = Pool(self._arenas["state"], layer.index, layer.state_rows()) if layer.state_rows() else None
            ledger = next((one for one in self.ledgers if one.growth == layer.growth), None)
            if ledger is None:
                self._pools[layer.index] = (None, state, None)
            else:
                blocks = Pool(self._arenas[ledger.plan.name], layer.index, layer.block_rows())
                self._pools[layer.index] = (blocks, state, (ledger, self._tables[ledger.plan.name]))
        return LayerView(batch, layer, *self._pools[layer.index])

    def copy_blocks(self, ledger: BlockGroup, sources: Ids, targets: Ids) -> None:
        if len(sources):
            self._finish_filling(ledger)
            self._arenas[ledger.plan.name].copy(sources, targets)

    def host_memory(self, nbytes: int) -> Bytes:
        """See ``Books``; page-locked where the cache lies on a GPU."""
        memory = super().host_memory(nbytes)
        if self.device.type == "cuda":
            runtime, at = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
            try:
                torch.cuda.check_error(runtime.cudaHostRegister(at, nbytes, 0))
            except torch.cuda.CudaError as error:
                raise OutOfBlocks(
                    f"the host cannot lock {format_bytes(nbytes)}; give a smaller swap, or less staging"
                ) from error
            finalize(memory, runtime.cudaHostUnregister, at).atexit = False
        return memory

    def record_nbytes(self, ledger: BlockGroup) -> int:
        return ledger.plan.demand.layout.nbytes

    def blocks_out(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None:
        self._finish_filling(ledger)
        copy_to_host(self._arenas[ledger.plan.name], ids, torch.from_numpy(payloads), rows)

    def blocks_in(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None:
        copy_from_host(self._arenas[ledger.plan.name], ids, torch.from_numpy(payloads), rows)

    def blocks_in_later(self, ledger: BlockGroup, parts: Many[Part], done: Callable[[], None]) -> None:
        tables = [(ids, torch.from_numpy(payloads), rows) for ids, payloads, rows in parts]
        self._fillings.append(LayerwiseCopy(self._arenas[ledger.plan.name], tables, done, self._copy_stream))

    def _finish_filling(self, ledger: BlockGroup) -> None:
        """Wait for all layers of what is on its way into ``ledger``: it is about to be copied, or to be somebody else's."""
        arena = self._arenas[ledger.plan.name]
        for filling in [filling for filling in self._fillings if filling.arena is arena]:
            self._fillings.remove(filling)
            filling.finish()

    def move_blocks(self, ledger: BlockGroup, sources: Ids, targets: Ids) -> None:
        super().move_blocks(ledger, sources, targets)
        self.num_moves += 1

    def sectors_given(self, ledger: BlockGroup, sectors: Ids) -> None:
        """What another group left in a sector could read as NaN here: it is zeroed (with ``poison`` it is NaN)."""
        size = self.plan.sector_nbytes
        for sector in sectors.tolist():
            self._buffers[0][sector * size : (sector + 1) * size].fill_(0xFF if self._poison else 0)

    def blocks_freed(self, ledger: BlockGroup, ids: Ids) -> None:
        self._finish_filling(ledger)
        super().blocks_freed(ledger, ids)
        if self._poison and len(ids):
            self._arenas[ledger.plan.name].poison(ids)
