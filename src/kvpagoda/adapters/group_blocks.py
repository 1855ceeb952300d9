"""The blocks of an engine whose groups (full attention, windows, chunks, states) share one pool of equal blocks.

rows of the prefix tree   | group of full attention | .. | window or state: id, generation | ..

Groups of full attention keep whole texts in the tree; ends of texts are evicted first. A block of another group that no
running request reads is evicted before these, the one that left its window first. But the blocks that a text needs to
be resumed at its end, or where it parts from another text, are kept as long as that position was used more recently
than the text that is evicted next.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.adapters.shared_blocks import SharedBlocks
from kvpagoda.blocks.ids import Ids
from kvpagoda.blocks.places import BlockNames
from kvpagoda.errors import CheckFailed, StaleHandle
from kvpagoda.prefix import EvictionPolicy, Lease, Match
from kvpagoda.prefix.hybrid import Added, Freed, HybridIndex, IndexGroup, Kept, Window
from kvpagoda.schema import Growth
from kvpagoda.units import ceil_div

LAST_STATE = Growth(window=2, is_state=True)
"""The growth of a state, as a window: only the block that holds the last token is read."""
_TEXTS = 16
"""How many blocks of texts the tree keeps for each block of memory, if no group keeps whole texts."""
_EARLIER = 1024
"""How many tokens before the needed ones are kept with a resumable position, for texts that part a little earlier."""
_NONE: Ids = np.empty(0, np.int32)
_NO_STATES = BlockNames(_NONE)


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
        groups = [IndexGroup(growth, num_blocks + 1) for growth in growths]
        self.index = HybridIndex(groups, sizes[0], policy, capacity=num_blocks)
        super().__init__(num_blocks, sizes[0], policy, self.index.tree)
        self.full = self.index.texts.numbers

    @property
    def num_available(self) -> int:
        idle = sum(window.num_evictable for window in self.index.windows)
        return self.free.num_free + len(self.full) * self.tree.num_evictable + idle

    @property
    def num_cached(self) -> int:
        return len(self.full) * self.tree.num_cached + sum(window.num_cached for window in self.index.windows)

    # -- cached blocks -----------------------------------------------------------------------------------------------

    def resumable(self, match: Match) -> int:
        """Return the most blocks of ``match`` after which its text can be resumed. O(blocks)."""
        return self.index.resume_point(match)[0]

    def found(self, match: Match, num_blocks: int) -> list[list[int]]:
        """Return for each group the ids of the first ``num_blocks`` blocks of ``match``; 0 for those not read."""
        ids = [list[int]() for _ in self.sizes]
        for row, group in enumerate(self.full):
            ids[group] = match.ids[row, :num_blocks].tolist()
        for window, names in zip(self.index.windows, self.index.names_in(match.ids, self._spans(num_blocks))):
            ids[window.number] = [0] * (num_blocks - len(names)) + names.tolist()
        return ids

    def _spans(self, num_blocks: int) -> list[range]:
        """Return for each group which blocks of a text are read to go on after its first ``num_blocks``."""
        return [part.span(num_blocks) for part in self.index.parts]

    def begin(self, match: Match, num_blocks: int) -> Table:
        """Return the table of a request that begins with ``num_blocks`` blocks of ``match``, and pin these.

        Raises StaleHandle, changing nothing, if blocks that the request reads were evicted.
        """
        spans = self._spans(num_blocks)
        if not self.index.are_there(match, spans):
            raise StaleHandle("blocks of this match were evicted since; match again")
        holding = self.index.hold(match, num_blocks, self.index.names_in(match.ids, spans))
        return Table(holding.lease, self.found(match, num_blocks), [span.start for span in spans])

    def admit(self, table: Table) -> None:
        """Note that the request of ``table`` is admitted: the cached text that it begins with was used."""
        if self.index.windows:
            self.tree.touch(table.lease)

    def publish(self, table: Table, tokens: Ids, num_tokens: int) -> None:
        """Make blocks of ``table`` shareable: those of ``tokens``, whole blocks after the cached part of its text.

        ``num_tokens``: all computed tokens of the request. A state is shared only if these end with ``tokens``, because
        later steps have overwritten it. The request goes on with its own blocks, also where others were cached first.
        O(tokens).
        """
        begin = table.lease.num_blocks
        end = begin + len(tokens) // self.block_size
        texts = np.array([table.ids[group][begin:end] for group in self.full], np.int32).reshape(
            len(self.full), end - begin
        )
        windows: list[BlockNames] = []
        for window in self.index.windows:
            is_overwritten = window.growth.is_state and num_tokens != end * self.block_size
            ids = np.array(table.ids[window.number][end if is_overwritten else begin : end], np.intp)
            held = np.flatnonzero(ids == 0)
            windows.append(BlockNames(ids[held[-1] + 1 :] if len(held) else ids))
        counts = [[len(names)] for names in windows]
        _, found = self.index.publish([Added(table.lease, tokens)], texts, windows, counts, takes_over=False)
        if found:
            table.doubles.append(found[0].doubles)
        if begin < table.parting <= end:
            self._keep_place(table, table.parting)
        if not self.full and (surplus := self.tree.num_cached - _TEXTS * self.num_blocks) > 0:
            self._free(self.index.texts.evict(surplus))

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
        for window in self.index.windows:
            group = window.number
            first, held = table.first[group], table.ids[group]
            end = min(int(self.growths[group].first_needed(num_tokens)) // self.sizes[group], len(held))
            if end > first:
                self._let_go(table, window, end)
                held[first:end] = [0] * (end - first)
                table.first[group] = end

    def undo(self, table: Table) -> None:
        """Undo ``begin``: release the cached blocks of ``table``, which has no others."""
        for window in self.index.windows:
            self._let_go(table, window, len(table.ids[window.number]))
        self.tree.unpin(table.lease)

    def end(self, table: Table) -> None:
        """End the request of ``table``: free its blocks; published ones stay cached until they are evicted."""
        self._keep_place(table, table.lease.num_blocks)
        own = [np.array(table.ids[group][table.lease.num_blocks :], np.int32) for group in self.full]
        self.free.release(np.concatenate([_NONE, *own, *table.doubles]))
        self.tree.touch(table.lease)
        self.undo(table)

    def _read(self, table: Table, window: Window, end: int) -> tuple[BlockNames, Ids]:
        """Return the blocks of ``table`` in ``window`` before column ``end``: the cached ones that it reads, and its
        own, int32."""
        group = window.number
        first, cached = table.first[group], table.lease.num_blocks
        ids = np.array(table.ids[group][first:end], np.int32)
        is_read = np.zeros(len(ids), np.bool_)
        if first < min(end, cached):
            cells = window.cached_between(table.lease, first, min(end, cached))
            is_read[: cells.shape[1]] = window.are_there(cells) & (cells[0] == ids[: cells.shape[1]])
        return BlockNames(ids[is_read].astype(np.intp)), ids[~is_read & (ids > 0)]

    def _let_go(self, table: Table, window: Window, end: int) -> None:
        """Release the columns before ``end`` of one window: cached blocks have one reader less, others are freed."""
        read, own = self._read(table, window, end)
        window.leave(read)
        if len(own):
            self.free.release(own)

    # -- positions at which a text can be resumed --------------------------------------------------------------------

    def _keep_place(self, table: Table, num_blocks: int) -> None:
        """Keep the window blocks that resuming the text of ``table`` needs, after at most ``num_blocks`` blocks.

        The position is the last possible one. Up to ``_EARLIER`` tokens before the needed blocks are kept too.
        """
        index = self.index
        if not index.windows or not num_blocks:
            return
        end = int(np.flatnonzero(index.boundaries(self.tree.ids_between(table.lease, 0, num_blocks)))[-1])
        if end and index.checkpoint_at(table.lease, end) is None:
            tails = index.tails(table.lease, end, ceil_div(_EARLIER, self.block_size))
            assert tails is not None, "a boundary has all blocks that it needs"
            index.keep(table.lease, end, Kept(*tails, _NO_STATES))

    # -- room --------------------------------------------------------------------------------------------------------

    def _evict(self, n: int) -> None:
        """Make at least ``n`` more blocks free, in the order that the top of this file describes."""
        goal = self.free.num_free + n
        while (short := goal - self.free.num_free) > 0:
            coldest = max(self.index.windows, key=_num_cold, default=None)
            if coldest is not None and coldest.num_cold:
                self._free(coldest.evict(short))
                continue
            place, text = self.tree.checkpoints.oldest(), self.tree.oldest()
            if place is not None and (not self.tree.num_evictable or (text is not None and place <= text)):
                self._free(self.index.evict_checkpoint())
            else:
                self._free(self.index.texts.evict(ceil_div(short, max(1, len(self.full)))))

    def clear(self) -> None:
        """Evict all texts. Raises RetryLater while a request has blocks."""
        self._free(self.index.removed(self.tree.clear()))

    def _free(self, freed: Freed | None) -> None:
        """Free the blocks that the index has ``freed``."""
        for _, names in () if freed is None else freed.blocks:
            self.free.release(names)

    # -- check -------------------------------------------------------------------------------------------------------

    def prove(self, tables: Many[Table]) -> None:
        """Prove that every block is free, cached, or in one of ``tables``, the tables of all requests.

        Raises CheckFailed. O(blocks).
        """
        self.free.check()
        most = self.num_blocks + 1
        read = [
            [self._read(table, window, len(table.ids[window.number])) for window in self.index.windows]
            for table in tables
        ]
        self.index.check([[names for names, _ in of_table] for of_table in read])
        named = [self.free.free_ids(), self.tree.all_ids()[: len(self.full)].ravel()]
        for table in tables:
            named += table.doubles
            named += [np.array(table.ids[group][table.lease.num_blocks :], np.int32) for group in self.full]
        named += [own for of_table in read for _, own in of_table]
        named += [window.names().astype(np.int32) for window in self.index.windows]
        counts = np.bincount(np.concatenate(named), minlength=most)[1:]
        if (counts != 1).any() or self.tree.num_leases != len(tables):
            odd = (np.flatnonzero(counts != 1) + 1)[:16].tolist()
            raise CheckFailed(
                f"blocks with no owner or several: {odd}; {self.tree.num_leases} leases of {len(tables)} requests"
            )


def _num_cold(window: Window) -> int:
    return window.num_cold
