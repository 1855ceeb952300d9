"""What requests leave behind for others: full blocks by reference in a prefix tree, bounded memory by copy in checkpoints.

    blocks of the full group    one tree, shared by pinning             reusable at every block boundary
    window blocks, state rows   a checkpoint: copies of its own,        reusable where a checkpoint is
                                at some block boundaries

A model whose layers all keep every token needs no checkpoints. Nothing is visible before the ``commit`` of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kvpagoda.alloc import FreeList
from kvpagoda.alloc.held import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.ledger import GroupLedger
from kvpagoda.prefix import Lease, Match, PrefixTree


class Memory(Protocol):
    """Who moves the bytes. A cache with no memory behind it does nothing."""

    def copy_state(self, source: int, target: int) -> None: ...

    def copy_blocks(self, ledger: GroupLedger, sources: Ids, targets: Ids) -> None: ...

    def blocks_freed(self, ledger: GroupLedger, ids: Ids) -> None: ...

    def state_freed(self, row: int) -> None: ...


@dataclass(frozen=True)
class PrefixMatch:
    """Why a request starts where it starts: ``seq.match``."""

    num_tokens: int
    """Leading tokens of the prompt that are in the tree, at most all but one."""
    resumable: int
    """Tokens that need not be computed: a block boundary where every layer kind has what it needs."""
    limited_by: str
    """What cut the hit short: ``nothing``, ``alignment`` (the rest of a block) or ``checkpoint`` (none further on)."""
    checkpoint_row: int | None = None


class Reuse:
    """The tree, the checkpoints and who owns their blocks.

    ``rows``: the state rows for checkpoints. ``most_unbacked``: blocks that the tree of a model without full group, where
    nothing but checkpoints takes memory, remembers at most.
    """

    def __init__(
        self,
        ledgers: Many[GroupLedger],
        block_size: int,
        *,
        has_state: bool,
        rows: FreeList,
        most_unbacked: int,
        memory: Memory,
    ) -> None:
        self.full = next((ledger for ledger in ledgers if ledger.growth.span is None), None)
        self.windows = tuple(ledger for ledger in ledgers if ledger.growth.span is not None)
        self.needs_checkpoint = has_state or bool(self.windows)
        self.block_size, self._memory, self._has_state = block_size, memory, has_state
        self.tree = PrefixTree(block_size, num_groups=0 if self.full is None else 1)
        self.rows, self._most_unbacked = rows, most_unbacked
        self._windows_of: dict[int, tuple[Ids, ...]] = {}
        self._window_blocks = [0] * len(self.windows)
        if self.full is not None:
            self.full.spare = lambda: self.tree.num_evictable
            self.full.reclaim = self._evict_blocks
        for number, ledger in enumerate(self.windows):
            ledger.spare = partial(self._spare_windows, number)
            ledger.reclaim = partial(self._evict_windows, number)

    # -- opening a request -------------------------------------------------------------------------------------------

    def find(self, tokens: Ids, namespace: bytes) -> tuple[Match, PrefixMatch]:
        """The longest reusable beginning of ``tokens``, at most all but the last token. Changes nothing."""
        match = self.tree.match(tokens, namespace, limit=len(tokens) - 1)
        whole = match.num_blocks * self.block_size
        aligned = "nothing" if match.num_tokens == whole else "alignment"
        if not self.needs_checkpoint:
            return match, PrefixMatch(match.num_tokens, whole, aligned)
        resumable, row = max(((n, row) for n, row in match.checkpoints if n <= whole), default=(0, None))
        limited_by = aligned if resumable == whole else "checkpoint"
        return match, PrefixMatch(match.num_tokens, resumable, limited_by, row)

    def restore(self, slot: int, found: PrefixMatch, match: Match) -> None:
        """Give ``slot`` what it needs to go on at ``found.resumable``: shared blocks, and copies of what is bounded.

        The path is pinned, the checkpoint the most recently used one, and there is room that does not count on it: so
        nothing here fails, and no eviction that the copies cause reaches what they copy from.
        """
        columns = found.resumable // self.block_size
        if self.full is not None:
            self.full.adopt(slot, match.ids[0, :columns])
        if found.checkpoint_row is None:
            return
        for ledger, sources in zip(self.windows, self._windows_of[found.checkpoint_row]):
            ledger.begin_at(slot, columns - len(sources))
            ledger.grow(slot, len(sources))
            self._memory.copy_blocks(ledger, sources, ledger.held_ids(slot))
        if self._has_state:
            self._memory.copy_state(found.checkpoint_row, slot)

    def duplicate(self, ledger: GroupLedger, parent: int, slot: int, columns: int) -> None:
        """Give ``slot`` what ``parent`` holds of its first ``columns`` blocks: the shared ones, and copies of the rest."""
        first, shared = int(ledger.first[parent]), int(ledger.shared[parent])
        if ledger is self.full:
            ledger.adopt(slot, ledger.table.cells[parent, :shared].copy())
        else:
            ledger.begin_at(slot, first)
        begin = max(first, shared)
        sources = ledger.table.cells[parent, begin:columns].copy()
        ledger.grow(slot, len(sources))
        self._memory.copy_blocks(ledger, sources, ledger.table.cells[slot, begin:columns].copy())

    def unshare(self, slot: int, lease: Lease, length: int) -> Lease:
        """Let the blocks behind the first ``length`` tokens be private, for others will be written there. Returns the lease
        of what is still shared. Raises OutOfBlocks, changing nothing."""
        columns = length // self.block_size
        if columns >= lease.num_blocks:
            return lease
        full, rest = self.full, int(length % self.block_size > 0)
        if full is not None:
            promised = int(full.promised[slot])
            old = full.table.cells[slot, columns : columns + rest].copy()
            self._memory.blocks_freed(full, full.cut(slot, columns, rest))
            self._memory.copy_blocks(full, old, full.table.cells[slot, columns : columns + rest].copy())
        shorter = self.tree.pin(lease, columns)
        self.tree.unpin(lease)
        if full is not None:
            full.promise(slot, min(promised, int(full.promised[slot]) + max(0, full.available())))
        return shorter

    def in_use(self, ledger: GroupLedger, found: PrefixMatch) -> int:
        """Spare blocks of ``ledger`` that a request which starts from ``found`` must not count on."""
        if found.checkpoint_row is None or ledger is self.full:
            return 0
        return len(self._windows_of[found.checkpoint_row][self.windows.index(ledger)])

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, slot: int, lease: Lease, tokens: Ids) -> None:
        """Make the whole blocks of ``tokens`` (all that are committed) shareable; ``lease`` then covers them.

        Blocks that another request published meanwhile are adopted and the own copies freed.
        """
        begin, end = lease.num_blocks, len(tokens) // self.block_size
        if begin == end:
            return
        given = np.empty((0, end - begin), np.int32)
        if self.full is not None:
            given = self.full.table.cells[slot, begin:end][None].copy()
        inserted = self.tree.insert(lease, tokens[begin * self.block_size : end * self.block_size], given)
        self.tree.touch(lease)
        if self.full is not None:
            self.full.share(slot, end, inserted.ids[0])
            self._memory.blocks_freed(self.full, self.full.release(given[inserted.duplicates]))
        elif self.tree.num_cached > self._most_unbacked:
            for row in self.tree.evict(self.tree.num_cached - self._most_unbacked).states:
                self._forget(row)

    def save(self, slot: int, lease: Lease, num_tokens: int) -> tuple[int, int] | None:
        """Keep a checkpoint of ``slot`` at ``num_tokens``, the end of its lease; returns its row and the row's generation.

        None if there is one already, or no room: the least recently used checkpoint gives up its place, but what was
        promised to requests is not touched.
        """
        held = [ledger.held_ids(slot) for ledger in self.windows]
        if not self.rows.num_ids or any(len(i) > ledger.available() for i, ledger in zip(held, self.windows)):
            return None
        if not self.rows.num_free:
            self._drop_oldest()
        row = int(self.rows.acquire(1)[0])
        if not self.tree.set_checkpoint(lease, num_tokens, row):
            self.rows.release_id(row)
            return None
        copies = []
        for ledger, sources in zip(self.windows, held):
            targets = ledger.take_free(len(sources))
            self._memory.copy_blocks(ledger, sources, targets)
            copies.append(targets)
            self._window_blocks[len(copies) - 1] += len(targets)
        self._windows_of[row] = tuple(copies)
        if self._has_state:
            self._memory.copy_state(slot, row)
        return row, int(self.rows.generation[row])

    def drop(self, row: int, generation: int) -> None:
        """Forget the checkpoint that ``save`` told of, if it is still kept."""
        if row in self._windows_of and self.rows.generation[row] == generation:
            self.tree.drop_checkpoint(row)
            self._forget(row)

    # -- making room -------------------------------------------------------------------------------------------------

    def _evict_blocks(self, n: int) -> None:
        assert self.full is not None
        evicted = self.tree.evict(n)
        self._memory.blocks_freed(self.full, self.full.release(evicted.ids[0]))
        for row in evicted.states:
            self._forget(row)

    def _spare_windows(self, number: int) -> int:
        return self._window_blocks[number]

    def _evict_windows(self, number: int, n: int) -> None:
        ledger = self.windows[number]
        target = ledger.free.num_free + n
        while ledger.free.num_free < target:
            self._drop_oldest()

    def clear(self) -> None:
        """Forget everything. Raises RetryLater while a request runs."""
        dropped = self.tree.clear()
        if self.full is not None:
            self._memory.blocks_freed(self.full, self.full.release(dropped.ids[0]))
        for row in dropped.states:
            self._forget(row)

    def _drop_oldest(self) -> None:
        for row in self.tree.evict_checkpoint():
            self._forget(row)

    def _forget(self, row: int) -> None:
        for number, ids in enumerate(self._windows_of.pop(row)):
            self._window_blocks[number] -= len(ids)
            self._memory.blocks_freed(self.windows[number], self.windows[number].release(ids))
        self.rows.release_id(row)
        self._memory.state_freed(row)

    # -- proof -------------------------------------------------------------------------------------------------------

    def owned_ids(self, ledger: GroupLedger) -> Ids:
        """The blocks of ``ledger`` that the tree or a checkpoint owns."""
        if ledger is self.full:
            return self.tree.owned_ids(0)
        number = self.windows.index(ledger)
        kept = [ids[number] for ids in self._windows_of.values()]
        return np.concatenate(kept) if kept else np.empty(0, np.int32)

    def check(self) -> None:
        """Prove that tree and checkpoints agree about the rows. Raises CheckFailed."""
        self.tree.check()
        self.rows.check()
        held = self.rows.held_ids().tolist()
        if held != sorted(self._windows_of) or len(held) != self.tree.num_checkpoints:
            raise CheckFailed(f"checkpoints: {self.tree.num_checkpoints} in the tree, rows {held[:16]} held")
