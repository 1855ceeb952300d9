"""What requests leave behind for others: blocks by reference in a prefix tree, states by copy in checkpoints.

    blocks of the full group        in the tree           while their text is there
    blocks of windows and chunks    in the tree           those before a place to resume are kept by its checkpoint, and go
                                                          with it; what slid out goes before anything else
    states                          in a checkpoint       a copy, at some block boundaries

So a text can be resumed behind each block before which the last window of every group is there, and at which there is a copy
of the states, if the model has any. Nothing is visible before the ``commit`` of its tokens. Nothing is copied, freed or stored
here: methods return what follows from them, and ``Capacity`` does it.
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
from kvpagoda.cache.checkpoints import Evicted, Kept, KeptCheckpoints
from kvpagoda.cache.options import Retention
from kvpagoda.cache.prefix_match import PrefixMatch, resume_point
from kvpagoda.cache.windows import Windows
from kvpagoda.errors import OutOfBlocks
from kvpagoda.prefix import Evicted as TreeEvicted
from kvpagoda.prefix import EvictionPolicy, Lease, Match, PrefixTree
from kvpagoda.prefix.id_pool import IdPool
from kvpagoda.prefix.window_blocks import Handles

AT_ONCE = 256  # eviction frees 1/256 of a group beyond what is needed, so that most steps find free blocks
_NONE: Ids = np.empty(0, np.int32)


def num_ahead(group: BlockGroup) -> int:
    """Blocks of ``group`` that ``PrefixCache.evict`` gives up beyond those that it is asked for."""
    return group.plan.num_blocks // AT_ONCE


class Holding(NamedTuple):
    """What a request begins with, or a pin keeps: nothing of it goes until it is released."""

    lease: Lease
    handles: tuple[Handles, ...]
    """What is read of each window group."""
    checkpoint: int | None = None


@dataclass(frozen=True, eq=False)
class Pin:
    """Cached text that goes last: ``KVCache.pin``."""

    holding: Holding = field(repr=False)
    namespace: bytes = field(repr=False)

    @property
    def is_held(self) -> bool:
        """False from ``unpin`` on, and when a request could not have run otherwise."""
        return self.holding.lease.is_open


class PrefixCache:
    """The tree, the windows, the checkpoints that are ``kept`` and who needs them.

    ``policy``: by name or an object. ``num_checkpoints``: how many are kept at most. ``most_unbacked``: blocks of texts that
    are remembered at most where there is no full group, so that texts take no memory by themselves. ``is_followed``: blocks of
    such texts have numbers, in the last row of the tree, by which a log knows them.
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
        self.block_size, self._fresh_policy = block_size, deepcopy(policy)
        self.most_checkpoints, self._most_unbacked = num_checkpoints, most_unbacked
        self._capacity = most_unbacked if self.full is None else self.full.plan.num_blocks
        self._full_name = "" if self.full is None else self.full.plan.name
        self._most_pinned = int(retention.pin_share * self._capacity)
        self.num_evicted, self.num_evicted_checkpoints = [0] * len(groups), 0  #: blocks of each group
        self._numbers = IdPool(first=1) if is_followed and self.full is None else None
        self._start(policy)

    def clear_all(self) -> None:
        """Forget everything, whoever uses it; the blocks are somebody else's to free."""
        self._start(deepcopy(self._fresh_policy))

    def _start(self, policy: str | EvictionPolicy) -> None:
        full_rows, capacity = 0 if self.full is None else 1, max(1, self._capacity)
        self.windows = Windows.of((group for group in self.bounded if group is not self.states), full_rows)
        rows = full_rows + 2 * len(self.windows) + (self._numbers is not None)
        self.tree = PrefixTree(self.block_size, rows, policy, capacity=capacity, proves_ids=False)
        self._window_of = {window.group.index: window for window in self.windows}
        self._pins: dict[Pin, None] = {}  # the oldest first
        self.kept = KeptCheckpoints(self.bounded, self.windows)

    # -- what is there -----------------------------------------------------------------------------------------------

    def find(self, tokens: Ids, namespace: bytes) -> tuple[Match, PrefixMatch]:
        """The longest reusable beginning of ``tokens``, at most all but the last token. Changes nothing."""
        return self.found(self.tree.match(tokens, namespace, limit=len(tokens) - 1))

    def find_again(self, match: Match) -> tuple[Match, PrefixMatch]:
        """What ``find``, which said ``match``, would say now: blocks may have been evicted or moved since."""
        return self.found(self.tree.match(match.tokens, match.namespace))

    def found(self, match: Match) -> tuple[Match, PrefixMatch]:
        """What can be reused of ``match``."""
        there = {} if self.full is None else {self._full_name: match.num_tokens}
        if not self.bounded:  # the rest of a block is copied, so that nothing is lost to alignment
            resumable = match.num_tokens // self._hit_grid * self._hit_grid
            limited_by = "nothing" if resumable == match.num_tokens else "alignment"
            return match, PrefixMatch(match.num_tokens, resumable, limited_by, there)
        size, whole = self.block_size, match.num_blocks * self.block_size
        end, most, limited_by = resume_point(self.tree, match, self.windows, self.states is not None, self.grid)
        if limited_by == "nothing" and whole < match.num_tokens:
            limited_by = "alignment"
        if self.full is not None:
            there = {self._full_name: whole}
        groups = there | {name: num_blocks * size for name, num_blocks in most.items()}
        at = self.tree.last_checkpoint(match, end) if self.states is not None and end else None
        return match, PrefixMatch(match.num_tokens, end * size, limited_by, groups, None if at is None else at[1])

    def has_all(self, match: Match, columns: Many[range]) -> bool:
        """Whether ``match`` has blocks ``columns[i]`` of each group i."""
        if max((some.stop for some in columns if some), default=0) > match.num_blocks:
            return False
        return self.windows.are_there(match.ids, [columns[window.group.index] for window in self.windows])

    def without_copies(self, match: Match, found: PrefixMatch) -> PrefixMatch:
        """What can be reused of ``match`` where there is no room for copies, or for what they are copied from."""
        whole = 0 if self.bounded else match.num_blocks * self.block_size
        return PrefixMatch(found.num_tokens, whole, "memory", found.groups)

    def num_cached(self, group: BlockGroup) -> int:
        """Blocks of ``group`` that are kept for reuse, in use or not. O(1)."""
        if group is self.full:
            return self.tree.num_cached
        window = self._window_of.get(group.index)
        return len(self.kept) if window is None else window.blocks.num_cached

    def num_evictable(self, group: BlockGroup) -> int:
        """Blocks of ``group`` that ``evict`` could give up now. O(1)."""
        if group is self.full:
            return self.tree.num_evictable
        window = self._window_of.get(group.index)
        return len(self.kept) - self.tree.checkpoints.num_held if window is None else window.blocks.num_idle

    def num_spare(self, group: BlockGroup) -> int:
        """Blocks that ``evict`` could give up, less those that it could not when one of several readers of a block goes on:
        of these each counts on a block of its own to come back. O(1)."""
        if group is self.full:
            return self.tree.num_evictable
        window = self._window_of.get(group.index)
        return self.num_evictable(group) if window is None else window.blocks.num_cached - window.blocks.num_reads

    def num_cold(self, group: BlockGroup) -> int:
        """Cached blocks of ``group`` that slid out of every window, and before which nobody resumes."""
        window = self._window_of.get(group.index)
        return 0 if window is None else window.blocks.num_cold

    def idle_since(self, group: BlockGroup, most_cold: int) -> int | None:
        """When what goes next of ``group`` was used, by one clock for all groups: 0 where more than ``most_cold`` blocks are
        cold, else as if none were. None: nobody knows."""
        if self.num_cold(group) > most_cold:
            return 0
        return self.tree.oldest() if group is self.full else self.tree.checkpoints.oldest()

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self, slot: int, lease: Lease, keys: Ids, text: Ids | None, priority: int
    ) -> list[tuple[BlockGroup, Ids]]:
        """Make the whole blocks of ``keys``, which follow what ``lease`` covers, shareable; the lease covers them then. What
        is new counts as used now, what was found as used when the request was opened.

        Returns, by group, those of the request's blocks, int32, that were cached already: they are the caller's to free.
        Raises MemoryError, changing nothing.
        """
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
            given[-1] = self._numbers.peek(n)[::-1]  # those that are new are the last ones
        inserted = tree.insert(lease, keys, given, text=text, priority=priority)
        if self._numbers is not None:
            self._numbers.advance(inserted.num_added)
        if self.bounded:  # the checkpoint that this text hangs on is in use, also by those that will begin like it
            tree.checkpoints.touch(lease.node, lease.num_blocks)
        spared: list[tuple[BlockGroup, Ids]] = []
        if full is not None and inserted.num_added == n:
            full.share(slot, begin + n)
        elif full is not None:
            spared.append((full, given[0, inserted.duplicates[0]]))
            full.share(slot, begin + n, inserted.ids[0])
        if windows:
            spared += windows.publish(tree, slot, lease, publishing, begin, is_new=inserted.num_added == n)
        return spared

    def checkpoint_at(self, lease: Lease, num_blocks: int) -> int | None:
        """The name of the checkpoint after ``num_blocks`` blocks of ``lease``, if there is one."""
        last = self.tree.last_checkpoint(lease, num_blocks)
        return last[1] if last is not None and last[0] == num_blocks * self.block_size else None

    @property
    def is_full(self) -> bool:
        """Whether as many checkpoints are kept as may be."""
        return len(self.kept) >= self.most_checkpoints

    def save(self, lease: Lease, num_blocks: int, kept: Kept) -> int:
        """Keep a checkpoint after ``num_blocks`` blocks of ``lease``, where there is none. Returns its name."""
        name = self.kept.keep(kept)
        self.tree.set_checkpoint(lease, num_blocks * self.block_size, name)
        return name

    def use(self, name: int) -> None:
        """Checkpoint ``name``, if it is still kept, was used."""
        if name in self.kept:
            self.tree.checkpoints.use(name)

    # -- holding and pins --------------------------------------------------------------------------------------------

    def hold(
        self, at: Match | Lease, num_blocks: int, handles: Many[Handles], checkpoint: int | None = None
    ) -> Holding:
        """Let nothing go of the first ``num_blocks`` blocks of ``at`` in the full group, of its ``handles`` in the window
        groups, which are there, and of ``checkpoint``."""
        holding = Holding(self.tree.pin(at, num_blocks), tuple(handles), checkpoint)
        self.windows.read(handles)
        if checkpoint is not None:
            self.tree.checkpoints.hold(checkpoint)
        return holding

    def release(self, holding: Holding) -> None:
        """What ``holding`` holds may go."""
        self.release_checkpoint(holding)
        self.windows.leave(holding.handles)
        self.tree.unpin(holding.lease)

    def release_checkpoint(self, holding: Holding) -> None:
        """The checkpoint of ``holding`` may go; the rest of it belongs to a request now."""
        if holding.checkpoint is not None:
            self.tree.checkpoints.release(holding.checkpoint)

    def pin(self, match: Match) -> Pin:
        """Keep what ``match`` found, and what a text needs to go on there. Raises OutOfBlocks, changing nothing."""
        pinned = sum(pin.holding.lease.num_blocks for pin in self._pins)
        if pinned + match.num_blocks > self._most_pinned:
            most, hint = self._most_pinned, "unpin others, or raise pin_share"
            text = (
                f"a pin of {match.num_blocks} blocks beside {pinned} pinned ones passes the {most} that pins may have"
            )
            raise OutOfBlocks.with_hint(text, hint, needed=match.num_blocks, available=most - pinned)
        _, found = self.found(match)
        read = self.windows.handles_of(match.ids, self.windows.spans_before(found.resumable // self.block_size))
        pin = Pin(self.hold(match, match.num_blocks, read, found.checkpoint), match.namespace)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held."""
        if pin in self._pins:
            del self._pins[pin]
            self.release(pin.holding)

    def oldest_pin(self) -> Pin | None:
        """The pin that is given up first."""
        return next(iter(self._pins), None)

    def pins_of(self, namespaces: Collection[bytes] | None = None) -> list[Pin]:
        """All pins, or those of ``namespaces``."""
        return [pin for pin in self._pins if namespaces is None or pin.namespace in namespaces]

    # -- giving up ---------------------------------------------------------------------------------------------------

    def evict(self, group: BlockGroup, n: int) -> Evicted:
        """Give up ``n`` blocks of ``group``, or as many as may go: those of the full group by the policy; of a window group
        what slid out, and where nothing of that is left a checkpoint, so that it has more of it; for states a checkpoint."""
        if group is self.full:
            evicted = self.tree.evict(n + num_ahead(group))
            self.num_evicted[group.index] += evicted.ids.shape[1]
            return self._gone(evicted)
        window = self._window_of.get(group.index)
        if window is not None and window.blocks.num_cold:
            ids = window.blocks.evict(n + num_ahead(group))
            self.num_evicted[group.index] += len(ids)
            return Evicted(((group, ids),))
        return self.evict_checkpoint()

    def evict_checkpoint(self) -> Evicted:
        """Give up the least recently used checkpoint that nobody holds, if there is one."""
        names = self.tree.checkpoints.evict()
        self.num_evicted_checkpoints += len(names)
        return self.kept.forget(names)

    def evict_unbacked(self) -> Evicted:
        """Of a tree that takes no memory: what is beyond the number of blocks that it remembers."""
        surplus = self.tree.num_cached - self._most_unbacked
        if self.full is not None or surplus <= 0:
            return Evicted()
        return self._gone(self.tree.evict(surplus + self._capacity // AT_ONCE))

    def drop(self, name: int) -> Evicted:
        """Forget checkpoint ``name``, if it is still kept and nobody holds it."""
        if name not in self.kept or self.tree.checkpoints.is_held(name):
            return Evicted()
        self.tree.checkpoints.drop(name)
        return self.kept.forget((name,))

    def clear(self, namespace: bytes | None = None) -> Evicted:
        """Forget everything, or everything of one namespace. Raises RetryLater, changing nothing, while a request runs there
        or something is pinned."""
        return self._gone(self.tree.clear(namespace))

    def _gone(self, evicted: TreeEvicted) -> Evicted:
        """The tree gave up ``evicted``."""
        blocks, checkpoints, _ = self.kept.forget(evicted.states) if evicted.states else Evicted()
        if self.full is not None:
            blocks += ((self.full, evicted.ids[0]),)
        texts = None if self._numbers is None else evicted.ids[-1]
        if self._numbers is not None:
            self._numbers.give(evicted.ids[-1])
        return Evicted((*blocks, *self.windows.forget(evicted.ids)) if self.windows else blocks, checkpoints, texts)

    def remap(self, group: BlockGroup, new_ids: Ids) -> None:
        """Block ``i`` of ``group`` is now block ``new_ids[i]``. O(blocks), of the full group O(nodes) too."""
        window = self._window_of.get(group.index)
        if group is self.full:
            self.tree.remap(0, new_ids)
        elif window is None:
            self.kept.remap(new_ids)
        else:
            window.blocks.remap(new_ids)

    # -- proof -------------------------------------------------------------------------------------------------------

    def owned_ids(self, group: BlockGroup) -> Ids:
        """The blocks of ``group`` that the tree or a checkpoint owns."""
        window = self._window_of.get(group.index)
        if group is self.full:
            return self.tree.owned_ids(0)
        if window is None:
            return np.concatenate([_NONE, *(kept.states for kept in self.kept.values())])
        cells = window.cells_of(self.tree.all_ids())
        return window.blocks.ids(cells[0, window.blocks.are_there(cells)])
