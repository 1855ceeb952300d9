"""Promises: texts that are kept until a time, unless a running request needs their memory.

A promise is a pin of the prefix cache that has an end and a priority; running requests come first, and then pins of
higher priority.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvpagoda.arrays import Ids
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.lookup import PrefixReuse
from kvpagoda.core.cache.outcome import Outcome
from kvpagoda.core.cache.prefix_cache import Pin
from kvpagoda.errors import OutOfBlocks
from kvpagoda.hints.options import HintLimits


@dataclass(eq=False)
class Promise:
    """A pin, and the ``outcome`` by which it was granted. ``tenant``: the namespace. ``session``: whose text it is."""

    pin: Pin
    outcome: Outcome
    tenant: bytes
    session: str | None
    ends_as: str | None = None


class Promises:
    """The promises of one cache, and when they end. ``clock``: seconds, by which they expire. ``tell``: is told how each
    promise ended."""

    def __init__(
        self,
        core: Core,
        reuse: PrefixReuse,
        limits: HintLimits,
        clock: Callable[[], float],
        tell: Callable[[Outcome], None],
    ) -> None:
        self._core, self._reuse, self._limits, self._clock, self._tell = core, reuse, limits, clock, tell
        self._ended: deque[Pin] = deque()
        self._held: dict[int, Promise] = {}  # by the number of the pin
        self._by_end: list[tuple[float, int]] = []  # a heap: end, number of the pin; some have ended
        self._of_tenant: Counter[bytes] = Counter()  # blocks
        self._num_of_tenant: Counter[bytes] = Counter()  # promises

    def __len__(self) -> int:
        return len(self._held)

    def grant(
        self,
        asked: Outcome,
        keys: Ids,
        namespace: bytes,
        priority: int,
        seconds: float | None,
        session: str | None = None,
    ) -> Outcome:
        """Promise to keep what is cached of the text ``keys``, as much as there is room for; return what was granted.

        ``seconds``: None: until it is released."""
        self.collect()
        core, size = self._core, self._core.block_size
        wanted = len(keys)
        match = core.prefix.tree.match(keys, namespace)
        found = core.prefix.found(match)[1] if core.prefix.bounded else None
        n = match.num_blocks if found is None else found.resumable // size
        if not n:
            return asked.now("missing", "nothing of this text is cached that a request could start from", wanted=wanted)
        num_held, num_own = len(self._held), self._num_of_tenant[namespace]
        if num_held >= self._limits.promises or num_own >= int(self._limits.tenant_share * self._limits.promises):
            reason = f"{num_held} promises are held, {num_own} for this namespace, as many as may be"
            return asked.now("rejected", reason, wanted=wanted)
        room = self._room(n, namespace, priority)
        if room <= 0:
            held, most = core.prefix.num_pinned, core.prefix.most_pinned
            reason = f"{held} blocks of {most} are promised or pinned, {self._of_tenant[namespace]} for this namespace"
            return asked.now("rejected", reason, wanted=wanted)
        if room < match.num_blocks:
            match = core.prefix.tree.match(keys[: min(n, room) * size], namespace)
        try:
            pin = self._reuse.pin_match(match, priority, self._ended)
        except OutOfBlocks as error:
            return asked.now("rejected", str(error), wanted=wanted)
        until, is_short = None, False
        if seconds is not None:
            is_short = seconds > self._limits.seconds
            until = self._clock() + min(seconds, self._limits.seconds)
        kept = pin.num_blocks * size
        is_clipped = is_short or pin.num_blocks < wanted // size
        reason = ""
        if is_clipped:
            reason = f"{kept} of {wanted} tokens" + (f", at most {self._limits.seconds} seconds" if is_short else "")
        outcome = asked.now(
            "clipped" if is_clipped else "accepted",
            reason,
            wanted=wanted,
            tokens=kept,
            nbytes=self._nbytes(pin),
            until=until,
        )
        self._held[pin.number] = Promise(pin, outcome, namespace, session)
        self._of_tenant[namespace] += pin.num_blocks
        self._num_of_tenant[namespace] += 1
        if until is not None:
            heappush(self._by_end, (until, pin.number))
            if len(self._by_end) > 2 * len(self._held) + 1024:
                self._by_end = [entry for entry in self._by_end if entry[1] in self._held]
                heapify(self._by_end)
        return outcome

    def expire(self) -> None:
        """End the promises whose time is over. O(log promises) for each; O(1) if there is none."""
        now, ends = None, self._by_end
        while ends and ends[0][0] <= (now := self._clock() if now is None else now):
            promise = self._held.get(heappop(ends)[1])
            if promise is not None:
                self.end(promise, "expired")
            ends = self._by_end

    def end(self, promise: Promise, status: str) -> None:
        """End ``promise``, and tell why."""
        promise.ends_as = status
        self._reuse.unpin(promise.pin)
        self.collect()

    def release(self, wanted: Callable[[Promise], bool], status: str = "released") -> list[Promise]:
        """End the promises that are ``wanted``, and return them. O(promises)."""
        self.collect()
        found = [promise for promise in self._held.values() if wanted(promise)]
        for promise in found:
            self.end(promise, status)
        return found

    def collect(self, status: str = "taken") -> None:
        """Tell which promises ended since the last call: those that others ended, as ``status``."""
        while self._ended:
            promise = self._held.pop(self._ended.popleft().number, None)
            if promise is not None:
                self._of_tenant[promise.tenant] -= promise.pin.num_blocks
                self._num_of_tenant[promise.tenant] -= 1
                if not self._num_of_tenant[promise.tenant]:
                    del self._of_tenant[promise.tenant], self._num_of_tenant[promise.tenant]
                self._tell(promise.outcome.now(promise.ends_as or status))

    def _room(self, wanted: int, tenant: bytes, priority: int) -> int:
        """Return how many of ``wanted`` blocks may be promised to ``tenant`` with ``priority``, after ending promises of
        lower priority where that helps. O(promises) where only those of the tenant do."""
        prefix, limits = self._core.prefix, self._limits
        most = int(limits.tenant_share * prefix.most_pinned)
        if limits.tenant_tokens is not None:
            most = min(most, limits.tenant_tokens // self._core.block_size)
        while True:
            room = prefix.most_pinned - prefix.num_pinned
            of_tenant = most - self._of_tenant[tenant]
            if min(room, of_tenant) >= wanted:
                return wanted
            lowest = prefix.next_pin()
            promise = None if lowest is None else self._held.get(lowest.number)
            if of_tenant < room:
                own = (one for one in self._held.values() if one.tenant == tenant)
                promise = min(own, key=lambda one: one.pin.priority, default=None)
            if promise is None or promise.pin.priority >= priority:
                return max(0, min(room, of_tenant))
            self.end(promise, "taken")

    def _nbytes(self, pin: Pin) -> int:
        """Return the bytes of the blocks, windows and states that ``pin`` keeps."""
        core, holding = self._core, pin.holding
        nbytes = 0 if core.full is None else pin.num_blocks * core.full.plan.row_nbytes
        nbytes += sum(len(names) * group.plan.row_nbytes for group, names in zip(core.prefix.windows, holding.windows))
        if holding.checkpoint is not None and core.prefix.states is not None:
            nbytes += core.prefix.states.plan.row_nbytes
        return nbytes
