"""The books of a cache: admission, room and ownership for every layer kind, with no memory behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpagoda.alloc import FreeList
from kvpagoda.alloc.held import Ids
from kvpagoda.errors import BadInput, CheckFailed, NeverFits, RetryLater, StaleHandle
from kvpagoda.ledger import GroupLedger
from kvpagoda.prefix import Lease, Match
from kvpagoda.reuse import PrefixMatch, Reuse
from kvpagoda.schema import Plan
from kvpagoda.sequence import Sequence, as_tokens
from kvpagoda.units import ceil_div, format_bytes

DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True)
class GroupStats:
    """Blocks of one group: free + held = total; ``spare`` of the held ones would be given up for a running request, and
    ``promised`` of the free and spare ones are set aside."""

    name: str
    total: int
    free: int
    held: int
    spare: int
    promised: int
    peak_held: int


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made."""

    running: int
    max_requests: int
    opened: int
    closed: int
    computed_tokens: int
    """Tokens committed: prompt and output tokens that went through the model."""
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    nbytes: int
    groups: tuple[GroupStats, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)


class Books:
    """Who may hold what of a plan: request slots, one ledger for every growth law, and what is kept for reuse. numpy only.

    ``max_context``: the longest request in tokens (default: what fits, at most the model's own limit).
    ``checkpoint_every``: also keep a checkpoint every so many blocks, not only at the ends of prompts and outputs and
    where texts were seen to part. A cache with memory derives from this and overrides the hooks.
    """

    def __init__(
        self, plan: Plan, vocab_size: int | None = None, max_context: int | None = None, checkpoint_every: int = 0
    ) -> None:
        self.plan, self.block_size, self.budget = plan, plan.block_size, plan.budget
        self.vocab_size, self.max_requests = vocab_size, plan.max_requests
        limits = [limit for limit in (plan.longest_context, plan.max_positions, max_context) if limit is not None]
        self.max_context = min(limits, default=DEFAULT_CONTEXT)
        columns = ceil_div(self.max_context, plan.block_size)
        self.ledgers = tuple(GroupLedger(group, plan.max_requests, columns) for group in plan.groups)
        self.reuse = Reuse(
            self.ledgers,
            plan.block_size,
            has_state=plan.state_nbytes > 0,
            rows=FreeList(plan.num_checkpoints, first=plan.max_requests, what="checkpoints"),
            most_unbacked=8 * columns,
            memory=self,
        )
        self._every = checkpoint_every * plan.block_size
        self._slots = FreeList(plan.max_requests, what="request slots")
        self._running: dict[int, Sequence] = {}
        self._is_open = True
        self.num_opened = self.num_closed = self._computed = self._cached = 0
        self._peaks = {ledger.name: 0 for ledger in self.ledgers}

    # -- the life of a request ---------------------------------------------------------------------------------------

    def open(
        self,
        token_ids: Any,
        namespace: str | bytes | None = None,
        *,
        room: int | None = None,
        reserve: int | None = None,
    ) -> Sequence:
        """Admit a request with this prompt: a slot, everything cached that it can start from, and room to go on.

        ``token_ids``: at least one int, or an int32 array. ``namespace``: only requests of one namespace share anything.
        ``room``: make room for so many first tokens (default the whole prompt; give 0 or a chunk when the prompt is
        computed in chunks). ``reserve``: tokens that the request may come to hold (default the prompt): blocks for them
        are promised to it, so that it never waits for others once admitted.
        Raises BadInput, NeverFits (larger than the whole cache), RetryLater (fits, but not now). Nothing is kept then.
        """
        if not self._is_open:
            raise StaleHandle("this cache is closed")
        prompt = as_tokens(token_ids, self.vocab_size).copy()
        room = len(prompt) if room is None else room
        total = max(len(prompt), room if reserve is None else reserve)
        if len(prompt) == 0 or room < 0:
            raise BadInput(f"a request needs at least one token and room >= 0, got {len(prompt)} tokens, room {room}")
        wanted = self.check_fits(total, room=room)
        if not self._slots.num_free:
            raise RetryLater(f"all {self.max_requests} request slots are in use; close one, or raise max_requests")
        space = namespace_key(namespace)
        match, found = self.reuse.find(prompt, space)
        lease = self._pin_with_room(wanted, match, found)
        if lease is None:  # the checkpoint itself may be what is in the way
            found = PrefixMatch(found.num_tokens, 0, "memory")
            lease = self._pin_with_room(wanted, match, found)
        if lease is None:
            raise RetryLater(self._shortage(wanted))
        slot = int(self._slots.acquire(1)[0])
        self.slot_opened(slot)
        for ledger, blocks in zip(self.ledgers, wanted):
            ledger.promise(slot, blocks)
        self.reuse.tree.touch(lease)
        self.reuse.restore(slot, found, match)
        for ledger in self.ledgers:
            ledger.grow(slot, ledger.wanted(slot, room))
        sequence = self._running[slot] = Sequence(self, slot, prompt, space, found, lease)
        self.num_opened += 1
        self._cached += found.resumable
        return sequence

    def _pin_with_room(self, wanted: list[int], match: Match, found: PrefixMatch) -> Lease | None:
        """Pin what a request starts from; None, with nothing pinned, if the promises to it could not be kept."""
        columns = found.resumable // self.block_size
        lease = self.reuse.tree.pin(match, columns)
        for ledger, blocks in zip(self.ledgers, wanted):
            new = blocks - (columns if ledger is self.reuse.full else 0)
            if new > ledger.available() - self.reuse.in_use(ledger, found):
                self.reuse.tree.unpin(lease)
                return None
        return lease

    def _shortage(self, wanted: list[int]) -> str:
        """Which group lacks how many blocks, and how they could become free."""
        short = [(ledger, blocks) for ledger, blocks in zip(self.ledgers, wanted) if blocks > ledger.available()]
        return "; ".join(
            f"{blocks} blocks needed, {ledger.available()} not yet promised, of {ledger.plan.num_blocks} in {ledger.name}: "
            f"{blocks - ledger.available()} more must be freed by running requests"
            for ledger, blocks in short
        )

    def next_checkpoint(self, sequence: Sequence) -> int | None:
        """The next position at which a step of ``sequence`` should end, so that a checkpoint can be kept there; None
        where it does not matter. Inside the prompt only: single tokens pass every boundary anyway."""
        if not self.reuse.needs_checkpoint:
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
        if num_tokens > self.max_context:
            hint = self._sizes(num_tokens)
            raise NeverFits(f"{num_tokens} tokens are more than the longest context of {self.max_context}; {hint}")
        return [self._wanted_blocks(ledger, room, num_tokens) for ledger in self.ledgers]

    # -- called by sequences -----------------------------------------------------------------------------------------

    def sequence_committed(self, sequence: Sequence) -> None:
        """More tokens of ``sequence`` are written: publish whole blocks, let windows slide, keep a checkpoint if due."""
        slot, length = sequence.slot, sequence.length
        self.reuse.publish(slot, sequence.lease, sequence.tokens)
        for ledger in self.ledgers:
            self.blocks_freed(ledger, ledger.slide(slot, length))
        if length % self.block_size or not self.reuse.needs_checkpoint:
            return
        in_prompt = length < sequence.prompt_length
        due = (self._prompt_end(sequence), sequence.match.num_tokens // self.block_size * self.block_size)
        if in_prompt and length not in due and (not self._every or length % self._every):
            return
        saved = self.reuse.save(slot, sequence.lease, length)
        if saved is not None and not in_prompt:
            self.reuse.drop(*sequence.last_checkpoint)  # of an output only the newest is worth its place
            sequence.last_checkpoint = saved

    def sequence_forked(self, sequence: Sequence, reserve: int) -> Sequence:
        """A new sequence with the tokens of ``sequence``; see ``Sequence.fork``."""
        tokens, length, parent = sequence.tokens.copy(), sequence.length, sequence.slot
        columns = ceil_div(length, self.block_size)
        wanted = self.check_fits(reserve)
        found = PrefixMatch(length, length, "nothing")
        if not self._slots.num_free:
            raise RetryLater(f"all {self.max_requests} request slots are in use; close one, or raise max_requests")
        shared = sequence.lease.num_blocks
        for ledger, blocks in zip(self.ledgers, wanted):
            new = max(blocks, columns - int(ledger.first[parent])) - (shared if ledger is self.reuse.full else 0)
            if new > ledger.available():
                raise RetryLater(f"{new} blocks needed to fork, {ledger.available()} available in {ledger.name}")
        lease = self.reuse.tree.pin(sequence.lease)
        slot = int(self._slots.acquire(1)[0])
        self.slot_opened(slot)
        for ledger, blocks in zip(self.ledgers, wanted):
            ledger.promise(slot, blocks)
            self.reuse.duplicate(ledger, parent, slot, columns)
        self.copy_state(parent, slot)
        child = self._running[slot] = Sequence(self, slot, tokens, sequence.namespace, found, lease)
        self.num_opened += 1
        return child

    def sequence_rewound(self, sequence: Sequence, length: int) -> None:
        """Everything of ``sequence`` goes back to ``length`` tokens; see ``Sequence.rewind``."""
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
            first = ledger.growth.first_needed(length) // self.block_size
            if first < ledger.first[slot]:
                furthest = int(ledger.first[slot]) * self.block_size
                raise BadInput(f"{ledger.name} no longer keeps positions before {furthest}; {length} tokens need them")
        sequence.lease = self.reuse.unshare(slot, sequence.lease, length)
        sequence.written = written

    def sequence_closed(self, sequence: Sequence) -> None:
        """``sequence`` ended: its private blocks and its slot are free; what it published stays, unpinned."""
        slot = sequence.slot
        for ledger in self.ledgers:
            self.blocks_freed(ledger, ledger.close(slot))
        self.reuse.tree.unpin(sequence.lease)
        del self._running[slot]
        self._slots.release_id(slot)
        self.num_closed += 1
        self._computed += sequence.length - sequence.cached_tokens
        self.state_freed(slot)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def slot_opened(self, slot: int) -> None:
        """A request was admitted to ``slot``; nothing of the slot's former request may be left in it."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy state row ``source`` to ``target``: slots and checkpoint rows are rows of one arena."""

    def copy_blocks(self, ledger: GroupLedger, sources: Ids, targets: Ids) -> None:
        """Copy blocks of one group."""

    def state_freed(self, row: int) -> None:
        """Nobody holds state row ``row`` any more."""

    def blocks_freed(self, ledger: GroupLedger, ids: Ids) -> None:
        """Nobody holds blocks ``ids`` of ``ledger`` any more."""
        held = ledger.free.num_ids - ledger.free.num_free + len(ids)
        self._peaks[ledger.name] = max(self._peaks[ledger.name], held)

    # -- proof and figures -------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters; cheap enough for every step."""
        groups = []
        for ledger in self.ledgers:
            held = ledger.free.num_ids - ledger.free.num_free
            peak = self._peaks[ledger.name] = max(self._peaks[ledger.name], held)
            groups.append(
                GroupStats(
                    ledger.plan.name,
                    ledger.free.num_ids,
                    ledger.free.num_free,
                    held,
                    ledger.spare(),
                    ledger.claimed,
                    peak,
                )
            )
        computed = self._computed + sum(sequence.length - sequence.cached_tokens for sequence in self._running.values())
        return CacheStats(
            running=len(self._running),
            max_requests=self.max_requests,
            opened=self.num_opened,
            closed=self.num_closed,
            computed_tokens=computed,
            cached_tokens=self._cached,
            nbytes=self.plan.nbytes,
            groups=tuple(groups),
        )

    def check(self) -> None:
        """Prove from scratch that every block and slot is in exactly one place. Raises CheckFailed with the ids."""
        self._slots.check()
        if sorted(self._running) != self._slots.held_ids().tolist():
            raise CheckFailed(f"slots {sorted(self._running)} run, {self._slots.held_ids().tolist()} are held")
        self.reuse.check()
        for ledger in self.ledgers:
            ledger.check(self.reuse.owned_ids(ledger))
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
        """Forget everything that is kept for reuse: after new weights, say. Raises RetryLater while a request runs."""
        self.reuse.clear()

    def close(self) -> None:
        """Close every running sequence; the cache takes no more requests. The memory goes with the object."""
        for sequence in list(self._running.values()):
            sequence.close()
        self._is_open = False

    def _wanted_blocks(self, ledger: GroupLedger, room: int, total: int) -> int:
        """Blocks to promise for ``total`` tokens of which ``room`` are written at once. Raises NeverFits."""
        first = ceil_div(room, ledger.block_size)
        blocks = max(first, ledger.plan.blocks_for(total))
        if blocks > ledger.plan.num_blocks:
            chunked = ledger.plan.blocks_for(total) <= ledger.plan.num_blocks
            hint = "open it with a smaller room and extend chunk by chunk" if chunked else self._sizes(total)
            raise NeverFits(
                f"{total} tokens need {blocks} blocks of {ledger.name}, which has {ledger.plan.num_blocks}; {hint}"
            )
        return blocks

    def _sizes(self, num_tokens: int) -> str:
        """How many bytes a request of that length takes, as the end of an error."""
        need = sum(
            (ledger.plan.blocks_for(num_tokens) + 1) * ledger.plan.demand.layout.nbytes for ledger in self.ledgers
        )
        need += self.plan.num_states * self.plan.state_nbytes
        return f"a budget of at least {format_bytes(need)} would hold it (now {format_bytes(self.budget)})"


def namespace_key(namespace: str | bytes | None) -> bytes:
    """A namespace as bytes, differently for each kind so that none is taken for another. Raises BadInput."""
    if namespace is None:
        return b""
    if isinstance(namespace, str):
        return b"s" + namespace.encode()
    if isinstance(namespace, bytes):
        return b"b" + namespace
    raise BadInput(f"a namespace is text, bytes or None, got {namespace!r}")
