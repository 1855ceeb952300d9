"""The cache of a hybrid compressed-attention model, driven by slot: every layer's pools and who owns their blocks.

    slot          row of every state pool, and of every block table
    block table   [slots + 1, max_blocks] a layer: the blocks of each request in the order of the text, -1 = none yet

An engine admits a request, appends a block to a layer's table before the first entry of that block is written (CSA:
with the 4th token of every 128, HCA: with the 128th), and releases the request. Nothing is shared between requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpagoda.alloc.blocks import BlockAllocator
from kvpagoda.alloc.free_list import FreeList
from kvpagoda.errors import BadInput, CheckFailed, NeverFits, NotOwned, OutOfBlocks, RetryLater
from kvpagoda.schema.presets.deepseek_v4 import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    AttentionType,
    DSV4Config,
    LayerSpec,
    build_schema,
)
from kvpagoda.storage.arena import Device, default_device
from kvpagoda.storage.compressed_pools import PagedKVPool, StateCachePool, check_count
from kvpagoda.storage.handle import LayerCacheHandle, Step
from kvpagoda.units import ceil_div

Tensor = torch.Tensor


class KVCacheManager:
    """Schemas, pools, allocators and block tables of every layer in ``schedule`` (layer i at position i).

    ``max_concurrent_requests`` state rows; blocks of 128 tokens for each layer: ``compute_block_budget`` says how many.
    ``paged_pools[i]``, ``allocators[i]`` and ``block_tables[i]`` are None for SWA layers. All memory is taken here.
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
        check_count("max_concurrent_requests", max_concurrent_requests)
        if not schedule or any(spec.layer_idx != i for i, spec in enumerate(schedule)):
            raise BadInput(f"layer i of the schedule must have layer_idx i, got {[s.layer_idx for s in schedule]}")
        place = default_device(device)
        self.config, self.schedule = config, tuple(schedule)
        self.schemas = tuple(build_schema(config, spec) for spec in schedule)
        num_blocks = {AttentionType.CSA: num_blocks_per_csa_layer, AttentionType.HCA: num_blocks_per_hca_layer}
        self.state_pools: list[StateCachePool] = []
        self.paged_pools: list[PagedKVPool | None] = []
        self.allocators: list[BlockAllocator | None] = []
        self.block_tables: list[Tensor | None] = []
        longest = ceil_div(config.max_positions, BLOCK_SIZE_ORIGINAL_TOKENS)
        for schema in self.schemas:
            self.state_pools.append(StateCachePool(schema, max_concurrent_requests, place))
            if not schema.entries_per_block:
                self.paged_pools.append(None)
                self.allocators.append(None)
                self.block_tables.append(None)
                continue
            blocks = num_blocks[schema.attn]
            shape = (max_concurrent_requests + 1, min(blocks, longest))
            self.paged_pools.append(PagedKVPool(schema, blocks, place))
            self.allocators.append(BlockAllocator(blocks, device=place))
            self.block_tables.append(torch.full(shape, -1, dtype=torch.int32, device=place))
        self.device = self.state_pools[0].arena.buffer.device
        self._slots = FreeList(max_concurrent_requests, what="request slots")
        self._blocks: dict[int, list[list[int]]] = {}

    @property
    def num_layers(self) -> int:
        return len(self.schemas)

    @property
    def num_free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self._slots.num_free

    def memory_bytes(self) -> int:
        """Bytes of all pools (the block tables are 4 bytes a block and slot beside them)."""
        return sum(pool.memory_bytes() for pool in (*self.paged_pools, *self.state_pools) if pool is not None)

    # -- who owns what -----------------------------------------------------------------------------------------------

    def admit_request(self) -> int:
        """Take a slot, the last released first, and clear its row in every state pool. O(layers).

        Raises RetryLater, a RuntimeError, when all slots are taken.
        """
        if not self._slots.num_free:
            raise RetryLater(
                f"cannot admit another request: all {self._slots.num_ids} concurrent requests are running; "
                f"release one or raise max_concurrent_requests"
            )
        slot = int(self._slots.acquire(1)[0])
        for pool in self.state_pools:
            pool.reset_slot(slot)
        self._blocks[slot] = [[] for _ in self.schemas]
        return slot

    def release_request(self, slot: int) -> None:
        """Give back the slot and all its blocks in every layer. Raises NotOwned if the slot is not admitted."""
        held = self._held(slot)
        for allocator, ids in zip(self.allocators, held):
            if allocator is not None and ids:
                allocator.release(torch.tensor(ids, dtype=torch.int32))
        for table in self.block_tables:
            if table is not None:
                table[slot] = -1
        del self._blocks[slot]
        self._slots.release(np.array([slot], np.int32))

    def allocate_block(self, layer_idx: int, slot: int) -> int:
        """Append a block to the table of ``slot`` in one layer; call it before the first entry of the block is written,
        outside graph captures. Returns the block id.

        Raises BadInput for a layer without entries, NotOwned if the slot is not admitted, NeverFits past the model's
        longest text and OutOfBlocks, having changed nothing.
        """
        self._check_layer(layer_idx)
        allocator, table = self.allocators[layer_idx], self.block_tables[layer_idx]
        ids = self._held(slot)[layer_idx]
        if allocator is None or table is None:
            raise BadInput(f"layer {layer_idx} is {self.schemas[layer_idx].attn.name}: it keeps no blocks")
        if not allocator.num_free:
            raise OutOfBlocks(
                f"OOM: need 1 block in layer {layer_idx} ({self.schemas[layer_idx].attn.name}) for slot {slot}, which "
                f"holds {len(ids)}; 0 free of {allocator.num_total_blocks}; release a request"
            )
        if len(ids) == table.shape[1]:
            raise NeverFits(
                f"slot {slot} holds {len(ids)} blocks in layer {layer_idx}: the model's {self.config.max_positions:,} "
                f"tokens, and it asks for one more"
            )
        block = allocator.acquire(1)
        table[slot, len(ids)] = block[0]
        ids.append(int(block[0]))
        return ids[-1]

    def blocks_of(self, layer_idx: int, slot: int) -> list[int]:
        """The blocks that ``slot`` holds in one layer, in the order of the text. Raises BadInput and NotOwned."""
        self._check_layer(layer_idx)
        return list(self._held(slot)[layer_idx])

    # -- one step ----------------------------------------------------------------------------------------------------

    def acquire(
        self, layer_idx: int, request_slots: Tensor, positions: Tensor, request_ids: Tensor
    ) -> LayerCacheHandle:
        """The handle of one layer for one step: what its kernels read and write. Allocates 0 bytes of device memory.

        Three int32 tensors ``[n]`` on the cache's device, one row for each *token* of the step; the tokens of one request
        lie together, in ascending order of position; slot -1 is a padded row. They are not read here, only their
        dtype, shape and device are looked at, and the handle keeps them: fill them anew and acquire again for the next
        step. An entry whose block was not allocated goes to the hidden block and is lost. Raises BadInput.
        """
        self._check_layer(layer_idx)
        given = (("request_slots", request_slots), ("positions", positions), ("request_ids", request_ids))
        for name, tensor in given:
            if tensor.dtype != torch.int32 or tensor.shape != request_slots.shape or tensor.ndim != 1:
                raise BadInput(
                    f"{name} must be int32 [n] like request_slots, got {tensor.dtype} {list(tensor.shape)} "
                    f"beside {list(request_slots.shape)}"
                )
            if tensor.device != self.device:
                raise BadInput(f"{name} must be on {self.device}, where the cache is, got {tensor.device}")
        return LayerCacheHandle(
            self.schemas[layer_idx].kind,
            self.paged_pools[layer_idx],
            self.state_pools[layer_idx],
            self.block_tables[layer_idx],
            Step(request_slots, positions, request_ids),
        )

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every slot and every block has one owner and that the tables say so. Raises CheckFailed with the
        ids that break it. O(slots x blocks); reads the device."""
        self._slots.check()
        admitted = sorted(self._blocks)
        if self._slots.held_ids().tolist() != admitted:
            raise CheckFailed(f"slots handed out {self._slots.held_ids().tolist()}, slots with blocks {admitted}")
        for i, (allocator, table) in enumerate(zip(self.allocators, self.block_tables)):
            if allocator is None or table is None:
                continue
            allocator.check()
            held = [block for slot in admitted for block in self._blocks[slot][i]]
            taken = allocator.num_total_blocks - allocator.num_free
            twice = sorted(block for block in set(held) if held.count(block) > 1) if len(set(held)) < len(held) else []
            if twice or len(held) != taken:
                raise CheckFailed(f"layer {i}: {taken} blocks handed out, {len(held)} held; held twice: {twice[:16]}")
            expected = np.full(tuple(table.shape), -1, np.int32)
            for slot in admitted:
                expected[slot, : len(self._blocks[slot][i])] = self._blocks[slot][i]
            differs = np.flatnonzero((table.cpu().numpy() != expected).any(axis=1))
            if len(differs):
                raise CheckFailed(f"layer {i}: the block table of slots {differs.tolist()} is not what they hold")

    def _check_layer(self, layer_idx: int) -> None:
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int) or not 0 <= layer_idx < self.num_layers:
            raise BadInput(f"layer {layer_idx!r} is not one of 0..{self.num_layers - 1}")

    def _held(self, slot: int) -> list[list[int]]:
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer) or slot not in self._blocks:
            raise NotOwned(f"slot {slot!r} is not admitted: released already, or never handed out by admit_request")
        return self._blocks[slot]
