"""What requests leave behind for others: the prefix tree and the checkpoints, over all groups of one cache.

A text can be resumed after each block before which every group has what it needs: the last window; where states are
copied, a checkpoint with a copy. What one group keeps, shares and evicts is said by its class (``kvpagoda.core.groups``);
this file loops over the groups, and says what a hit is to a user.

Blocks are known by id. They are not visible to others before the ``commit`` of their tokens. Nothing is copied, freed or
stored here: methods return what follows from them, and ``Capacity`` applies it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockNames, BlockPlaces
from kvpagoda.core.cache.options import Retention
from kvpagoda.core.cache.quota import Account, Quota
from kvpagoda.core.groups.base import NO_IDS, Added, CachedPart, CacheGroup, Freed, Holding, ToCache
from kvpagoda.core.groups.full import FullGroup
from kvpagoda.core.groups.state import CopyGroup
from kvpagoda.core.groups.window import WindowGroup
from kvpagoda.core.prefix import EvictionPolicy, Match
from kvpagoda.core.prefix.node import Evicted, Lease
from kvpagoda.core.prefix.order import Entry
from kvpagoda.core.prefix.tree import PrefixTree
from kvpagoda.errors import OutOfBlocks, StaleHandle
from kvpagoda.free_list import IdPool
from kvpagoda.policies.heap import LazyHeap
from kvpagoda.policies.names import copied
from kvpagoda.retention import RetentionRule
from kvpagoda.units import ceil_div

# -- where texts may be resumed --------------------------------------------------------------------------------------

_SLACK = 512
"""Tokens before the end of a prompt for which its checkpoint keeps windows too, where no states are copied: prompts that
extend another one often part from it a little before its end."""
_COARSE = 1024
"""Tokens: models with states keep one more checkpoint for such prompts, at the last multiple of this in a prompt."""


@dataclass(frozen=True)
class ResumePoints:
    """The positions of a text after which requests may start, and the ``rule`` that says which of them are kept; in blocks
    unless tokens are named.

    ``grid``: hits from checkpoints and tiers end at multiples of it. ``grid_tokens``: those of models with a full group
    alone end at multiples of this many tokens. ``slack``: the rule's. ``ends_steps``: whether a step must end where a
    checkpoint is kept, since states must be copied there."""

    rule: RetentionRule
    block_size: int
    grid: int
    grid_tokens: int
    slack: int
    ends_steps: bool

    @classmethod
    def of(
        cls, block_size: int, hit_grid: int, every: int, *, checkpoint_cost: float, has_states: bool
    ) -> ResumePoints:
        """Return the points for caches whose hits end at multiples of ``hit_grid`` tokens, a multiple of
        ``block_size``, or 1. ``every``: a prompt keeps a checkpoint at each multiple of so many blocks."""
        grid = max(1, hit_grid // block_size)
        rule = RetentionRule(
            grid * block_size,
            every * block_size,
            max(1, _COARSE // block_size) * block_size if has_states else 0,
            0 if has_states else _SLACK,
            checkpoint_cost=checkpoint_cost,
        )
        return cls(rule, block_size, grid, hit_grid, rule.slack // block_size, has_states)

    def due(self, begin: int, parted: int, prompt_length: int) -> list[int]:
        """Return after how many blocks a prompt of ``prompt_length`` tokens keeps checkpoints, ascending, if it starts
        after ``begin`` blocks and ``parted`` blocks of it were cached."""
        size = self.block_size
        positions = self.rule.positions(prompt_length, begin * size, min(parted * size, prompt_length - 1))
        return [position // size for position in positions]

    def rounded(self, position: int, *, is_bounded: bool) -> int:
        """Return the last position, in tokens, up to ``position`` after which a request may start. ``is_bounded``: it may
        start after whole blocks alone."""
        unit = self.rule.unit if is_bounded else self.grid_tokens
        return position // unit * unit

    def is_worth_keeping(self, depth: int, resumable: int) -> bool:
        """Return whether a checkpoint after ``depth`` blocks may be resumed, and saves much beside one after
        ``resumable``, whose states a request has only there."""
        coarse = self.rule.coarse // self.block_size
        return self.ends_steps and depth - resumable >= coarse and depth % self.grid == 0


# -- the prefix cache ------------------------------------------------------------------------------------------------

_TEXTS_AT_ONCE = 64  # blocks of texts that take no memory, evicted in one step for what other groups have of them
_EVICT_AHEAD = 1024  # without a full group, 1/1024 of the texts is evicted ahead
MOST_PRIORITY = 100
"""The priority of pins that users make themselves."""


def checkpoint_cost(kept: Many[CacheGroup], texts: Many[CacheGroup]) -> float:
    """Return how many blocks of ``texts``, the groups that keep every token, take as many bytes as a checkpoint, which keeps
    the last window or the states of the groups ``kept``. Without ``texts``, blocks of windows count; 0 if there are none."""
    windows = [group for group in kept if not group.growth.is_state]
    per_block = sum(group.plan.row_nbytes for group in texts or windows)
    nbytes = sum(group.plan.row_nbytes for group in kept if group.growth.is_state)
    for group in windows:
        nbytes += ceil_div(group.growth.span or group.block_size, group.block_size) * group.plan.row_nbytes
    return nbytes / per_block if per_block else 0.0


class PrefixMatch(NamedTuple):
    """How much of its prompt a request need not compute, and what limited that: ``seq.match``."""

    num_tokens: int
    """Leading tokens of the prompt that were in the tree, at most all but one."""
    resumable: int
    """Tokens that need not be computed: every group has what it needs to go on from there. A block boundary, unless the
    model has only a full group: then a multiple of ``hit_grid``."""
    limited_by: str
    """What limited the hit: ``nothing``, ``alignment`` (the rest of a block), ``window`` (further on, blocks of the
    last window were evicted), ``checkpoint`` (further on there is no copy of the states) or ``memory`` (no room for a
    copy, or for what is beyond: some of it was evicted to make room)."""
    groups: Mapping[str, int] = MappingProxyType({})
    """Group -> the most tokens after which the group alone has what it needs to resume."""
    checkpoint: int | None = None
    """The name of the checkpoint on the device whose states the request starts with, if any."""
    loaded: int = 0
    """The part of ``resumable`` that came from tiers below the device."""
    lacking_from: int | None = None
    """The first of the ``resumable`` tokens of which an optional group, one of draft layers alone, lacks the rows that
    the request still reads: who reads them computes them again, from there on. None: none is lacking."""


@dataclass(frozen=True, eq=False)
class Pin:
    """Cached text that is kept until ``unpin``, or until a request could not run otherwise; see ``KVCache.pin``."""

    holding: Holding = field(repr=False)
    namespace: bytes = field(repr=False)
    priority: int = MOST_PRIORITY
    """Pins of low priority are ended first, the oldest of these before others."""
    ended: deque[Pin] | None = field(default=None, repr=False)
    """Where this pin is appended when it ends, if somebody wants to know."""
    number: int = 0

    @property
    def is_held(self) -> bool:
        """False after ``unpin``, or once it was ended to make room for a request."""
        return self.holding.lease.is_open

    @property
    def num_blocks(self) -> int:
        """The number of blocks of its text."""
        return self.holding.lease.num_blocks


class PrefixCache:
    """The prefix ``tree`` of a cache, its checkpoints, and pins. ``kept``: what each checkpoint keeps, by name.

    ``full``, ``states``: the group of full attention, and that of the copies that checkpoints keep; None: there is none.
    ``windows``: the window groups; ``required`` and ``optional`` are these apart. ``bounded``: the groups that limit
    where a text can be resumed. ``policy``: a name or an object. ``num_checkpoints``: the most that are kept.
    ``most_unbacked``: the most blocks of texts in a tree without a full group, where texts take no device memory.
    ``hit_grid``: hits end at multiples of this many tokens, a multiple of ``block_size``, or 1. ``is_followed``: blocks
    of such texts have numbers, in the last row of the tree, by which an event log names them.
    """

    def __init__(
        self,
        groups: Many[CacheGroup],
        block_size: int,
        policy: str | EvictionPolicy,
        retention: Retention,
        num_checkpoints: int,
        most_unbacked: int,
        hit_grid: int,
        is_followed: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.full = next((group for group in groups if isinstance(group, FullGroup)), None)
        self.windows = tuple(group for group in groups if isinstance(group, WindowGroup))
        self.required = tuple(group for group in self.windows if not group.is_optional)
        self.optional = tuple(group for group in self.windows if group.is_optional)
        of_states = [group for group in groups if isinstance(group, CopyGroup)]
        self.states = of_states[-1] if of_states else None
        self.bounded = tuple(group for group in groups if group in self.required or group is self.states)
        self._in_tree: tuple[CacheGroup, ...] = (*(() if self.full is None else (self.full,)), *self.windows)
        self.block_size, self._fresh_policy = block_size, copied(policy)
        cost = checkpoint_cost(self.bounded, () if self.full is None else (self.full,))
        every, has_states = retention.checkpoint_every, bool(of_states)
        self.points = ResumePoints.of(block_size, hit_grid, every, checkpoint_cost=cost, has_states=has_states)
        self.most_checkpoints, self._most_unbacked = num_checkpoints, most_unbacked
        self._capacity = most_unbacked if self.full is None else self.full.plan.num_blocks
        self._names = [group.plan.name for group in groups]
        self._most_pinned = int(retention.pin_share * self._capacity)
        self.num_evicted_checkpoints = 0
        self.is_numbered = is_followed and self.full is None
        most_of = retention.quotas()
        self.quota = None if most_of is None else Quota(most_of, self.groups)
        self._start(policy)

    def clear_all(self) -> None:
        """Forget everything, even what is in use. The caller frees the blocks."""
        self._start(deepcopy(self._fresh_policy))

    def _start(self, policy: str | EvictionPolicy) -> None:
        num_rows = sum(group.num_tree_rows for group in self._in_tree)
        self.tree = PrefixTree(
            self.block_size, num_rows + self.is_numbered, policy, capacity=max(1, self._capacity), proves_ids=False,
            rule=self.points.rule,
        )  # fmt: skip
        self.kept: dict[int, CachedPart] = {}
        if self.quota is not None:
            self.quota.clear()
        self._next_checkpoint = 0
        self._numbers = IdPool(first=1) if self.is_numbered else None
        row = 0
        for group in self._in_tree:
            group.begin_empty(self.tree, row)
            row += group.num_tree_rows
        if self.full is not None:
            self.full.removed = self.removed
        if self.states is not None:
            self.states.begin_with_copies(self.tree, self.kept)
        self._pins: dict[int, Pin] = {}  # by number, oldest first
        self._first_pins = LazyHeap(lambda number: (self._pins[number].priority, number))
        self._num_made = self.num_pinned = 0  #: pins made so far; blocks of those that are held, each for itself

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def num_evicted(self) -> list[int]:
        """Blocks that were evicted so far, by group."""
        return [group.num_evicted for group in self.groups]

    def find(self, tokens: Ids, namespace: bytes) -> tuple[Match, PrefixMatch]:
        """Return the longest match of all but the last of ``tokens``, and how much can be reused. Changes nothing."""
        return self.found(self.tree.match(tokens, namespace, limit=len(tokens) - 1))

    def find_again(self, match: Match) -> tuple[Match, PrefixMatch]:
        """Return what ``find``, which returned ``match``, returns now: blocks may have been evicted or moved since."""
        return self.found(self.tree.match(match.tokens, match.namespace))

    def left_of(self, first: PrefixMatch, match: Match) -> tuple[Match, PrefixMatch]:
        """Return what ``find``, which returned ``first`` and ``match``, returns now. If room that was made since took of it,
        memory is what limits it."""
        match, found = self.find_again(match)
        if found.resumable < first.resumable:
            found = found._replace(num_tokens=first.num_tokens, limited_by="memory", groups=first.groups)
        return match, found

    def found(self, match: Match) -> tuple[Match, PrefixMatch]:
        """Return ``match`` and how much of it can be reused."""
        if not self.bounded:  # a partial block is copied, so that nothing is lost to alignment
            resumable = match.num_tokens // self.points.grid_tokens * self.points.grid_tokens
            limited_by = "nothing" if resumable == match.num_tokens else "alignment"
            return match, PrefixMatch(match.num_tokens, resumable, limited_by, {self._names[0]: match.num_tokens})
        size = self.block_size
        end, most, limited_by = self._resume_point(match)
        if limited_by == "nothing" and match.num_blocks * size < match.num_tokens:
            limited_by = "alignment"
        last = self.tree.last_checkpoint(match, end) if self.states is not None and end else None
        groups = {name: num_blocks * size for name, num_blocks in zip(self._names, most)}
        return match, PrefixMatch(match.num_tokens, end * size, limited_by, groups, None if last is None else last[1])

    def _resume_point(self, match: Match) -> tuple[int, list[int], str]:
        """Return after how many blocks of ``match`` its text can be resumed, a multiple of the grid. Then: the most blocks
        that each group allows. Then the limit: ``nothing``, ``alignment``, ``window`` or ``checkpoint``. O(blocks)."""
        end, states, grid = match.num_blocks, self.states, self.points.grid
        state_end = 0 if match.checkpoint is None else match.checkpoint[0] // self.block_size
        most = [end] * len(self.groups)
        if (states is None or state_end == end) and end % grid == 0:
            for group in self.required:
                if not group.can_resume(match.ids):
                    break
            else:
                return end, most, "nothing"
        allowed = np.ones(end + 1, np.bool_)
        for group in self.required:
            allows = group.boundaries(match.ids)
            allowed &= allows
            most[group.index] = int(np.flatnonzero(allows)[-1])
        anywhere = int(np.flatnonzero(allowed)[-1])
        allowed &= np.arange(end + 1) % grid == 0
        longest = int(np.flatnonzero(allowed)[-1])
        limited_by = "window" if anywhere < end else "alignment"
        if states is None:
            return longest, most, limited_by
        depth = most[states.index] = state_end
        while not allowed[depth]:  # depth 0 is always allowed
            above = self.tree.last_checkpoint(match, depth - 1)
            depth = 0 if above is None else above[0] // self.block_size
        return depth, most, "checkpoint" if depth < longest else limited_by

    def columns(self, match: Match, num_tokens: int) -> list[range]:
        """Return for each group which whole blocks of ``match`` a text shares to go on after its first ``num_tokens``. Of
        an optional group these are the ones before the first that ``match`` lacks."""
        num_blocks = num_tokens // self.block_size
        columns = [group.shared_columns(num_blocks) for group in self.groups]
        for group in self.optional:
            columns[group.index] = group.columns_there(match, num_tokens)
        return columns

    def are_there(self, match: Match, columns: Many[range]) -> bool:
        """Return whether ``match`` has the blocks ``columns[i]`` of each group i."""
        if max((span.stop for span in columns if span), default=0) > match.num_blocks:
            return False
        for group in self.windows:
            span = columns[group.index]
            if not group.are_there(group.cells_of(match.ids)[:, span.start : span.stop]).all():
                return False
        return True

    def read_in(self, match: Match, columns: Many[range]) -> list[BlockNames]:
        """Return for each window group the ids that ``match`` has for the blocks ``columns[i]`` of its group i, intp."""
        ids: list[BlockNames] = []
        for group in self.windows:
            span = columns[group.index]
            ids.append(BlockNames(match.ids[group.row, span.start : span.stop].astype(np.intp)))
        return ids

    def lacking_from(self, columns: Many[range], num_tokens: int) -> int | None:
        """Return the first of ``num_tokens`` tokens whose row an optional group still reads and lacks, if it shares
        ``columns[i]`` of group i; None if there is none."""
        stops = [columns[group.index].stop * self.block_size for group in self.optional]
        return min((stop for stop in stops if stop < num_tokens), default=None)

    def without_copies(self, match: Match, found: PrefixMatch) -> PrefixMatch:
        """Return what can be reused of ``match`` without a copy, if there is no room for copies or their sources."""
        grid = self.points.grid
        whole = 0 if self.bounded else match.num_blocks // grid * grid * self.block_size
        return PrefixMatch(found.num_tokens, whole, "memory", found.groups)

    # -- what is held ------------------------------------------------------------------------------------------------

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
        window group, ``checkpoint``, and the block that begins with the last tokens of the match ``at`` (``has_partial``).
        Raises StaleHandle, keeping nothing, if blocks of the match were evicted."""
        partial: Lease | None = None
        if has_partial:
            partial = self.tree.pin_partial(at) if isinstance(at, Match) else None
            if partial is None:
                raise StaleHandle("blocks of this match were evicted; match again")
        holding = Holding(self.tree.pin(at, num_blocks), tuple(windows), checkpoint, partial)
        for group, ids in zip(self.windows, windows):
            group.read(ids)
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
        """Remove one reader from the blocks ``windows`` of each window group."""
        for group, ids in zip(self.windows, windows):
            group.leave(ids)

    # -- publishing --------------------------------------------------------------------------------------------------

    def cache_blocks(
        self, slots: list[int], begins: list[int], added: Many[Added], is_whole: bool, *, takes_over: bool = True
    ) -> tuple[int, list[tuple[CacheGroup, BlockPlaces]]]:
        """Make what the requests in ``slots`` have ``added`` shareable, behind their first ``begins`` blocks, one after
        another; their leases then cover it. ``is_whole``: whether optional groups have the rows of all tokens; if not, their
        blocks stay the requests' own. ``takes_over``: see ``WindowGroup.adopt``.

        Returns how many requests are done, and, by group, blocks of these that duplicate cached ones: the caller frees them.
        It stops before a request for which memory lacks. Raises MemoryError if that is the first, changing nothing."""
        tree, size = self.tree, self.block_size
        sizes = [len(one.keys) // size for one in added]
        ends = [begin + n for begin, n in zip(begins, sizes)]
        rows: Ids = np.empty((tree.num_groups, sum(sizes)), np.int32)
        given = [group.rows_to_cache(slots, begins, ends, rows, is_whole=is_whole) for group in self._in_tree]
        is_even = all(each.counts == sizes for each in given)
        column, first, at, done = 0, 0, [0] * len(given), 0  # ``at``: where the ids of text ``first`` begin
        # (slot, group, ids that the tree has, those given that duplicate them)
        adopted: list[tuple[int, CacheGroup, BlockNames, BlockNames]] = []
        for one, n in zip(added, sizes):
            blocks = rows if n == rows.shape[1] else rows[:, column : column + n]
            column += n
            if self._numbers is not None:
                blocks[-1] = self._numbers.peek(n)[::-1]  # new blocks are the last of these
            try:
                inserted = tree.insert(
                    one.lease, one.keys, blocks, text=one.text, priority=one.priority, is_late=one.is_late,
                    entry=one.entry,
                )  # fmt: skip
            except Exception:
                if not done:
                    raise
                break
            if self._numbers is not None:
                self._numbers.advance(inserted.num_added)
            # The tree had some of its blocks already, or lacks more than it was given: one by one, and in turn.
            if inserted.num_added < n or not (is_even or all(each.counts[done] <= n for each in given)):
                self._cache_whole(given, at, first, done)
                for number, (group, each) in enumerate(zip(self._in_tree, given)):
                    own = BlockNames(each.ids[at[number] : at[number] + each.counts[done]])
                    at[number] += len(own)
                    theirs, doubles = group.adopt(one.lease, own, inserted, takes_over=takes_over)
                    if is_whole or not group.is_optional:
                        adopted.append((slots[done], group, theirs, doubles))
                first = done + 1
            done += 1
        for begin, group, each in zip(at, self._in_tree, given):
            if is_whole or not group.is_optional:
                ids = each.ids
                if first or done < len(added):
                    ids = BlockNames(ids[begin : begin + sum(each.counts[first:done])])
                group.cache_blocks(slots[:done], ends, ids)
        for slot, group, theirs, _ in adopted:
            group.put_shared(slot, group.places_of(theirs))
        if self.quota is not None:
            for number, (one, end) in enumerate(zip(added[:done], ends)):
                most = max([sizes[number], *(each.counts[number] for each in given if each.counts)])
                new = tree.ids_between(one.lease, end - most, end)
                for group in self._in_tree:
                    self.quota.add(group, group.cached_in(new), tree.namespace_of(one.lease))
        return done, [(group, group.places_of(doubles)) for _, group, _, doubles in adopted]

    def _cache_whole(self, given: Many[ToCache], at: list[int], first: int, end: int) -> None:
        """Count as cached what texts ``first .. end - 1`` have ``given``, of which the tree took all: from ``at`` on, which
        advances, by group."""
        if first < end:
            for number, (group, each) in enumerate(zip(self._in_tree, given)):
                begin = at[number]
                at[number] = begin + sum(each.counts[first:end])
                group.cache_blocks([], [], BlockNames(each.ids[begin : at[number]]))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint_at(self, lease: Lease, num_blocks: int) -> int | None:
        """Return the name of the checkpoint after ``num_blocks`` blocks of ``lease``, or None."""
        before, name = self.last_checkpoint(lease, num_blocks)
        return name if before == num_blocks and before else None

    def last_checkpoint(self, lease: Lease, num_blocks: int) -> tuple[int, int]:
        """Return (blocks, name) of the last checkpoint within the first ``num_blocks`` blocks of ``lease``, or (0, 0)."""
        node = lease.node if num_blocks == lease.num_blocks else lease.node.up_to(num_blocks)
        last = self.tree.checkpoints.last(node, num_blocks)
        return (0, 0) if last is None else (last.depth, last.state_id)

    def tails(self, lease: Lease, num_blocks: int, more: int) -> tuple[tuple[BlockNames, ...], tuple[int, ...]] | None:
        """Return for each window group the blocks that a text needs to be resumed after ``num_blocks`` blocks of ``lease``,
        and up to ``more`` blocks before these as far as they are cached; and how many of them are needed. None are of
        optional groups. None if a needed block is not cached any more."""
        found: list[BlockNames] = []
        needed: list[int] = []
        for group in self.windows:
            tail = (NO_IDS, 0) if group.is_optional else group.tail(lease, num_blocks, more)
            if tail is None:
                return None
            found.append(tail[0])
            needed.append(tail[1])
        return tuple(found), tuple(needed)

    def keep(self, lease: Lease, num_blocks: int, kept: CachedPart, entry: Entry | None = None) -> int:
        """Add the checkpoint ``kept`` after ``num_blocks`` blocks of ``lease``, which has none there; return its name,
        which is never used again. ``entry``: see ``Clock``."""
        name = self._next_checkpoint
        self._next_checkpoint += 1
        self.kept[name] = kept
        for group, ids in zip(self.windows, kept.tails):
            group.keep(ids)
        node = lease.node if num_blocks == lease.num_blocks else lease.node.up_to(num_blocks)
        self.tree.checkpoints.put(node, num_blocks, name, entry)
        if self.quota is not None and self.states is not None:
            self.quota.add(self.states, kept.states, self.tree.namespace_of(lease))
        return name

    def drop(self, name: int) -> Freed:
        """Drop checkpoint ``name``, if it is still kept and not held."""
        checkpoint = self.tree.checkpoints.by_state.get(name)
        if checkpoint is None or checkpoint.num_holds:
            return Freed()
        self.tree.checkpoints.drop(name)
        return self._forget((name,))

    def blocks_of(self, kept: CachedPart) -> list[tuple[BlockNames, int]]:
        """Return for each of the ``bounded`` groups, in their order, the blocks that a checkpoint with ``kept`` keeps, and how
        many of these, the last, a text needs to be resumed there."""
        tails = {group.index: (ids, n) for group, ids, n in zip(self.windows, kept.tails, kept.needed)}
        return [tails.get(group.index, (kept.states, len(kept.states))) for group in self.bounded]

    # -- pins --------------------------------------------------------------------------------------------------------

    @property
    def most_pinned(self) -> int:
        """The most blocks that pins may have together."""
        return self._most_pinned

    def pin(self, match: Match, priority: int = MOST_PRIORITY, ended: deque[Pin] | None = None) -> Pin:
        """Pin the blocks of ``match`` and what is needed to resume after them. Raises OutOfBlocks, changing nothing."""
        if self.num_pinned + match.num_blocks > self._most_pinned:
            most, hint = self._most_pinned, "unpin others, or raise pin_share"
            text = (
                f"a pin of {match.num_blocks} blocks beside {self.num_pinned} pinned ones passes the {most} that pins "
                "may have"
            )
            raise OutOfBlocks.with_hint(text, hint, needed=match.num_blocks, available=most - self.num_pinned)
        _, found = self.found(match)
        spans = self.columns(match, found.resumable)
        windows = self.read_in(match, spans)
        holding = self.hold(match, match.num_blocks, windows, found.checkpoint)
        self._num_made += 1
        pin = self._pins[self._num_made] = Pin(holding, match.namespace, priority, ended, self._num_made)
        self.num_pinned += match.num_blocks
        self._first_pins.add(pin.number)
        return pin

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held."""
        if self._pins.get(pin.number) is pin:
            del self._pins[pin.number]
            self._first_pins.discard(pin.number)
            self.num_pinned -= pin.num_blocks
            self.release(pin.holding)
            if pin.ended is not None:
                pin.ended.append(pin)

    def next_pin(self) -> Pin | None:
        """Return the pin that is ended first to make room for a request, or None. Amortised O(log pins)."""
        first = self._first_pins.first()
        return None if first is None else self._pins[first[2]]

    def pins_of(self, namespaces: Collection[bytes] | None = None) -> list[Pin]:
        """Return all pins, or those of ``namespaces``, oldest first."""
        return [pin for pin in self._pins.values() if namespaces is None or pin.namespace in namespaces]

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict_end(self, match: Match) -> Freed:
        """Evict the blocks at the end of ``match`` that no other text, request or pin uses, whatever their age."""
        return self._counted(self.removed(self.tree.evict_end(match)))

    def evict_texts(self, n: int) -> Freed:
        """Evict ``n`` blocks of texts in the policy's order, none ahead, and what other groups have of these. O(n)."""
        return self._counted(self.removed(self.tree.evict(n)))

    def _counted(self, freed: Freed) -> Freed:
        """Count the blocks that are ``freed`` as evicted, in all groups, and return it."""
        for number, ids in freed.blocks:
            self.groups[number].num_evicted += len(ids)
        return freed

    def evict_checkpoint(self) -> Freed:
        """Evict the least recently used checkpoint that is not held, if there is one. Its window blocks become cold."""
        freed = self._forget(self.tree.checkpoints.evict())
        self.num_evicted_checkpoints += len(freed.checkpoints)
        return freed

    def evict_of(self, account: Account) -> Freed:
        """Evict some of what nothing uses in ``account``, no more than its excess if blocks of texts take memory: cold blocks,
        else ends of texts, else a checkpoint. O(blocks of windows + texts of the account)."""
        assert self.quota is not None
        for group in self.windows:
            if group.num_cold and len(cold := group.cold_among(self.quota.ids(group, account))):
                return self._counted(
                    group.evict_cold(BlockNames(cold[: max(1, int(account.excess // group.plan.row_nbytes))]))
                )
        per_block = sum(group.plan.row_nbytes for group in self._in_tree)
        most = _TEXTS_AT_ONCE if self.full is None else max(1, int(account.excess // per_block))
        evicted = self.tree.evict_in(account.keys, most)
        if evicted.ids.shape[1]:
            return self._counted(self.removed(evicted))
        for name in self.tree.checkpoints_in(account.keys)[:1]:
            self.num_evicted_checkpoints += 1
            return self.drop(name)
        return Freed()

    @property
    def unused(self) -> tuple[int, ...]:
        """Numbers that change when something that is cached becomes unused, or is evicted without freeing memory."""
        turns = [group.turns for group in self.windows]
        return self.tree.leases.num_closed, self.tree.num_cached, len(self.kept), self._next_checkpoint, *turns

    def evict_unbacked(self) -> Freed:
        """Without a full group: evict the blocks of texts beyond the number that the tree may remember."""
        surplus = self.tree.num_cached - self._most_unbacked
        if self.full is not None or surplus <= 0:
            return Freed()
        return self.removed(self.tree.evict(surplus + self._capacity // _EVICT_AHEAD))

    def removed(self, evicted: Evicted) -> Freed:
        """Return what follows in all groups from what the tree ``evicted``."""
        blocks, checkpoints, _ = self._forget(evicted.states) if evicted.states else _NOTHING
        if self.full is not None:
            blocks += ((self.full.index, BlockNames(evicted.ids[self.full.row])),)
        for group in self.windows:
            blocks += ((group.index, group.removed(evicted.ids)),)
        if self._numbers is None:
            return Freed(blocks, checkpoints)
        self._numbers.give(evicted.ids[-1])
        return Freed(blocks, checkpoints, evicted.ids[-1])

    def _forget(self, names: Many[int]) -> Freed:
        """Remove the checkpoints ``names``, which the tree has removed. Their window blocks lose a keeper."""
        removed = tuple((name, self.kept.pop(name)) for name in names)
        for _, kept in removed:
            for group, tail in zip(self.windows, kept.tails):
                group.drop(tail)
        number = None if self.states is None else self.states.index
        blocks = () if number is None else tuple((number, kept.states) for _, kept in removed)
        return Freed(blocks, removed)

    def clear(self, namespace: bytes | None = None) -> Freed:
        """Forget everything, or everything of one namespace. Raises RetryLater, changing nothing, while a request runs
        there or something is pinned."""
        return self.removed(self.tree.clear(namespace))

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Many[BlockNames]]) -> None:
        """Prove the tree, and the counts of readers and keepers of each window block. ``held``: by reader, the ids of
        the blocks that it reads in each window group. Raises CheckFailed."""
        self.tree.check()
        if self.quota is not None:
            self._check_quota(self.quota)
        rows, held = self.tree.all_ids(), [*held]
        for at, group in enumerate(self.windows):
            counts = [
                np.bincount(np.concatenate([NO_IDS, *users]), minlength=group.plan.num_rows)
                for users in ([ids[at] for ids in held], [kept.tails[at] for kept in self.kept.values()])
            ]
            group.check_cached(rows, counts[0], counts[1])

    def _check_quota(self, quota: Quota) -> None:
        """Prove the accounts of ``quota``, from the blocks and checkpoints of each namespace. Raises CheckFailed."""
        found: dict[int, dict[bytes, BlockNames]] = {group.index: {} for group in self.groups}
        for name in self.tree.namespaces():
            rows, states = self.tree.all_in(name)
            for group in self._in_tree:
                found[group.index][name] = group.cached_in(rows)
            if self.states is not None:
                found[self.states.index][name] = BlockNames(
                    np.concatenate([NO_IDS, *(self.kept[at].states for at in states)])
                )
        quota.check(found)


_NOTHING = Freed()
