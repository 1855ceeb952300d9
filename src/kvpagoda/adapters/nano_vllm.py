"""nano-vllm's ``BlockManager`` over a prefix tree.

    import nanovllm.engine.scheduler
    from kvpagoda.adapters.nano_vllm import BlockManager

    nanovllm.engine.scheduler.BlockManager = BlockManager      # before the engine is made

The scheduler of nano-vllm asks of one sequence at a time. Decoding asks three questions of each in every step; they are
answered by arithmetic on the sequence's own numbers, and the tree is touched only where a block is full.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.prefix import EvictionPolicy, Lease, Match
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.units import ceil_div


class Sequence(Protocol):
    """What is read of a sequence of nano-vllm, and what is written: ``block_table`` and ``num_cached_tokens``.

    ``block_table``: ids of its blocks, 0 to ``num_blocks - 1``, in the order of its text; empty while it waits.
    ``num_cached_tokens``: leading tokens whose rows are there; ``num_scheduled_tokens``: those behind them that the step
    computes.
    """

    seq_id: int
    token_ids: list[int]
    num_tokens: int
    num_cached_tokens: int
    num_scheduled_tokens: int
    block_table: list[int]


class Found(NamedTuple):
    """What was cached of a sequence when it was last asked for."""

    seq: Sequence
    tokens: Ids
    match: Match


class BlockManager:
    """Which blocks of ``block_size`` tokens the sequences of one engine hold, and which texts are cached in them.

    The calls, their arguments and what they write are nano-vllm's. What differs: blocks that are cached are found through
    a radix tree that compares tokens, in place of a chain of hashes; they are evicted only when a block is needed, by
    ``policy``, ends of texts first; two sequences that compute the same block at once end up with one copy of it.

    Raises BadInput for numbers below 1. Not for use from several threads at once.

    >>> from types import SimpleNamespace
    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> def sequence(seq_id, tokens):
    ...     counts = dict(num_tokens=len(tokens), num_cached_tokens=0, num_scheduled_tokens=0)
    ...     return SimpleNamespace(seq_id=seq_id, token_ids=tokens, block_table=[], **counts)
    >>> first = sequence(0, [5, 6, 7, 8, 9])
    >>> manager.allocate(first, manager.can_allocate(first))
    >>> first.num_scheduled_tokens = 5
    >>> manager.hash_blocks(first)                                 # two blocks are full, and may be shared
    >>> manager.can_allocate(sequence(1, [5, 6, 7, 8, 1]))
    2
    """

    def __init__(self, num_blocks: int, block_size: int, policy: str | EvictionPolicy = "lru") -> None:
        self._blocks = SharedBlocks(num_blocks, block_size, policy)  # its ids are those of the engine, plus one
        self._tree, self._free = self._blocks.tree, self._blocks.free
        self.num_blocks, self.block_size = self._blocks.num_blocks, self._blocks.block_size
        self._running: dict[int, Lease] = {}
        self._found: Found | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a sequence could have now: free ones, and cached ones that nobody uses. O(1)."""
        return self._blocks.num_available

    # -- what the scheduler asks of a sequence that waits ------------------------------------------------------------

    def can_allocate(self, seq: Sequence) -> int:
        """How many leading blocks of ``seq`` are cached, all but its last one at most; -1 if there is no room for all of it.
        Changes nothing. O(tokens)."""
        match = self._look_up(seq)
        wanted = self._columns(seq.num_tokens) - match.num_blocks
        return match.num_blocks if self._blocks.has_room(match, wanted) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Give ``seq`` blocks for all its tokens: the first ``num_cached_blocks``, as ``can_allocate`` said, are shared.

        Raises BadInput if it has blocks already, StaleHandle if what was found has been evicted since, OutOfBlocks; nothing
        changed then. O(tokens).
        """
        if seq.block_table or seq.seq_id in self._running:
            raise BadInput(f"sequence {seq.seq_id} has {len(seq.block_table)} blocks already; deallocate it first")
        found = self._found
        match = found.match if found is not None and found.seq is seq else self._look_up(seq)
        if num_cached_blocks > match.num_blocks:
            raise StaleHandle(
                f"{num_cached_blocks} blocks of it are not cached, {match.num_blocks} are; ask can_allocate"
            )
        lease = self._tree.pin(match, num_cached_blocks)
        try:
            own = self._blocks.take(self._columns(seq.num_tokens) - num_cached_blocks)
        except BaseException:
            self._tree.unpin(lease)
            raise
        self._running[seq.seq_id], self._found = lease, None
        seq.block_table.extend([*(match.ids[0, :num_cached_blocks] - 1).tolist(), *(own - 1).tolist()])
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    # -- and of one that runs ----------------------------------------------------------------------------------------

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is a block for the last token of ``seq``. O(1)."""
        return seq.num_tokens <= len(seq.block_table) * self.block_size or self.num_free_blocks > 0

    def may_append(self, seq: Sequence) -> None:
        """Give ``seq`` a block for its last token, if it needs one. Raises OutOfBlocks, changing nothing."""
        if seq.num_tokens > len(seq.block_table) * self.block_size:
            seq.block_table.append(int(self._blocks.take(1)[0]) - 1)

    def hash_blocks(self, seq: Sequence) -> None:
        """The scheduled tokens of ``seq`` are computed: blocks that are full now may be shared from here on.

        A block that another sequence published meanwhile is given up for that one, in ``block_table`` too. Raises BadInput
        for a sequence without blocks. O(tokens of these blocks).
        """
        size, before = self.block_size, seq.num_cached_tokens
        end = (before + seq.num_scheduled_tokens) // size
        if end == before // size:
            return
        lease = self._lease_of(seq)
        start = lease.num_blocks
        tokens = as_tokens(seq.token_ids[start * size : end * size])
        ids = np.array([seq.block_table[start:end]], np.int32) + 1
        inserted = self._tree.insert(lease, tokens, ids)
        if inserted.num_added < end - start:
            self._free.release(ids[inserted.duplicates])
            seq.block_table[start:end] = (inserted.ids[0] - 1).tolist()

    def deallocate(self, seq: Sequence) -> None:
        """Take back the blocks of ``seq``: those that are published stay cached while memory lasts. Raises BadInput, NotOwned,
        changing nothing, for a sequence without blocks or with some that are not its own. O(blocks)."""
        lease = self._lease_of(seq)
        self._free.release(np.array(seq.block_table[lease.num_blocks :], np.int32) + 1)
        self._tree.touch(lease)
        self._tree.unpin(lease)
        del self._running[seq.seq_id]
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def check(self) -> None:
        """Prove that every block is in one place: free, cached, or one sequence's own. Raises CheckFailed. O(blocks)."""
        self._blocks.check(len(self._running))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _columns(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def _look_up(self, seq: Sequence) -> Match:
        """What is cached of ``seq``: its tokens are read once while it waits."""
        found = self._found
        if found is not None and found.seq is seq and len(found.tokens) == seq.num_tokens:
            tokens = found.tokens
        else:
            tokens = as_tokens(seq.token_ids)
        match = self._tree.match(tokens, limit=(self._columns(len(tokens)) - 1) * self.block_size)
        self._found = Found(seq, tokens, match)
        return match

    def _lease_of(self, seq: Sequence) -> Lease:
        lease = self._running.get(seq.seq_id)
        if lease is None:
            raise BadInput(f"sequence {seq.seq_id} has no blocks; allocate it first")
        return lease
