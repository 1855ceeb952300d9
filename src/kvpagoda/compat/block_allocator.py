"""An allocator of block ids, handed out as int32 tensors on the device."""

from __future__ import annotations

import torch

from kvpagoda.free_list import FreeList
from kvpagoda.id_tensors import Device, IdsLike, default_device, ids_from
from kvpagoda.pools import Staging
from kvpagoda.units import whole_number


class BlockAllocator:
    """Allocates block ids ``0 .. num_total_blocks - 1``. A face of ``FreeList``, which keeps its state on the host.

    ``acquire`` and ``release`` run between graph captures only; reading ids that were handed out is safe inside a
    captured graph.

    Args:
        num_total_blocks: how many.
        device: where ``acquire`` puts its ids; None: CUDA when a GPU is there, else the CPU.

    Examples:
        >>> blocks = BlockAllocator(8, device="cpu")
        >>> ids = blocks.acquire(3)
        >>> ids.dtype, blocks.num_free
        (torch.int32, 5)
        >>> blocks.release(ids)
        >>> blocks.release(ids)
        Traceback (most recent call last):
        kvpagoda.errors.NotOwned: id 0 of blocks is not held: freed twice, or never handed out
    """

    def __init__(self, num_total_blocks: int, device: Device = None) -> None:
        self.device = default_device(device)
        self._staging = Staging(self.device)
        self._blocks = FreeList(num_total_blocks, what="blocks")
        self.num_total_blocks = self._blocks.num_ids

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return self._blocks.num_free

    def acquire(self, n: int) -> torch.Tensor:
        """Take distinct blocks and return their ids, int32 ``[n]`` on the device. O(n).

        The blocks are the caller's until ``release``.

        Args:
            n: how many.

        Raises:
            OutOfBlocks: (a RuntimeError; its text has ``OOM``, the requested, free and total numbers of blocks), taking
                no block.
            BadInput: an ``n`` that is not a whole number of at least 0.
        """
        count = whole_number(n, "the number of blocks to take")
        ids = self._staging.to_device(self._blocks.require(count))
        self._blocks.acquire(count)
        return ids

    def release(self, ids: IdsLike) -> None:
        """Free blocks. O(n). If it raises, no block was freed.

        Args:
            ids: a tensor on any device, an array or a sequence of whole numbers, of any shape.

        Raises:
            NotOwned: a block that is not held (released twice), out of range or named twice.
            BadInput: ids that are not whole numbers.
        """
        self._blocks.release(ids_from(ids))

    def check(self) -> None:
        """Prove that every block is either free or held. O(num_total_blocks).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._blocks.check()
