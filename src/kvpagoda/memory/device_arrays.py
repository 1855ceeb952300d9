"""Arrays that are written on the host and read by kernels on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.kernels.flatten_table import flatten_table
from kvpagoda.memory.no_memory import Array, HostArrays


class DeviceArrays(HostArrays):
    """As tensors on ``device``; on the CPU they are the same memory as the host's arrays."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_host = device, device.type == "cpu"

    def twin(self, host: Array) -> Any:
        """A tensor with the contents of ``host``."""
        tensor = torch.from_numpy(host)
        return tensor if self.is_host else tensor.to(self.device, copy=True)

    def upload(self, target: Any, source: npt.NDArray[Any], index: Any = ...) -> None:
        """Copy ``source`` to ``target[index]``; returns when the source was read."""
        values = torch.from_numpy(np.ascontiguousarray(source))
        if isinstance(index, tuple):
            places = tuple(torch.from_numpy(np.ascontiguousarray(one)).to(self.device) for one in index)
            target[places] = values.to(self.device, target.dtype)
        else:
            target[index].copy_(values)

    def flatten(self, table: Any, starts: Any, indptr: Any, block_size: int, out: Any) -> None:
        flatten_table(table, starts, indptr, out, block_size)
