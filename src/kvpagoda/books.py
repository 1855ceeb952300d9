"""The books of a cache: admission, room and ownership for every layer kind, with no memory behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpagoda.alloc import FreeList
from kvpagoda.errors import BadInput, CheckFailed, NeverFits, RetryLater, StaleHandle
from kvpagoda.ledger import GroupLedger
from kvpagoda.schema import Plan
from kvpagoda.sequence import Sequence, Tokens, as_tokens
from kvpagoda.units import ceil_div, format_bytes

DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True)
class GroupStats:
    """Blocks of one group: free + held = total; ``promised`` of the free ones are set aside for running requests."""

    name: str
    total: int
    free: int
    held: int
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
    """Who may hold what of a plan: request slots, and one ledger for every growth law. numpy only.

    ``max_context``: the longest request in tokens (default: what fits, at most the model's own limit). A cache with
    memory derives from this and overrides the three hooks ``slot_opened``, ``sequence_freed`` and ``sequence_closed``.
    """

    def __init__(self, plan: Plan, vocab_size: int | None = None, max_context: int | None = None) -> None:
        self.plan, self.block_size, self.budget = plan, plan.block_size, plan.budget
        self.vocab_size, self.max_requests = vocab_size, plan.max_requests
        limits = [limit for limit in (plan.longest_context, plan.max_positions, max_context) if limit is not None]
        self.max_context = min(limits, default=DEFAULT_CONTEXT)
        columns = ceil_div(self.max_context, plan.block_size)
        self.ledgers = tuple(GroupLedger(group, plan.max_requests, columns) for group in plan.groups)
        self._slots = FreeList(plan.max_requests, what="request slots")
        self._running: dict[int, Sequence] = {}
        self._is_open = True
        self.num_opened = self.num_closed = self._computed = 0
        self._peaks = {ledger.name: 0 for ledger in self.ledgers}

    # -- the life of a request ---------------------------------------------------------------------------------------

    def open(self, token_ids: Any, *, room: int | None = None, reserve: int | None = None) -> Sequence:
        """Admit a request with this prompt: a slot, a clean state row, and room for its first ``room`` tokens.

        ``token_ids``: at least one int, or an int32 array. ``room``: default the whole prompt; give the chunk size when
        the prompt is computed in chunks. ``reserve``: tokens that the request may come to hold (default the prompt):
        blocks for them are promised to it, so that it never waits for others once admitted.
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
        for ledger, blocks in zip(self.ledgers, wanted):
            if blocks > ledger.available():
                raise RetryLater(
                    f"{blocks} blocks needed, {ledger.available()} not yet promised, of {ledger.plan.num_blocks} in "
                    f"{ledger.name}; {blocks - ledger.available()} more must be freed by running requests"
                )
        slot = int(self._slots.acquire(1)[0])
        self.slot_opened(slot)
        for ledger, blocks in zip(self.ledgers, wanted):
            ledger.promise(slot, blocks)
            ledger.grow(slot, ledger.wanted(slot, room))
        sequence = self._running[slot] = Sequence(self, slot, prompt)
        self.num_opened += 1
        return sequence

    def check_fits(self, num_tokens: int, *, room: int = 0) -> list[int]:
        """Whether a request of ``num_tokens`` tokens, ``room`` of them written at once, fits the empty cache.

        Returns the blocks it may come to hold in each group. Raises NeverFits with what it would need.
        """
        if num_tokens > self.max_context:
            hint = self._sizes(num_tokens)
            raise NeverFits(f"{num_tokens} tokens are more than the longest context of {self.max_context}; {hint}")
        return [self._wanted_blocks(ledger, room, num_tokens) for ledger in self.ledgers]

    # -- hooks: called by this class and by its sequences ----------------------------------------------------------

    def slot_opened(self, slot: int) -> None:
        """A request was admitted to ``slot``; nothing of the slot's former request may be left in it."""

    def sequence_freed(self, ledger: GroupLedger, ids: Tokens) -> None:
        """Blocks ``ids`` of ``ledger`` were given back."""
        held = ledger.free.num_ids - ledger.free.num_free + len(ids)
        self._peaks[ledger.name] = max(self._peaks[ledger.name], held)

    def sequence_closed(self, slot: int, length: int) -> None:
        """A sequence ended with ``length`` tokens: its slot is free again."""
        del self._running[slot]
        self._slots.release_id(slot)
        self.num_closed += 1
        self._computed += length

    # -- proof and figures -------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters; cheap enough for every step."""
        groups = []
        for ledger in self.ledgers:
            held = ledger.free.num_ids - ledger.free.num_free
            peak = self._peaks[ledger.name] = max(self._peaks[ledger.name], held)
            groups.append(
                GroupStats(ledger.plan.name, ledger.free.num_ids, ledger.free.num_free, held, ledger.claimed, peak)
            )
        computed = self._computed + sum(sequence.length for sequence in self._running.values())
        return CacheStats(
            running=len(self._running),
            max_requests=self.max_requests,
            opened=self.num_opened,
            closed=self.num_closed,
            computed_tokens=computed,
            cached_tokens=0,
            nbytes=self.plan.nbytes,
            groups=tuple(groups),
        )

    def check(self) -> None:
        """Prove from scratch that every block and slot is in exactly one place. Raises CheckFailed with the ids."""
        self._slots.check()
        if sorted(self._running) != self._slots.held_ids().tolist():
            raise CheckFailed(f"slots {sorted(self._running)} run, {self._slots.held_ids().tolist()} are held")
        for ledger in self.ledgers:
            ledger.check()
            idle = [slot for slot in np.flatnonzero(ledger.end).tolist() if slot not in self._running]
            short = [
                slot
                for slot, sequence in self._running.items()
                if ledger.first[slot] * ledger.block_size > ledger.growth.first_needed(sequence.length)
                or ledger.end[slot] * ledger.block_size < sequence.length
            ]
            if idle or short:
                raise CheckFailed(f"{ledger.name}: slots {idle} hold blocks but do not run; {short} lack blocks")

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
