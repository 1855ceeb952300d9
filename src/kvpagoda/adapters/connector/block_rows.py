"""The memory of an engine's layers as rows of bytes, one for each block, and copies between them and records.

payload of a record   | block 0: layer 0, layer 1, .. | block 1: layer 0, layer 1, .. | ..
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.errors import LayoutError
from kvpagoda.kernels.copy_rows import copy_rows

Tensor = torch.Tensor
Ids = npt.NDArray[np.int64]


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


class BlockRows:
    """The blocks of one group: those of its ``layers``, name -> uint8 ``[num_blocks, nbytes]``."""

    def __init__(self, layers: dict[str, Tensor]) -> None:
        self.layers, self.nbytes = {}, 0  # type: dict[str, tuple[Tensor, slice]], int
        known = set[tuple[int, int]]()
        for name, rows in layers.items():
            place = rows.data_ptr(), rows.shape[1]
            if place in known:  # a layer that reads another one's memory
                continue
            known.add(place)
            self.layers[name] = rows, slice(self.nbytes, self.nbytes + rows.shape[1])
            self.nbytes += rows.shape[1]

    def to_records(self, ids: Ids, payloads: Any, rows: Sequence[int]) -> None:
        """Copy blocks ``ids``, ``[records, blocks]``, to ``rows`` of ``payloads``, uint8 ``[M, n]`` on the host."""
        self._copy(ids, torch.from_numpy(payloads), np.asarray(rows, np.int64), [*self.layers], is_out=True)

    def from_records(self, ids: Ids, payloads: Any, rows: Sequence[int], layers: Sequence[str] | None = None) -> None:
        """Copy ``rows`` of ``payloads`` to blocks ``ids``, but not to id 0. ``layers``: only to these (None: to all)."""
        names = [*self.layers] if layers is None else layers
        self._copy(ids, torch.from_numpy(payloads), np.asarray(rows, np.int64), names, is_out=False)

    def _copy(self, ids: Ids, table: Tensor, rows: Ids, names: Sequence[str], *, is_out: bool) -> None:
        for place, column in enumerate(ids.T):
            wanted = column != 0
            pairs = torch.from_numpy(np.stack((column[wanted], rows[wanted]), axis=1))
            for name in names:
                memory, inside = self.layers[name]
                start = place * self.nbytes
                part = table[:, start + inside.start : start + inside.stop]
                if is_out:
                    copy_rows(memory, part, pairs)
                else:
                    copy_rows(part, memory, pairs.flip(1))
