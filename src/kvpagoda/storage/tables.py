"""Which block of a request holds which tokens: one row of block ids for every request slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.storage.arena import Device, default_device


class BlockTable:
    """``[num_slots + 1, num_columns]`` int32 block ids; ``empty`` means none (the padding block), the last row is the dummy.

    ``host`` is what the library reads and writes; ``device`` is the tensor that kernels read. On the CPU they are the
    same memory; on a GPU ``upload`` copies the rows that changed. The host memory is not page-locked: a copy from such
    memory has read its source when it returns, so that the host may write on at once.
    """

    def __init__(self, num_slots: int, num_columns: int, device: Device = None, empty: int = 0) -> None:
        self.empty = empty
        place = default_device(device)
        host = torch.full((num_slots + 1, num_columns), empty, dtype=torch.int32)
        self.host: npt.NDArray[np.int32] = host.numpy()
        self.device: torch.Tensor = host if place.type == "cpu" else host.to(place)
        self._host_tensor = host
        self._changed: set[int] = set()

    def put(self, slot: int, column: int, ids: npt.NDArray[np.int32]) -> None:
        """Write ``ids`` into the row of ``slot`` from ``column`` on."""
        self.host[slot, column : column + len(ids)] = ids
        self._changed.add(slot)

    def take(self, slot: int, first: int, end: int) -> npt.NDArray[np.int32]:
        """Empty the cells ``first .. end - 1`` of ``slot`` and return what they held."""
        ids: npt.NDArray[np.int32] = self.host[slot, first:end].copy()
        self.host[slot, first:end] = self.empty
        self._changed.add(slot)
        return ids

    def upload(self) -> None:
        """Bring the device's copy up to date; nothing to do on the CPU."""
        if self.device is not self._host_tensor:
            for slot in self._changed:
                self.device[slot].copy_(self._host_tensor[slot])
        self._changed.clear()
