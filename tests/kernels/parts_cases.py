"""Encoded rows whose parts are arrays of their own, for ``append_parts`` and ``gather_parts``."""

import torch

from kvpagoda.core.kernels.packed_rows import Parts
from kvpagoda.formats.encoding import Encoding
from kvpagoda.layouts.packed import by_part, bytes_of

PAGE, PAGES, HEADS, CANARY = 4, 3, 2, 0xA5
SLOTS = [5, -1, 0, 11, 12, 3, 2, 1 << 30, 7, -9]
"""Slots of three pages of four rows, some of no page."""
CASES = {
    "fp8-80": (Encoding("fp8"), 80),
    "fp8_in_groups-128": (Encoding("fp8", group=64), 128),
    "fp8_rope-96": (Encoding("fp8", kept=32), 96),
    "fp8_ue8m0-192": (Encoding("fp8_ue8m0", kept=64, group=64), 192),
    "mxfp4-96": (Encoding("mxfp4", group=32), 96),
    "nvfp4-112": (Encoding("nvfp4", group=16), 112),
    "int8-192": (Encoding("int8"), 192),
    "int8_in_groups-128": (Encoding("int8", group=32), 128),
}
IDS = [*CASES]


def parts_of(encoding, dim, heads=HEADS, pages=PAGES):
    """Return parts full of canaries, each an array in records of one allocation, and that allocation, uint8."""
    kinds = {"float32": 4, "bfloat16": 2, "uint8": 1}
    shapes = [(kinds[dtype], shape, dtype) for _, shape, dtype in encoding.vector(dim)]
    sizes = [PAGE * heads * torch.Size(shape).numel() * size for size, shape, _ in shapes]
    starts = [sum(-(-size // 16) * 16 for size in sizes[:i]) for i in range(len(sizes) + 1)]
    memory = torch.full((pages, starts[-1] + 16), CANARY, dtype=torch.uint8)
    views = []
    for (_, shape, dtype), size, start in zip(shapes, sizes, starts):
        array = memory[:, start : start + size].view(getattr(torch, dtype)).unflatten(1, (PAGE, 1, heads, *shape))
        views.append(bytes_of(array, 5).transpose(2, 3))
    return Parts.of(by_part(views), encoding), memory


def rows_of(dim, seed=0):
    """bfloat16 rows of many magnitudes, with zeros, inf and NaN in places."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(SLOTS), HEADS * dim, generator=generator)
    x *= torch.exp2(8 * torch.randn(len(SLOTS), HEADS, 1, generator=generator).expand(-1, -1, dim).reshape(x.shape))
    x[0, : dim // 2], x[3, ::3], x[5, 7] = 0, -1e-3, torch.finfo(torch.bfloat16).max
    x[6, 3], x[8, 5] = torch.nan, -torch.inf
    return x.bfloat16()
