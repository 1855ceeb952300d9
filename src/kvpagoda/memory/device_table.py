"""Block tables where kernels can read them."""

from __future__ import annotations

import torch

from kvpagoda.blocks import BlockTable
from kvpagoda.memory.arena import Device, default_device


class DeviceTable:
    """``tensor``: the cells of ``table`` as an int32 tensor on ``device``. On the CPU it is the same memory; on a GPU
    ``upload`` copies the rows that changed.

    The host's memory is not page-locked: a copy from such memory has read its source when it returns, so that the host
    may write on at once.
    """

    def __init__(self, table: BlockTable, device: Device = None) -> None:
        place = default_device(device)
        self._table, self._host = table, torch.from_numpy(table.cells)
        self.tensor = self._host if place.type == "cpu" else self._host.to(place)

    def upload(self) -> torch.Tensor:
        """Bring ``tensor`` up to date and return it; nothing to copy on the CPU."""
        if self.tensor is not self._host:
            for slot in self._table.changed:
                self.tensor[slot].copy_(self._host[slot])
        self._table.changed.clear()
        return self.tensor
