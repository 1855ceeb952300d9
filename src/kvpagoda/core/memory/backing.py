"""The physical memory behind the addresses of arenas: allocated once, given back while a cache sleeps, got again at the same
addresses.

    allocate ──► in use ──give_back──► addresses without memory ──get_again──► in use, zero
"""

from __future__ import annotations

import torch

from kvpagoda.abc import Backing
from kvpagoda.core.memory.arena import zeros
from kvpagoda.errors import BadInput, shown
from kvpagoda.pages import give_back


class OwnMemory:
    """The memory of a cache that is given none, on ``device``. On a CPU it is given back page by page, where the system can;
    torch's memory on a GPU is not given back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, list[torch.Tensor]()

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._buffers.append(zeros(nbytes, self._device))
        return self._buffers[-1]

    def give_back(self) -> int:
        return sum(give_back(buffer.numpy()) for buffer in self._buffers if self._device.type == "cpu")

    def get_again(self) -> None:
        pass


def backing_of(memory: Backing | None, device: torch.device) -> Backing:
    """Return ``memory``, or for None memory of the cache's own on ``device``. Raises BadInput for an object that lacks one
    of the three calls."""
    if memory is None:
        return OwnMemory(device)
    lacking = [name for name in ("allocate", "give_back", "get_again") if not callable(getattr(memory, name, None))]
    if lacking:
        text = f"memory= needs allocate, give_back and get_again; {shown(memory)} lacks {', '.join(lacking)}"
        raise BadInput(text, needed=lacking)
    return memory


def checked(memory: torch.Tensor, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``memory``, which a ``Backing`` allocated. Raises BadInput unless it is uint8 ``[nbytes]`` on ``device``."""
    found = shown(memory)
    if isinstance(memory, torch.Tensor):
        is_right = memory.dtype == torch.uint8 and memory.shape == (nbytes,) and memory.is_contiguous()
        if is_right and memory.device.type == device.type:
            return memory
        found = f"{memory.dtype} {list(memory.shape)} on {memory.device}"
    text = f"allocate({nbytes}) of memory= must return contiguous uint8 [{nbytes}] on {device}, got {found}"
    raise BadInput(text, needed=nbytes, available=found)
