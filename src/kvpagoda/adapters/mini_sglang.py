"""Replacements for mini-sglang's prefix cache and cache manager, over a prefix tree.

    import minisgl.scheduler.scheduler
    from kvpagoda.adapters.mini_sglang import CacheManager

    minisgl.scheduler.scheduler.CacheManager = CacheManager      # before the scheduler is made

To use the prefix cache alone, with mini-sglang's own manager, register ``PrefixCache`` in ``SUPPORTED_CACHE_MANAGER``.

mini-sglang counts in tokens and names a page by the index of its first token, a multiple of ``page_size``. If another
request has cached a page first, its manager frees the page of this request, but leaves it in the request's row of the
page table, where it is read until the request ends. This manager writes the cached page into the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.arrays import Ids, as_tokens
from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks
from kvpagoda.policies import EvictionPolicy
from kvpagoda.prefix import Lease, Match, PrefixTree
from kvpagoda.units import ceil_div, positive_numbers

Tensor = torch.Tensor


class Handle:
    """The first ``cached_len`` tokens of a text, whole cached pages. They are not evicted while the handle is
    locked."""

    def __init__(self, cache: PrefixCache, at: Match | Lease) -> None:
        self._cache, self.at, self.leases = cache, at, list[Lease]()

    @property
    def cached_len(self) -> int:
        """The number of tokens."""
        return self.at.num_blocks * self._cache.page_size

    def get_matched_indices(self) -> Tensor:
        """Return the KV indices of these tokens, int32 ``[cached_len]``. Raises StaleHandle if they were evicted."""
        ids = self._cache.tree.ids_between(self.at, 0, self.at.num_blocks)[0]
        return self._cache.tokens_of(ids)


class SizeInfo(NamedTuple):
    """The numbers of cached tokens that are not locked (``evictable_size``) and locked (``protected_size``)."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size + self.protected_size


class InsertResult(NamedTuple):
    """The result of ``insert_prefix``.

    ``cached_len``: tokens that were cached before; the indices passed for these still belong to the caller. ``handle``:
    the handle of all tokens.
    """

    cached_len: int
    handle: Handle


class MatchResult(NamedTuple):
    """The result of ``match_prefix``."""

    cuda_handle: Handle


