"""What requests leave behind for others: full blocks by reference in a prefix tree, bounded memory by copy in checkpoints.

    blocks of the full group    one tree, shared by pinning             reusable at every block boundary
    window blocks, states       a checkpoint: copies of its own,        reusable where a checkpoint is
                                at some block boundaries

A model whose layers all keep every token needs no checkpoints. Nothing is visible before the ``commit`` of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, KeysView, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed, OutOfBlocks
from kvpagoda.prefix import Evicted, EvictionPolicy, Lease, Match, PrefixTree
from kvpagoda.units import ceil_div

_AT_ONCE = 1024  # a thousandth goes beyond what is needed, so that a step that needs one block seldom evicts


class Memory(Protocol):
    """Who moves the bytes. A cache with no memory behind it does nothing."""

    def copy_blocks(self, ledger: BlockGroup, sources: Ids, targets: Ids) -> None: ...

    def blocks_freed(self, ledger: BlockGroup, ids: Ids) -> None: ...

    def evicting(self, ids: Ids, checkpoints: Many[int]) -> None: ...

    def checkpoint_dropped(self, name: int) -> None: ...


class Published(Protocol):
    """A text that is being written: ``keys`` are its tokens as texts are compared, int32, in ``text`` if there is one."""

    priority: int

    @property
    def text(self) -> Ids | None: ...

    def keys(self, first: int, end: int) -> Ids: ...


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


class Reuse:
    """The tree, the checkpoints and who owns their blocks.

    ``policy``: by name, or an object. ``num_checkpoints``: how many are kept at most. ``pin_share``: how much of the cache
    pins may have. ``most_unbacked``: blocks that the tree of a model without full group, where nothing but checkpoints
    takes memory, remembers at most.
    """

    def __init__(
        self,
        ledgers: Many[BlockGroup],
        block_size: int,
        *,
        policy: str | EvictionPolicy,
        num_checkpoints: int,
        most_unbacked: int,
        pin_share: float,
        memory: Memory,
    ) -> None:
        self.full = next((ledger for ledger in ledgers if not ledger.growth.is_bounded), None)
        self.bounded = tuple(ledger for ledger in ledgers if ledger.growth.is_bounded)
        self.block_size, self._memory = block_size, memory
        self._full_name = () if self.full is None else (self.full.plan.name,)
        capacity = most_unbacked if self.full is None else self.full.plan.num_blocks
        self.tree = PrefixTree(
            block_size, 0 if self.full is None else 1, policy, capacity=max(1, capacity), proves_ids=False
        )
        self._most_checkpoints, self._next_name, self._most_unbacked = num_checkpoints, 0, most_unbacked
        self._at_once = capacity // _AT_ONCE  # evicted beyond what is needed
        self._pins: dict[Pin, None] = {}  # the oldest first
        self._most_pinned = int(pin_share * capacity)
        self.num_evicted_blocks = self.num_evicted_checkpoints = 0
        self._copies: dict[int, list[Ids]] = {}  # checkpoint -> its blocks in each bounded group
        self._num_copies = [0] * len(self.bounded)  # that may be reclaimed
        if self.full is not None:
            self.full.spare = lambda: self.tree.num_evictable
            self.full.reclaim = self._evict_blocks
        for number, ledger in enumerate(self.bounded):
            ledger.spare = partial(self._num_copies.__getitem__, number)
            ledger.reclaim = partial(self._drop_until_free, ledger)

    # -- opening a request -------------------------------------------------------------------------------------------

    def find(self, tokens: Ids, namespace: bytes) -> tuple[Match, PrefixMatch]:
        """The longest reusable beginning of ``tokens``, at most all but the last token. Changes nothing."""
        return self._found(self.tree.match(tokens, namespace, limit=len(tokens) - 1))

    def find_again(self, match: Match, found: PrefixMatch) -> tuple[Match, PrefixMatch]:
        """What ``find``, which said ``match`` and ``found``, would say now: blocks may have been evicted since."""
        if self.tree.is_current(match):
            return match, found
        return self._found(self.tree.match(match.tokens, match.namespace))

    def _found(self, match: Match) -> tuple[Match, PrefixMatch]:
        if not self.bounded:  # the rest of a block is copied, so that nothing is lost to alignment
            found = dict.fromkeys(self._full_name, match.num_tokens)
            return match, PrefixMatch(match.num_tokens, match.num_tokens, "nothing", found)
        whole = match.num_blocks * self.block_size
        resumable, checkpoint = match.checkpoint or (0, None)
        aligned = "nothing" if match.num_tokens == whole else "alignment"
        groups = {ledger.plan.name: resumable for ledger in self.bounded}
        if self.full is not None:
            groups = {self.full.plan.name: whole, **groups}
        limited_by = aligned if resumable == whole else "checkpoint"
        return match, PrefixMatch(match.num_tokens, resumable, limited_by, groups, checkpoint)

    def without_copies(self, match: Match, found: PrefixMatch) -> PrefixMatch:
        """What can be reused of ``match`` where there is no room for copies, or for what they are copied from."""
        whole = 0 if self.bounded else match.num_blocks * self.block_size
        return PrefixMatch(found.num_tokens, whole, "memory", found.groups)

    def keep(self, name: int | None, change: int) -> None:
        """One more (1) or one less (-1) needs the checkpoint ``name``, if any: what is needed is nothing to reclaim."""
        if name is None:
            return
        before = self.tree.num_held_checkpoints
        (self.tree.hold_checkpoint if change > 0 else self.tree.release_checkpoint)(name)
        if self.tree.num_held_checkpoints != before:
            for number, ids in enumerate(self._copies[name]):
                self._num_copies[number] -= change * len(ids)

    def restore(
        self,
        slot: int,
        found: PrefixMatch,
        room: int,
        partial: Lease | None,
        fill: Callable[[int, Ids], None] | None = None,
    ) -> None:
        """Make room for ``room`` tokens of ``slot``, and copy to it what is bounded at ``found.resumable``, or the block whose
        first tokens are reused, which ``partial`` holds. The checkpoint is kept, and room is promised. With ``fill`` what is
        bounded comes from elsewhere: it is told the number of the group and the blocks to be filled."""
        if self.full is not None:
            self.full.grow(slot, self.full.wanted(slot, room))
            if partial is not None:
                column = partial.num_blocks - 1
                source = self.tree.last_ids(partial)
                self._memory.copy_blocks(self.full, source, self.full.table.cells[slot, column : column + 1].copy())
        for number, ledger in enumerate(self.bounded):
            if fill is not None or found.checkpoint is not None:
                end = ceil_div(found.resumable, ledger.block_size)
                begin = ledger.growth.first_needed(found.resumable) // ledger.block_size
                ledger.begin_at(slot, begin)
                ledger.grow(slot, end - begin)
                if fill is not None:
                    fill(number, ledger.held_ids(slot))
                elif found.checkpoint is not None:
                    self._memory.copy_blocks(ledger, self._copies[found.checkpoint][number], ledger.held_ids(slot))
            ledger.grow(slot, ledger.wanted(slot, room))

    def duplicate(self, ledger: BlockGroup, parent: int, slot: int, length: int) -> None:
        """Copy to ``slot`` the private blocks that ``parent`` has of its first ``length`` tokens. Room is promised."""
        begin = max(ledger.first[parent], ledger.shared[parent])
        end = ceil_div(length, ledger.block_size)
        if ledger is not self.full:
            ledger.begin_at(slot, begin)
        ledger.grow(slot, end - begin)
        cells = ledger.table.cells
        self._memory.copy_blocks(ledger, cells[parent, begin:end].copy(), cells[slot, begin:end].copy())

    def unshare(self, slot: int, lease: Lease, length: int) -> Lease:
        """Let the blocks behind the first ``length`` tokens be private, for others will be written there. Returns the lease
        of what is still shared. Raises OutOfBlocks, changing nothing."""
        columns = length // self.block_size
        if columns >= lease.num_blocks:
            return lease
        full, rest = self.full, int(length % self.block_size > 0)
        promised = 0
        if full is not None:
            promised = full.promised[slot]
            own = full.table.cells[slot, full.shared[slot] : full.end[slot]]  # what is there means nothing now
            copy = own[:rest].copy()
            if len(copy) < rest:
                if rest > full.available(slot):
                    raise OutOfBlocks(f"need {rest} blocks in {full.name} for a copy; close a sequence first")
                copy = full.take_free(rest)
            source = full.table.cells[slot, columns : columns + rest].copy()
            with self.undone_by(lambda: full.release(np.setdiff1d(copy, full.held_ids(slot)))):
                self._memory.copy_blocks(full, source, copy)
            self._memory.blocks_freed(full, full.cut(slot, columns, copy))
        shorter = self.tree.pin(lease, columns)
        self.tree.unpin(lease)
        if full is not None:
            full.promise(slot, min(promised, full.promised[slot] + max(0, full.available())))
        return shorter

    @staticmethod
    @contextmanager
    def undone_by(undo: Callable[[], object]) -> Iterator[None]:
        """If what is inside fails, ``undo`` it."""
        try:
            yield
        except BaseException:
            undo()
            raise

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, slot: int, lease: Lease, length: int, sequence: Published) -> None:
        """Make the whole blocks of the ``length`` committed tokens of ``sequence`` shareable; ``lease`` then covers them. What
        is new counts as used now, what was found as used when the request was opened.

        Blocks that another request published meanwhile are adopted and the own copies freed.
        """
        size = self.block_size
        begin, end = lease.num_blocks, length // size
        if begin == end:
            return
        full, tree, priority = self.full, self.tree, sequence.priority
        cells = np.empty((0, end), np.int32) if full is None else full.table.cells[slot : slot + 1]
        given = cells[:, begin:end]
        keys = sequence.keys(begin * size, end * size)
        inserted = tree.insert(lease, keys, given, text=sequence.text, priority=priority)
        if self.bounded:  # the checkpoint that this text hangs on is in use, also by those that will begin like it
            tree.touch_checkpoint(lease)
        if full is None:
            if tree.num_cached > self._most_unbacked:
                self._let_go(tree.evict(tree.num_cached - self._most_unbacked), is_evicted=True)
        elif inserted.num_added == end - begin:
            full.shared[slot] = end
        else:
            spared = given[inserted.duplicates]
            full.share(slot, end, inserted.ids[0])
            self._memory.blocks_freed(full, full.release(spared))

    def save(self, slot: int, lease: Lease, num_tokens: int) -> int | None:
        """Keep a checkpoint of ``slot`` at ``num_tokens``, the end of its lease; returns its name, which none will have again.

        None if there is one already, or no room: the least recently used checkpoint gives up its place, but what was
        promised to requests is not touched.
        """
        parts = []
        for ledger in self.bounded:
            end = ceil_div(num_tokens, ledger.block_size)
            count = end - max(ledger.first[slot], ledger.growth.first_needed(num_tokens) // ledger.block_size)
            if count > ledger.available():
                return None
            parts.append((ledger, count, end))
        if len(self._copies) >= self._most_checkpoints:
            self._evict_checkpoint()
        name = self._next_name
        if len(self._copies) >= self._most_checkpoints or not self.tree.set_checkpoint(lease, num_tokens, name):
            return None
        self._next_name += 1
        copies = self._copies[name] = [np.empty(0, np.int32) for _ in self.bounded]
        self.tree.hold_checkpoint(name)  # others go to make room for the rest of it
        is_whole = False
        try:
            for number, (ledger, count, end) in enumerate(parts):
                copies[number] = ledger.take_free(count)
                self._memory.copy_blocks(ledger, ledger.table.cells[slot, end - count : end].copy(), copies[number])
            is_whole = True
        except OutOfBlocks:  # every group had room for its part, but they share their memory
            return None
        finally:
            self.tree.release_checkpoint(name)
            for number, ids in enumerate(copies):
                self._num_copies[number] += len(ids)
            if not is_whole:
                self.drop(name)
        return name

    @property
    def checkpoints(self) -> KeysView[int]:
        """The names of those that are kept."""
        return self._copies.keys()

    def copies_of(self, name: int) -> list[Ids] | None:
        """The blocks of each bounded group that checkpoint ``name`` holds; None if it is kept no more."""
        return self._copies.get(name)

    def drop(self, name: int) -> None:
        """Forget the checkpoint that ``save`` told of, if it is still kept."""
        if name in self._copies and not self.tree.is_held(name):
            self.tree.drop_checkpoint(name)
            self._forget((name,))

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, tokens: Ids, namespace: bytes) -> Pin:
        """See ``Books.pin``."""
        match = self.tree.match(tokens, namespace)
        pinned = sum(pin.lease.num_blocks for pin in self._pins)
        if pinned + match.num_blocks > self._most_pinned:
            raise OutOfBlocks(
                f"a pin of {match.num_blocks} blocks beside {pinned} pinned ones passes the {self._most_pinned} that pins may "
                f"have; unpin others, or raise pin_share"
            )
        checkpoint = match.checkpoint[1] if match.checkpoint else None
        pin = Pin(self.tree.pin(match), namespace, checkpoint)
        self.keep(checkpoint, 1)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """End ``pin``, if it is still held."""
        if pin in self._pins:
            del self._pins[pin]
            self.keep(pin.checkpoint, -1)
            self.tree.unpin(pin.lease)

    def give_up_pin(self) -> bool:
        """End the oldest pin; False if there is none."""
        for pin in self._pins:
            self.unpin(pin)
            return True
        return False

    def give_up_pins(self, namespaces: Collection[bytes]) -> None:
        """End all pins of ``namespaces``."""
        for pin in [pin for pin in self._pins if pin.namespace in namespaces]:
            self.unpin(pin)

    # -- making room -------------------------------------------------------------------------------------------------

    def rename(self, ledger: BlockGroup, names: Ids) -> None:
        """Block ``i`` of ``ledger`` is called ``names[i]`` from now on."""
        if ledger is self.full:
            self.tree.remap(0, names)
            return
        number = self.bounded.index(ledger)
        for copies in self._copies.values():
            copies[number] = names[copies[number]]

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget everything, or everything of one namespace. Raises RetryLater while a request runs there."""
        self._let_go(self.tree.clear(namespace))

    def _evict_blocks(self, n: int) -> None:
        evicted = self.tree.evict(n + self._at_once)
        self.num_evicted_blocks += evicted.ids.shape[1]
        self._let_go(evicted, is_evicted=True)

    def _let_go(self, evicted: Evicted, *, is_evicted: bool = False) -> None:
        if is_evicted:
            self._memory.evicting(evicted.ids.ravel(), evicted.states)
        if self.full is not None:
            self._memory.blocks_freed(self.full, self.full.release(evicted.ids[0]))
        if evicted.states:
            self._forget(evicted.states)

    def _drop_until_free(self, ledger: BlockGroup, n: int) -> None:
        target = ledger.free.num_free + n
        while ledger.free.num_free < target and len(self._copies) > self.tree.num_held_checkpoints:
            self._evict_checkpoint()

    def _evict_checkpoint(self) -> None:
        evicted = self.tree.evict_checkpoint()
        self.num_evicted_checkpoints += len(evicted)
        self._memory.evicting(np.empty(0, np.int32), evicted)
        self._forget(evicted)

    def _forget(self, names: Many[int]) -> None:
        for name in names:
            self._memory.checkpoint_dropped(name)
            for number, (ledger, ids) in enumerate(zip(self.bounded, self._copies.pop(name))):
                self._num_copies[number] -= len(ids)
                self._memory.blocks_freed(ledger, ledger.release(ids))

    # -- proof -------------------------------------------------------------------------------------------------------

    def owned_ids(self, ledger: BlockGroup) -> Ids:
        """The blocks of ``ledger`` that the tree or a checkpoint owns."""
        if ledger is self.full:
            return self.tree.owned_ids(0)
        number = self.bounded.index(ledger)
        kept = [copies[number] for copies in self._copies.values()]
        return np.concatenate(kept) if kept else np.empty(0, np.int32)

    def check(self) -> None:
        """Prove that tree and checkpoints agree. Raises CheckFailed."""
        self.tree.check()
        if self.tree.num_checkpoints != len(self._copies) or len(self._copies) > self._most_checkpoints:
            raise CheckFailed(
                f"checkpoints: {self.tree.num_checkpoints} in the tree, {len(self._copies)} with copies, at most "
                f"{self._most_checkpoints} asked for"
            )
        loose = [copies for name, copies in self._copies.items() if not self.tree.is_held(name)]
        counts = [sum(len(copies[n]) for copies in loose) for n in range(len(self.bounded))]
        if counts != self._num_copies:
            raise CheckFailed(f"checkpoints hold {counts} blocks, {self._num_copies} are counted")
