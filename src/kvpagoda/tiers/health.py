"""How the calls of a tier go: counts, durations, faults, and the circuit breakers of failing shards."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from kvpagoda.abc import Driver, Status
from kvpagoda.tiers.driver import FAULTS

BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets, in seconds; one more bucket counts calls that took longer than all bounds."""
KINDS = ("store", "lookup", "load", "discard")  #: of calls
_PROBED = ("lookup", "load")  # kinds of calls that requests wait for: the tier itself tries them again
_MOST_PAUSES = 32
_log = logging.getLogger(__name__)

Outcomes = Mapping[str, tuple[bytes, Status] | None]
"""For each shard that a call asked, the first key that failed and its status; None for a shard that works."""


@dataclass(frozen=True)
class Histogram:
    """Values, such as the durations of calls in seconds, by size.

    Args:
        bounds: ascending.
        counts: ``counts[i]`` values are at most ``bounds[i]`` and more than the bound before; the last count, for which
            there is no bound, is of values above all bounds.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """The number of calls."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the seconds within which a share of the calls were done; None without calls.

        Calls are taken as evenly spread inside a bucket. The result is at most the last bound.

        Args:
            share: 0 to 1.
        """
        below = [0, *accumulate(self.counts)]
        wanted = share * below[-1]
        if not below[-1]:
            return None
        bucket = next(i for i, done in enumerate(below[1:]) if done >= wanted and self.counts[i])
        if bucket == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[bucket - 1] if bucket else 0.0
        return low + (self.bounds[bucket] - low) * (wanted - below[bucket]) / self.counts[bucket]


class Latencies:
    """Counts durations, of calls for example."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a call that took ``seconds``. O(log buckets)."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def picture(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True)
class TierStats:
    """Keys by the status that the caller got.

    Args:
        stores: keys by their status.
        lookups: likewise.
        loads: likewise.
        discards: likewise.
        nbytes_in_flight: bytes of the calls that are not done.
        is_available: whether no call is refused.
        last_error: what the driver raised last, although it must not.
        last_fault: the kind of the last call that failed, and why.
        latencies: for each kind of call, the time from the request to the answer, at most until its deadline, without
            calls that were refused at once.
        unavailable_shards: the parts of the store for whose keys calls are refused, where the driver knows such parts.
    """

    stores: dict[Status, int]
    lookups: dict[Status, int]
    loads: dict[Status, int]
    discards: dict[Status, int]
    nbytes_in_flight: int
    is_available: bool
    last_error: str
    last_fault: str
    latencies: dict[str, Histogram]
    unavailable_shards: tuple[str, ...] = ()


class Breaker:
    """A circuit breaker of one ``shard`` that fails. It opens after ``limit`` faults in a row.

    While it is open, calls are refused and the shard is probed: first ``pause`` seconds after the last fault, then at
    intervals that double up to ``longest`` seconds. The caller passes the times, of ``time.monotonic``, and holds a
    lock.
    """

    def __init__(self, shard: str, limit: int, pause: float, longest: float) -> None:
        self.shard = shard
        self._limit, self._pause, self._longest = limit, pause, longest
        self._faults = 0
        self.next_probe = 0.0  #: time at which the next probe is due while the breaker is open
        self.key = b""  #: a key of the last call that failed
        self.seconds = 0.0  #: the time that this call was given
        self.is_probed = False  #: whether a probe is in progress; the next one waits for its end

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._faults >= self._limit

    def takes_probe(self, now: float) -> bool:
        """Return whether a probe is due ``now``; if so, the caller makes it, and the next probe is due later."""
        if not self.is_open or self.is_probed or now < self.next_probe:
            return False
        self._pause = min(2 * self._pause, self._longest)
        self.next_probe = now + self._pause
        return True

    def fail(self, key: bytes, seconds: float, now: float) -> bool:
        """Record that a call with ``key`` failed, or was late after ``seconds``; return whether this opened the
        breaker."""
        self.key, self.seconds = key, seconds
        self._faults += 1
        self.next_probe = now + self._pause
        return self._faults == self._limit

    def retry_now(self) -> None:
        """Make the next probe due at once: there is a sign that the shard works again."""
        self.next_probe = 0.0


class Breakers:
    """The circuit breakers of one kind of call: one for each shard whose last call failed.

    ``is_probed``: whether the tier itself probes this kind, every ``pause`` seconds. Otherwise calls of users pass as
    probes, and the intervals double up to 32 times ``pause``. The caller holds a lock.
    """

    def __init__(self, limit: int, pause: float, *, is_probed: bool) -> None:
        self._limit, self._pause, self._longest = limit, pause, pause if is_probed else _MOST_PAUSES * pause
        self._failing: dict[str, Breaker] = {}

    @property
    def open_ones(self) -> dict[str, Breaker]:
        """The breakers that are open, by the names of their shards."""
        return {shard: breaker for shard, breaker in self._failing.items() if breaker.is_open}

    def fail(self, shard: str, key: bytes, seconds: float, now: float) -> bool:
        """Record that a call failed; see ``Breaker.fail``."""
        breaker = self._failing.get(shard)
        if breaker is None:
            breaker = self._failing[shard] = Breaker(shard, self._limit, self._pause, self._longest)
        return breaker.fail(key, seconds, now)

    def succeed(self, shard: str) -> bool:
        """Record that a call of ``shard`` succeeded, which closes its breaker; return whether it was open."""
        breaker = self._failing.pop(shard, None)
        return breaker is not None and breaker.is_open

    def retry_now(self, shard: str) -> None:
        """Make the next probe of ``shard`` due at once, if it is failing."""
        if shard in self._failing:
            self._failing[shard].retry_now()


