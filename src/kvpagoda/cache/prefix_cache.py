"""What requests leave behind for others: full blocks by reference in a prefix tree, bounded memory by copy in checkpoints.

    blocks of the full group    one tree, shared by pinning             reusable at every block boundary
    window blocks, states       a checkpoint: copies of its own,        reusable where a checkpoint is
                                at some block boundaries

A model whose layers all keep every token needs no checkpoints. Nothing is visible before the ``commit`` of its tokens.
Nothing is copied, freed or stored here: methods return what follows from them, and ``Capacity`` does it.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.options import Retention
from kvpagoda.errors import CheckFailed, OutOfBlocks
from kvpagoda.prefix import EvictionPolicy, Lease, Match, PrefixTree

_AT_ONCE = 1024  # a thousandth goes beyond what is needed, so that a step that needs one block seldom evicts
_NONE: Ids = np.empty(0, np.int32)
Copies = list[Ids]
"""The blocks of one checkpoint, int32 for each bounded group."""


class PrefixMatch(NamedTuple):
    """Why a request starts where it starts: ``seq.match``."""

    num_tokens: int
    """Leading tokens of the prompt that are in the tree, at most all but one."""
    resumable: int
    """Tokens that need not be computed: a block boundary where every layer kind has what it needs."""
    limited_by: str
    """What cut the hit short: ``nothing``, ``alignment`` (the rest of a block), ``checkpoint`` (none further on: the groups
    that keep windows or states have less than the others) or ``memory`` (there was no room to copy one)."""
    groups: Mapping[str, int] = MappingProxyType({})
    """Group -> the longest beginning for which it has what it needs."""
    checkpoint: int | None = None
    """The checkpoint on the device that the request starts from, if any."""
    loaded: int = 0
    """Of ``resumable``: tokens that came from tiers below the device."""


class Evicted(NamedTuple):
    """What is cached no more, to be freed by the caller."""

    ids: Ids = _NONE
    """Blocks of the full group, int32, those deepest in their texts first."""
    checkpoints: tuple[tuple[int, Copies], ...] = ()
    """(name, its blocks)."""


@dataclass(frozen=True, eq=False)
class Pin:
    """Cached text that goes last: ``KVCache.pin``."""

    lease: Lease = field(repr=False)
    namespace: bytes = field(repr=False)
    checkpoint: int | None = field(repr=False)

    @property
    def is_held(self) -> bool:
        """False from ``unpin`` on, and when a request could not have run otherwise."""
        return self.lease.is_open


class PrefixCache:
    """The tree, the checkpoints and who needs them.

    ``policy``: an eviction policy by name or an object. ``num_checkpoints``: how many are kept at most. ``most_unbacked``:
    blocks that the tree of a model without full group, where nothing but checkpoints takes memory, remembers at most.
    """

    def __init__(
        self,
        groups: Many[BlockGroup],
        block_size: int,
        policy: str | EvictionPolicy,
        retention: Retention,
        num_checkpoints: int,
        most_unbacked: int,
    ) -> None:
        self.full = next((group for group in groups if not group.growth.is_bounded), None)
        self.bounded = tuple(group for group in groups if group.growth.is_bounded)
        self.block_size, self._fresh_policy = block_size, deepcopy(policy)
        self._full_name = () if self.full is None else (self.full.plan.name,)
        self._place = {group.index: number for number, group in enumerate(self.bounded)}
        self._most_checkpoints, self._most_unbacked = num_checkpoints, most_unbacked
        self._capacity = most_unbacked if self.full is None else self.full.plan.num_blocks
        self._at_once = self._capacity // _AT_ONCE
        self._most_pinned = int(retention.pin_share * self._capacity)
        self._next_name = 0
        self.num_evicted_blocks = self.num_evicted_checkpoints = 0
        self._start(policy)

    def clear_all(self) -> None:
        """Forget everything, whoever uses it; the blocks are somebody else's to free."""
        self._start(deepcopy(self._fresh_policy))

    def _start(self, policy: str | EvictionPolicy) -> None:
        groups, capacity = 0 if self.full is None else 1, max(1, self._capacity)
        self.tree = PrefixTree(self.block_size, groups, policy, capacity=capacity, proves_ids=False)
        self._pins: dict[Pin, None] = {}  # the oldest first
        self._copies: dict[int, Copies] = {}
        self._num_loose = [0] * len(self.bounded)  # blocks in checkpoints that may be evicted

    # -- what is there -----------------------------------------------------------------------------------------------

    def find(self, tokens: Ids, namespace: bytes) -> tuple[Match, PrefixMatch]:
        """The longest reusable beginning of ``tokens``, at most all but the last token. Changes nothing."""
        return self.found(self.tree.match(tokens, namespace, limit=len(tokens) - 1))

    def find_again(self, match: Match, found: PrefixMatch) -> tuple[Match, PrefixMatch]:
        """What ``find``, which said ``match`` and ``found``, would say now: blocks may have been evicted or moved since."""
        if self.tree.is_current(match):
            return match, found
        return self.found(self.tree.match(match.tokens, match.namespace))

    def found(self, match: Match) -> tuple[Match, PrefixMatch]:
        """What can be reused of ``match``."""
        if not self.bounded:  # the rest of a block is copied, so that nothing is lost to alignment
            there = dict.fromkeys(self._full_name, match.num_tokens)
            return match, PrefixMatch(match.num_tokens, match.num_tokens, "nothing", there)
        whole = match.num_blocks * self.block_size
        resumable, checkpoint = match.checkpoint or (0, None)
        aligned = "nothing" if match.num_tokens == whole else "alignment"
        groups = {group.plan.name: resumable for group in self.bounded}
        if self.full is not None:
            groups = {self.full.plan.name: whole, **groups}
        limited_by = aligned if resumable == whole else "checkpoint"
        return match, PrefixMatch(match.num_tokens, resumable, limited_by, groups, checkpoint)

    def without_copies(self, match: Match, found: PrefixMatch) -> PrefixMatch:
        """What can be reused of ``match`` where there is no room for copies, or for what they are copied from."""
        whole = 0 if self.bounded else match.num_blocks * self.block_size
        return PrefixMatch(found.num_tokens, whole, "memory", found.groups)

    def num_evictable(self, group: BlockGroup) -> int:
        """Blocks of ``group`` that ``evict`` could give up now. O(1)."""
        return self.tree.num_evictable if group is self.full else self._num_loose[self._place[group.index]]

    @property
    def checkpoints(self) -> KeysView[int]:
        """The names of those that are kept."""
        return self._copies.keys()

    def copies_of(self, name: int) -> Copies | None:
        """The blocks of checkpoint ``name``; None if it is kept no more."""
        return self._copies.get(name)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, slot: int, lease: Lease, keys: Ids, text: Ids | None, priority: int) -> Ids:
        """Make the whole blocks of ``keys``, which follow what ``lease`` covers, shareable; the lease covers them then. What
        is new counts as used now, what was found as used when the request was opened.

        Returns those of the request's blocks, int32, that were cached already: they are the caller's to free. Raises
        MemoryError, changing nothing.
        """
        full, tree, begin = self.full, self.tree, lease.num_blocks
        end = begin + len(keys) // self.block_size
        cells = np.empty((0, end), np.int32) if full is None else full.table.cells[slot : slot + 1]
        given = cells[:, begin:end]
        inserted = tree.insert(lease, keys, given, text=text, priority=priority)
        if self.bounded:  # the checkpoint that this text hangs on is in use, also by those that will begin like it
            tree.touch_checkpoint(lease)
        if full is None:
            return _NONE
        if inserted.num_added == end - begin:
            full.share(slot, end)
            return _NONE
        spared: Ids = given[inserted.duplicates]
        full.share(slot, end, inserted.ids[0])
        return spared

    def is_kept_at(self, lease: Lease, num_tokens: int) -> bool:
        """Whether there is a checkpoint at ``num_tokens``, the end of ``lease``."""
        return self.tree.has_checkpoint(lease, num_tokens)

    @property
    def is_full(self) -> bool:
        """Whether as many checkpoints are kept as may be."""
        return len(self._copies) >= self._most_checkpoints

    def save(self, lease: Lease, num_tokens: int, copies: Copies) -> int:
        """Keep a checkpoint at ``num_tokens``, the end of ``lease``, where there is none: ``copies`` have what is bounded
        there. Returns its name, which none will have again."""
        name = self._next_name
        self._next_name += 1
        self.tree.set_checkpoint(lease, num_tokens, name)
        self._copies[name] = copies
        for number, ids in enumerate(copies):
            self._num_loose[number] += len(ids)
        return name

    def hold(self, checkpoint: int | None) -> None:
        """One more request needs ``checkpoint``, if any: it is not evicted."""
        if checkpoint is not None:
            before = self.tree.checkpoints.num_held
            self.tree.checkpoints.hold(checkpoint)
            if self.tree.checkpoints.num_held > before:
                self._count_loose(checkpoint, -1)

    def release(self, checkpoint: int | None) -> None:
        """One request less needs it."""
        if checkpoint is not None:
            before = self.tree.checkpoints.num_held
            self.tree.checkpoints.release(checkpoint)
            if self.tree.checkpoints.num_held < before:
                self._count_loose(checkpoint, 1)

    def _count_loose(self, name: int, change: int) -> None:
        for number, ids in enumerate(self._copies[name]):
            self._num_loose[number] += change * len(ids)

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Pin:
        """Keep what ``match`` found, and its last checkpoint. Raises OutOfBlocks, changing nothing."""
        pinned = sum(pin.lease.num_blocks for pin in self._pins)
        if pinned + match.num_blocks > self._most_pinned:
            raise OutOfBlocks(
                f"a pin of {match.num_blocks} blocks beside {pinned} pinned ones passes the {self._most_pinned} that pins may "
                f"have; unpin others, or raise pin_share"
            )
        checkpoint = match.checkpoint[1] if match.checkpoint else None
        pin = Pin(self.tree.pin(match), match.namespace, checkpoint)
        self.hold(checkpoint)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held."""
        if pin in self._pins:
            del self._pins[pin]
            self.release(pin.checkpoint)
            self.tree.unpin(pin.lease)

    def oldest_pin(self) -> Pin | None:
        """The pin that is given up first."""
        return next(iter(self._pins), None)

    def pins_of(self, namespaces: Collection[bytes] | None = None) -> list[Pin]:
        """All pins, or those of ``namespaces``."""
        return [pin for pin in self._pins if namespaces is None or pin.namespace in namespaces]

    # -- giving up ---------------------------------------------------------------------------------------------------

    def evict(self, group: BlockGroup, n: int) -> Evicted:
        """Give up ``n`` blocks of ``group``, or as many as may go: those of the full group by the policy, whole checkpoints
        for the others, one for each call. Nothing for a group of which nothing may go."""
        if group is self.full:
            evicted = self.tree.evict(n + self._at_once)
            self.num_evicted_blocks += evicted.ids.shape[1]
            return Evicted(evicted.ids[0], self._forget(evicted.states) if evicted.states else ())
        return self.evict_checkpoint()

    def evict_checkpoint(self) -> Evicted:
        """Give up the least recently used checkpoint that nobody needs, if there is one."""
        names = self.tree.checkpoints.evict()
        self.num_evicted_checkpoints += len(names)
        return Evicted(_NONE, self._forget(names))

    def evict_unbacked(self) -> Evicted:
        """Of a tree that takes no memory: what is beyond the number of blocks that it remembers."""
        surplus = self.tree.num_cached - self._most_unbacked
        if self.full is not None or surplus <= 0:
            return Evicted()
        return Evicted(_NONE, self._forget(self.tree.evict(surplus).states))

    def drop(self, name: int) -> Evicted:
        """Forget checkpoint ``name``, if it is still kept and nobody needs it."""
        if name not in self._copies or self.tree.checkpoints.is_held(name):
            return Evicted()
        self.tree.checkpoints.drop(name)
        return Evicted(_NONE, self._forget((name,)))

    def clear(self, namespace: bytes | None = None) -> Evicted:
        """Forget everything, or everything of one namespace. Raises RetryLater, changing nothing, while a request runs there
        or something is pinned."""
        dropped = self.tree.clear(namespace)
        return Evicted(_NONE if self.full is None else dropped.ids[0], self._forget(dropped.states))

    def _forget(self, names: Many[int]) -> tuple[tuple[int, Copies], ...]:
        if not names:
            return ()
        gone = tuple((name, self._copies.pop(name)) for name in names)
        for _, copies in gone:
            for number, ids in enumerate(copies):
                self._num_loose[number] -= len(ids)
        return gone

    def remap(self, group: BlockGroup, new_ids: Ids) -> None:
        """Block ``i`` of ``group`` is now block ``new_ids[i]``."""
        if group is self.full:
            self.tree.remap(0, new_ids)
            return
        number = self._place[group.index]
        for copies in self._copies.values():
            copies[number] = new_ids[copies[number]]

    # -- proof -------------------------------------------------------------------------------------------------------

    def owned_ids(self, group: BlockGroup) -> Ids:
        """The blocks of ``group`` that the tree or a checkpoint owns."""
        if group is self.full:
            return self.tree.owned_ids(0)
        number = self._place[group.index]
        kept = [copies[number] for copies in self._copies.values()]
        return np.concatenate(kept) if kept else _NONE

    def check(self, num_leases: int, namespaces: set[bytes]) -> None:
        """Prove that tree, checkpoints and pins agree, that ``num_leases`` requests hold leases beside the pins, and that
        those in ``namespaces`` are there. Raises CheckFailed."""
        self.tree.check()
        if self.tree.num_leases != num_leases + len(self._pins):
            raise CheckFailed(
                f"{self.tree.num_leases} leases are open: {num_leases} requests and {len(self._pins)} pins have one each"
            )
        missing = namespaces - self.tree.namespaces()
        if missing:
            raise CheckFailed(f"{len(missing)} namespaces in which requests run are not in the tree")
        if len(self.tree.checkpoints.by_state) != len(self._copies) or len(self._copies) > self._most_checkpoints:
            raise CheckFailed(
                f"checkpoints: {len(self.tree.checkpoints.by_state)} in the tree, {len(self._copies)} with copies, at most "
                f"{self._most_checkpoints} asked for"
            )
        held = {name for name in self._copies if self.tree.checkpoints.is_held(name)}
        pinned = {pin.checkpoint for pin in self._pins if pin.checkpoint is not None}
        if held != pinned:
            raise CheckFailed(f"checkpoints {sorted(held)[:16]} are held, pins hold {sorted(pinned)[:16]}")
        loose = [copies for name, copies in self._copies.items() if name not in held]
        counts = [sum(len(copies[n]) for copies in loose) for n in range(len(self.bounded))]
        if counts != self._num_loose:
            raise CheckFailed(f"checkpoints hold {counts} blocks that may go, {self._num_loose} are counted")
