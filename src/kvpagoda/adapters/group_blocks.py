"""The blocks of an engine whose groups (full attention, windows, chunks, states) share one pool of equal blocks.

rows of the prefix tree   | group of full attention | .. | window or state: id, generation | ..

Groups of full attention keep whole texts in the tree; ends of texts are evicted first. A block of another group that no
running request reads is evicted before these, the one that left its window first. But the blocks that a text needs to
be resumed at its end, or where it parts from another text, are kept as long as that position was used more recently
than the text that is evicted next.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed, StaleHandle
from kvpagoda.prefix import EvictionPolicy, Lease, Match
from kvpagoda.prefix.window_blocks import Handles, WindowBlocks
from kvpagoda.schema import Growth
from kvpagoda.units import ceil_div

LAST_STATE = Growth(window=2, is_state=True)
"""The growth of a state, as a window: only the block that holds the last token is read."""
_TEXTS = 16
"""How many blocks of texts the tree keeps for each block of memory, if no group keeps whole texts."""
_EARLIER = 1024
"""How many tokens before the needed ones are kept with a resumable position, for texts that part a little earlier."""
_NONE: Ids = np.empty(0, np.int32)


class Table:
    """The blocks of one request.

    ``ids[g]``: block ids of group ``g`` in order of position, 0 where the request holds none. ``first[g]``: the first
    column in which it may still hold a block. ``lease``: the part of the text that is cached, in these blocks or in
    others. ``doubles``: blocks of full attention whose text another request cached first. The worker uses them, so they
    stay until the request ends. ``parting``: the number of leading blocks that were cached when it began, where its
    text parts from others. It stays resumable there once these blocks are computed. ``text``: leading tokens, int32, as
    far as an array of them exists; it must not be changed.
    """

    def __init__(self, lease: Lease, ids: list[list[int]], first: list[int]) -> None:
        self.lease, self.ids, self.first, self.parting = lease, ids, first, 0
        self.doubles: list[Ids] = []
        self.text = _NONE


class GroupBlocks(SharedBlocks):
    """The blocks of several groups in one pool; otherwise as ``SharedBlocks``.

    ``growths[g]``: growth of group ``g``; ``LAST_STATE`` for a state. ``sizes[g]``: tokens in its blocks. Texts can be
    cached only if all sizes are equal.
    """

    def __init__(
        self, num_blocks: int, sizes: Many[int], growths: Many[Growth], policy: str | EvictionPolicy = "lru"
    ) -> None:
        self.sizes, self.growths = [*sizes], [*growths]
        self.full = [group for group, growth in enumerate(growths) if not growth.is_bounded]
        bounded = [group for group, growth in enumerate(growths) if growth.is_bounded]
        super().__init__(num_blocks, sizes[0], policy, len(self.full) + 2 * len(bounded))
        self._windows = {
            group: (len(self.full) + 2 * n, WindowBlocks(growths[group], sizes[0], num_blocks + 1))
            for n, group in enumerate(bounded)
        }
        self._kept: dict[int, list[Handles]] = {}  # name of a checkpoint in the tree -> kept blocks of each window
        self._next_place = 0  # name of the next checkpoint

    @property
    def num_available(self) -> int:
        idle = sum(blocks.num_idle for _, blocks in self._windows.values())
        return self.free.num_free + len(self.full) * self.tree.num_evictable + idle

    @property
    def num_cached(self) -> int:
        return len(self.full) * self.tree.num_cached + sum(blocks.num_cached for _, blocks in self._windows.values())

    # -- cached blocks -----------------------------------------------------------------------------------------------

    def resumable(self, match: Match) -> int:
        """Return the most blocks of ``match`` after which its text can be resumed. O(blocks)."""
        return self._last_boundary(match.ids)

    def found(self, match: Match, num_blocks: int) -> list[list[int]]:
        """Return for each group the ids of the first ``num_blocks`` blocks of ``match``; 0 for those not read."""
        ids = [list[int]() for _ in self.sizes]
        for row, group in enumerate(self.full):
            ids[group] = match.ids[row, :num_blocks].tolist()
        for group, cells in self._cells(match.ids, num_blocks).items():
            ids[group] = [0] * (num_blocks - cells.shape[1]) + cells[0].tolist()
        return ids

    def begin(self, match: Match, num_blocks: int) -> Table:
        """Return the table of a request that begins with ``num_blocks`` blocks of ``match``, and pin these.

        Raises StaleHandle, changing nothing, if blocks that the request reads were evicted.
        """
        cells = self._cells(match.ids, num_blocks)
        if not all(self._windows[group][1].are_there(needed).all() for group, needed in cells.items()):
            raise StaleHandle("blocks of this match were evicted since; match again")
        lease, first = self.tree.pin(match, num_blocks), [0] * len(self.sizes)
        for group, needed in cells.items():
            self._windows[group][1].read(needed[0])
            first[group] = num_blocks - needed.shape[1]
        return Table(lease, self.found(match, num_blocks), first)

    def admit(self, table: Table) -> None:
        """Note that the request of ``table`` is admitted: the cached text that it begins with was used."""
        if self._windows:
            self.tree.touch(table.lease)

    def publish(self, table: Table, tokens: Ids, num_tokens: int) -> None:
        """Make blocks of ``table`` shareable: those of ``tokens``, whole blocks after the cached part of its text.

        ``num_tokens``: all computed tokens of the request. A state is shared only if these end with ``tokens``, because
        later steps have overwritten it. O(tokens).
        """
        begin, n = table.lease.num_blocks, len(tokens) // self.block_size
        end = begin + n
        rows = np.zeros((self.tree.num_groups, n), np.int32)
        for row, group in enumerate(self.full):
            rows[row] = table.ids[group][begin:end]
        for group, (row, blocks) in self._windows.items():
            ids = np.array(table.ids[group][begin:end], np.int32)
            if self.growths[group].is_state:
                ids[: n - (num_tokens == end * self.block_size)] = 0
            blocks.write_cells(blocks.handles(ids), rows[row : row + 2])
            rows[row : row + 2, ids == 0] = 0
        inserted = self.tree.insert(table.lease, tokens, rows)
        is_new = inserted.num_added == n
        if not is_new:
            table.doubles += [rows[row, inserted.duplicates[row]] for row in range(len(self.full))]
        for row, blocks in self._windows.values():
            own = rows[row : row + 2]
            is_published = own[0] > 0
            if not is_new:
                cells = self.tree.ids_between(table.lease, begin, end)[row : row + 2]
                lacking = is_published & ~blocks.are_there(cells)
                cells[:, lacking] = own[:, lacking]
                self.tree.put_ids(table.lease, begin, row, cells)
                is_published &= (cells == own).all(0)
            blocks.publish(own[0, is_published].astype(np.intp))
        if begin < table.parting <= end:
            self._keep_place(table, table.parting)
        if not self.full and (surplus := self.tree.num_cached - _TEXTS * self.num_blocks) > 0:
            self._evict_texts(surplus)

    # -- a request's blocks ------------------------------------------------------------------------------------------

    def lacking(self, table: Table, num_tokens: int) -> list[int]:
        """Return how many columns each group lacks for ``num_tokens`` tokens; a state has a block only in the last."""
        return [max(0, ceil_div(num_tokens, size) - len(ids)) for size, ids in zip(self.sizes, table.ids)]

    def num_needed(self, columns: Many[int]) -> int:
        """Return how many blocks ``columns[g]`` more columns of each group ``g`` take."""
        return sum(min(n, 1) if growth.is_state else n for n, growth in zip(columns, self.growths))

    def most_needed(self, table: Table, num_tokens: int, step: int) -> int:
        """Return the most blocks that ``table`` still needs up to ``num_tokens`` tokens, ``step`` tokens at a time."""
        columns = self.lacking(table, num_tokens)
        for group, (growth, size) in enumerate(zip(self.growths, self.sizes)):
            most = None if growth.is_state else growth.most_blocks(size, step)
            if most is not None:
                held = len(table.ids[group]) - table.first[group]
                columns[group] = min(columns[group], max(0, most - held))
        return self.num_needed(columns)

    def grow(self, table: Table, columns: Many[int]) -> list[list[int]]:
        """Add ``columns[g]`` columns to each group ``g``, for which there is room, and return the added ids."""
        ids, added = self.take(self.num_needed(columns)).tolist(), list[list[int]]()
        for group, n in enumerate(columns):
            gap = n - 1 if n and self.growths[group].is_state else 0
            added.append([0] * gap + ids[: n - gap])
            del ids[: n - gap]
            table.ids[group] += added[-1]
        return added

    def slide(self, table: Table, num_tokens: int) -> None:
        """Release the window blocks that no token after the first ``num_tokens``, which are computed, reads."""
        for group in self._windows:
            first, held = table.first[group], table.ids[group]
            end = min(int(self.growths[group].first_needed(num_tokens)) // self.sizes[group], len(held))
            if end > first:
                self._let_go(table, group, end)
                held[first:end] = [0] * (end - first)
                table.first[group] = end

    def undo(self, table: Table) -> None:
        """Undo ``begin``: release the cached blocks of ``table``, which has no others."""
        for group in self._windows:
            self._let_go(table, group, len(table.ids[group]))
        self.tree.unpin(table.lease)

    def end(self, table: Table) -> None:
        """End the request of ``table``: free its blocks; published ones stay cached until they are evicted."""
        self._keep_place(table, table.lease.num_blocks)
        own = [np.array(table.ids[group][table.lease.num_blocks :], np.int32) for group in self.full]
        self.free.release(np.concatenate([_NONE, *own, *table.doubles]))
        self.tree.touch(table.lease)
        self.undo(table)

    def _let_go(self, table: Table, group: int, end: int) -> None:
        """Release the columns before ``end`` of one window: cached blocks have one reader less, others are freed."""
        row, blocks = self._windows[group]
        first, cached = table.first[group], table.lease.num_blocks
        ids = np.array(table.ids[group][first:end], np.int32)
        is_read = np.zeros(len(ids), np.bool_)
        if first < cached:
            cells = self.tree.ids_between(table.lease, first, min(end, cached))[row : row + 2]
            is_read[: cells.shape[1]] = blocks.are_there(cells) & (cells[0] == ids[: cells.shape[1]])
        blocks.leave(ids[is_read].astype(np.intp))
        if len(own := ids[~is_read & (ids > 0)]):
            self.free.release(own)

    # -- positions at which a text can be resumed --------------------------------------------------------------------

    def _cells(self, rows: Ids, num_blocks: int) -> dict[int, Ids]:
        """Return for each window the cells, int32 ``[2, n]``, that resuming a text after ``num_blocks`` blocks reads.

        ``rows``: the rows of the tree for the text's blocks.
        """
        return {
            group: rows[row : row + 2, blocks.first_needed(num_blocks) : num_blocks]
            for group, (row, blocks) in self._windows.items()
        }

    def _last_boundary(self, rows: Ids) -> int:
        """Return the most blocks of ``rows`` after which their text can be resumed."""
        allowed = np.ones(rows.shape[1] + 1, np.bool_)
        for row, blocks in self._windows.values():
            allowed &= blocks.boundaries(rows[row : row + 2])
        return int(np.flatnonzero(allowed)[-1])

    def _keep_place(self, table: Table, num_blocks: int) -> None:
        """Keep the window blocks that resuming the text of ``table`` needs, after at most ``num_blocks`` blocks.

        The position is the last possible one. Up to ``_EARLIER`` tokens before the needed blocks are kept too.
        """
        if not self._windows or not num_blocks:
            return
        rows = self.tree.ids_between(table.lease, 0, num_blocks)
        end, name = self._last_boundary(rows), self._next_place
        if end and self.tree.set_checkpoint(table.lease, end * self.block_size, name):
            self._next_place += 1
            self._kept[name] = []
            for row, blocks in self._windows.values():
                first = max(0, blocks.first_needed(end) - ceil_div(_EARLIER, self.block_size))
                cells = rows[row : row + 2, first:end]
                self._kept[name].append(cells[0, blocks.are_there(cells)].astype(np.intp))
                blocks.keep(self._kept[name][-1])

    def _forget_places(self, names: Iterable[int]) -> None:
        """Stop keeping the window blocks of the checkpoints ``names``."""
        for name in names:
            for (_, blocks), ids in zip(self._windows.values(), self._kept.pop(name)):
                blocks.drop(ids)

    # -- room --------------------------------------------------------------------------------------------------------

    def _evict(self, n: int) -> None:
        """Make at least ``n`` more blocks free, in the order that the top of this file describes."""
        goal = self.free.num_free + n
        while (short := goal - self.free.num_free) > 0:
            coldest = max((blocks for _, blocks in self._windows.values()), key=_num_cold, default=None)
            if coldest is not None and coldest.num_cold:
                self.free.release(coldest.evict(short))
                continue
            place, text = self.tree.checkpoints.oldest(), self.tree.oldest()
            if place is not None and (not self.tree.num_evictable or (text is not None and place <= text)):
                self._forget_places(self.tree.checkpoints.evict(1))
            else:
                self._evict_texts(ceil_div(short, max(1, len(self.full))))

    def _evict_texts(self, num_blocks: int) -> None:
        """Evict ``num_blocks`` blocks of texts, ends first, with the window blocks of these."""
        evicted = self.tree.evict(num_blocks)
        self._forget(evicted.ids, evicted.states)

    def clear(self) -> None:
        """Evict all texts. Raises RetryLater while a request has blocks."""
        evicted = self.tree.clear()
        self._forget(evicted.ids, evicted.states)

    def _forget(self, rows: Ids, places: Iterable[int]) -> None:
        """Free the blocks of ``rows`` and ``places`` that the tree has removed."""
        self._forget_places(places)
        self.free.release(rows[: len(self.full)].ravel())
        for row, blocks in self._windows.values():
            self.free.release(blocks.forget(rows[row : row + 2]))

    # -- check -------------------------------------------------------------------------------------------------------

    def prove(self, tables: Many[Table]) -> None:
        """Prove that every block is free, cached, or in one of ``tables``, the tables of all requests.

        Raises CheckFailed. O(blocks).
        """
        self.free.check()
        self.tree.check()
        rows, most = self.tree.all_ids(), self.num_blocks + 1
        doubles = [ids for table in tables for ids in table.doubles]
        named = [self.free.free_ids(), rows[: len(self.full)].ravel(), *doubles]
        for group in self.full:
            named += [np.array(table.ids[group][table.lease.num_blocks :], np.int32) for table in tables]
        for number, (group, (row, blocks)) in enumerate(self._windows.items()):
            cells = rows[row : row + 2]
            cached = cells[0, blocks.are_there(cells)]
            held = np.concatenate([_NONE, *(np.array(table.ids[group], np.int32) for table in tables)])
            kept = np.concatenate([_NONE, *(ids[number] for ids in self._kept.values())])
            is_read = np.isin(held, cached)
            blocks.check(cells, np.bincount(held[is_read], minlength=most), np.bincount(kept, minlength=most))
            named += [cached, held[~is_read & (held > 0)]]
        counts = np.bincount(np.concatenate(named), minlength=most)[1:]
        if (counts != 1).any() or self.tree.num_leases != len(tables):
            odd = (np.flatnonzero(counts != 1) + 1)[:16].tolist()
            raise CheckFailed(
                f"blocks with no owner or several: {odd}; {self.tree.num_leases} leases of {len(tables)} requests"
            )


def _num_cold(blocks: WindowBlocks) -> int:
    return blocks.num_cold
