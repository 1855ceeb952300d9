"""How a request begins: a slot, what it starts from, and room to go on; all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial
from typing import NamedTuple, Protocol

from kvpagoda.below import Offloader
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import RetryLater
from kvpagoda.prefix import Lease, Match
from kvpagoda.reuse import PrefixMatch, Reuse
from kvpagoda.swap import Suspended, Swap
from kvpagoda.tier_hit import TierHit

Start = tuple[PrefixMatch, Lease]
"""Where a request starts, and the lease of the blocks that it shares."""


class Wish(NamedTuple):
    """What a request wants: ``wanted`` blocks of each group promised to ``slot``, room for its first ``room`` tokens, and to
    start from what was ``found``, or from more: what tiers ``offer``, what was ``suspended`` of it."""

    slot: int
    wanted: list[int]
    room: int
    match: Match
    found: PrefixMatch
    priority: int
    offer: TierHit | None = None
    suspended: Suspended | None = None


class Owner(Protocol):
    """Who is told of blocks that nobody holds any more."""

    def blocks_freed(self, ledger: BlockGroup, ids: Ids) -> None: ...


class Admission:
    """Slots, and how they are filled. ``below``: the tiers, if there are any."""

    def __init__(
        self, ledgers: Many[BlockGroup], reuse: Reuse, swap: Swap, below: Offloader | None, num_slots: int, owner: Owner
    ) -> None:
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._ledgers, self._reuse, self._swap, self._below = tuple(ledgers), reuse, swap, below
        self._num_slots, self._owner = num_slots, owner

    def take_slot(self) -> int:
        """A slot for a request. Raises RetryLater."""
        if not self.free_slots:
            raise RetryLater(f"all {self._num_slots} request slots are in use; close one, or raise max_requests")
        return self.free_slots.pop()

    def begin(self, wish: Wish) -> Start:
        """Begin a request, at the price of pins if need be. Raises RetryLater; its slot is free then, and nothing kept."""
        begun = self._start(wish)
        while begun is None and self._reuse.give_up_pin():
            begun = self._start(wish)
        if begun is None:
            self.free_slots.append(wish.slot)
            raise RetryLater(self.shortage(wish.wanted))
        return begun

    def promise(self, slot: int, wanted: list[int]) -> bool:
        """Promise ``slot`` so many blocks in every group, those it holds included, or nothing: then it holds nothing."""
        for ledger, blocks in zip(self._ledgers, wanted):
            if blocks - ledger.end[slot] > ledger.available():
                for undone in self._ledgers:
                    undone.close(slot)
                return False
            ledger.promise(slot, blocks)
        return True

    def shortage(self, wanted: list[int]) -> str:
        """Which group lacks how many blocks, and how they could become free."""
        short = [(ledger, blocks) for ledger, blocks in zip(self._ledgers, wanted) if blocks > ledger.available()]
        if not short:
            return (
                f"{wanted} blocks needed in {[ledger.name for ledger in self._ledgers]} at once; close a sequence first"
            )
        return "; ".join(
            f"{blocks} blocks needed, {ledger.available()} not yet promised, of {ledger.plan.num_blocks} in {ledger.name}: "
            f"{blocks - ledger.available()} more must be freed by running requests"
            for ledger, blocks in short
        )

    def take_back(self, slot: int, lease: Lease) -> None:
        """Give back all that ``slot`` was given, and the slot."""
        self._empty(slot)
        self._reuse.tree.unpin(lease)
        self.free_slots.append(slot)

    def _empty(self, slot: int) -> None:
        for ledger in self._ledgers:
            self._owner.blocks_freed(ledger, ledger.close(slot))

    def _start(self, wish: Wish) -> Start | None:
        """What was suspended, else what tiers offer, else what was found; else, since what would be copied may itself be what
        is in the way, what needs no copy. None, with nothing kept, if none of it can be."""
        if wish.suspended is not None:
            return self._start_from(wish)
        wish, size = self._again(wish), self._reuse.block_size
        offer, found = wish.offer, wish.found
        if offer is not None:
            if offer.begin <= wish.match.num_blocks and offer.end * size > found.resumable:
                start = self._start_from(wish._replace(found=_offered(found, offer.end * size)))
                if start is not None:
                    return start
            wish = self._again(wish._replace(offer=None))  # room was made for what did not come
        start = self._start_from(wish)
        if start is None:
            start = self._start_from(wish._replace(found=self._reuse.without_copies(wish.match, wish.found)))
        return start

    def _again(self, wish: Wish) -> Wish:
        """``wish``, where something was evicted meanwhile: with what is found now."""
        match, found = self._reuse.find_again(wish.match, wish.found)
        return wish if match is wish.match else wish._replace(match=match, found=found)

    def _start_from(self, wish: Wish) -> Start | None:
        slot, wanted, room, match, found, priority, offer, suspended = wish
        reuse, tree = self._reuse, self._reuse.tree
        whole, rest = divmod(found.resumable, reuse.block_size)
        if offer is not None:
            whole = min(whole, match.num_blocks)
        lease = tree.pin(match, whole)
        beyond = tree.pin_partial(match) if rest else None
        if whole:
            tree.touch(lease, priority=priority)
            if reuse.full is not None:
                reuse.full.adopt(slot, match.ids[0, :whole])
        kept, is_promised = found.checkpoint, False
        if kept is not None:
            reuse.keep(kept, 1)
        try:
            is_promised = self.promise(slot, wanted)
            if is_promised and suspended is not None:
                self._swap.restore(slot, suspended, room)
            elif is_promised and offer is not None:
                loaded = self._load(slot, whole, room, found, offer)
                is_promised = loaded is not None
                found = found if loaded is None else loaded
            elif is_promised:
                reuse.restore(slot, found, max(room, found.resumable), beyond)
        except BaseException:  # of the device side: what goes wrong in a tier is a miss already
            self.take_back(slot, lease)
            raise
        finally:
            if kept is not None:
                reuse.keep(kept, -1)
            if beyond is not None:
                tree.unpin(beyond)
        if is_promised:
            return found, lease
        self._empty(slot)
        tree.unpin(lease)
        return None

    def _load(self, slot: int, first: int, room: int, found: PrefixMatch, offer: TierHit) -> PrefixMatch | None:
        """Make room, and load what is offered from block ``first`` on; what ``slot`` can start from then, or None if that is
        no more than without it."""
        full, end, below = self._reuse.full, offer.end, self._below
        assert below is not None
        if full is not None:
            full.grow(slot, full.wanted(slot, max(room, found.resumable)))
            lacking = end - first - below.reader.load(offer, full.table.cells[slot, first:end].copy(), first)
            lost = lacking * self._reuse.block_size
            if lacking and (self._reuse.bounded or found.loaded <= lost):
                return None
            found = found._replace(resumable=found.resumable - lost, loaded=found.loaded - lost)
        self._reuse.restore(slot, found, max(room, found.resumable), None, partial(below.reader.load_checkpoint, offer))
        return found


def _offered(found: PrefixMatch, there: int) -> PrefixMatch:
    """``found``, where the first ``there`` tokens, and what goes on from them needs, are there too."""
    groups = {name: max(tokens, there) for name, tokens in found.groups.items()}
    known = max(found.num_tokens, there)
    limited_by = "nothing" if known == there else found.limited_by
    return PrefixMatch(known, there, limited_by, groups, None, there - found.resumable)
