"""The blocks of one engine: each is free, cached in a prefix tree, or private to one request."""

from __future__ import annotations

from kvpagoda.arrays import Ids
from kvpagoda.errors import CheckFailed, OutOfBlocks
from kvpagoda.free_list import FreeList
from kvpagoda.policies import EvictionPolicy
from kvpagoda.prefix import Match, PrefixTree
from kvpagoda.units import positive_numbers


class SharedBlocks:
    """Blocks of ``block_size`` tokens, with ids 1 to ``num_blocks``.

    ``tree`` has the cached blocks and ``free`` the free ones; the caller of ``take`` tracks those that it took. Cached
    blocks are evicted only when a block is needed, by ``policy``. ``tree``: an empty tree that has them (default: a new one of
    one row). Raises BadInput for numbers below 1.
    """

    def __init__(
        self, num_blocks: int, block_size: int, policy: str | EvictionPolicy, tree: PrefixTree | None = None
    ) -> None:
        self.num_blocks, self.block_size = positive_numbers(num_blocks=num_blocks, block_size=block_size)
        if tree is None:
            tree = PrefixTree(self.block_size, 1, policy, capacity=self.num_blocks, proves_ids=False)
        self.tree = tree
        self.free = FreeList(self.num_blocks, first=1, what="blocks")

    @property
    def num_available(self) -> int:
        """The number of blocks that ``take`` can return now: free and evictable ones. O(1)."""
        return self.free.num_free + self.tree.num_evictable

    @property
    def num_cached(self) -> int:
        """The number of cached blocks, in use or not. O(1)."""
        return self.tree.num_cached

    def has_room(self, match: Match, wanted: int) -> bool:
        """Return whether ``wanted`` blocks are available without evicting those of ``match``. O(nodes on the path)."""
        if wanted <= self.num_available - match.num_blocks:  # true even if all blocks of the match are evictable
            return True
        lease = self.tree.pin(match)
        is_room = wanted <= self.num_available
        self.tree.unpin(lease)
        return is_room

    def take(self, n: int) -> Ids:
        """Take ``n`` blocks, free ones first, evicting cached ones if needed. Returns int32 ids. Raises OutOfBlocks."""
        short = n - self.free.num_free
        if short > 0:
            available, idle = self.num_available, self.num_available - self.free.num_free
            if n > available:
                cached = f"{self.num_cached} cached ({self.num_cached - idle} in use)"
                text = f"need {n} blocks, {self.free.num_free} free, {cached} of {self.num_blocks}"
                raise OutOfBlocks.with_hint(text, "end a request first", needed=n, available=available)
            self._evict(short)
        return self.free.acquire(n)

    def _evict(self, n: int) -> None:
        """Evict ``n`` cached blocks. The caller has checked that so many are evictable."""
        self.free.release(self.tree.evict(n).ids[0])

    def check(self, num_running: int) -> None:
        """Prove that no block is both cached and free, and that there are ``num_running`` leases.

        Raises CheckFailed. O(blocks).
        """
        self.free.check()
        self.tree.check()
        cached = self.tree.owned_ids()
        lost = cached[~self.free.are_held(cached)]
        if len(lost) or self.tree.num_leases != num_running:
            raise CheckFailed(
                f"blocks both cached and free: {lost[:16].tolist()}; {self.tree.num_leases} leases of {num_running} requests",
                needed=num_running, available=self.tree.num_leases,
            )  # fmt: skip
