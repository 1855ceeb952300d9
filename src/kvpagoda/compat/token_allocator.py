"""An allocator of KV indices, the rows of a ``KVPool``, one by one or in whole pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kvpagoda.arrays import Ids
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.free_list import FreeList, IdSet
from kvpagoda.id_tensors import Device, IdsLike, default_device, ids_from
from kvpagoda.pools import Staging
from kvpagoda.units import ceil_div, whole_number

_NONE: Ids = np.empty(0, np.int32)


class TokenToKVPoolAllocator:
    """Allocates indices ``1 .. size`` of a ``KVPool``; index 0 is its padding row and is never handed out.

    With ``page_size > 1`` the unit is a page of that many adjacent indices; only pages that fit whole are usable:

        index   0 | 1 .. page_size | page_size + 1 .. 2 * page_size | ..  .. size
              pad |     page 1     |             page 2             | rest: never handed out

    so ``k_buffer[l][1 : 1 + num_pages * page_size]`` is the paged view for block-table kernels, its first page 0.

    Freed pages wait in a second buffer. It is merged into the free list (sorted, lowest index first, if ``need_sort``)
    only when an ``alloc`` needs it. The free list is on the host and counts pages.

    Args:
        size: usable indices.
        device: where ``alloc`` returns its indices; None: CUDA when a GPU is there, else the CPU.
        page_size: indices of a page.
        need_sort: hand out the lowest free pages first.

    Examples:
        >>> tokens = TokenToKVPoolAllocator(size=64, device="cpu", page_size=8)
        >>> indices = tokens.alloc(need_size=6)     # a whole page
        >>> indices.tolist(), tokens.available_size()
        ([1, 2, 3, 4, 5, 6, 7, 8], 56)
        >>> tokens.free(indices[:6])                # the first index that comes back frees the page
        >>> tokens.available_size()
        64
    """

    def __init__(self, size: int, device: Device = None, page_size: int = 1, need_sort: bool = True) -> None:
        self.size, self.page_size = whole_number(size, "size"), whole_number(page_size, "page_size", at_least=1)
        if self.size >= 2**31:
            text = f"KV indices are int32: size must be below 2^31, got {size}"
            raise BadInput(text, needed=self.size, available=2**31 - 1)
        self.device, self.need_sort = default_device(device), need_sort
        self._staging = Staging(self.device)
        self.num_pages = self.size // self.page_size
        self._pages = FreeList(self.num_pages, first=1, what="KV indices" if self.page_size == 1 else "pages")
        # Indices not freed since their page was handed out. Pages of one index do not need this.
        self._unfreed = IdSet(self.num_pages * self.page_size if self.page_size > 1 else 0, 1, "KV indices")
        self._group_depth = 0
        self._waiting, self._num_waiting = list[Ids](), 0  # freed pages
        self._grouped = list[Ids]()  # pages freed inside the open group

    def available_size(self) -> int:
        """Return how many tokens ``alloc`` can still hand out: those of the free pages, waiting ones included."""
        return (self._pages.num_free + self._num_waiting) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take distinct indices; return None, taking none, if there are fewer. O(n).

        Args:
            need_size: at least so many, rounded up to whole pages.

        Returns:
            all indices of ``p = ceil(need_size / page_size)`` pages, int32 ``[p * page_size]`` on the device, ascending
            by one inside each page; they are the caller's until ``free``.

        Raises:
            BadInput: a ``need_size`` that is not a whole number of at least 0.
        """
        num_pages = ceil_div(whole_number(need_size, "the number of tokens"), self.page_size)
        if num_pages > self._pages.num_free:
            if num_pages > self._pages.num_free + self._num_waiting:
                return None
            self.merge_and_sort_free()
        indices = self._pages.peek(num_pages)
        if self.page_size > 1:
            offsets = np.arange(1 - self.page_size, 1, dtype=np.int32)
            indices = (indices[:, None] * np.int32(self.page_size) + offsets).reshape(-1)
        out = self._staging.to_device(indices)
        self._pages.acquire(num_pages)
        if self.page_size > 1:
            self._unfreed.flags[indices] = True
        return out

    def free(self, indices: IdsLike) -> None:
        """Free indices. O(n log n).

        The first freed index of a page frees the whole page. Its other indices may be freed later, each once, until the
        page is handed out again; that changes nothing. If it raises, nothing is freed, but an open group is closed.

        Args:
            indices: a tensor on any device, an array or a sequence, of any shape.

        Raises:
            NotOwned: an index that is not held (freed twice, also inside a group), out of range or named twice.
            BadInput: anything but whole numbers.
        """
        try:
            ids = ids_from(indices)
            if self.page_size > 1:
                ids = self._unfreed.prove(ids)
                pages = np.unique((ids - 1) // self.page_size + 1)
                self._grouped.append(self._pages.reclaim(pages[self._pages.are_held(pages)]))
                self._unfreed.flags[ids] = False
            else:
                self._grouped.append(self._pages.reclaim(ids))
        except BaseException:
            self._end_groups()
            raise
        if not self._group_depth:
            self._end_groups()

    def merge_and_sort_free(self) -> None:
        """Merge waiting pages into the free list, lowest first if ``need_sort``; those of an open group still wait."""
        if self._num_waiting:
            self._pages.give(np.concatenate(self._waiting))
            self._waiting, self._num_waiting = [], 0
            if self.need_sort:
                self._pages.keep_only(self._pages.free_ids()[::-1])

    def free_group_begin(self) -> None:
        """Open a group: indices freed inside it become free all at once when it ends. Groups nest.

        Prefer ``with allocator.free_group():``, which also ends the group when an exception is raised.
        """
        self._group_depth += 1

    def free_group_end(self) -> None:
        """Close the innermost group. Does nothing if none is open, so that it can be called in a ``finally``."""
        self._group_depth -= 1
        if self._group_depth <= 0:
            self._end_groups()

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Open a group that ends with the ``with`` block, also by an exception."""
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def clear(self) -> None:
        """Free every index, the lowest first, and close every group. O(size)."""
        self._pages.clear()
        self._unfreed.flags[:] = False
        self._waiting, self._grouped, self._num_waiting, self._group_depth = [], [], 0, 0

    def check(self) -> None:
        """Prove that every page is free, waiting or held, and that no index of a held page was freed.

        O(size).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._pages.check(np.concatenate((_NONE, *self._waiting, *self._grouped)))
        if self._num_waiting != sum(map(len, self._waiting)):
            raise CheckFailed(f"{self._num_waiting} pages are counted as waiting, not those of {self._waiting[:16]}")
        if self.page_size > 1:
            whole = np.flatnonzero(self._unfreed.flags[1:].reshape(-1, self.page_size).all(axis=1)) + 1
            odd = np.setxor1d(whole, self._pages.held_ids())
            if len(odd):
                raise CheckFailed(f"pages free though no index was freed, or held though one was: {odd[:16].tolist()}")

    def _end_groups(self) -> None:
        """Close all groups: pages freed in them wait with the others."""
        self._waiting += self._grouped
        self._num_waiting += sum(map(len, self._grouped))
        self._grouped, self._group_depth = [], 0
