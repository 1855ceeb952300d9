"""Blocks of an engine whose groups of layers share one pool of equal blocks: all tokens, windows, chunks, states.

rows of the prefix tree   | group of full attention | .. | window or state: id, generation | ..

Of full attention the tree keeps whole texts, ends first to go. A block of another group that no running request reads goes
before that, the one that slid out first. But those before the end of a text, and before a place where texts part, are kept as
long as that place was used more recently than the text that goes next.
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
"""A state as a window: the block that holds the last token says all, what lies before it nobody reads."""
_TEXTS = 16
"""Blocks of texts that are remembered for each block of memory, where no group keeps whole texts."""
_EARLIER = 1024
"""Tokens before what a place needs that are kept with it, as far as they are there: for texts that part a little earlier."""
_NONE: Ids = np.empty(0, np.int32)


class Table:
    """One request's blocks. ``ids[g]``: of group ``g`` in the order of the text, 0 where it holds none; ``first[g]``: the
    column before which it holds none any more. ``lease``: what of the text is cached, in these blocks or others; ``doubles``:
    blocks of full attention whose text others cached first. The worker knows them, so that they stay until the end.
    ``parting``: behind so many blocks another text was like this one, but could not be resumed there. ``text``: its first
    tokens, int32, as far as somebody has them as an array; nobody changes it."""

    def __init__(self, lease: Lease, ids: list[list[int]], first: list[int]) -> None:
        self.lease, self.ids, self.first, self.parting = lease, ids, first, 0
        self.doubles: list[Ids] = []
        self.text = _NONE


class GroupBlocks(SharedBlocks):
    """Blocks of groups that grow as ``growths`` say (a state as ``LAST_STATE``), each of ``sizes[g]`` tokens; only where all
    are equal, texts can be cached. Otherwise as ``SharedBlocks``."""

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
        self._kept: dict[int, list[Handles]] = {}  # by the name of a place in the tree: what it needs of each window
        self._next_place = 0

    @property
    def num_available(self) -> int:
        idle = sum(blocks.num_idle for _, blocks in self._windows.values())
        return self.free.num_free + len(self.full) * self.tree.num_evictable + idle

    @property
    def num_cached(self) -> int:
        return len(self.full) * self.tree.num_cached + sum(blocks.num_cached for _, blocks in self._windows.values())

    # -- what is cached ----------------------------------------------------------------------------------------------

    def resumable(self, match: Match) -> int:
        """Behind how many blocks of ``match`` its text can go on. O(blocks)."""
        return self._last_boundary(match.ids)

    def found(self, match: Match, num_blocks: int) -> list[list[int]]:
        """For each group the ids of what a text reads of the first ``num_blocks`` blocks of ``match``, 0 for others."""
        ids = [list[int]() for _ in self.sizes]
        for row, group in enumerate(self.full):
            ids[group] = match.ids[row, :num_blocks].tolist()
        for group, cells in self._cells(match.ids, num_blocks).items():
            ids[group] = [0] * (num_blocks - cells.shape[1]) + cells[0].tolist()
        return ids

    def begin(self, match: Match, num_blocks: int) -> Table:
        """A request that begins with ``num_blocks`` blocks of ``match``. Raises StaleHandle, changing nothing, if what it
        reads of them was evicted."""
        cells = self._cells(match.ids, num_blocks)
        if not all(self._windows[group][1].are_there(some).all() for group, some in cells.items()):
            raise StaleHandle("blocks of this match were evicted since; match again")
        lease, first = self.tree.pin(match, num_blocks), [0] * len(self.sizes)
        for group, some in cells.items():
            self._windows[group][1].read(some[0])
            first[group] = num_blocks - some.shape[1]
        return Table(lease, self.found(match, num_blocks), first)

    def admit(self, table: Table) -> None:
        """``table`` is there to stay: the place at which it goes on was used."""
        if self._windows:
            self.tree.touch(table.lease)

    def publish(self, table: Table, tokens: Ids, num_tokens: int) -> None:
        """``tokens``, of whole blocks behind what is cached of ``table``, are computed, as part of ``num_tokens``: they may be
        shared. A state only if ``num_tokens`` end with them: later steps have overwritten it. O(tokens)."""
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
            ours = rows[row : row + 2]
            mine = ours[0] > 0
            if not is_new:
                cells = self.tree.ids_between(table.lease, begin, end)[row : row + 2]
                lacking = mine & ~blocks.are_there(cells)
                cells[:, lacking] = ours[:, lacking]
                self.tree.put_ids(table.lease, begin, row, cells)
                mine &= (cells == ours).all(0)
            blocks.publish(ours[0, mine].astype(np.intp))
        if begin < table.parting <= end:
            self._keep_place(table, table.parting)
        if not self.full and (surplus := self.tree.num_cached - _TEXTS * self.num_blocks) > 0:
            self._evict_texts(surplus)

    # -- a request's blocks ------------------------------------------------------------------------------------------

    def lacking(self, table: Table, num_tokens: int) -> list[int]:
        """Columns that each group lacks for ``num_tokens`` tokens; of a state only the last of them is a block."""
        return [max(0, ceil_div(num_tokens, size) - len(ids)) for size, ids in zip(self.sizes, table.ids)]

    def num_needed(self, columns: Many[int]) -> int:
        """Blocks that so many columns of each group take."""
        return sum(min(n, 1) if growth.is_state else n for n, growth in zip(columns, self.growths))

    def most_needed(self, table: Table, num_tokens: int, step: int) -> int:
        """Blocks that ``table`` lacks at most on its way to ``num_tokens`` tokens, ``step`` tokens at a time."""
        columns = self.lacking(table, num_tokens)
        for group, (growth, size) in enumerate(zip(self.growths, self.sizes)):
            most = None if growth.is_state else growth.most_blocks(size, step)
            if most is not None:
                held = len(table.ids[group]) - table.first[group]
                columns[group] = min(columns[group], max(0, most - held))
        return self.num_needed(columns)

    def grow(self, table: Table, columns: Many[int]) -> list[list[int]]:
        """So many more ``columns`` for each group: the ids that are added. There is room for them."""
        ids, added = self.take(self.num_needed(columns)).tolist(), list[list[int]]()
        for group, n in enumerate(columns):
            gap = n - 1 if n and self.growths[group].is_state else 0
            added.append([0] * gap + ids[: n - gap])
            del ids[: n - gap]
            table.ids[group] += added[-1]
        return added

    def slide(self, table: Table, num_tokens: int) -> None:
        """``num_tokens`` tokens are computed: let go of what those behind them do not read."""
        for group in self._windows:
            first, held = table.first[group], table.ids[group]
            end = min(int(self.growths[group].first_needed(num_tokens)) // self.sizes[group], len(held))
            if end > first:
                self._let_go(table, group, end)
                held[first:end] = [0] * (end - first)
                table.first[group] = end

    def undo(self, table: Table) -> None:
        """Let go of what ``table`` began with; it has nothing else."""
        for group in self._windows:
            self._let_go(table, group, len(table.ids[group]))
        self.tree.unpin(table.lease)

    def end(self, table: Table) -> None:
        """The request is over: what it computed stays cached while memory lasts."""
        self._keep_place(table, table.lease.num_blocks)
        own = [np.array(table.ids[group][table.lease.num_blocks :], np.int32) for group in self.full]
        self.free.release(np.concatenate([_NONE, *own, *table.doubles]))
        self.tree.touch(table.lease)
        self.undo(table)

    def _let_go(self, table: Table, group: int, end: int) -> None:
        """Of one window, the columns before ``end``: cached blocks are read by one less, others are free."""
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

    # -- places at which a text can be resumed -----------------------------------------------------------------------

    def _cells(self, rows: Ids, num_blocks: int) -> dict[int, Ids]:
        """Of each window what a text reads of its blocks ``rows`` to go on behind ``num_blocks``: cells, int32 ``[2, n]``."""
        return {
            group: rows[row : row + 2, blocks.first_needed(num_blocks) : num_blocks]
            for group, (row, blocks) in self._windows.items()
        }

    def _last_boundary(self, rows: Ids) -> int:
        allowed = np.ones(rows.shape[1] + 1, np.bool_)
        for row, blocks in self._windows.values():
            allowed &= blocks.boundaries(rows[row : row + 2])
        return int(np.flatnonzero(allowed)[-1])

    def _keep_place(self, table: Table, num_blocks: int) -> None:
        """Keep what the text of ``table`` needs of each window where it can be resumed last within ``num_blocks`` blocks, and
        what lies a little before that."""
        if not self._windows or not num_blocks:
            return
        rows = self.tree.ids_between(table.lease, 0, num_blocks)
        at, name = self._last_boundary(rows), self._next_place
        if at and self.tree.set_checkpoint(table.lease, at * self.block_size, name):
            self._next_place += 1
            self._kept[name] = []
            for row, blocks in self._windows.values():
                first = max(0, blocks.first_needed(at) - ceil_div(_EARLIER, self.block_size))
                cells = rows[row : row + 2, first:at]
                self._kept[name].append(cells[0, blocks.are_there(cells)].astype(np.intp))
                blocks.keep(self._kept[name][-1])

    def _forget_places(self, names: Iterable[int]) -> None:
        for name in names:
            for (_, blocks), ids in zip(self._windows.values(), self._kept.pop(name)):
                blocks.drop(ids)

    # -- room --------------------------------------------------------------------------------------------------------

    def _evict(self, n: int) -> None:
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
        """Forget ``num_blocks`` blocks of texts, ends first, and what the windows have of them."""
        gone = self.tree.evict(num_blocks)
        self._forget(gone.ids, gone.states)

    def clear(self) -> None:
        """Forget all texts. Raises RetryLater while a request has blocks."""
        gone = self.tree.clear()
        self._forget(gone.ids, gone.states)

    def _forget(self, rows: Ids, places: Iterable[int]) -> None:
        self._forget_places(places)
        self.free.release(rows[: len(self.full)].ravel())
        for row, blocks in self._windows.values():
            self.free.release(blocks.forget(rows[row : row + 2]))

    # -- proof -------------------------------------------------------------------------------------------------------

    def prove(self, tables: Many[Table]) -> None:
        """Prove that every block is free, cached, or of one of ``tables``, which are those of all requests. Raises
        CheckFailed. O(blocks)."""
        self.free.check()
        self.tree.check()
        rows, most = self.tree.all_ids(), self.num_blocks + 1
        doubles = [one for table in tables for one in table.doubles]
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
                f"blocks in no place or in several: {odd}; {self.tree.num_leases} leases of {len(tables)} requests"
            )


def _num_cold(blocks: WindowBlocks) -> int:
    return blocks.num_cold
