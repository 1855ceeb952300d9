"""The blocks of one layer of an engine that allocates each layer by itself, with their block table on a device."""

from __future__ import annotations

import torch

from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.memory.device_memory import DeviceArrays
from kvpagoda.core.memory.writes import Writes
from kvpagoda.schema.plan import GroupPlan


class DeviceBlocks:
    """The blocks of a group for requests: ``group`` knows their owners, and ``table`` is the block table for kernels.

    ``table``: int32 ``[num_slots + 1, max_blocks]`` on ``device``; on the CPU the memory of the group's own table. Ids
    begin at 0, and -1 is an empty cell.

    Args:
        plan: of the group.
        num_slots: requests.
        max_blocks: the most blocks of a request.
        device: of the table.
        name: of the layer, in messages.
    """

    def __init__(self, plan: GroupPlan, num_slots: int, max_blocks: int, device: torch.device, *, name: str) -> None:
        self.group = BlockGroup(plan, num_slots, max_blocks, first_id=0, name=name)
        self._arrays = DeviceArrays(device)
        self.table: torch.Tensor = self._arrays.twin(self.group.table.cells)

    def upload(self, slot: int) -> None:
        """Copy a row to the device; does nothing on the CPU.

        Args:
            slot: the row.
        """
        if not self._arrays.is_host:
            writes = Writes()
            writes.put("row", self.table[slot], self.group.table.cells[slot])
            self._arrays.send(writes)
