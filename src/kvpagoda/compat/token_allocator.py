"""Token indices: the rows of a ``KVPool``, handed out one by one or in pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kvpagoda.blocks.free_list import FreeList
from kvpagoda.blocks.ids import AnyIds, Ids, IdSet, whole_number
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.memory.id_tensors import Device, IdsLike, default_device, ids_from, ids_to
from kvpagoda.units import ceil_div


class TokenToKVPoolAllocator:
    """Indices ``1 .. size`` of a ``KVPool``; index 0 is its padding row and is never handed out.

    With ``page_size > 1`` the unit is a page of that many neighbouring indices; only pages that fit whole are usable:

        index   0 | 1 .. page_size | page_size + 1 .. 2 * page_size | ..  .. size
              pad |     page 1     |             page 2             | rest: never handed out

    so ``k_buffer[l][1 : 1 + num_pages * page_size]`` is the paged view for block-table kernels, its first page 0.

    An index given back waits in a second buffer; the buffer is merged into the free list (lowest index first if
    ``need_sort``) only when an ``alloc`` cannot be met without it. A page waits once the last index that was handed out
    of it is given back, never before. The books are on the host: ``FreeList`` over pages.
    """

    def __init__(self, size: int, device: Device = None, page_size: int = 1, need_sort: bool = True) -> None:
        self.size, self.page_size = whole_number(size, "size"), whole_number(page_size, "page_size")
        if self.page_size < 1:
            raise BadInput(f"page_size must be at least 1, got {page_size}")
        self.device, self.need_sort = default_device(device), need_sort
        self.num_pages = self.size // self.page_size
        self._pages = FreeList(self.num_pages, first=1, what="KV indices" if self.page_size == 1 else "pages")
        num_tokens = self.num_pages * self.page_size if self.page_size > 1 else 0
        self._tokens = IdSet(num_tokens, 1, "KV indices")  # pages of one index need no second ledger
        self._live: Ids = np.zeros(1 + self.num_pages, np.int32)  # held indices of each page
        self._group_depth = 0
        self._before_group = 0  # pages that waited when the open group began

    def available_size(self) -> int:
        """Tokens that ``alloc`` can still hand out: whole free pages, the waiting ones included."""
        return (self._pages.num_free + self._num_mergeable()) * self.page_size

    def alloc(self, n: int) -> torch.Tensor | None:
        """``n`` distinct indices, int32 ``[n]`` on the device, or None (nothing taken) when they are not there. O(n).

        Takes ``ceil(n / page_size)`` whole pages and returns their first ``n`` indices in order, contiguous inside each
        page. Indices of the last page beyond ``n`` stay unused until that page is free again: to use whole pages, ask
        for a multiple of ``page_size``. Raises BadInput for an ``n`` that is not a whole number of at least 0.
        """
        count = whole_number(n, "the number of tokens")
        num_pages = ceil_div(count, self.page_size)
        if num_pages > self._pages.num_free:
            if num_pages > self._pages.num_free + self._num_mergeable():
                return None
            self.merge_and_sort_free()
        pages = self._pages.acquire(num_pages)
        return ids_to(pages if self.page_size == 1 else self._take(pages, count), self.device)

    def free(self, indices: IdsLike) -> None:
        """Give back indices: a tensor on any device, an array or a sequence, of any shape. O(n).

        Raises NotOwned for an index that is not held (freed twice, also inside a group), out of range or named twice,
        and BadInput for anything but whole numbers. What it raises changes nothing but this: an open group is closed.
        """
        try:
            ids = ids_from(indices)
            if self.page_size == 1:
                self._pages.release(ids, later=True)
            else:
                self._give(ids)
        except Exception:
            self._group_depth = 0
            raise

    def merge_and_sort_free(self) -> None:
        """Make the waiting indices free, lowest first if ``need_sort``; those of an open group keep waiting."""
        count = self._num_mergeable()
        if count:
            self._pages.merge(count)
            self._before_group -= count if self._group_depth else 0
            if self.need_sort:
                self._pages.sort()

    def free_group_begin(self) -> None:
        """Open a group: what is freed until its end comes back all at once at the end. Groups nest.

        Prefer ``with allocator.free_group():``, which ends it whatever happens.
        """
        if self._group_depth == 0:
            self._before_group = self._pages.num_waiting
        self._group_depth += 1

    def free_group_end(self) -> None:
        """Close the innermost group; nothing happens if none is open, so that it may stand in a ``finally``."""
        self._group_depth = max(0, self._group_depth - 1)

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """A group that ends with the block, by an exception too."""
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def clear(self) -> None:
        """Make every index free, the lowest first, and close every group. O(size)."""
        self._pages.clear()
        self._tokens.flags[:] = False
        self._live[:] = 0
        self._group_depth = 0

    def check(self) -> None:
        """Prove that every page is in one place and is held exactly while one of its indices is. O(size)."""
        self._pages.check()
        if self._group_depth and self._before_group > self._pages.num_waiting:
            raise CheckFailed(f"{self._before_group} pages waited before the group, {self._pages.num_waiting} do now")
        if self.page_size > 1:
            live = self._tokens.flags[1:].reshape(self.num_pages, self.page_size).sum(1)
            wrong = np.flatnonzero(live != self._live[1:]) + 1
            if len(wrong):
                raise CheckFailed(f"the counts of live indices are wrong for pages {wrong[:16].tolist()}")
            if not np.array_equal(np.flatnonzero(live) + 1, self._pages.held_ids()):
                odd = np.setxor1d(np.flatnonzero(live) + 1, self._pages.held_ids())
                raise CheckFailed(f"pages free with indices in use, or held without: {odd[:16].tolist()}")

    def _num_mergeable(self) -> int:
        return self._before_group if self._group_depth else self._pages.num_waiting

    def _take(self, pages: Ids, count: int) -> Ids:
        """The first ``count`` indices of ``pages``, marked as held."""
        offsets = np.arange(1, self.page_size + 1, dtype=np.int32)
        indices: Ids = ((pages - 1)[:, None] * np.int32(self.page_size) + offsets).reshape(-1)[:count]
        self._tokens.flags[indices] = True
        self._live[pages] = self.page_size
        self._live[pages[-1:]] -= len(pages) * self.page_size - count
        return indices

    def _give(self, ids: AnyIds) -> None:
        """Give back single indices; a page whose last one this was begins to wait."""
        indices = self._tokens.prove(ids)
        pages, counts = np.unique((indices - 1) // self.page_size + 1, return_counts=True)
        self._tokens.flags[indices] = False
        self._live[pages] -= counts.astype(np.int32)
        self._pages.release(pages[self._live[pages] == 0], later=True)