class PrefixCache:
    """A prefix cache over pages of tokens.

    Args:
        device: where returned indices are.
        page_size: tokens of a page.
        policy: which cached page is evicted next.
        tree: its blocks are pages, and its ids are page numbers plus one.

    Raises:
        BadInput: a page size below 1.
    """

    def __init__(
        self, device: Any, page_size: int, policy: str | EvictionPolicy = "lru", tree: PrefixTree | None = None
    ) -> None:
        (self.page_size,), self.device = positive_numbers(page_size=page_size), device
        self.tree = PrefixTree(page_size, policy=policy) if tree is None else tree
        self._in_page = np.arange(page_size, dtype=np.int32)

    def match_prefix(self, input_ids: Tensor) -> MatchResult:
        """Match the longest cached prefix, in whole pages. Changes nothing. O(n).

        Args:
            input_ids: int32 ``[n]`` on the host.
        """
        return MatchResult(Handle(self, self.tree.match(as_tokens(input_ids.numpy()))))

    def lock_handle(self, handle: Handle, unlock: bool = False) -> None:
        """Lock the tokens of a handle once more, or unlock them once.

        Args:
            handle: of a match.
            unlock: which of the two.

        Raises:
            StaleHandle: they were evicted.
            BadInput: they are not locked.
        """
        if not unlock:
            lease = self.tree.pin(handle.at)
            self.tree.touch(lease)
            handle.leases.append(lease)
            handle.at = lease
            return
        if not handle.leases:
            text = f"a handle of {handle.cached_len} tokens is unlocked more often than it was locked"
            raise BadInput(text, needed=handle.cached_len)
        self.tree.unpin(handle.leases.pop())
        if handle.leases:
            handle.at = handle.leases[-1]

    def insert_prefix(self, input_ids: Tensor, indices: Tensor) -> InsertResult:
        """Cache whole pages. O(n).

        Args:
            input_ids: int32 ``[n]`` on the host.
            indices: the KV index of each token.

        Raises:
            NotOwned: a page that the tree already holds elsewhere.
        """
        num_pages = len(input_ids) // self.page_size
        tokens = as_tokens(input_ids.numpy()[: num_pages * self.page_size]).copy()  # the tree keeps it
        match = self.tree.match(tokens)
        cached = match.num_blocks
        more = self.pages_of(indices)[cached:num_pages]
        self.tree.insert(match, tokens[cached * self.page_size :], more[None])
        return InsertResult(cached * self.page_size, Handle(self, self.tree.match(tokens)))

    def evict(self, size: int) -> Tensor:
        """Evict tokens, in whole pages, least recently used first; return their indices, int32.

        Args:
            size: at least so many tokens.

        Raises:
            OutOfBlocks: fewer tokens are not locked; none is evicted.
        """
        num_pages = ceil_div(size, self.page_size)
        if num_pages > self.tree.num_evictable:
            available = self.tree.num_evictable
            text = f"need {num_pages} pages, {available} of {self.tree.num_cached} cached ones are not locked"
            raise OutOfBlocks.with_hint(text, "finish a request first", needed=num_pages, available=available)
        return self.tokens_of(self.tree.evict(num_pages).ids[0])

    def reset(self) -> None:
        """Remove everything from the cache.

        Raises:
            RetryLater: while a handle is locked.
        """
        self.tree.clear()

    @property
    def size_info(self) -> SizeInfo:
        """The numbers of evictable and of locked tokens. O(1)."""
        return SizeInfo(self.tree.num_evictable * self.page_size, self.tree.num_pinned * self.page_size)

    def check_integrity(self) -> None:
        """Prove the tree from scratch. O(pages).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self.tree.check()

    def tokens_of(self, ids: Ids) -> Tensor:
        """Return the indices of all tokens of pages: int32 ``[pages * page_size]`` on the device.

        Args:
            ids: of the pages.
        """
        return torch.from_numpy(((ids - 1)[:, None] * self.page_size + self._in_page).ravel()).to(self.device)

    def pages_of(self, indices: Tensor) -> Ids:
        """Return the ids of pages, int32.

        Args:
            indices: of tokens, of which every ``page_size``-th begins a page.
        """
        return indices[:: self.page_size].cpu().numpy().astype(np.int32) // self.page_size + 1


class Pending(Protocol):
    """The attributes of a waiting request that are read here: ``input_ids``, int32 on the host, and their number."""

    input_ids: Tensor
    input_len: int


class Req(Protocol):
    """The attributes of a running request that are read here.

    ``cached_len``: leading tokens whose rows are written. ``device_len``: number of tokens after this step.
    ``table_idx``: the request's row of the page table. ``cache_handle``: its locked handle.
    """

    input_ids: Tensor
    table_idx: int
    cached_len: int
    device_len: int
    cache_handle: Handle


class CacheManager:
    """Pages of tokens, each free, cached or private to a request, and the page table of requests. Not for use from several
    threads at once.

    Args:
        num_pages: how many.
        page_size: tokens of a page.
        page_table: integers ``[rows, tokens]``, the KV index of each token of each request.
        type: the name of an eviction policy, or one of mini-sglang's names ("radix", "naive"), which mean least
            recently used.

    Raises:
        BadInput: ``num_pages`` or ``page_size`` is below 1, or ``type`` names no policy.
    """

    def __init__(self, num_pages: int, page_size: int, page_table: Tensor, type: str = "radix") -> None:
        self._pages = SharedBlocks(num_pages, page_size, "lru" if type in ("radix", "naive") else type)
        self.num_pages, self.page_size, self._free = self._pages.num_blocks, self._pages.block_size, self._pages.free
        self.page_table, self.device = page_table, page_table.device
        self.prefix_cache = PrefixCache(self.device, page_size, tree=self._pages.tree)

    @property
    def available_size(self) -> int:
        """The number of tokens that could be allocated now: free ones, and cached ones that are not locked. O(1)."""
        return self._pages.num_available * self.page_size

    @property
    def free_slots(self) -> Tensor:
        """The index of the first token of each free page, int32, ascending."""
        ids = self._free.free_ids()
        return torch.from_numpy((ids - 1) * self.page_size).to(self.device)

    def match_req(self, req: Pending) -> MatchResult:
        """Match the cached prefix of a request, at most all but its last token. Changes nothing.

        Args:
            req: of mini-sglang.

        Raises:
            BadInput: the request has no token.
        """
        if req.input_len < 1:
            raise BadInput("a request needs at least one token, got none", needed=1, available=0)
        return self.prefix_cache.match_prefix(req.input_ids[: req.input_len - 1])

    def lock(self, handle: Handle) -> None:
        """Keep the tokens of a handle from being evicted until ``unlock``.

        Args:
            handle: of a match.
        """
        self.prefix_cache.lock_handle(handle)

    def unlock(self, handle: Handle) -> None:
        """End one ``lock``.

        Args:
            handle: of a match.
        """
        self.prefix_cache.lock_handle(handle, unlock=True)

    def allocate_paged(self, reqs: list[Req]) -> None:
        """Allocate pages for the tokens that requests compute in this step, and write them to the page table.

        O(tokens of the new pages).

        Args:
            reqs: of mini-sglang.

        Raises:
            OutOfBlocks: no room; nothing changed.
        """
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
        """Cache the whole pages of the first ``cached_len`` tokens of a request, which are computed.

        O(tokens after the handle).

        Args:
            req: of mini-sglang.
            finished: its other pages are freed and its handle is unlocked. Otherwise it keeps its handle, which then
                covers all these pages.

        Raises:
            BadInput: a request whose handle is not locked.
        """
        size, cache, handle = self.page_size, self.prefix_cache, req.cache_handle
        if not handle.leases:
            text = f"the request in row {req.table_idx} holds a handle that is not locked"
            raise BadInput(text, needed=req.table_idx)
        row, lease = self.page_table[req.table_idx], handle.leases[-1]
        held, end = lease.num_blocks, req.cached_len // size
        own = cache.pages_of(row[held * size : req.cached_len])
        whole = own[: end - held]
        tokens = as_tokens(req.input_ids[held * size : end * size].numpy()).copy()  # the tree keeps it
        inserted = cache.tree.insert(lease, tokens, whole[None])
        is_duplicate = inserted.duplicates[0]
        self._free.release(whole[is_duplicate])
        if finished:
            self._free.release(own[end - held :])
            self.unlock(handle)
        elif is_duplicate.any():
            row[held * size : end * size] = cache.tokens_of(inserted.ids[0]).to(row.dtype)

    @contextmanager
    def lazy_free_region(self) -> Iterator[None]:
        """Open a region in which pages may be freed. Here they are free at once."""
        yield

    def check_integrity(self) -> None:
        """Prove that every page is free or cached; call it while no request runs. O(pages).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._pages.check(num_running=0)
        num_free, num_cached = self._free.num_free, self._pages.num_cached
        if num_free + num_cached != self.num_pages:
            text = f"{num_free} free and {num_cached} cached pages of {self.num_pages}"
            raise CheckFailed(text, needed=self.num_pages, available=num_free + num_cached)

    def _allocate(self, needed_pages: int) -> Tensor:
        """Take ``needed_pages`` pages and return the index of the first token of each, int32.

        mini-sglang's own tests call it. Raises OutOfBlocks, taking none.
        """
        ids = self._pages.take(needed_pages)
        return torch.from_numpy((ids - 1) * self.page_size).to(self.device)

    def _page_to_token(self, pages: Tensor) -> Tensor:
        """Return the indices of all tokens of the pages whose first tokens have indices ``pages``: int32."""
        return self.prefix_cache.tokens_of(pages.cpu().numpy() // self.page_size + 1)
