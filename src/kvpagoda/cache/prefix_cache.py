"""What requests leave behind for others: blocks by reference in a prefix tree, states by copy in checkpoints.

    blocks of the full group        in the tree           cached as long as their tokens
    blocks of windows and chunks    in the tree           evicted first, once they slid out of every window; but those
                                                          that a checkpoint needs are kept as long as the checkpoint
    states                          in a checkpoint       a copy, at some block boundaries

So a text can be resumed after each block before which the last window of every group is cached. If the model has
states, there must be a copy of them too. Blocks are not visible to others before the ``commit`` of their tokens.
Nothing is copied, freed or stored here: methods return what follows from them, and ``Capacity`` applies it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.cached_blocks import EVICT_AHEAD, CachedBlocks, Evicted, Kept
from kvpagoda.cache.cached_texts import CachedTexts
from kvpagoda.cache.checkpoints import KeptCheckpoints
from kvpagoda.cache.options import Retention
from kvpagoda.cache.prefix_match import PrefixMatch, resume_point
from kvpagoda.cache.windows import Windows
from kvpagoda.errors import OutOfBlocks
from kvpagoda.prefix import EvictionPolicy, Lease, Match, PrefixTree
from kvpagoda.prefix.id_pool import IdPool
from kvpagoda.prefix.window_blocks import Handles


class Holding(NamedTuple):
    """What is kept from eviction, for a request that starts or for a pin, until it is released."""

    lease: Lease
    handles: tuple[Handles, ...]
    """By window group: the handles of the blocks that are read, intp ``[n]``."""
    checkpoint: int | None = None


@dataclass(frozen=True, eq=False)
class Pin:
    """Cached text that is kept until ``unpin``, or until a request could not run otherwise; see ``KVCache.pin``."""

    holding: Holding = field(repr=False)
    namespace: bytes = field(repr=False)

    @property
    def is_held(self) -> bool:
        """False after ``unpin``, or once it was ended to make room for a request."""
        return self.holding.lease.is_open


class PrefixCache:
    """The prefix tree, the ``windows`` whose blocks it names, the checkpoints that are ``kept``, and pins. ``cached``: the
    cached blocks of each group, by its index.

    ``policy``: a name or an object. ``num_checkpoints``: the most that are kept. ``most_unbacked``: the most blocks of
    texts in a tree without a full group, where texts take no device memory. ``is_followed``: blocks of such texts have
    numbers, in the last row of the tree, by which an event log names them.
    """

    def __init__(
        self,
        groups: Many[BlockGroup],
        block_size: int,
        policy: str | EvictionPolicy,
        retention: Retention,
        num_checkpoints: int,
        most_unbacked: int,
        hit_grid: int = 1,
        is_followed: bool = False,
    ) -> None:
        self.grid, self._hit_grid = max(1, hit_grid // block_size), hit_grid  #: in blocks, in tokens
        self.full = next((group for group in groups if not group.growth.is_bounded), None)
        self.states = next((group for group in groups if group.growth.is_state), None)
        self.bounded = tuple(group for group in groups if group.growth.is_bounded)
        self.block_size, self._fresh_policy, self._groups = block_size, deepcopy(policy), tuple(groups)
        self.most_checkpoints, self._most_unbacked = num_checkpoints, most_unbacked
        self._capacity = most_unbacked if self.full is None else self.full.plan.num_blocks
        self._full_name = "" if self.full is None else self.full.plan.name
        self._most_pinned = int(retention.pin_share * self._capacity)
        self.num_evicted, self.num_evicted_checkpoints = [0] * len(groups), 0  #: blocks by group
        self._numbers = IdPool(first=1) if is_followed and self.full is None else None
        self._start(policy)

    def clear_all(self) -> None:
        """Forget everything, even what is in use. The caller frees the blocks."""
        self._start(deepcopy(self._fresh_policy))

    def _start(self, policy: str | EvictionPolicy) -> None:
        full_rows, capacity = 0 if self.full is None else 1, max(1, self._capacity)
        bounded = [group for group in self.bounded if group is not self.states]
        rows = full_rows + 2 * len(bounded) + (self._numbers is not None)
        self.tree = PrefixTree(self.block_size, rows, policy, capacity=capacity, proves_ids=False)
        self.windows = Windows.of(self.tree, bounded, full_rows)
        self._pins: dict[Pin, None] = {}  # oldest first
        self.kept = KeptCheckpoints(self.tree, self.bounded, self.windows)
        self._texts = CachedTexts(self.tree, self.windows, self.kept, self.full, self._numbers)
        window_of = {window.group: window for window in self.windows}
        self.cached: tuple[CachedBlocks, ...] = tuple(
            self._texts if group is self.full else window_of.get(group, self.kept) for group in self._groups
        )

    # -- queries -----------------------------------------------------------------------------------------------------

    def find(self, tokens: Ids, namespace: bytes) -> tuple[Match, PrefixMatch]:
        """Return the longest match of all but the last of ``tokens``, and how much can be reused. Changes nothing."""
        return self.found(self.tree.match(tokens, namespace, limit=len(tokens) - 1))

    def find_again(self, match: Match) -> tuple[Match, PrefixMatch]:
        """Return what ``find``, which returned ``match``, returns now: blocks may have been evicted or moved since."""
        return self.found(self.tree.match(match.tokens, match.namespace))

    def found(self, match: Match) -> tuple[Match, PrefixMatch]:
        """Return ``match`` and how much of it can be reused."""
        by_group = {} if self.full is None else {self._full_name: match.num_tokens}
        if not self.bounded:  # a partial block is copied, so that nothing is lost to alignment
            resumable = match.num_tokens // self._hit_grid * self._hit_grid
            limited_by = "nothing" if resumable == match.num_tokens else "alignment"
            return match, PrefixMatch(match.num_tokens, resumable, limited_by, by_group)
        size, whole = self.block_size, match.num_blocks * self.block_size
        end, most, limited_by = resume_point(self.tree, match, self.windows, self.states is not None, self.grid)
        if limited_by == "nothing" and whole < match.num_tokens:
            limited_by = "alignment"
        if self.full is not None:
            by_group = {self._full_name: whole}
        groups = by_group | {name: num_blocks * size for name, num_blocks in most.items()}
        last = self.tree.last_checkpoint(match, end) if self.states is not None and end else None
        return match, PrefixMatch(match.num_tokens, end * size, limited_by, groups, None if last is None else last[1])

    def has_all(self, match: Match, columns: Many[range]) -> bool:
        """Return whether ``match`` has the blocks ``columns[i]`` of each group i."""
        if max((span.stop for span in columns if span), default=0) > match.num_blocks:
            return False
        return self.windows.are_there(match.ids, [columns[window.group.index] for window in self.windows])

    def without_copies(self, match: Match, found: PrefixMatch) -> PrefixMatch:
        """Return what can be reused of ``match`` without a copy, if there is no room for copies or their sources."""
        whole = 0 if self.bounded else match.num_blocks * self.block_size
        return PrefixMatch(found.num_tokens, whole, "memory", found.groups)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self, slot: int, lease: Lease, keys: Ids, text: Ids | None, priority: int, *, is_late: bool = False
    ) -> list[tuple[BlockGroup, Ids]]:
        """Make the whole blocks of ``keys``, which follow what ``lease`` covers, shareable; ``lease`` then covers them.
        New blocks count as used now (``is_late``: with those before them), others as used when the request was opened.

        Returns, by group, blocks of the request that duplicate cached ones, int32: the caller frees them. Raises
        MemoryError, changing nothing."""
        full, tree, windows, begin = self.full, self.tree, self.windows, lease.num_blocks
        n = len(keys) // self.block_size
        if full is not None and not windows:
            given = full.table.cells[slot : slot + 1, begin : begin + n]
        else:
            given = np.empty((tree.num_groups, n), np.int32)
            publishing = windows.publishing(slot, begin, given)
            if full is not None:
                given[0] = full.table.cells[slot, begin : begin + n]
        if self._numbers is not None:
            given[-1] = self._numbers.peek(n)[::-1]  # new blocks are the last of these
        inserted = tree.insert(lease, keys, given, text=text, priority=priority, is_late=is_late)
        if self._numbers is not None:
            self._numbers.advance(inserted.num_added)
        if self.bounded:  # counts a use of the last checkpoint of this text
            tree.checkpoints.touch(lease.node, lease.num_blocks)
        duplicates: list[tuple[BlockGroup, Ids]] = []
        if full is not None and inserted.num_added == n:
            full.share(slot, begin + n)
        elif full is not None:
            duplicates.append((full, given[0, inserted.duplicates[0]]))
            full.share(slot, begin + n, inserted.ids[0])
        if windows:
            duplicates += windows.publish(tree, slot, lease, publishing, begin, is_new=inserted.num_added == n)
        return duplicates

    def checkpoint_at(self, lease: Lease, num_blocks: int) -> int | None:
        """Return the name of the checkpoint after ``num_blocks`` blocks of ``lease``, or None."""
        last = self.tree.last_checkpoint(lease, num_blocks)
        return last[1] if last is not None and last[0] == num_blocks * self.block_size else None

    @property
    def is_full(self) -> bool:
        """Whether ``num_checkpoints`` checkpoints are kept, so that one must be evicted for the next."""
        return len(self.kept) >= self.most_checkpoints

    def save(self, lease: Lease, num_blocks: int, kept: Kept) -> int:
        """Add the checkpoint ``kept`` after ``num_blocks`` blocks of ``lease``, which has none there; return its
        name."""
        name = self.kept.keep(kept)
        self.tree.set_checkpoint(lease, num_blocks * self.block_size, name)
        return name

    def use(self, name: int) -> None:
        """Count a use of checkpoint ``name``, if it is still kept."""
        if name in self.kept:
            self.tree.checkpoints.use(name)

    # -- holding and pins --------------------------------------------------------------------------------------------

    def hold(
        self, at: Match | Lease, num_blocks: int, handles: Many[Handles], checkpoint: int | None = None
    ) -> Holding:
        """Keep from eviction the first ``num_blocks`` blocks of ``at`` in the full group, the blocks ``handles`` of
        each window group, which are cached, and ``checkpoint``."""
        holding = Holding(self.tree.pin(at, num_blocks), tuple(handles), checkpoint)
        self.windows.read(handles)
        if checkpoint is not None:
            self.tree.checkpoints.hold(checkpoint)
        return holding

    def release(self, holding: Holding) -> None:
        """End ``holding``: what it held is evictable unless others use it."""
        self.release_checkpoint(holding)
        self.windows.leave(holding.handles)
        self.tree.unpin(holding.lease)

    def release_checkpoint(self, holding: Holding) -> None:
        """End the hold on the checkpoint of ``holding``; a request has taken over the rest."""
        if holding.checkpoint is not None:
            self.tree.checkpoints.release(holding.checkpoint)

    def pin(self, match: Match) -> Pin:
        """Pin the blocks of ``match`` and what is needed to resume after them. Raises OutOfBlocks, changing nothing."""
        pinned = sum(pin.holding.lease.num_blocks for pin in self._pins)
        if pinned + match.num_blocks > self._most_pinned:
            most, hint = self._most_pinned, "unpin others, or raise pin_share"
            text = (
                f"a pin of {match.num_blocks} blocks beside {pinned} pinned ones passes the {most} that pins may have"
            )
            raise OutOfBlocks.with_hint(text, hint, needed=match.num_blocks, available=most - pinned)
        _, found = self.found(match)
        spans = [window.span(found.resumable // self.block_size) for window in self.windows]
        handles = self.windows.handles_of(match.ids, spans)
        pin = Pin(self.hold(match, match.num_blocks, handles, found.checkpoint), match.namespace)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held."""
        if pin in self._pins:
            del self._pins[pin]
            self.release(pin.holding)

    def oldest_pin(self) -> Pin | None:
        """Return the pin that is ended first to make room for a request, or None."""
        return next(iter(self._pins), None)

    def pins_of(self, namespaces: Collection[bytes] | None = None) -> list[Pin]:
        """Return all pins, or those of ``namespaces``, oldest first."""
        return [pin for pin in self._pins if namespaces is None or pin.namespace in namespaces]

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, group: BlockGroup, n: int) -> Evicted:
        """Evict ``n`` blocks of ``group`` and some ahead, or all that are evictable. Full group: in the policy's order.
        Window group: cold blocks; without any, one checkpoint, whose blocks become cold. States: one checkpoint."""
        evicted = self.cached[group.index].evict(n)
        if evicted is None:
            return self.evict_checkpoint()
        for freed, ids in evicted.blocks:
            if freed is group:
                self.num_evicted[group.index] += len(ids)
        return evicted

    def evict_checkpoint(self) -> Evicted:
        """Evict the least recently used checkpoint that is not held, if there is one."""
        names = self.tree.checkpoints.evict()
        self.num_evicted_checkpoints += len(names)
        return self.kept.forget(names)

    def evict_unbacked(self) -> Evicted:
        """Without a full group: evict the blocks of texts beyond the number that the tree may remember."""
        surplus = self.tree.num_cached - self._most_unbacked
        if self.full is not None or surplus <= 0:
            return Evicted()
        return self._texts.gone(self.tree.evict(surplus + self._capacity // EVICT_AHEAD))

    def drop(self, name: int) -> Evicted:
        """Drop checkpoint ``name``, if it is still kept and not held."""
        if name not in self.kept or self.tree.checkpoints.is_held(name):
            return Evicted()
        self.tree.checkpoints.drop(name)
        return self.kept.forget((name,))

    def clear(self, namespace: bytes | None = None) -> Evicted:
        """Forget everything, or everything of one namespace. Raises RetryLater, changing nothing, while a request runs
        there or something is pinned."""
        return self._texts.gone(self.tree.clear(namespace))
