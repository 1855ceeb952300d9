"""mini-sglang's prefix cache and cache manager over a prefix tree.

    import minisgl.scheduler.scheduler
    from kvpagoda.adapters.mini_sglang import CacheManager

    minisgl.scheduler.scheduler.CacheManager = CacheManager      # before the scheduler is made

Or the prefix cache alone, under the project's own manager: register ``PrefixCache`` in ``SUPPORTED_CACHE_MANAGER``.

That project counts in tokens and names a page by the index of its first token, a multiple of ``page_size``. Its own manager
frees the pages of a request that others cached first, and leaves them in the request's row of the page table, where they are
read until the request ends. This one puts the pages of the tree there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.blocks.ids import Ids, positive_numbers
from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks
from kvpagoda.prefix import EvictionPolicy, Lease, Match, PrefixTree
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.units import ceil_div

Tensor = torch.Tensor


class Handle:
    """The first ``cached_len`` tokens of a text that are cached, whole pages. Locked it stays so."""

    def __init__(self, cache: PrefixCache, at: Match | Lease) -> None:
        self._cache, self.at, self.leases = cache, at, list[Lease]()

    @property
    def cached_len(self) -> int:
        """Tokens."""
        return self.at.num_blocks * self._cache.page_size

    def get_matched_indices(self) -> Tensor:
        """int32 ``[cached_len]``: where their rows are. Raises StaleHandle if they were evicted."""
        ids = self._cache.tree.ids_between(self.at, 0, self.at.num_blocks)[0]
        return self._cache.tokens_of(ids)


class SizeInfo(NamedTuple):
    """Cached tokens that nobody locks, and that somebody does."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size + self.protected_size


class InsertResult(NamedTuple):
    """``cached_len``: tokens that were cached before; what was given for them is still the caller's. ``handle``: of all."""

    cached_len: int
    handle: Handle


class MatchResult(NamedTuple):
    """What ``match_prefix`` found."""

    cuda_handle: Handle


class PrefixCache:
    """Which texts are cached in which pages of ``page_size`` tokens; ``device``: of the indices that are handed out.

    ``tree``: blocks are pages, and ids are their numbers plus one. Raises BadInput for a page size below 1.
    """

    def __init__(
        self, device: Any, page_size: int, policy: str | EvictionPolicy = "lru", tree: PrefixTree | None = None
    ) -> None:
        (self.page_size,), self.device = positive_numbers(page_size=page_size), device
        self.tree = PrefixTree(page_size, policy=policy) if tree is None else tree
        self._in_page = np.arange(page_size, dtype=np.int32)

    def match_prefix(self, input_ids: Tensor) -> MatchResult:
        """The longest cached beginning of ``input_ids``, int32 ``[n]`` on the host, in whole pages. Changes nothing. O(n)."""
        return MatchResult(Handle(self, self.tree.match(as_tokens(input_ids.numpy()))))

    def lock_handle(self, handle: Handle, unlock: bool = False) -> None:
        """Lock what ``handle`` covers, as often as it is asked, or ``unlock`` it once. Raises StaleHandle if it was evicted,
        BadInput if it is not locked."""
        if not unlock:
            lease = self.tree.pin(handle.at)
            self.tree.touch(lease)
            handle.leases.append(lease)
            handle.at = lease
            return
        if not handle.leases:
            raise BadInput(f"a handle of {handle.cached_len} tokens is unlocked more often than it was locked")
        self.tree.unpin(handle.leases.pop())
        if handle.leases:
            handle.at = handle.leases[-1]

    def insert_prefix(self, input_ids: Tensor, indices: Tensor) -> InsertResult:
        """Cache the whole pages of ``input_ids`` ``[n]`` that lie at ``indices`` ``[n]``. O(n). Raises NotOwned for a page
        that is cached already at another place."""
        num_pages = len(input_ids) // self.page_size
        tokens = as_tokens(input_ids.numpy()[: num_pages * self.page_size]).copy()  # the tree keeps it
        match = self.tree.match(tokens)
        cached = match.num_blocks
        more = self.pages_of(indices)[cached:num_pages]
        self.tree.insert(match, tokens[cached * self.page_size :], more[None])
        return InsertResult(cached * self.page_size, Handle(self, self.tree.match(tokens)))

    def evict(self, size: int) -> Tensor:
        """Evict at least ``size`` tokens, in whole pages, least recently used first: their indices, int32. Raises OutOfBlocks,
        evicting nothing, if that is more than is not locked."""
        num_pages = ceil_div(size, self.page_size)
        if num_pages > self.tree.num_evictable:
            available = self.tree.num_evictable
            text = f"need {num_pages} pages, {available} of {self.tree.num_cached} cached ones are not locked"
            raise OutOfBlocks.with_hint(text, "finish a request first", needed=num_pages, available=available)
        return self.tokens_of(self.tree.evict(num_pages).ids[0])

    def reset(self) -> None:
        """Forget everything. Raises RetryLater while something is locked."""
        self.tree.clear()

    @property
    def size_info(self) -> SizeInfo:
        """O(1)."""
        return SizeInfo(self.tree.num_evictable * self.page_size, self.tree.num_pinned * self.page_size)

    def check_integrity(self) -> None:
        """Prove the tree from scratch. Raises CheckFailed. O(pages)."""
        self.tree.check()

    def tokens_of(self, ids: Ids) -> Tensor:
        """The indices of all tokens of some pages: int32 ``[pages * page_size]`` on the device."""
        return torch.from_numpy(((ids - 1)[:, None] * self.page_size + self._in_page).ravel()).to(self.device)

    def pages_of(self, indices: Tensor) -> Ids:
        """The ids of the pages that begin at every ``page_size``-th of ``indices``: int32."""
        return indices[:: self.page_size].cpu().numpy().astype(np.int32) // self.page_size + 1


