"""Index arrays that the host writes and kernels on a device read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.kernels.flatten_table import flatten_table
from kvpagoda.memory.no_memory import Array, HostArrays


class DeviceArrays(HostArrays):
    """``HostArrays`` whose twins are tensors on ``device``; on the CPU twins share the memory of the host's arrays."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_host = device, device.type == "cpu"

    def twin(self, host: Array) -> Any:
        """Return a tensor with the contents of ``host``."""
        tensor = torch.from_numpy(host)
        return tensor if self.is_host else tensor.to(self.device, copy=True)

    def upload(self, target: Any, source: npt.NDArray[Any], index: Any = ...) -> None:
        """Copy ``source`` to ``target[index]``. When this returns, ``source`` has been read and may change."""
        values = torch.from_numpy(np.ascontiguousarray(source))
        if isinstance(index, tuple):
            places = tuple(torch.from_numpy(np.ascontiguousarray(axis)).to(self.device) for axis in index)
            target[places] = values.to(self.device, target.dtype)
        else:
            target[index].copy_(values)

    def flatten(self, table: Any, starts: Any, indptr: Any, block_size: int, out: Any) -> None:
        flatten_table(table, starts, indptr, out, block_size)
