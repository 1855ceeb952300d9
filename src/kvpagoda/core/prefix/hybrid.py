"""The prefix index of models whose layers keep different things: texts, windows and states, with the same verbs.

    Texts      blocks of full attention    cached as long as their tokens are in the prefix tree; ends are evicted first
    Window     blocks of a window          in the tree too; evicted first once they slid out, unless a checkpoint keeps
                                           them: then with the checkpoint
    States     copies of states            one for each checkpoint, evicted with it

    rows of the tree | text | .. | window: name, generation | window: name, generation | .. | number of a text's block

A text can be resumed after each block before which the last window of every group is cached; if states are copied, only
where a checkpoint has a copy. Blocks of an optional group (``Growth.is_optional``) are kept as those of windows are, but
a text can be resumed without them, and no checkpoint keeps them: they are cold as soon as no request reads them.

Blocks are given by name. Nothing is copied, freed or stored here: methods return what follows from them, and the caller
applies it. Both ``KVCache`` and the adapter for vLLM's scheduler have one such index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpagoda.core.blocks.free_list import AnyIds, BlockNames, IdPool, Ids
from kvpagoda.core.prefix.node import Evicted, Lease, Match
from kvpagoda.core.prefix.order import Entry
from kvpagoda.core.prefix.tree import PrefixTree
from kvpagoda.errors import CheckFailed, StaleHandle
from kvpagoda.policies.protocol import EvictionPolicy
from kvpagoda.retention import RetentionRule
from kvpagoda.schema.fields import Growth

# -- cached blocks of one window -------------------------------------------------------------------------------------

Flags = npt.NDArray[np.bool_]
_KEEPER = 1 << 32  # a keeper in the count of a block's uses; a reader is 1
_READERS = _KEEPER - 1
_NONE = BlockNames(np.empty(0, np.intp))


class WindowBlocks:
    """Blocks of ``block_size`` tokens with names below ``num_rows``, of layers that grow as ``growth`` says.

    ``num_cached``: blocks that the tree names. ``num_read``: cached blocks with a reader. ``num_reads``: the sum of
    their readers. ``num_cold``: cached blocks without a reader or keeper.

    The uses of a block are one number, so that most changes are one operation on an array:

        | keepers: 31 bits | readers: 32 bits |     0 or more: it is in use, or not cached
        - turn                                      below 0: it is cold since that turn

    Callers name each block once in a call: by its name, intp ``[n]`` (numpy takes several times as long to index by
    int32), or by its cell. Cells are int32 ``[2, n]``; 0 and 0 mean no block. Methods are O(their arguments), array
    work, unless another cost is named. Methods that change something allocate only small temporaries.
    """

    def __init__(self, growth: Growth, block_size: int, num_rows: int) -> None:
        self.growth = growth
        self.block_size = block_size
        self.num_rows = num_rows
        self._slides = growth.span is not None
        self._generation = np.ones(num_rows, np.int32)  # by name, as all that follows
        self._uses = np.zeros(num_rows, np.int64)
        self._queue: deque[tuple[int, BlockNames]] = deque()  # (turn, names), also of blocks with other uses by now
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0

    # -- queries -----------------------------------------------------------------------------------------------------

    def write_cells(self, names: BlockNames, out: Ids) -> None:
        """Write the cells of these blocks to ``out``, int32 ``[2, n]``."""
        out[0] = names
        out[1] = self._generation[names]

    def are_there(self, cells: Ids) -> Flags:
        """Return which of ``cells`` still name a block: bool ``[n]``."""
        there: Flags = self._generation[cells[0]] == cells[1]
        return there

    def first_needed(self, num_blocks: int) -> int:
        """Return the first block that a text still reads after ``num_blocks`` blocks of it."""
        return int(self.growth.first_needed(num_blocks * self.block_size)) // self.block_size

    def can_resume(self, cells: Ids) -> bool:
        """Return whether a text can be continued behind its blocks ``cells``."""
        return bool(self.are_there(cells[:, self.first_needed(cells.shape[1]) :]).all())

    def boundaries(self, cells: Ids) -> Flags:
        """Return behind how many of the blocks ``cells`` the text can be continued: bool ``[n + 1]``."""
        n = cells.shape[1]
        ends = np.arange(n + 1)
        needed = self.growth.first_needed(ends * self.block_size) // self.block_size
        missing = np.where(self.are_there(cells), -1, ends[:-1])
        last_missing = np.concatenate(([-1], np.maximum.accumulate(missing))) if n else np.array([-1])
        flags: Flags = last_missing < needed
        return flags

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a reader, which can be evicted now."""
        return self.num_cached - self.num_read

    @property
    def num_spare(self) -> int:
        """How many evictable blocks reservations can count on. Each reader counts as a block in use, because its
        reservation expects a free block when its window slides on; without a window nothing slides."""
        return self.num_cached - (self.num_reads if self._slides else self.num_read)

    def span(self, num_blocks: int) -> range:
        """Return which blocks of a text are read to go on after its first ``num_blocks``."""
        return range(self.first_needed(num_blocks), num_blocks)

    # -- readers and keepers -----------------------------------------------------------------------------------------

    def publish(self, names: BlockNames) -> None:
        """Register ``names`` as cached, with the request that published them as their reader."""
        self._uses[names] = 1
        self.num_cached += len(names)
        self.num_read += len(names)
        self.num_reads += len(names)

    def read(self, names: BlockNames) -> None:
        """Add one reader to ``names``."""
        uses = self._warm(names)
        self.num_reads += len(names)
        self.num_read += len(uses[uses & _READERS == 0])
        self._uses[names] = uses + 1

    @staticmethod
    def apart(names: BlockNames, counts: Many[int]) -> list[BlockNames]:
        """Return ``names``, of which each of several readers leaves ``counts[i]``, in parts in which no block is twice."""
        if len(counts) > 1 and len(np.unique(names)) < len(names):  # readers of one block leave it one after another
            return [BlockNames(part) for part in np.split(names, np.cumsum(counts)[:-1])]
        return [names]

    def leave(self, names: BlockNames) -> None:
        """Remove one reader from ``names``; blocks without a reader or keeper become cold, to be evicted last."""
        if not len(names):
            return
        uses = self._uses[names] - 1
        are_in_use = uses[uses.argmax()] > 0
        self.num_reads -= len(names)
        if are_in_use:
            self.num_read -= len(uses[uses & _READERS == 0])
            self._uses[names] = uses
            names = BlockNames(names[uses == 0])
        else:
            self.num_read -= len(names)
        if len(names):
            self._cool(names, self._next_turn)
            self._queue.append((self._next_turn, names))
            self._next_turn += 1

    def keep(self, names: BlockNames) -> None:
        """Add one keeper to ``names``."""
        self._uses[names] = self._warm(names) + _KEEPER

    def drop(self, names: BlockNames) -> None:
        """Remove one keeper from ``names``; blocks without a reader or keeper become cold and are evicted next."""
        uses = self._uses[names] - _KEEPER
        self._uses[names] = uses
        names = BlockNames(names[uses == 0])
        if len(names):
            self._first_turn -= 1
            self._cool(names, self._first_turn)
            self._queue.appendleft((self._first_turn, names))

    def _warm(self, names: BlockNames) -> npt.NDArray[np.int64]:
        """Return the uses of ``names``, which get one more use now, and count them as not cold."""
        uses: npt.NDArray[np.int64] = self._uses[names]
        are_cold = uses < 0
        self.num_cold -= len(uses[are_cold])
        uses[are_cold] = 0
        return uses

    def _cool(self, names: BlockNames, turn: int) -> None:
        """Mark ``names``, which have no uses, as cold since ``turn``."""
        self.num_cold += len(names)
        self._uses[names] = -turn

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict_cold(self, n: int) -> BlockNames:
        """Evict ``n`` cold blocks, or all if there are fewer; return their names, intp. Amortised O(n)."""
        count, done = min(n, self.num_cold), 0
        gone = np.empty(count, np.intp)
        while done < count:
            turn, names = self._queue.popleft()
            names = self._still_cold(turn, names)
            end = done + len(names)
            if end > count:
                self._queue.appendleft((turn, BlockNames(names[count - done :])))
                names = BlockNames(names[: count - done])
                end = count
            gone[done:end] = names
            done = end
        return self._forget(BlockNames(gone))

    def forget(self, cells: Ids) -> BlockNames:
        """Remove the blocks of ``cells``, which the tree no longer has and nothing reads or keeps; return their
        names."""
        names = BlockNames(cells[0, self.are_there(cells)])
        if not len(names):
            return _NONE
        self._uses[names] = 0
        return self._forget(names)

    def _still_cold(self, turn: int, names: BlockNames) -> BlockNames:
        """Return the ``names`` of a queue entry that were not read or kept since ``turn``."""
        are_cold = self._uses[names] == -turn
        return names if are_cold[are_cold.argmin()] else BlockNames(names[are_cold])

    def _forget(self, names: BlockNames) -> BlockNames:
        """Count ``names`` as not cached, and make their cells stale. Return them."""
        self.num_cached -= len(names)
        self.num_cold -= len(names)
        self._generation[names] += 1
        return names

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cells: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that the tree has exactly these ``cells``, that the counts are right, and that cold blocks are queued.

        ``readers`` and ``keepers``, int64 ``[num_rows]``: how many there are of each name. Raises CheckFailed.
        """
        where, names = self.growth.name, np.sort(cells[0, self.are_there(cells)])
        if (names[1:] == names[:-1]).any():
            raise CheckFailed(f"{where}: the tree names a cached block twice")
        counted = len(names), int(np.count_nonzero(readers)), int(readers.sum())
        if counted != (self.num_cached, self.num_read, self.num_reads):
            raise CheckFailed(
                f"{where}: {counted} blocks are cached, read, and reads in all; "
                f"{self.num_cached, self.num_read, self.num_reads} are counted"
            )
        odd = np.flatnonzero(np.maximum(self._uses, 0) != readers + keepers * _KEEPER)
        if len(odd):
            raise CheckFailed(f"{where}: readers and keepers of blocks {odd[:16].tolist()} are miscounted")
        cold = names[self._uses[names] < 0]
        queued = [self._still_cold(turn, one) for turn, one in self._queue]
        listed = np.sort(np.concatenate([_NONE, *queued]))
        if len(cold) != self.num_cold or not np.array_equal(cold, listed):
            raise CheckFailed(f"{where}: {len(cold)} cold blocks, {len(listed)} in the queue, {self.num_cold} counted")


# -- the index -------------------------------------------------------------------------------------------------------


class IndexGroup(NamedTuple):
    """One group of an index: the names of its blocks are below ``num_rows``; an eviction frees ``num_ahead`` blocks more
    than it is asked for. ``is_copied``: its blocks are copies of states, which checkpoints own. ``is_private``: its blocks are
    never cached."""

    growth: Growth
    num_rows: int
    num_ahead: int = 0
    is_copied: bool = False
    is_private: bool = False


class Kept(NamedTuple):
    """What one checkpoint keeps."""

    tails: tuple[BlockNames, ...]
    """For each window: its last blocks before the checkpoint, intp ``[n]``, by reference."""
    needed: tuple[int, ...]
    """How many of these are needed to resume at the checkpoint; the others serve texts that part a little earlier."""
    states: BlockNames
    """The block with a copy of the states, ``[1]``; ``[0]`` where no states are copied."""


class Freed(NamedTuple):
    """What is no longer cached; the caller frees the blocks."""

    blocks: tuple[tuple[int, BlockNames], ...] = ()
    """(index of the group, names). Blocks of texts are ordered deepest first."""
    checkpoints: tuple[tuple[int, Kept], ...] = ()
    """(name of the checkpoint, what it kept)."""
    numbers: Ids | None = None
    """The numbers of evicted blocks of texts, int32, where the index numbers them."""


class Holding(NamedTuple):
    """What is kept from eviction, for a request that starts or for a pin, until it is released."""

    lease: Lease
    windows: tuple[BlockNames, ...]
    """For each window: the blocks that are read, intp ``[n]``."""
    checkpoint: int | None = None
    partial: Lease | None = None
    """The pin of the cached block that begins with the last matching tokens, to be copied."""


class Added(NamedTuple):
    """What a request makes shareable: the whole blocks of ``keys``, which follow what ``lease`` covers. New blocks enter the
    eviction order as ``entry`` says (``is_late``: with those before them), others count as used when ``lease`` was opened.
    ``text``, ``priority``: see ``PrefixTree.insert``."""

    lease: Lease
    keys: Ids
    text: Ids | None = None
    priority: int = 0
    entry: Entry | None = None
    is_late: bool = False


class Published(NamedTuple):
    """The blocks that the tree has for a text from now on, where it had some already."""

    texts: Ids
    """int32 ``[groups of texts, n]``: the names to use from now on."""
    doubles: Ids
    """int32: the given names of blocks of texts that duplicate cached ones."""
    windows: tuple[BlockNames, ...]
    """For each window the names that the tree has, in place of the given ones."""
    window_doubles: tuple[BlockNames, ...]
    """For each window the given names that duplicate cached blocks."""


class Texts:
    """The blocks of texts in the tree of ``index``, in the groups ``numbers``. Without any group, texts take no device
    memory."""

    def __init__(self, index: HybridIndex, numbers: Many[int], num_ahead: int) -> None:
        self._index = index
        self._tree = index.tree
        self.numbers = tuple(numbers)
        self._num_ahead = num_ahead
        self.num_cold = 0

    @property
    def num_cached(self) -> int:
        """Cached blocks, in use or not. O(1)."""
        return self._tree.num_cached

    @property
    def num_evictable(self) -> int:
        """Cached blocks that could be evicted now. O(1)."""
        return self._tree.num_evictable

    num_spare = num_evictable

    def span(self, num_blocks: int) -> range:
        """Return which blocks of a text are read to go on after its first ``num_blocks``."""
        return range(num_blocks)

    def oldest(self) -> int | None:
        """Return when the block that is evicted next was last used, by one clock for all groups; None if unknown."""
        return self._tree.oldest()

    def evict(self, n: int) -> Freed | None:
        """Evict ``n`` blocks of texts and some ahead, or fewer if there are fewer."""
        return self._index.removed(self._tree.evict(n + self._num_ahead))

    def names(self) -> BlockNames:
        """Return the names of the cached blocks of the first group. O(blocks)."""
        return BlockNames(self._tree.owned_ids(0))


class Window(WindowBlocks):
    """The cached blocks of one window group of ``index``, which is its group ``number``. ``row``: its first row in the
    tree."""

    def __init__(self, index: HybridIndex, number: int, row: int, group: IndexGroup) -> None:
        super().__init__(group.growth, index.block_size, group.num_rows)
        self._tree = index.tree
        self.number = number
        self.row = row
        self._num_ahead = group.num_ahead
        self.most_adopted = 0  #: blocks that ``adopt`` has room for
        self._scratch: Ids = np.empty((2, 2, 0), np.int32)

    def cells_of(self, rows: Ids) -> Ids:
        """Return the cells of this group, int32 ``[2, n]``, of ``rows``, int32 ``[rows of the tree, n]``; a view."""
        cells: Ids = rows[self.row : self.row + 2]
        return cells

    def cached_between(self, at: Match | Lease, first: int, end: int) -> Ids:
        """Return the cells that the tree has for blocks ``first .. end - 1`` of ``at``, int32 ``[2, n]``."""
        cells = np.empty((2, end - first), np.int32)
        self._tree.read_ids(at, first, self.row, cells)
        return cells

    def oldest(self) -> int | None:
        """Return when the block that is evicted next, if none is cold, was last used; None if unknown."""
        return self._tree.checkpoints.oldest()

    def evict(self, n: int) -> Freed | None:
        """Evict ``n`` cold blocks and some ahead, or fewer if there are fewer. None if none is cold."""
        if not self.num_cold:
            return None
        return Freed(((self.number, self.evict_cold(n + self._num_ahead)),))

    def names(self) -> BlockNames:
        """Return the names of the cached blocks. O(blocks)."""
        cells = self.cells_of(self._tree.all_ids())
        return BlockNames(cells[0, self.are_there(cells)])

    def reserve_scratch(self, num_blocks: int) -> None:
        """Make room for ``adopt``, which must not allocate, for ``num_blocks`` blocks."""
        self._scratch = np.empty((2, 2, 2 * num_blocks), np.int32)
        self.most_adopted = 2 * num_blocks

    def write_last(self, names: BlockNames, counts: list[int], sizes: list[int], out: Ids) -> None:
        """Write the cells of the last blocks of several texts, ``counts[i]`` of ``names`` each, to the end of its
        ``sizes[i]`` columns of ``out``, int32 ``[2, n]``, and no block before them."""
        out[:] = 0
        end = column = 0
        for count, n in zip(counts, sizes):
            end, column = end + count, column + n
            if new := min(count, n):
                self.write_cells(BlockNames(names[end - new : end]), out[:, column - new : column])

    def adopt(self, lease: Lease, names: BlockNames, takes_over: bool) -> BlockNames:
        """Publish ``names``, the last blocks of ``lease``, of which the tree may have some already, and return the names
        that it has. ``takes_over``: the request reads the cached blocks from now on; else only its own."""
        first, end = lease.num_blocks - len(names), lease.num_blocks
        ours, theirs = self._scratch[:, :, : end - first]
        self.write_cells(names, ours)
        self._tree.read_ids(lease, first, self.row, theirs)
        lacking = ~self.are_there(theirs)
        theirs[:, lacking] = ours[:, lacking]
        self._tree.put_ids(lease, first, self.row, theirs)
        found = BlockNames(theirs[0].astype(np.intp))
        is_own = found == names
        self.publish(BlockNames(names[is_own]))
        if takes_over:
            self.read(BlockNames(found[~is_own]))
        return found


class States:
    """The copies of states that checkpoints of ``index`` keep, one each: group ``number``; None: there are no states."""

    def __init__(self, index: HybridIndex, number: int | None) -> None:
        self._tree = index.tree
        self._kept = index.kept
        self.number = number
        self.num_cold = 0

    @property
    def num_cached(self) -> int:
        """Checkpoints, in use or not. O(1)."""
        return len(self._kept)

    @property
    def num_evictable(self) -> int:
        """Checkpoints that could be evicted now. O(1)."""
        return len(self._kept) - self._tree.checkpoints.num_held

    num_spare = num_evictable

    def span(self, num_blocks: int) -> range:
        """Return which blocks of a text are shared to go on after its first ``num_blocks``: none, states are copied."""
        return range(0)

    def oldest(self) -> int | None:
        """Return when the checkpoint that is evicted next was last used; None if unknown."""
        return self._tree.checkpoints.oldest()

    def evict(self, n: int) -> Freed | None:
        """None: a copy is evicted with its checkpoint."""
        return None

    def names(self) -> BlockNames:
        """Return the names of the blocks with copies. O(checkpoints)."""
        return BlockNames(np.concatenate([_NONE, *(kept.states for kept in self._kept.values())]))


class Private:
    """The part of a group whose blocks are never cached."""

    num_cold = num_cached = num_evictable = num_spare = 0

    def span(self, num_blocks: int) -> range:
        """Return which blocks of a text are shared to go on after its first ``num_blocks``: none."""
        return range(0)

    def oldest(self) -> int | None:
        """None: nothing is evicted."""
        return None

    def evict(self, n: int) -> Freed | None:
        """None: nothing is evicted."""
        return None

    def names(self) -> BlockNames:
        """Return the names of the cached blocks: none."""
        return _NONE


Part = Texts | Window | States | Private


class HybridIndex:
    """The prefix ``tree`` of a cache with several groups, and the checkpoints that are ``kept``, by name.

    ``groups``: what each group keeps; the blocks of all have ``block_size`` tokens. ``policy``: an eviction policy for
    texts. ``capacity``: the most blocks of texts that the caller lets the tree keep. ``is_numbered``: blocks of texts
    get numbers, in the last row of the tree, for caches where no group names them. ``rule``: see ``PrefixTree``.
    ``parts``: the cached blocks of each group, in the order of ``groups``. ``windows``: those parts that are windows.
    """

    def __init__(
        self,
        groups: Many[IndexGroup],
        block_size: int,
        policy: str | EvictionPolicy,
        *,
        capacity: int,
        is_numbered: bool = False,
        rule: RetentionRule | None = None,
    ) -> None:
        self.block_size = block_size
        text_groups = [number for number, group in enumerate(groups) if not group.growth.is_bounded]
        bounded = [number for number, group in enumerate(groups) if group.growth.is_bounded]
        bounded = [number for number in bounded if not (groups[number].is_copied or groups[number].is_private)]
        copied = next((number for number, group in enumerate(groups) if group.is_copied), None)
        self.num_texts = len(text_groups)
        num_rows = self.num_texts + 2 * len(bounded) + is_numbered
        self.tree = PrefixTree(block_size, num_rows, policy, capacity=capacity, proves_ids=False, rule=rule)
        self.kept: dict[int, Kept] = {}
        self._next_name = 0
        self._numbers = IdPool(first=1) if is_numbered else None
        num_ahead = max((groups[number].num_ahead for number in text_groups), default=0)
        self.texts = Texts(self, text_groups, num_ahead)
        self.states = States(self, copied)
        self.windows = tuple(
            Window(self, number, self.num_texts + 2 * at, groups[number]) for at, number in enumerate(bounded)
        )
        window_of = {window.number: window for window in self.windows}
        self.parts: tuple[Part, ...] = tuple(
            Private() if group.is_private
            else self.texts if number in text_groups else window_of.get(number, self.states)
            for number, group in enumerate(groups)
        )  # fmt: skip
        self.required = tuple(window for window in self.windows if not window.growth.is_optional)
        self.optional = tuple(window for window in self.windows if window.growth.is_optional)
        #: whether a text cannot be resumed after each of its tokens
        self.is_bounded = bool(self.required) or copied is not None

    # -- finding -----------------------------------------------------------------------------------------------------

    def resume_point(self, match: Match, grid: int = 1) -> tuple[int, list[int], str]:
        """Return after how many blocks of ``match`` its text can be resumed, and what limits that. O(blocks).

        The number of blocks is a multiple of ``grid``. Then: the most blocks that each group allows. Then the limit:
        ``nothing``, ``alignment``, ``window`` or ``checkpoint``."""
        end, has_states = match.num_blocks, self.states.number is not None
        state_end = 0 if match.checkpoint is None else match.checkpoint[0] // self.block_size
        most = [end] * len(self.parts)
        if (not has_states or state_end == end) and end % grid == 0:
            for window in self.required:
                if not window.can_resume(window.cells_of(match.ids)):
                    break
            else:
                return end, most, "nothing"
        allowed = self.boundaries(match.ids, most)
        anywhere = int(np.flatnonzero(allowed)[-1])
        allowed &= np.arange(end + 1) % grid == 0
        longest = int(np.flatnonzero(allowed)[-1])
        limited_by = "window" if anywhere < end else "alignment"
        if self.states.number is None:
            return longest, most, limited_by
        depth = most[self.states.number] = state_end
        while not allowed[depth]:  # depth 0 is always allowed
            above = self.tree.last_checkpoint(match, depth - 1)
            depth = 0 if above is None else above[0] // self.block_size
        return depth, most, "checkpoint" if depth < longest else limited_by

    def boundaries(self, rows: Ids, most: list[int] | None = None) -> Flags:
        """Return after how many blocks of a text every window allows to resume: bool ``[num_blocks + 1]``. ``rows``: what
        the tree has of the text, int32 ``[rows of the tree, num_blocks]``. ``most[i]`` becomes the most that group i
        alone allows, for each window that is not optional."""
        allowed = np.ones(rows.shape[1] + 1, np.bool_)
        for window in self.required:
            allows = window.boundaries(window.cells_of(rows))
            allowed &= allows
            if most is not None:
                most[window.number] = int(np.flatnonzero(allows)[-1])
        return allowed

    def columns(self, match: Match, num_tokens: int) -> list[range]:
        """Return for each group which whole blocks of ``match`` a text shares to go on after its first ``num_tokens``. Of
        an optional group these are the ones before the first that ``match`` lacks: an empty range where it lacks all."""
        num_blocks = num_tokens // self.block_size
        columns = [part.span(num_blocks) for part in self.parts]
        for window in self.optional:
            first = int(window.growth.first_needed(num_tokens)) // self.block_size
            span = columns[window.number] = range(first, max(first, min(num_blocks, match.num_blocks)))
            lacking = np.flatnonzero(~window.are_there(window.cells_of(match.ids)[:, span.start : span.stop]))
            if len(lacking):
                columns[window.number] = span[: int(lacking[0])]
        return columns

    def are_there(self, match: Match, spans: Many[range]) -> bool:
        """Return whether ``match`` has the blocks ``spans[i]`` of each group i."""
        if max((span.stop for span in spans if span), default=0) > match.num_blocks:
            return False
        for window in self.windows:
            span = spans[window.number]
            if not window.are_there(window.cells_of(match.ids)[:, span.start : span.stop]).all():
                return False
        return True

    def names_in(self, rows: Ids, spans: Many[range]) -> list[BlockNames]:
        """Return for each window the names of the blocks ``spans[i]`` of its group i, intp. ``rows``: what the tree has
        of a text, int32 ``[rows of the tree, n]``."""
        names: list[BlockNames] = []
        for window in self.windows:
            span = spans[window.number]
            names.append(BlockNames(rows[window.row, span.start : span.stop].astype(np.intp)))
        return names

    def checkpoint_at(self, lease: Lease, num_blocks: int) -> int | None:
        """Return the name of the checkpoint after ``num_blocks`` blocks of ``lease``, or None."""
        last = self.tree.last_checkpoint(lease, num_blocks)
        return last[1] if last is not None and last[0] == num_blocks * self.block_size else None

    def last_checkpoint(self, lease: Lease, num_blocks: int) -> tuple[int, int]:
        """Return (blocks, name) of the last checkpoint within the first ``num_blocks`` blocks of ``lease``, or (0, 0)."""
        last = self.tree.last_checkpoint(lease, num_blocks)
        return (0, 0) if last is None else (last[0] // self.block_size, last[1])

    # -- holding -----------------------------------------------------------------------------------------------------

    def hold(
        self,
        at: Match | Lease,
        num_blocks: int,
        windows: Many[BlockNames],
        checkpoint: int | None = None,
        *,
        has_partial: bool = False,
    ) -> Holding:
        """Keep from eviction the first ``num_blocks`` blocks of texts of ``at``, the cached blocks ``windows`` of each
        window, ``checkpoint``, and the block that begins with the last tokens of the match ``at`` (``has_partial``).
        Raises StaleHandle, keeping nothing, if blocks of the match were evicted."""
        partial: Lease | None = None
        if has_partial:
            partial = self.tree.pin_partial(at) if isinstance(at, Match) else None
            if partial is None:
                raise StaleHandle("blocks of this match were evicted; match again")
        lease = self.tree.pin(at, num_blocks)
        holding = Holding(lease, tuple(windows), checkpoint, partial)
        for window, names in zip(self.windows, windows):
            window.read(names)
        if checkpoint is not None:
            self.tree.checkpoints.hold(checkpoint)
        return holding

    def release(self, holding: Holding) -> None:
        """End ``holding``: what it held is evictable unless others use it."""
        self.release_copied(holding)
        self.leave(holding.windows)
        self.tree.unpin(holding.lease)

    def release_copied(self, holding: Holding) -> None:
        """End the holds of ``holding`` on what is copied, the checkpoint and the partial block; a request has taken over
        the rest."""
        if holding.checkpoint is not None:
            self.tree.checkpoints.release(holding.checkpoint)
        if holding.partial is not None:
            self.tree.unpin(holding.partial)

    def leave(self, windows: Many[BlockNames]) -> None:
        """Remove one reader from the blocks ``windows`` of each window."""
        for window, names in zip(self.windows, windows):
            window.leave(names)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self,
        added: Many[Added],
        texts: AnyIds,
        windows: Many[BlockNames] = (),
        counts: Many[list[int]] = (),
        *,
        takes_over: bool = True,
    ) -> tuple[int, dict[int, Published]]:
        """Make what each of ``added`` names shareable, one after another; its lease then covers it.

        ``texts``: ``[groups of texts, n]``, the names of these blocks in the groups of texts. ``windows``: for each window
        names of the last blocks of each text, intp, ``counts[window][i]`` of text i: as many as its request has and does not
        share yet, also of earlier blocks of the text, which the tree may lack. ``takes_over``: see ``Window.adopt``.

        Returns how many texts are done, and what the tree has of those of which it had something already. It stops before
        a text for which memory lacks. Raises MemoryError if that is the first, changing nothing. Amortised O(blocks)."""
        tree, size, num_texts = self.tree, self.block_size, self.num_texts
        sizes = [len(one.keys) // size for one in added]
        given: Ids = texts.astype(np.int32, copy=False)
        if tree.num_groups > num_texts:
            given = np.empty((tree.num_groups, texts.shape[1]), np.int32)
            given[:num_texts] = texts
            for window, names, each in zip(self.windows, windows, counts):
                cells = given[window.row : window.row + 2]
                if each == sizes:
                    window.write_cells(names, cells)
                else:
                    window.write_last(names, each, sizes, cells)
                if len(names) > window.most_adopted and max(each) > window.most_adopted:
                    window.reserve_scratch(max(each))
        is_even = not counts or [*counts] == [sizes] * len(counts)
        done = first = column = 0
        at = [0] * len(windows)  # in ``windows``: the names of text ``first``
        found: dict[int, Published] = {}
        for one, n in zip(added, sizes):
            blocks = given if n == given.shape[1] else given[:, column : column + n]
            column += n
            if self._numbers is not None:
                blocks[-1] = self._numbers.peek(n)[::-1]  # new blocks are the last of these
            try:
                inserted = tree.insert(
                    one.lease,
                    one.keys,
                    blocks,
                    text=one.text,
                    priority=one.priority,
                    is_late=one.is_late,
                    entry=one.entry,
                )
            except Exception:
                if not done:
                    raise
                break
            if self._numbers is not None:
                self._numbers.advance(inserted.num_added)
            if inserted.num_added < n or not (is_even or all(each[done] <= n for each in counts)):
                self._publish_whole(windows, counts, at, first, done)
                own = [BlockNames(names[begin : begin + each[done]]) for names, each, begin in zip(windows, counts, at)]
                at = [begin + len(names) for begin, names in zip(at, own)]
                there = [window.adopt(one.lease, names, takes_over) for window, names in zip(self.windows, own)]
                found[done] = Published(
                    inserted.ids[:num_texts],
                    blocks[:num_texts][inserted.duplicates[:num_texts]],
                    tuple(there),
                    tuple([BlockNames(names[names != now]) for names, now in zip(own, there)]),
                )
                first = done + 1
            done += 1
        if windows:
            self._publish_whole(windows, counts, at, first, done)
        return done, found

    def _publish_whole(
        self, windows: Many[BlockNames], counts: Many[list[int]], at: list[int], first: int, end: int
    ) -> None:
        """Register the window blocks of texts ``first .. end - 1``, of which the tree took all: those of ``windows`` from
        ``at`` on, which advances."""
        if first < end:
            for number, (window, names, each) in enumerate(zip(self.windows, windows, counts)):
                begin = at[number]
                at[number] = begin + sum(each[first:end])
                window.publish(BlockNames(names[begin : at[number]]))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tails(self, lease: Lease, num_blocks: int, more: int) -> tuple[tuple[BlockNames, ...], tuple[int, ...]] | None:
        """Return for each window the blocks that a text needs to be resumed after ``num_blocks`` blocks of ``lease``,
        and up to ``more`` blocks before these as far as they are cached; and how many of them are needed. None are of
        optional windows. None if a needed block is not cached any more."""
        found: list[BlockNames] = []
        needed: list[int] = []
        for window in self.windows:
            if window.growth.is_optional:
                found.append(_NONE)
                needed.append(0)
                continue
            span = window.span(num_blocks)
            cells = window.cached_between(lease, max(0, span.start - more), num_blocks)
            missing = np.flatnonzero(~window.are_there(cells))
            begin = int(missing[-1]) + 1 if len(missing) else 0
            if cells.shape[1] - begin < len(span):
                return None
            found.append(BlockNames(cells[0, begin:].astype(np.intp)))
            needed.append(len(span))
        return tuple(found), tuple(needed)

    def keep(self, lease: Lease, num_blocks: int, kept: Kept, entry: Entry | None = None) -> int:
        """Add the checkpoint ``kept`` after ``num_blocks`` blocks of ``lease``, which has none there; return its name,
        which is never used again. ``entry``: see ``Clock``."""
        name = self._next_name
        self._next_name += 1
        self.kept[name] = kept
        for window, names in zip(self.windows, kept.tails):
            window.keep(names)
        self.tree.set_checkpoint(lease, num_blocks * self.block_size, name, entry)
        return name

    def use(self, name: int) -> None:
        """Count a use of checkpoint ``name``, if it is still kept."""
        if name in self.kept:
            self.tree.checkpoints.use(name)

    def drop(self, name: int) -> Freed:
        """Drop checkpoint ``name``, if it is still kept and not held."""
        if name not in self.kept or self.tree.checkpoints.is_held(name):
            return Freed()
        self.tree.checkpoints.drop(name)
        return self._forget((name,))

    def blocks_of(self, kept: Kept) -> list[tuple[BlockNames, int]]:
        """Return for each bounded group that is not optional, in the order of the groups, the blocks that a checkpoint with
        ``kept`` keeps, and how many of these, the last, a text needs to be resumed there."""
        tails = zip(self.windows, kept.tails, kept.needed)
        by_window = iter([(names, n) for one, names, n in tails if one in self.required])
        return [
            (kept.states, len(kept.states)) if part is self.states else next(by_window)
            for part in self.parts
            if part is not self.texts and part not in self.optional and not isinstance(part, Private)
        ]

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict_checkpoint(self) -> Freed:
        """Evict the least recently used checkpoint that is not held, if there is one. Its window blocks become cold."""
        return self._forget(self.tree.checkpoints.evict())

    def removed(self, evicted: Evicted) -> Freed:
        """Return what follows in all groups from what the tree ``evicted``."""
        blocks, checkpoints, _ = self._forget(evicted.states) if evicted.states else _NOTHING
        for row, number in enumerate(self.texts.numbers):
            blocks += ((number, BlockNames(evicted.ids[row])),)
        for window in self.windows:
            blocks += ((window.number, window.forget(window.cells_of(evicted.ids))),)
        if self._numbers is None:
            return Freed(blocks, checkpoints)
        self._numbers.give(evicted.ids[-1])
        return Freed(blocks, checkpoints, evicted.ids[-1])

    def _forget(self, names: Many[int]) -> Freed:
        """Remove the checkpoints ``names``, which the tree has removed. Their window blocks lose a keeper."""
        removed = tuple((name, self.kept.pop(name)) for name in names)
        for _, kept in removed:
            for window, tail in zip(self.windows, kept.tails):
                window.drop(tail)
        number = self.states.number
        blocks = () if number is None else tuple((number, kept.states) for _, kept in removed)
        return Freed(blocks, removed)

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Many[BlockNames]]) -> None:
        """Prove the tree, and the counts of readers and keepers of each window block. ``held``: by reader, the names of
        the blocks that it reads in each window. Raises CheckFailed."""
        self.tree.check()
        rows, held = self.tree.all_ids(), [*held]
        for at, window in enumerate(self.windows):
            counts = [
                np.bincount(np.concatenate([_NONE, *users]), minlength=window.num_rows)
                for users in ([names[at] for names in held], [kept.tails[at] for kept in self.kept.values()])
            ]
            window.check(window.cells_of(rows), counts[0], counts[1])


_NOTHING = Freed()
