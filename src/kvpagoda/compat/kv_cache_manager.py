"""The cache of a hybrid compressed-attention model, driven by slots: pools, allocators and block tables of every layer.

    slot          row of every state pool, and of every block table
    block table   [slots + 1, max_blocks] per layer: the blocks of each request in order of position, -1 = none yet

An engine admits a request, appends a block to a layer's table before the first entry of that block is written (CSA:
with the 4th token of every 128, HCA: with the 128th), and releases the request. Nothing is shared between requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpagoda.compat.compressed_pools import PagedKVPool, StateCachePool
from kvpagoda.compat.deepseek_v4 import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    AttentionType,
    DSV4Config,
    LayerSchema,
    LayerSpec,
    build_schema,
)
from kvpagoda.compat.layer_handle import LayerCacheHandle
from kvpagoda.errors import BadInput, CheckFailed, NeverFits, NotOwned, OutOfBlocks, RetryLater
from kvpagoda.free_list import FreeList, FreeStack
from kvpagoda.id_tensors import Device, default_device
from kvpagoda.pools import DeviceBlocks, Step
from kvpagoda.schema import FULL
from kvpagoda.schema.plan import GroupPlan
from kvpagoda.units import ceil_div, positive_numbers, whole_number

Tensor = torch.Tensor


class KVCacheManager:
    """Schemas, pools, allocators and block tables of every layer of a schedule (layer i at position i).

    Layer i has ``schemas[i]`` and ``state_pools[i]``, and, all None for SWA layers, ``paged_pools[i]``,
    ``allocators[i]``, which owns its blocks, and ``block_tables[i]``, int32 ``[slots + 1, max_blocks]`` on the device,
    -1 = empty. The constructor allocates all memory.

    Args:
        config: of the model.
        schedule: its layers.
        max_concurrent_requests: state rows of each layer.
        num_blocks_per_csa_layer: blocks of 128 tokens of each CSA layer (see ``compute_block_budget``).
        num_blocks_per_hca_layer: blocks of 128 tokens of each HCA layer.
        device: None: CUDA when a GPU is there, else the CPU.

    Raises:
        BadInput: ``max_concurrent_requests`` is below 1, a number of blocks is below 1 though the schedule has such
            layers, the schedule is out of order, or there is no such device.

    Examples:
        >>> from kvpagoda import DSV4Config, build_schedule
        >>> config = DSV4Config((0, 4, 128), head_dim=64, rope_dim=16, index_dim=32)    # an SWA, a CSA and an HCA layer
        >>> manager = KVCacheManager(config, build_schedule(config), max_concurrent_requests=2,
        ...                          num_blocks_per_csa_layer=8, num_blocks_per_hca_layer=8, device="cpu")
        >>> slot = manager.admit_request()
        >>> block = manager.allocate_block(1, slot)         # before the first entry of the block is written
        >>> tokens = torch.full((4,), slot, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
        >>> handle = manager.acquire(1, *tokens, request_ids=torch.zeros(4, dtype=torch.int32))
        >>> handle.write_swa(torch.ones(4, 64, dtype=torch.bfloat16))
        >>> handle.read_swa_view().swa_pos[slot, :6].tolist()
        [0, 1, 2, 3, -1, -1]
        >>> manager.release_request(slot)
    """

    def __init__(
        self,
        config: DSV4Config,
        schedule: Sequence[LayerSpec],
        max_concurrent_requests: int,
        num_blocks_per_csa_layer: int,
        num_blocks_per_hca_layer: int,
        device: Device = None,
    ) -> None:
        (num_slots,) = positive_numbers(max_concurrent_requests=max_concurrent_requests)
        least = {spec.attn: 1 for spec in schedule}  # at least one block if a layer needs blocks
        num_csa = whole_number(num_blocks_per_csa_layer, "num_blocks_per_csa_layer", least.get(AttentionType.CSA, 0))
        num_hca = whole_number(num_blocks_per_hca_layer, "num_blocks_per_hca_layer", least.get(AttentionType.HCA, 0))
        if not schedule or any(spec.layer_idx != i for i, spec in enumerate(schedule)):
            text = f"layer i of the schedule must have layer_idx i, got {[s.layer_idx for s in schedule]}"
            raise BadInput(text, needed=[s.layer_idx for s in schedule])
        self.device = default_device(device)
        self.config, self.schedule = config, tuple(schedule)
        self.schemas = tuple(build_schema(config, spec) for spec in schedule)
        num_blocks = [{AttentionType.CSA: num_csa, AttentionType.HCA: num_hca}.get(s.attn, 0) for s in self.schemas]
        self._slots = FreeList(num_slots, what="request slots")
        self.state_pools = [StateCachePool(schema, num_slots, self.device) for schema in self.schemas]
        self.paged_pools = [PagedKVPool(s, n, self.device) if n else None for s, n in zip(self.schemas, num_blocks)]
        self._blocks = [self._layer_blocks(s, n) if n else None for s, n in zip(self.schemas, num_blocks)]
        self.allocators: list[FreeStack | None] = [layer.group.free if layer else None for layer in self._blocks]
        self.block_tables: list[Tensor | None] = [layer.table if layer else None for layer in self._blocks]
        self.num_layers = len(schedule)

    def _layer_blocks(self, schema: LayerSchema, num_blocks: int) -> DeviceBlocks:
        """Return the blocks of one layer: ids from 0; an empty cell is -1, the hidden last block of the pool."""
        layout = schema.block_layout()
        plan = GroupPlan(FULL, layout, BLOCK_SIZE_ORIGINAL_TOKENS, num_blocks, None, layout.nbytes)
        columns = min(num_blocks, ceil_div(self.config.max_positions, BLOCK_SIZE_ORIGINAL_TOKENS))
        name = f"layer {schema.layer_idx} ({schema.attn.name})"
        return DeviceBlocks(plan, self._slots.num_ids, columns, self.device, name=name)

    @property
    def num_free_slots(self) -> int:
        """The number of requests that can still be admitted."""
        return self._slots.num_free

    def memory_bytes(self) -> int:
        """Return the bytes of all pools; the block tables take 4 more bytes per block and slot."""
        return sum(pool.memory_bytes() for pool in (*self.paged_pools, *self.state_pools) if pool is not None)

    # -- slots and blocks --------------------------------------------------------------------------------------------

    def admit_request(self) -> int:
        """Take a slot, the most recently released first, and reset its row in every state pool. O(layers).

        Raises:
            RetryLater: a RuntimeError, when all slots are taken.
        """
        if not self._slots.num_free:
            raise RetryLater(
                f"cannot admit another request: all {self._slots.num_ids} concurrent requests are running; "
                f"release one or raise max_concurrent_requests", needed=1, available=0,
            )  # fmt: skip
        slot = int(self._slots.peek(1)[0])
        for pool in self.state_pools:
            pool.reset_slot(slot)
        return int(self._slots.acquire(1)[0])

    def release_request(self, slot: int) -> None:
        """Free a slot and all its blocks in every layer.

        Args:
            slot: of the request.

        Raises:
            NotOwned: the slot is not admitted.
        """
        self._check_slot(slot)
        for blocks in filter(None, self._blocks):
            own = blocks.group.own_places(slot)
            blocks.group.close(slot)
            blocks.group.release(own)
            blocks.upload(slot)
        self._slots.release_id(slot)

    def allocate_block(self, layer_idx: int, slot: int) -> int:
        """Append a block to the table of a request in one layer and return the block id.

        Call it before the first entry of the block is written, outside graph captures.

        Args:
            layer_idx: of the layer.
            slot: of the request.

        Raises:
            BadInput: a layer without entries.
            NotOwned: the slot is not admitted.
            NeverFits: past the model's longest text.
            OutOfBlocks: no room; nothing changed then.
        """
        blocks = self._blocks_of(layer_idx)
        self._check_slot(slot)
        group = blocks.group
        held = len(group.held_places(slot))
        if not group.free.num_free:
            raise OutOfBlocks(
                f"OOM: need 1 block in {group.name} for slot {slot}, which holds {held}; "
                f"0 free of {group.free.num_ids}; release a request", needed=1, available=0, group=group.name,
            )  # fmt: skip
        if held == group.table.cells.shape[1]:
            raise NeverFits(
                f"slot {slot} holds {held} blocks in {group.name}, all for the model's {self.config.max_positions:,} "
                f"tokens; there is no room for one more", needed=held + 1, available=held, group=group.name,
            )  # fmt: skip
        group.append(slot, group.free.peek(1))
        blocks.upload(slot)
        return int(group.table.cells[slot, held])

    def blocks_of(self, layer_idx: int, slot: int) -> list[int]:
        """Return the blocks that a request holds in one layer, in order of position.

        Args:
            layer_idx: of the layer.
            slot: of the request.

        Raises:
            BadInput: there is no such layer, or it keeps no blocks.
            NotOwned: the slot is not admitted.
        """
        group = self._blocks_of(layer_idx).group
        self._check_slot(slot)
        return [int(block) for block in group.held_places(slot)]

    # -- one step ----------------------------------------------------------------------------------------------------

    def acquire(
        self, layer_idx: int, request_slots: Tensor, positions: Tensor, request_ids: Tensor
    ) -> LayerCacheHandle:
        """Return the handle of one layer for one step. Allocates 0 bytes of device memory.

        The three tensors are on the cache's device, with one row for each *token* of the step. The tokens of one
        request are adjacent, in ascending order of position. Only their dtype, shape and device are checked, not their
        values. The handle keeps the tensors: for the next step fill them again and acquire again. An entry whose block
        was not allocated is written to the hidden block and lost.

        Args:
            layer_idx: of the layer.
            request_slots: int32 ``[n]``; -1: a padded row.
            positions: int32 ``[n]``.
            request_ids: int32 ``[n]``.

        Raises:
            BadInput: there is no such layer, or a tensor has another dtype, shape or device.
        """
        self._check_layer(layer_idx)
        device = self.state_pools[layer_idx]["swa_pos"].device  # with its index, which ``self.device`` may lack
        given = {"request_slots": request_slots, "positions": positions, "request_ids": request_ids}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise BadInput(
                    f"{name} must be an int32 tensor [n], got {type(tensor).__name__}",
                    field=name, needed=type(tensor).__name__,
                )  # fmt: skip
            if tensor.dtype != torch.int32 or tensor.shape != request_slots.shape or tensor.ndim != 1:
                text = f"{name} must be int32 [n] like request_slots, got {tensor.dtype} {list(tensor.shape)}"
                raise BadInput(text, field=name, needed=tensor.dtype, available=list(tensor.shape))
            if tensor.device != device:
                text = f"{name} must be on {device}, where the cache is, got {tensor.device}"
                raise BadInput(text, field=name, needed=tensor.device, available=device)
        kind, table = self.schemas[layer_idx].kind, self.block_tables[layer_idx]
        step = Step(request_slots, positions, request_ids, state_rows=request_slots, dummy=-1)
        return LayerCacheHandle(kind, self.paged_pools[layer_idx], self.state_pools[layer_idx], table, step)

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every slot and every block has one owner, and that the block tables agree.

        O(slots x blocks); reads the device.

        Raises:
            CheckFailed: with the ids that break it.
        """
        self._slots.check()
        idle = np.setdiff1d(np.arange(self._slots.num_ids), self._slots.held_ids()).tolist()
        for blocks in filter(None, self._blocks):
            group = blocks.group
            group.check()
            holding = [slot for slot in idle if len(group.held_places(slot))]
            if holding:
                raise CheckFailed(f"{group.name}: slots {holding} hold blocks but are not admitted")
            differs = np.flatnonzero((blocks.table.cpu().numpy() != group.table.cells).any(axis=1))
            if len(differs):
                raise CheckFailed(f"{group.name}: the device's table of slots {differs.tolist()} is not the host's")

    def _check_layer(self, layer_idx: int) -> None:
        whole_number(layer_idx, "the index of a layer", below=self.num_layers)

    def _blocks_of(self, layer_idx: int) -> DeviceBlocks:
        """Return the blocks of a layer. Raises BadInput for a layer that keeps none."""
        self._check_layer(layer_idx)
        blocks = self._blocks[layer_idx]
        if blocks is None:
            text = f"layer {layer_idx} is {self.schemas[layer_idx].attn.name}: it keeps no blocks"
            raise BadInput(text, needed=layer_idx)
        return blocks

    def _check_slot(self, slot: int) -> None:
        if not self._slots.is_held(slot):
            text = f"slot {slot!r} is not admitted: released already, or never handed out by admit_request"
            raise NotOwned(text, needed=slot)
