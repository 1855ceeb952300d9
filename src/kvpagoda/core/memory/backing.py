"""The physical memory behind the addresses of arenas: allocated once, given back while a cache sleeps, got again at the same
addresses.

    allocate ──► in use ──give_back──► addresses without memory ──get_again──► in use, zero
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvpagoda.core.memory.arena import zeros
from kvpagoda.errors import BadInput, shown
from kvpagoda.pages import give_back


class Backing(Protocol):
    """Three calls. Give an object of your own as ``KVCache(memory=...)``, for one cache.

    Where virtual memory is managed by you (the driver's calls on a GPU, an allocator of the engine), ``give_back`` unmaps
    and ``get_again`` maps. With a plain buffer of yours, ``give_back`` does nothing and returns 0, and ``get_again`` fills it
    with zeros: what you do with it in between is your affair, since nothing reads it then.
    """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory, uint8 ``[nbytes]``, contiguous, on the cache's device. Called when the cache is made,
        once for each arena; the addresses must stay the same as long as the tensor lives."""

    def give_back(self) -> int:
        """Give the physical memory of all that was allocated back, and return how many bytes that are. Nothing reads or
        writes there until ``get_again`` has returned."""

    def get_again(self) -> None:
        """Provide memory at the same addresses, which reads as zero. Also called after a ``give_back`` or ``get_again``
        that raised or was interrupted. Raises whatever says that there is none: the cache then sleeps on."""


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