class Health:
    """How the calls of a driver go: which shards fail in which kind of call, why, and how long calls take.

    ``limit`` faults in a row of one kind of call open the breaker of a shard; see ``Breakers`` for ``pause``. The
    caller holds a lock.
    """

    def __init__(self, driver: Driver, limit: int, pause: float) -> None:
        self._driver = driver
        self._shard_of = getattr(driver, "shard_of", None)
        self.breakers = {kind: Breakers(limit, pause, is_probed=kind in _PROBED) for kind in KINDS}
        self._counts: dict[str, Counter[Status]] = {kind: Counter() for kind in KINDS}
        self._latencies = {kind: Latencies() for kind in KINDS}
        self._turned = deque[tuple[str, str]]()  # kind of call that began or stopped failing, and why; to be logged
        self.last_error = ""  #: what the driver raised last, although it must not
        self.last_fault = ""  #: the kind of the last call that failed, and why

    def stats(self, nbytes_in_flight: int, *, is_closed: bool) -> TierStats:
        """Return the counts so far."""
        failing = {shard for breakers in self.breakers.values() for shard in breakers.open_ones}
        stores, lookups, loads, discards = (dict(self._counts[kind]) for kind in KINDS)
        latencies = {kind: latency.picture() for kind, latency in self._latencies.items()}
        return TierStats(
            stores, lookups, loads, discards, nbytes_in_flight, not (is_closed or failing), self.last_error,
            self.last_fault, latencies, tuple(sorted(failing - {""})),
        )  # fmt: skip

    def count(self, kind: str, statuses: Sequence[Status]) -> None:
        """Count the ``statuses`` that the caller of ``kind`` got."""
        self._counts[kind].update(statuses)

    def shard_of(self, key: bytes) -> str:
        """Return the name of the shard that has ``key``; "" where the driver knows none."""
        return "" if self._shard_of is None else self._shard_of(key)

    def allowed(self, kind: str, keys: Sequence[bytes], now: float) -> Sequence[int]:
        """Return the positions of those ``keys`` for which the driver may be asked in a call of ``kind``. O(n)."""
        breakers = self.breakers[kind]
        if not breakers.open_ones:
            return range(len(keys))
        shards = [self.shard_of(key) for key in keys]
        refused = {
            shard
            for shard, breaker in breakers.open_ones.items()
            if shard in shards and (kind in _PROBED or not breaker.takes_probe(now))
        }
        return [i for i, shard in enumerate(shards) if shard not in refused]

    def outcomes(self, keys: Sequence[bytes], statuses: Sequence[Status], probed: Breaker | None = None) -> Outcomes:
        """Return what the ``statuses`` of ``keys`` say about their shards, or about the shard that is ``probed``. O(n)."""
        outcomes: dict[str, tuple[bytes, Status] | None] = {}
        for key, status in zip(keys, statuses):
            shard = self.shard_of(key) if probed is None else probed.shard  # its key may have moved to another one
            if outcomes.get(shard) is None:
                outcomes[shard] = (key, status) if status in FAULTS else None
        return outcomes

    def took(self, kind: str, seconds: float) -> None:
        """Count a call of ``kind`` that took ``seconds``."""
        self._latencies[kind].add(seconds)

    def record(self, kind: str, outcomes: Outcomes, seconds: float, now: float, why: str = "") -> bool:
        """Record the ``outcomes`` of a call that was given ``seconds``; return whether a probe may be due earlier.

        ``why`` it failed: if "", what the driver says.
        """
        is_changed = False
        for shard, fault in outcomes.items():
            if fault is None:
                is_changed |= self._succeed(kind, shard)
                continue
            key, status = fault
            where = _where(kind, shard)
            reason = why or getattr(self._driver, "last_error", "") or status.value
            self.last_fault = f"{where}: {reason}"
            if self.breakers[kind].fail(shard, key, seconds, now):
                self._turned.append((where, self.last_fault))
            is_changed |= shard in self.breakers[kind].open_ones
        return is_changed

    def record_late(self, kind: str, outcomes: Outcomes) -> None:
        """Correct what was recorded at the deadline of a late call, now that its ``outcomes`` are known.

        A shard that answered while another one failed was held up by that one, and works. If all answered, they may
        be well again.
        """
        is_other = any(outcomes.values())
        for shard in [shard for shard, fault in outcomes.items() if fault is None]:
            if is_other:
                self._succeed(kind, shard)
            else:
                self.breakers[kind].retry_now(shard)

    def _succeed(self, kind: str, shard: str) -> bool:
        is_changed = self.breakers[kind].succeed(shard)
        if is_changed:
            for breakers in self.breakers.values():
                breakers.retry_now(shard)  # what works for one kind of call may work for the others
            self._turned.append((_where(kind, shard), ""))
        return is_changed

    def unprobed(self) -> list[tuple[str, Breaker]]:
        """Return the kind of call and the breaker of all that the tier has to probe and does not probe now."""
        return [
            (kind, breaker)
            for kind in _PROBED
            for breaker in self.breakers[kind].open_ones.values()
            if not breaker.is_probed
        ]

    def tell(self, name: str) -> None:
        """Log which calls of the tier ``name`` now fail or work again. Needs no lock: log handlers may be slow."""
        with suppress(IndexError):  # each thread of the tier tells, and another one may have told the last
            while True:
                where, reason = self._turned.popleft()
                if reason:
                    _log.warning("tier %s: no %s for a while; %s", name, where, reason)
                else:
                    _log.info("tier %s: %s works again", name, where)


def _where(kind: str, shard: str) -> str:
    return f"{kind} at {shard}" if shard else kind
