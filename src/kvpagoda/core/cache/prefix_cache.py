"""What requests leave behind for others: the prefix index of ``kvpagoda.core.prefix.hybrid``, for the groups of one cache.

    blocks of the full group        in the tree           cached as long as their tokens
    blocks of windows and chunks    in the tree           evicted first, once they slid out of every window; but those
                                                          that a checkpoint needs are kept as long as the checkpoint
    states                          in a checkpoint       a copy, at some block boundaries

The index knows blocks by name. This file translates the places in block tables to names, and back, and says what a hit
is to a user. Blocks are not visible to others before the ``commit`` of their tokens. Nothing is copied, freed or stored
here: methods return what follows from them, and ``Capacity`` applies it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvpagoda.core.blocks.free_list import AnyIds, BlockNames, BlockPlaces, Ids
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.cache.options import Retention
from kvpagoda.core.cache.residency import Residency
from kvpagoda.core.prefix import EvictionPolicy, Match
from kvpagoda.core.prefix.hybrid import Added, Freed, Holding, HybridIndex, IndexGroup, Published, Window
from kvpagoda.errors import OutOfBlocks
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

EVICT_AHEAD = 1024  # eviction frees 1/1024 of a group more than is needed, so that most steps find free blocks
_NONE = BlockNames(np.empty(0, np.intp))
_SHARE = 32  # at most 1/32 of a window group
MOST_PRIORITY = 100
"""The priority of pins that users make themselves."""


def num_evicted_ahead(group: BlockGroup) -> int:
    """Return how many blocks of ``group`` are evicted beyond those that are asked for. For a window group these are as
    many as a request holds in a step, up to 1/32 of the group: they are cold, and seldom found."""
    return max(group.plan.num_blocks // EVICT_AHEAD, min(group.plan.most_blocks or 0, group.plan.num_blocks // _SHARE))


def checkpoint_cost(kept: Many[BlockGroup], texts: Many[BlockGroup]) -> float:
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
    """The prefix ``index`` of a cache, and pins. ``cached``: the cached blocks of each group, by its index. ``windows``:
    the window groups, each with its part of the index.

    ``policy``: a name or an object. ``num_checkpoints``: the most that are kept. ``most_unbacked``: the most blocks of
    texts in a tree without a full group, where texts take no device memory. ``hit_grid``: hits end at multiples of
    this many tokens, a multiple of ``block_size``, or 1. ``is_followed``: blocks of such texts have numbers, in the last
    row of the tree, by which an event log names them.
    """

    def __init__(
        self,
        groups: Many[BlockGroup],
        block_size: int,
        policy: str | EvictionPolicy,
        retention: Retention,
        num_checkpoints: int,
        most_unbacked: int,
        hit_grid: int,
        is_followed: bool = False,
    ) -> None:
        self.full = next((group for group in groups if not group.growth.is_bounded), None)
        of_states = [group for group in groups if group.growth.is_state]
        self.states = of_states[-1] if of_states else None  #: the group of the copies that checkpoints keep
        self._private = of_states[:-1]
        self.bounded = tuple(
            group
            for group in groups
            if group.growth.is_bounded and not group.growth.is_optional and group not in self._private
        )  #: groups that limit where a text can be resumed
        cost = checkpoint_cost(self.bounded, [group for group in groups if not group.growth.is_bounded])
        every, has_states = retention.checkpoint_every, bool(of_states)
        self.points = ResumePoints.of(block_size, hit_grid, every, checkpoint_cost=cost, has_states=has_states)
        self.block_size, self._fresh_policy, self._groups = block_size, copied(policy), tuple(groups)
        self.most_checkpoints, self._most_unbacked = num_checkpoints, most_unbacked
        self._capacity = most_unbacked if self.full is None else self.full.plan.num_blocks
        self._names = [group.plan.name for group in groups]
        self._most_pinned = int(retention.pin_share * self._capacity)
        self.num_evicted, self.num_evicted_checkpoints = [0] * len(groups), 0  #: blocks by group
        self._is_numbered = is_followed and self.full is None
        self.residency: Residency | None = None  #: follows a sample of the blocks, where metrics ask for it
        self._start(policy)

    def clear_all(self) -> None:
        """Forget everything, even what is in use. The caller frees the blocks."""
        self._start(deepcopy(self._fresh_policy))

    def _start(self, policy: str | EvictionPolicy) -> None:
        groups = [
            IndexGroup(
                group.growth,
                group.plan.num_rows,
                num_evicted_ahead(group),
                group is self.states,
                group in self._private,
            )
            for group in self._groups
        ]
        capacity = max(1, self._capacity)
        self.index = HybridIndex(
            groups,
            self.block_size,
            policy,
            capacity=capacity,
            is_numbered=self._is_numbered,
            rule=self.points.rule,
        )
        self.tree, self.kept, self.cached = self.index.tree, self.index.kept, self.index.parts
        self.windows: tuple[tuple[BlockGroup, Window], ...] = tuple(
            (self._groups[window.number], window) for window in self.index.windows
        )
        self._pins: dict[int, Pin] = {}  # by number, oldest first
        self._first_pins = LazyHeap(lambda number: (self._pins[number].priority, number))
        self._num_made = self.num_pinned = 0  #: pins made so far; blocks of those that are held, each for itself

    # -- queries -----------------------------------------------------------------------------------------------------

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
        end, most, limited_by = self.index.resume_point(match, self.points.grid)
        if limited_by == "nothing" and match.num_blocks * size < match.num_tokens:
            limited_by = "alignment"
        last = self.tree.last_checkpoint(match, end) if self.states is not None and end else None
        groups = {name: num_blocks * size for name, num_blocks in zip(self._names, most)}
        return match, PrefixMatch(match.num_tokens, end * size, limited_by, groups, None if last is None else last[1])

    def lacking_from(self, columns: Many[range], num_tokens: int) -> int | None:
        """Return the first of ``num_tokens`` tokens whose row an optional group still reads and lacks, if it shares
        ``columns[i]`` of group i; None if there is none."""
        stops = [columns[window.number].stop * self.block_size for window in self.index.optional]
        return min((stop for stop in stops if stop < num_tokens), default=None)

    def without_copies(self, match: Match, found: PrefixMatch) -> PrefixMatch:
        """Return what can be reused of ``match`` without a copy, if there is no room for copies or their sources."""
        grid = self.points.grid
        whole = 0 if self.bounded else match.num_blocks // grid * grid * self.block_size
        return PrefixMatch(found.num_tokens, whole, "memory", found.groups)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self, slots: list[int], begins: list[int], added: Many[Added], has_optional: bool
    ) -> tuple[int, list[tuple[BlockGroup, BlockPlaces]]]:
        """Make what the requests in ``slots`` have ``added`` shareable, behind their first ``begins`` blocks, one after
        another; their leases then cover it.
        ``has_optional``: whether blocks of optional groups are whole; if not, they stay the requests' own.

        Returns how many requests are done, and, by group, blocks of these that duplicate cached ones: the caller frees them.
        It stops before a request for which memory lacks. Raises MemoryError if that is the first, changing nothing."""
        full, size = self.full, self.block_size
        ends = [begin + len(one.keys) // size for begin, one in zip(begins, added)]
        if full is None:
            texts: AnyIds = np.empty((0, sum(ends) - sum(begins)), np.int32)
        else:
            texts = full.names_in(slots, begins, ends)[0][None]
        kept_back = () if has_optional else self.index.optional
        own: list[BlockNames] = []
        counts: list[list[int]] = []
        for group, window in self.windows:
            names, each = group.names_in(slots, ends if window in kept_back else None, ends)
            own.append(BlockNames(names.astype(np.intp, copy=False)))
            counts.append(each)
        num_done, found = self.index.publish(added, texts, own, counts)
        slots, duplicates = slots[:num_done], []
        if full is not None:
            full.share(slots, ends)
        for group, window in self.windows:
            if window not in kept_back:
                group.share(slots, ends)
        for number, published in found.items():
            if full is not None:
                duplicates.append((full, full.places_of(BlockNames(published.doubles))))
                full.adopt(slots[number], full.places_of(BlockNames(published.texts[0])))
            for (group, window), names, doubles in zip(self.windows, published.windows, published.window_doubles):
                if window not in kept_back:
                    duplicates.append((group, group.places_of(doubles)))
                    group.adopt(slots[number], group.places_of(names))
        if self.residency is not None and num_done == len(added):
            self._note_published(full, texts, own, found)
        return num_done, duplicates

    def _note_published(
        self, full: BlockGroup | None, texts: AnyIds, own: Many[BlockNames], found: Mapping[int, Published]
    ) -> None:
        """Tell ``residency`` which of the blocks ``texts`` and ``own`` the tree took."""
        assert self.residency is not None
        if full is not None:
            doubles = np.concatenate([_NONE, *(one.doubles for one in found.values())])
            self.residency.published(full.index, texts[0][~np.isin(texts[0], doubles)])
        for at, (group, _) in enumerate(self.windows):
            doubles = np.concatenate([_NONE, *(one.window_doubles[at] for one in found.values())])
            self.residency.published(group.index, own[at][~np.isin(own[at], doubles)])

    @property
    def is_full(self) -> bool:
        """Whether ``num_checkpoints`` checkpoints are kept, so that one must be evicted for the next."""
        return len(self.kept) >= self.most_checkpoints

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
        spans = self.index.columns(match, found.resumable)
        windows = self.index.names_in(match.ids, spans)
        holding = self.index.hold(match, match.num_blocks, windows, found.checkpoint)
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
            self.index.release(pin.holding)
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
        freed = self.index.removed(self.tree.evict_end(match))
        for number, names in freed.blocks:
            self.num_evicted[number] += len(names)
        return freed

    def evict(self, group: BlockGroup, n: int) -> Freed:
        """Evict ``n`` blocks of ``group`` and some ahead, or all that are evictable. Full group: in the policy's order.
        Window group: cold blocks; without any, one checkpoint, whose blocks become cold. States: one checkpoint."""
        freed = self.cached[group.index].evict(n)
        if freed is None:
            return self.evict_checkpoint()
        for number, names in freed.blocks:
            if number == group.index:
                self.num_evicted[number] += len(names)
            if self.residency is not None:
                self.residency.evicted(number, names)
        return freed

    def evict_texts(self, n: int) -> Freed:
        """Evict ``n`` blocks of texts in the policy's order, none ahead, and what other groups have of these. O(n)."""
        freed = self.index.removed(self.tree.evict(n))
        for number, names in freed.blocks:
            self.num_evicted[number] += len(names)
            if self.residency is not None:
                self.residency.evicted(number, names)
        return freed

    def evict_checkpoint(self) -> Freed:
        """Evict the least recently used checkpoint that is not held, if there is one."""
        freed = self.index.evict_checkpoint()
        self.num_evicted_checkpoints += len(freed.checkpoints)
        return freed

    def evict_unbacked(self) -> Freed:
        """Without a full group: evict the blocks of texts beyond the number that the tree may remember."""
        surplus = self.tree.num_cached - self._most_unbacked
        if self.full is not None or surplus <= 0:
            return Freed()
        return self.index.removed(self.tree.evict(surplus + self._capacity // EVICT_AHEAD))

    def clear(self, namespace: bytes | None = None) -> Freed:
        """Forget everything, or everything of one namespace. Raises RetryLater, changing nothing, while a request runs
        there or something is pinned."""
        return self.index.removed(self.tree.clear(namespace))
