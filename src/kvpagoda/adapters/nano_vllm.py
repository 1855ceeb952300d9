"""A replacement for nano-vllm's ``BlockManager``, over a prefix tree.

    import nanovllm.engine.scheduler
    from kvpagoda.adapters.nano_vllm import BlockManager

    nanovllm.engine.scheduler.BlockManager = BlockManager      # before the engine is made

The scheduler of nano-vllm calls it for one sequence at a time, and three times per sequence in every decode step. These
calls compute with the sequence's own counts; they access the tree only when a block is full.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.arrays import Ids, as_tokens
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.policies import EvictionPolicy
from kvpagoda.prefix import Lease, Match
from kvpagoda.units import ceil_div


class NanoSequence(Protocol):
    """The attributes of nano-vllm's sequences that are read here.

    ``block_table`` and ``num_cached_tokens`` are written too. ``block_table``: ids of its blocks, 0 to ``num_blocks -
    1``, in order of position; empty while it waits. ``num_cached_tokens``: leading tokens whose rows are written.
    ``num_scheduled_tokens``: the tokens after these that the step computes.
    """

    seq_id: int
    token_ids: list[int]
    num_tokens: int
    num_cached_tokens: int
    num_scheduled_tokens: int
    block_table: list[int]


class LastLookup(NamedTuple):
    """The result of the last look-up: a sequence, its tokens, and the match of these in the tree."""

    seq: NanoSequence
    tokens: Ids
    match: Match


class BlockManager:
    """The blocks that the sequences of one engine hold, and the prefixes cached in them.

    The calls, their arguments and the attributes that they write are nano-vllm's. Differences: cached blocks are found
    in a radix tree that compares tokens, not by a chain of hashes. They are evicted only when a block is needed, ends
    of texts first. If two sequences compute the same block at once, one copy is kept. Not for use from several threads
    at once.

    Args:
        num_blocks: how many.
        block_size: tokens of a block.
        policy: which cached block is evicted next.

    Raises:
        BadInput: numbers below 1.

    Examples:
        >>> from types import SimpleNamespace
        >>> manager = BlockManager(num_blocks=4, block_size=2)
        >>> def sequence(seq_id, tokens):
        ...     counts = dict(num_tokens=len(tokens), num_cached_tokens=0, num_scheduled_tokens=0)
        ...     return SimpleNamespace(seq_id=seq_id, token_ids=tokens, block_table=[], **counts)
        >>> first = sequence(0, [5, 6, 7, 8, 9])
        >>> manager.allocate(first, manager.can_allocate(first))
        >>> first.num_scheduled_tokens = 5
        >>> manager.hash_blocks(first)                                 # two blocks are full and shareable
        >>> manager.can_allocate(sequence(1, [5, 6, 7, 8, 1]))
        2
    """

    def __init__(self, num_blocks: int, block_size: int, policy: str | EvictionPolicy = "lru") -> None:
        self._blocks = SharedBlocks(num_blocks, block_size, policy)  # block ids here are those of the engine plus one
        self._tree, self._free = self._blocks.tree, self._blocks.free
        self.num_blocks, self.block_size = self._blocks.num_blocks, self._blocks.block_size
        self._running: dict[int, Lease] = {}
        self._found: LastLookup | None = None

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that a sequence could get now: free and evictable ones. O(1)."""
        return self._blocks.num_available

    # -- calls for a waiting sequence --------------------------------------------------------------------------------

    def can_allocate(self, seq: NanoSequence) -> int:
        """Return how many leading blocks of a sequence are cached, at most all but its last; -1 without room for it.

        Changes nothing. O(tokens).

        Args:
            seq: of nano-vllm.
        """
        match = self._look_up(seq)
        wanted = self._columns(seq.num_tokens) - match.num_blocks
        return match.num_blocks if self._blocks.has_room(match, wanted) else -1

    def allocate(self, seq: NanoSequence, num_cached_blocks: int) -> None:
        """Give a sequence blocks for all its tokens. O(tokens).

        Args:
            seq: of nano-vllm.
            num_cached_blocks: from ``can_allocate``: so many first blocks are shared.

        Raises:
            BadInput: it has blocks already.
            StaleHandle: cached blocks were evicted since ``can_allocate``.
            OutOfBlocks: no room; nothing changed then.
        """
        if seq.block_table or seq.seq_id in self._running:
            text = f"sequence {seq.seq_id} has {len(seq.block_table)} blocks already; deallocate it first"
            raise BadInput(text, needed=seq.seq_id, available=len(seq.block_table))
        found = self._found
        match = found.match if found is not None and found.seq is seq else self._look_up(seq)
        if num_cached_blocks > match.num_blocks:
            text = f"{match.num_blocks} blocks of it are cached, not {num_cached_blocks}; call can_allocate again"
            raise StaleHandle(text, needed=num_cached_blocks, available=match.num_blocks)
        lease = self._tree.pin(match, num_cached_blocks)
        try:
            own = self._blocks.take(self._columns(seq.num_tokens) - num_cached_blocks)
        except BaseException:
            self._tree.unpin(lease)
            raise
        self._running[seq.seq_id], self._found = lease, None
        seq.block_table.extend([*(match.ids[0, :num_cached_blocks] - 1).tolist(), *(own - 1).tolist()])
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    # -- calls for a running sequence --------------------------------------------------------------------------------

    def can_append(self, seq: NanoSequence) -> bool:
        """Return whether there is a block for the last token of a sequence. O(1).

        Args:
            seq: of nano-vllm.
        """
        return seq.num_tokens <= len(seq.block_table) * self.block_size or self.num_free_blocks > 0

    def may_append(self, seq: NanoSequence) -> None:
        """Give a sequence a block for its last token, if it needs one.

        Args:
            seq: of nano-vllm.

        Raises:
            OutOfBlocks: no room; nothing changed.
        """
        if seq.num_tokens > len(seq.block_table) * self.block_size:
            seq.block_table.append(int(self._blocks.take(1)[0]) - 1)

    def hash_blocks(self, seq: NanoSequence) -> None:
        """Make the full blocks of a sequence shareable, now that its scheduled tokens are computed.

        If another sequence has published the same block meanwhile, that one replaces the block here, in ``block_table``
        too. O(tokens of these blocks).

        Args:
            seq: of nano-vllm.

        Raises:
            BadInput: a sequence without blocks.
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

    def deallocate(self, seq: NanoSequence) -> None:
        """Free the blocks of a sequence; published ones stay cached until they are evicted. O(blocks).

        Args:
            seq: of nano-vllm.

        Raises:
            BadInput: a sequence without blocks.
            NotOwned: one with blocks that are not its own; nothing changed then.
        """
        lease = self._lease_of(seq)
        self._free.release(np.array(seq.block_table[lease.num_blocks :], np.int32) + 1)
        self._tree.touch(lease)
        self._tree.unpin(lease)
        del self._running[seq.seq_id]
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def check(self) -> None:
        """Prove that every block is free, cached, or private to one sequence. O(blocks).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._blocks.check(len(self._running))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _columns(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def _look_up(self, seq: NanoSequence) -> Match:
        """Return the match of ``seq``. Its tokens are converted to an array only once while it waits."""
        found = self._found
        if found is not None and found.seq is seq and len(found.tokens) == seq.num_tokens:
            tokens = found.tokens
        else:
            tokens = as_tokens(seq.token_ids)
        match = self._tree.match(tokens, limit=(self._columns(len(tokens)) - 1) * self.block_size)
        self._found = LastLookup(seq, tokens, match)
        return match

    def _lease_of(self, seq: NanoSequence) -> Lease:
        lease = self._running.get(seq.seq_id)
        if lease is None:
            raise BadInput(f"sequence {seq.seq_id} has no blocks; allocate it first", needed=seq.seq_id)
        return lease
