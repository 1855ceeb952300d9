"""The memory of an engine's layers as rows of bytes, one for each block."""

from __future__ import annotations

import torch

from kvpagoda.errors import LayoutError

Tensor = torch.Tensor


def rows_of(name: str, cache: Tensor, num_blocks: int) -> Tensor:
    """Return the memory of a layer's ``cache`` as uint8 ``[num_blocks, nbytes]``: row ``i`` is block ``i``.

    A block is one row of ``cache``, or several in succession. Raises LayoutError if its bytes are not together.
    """
    blocks = cache if cache.shape[0] == num_blocks else cache.view(num_blocks, -1, *cache.shape[1:])
    inner = sorted((stride, size) for stride, size in zip(blocks.stride()[1:], blocks.shape[1:]) if size > 1)
    dense = 1
    for stride, size in inner:
        if stride != dense:
            raise LayoutError(
                f"the bytes of a block of layer {name} are not together (shape {list(cache.shape)}, strides "
                f"{cache.stride()}); set VLLM_KV_CACHE_LAYOUT to LBHNC, LBNHC, BLHNC or BLNHC",
                rule="blocks", needed=dense, available=stride,
            )  # fmt: skip
        dense *= size
    width = cache.element_size()
    rows = torch.empty(0, dtype=torch.uint8, device=cache.device)
    start, shape = blocks.storage_offset() * width, (num_blocks, dense * width)
    return rows.set_(cache.untyped_storage(), start, shape, (blocks.stride(0) * width, 1))
