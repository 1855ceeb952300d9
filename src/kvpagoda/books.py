"""The books of a cache: admission, room and ownership for every layer kind, with no memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager, nullcontext, suppress
from time import monotonic
from typing import Any

import numpy as np

from kvpagoda.admission import Admission, Wish
from kvpagoda.below import Below
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks, RetryLater, StaleHandle
from kvpagoda.finding import Offer, Part, Prefetch
from kvpagoda.memory.pages import Bytes, pages
from kvpagoda.namespace import Media, Namespace, Namespaces, with_stand_ins
from kvpagoda.prefix import EvictionPolicy, Lease, Match
from kvpagoda.reuse import Pin, PrefixMatch, Reuse
from kvpagoda.schema import Plan
from kvpagoda.sectors import Sectors
from kvpagoda.sequence import Sequence, as_tokens
from kvpagoda.stats import CacheStats, GroupStats
from kvpagoda.swap import Suspended, Swap
from kvpagoda.tiers.level import Identity
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.units import ceil_div, format_bytes, parse_bytes

DEFAULT_CONTEXT = 131_072


class Books:
    """Who may hold what of a plan: request slots, one ledger for every growth law, and what is kept for reuse. numpy only.

    ``max_context``: the longest request in tokens (default: what fits, at most the model's own limit).
    ``checkpoint_every``: also keep a checkpoint every so many blocks, not only at the ends of prompts and outputs and
    where texts were seen to part. ``policy``: which cached block goes first (``kvpagoda.prefix.POLICY_NAMES``, or an
    ``EvictionPolicy`` object of this cache alone).
    ``pin_share``: the share of the cache's blocks that ``pin`` may keep. ``fingerprint``: of the schema and its formats.
    ``swap``: bytes of host memory for what is suspended (default: as many as the plan takes), asked for when first needed.

    ``tiers``: where blocks and checkpoints go below the device, the fastest first (``kvpagoda.tiers.host_tier`` and others).
    What others can read, or who starts after this process, takes for its own only what has the same ``weights``: a digest of
    them, ``rank`` of ``num_ranks`` parallel parts, and ``tier_secret`` (at most 64 bytes), without which no key tells of a
    text.
    A cache with memory derives from this and overrides the hooks.
    """

    def __init__(
        self,
        plan: Plan,
        vocab_size: int | None = None,
        max_context: int | None = None,
        checkpoint_every: int = 0,
        *,
        policy: str | EvictionPolicy = "lru",
        pin_share: float = 0.5,
        fingerprint: str = "",
        swap: int | str | None = None,
        tiers: Many[TierSpec] = (),
        weights: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        tier_secret: bytes = b"",
    ) -> None:
        if not 0 <= pin_share <= 1:
            raise BadInput(f"pin_share is a share of the cache, 0 to 1, got {pin_share}")
        self.plan, self.block_size, self.budget = plan, plan.block_size, plan.budget
        self.vocab_size, self.max_requests = vocab_size, plan.max_requests
        limits = [limit for limit in (plan.longest_context, plan.max_positions, max_context) if limit is not None]
        self.max_context = min(limits, default=DEFAULT_CONTEXT)
        columns = ceil_div(self.max_context, plan.block_size)
        self.ledgers = tuple(
            BlockGroup(group, plan.max_requests, 1 if group.demand.growth.is_state else columns)
            for group in plan.groups
        )
        self.reuse = Reuse(
            self.ledgers,
            plan.block_size,
            policy=policy,
            num_checkpoints=plan.num_checkpoints,
            most_unbacked=8 * columns,
            pin_share=pin_share,
            memory=self,
        )
        self.swap = Swap(_swap_nbytes(plan, swap), self.ledgers, memory=self)
        self._suspended: dict[Sequence, Suspended] = {}
        self.sectors = Sectors(plan.num_sectors, self.ledgers, mover=self) if plan.num_sectors else None
        self._every = checkpoint_every * plan.block_size
        self._running: dict[int, Sequence] = {}
        identity = Identity(weights, fingerprint, plan.block_size, rank, num_ranks)
        self._namespaces, self._media = Namespaces(fingerprint, weights.encode()), Media()
        self._stale: set[bytes] = set()
        self._is_open = True
        self.num_stopped = 0  #: sequences that were closed or suspended
        self.num_opened = self.num_closed = self._computed = self._cached = self._loaded = 0
        self.below: Below | None = None
        if tiers:
            full, bounded = self.reuse.full, self.reuse.bounded
            self.below = Below(tiers, identity, full, bounded, self, self._media.digests, tier_secret)
        self.admission = Admission(self.ledgers, self.reuse, self.swap, self.below, plan.max_requests, self)

    # -- the life of a request ---------------------------------------------------------------------------------------

    def open(
        self,
        token_ids: Any,
        namespace: Namespace | str | bytes | None = None,
        priority: int = 0,
        *,
        room: int | None = None,
        reserve: int | None = None,
        media: Mapping[int, bytes] | None = None,
        prefetch: Prefetch | None = None,
        layerwise: bool = False,
    ) -> Sequence:
        """Admit a request with this prompt: a slot, everything cached that it can start from, and room to go on.

        ``token_ids``: at least one int, or an int32 array. ``namespace``: only requests of one namespace share anything.
        ``priority``: of what it leaves in the cache, for the policies ``priority`` and ``ttl``. ``room``: make room for so
        many first tokens (default the whole prompt; give 0 or a chunk when the prompt is computed in chunks). ``reserve``:
        tokens that the request may come to hold (default the prompt): blocks for them are promised to it, so that it never
        waits for others once admitted. ``media``: offset -> digest (at least 16 bytes) of each image that begins there.
        What tiers have is loaded, if that is expected to be faster than computing it; ``prefetch``, of the same text, is used
        up. ``layerwise``: blocks of a layer may come in when ``batch.layer`` asks for them, as far as staging memory goes.
        Raises BadInput, NeverFits (larger than the whole cache), RetryLater (fits, but not now). Nothing is kept then.
        """
        if not self._is_open:
            raise StaleHandle("this cache is closed")
        prompt = as_tokens(token_ids, self.vocab_size)
        length = len(prompt)
        room = length if room is None else room
        total = max(length, room if reserve is None else reserve)
        if length == 0 or room < 0:
            raise BadInput(f"a request needs at least one token and room >= 0, got {length} tokens, room {room}")
        wanted = self.check_fits(total, room=room)
        space, stand_ins = self._namespaces.key(namespace), self._media.stand_ins(media, length) if media else {}
        slot = self.admission.take_slot()
        tokens = np.empty(total if total <= 2 * length else length, np.int32)
        keys = tokens[:length]
        keys[:] = prompt
        match, found = self.reuse.find(with_stand_ins(keys, 0, stand_ins), space)
        chain: list[bytes] = []
        offer = None
        if self.below is not None:
            chain = self.below.hashes(space, keys, stand_ins)
            offer = self._offer(chain[: (length - 1) // self.block_size + 1], wanted, match, found, prefetch)
        if offer is not None:
            offer.layerwise = layerwise
        with offer if offer is not None else nullcontext():
            found, lease = self.admission.begin(Wish(slot, wanted, room, match, found, priority, offer))
            sequence = self._running[slot] = Sequence(
                self, slot, tokens, length, found, lease, namespace=space, priority=priority, stand_ins=stand_ins
            )
            self.num_opened += 1
            self._cached += found.resumable
            sequence.chain = chain
            self._begin_below(sequence, slot, lease, found, offer)
        return sequence

    def _offer(
        self, chain: list[bytes], wanted: list[int], match: Match, found: PrefixMatch, prefetch: Prefetch | None = None
    ) -> Offer | None:
        """What tiers have of a text beyond what is cached, if there may be room for the request at all."""
        assert self.below is not None
        if any(blocks > ledger.available() for ledger, blocks in zip(self.ledgers, wanted)):
            return None
        offer = None if prefetch is None else prefetch.take(chain, match.num_blocks)
        return offer or self.below.finder.find(chain, match.num_blocks, found.resumable // self.block_size)

    def _begin_below(
        self, sequence: Sequence, slot: int, lease: Lease, found: PrefixMatch, offer: Offer | None
    ) -> None:
        """What ``sequence`` begins with was loaded: it is cached from now on. Or it was cached: it is in use again."""
        reuse, below = self.reuse, self.below
        if below is None:
            return
        if found.loaded:
            self._loaded += found.loaded
            self._publish(sequence, slot, lease, found.resumable, offer)
            saved = reuse.save(slot, lease, found.resumable) if reuse.bounded else None
            if saved is not None:
                below.checkpoint_saved(sequence, saved, found.resumable)
        elif found.resumable:
            full, name = reuse.full, found.checkpoint
            ids = np.empty(0, np.int32) if full is None else full.table.cells[slot, : lease.num_blocks]
            below.reused(sequence.chain, ids, name, () if name is None else reuse.copies_of(name) or ())

    def prefetch(
        self,
        token_ids: Any,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> Prefetch:
        """Begin to look for this prompt in the tiers, and to read what is there into host memory, while the request waits: for
        ``open(..., prefetch=...)``. At most half the staging memory of a tier is used for it; close what is not used.

        Raises BadInput, also where there are no tiers.
        """
        if self.below is None:
            raise BadInput("this cache has no tiers to prefetch from; give it tiers=[...]")
        tokens = as_tokens(token_ids, self.vocab_size)
        space, stand_ins = self._namespaces.key(namespace), self._media.stand_ins(media, len(tokens))
        match, found = self.reuse.find(with_stand_ins(tokens, 0, stand_ins), space)
        chain = self.below.hashes(space, tokens[: max(0, len(tokens) - 1)], stand_ins)
        return self.below.finder.prefetch(chain, match.num_blocks, found.resumable // self.block_size)

    def next_checkpoint(self, sequence: Sequence) -> int | None:
        """The next position at which a step of ``sequence`` should end, so that a checkpoint can be kept there; None
        where it does not matter. Inside the prompt only: single tokens pass every boundary anyway."""
        if not self.reuse.bounded:
            return None
        due = [
            self._prompt_end(sequence),
            sequence.match.num_tokens // self.block_size * self.block_size,
            (sequence.length // self._every + 1) * self._every if self._every else 0,
        ]
        return min((at for at in due if sequence.length < at < sequence.prompt_length), default=None)

    def _prompt_end(self, sequence: Sequence) -> int:
        """The last boundary from which the same prompt can be resumed with a token left to compute."""
        return (sequence.prompt_length - 1) // self.block_size * self.block_size

    def check_fits(self, num_tokens: int, *, room: int = 0) -> list[int]:
        """Whether a request of ``num_tokens`` tokens, ``room`` of them written at once, fits the empty cache.

        Returns the blocks it may come to hold in each group. Raises NeverFits with what it would need.
        """
        return self.plan.blocks_wanted(num_tokens, room, self.max_context)

    # -- called by sequences -----------------------------------------------------------------------------------------

    def sequence_committed(self, sequence: Sequence) -> None:
        """More tokens of ``sequence`` are written: publish whole blocks, let windows slide, keep a checkpoint if due. While
        a step or a copy of it is in flight all of that waits."""
        if sequence.num_fences:
            sequence.is_settled = False
            return
        reuse, slot, length = self.reuse, sequence.slot, sequence.length
        self._publish(sequence, slot, sequence.lease, length)
        for ledger in reuse.bounded:
            self.blocks_freed(ledger, ledger.slide(slot, length))
        if length % self.block_size or not reuse.bounded:
            return
        in_prompt = length < sequence.prompt_length
        due = (self._prompt_end(sequence), sequence.match.num_tokens // self.block_size * self.block_size)
        if in_prompt and length not in due and (not self._every or length % self._every):
            return
        saved = reuse.save(slot, sequence.lease, length)
        if saved is None:
            return
        if self.below is not None:
            self.below.checkpoint_saved(sequence, saved, length)
        if in_prompt:
            self._store_checkpoint(saved)
        else:
            reuse.drop(sequence.last_checkpoint)  # of an output only the newest is worth its place
            sequence.last_checkpoint = saved

    def _publish(self, sequence: Sequence, slot: int, lease: Lease, length: int, source: Offer | None = None) -> None:
        """Make the whole blocks of the first ``length`` tokens of ``sequence`` shareable, here and below."""
        begin, full = lease.num_blocks, self.reuse.full
        self.reuse.publish(slot, lease, length, sequence)
        if self.below is not None and lease.num_blocks > begin and sequence.namespace not in self._stale:
            ids = np.empty(0, np.int32) if full is None else full.table.cells[slot, : lease.num_blocks]
            self.below.published(sequence, begin, lease.num_blocks, ids, source)

    def _store_checkpoint(self, name: int) -> None:
        """Checkpoint ``name``, if it is still kept, is worth keeping below."""
        if self.below is not None and name >= 0:
            copies = self.reuse.copies_of(name)
            if copies is not None:
                self.below.store_checkpoint(name, copies, "commit")

    def sequence_forked(self, sequence: Sequence, reserve: int) -> Sequence:
        """A new sequence with the tokens of ``sequence``; see ``Sequence.fork``."""
        self._check_settled(sequence, "forked")
        tokens, length, parent = sequence.tokens.copy(), sequence.length, sequence.slot
        wanted = [
            max(blocks, ceil_div(length, ledger.block_size) - int(ledger.first[parent]))
            for ledger, blocks in zip(self.ledgers, self.check_fits(reserve))
        ]
        slot = self.admission.take_slot()
        full = self.reuse.full
        if full is not None:
            full.adopt(slot, full.table.cells[parent, : full.shared[parent]].copy())
        if not self.admission.promise(slot, wanted):
            self.admission.free_slots.append(slot)
            raise RetryLater(self.admission.shortage(wanted))
        lease = self.reuse.tree.pin(sequence.lease)
        with self.reuse.undone_by(lambda: self.admission.take_back(slot, lease)):
            for ledger in self.ledgers:
                self.reuse.duplicate(ledger, parent, slot, length)
        child = self._running[slot] = Sequence(
            self, slot, tokens, length, PrefixMatch(length, length, "nothing"), lease,
            namespace=sequence.namespace, priority=sequence.priority, stand_ins=sequence.stand_ins,
        )  # fmt: skip
        self.num_opened += 1
        return child

    def sequence_rewound(self, sequence: Sequence, length: int) -> None:
        """Everything of ``sequence`` goes back to ``length`` tokens; see ``Sequence.rewind``."""
        self._check_settled(sequence, "rewound")
        slot, written = sequence.slot, max(sequence.written, sequence.length)
        given = sequence.match.resumable
        short = [(layer, label, n) for layer, label, n in self.plan.rewinds if length < max(given, written - n)]
        if short:
            layers = ", ".join(f"layer {layer} ({label}) {n}" for layer, label, n in short[:8])
            raise BadInput(
                f"{sequence.length} tokens go back to {max(given, written - min(n for _, _, n in short))}, not to {length}: "
                f"of {written} tokens written after {given} cached ones, the states of these layers take back only so many: "
                f"{layers}; fork before tokens that may be taken back, or give rings a larger verify_width"
            )
        for ledger in self.ledgers:
            first = ledger.growth.first_needed(length) // ledger.block_size
            if first < ledger.first[slot]:
                furthest = int(ledger.first[slot]) * self.block_size
                raise BadInput(f"{ledger.name} no longer keeps positions before {furthest}; {length} tokens need them")
        sequence.lease = self.reuse.unshare(slot, sequence.lease, length)
        del sequence.chain[length // self.block_size + 1 :]
        sequence.written = written

    def sequence_closed(self, sequence: Sequence) -> None:
        """``sequence`` ended: its private blocks and its slot are free; what it published stays, unpinned. While a step or
        a copy of it is in flight all of that waits."""
        if sequence.num_fences:
            sequence.is_settled = False
            return
        if sequence.is_suspended:
            self.swap.drop(self._suspended.pop(sequence))
        else:
            self._store_checkpoint(sequence.last_checkpoint)
            self._stop(sequence)
        self.num_closed += 1
        self._computed += sequence.length - sequence.cached_tokens
        if sequence.namespace in self._stale:
            self._clear_stale()

    def _stop(self, sequence: Sequence) -> None:
        """``sequence`` runs no more: what it alone holds and its slot are free, the rest is unpinned."""
        slot = sequence.slot
        del self._running[slot]
        self.admission.take_back(slot, sequence.lease)
        self.num_stopped += 1

    def sequence_suspended(self, sequence: Sequence, whole: bool) -> None:
        """``sequence`` goes to host memory; see ``Sequence.suspend``."""
        self._check_settled(sequence, "suspended")
        self._suspended[sequence] = self.swap.put(sequence.slot, sequence.length, sequence.room, whole)
        self._stop(sequence)
        if sequence.namespace in self._stale:
            self._clear_stale()

    def sequence_resumed(
        self, sequence: Sequence, room: int | None, reserve: int | None
    ) -> tuple[int, Lease, PrefixMatch | None]:
        """``sequence`` goes on; see ``Sequence.resume``. Returns its slot, its lease and, unless it is as it was, where it
        starts."""
        suspended, length, namespace = self._suspended[sequence], sequence.length, sequence.namespace
        keys, more = sequence.keys(0, length), max(room or 0, reserve or 0)
        if min(room or 0, reserve or 0) < 0:
            raise BadInput(f"room and reserve are numbers of tokens, got {room} and {reserve}")
        match = self.reuse.tree.match(keys, namespace)
        is_whole = match.num_blocks >= suspended.published
        wanted = [0 if reserve is not None else blocks for blocks in suspended.promised]
        if not is_whole or more > suspended.room:
            least = self.check_fits(max(length, more), room=room or 0)
            wanted = [max(blocks) for blocks in zip(wanted, least)]
        if is_whole:
            room = max(length, suspended.room if room is None else room)
            held = [
                ceil_div(room, ledger.block_size) - part.begin * ledger.growth.is_bounded
                for ledger, part in zip(self.ledgers, suspended.parts)
            ]
            wanted = [max(blocks) for blocks in zip(wanted, held)]
        slot, offer, as_it_was = self.admission.take_slot(), None, suspended if is_whole else None
        if is_whole:
            found = PrefixMatch(match.num_tokens, match.num_blocks * self.block_size, "nothing")
        else:
            match, found = self.reuse.find(keys, namespace)
            if self.below is not None:
                offer = self._offer(self.below.chain(sequence, (length - 1) // self.block_size), wanted, match, found)
        with offer if offer is not None else nullcontext():
            wish = Wish(slot, wanted, room or 0, match, found, sequence.priority, offer, as_it_was)
            found, lease = self.admission.begin(wish)
            self._running[slot] = sequence
            self.swap.drop(self._suspended.pop(sequence))
            if is_whole:
                self._publish(sequence, slot, lease, length)
                return slot, lease, None
            self._computed += length - sequence.cached_tokens
            self._cached += found.resumable
            self._begin_below(sequence, slot, lease, found, offer)
        return slot, lease, found

    def room_wanted(self, ends: Mapping[int, int]) -> None:
        """Make room for the first ``ends[slot]`` tokens of each of these requests, or for none; see ``Sequence.extend``."""
        growing = [(ledger, needs) for ledger in self.ledgers if (needs := ledger.lacking(ends))]
        furthest = max(ends.values())
        raised: list[tuple[BlockGroup, int, int]] = []
        try:
            for ledger, needs in growing:
                for slot, need in needs.items():
                    if need <= ledger.claim(slot):
                        continue
                    if need > ledger.available(slot):
                        raise OutOfBlocks(
                            f"need {need} blocks, {ledger.available(slot)} available ({ledger.free.num_free} free, "
                            f"{ledger.claimed} promised to running requests) of {ledger.plan.num_blocks} in "
                            f"{ledger.name}; close a sequence or raise the budget (now {format_bytes(self.budget)})"
                        )
                    raised.append((ledger, slot, ledger.promised[slot]))
                    ledger.promise(slot, ledger.end[slot] - ledger.first[slot] + need)
            if furthest > self.max_context:
                raise BadInput(f"{furthest} tokens are more than the longest context of {self.max_context}")
            for ledger, needs in growing:
                ledger.grow_each(needs)
        finally:
            for ledger, slot, blocks in raised:
                ledger.promise(slot, blocks)

    def _check_settled(self, sequence: Sequence, what: str) -> None:
        if sequence.num_fences:
            raise RetryLater(
                f"slot {sequence.slot} has {sequence.num_fences} fences and cannot be {what}; lift them first"
            )

    # -- steps and copies in flight ----------------------------------------------------------------------------------

    @contextmanager
    def fence(self, sequences: Iterable[Sequence]) -> Iterator[None]:
        """Inside, nothing that ``sequences`` hold is freed, published or moved, whatever is committed or closed: a step or a
        copy on another stream may still read and write it. What waits is done at the end."""
        fenced = list(sequences)
        for sequence in fenced:
            _ = sequence.slot  # open
            sequence.num_fences += 1
        try:
            yield
        finally:
            for sequence in fenced:
                sequence.num_fences -= 1
                if not sequence.num_fences and not sequence.is_settled:
                    sequence.settle()

    def fixed_ids(self, ledger: BlockGroup) -> Ids:
        """Blocks of ``ledger`` that may not move now: those of fenced sequences."""
        fenced = [slot for slot, sequence in self._running.items() if sequence.num_fences]
        return np.concatenate([np.empty(0, np.int32), *(ledger.held_ids(slot) for slot in fenced)])

    # -- keeping and forgetting --------------------------------------------------------------------------------------

    def pin(
        self,
        token_ids: Any,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> Pin:
        """Keep what is cached of this text, and its last checkpoint: it goes last, when a request could not run otherwise.

        Raises OutOfBlocks beyond the share of the cache that pins may have. ``unpin`` ends it; ``pin.is_held`` tells.
        """
        tokens = as_tokens(token_ids, self.vocab_size)
        stand_ins = self._media.stand_ins(media, len(tokens))
        return self.reuse.pin(with_stand_ins(tokens, 0, stand_ins), self._namespaces.key(namespace))

    def unpin(self, pin: Pin) -> None:
        """End a pin; nothing happens if it was given up already."""
        self.reuse.unpin(pin)

    def invalidate(self, *namespaces: Namespace | str | bytes | None, weights: str | None = None) -> None:
        """From now on nothing is found of what was cached in ``namespaces`` (none given: in all): after an adapter or the
        weights were loaded anew. Requests that run go on; what they leave behind is dropped when they end.

        What is kept below the device from then on is found by this process alone; with ``weights``, a digest of the new
        weights of all namespaces, by all that have the same. A name that outlives the process must not mean two adapters.
        """
        if weights is not None and not isinstance(weights, str):
            raise BadInput(f"weights are text, a digest of them; got {weights!r}")
        if weights is not None and namespaces:
            raise BadInput(f"new weights are those of all namespaces, got {len(namespaces)} of them; give none")
        if namespaces:
            old = self._namespaces.renew(namespaces)
        else:
            epoch = None if weights is None else weights.encode()
            suspended = {sequence.namespace for sequence in self._suspended}
            old = self._namespaces.renew_all({*self.reuse.tree.namespaces(), *suspended}, epoch)
        if weights is not None and self.below is not None:
            self.below.rename(weights)
        self._stale |= old
        self.reuse.give_up_pins(old)
        self._clear_stale()

    def _clear_stale(self) -> None:
        waiting = {sequence.namespace for sequence in self._suspended}  # they go on, and leave something behind again
        for namespace in [*self._stale]:
            with suppress(RetryLater):
                self.reuse.clear(namespace)
                self._stale -= {namespace} - waiting

    # -- moving blocks -----------------------------------------------------------------------------------------------

    def move_blocks(self, ledger: BlockGroup, sources: Ids, targets: Ids) -> None:
        """Blocks ``sources`` of ``ledger`` go to the free places ``targets``; whoever named them names the new places."""
        self.copy_blocks(ledger, sources, targets)
        names = np.arange(ledger.plan.num_rows, dtype=np.int32)
        names[sources] = targets
        ledger.rename(names)
        self.reuse.rename(ledger, names)
        if self.below is not None and ledger is self.reuse.full:
            self.below.renamed(names)

    # -- hooks -------------------------------------------------------------------------------------------------------

    page_offset = 0
    """Where within a page of memory the blocks begin."""

    def copy_blocks(self, ledger: BlockGroup, sources: Ids, targets: Ids) -> None:
        """Copy blocks of one group."""

    def host_memory(self, nbytes: int) -> Bytes:
        """Host memory to copy blocks to and from, page-aligned uint8 ``[nbytes]``, taken from the system as it is touched.
        Raises OutOfBlocks."""
        try:
            return pages(nbytes)
        except (MemoryError, OSError) as error:
            raise OutOfBlocks(
                f"the host has no {format_bytes(nbytes)}; give a smaller swap, or less staging"
            ) from error

    def record_nbytes(self, ledger: BlockGroup) -> int:
        """Bytes of a block of ``ledger`` below the device: few where there is no memory behind it, and nothing is moved."""
        return 64

    def blocks_out(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None:
        """Copy blocks ``ids`` of one group to ``rows`` of ``payloads``, uint8 ``[M, width]`` host memory whose rows may be
        strided, as ``memory.host_copy`` lays them out. Waits until the bytes are there."""

    def blocks_in(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None:
        """Copy back what ``blocks_out`` copied, to blocks ``ids``."""

    def blocks_in_later(self, ledger: BlockGroup, parts: Many[Part], done: Callable[[], None]) -> None:
        """Copy back ``parts``, each as for ``blocks_in`` with rows as wide as a block, a layer when it is asked for; call
        ``done`` when the host memory is not needed any more."""
        for part in parts:
            self.blocks_in(ledger, *part)
        done()

    def sectors_given(self, ledger: BlockGroup, sectors: Ids) -> None:
        """The memory of ``sectors`` is now that of ``ledger``; what another group left there means nothing."""

    def blocks_freed(self, ledger: BlockGroup, ids: Ids) -> None:
        """Nobody holds blocks ``ids`` of ``ledger`` any more."""
        if self.below is not None and ledger is self.reuse.full:
            self.below.freed(ids)

    def evicting(self, ids: Ids, checkpoints: Many[int]) -> None:
        """Cached blocks ``ids`` of the full group and ``checkpoints`` are about to go, to make room."""
        if self.below is not None:
            self.below.evicted(ids)
            for name in checkpoints:
                copies = self.reuse.copies_of(name)
                assert copies is not None
                self.below.store_checkpoint(name, copies, "evict")

    def checkpoint_dropped(self, name: int) -> None:
        """Checkpoint ``name`` is kept no more."""
        if self.below is not None:
            self.below.checkpoint_dropped(name)

    def _num_blocks(self, ledger: BlockGroup) -> int:
        """Blocks that the group has memory for now."""
        if self.sectors is None:
            return ledger.free.num_ids
        return self.sectors.num_owned(ledger) * ledger.plan.per_sector

    # -- proof and figures -------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters; cheap enough for every step."""
        groups = []
        for ledger in self.ledgers:
            groups.append(
                GroupStats(
                    ledger.plan.name,
                    self._num_blocks(ledger),
                    ledger.free.num_free,
                    ledger.num_held,
                    ledger.spare(),
                    ledger.claimed,
                    ledger.peak_held,
                )
            )
        alive = (*self._running.values(), *self._suspended)
        computed = self._computed + sum(sequence.length - sequence.cached_tokens for sequence in alive)
        return CacheStats(
            running=len(self._running),
            max_requests=self.max_requests,
            opened=self.num_opened,
            closed=self.num_closed,
            computed_tokens=computed,
            cached_tokens=self._cached,
            loaded_tokens=self._loaded,
            evicted_blocks=self.reuse.num_evicted_blocks,
            evicted_checkpoints=self.reuse.num_evicted_checkpoints,
            nbytes=self.plan.nbytes,
            suspended=len(self._suspended),
            swap_nbytes=self.swap.used_nbytes,
            swap_capacity=self.swap.nbytes,
            groups=tuple(groups),
            tiers=() if self.below is None else tuple(level.stats() for level in self.below.levels),
        )

    def unusable_nbytes(self) -> int:
        """Bytes that serve nobody and could not serve a group that is in need: free and not promised where no other group
        can have them, and what is lost to carving sectors."""
        nbytes = 0
        for ledger in self.ledgers:
            idle, plan = max(0, ledger.free.num_free - ledger.claimed), ledger.plan
            if self.sectors is not None:
                idle %= plan.per_sector
                nbytes += self._num_blocks(ledger) * (plan.row_nbytes - plan.demand.layout.nbytes)
            nbytes += idle * plan.row_nbytes
        return nbytes

    def check(self) -> None:
        """Prove from scratch that every block and slot is in exactly one place. Raises CheckFailed with the ids."""
        if sorted([*self._running, *self.admission.free_slots]) != list(range(self.max_requests)):
            raise CheckFailed(f"slots {sorted(self._running)} run, {sorted(self.admission.free_slots)} are free")
        self.swap.check(self._suspended.values())
        self.reuse.check()
        if self.below is not None:
            full = self.reuse.full
            owned = np.empty(0, np.int32) if full is None else self.reuse.owned_ids(full)
            self.below.check(owned, self.reuse.checkpoints)
        if self.sectors is not None:
            self.sectors.check()
        for ledger in self.ledgers:
            absent = None if self.sectors is None else self.sectors.absent_ids(ledger)
            ledger.check(self.reuse.owned_ids(ledger), absent)
            idle = [slot for slot in np.flatnonzero(ledger.end).tolist() if slot not in self._running]
            short = [
                slot
                for slot, sequence in self._running.items()
                if ledger.first[slot] * ledger.block_size > ledger.growth.first_needed(sequence.length)
                or ledger.end[slot] * ledger.block_size < sequence.length
            ]
            if idle or short:
                raise CheckFailed(f"{ledger.name}: slots {idle} hold blocks but do not run; {short} lack blocks")

    def reset(self) -> None:
        """Forget everything that is kept for reuse: after new weights, say. Raises RetryLater while a request runs or is
        suspended."""
        if self._suspended:
            raise RetryLater(f"{len(self._suspended)} requests are suspended; resume and end them, or close them first")
        self.reuse.give_up_pins(self.reuse.tree.namespaces())
        self.reuse.clear()
        self._media.clear()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until what was to be stored in tiers is stored, at most ``timeout`` seconds; whether it is."""
        return self.below is None or self.below.flush(monotonic() + timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Close every sequence, running or suspended; the cache takes no more requests. The memory goes with the object. Tiers
        get at most ``timeout`` seconds for what they were to store."""
        for sequence in (*self._running.values(), *self._suspended):
            if sequence.is_open:
                sequence.close()
        if self._is_open and self.below is not None:
            self.flush(timeout)
            self.below.close(monotonic() + timeout)
        self._is_open = False


def _swap_nbytes(plan: Plan, swap: int | str | None) -> int:
    if swap is None:
        return plan.nbytes
    return 0 if swap == 0 else parse_bytes(swap)
