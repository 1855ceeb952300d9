"""How the kernels of rows are launched: the constants they are compiled for, and how much a program takes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch

ELEMENTS = {(8, False): 1024, (8, True): 4096, (4, False): 1024, (4, True): 2048}
"""(bits of a code, is a launch large) -> elements of a program: few, so that the rows of one step keep many multiprocessors
busy; or many, so that a thread has several accesses of 16 bytes under way. Of 4 bits no more than 16 for each thread: to
pair those of more, Triton moves them through shared memory six times."""
LARGE = 1 << 21
"""Elements from which a launch is large: four programs for each of the 132 multiprocessors of an H100."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Of every launch. Without fusion each operation is one IEEE operation."""


class Constants(SimpleNamespace):
    """The compile-time constants of a kernel, ``TILE`` and ``WIDTH`` among them. They must not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.TILE, self.WIDTH))  # of every launch, so not of all: the others are compared


def block(size: int) -> int:
    """Return the least power of two that is not below ``size``: Triton has no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def tile(elements: int, code_bits: int, is_large: bool) -> int:
    """Return how many vectors of ``elements``, a power of two, a program takes: a power of two."""
    return max(1, ELEMENTS[code_bits, is_large] // elements)


def warm_ups(nowhere: int, device: torch.device) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield (slots, is the launch large) of all launches of a kernel of rows that differ in what is compiled. The slots,
    ``[1]``, are ``nowhere``, which is out of range."""
    for dtype in (torch.int32, torch.int64) if nowhere < 2**31 else (torch.int64,):
        slots = torch.full((1,), nowhere, dtype=dtype, device=device)
        for is_large in (False, True):
            yield slots, is_large