class Pending(Protocol):
    """What is read of a request that waits: ``input_ids`` int32 on the host, and their number."""

    input_ids: Tensor
    input_len: int


class Req(Protocol):
    """What is read of a request that runs. Rows of the first ``cached_len`` tokens are written, and those up to
    ``device_len`` follow in this step; ``table_idx`` is its row of the page table. ``cache_handle`` is written too."""

    input_ids: Tensor
    table_idx: int
    cached_len: int
    device_len: int
    cache_handle: Handle


class CacheManager:
    """Pages of ``page_size`` tokens, free or cached or in requests, and the rows of ``page_table`` that name them.

    ``page_table``: integers ``[rows, tokens]``, the index of the row of each token of each request. ``type`` is the name of
    an eviction policy, or one of the project's own names ("radix"), which mean least recently used. Not for use from several
    threads at once. Raises BadInput.
    """

    def __init__(self, num_pages: int, page_size: int, page_table: Tensor, type: str = "radix") -> None:
        self._pages = SharedBlocks(num_pages, page_size, "lru" if type in ("radix", "naive") else type)
        self.num_pages, self.page_size, self._free = self._pages.num_blocks, self._pages.block_size, self._pages.free
        self.page_table, self.device = page_table, page_table.device
        self.prefix_cache = PrefixCache(self.device, page_size, tree=self._pages.tree)

    @property
    def available_size(self) -> int:
        """Tokens that could be allocated now: free ones, and cached ones that are not locked. O(1)."""
        return self._pages.num_available * self.page_size

    @property
    def free_slots(self) -> Tensor:
        """The index of the first token of each free page, int32, ascending."""
        ids = self._free.free_ids()
        return torch.from_numpy((ids - 1) * self.page_size).to(self.device)

    def match_req(self, req: Pending) -> MatchResult:
        """What is cached of ``req``, all but its last token at most. Changes nothing."""
        if req.input_len < 1:
            raise BadInput("a request needs at least one token, got none")
        return self.prefix_cache.match_prefix(req.input_ids[: req.input_len - 1])

    def lock(self, handle: Handle) -> None:
        """Keep what ``handle`` covers until ``unlock``."""
        self.prefix_cache.lock_handle(handle)

    def unlock(self, handle: Handle) -> None:
        """The end of one ``lock``."""
        self.prefix_cache.lock_handle(handle, unlock=True)

    def allocate_paged(self, reqs: list[Req]) -> None:
        """Pages for the tokens that all of ``reqs`` compute in this step, written into the page table at once. Raises
        OutOfBlocks, changing nothing. O(tokens of the new pages)."""
        size = self.page_size
        spans = [(req.table_idx, ceil_div(req.cached_len, size), ceil_div(req.device_len, size)) for req in reqs]
        rows, first, last = np.array(spans, np.int64).reshape(-1, 3).T
        counts = np.maximum(last - first, 0)
        total = int(counts.sum())
        if not total:
            return
        ends = np.cumsum(counts)
        pages = np.arange(total) - np.repeat(ends - counts - first, counts)
        columns = (pages[:, None] * size + np.arange(size)).ravel()
        indices = self._page_to_token(self._allocate(total)).to(self.page_table.dtype)
        places = (torch.from_numpy(array).to(self.device) for array in (np.repeat(rows, counts * size), columns))
        self.page_table[tuple(places)] = indices

    def cache_req(self, req: Req, *, finished: bool) -> None:
        """The first ``cached_len`` tokens of ``req`` are computed: cache their whole pages. Of one that has ``finished`` the
        other pages are free; one that goes on keeps its handle, which covers all that is cached then.

        Raises BadInput for a request whose handle is not locked. O(tokens behind the handle).
        """
        size, cache, handle = self.page_size, self.prefix_cache, req.cache_handle
        if not handle.leases:
            raise BadInput(f"the request in row {req.table_idx} holds a handle that is not locked")
        row, lease = self.page_table[req.table_idx], handle.leases[-1]
        held, end = lease.num_blocks, req.cached_len // size
        own = cache.pages_of(row[held * size : req.cached_len])
        whole = own[: end - held]
        tokens = as_tokens(req.input_ids[held * size : end * size].numpy()).copy()  # the tree keeps it
        inserted = cache.tree.insert(lease, tokens, whole[None])
        double = inserted.duplicates[0]
        self._free.release(whole[double])
        if finished:
            self._free.release(own[end - held :])
            self.unlock(handle)
        elif double.any():
            row[held * size : end * size] = cache.tokens_of(inserted.ids[0]).to(row.dtype)

    @contextmanager
    def lazy_free_region(self) -> Iterator[None]:
        """Inside, pages may be freed; they are free at once."""
        yield

    def check_integrity(self) -> None:
        """Prove, where no request runs, that every page is free or cached. Raises CheckFailed. O(pages)."""
        self._pages.check(num_running=0)
        num_free, num_cached = self._free.num_free, self._pages.num_cached
        if num_free + num_cached != self.num_pages:
            raise CheckFailed(f"{num_free} free and {num_cached} cached pages of {self.num_pages}")

    def _allocate(self, needed_pages: int) -> Tensor:
        """The index of the first token of each of so many pages, int32; the project's own tests call it. Raises OutOfBlocks,
        taking none."""
        ids = self._pages.take(needed_pages)
        return torch.from_numpy((ids - 1) * self.page_size).to(self.device)

    def _page_to_token(self, pages: Tensor) -> Tensor:
        """The indices of all tokens of the pages that begin at ``pages``: int32."""
        return self.prefix_cache.tokens_of(pages.cpu().numpy() // self.page_size + 1)
