"""Who runs, who waits, and who is preempted when memory runs out. No tensors.

A job is preempted in the mode that is expected to cost least:

    recompute    its sequence is closed. What it committed stays cached until others need the blocks; the job starts again
                 from what is still cached then
    part         what nobody else holds is suspended: the unfinished block, windows and states. What it published stays
                 cached, as in ``recompute``
    swap         all that it holds is suspended, and it goes on where it was

The text so far is kept in each mode, and the tokens that follow are the same.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvpagoda.cache.lookup import keep_where_they_part
from kvpagoda.cache.request import Tokens
from kvpagoda.cache.reuse import AnyNamespace
from kvpagoda.cache.sequence import Sequence, settled
from kvpagoda.cache.swap import Rate
from kvpagoda.cache.tier_hit import Prefetch
from kvpagoda.errors import Exhausted, OutOfBlocks, RetryLater
from kvpagoda.kv_cache import KVCache
from kvpagoda.units import ceil_div

_log = logging.getLogger(__name__)


class PreemptionPolicy(Protocol):
    """Chooses the running request that is preempted when another one needs memory."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        """One of ``candidates``: running sequences that came after the one in need, oldest first, at least one."""
        ...


class Youngest:
    """Preempts the request that came last."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        return candidates[-1]


class LeastComputed:
    """Preempts the request with the fewest tokens computed since it started; of equals the youngest."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        return min(reversed(candidates), key=lambda sequence: sequence.length - sequence.cached_tokens)


class PreemptionMode(Enum):
    """How a sequence is preempted: see the top of this file."""

    RECOMPUTE = "recompute"
    PART = "part"
    SWAP = "swap"


@dataclass(frozen=True)
class Costs:
    """For each mode, the seconds of work expected until a preempted sequence is where it was."""

    recompute: float
    part: float
    swap: float


def cheapest(costs: Costs) -> PreemptionMode:
    """The mode that costs least; of equals the one that moves fewer bytes."""
    return min(PreemptionMode, key=lambda mode: getattr(costs, mode.value))


@dataclass(frozen=True)
class QueueStats:
    """Jobs that wait and that run now; so far preempted, and of these set aside in host memory."""

    waiting: int
    running: int
    preempted: int
    swapped: int


class Job:
    """A text that grows to at most ``total`` tokens: ``prompt``, int32 ``[n]``, and what follows it.

    ``namespace``: only jobs of one namespace share cached blocks. ``media``: see ``KVCache.open``.
    """

    def __init__(self, prompt: Tokens, total: int, namespace: AnyNamespace = None) -> None:
        self._tokens = np.empty(total, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self.total, self.namespace = total, namespace
        self.media: Mapping[int, bytes] = {}
        self.sequence: Sequence | None = None
        """While it runs: its open sequence."""
        self.prefetch: Prefetch | None = None
        """While it waits: what tiers have of its text, being read into host memory."""
        self.suspended: Sequence | None = None
        """While it waits: its suspended sequence, if it was preempted in that way."""
        self.number = -1
        """Its place in the order of arrival."""
        self.num_preempted = 0

    @property
    def text(self) -> Tokens:
        """All tokens so far, computed or not: int32, a view."""
        return self._tokens[: self._length]

    def extend(self, tokens: Many[int]) -> None:
        """The text goes on with ``tokens``."""
        end = self._length + len(tokens)
        self._tokens[self._length : end] = tokens
        self._length = end


J = TypeVar("J", bound=Job)
_by_age = attrgetter("number")


class RunQueue(Generic[J]):
    """Jobs on one cache, admitted in the order of arrival. ``waiting`` and ``running`` are lists, oldest first.

    Without a ``policy`` a job is admitted when blocks for its ``total`` tokens can be reserved, and it is never preempted.
    With one, blocks for its text and one more are reserved; when a job needs more and there are none, the policy chooses
    which younger job is preempted, or the job itself is, if it is the youngest. So the oldest job always runs to its end.
    A job that was preempted starts again when blocks for all of it can be reserved, before any younger one.

    ``choose`` maps the costs of preempting a job to the mode; what does not fit in the cache's ``swap`` is recomputed.
    Until ``took`` was called, computing is taken to cost nothing. A job that begins like a running one waits until that has
    published what they have in common, and shares it. While the oldest job waits, what tiers have of its text is
    read into host memory.

    >>> from kvpagoda import KVCache, Schema
    >>> from kvpagoda.schema import Attention, Layer
    >>> schema = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
    >>> cache = KVCache(schema, num_blocks=4, block_size=2, max_requests=2, device="none")
    >>> queue = RunQueue(cache, Youngest())
    >>> first, second = Job(np.arange(4, dtype=np.int32), 8), Job(np.arange(3, dtype=np.int32), 4)
    >>> queue.enter(first), queue.enter(second), queue.admit()
    (None, None, None)
    >>> queue.make_room(first, 4), queue.running == [first], queue.waiting == [second]
    (True, True, True)
    >>> first.sequence.commit(first.text)
    >>> first.extend([7, 8])
    >>> queue.make_room(first, 2), len(first.text)
    (True, 6)
    >>> queue.remove(first)
    >>> queue.admit()
    >>> queue.running == [second]
    True
    """

    def __init__(
        self,
        cache: KVCache,
        policy: PreemptionPolicy | None = None,
        choose: Callable[[Costs], PreemptionMode] = cheapest,
    ) -> None:
        self.cache, self.policy, self.choose = cache, policy, choose
        self.rate = Rate()
        self.waiting: list[J] = []
        self.running: list[J] = []
        self.num_preempted = self.num_swapped = 0
        self._arrived = 0

    def enter(self, job: J, *forks: J) -> None:
        """Let ``job`` wait for its turn. ``forks`` will be forked from it: they come next in age, and enter by ``fork``."""
        for one in (job, *forks):
            one.number, self._arrived = self._arrived, self._arrived + 1
        self.waiting.append(job)

    def admit(self) -> None:
        """Start those waiting, oldest first, up to the first that does not fit.

        Raises RetryLater if it does not fit and no job runs: somebody else holds the cache, so waiting would not help.
        """
        while self.waiting:
            job = self.waiting[0]
            if self.running and job.suspended is None and self._can_share(job):
                return
            try:
                sequence = self._begin(job)
            except RetryLater:
                if not self.running:
                    raise
                if self.cache.core.offloader is not None and job.prefetch is None and job.suspended is None:
                    job.prefetch = self.cache.prefetch(job.text, job.namespace, media=job.media)
                return
            del self.waiting[0]
            self._start(job, sequence)

    def _can_share(self, job: J) -> bool:
        """Whether a running job is about to publish what ``job`` begins with: it will have that without computing it. Where
        the model has states, the running one keeps a checkpoint for it."""
        cache, text, namespace, media = self.cache, job.text, job.namespace, job.media
        if cache.core.states is not None:
            return keep_where_they_part(cache.core, text, namespace, media)
        return bool(cache.lookup(text, namespace, media=media).pending)

    def fork(self, source: J, job: J) -> None:
        """Start ``job`` with all that ``source``, a running job, has committed; if blocks are lacking, it waits instead."""
        assert source.sequence is not None
        try:
            sequence = source.sequence.fork(reserve=self._reserve(job))
        except RetryLater:
            insort(self.waiting, job, key=_by_age)
        else:
            self._start(job, sequence)

    def make_room(self, job: J, n: int) -> bool:
        """Make room for the next ``n`` tokens of ``job``, which runs; return False if it was preempted itself.

        Raises OutOfBlocks without a policy, or if ``job`` is the only one that runs.
        """
        assert job.sequence is not None
        while True:
            try:
                job.sequence.extend(n)
                return True
            except OutOfBlocks:
                if self.policy is None or len(self.running) == 1:
                    raise
            younger = {one.sequence: one for one in self.running[self.running.index(job) + 1 :] if one.sequence}
            if not younger:
                self.preempt(job)
                return False
            self.preempt(younger[self.policy.victim(list(younger))])

    def preempt(self, job: J, mode: PreemptionMode | None = None) -> None:
        """Close or suspend the sequence of ``job``, which runs, and let it wait again, with its text so far.

        ``mode``: None lets ``choose`` decide.
        """
        sequence = job.sequence
        assert sequence is not None
        mode = self.choose(self.costs(job)) if mode is None else mode
        if mode is not PreemptionMode.RECOMPUTE:
            with suppress(Exhausted):
                sequence.suspend(whole=mode is PreemptionMode.SWAP)
                self.running.remove(job)
                job.sequence, job.suspended = None, sequence
                self.num_swapped += 1
        if job.suspended is None:
            self.remove(job)
        job.num_preempted += 1
        self.num_preempted += 1
        _log.debug("job %d preempted: %s", job.number, "computed again" if job.suspended is None else "set aside")
        insort(self.waiting, job, key=_by_age)

    def costs(self, job: J) -> Costs:
        """What preempting ``job``, which runs, is expected to cost in each mode. O(jobs).

        The estimate: what it published is evicted, its end first, as far as the other running jobs and the older waiting
        ones may come to need more blocks than there are without it.
        """
        core = self.cache.core
        assert job.sequence is not None
        request = settled(job.sequence)
        slot, length, size, full = request.slot, request.length, core.block_size, core.full
        published = left = request.lease.num_blocks
        if full is not None:
            others = [one for one in (*self.running, *self.waiting) if one.sequence or one.number < job.number]
            need = sum(
                ceil_div(one.total, size) - (full.end[one.sequence.slot] if one.sequence else 0) for one in others
            )
            need -= ceil_div(job.total, size) - full.end[slot]
            there = core.capacity.available(full) + full.outstanding
            left += min(0, there + full.end[slot] - full.shared[slot] - need)
        start = max(0, left) * size
        if core.bounded:
            _, found = core.prefix.find(request.keys(0, start + 1), request.namespace)
            start = found.resumable
        recompute = (length - start) * self.rate.seconds
        part, whole = (core.swap.nbytes_of(slot, length, is_whole) for is_whole in (False, True))
        again = whole - (whole - part) * max(0, left) / max(1, published)
        per_byte = core.swap.rate.seconds
        return Costs(recompute, 2 * part * per_byte + recompute * (left < published), (whole + again) * per_byte)

    def remove(self, job: J) -> None:
        """Take ``job`` out, whether it waits or runs, and free what it holds. Does nothing for a job that is not here."""
        for queue in (self.running, self.waiting):
            if job in queue:
                queue.remove(job)
                for held in (job.sequence, job.suspended, job.prefetch):
                    if held is not None:
                        held.close()
                job.sequence = job.suspended = job.prefetch = None

    def _begin(self, job: J) -> Sequence:
        """Open a sequence for ``job``, or resume what it has."""
        reserve, sequence = self._reserve(job), job.suspended
        if sequence is None:
            if job.prefetch is not None and not job.prefetch.is_done and self.running:
                raise RetryLater(f"job {job.number} waits for what tiers have of it")
            sequence = self.cache.open(
                job.text, job.namespace, capacity=0, reserve=reserve, media=job.media, prefetch=job.prefetch,
                layerwise=True,
            )  # fmt: skip
        else:
            sequence.resume(capacity=0, reserve=reserve)
        job.suspended = job.prefetch = None
        return sequence

    def _start(self, job: J, sequence: Sequence) -> None:
        job.sequence = sequence
        insort(self.running, job, key=_by_age)

    def took(self, seconds: float, num_tokens: int) -> None:
        """Note that computing ``num_tokens`` known tokens took ``seconds``: from this, what recomputing costs."""
        self.rate.add(seconds, num_tokens)
        if self.cache.core.offloader is not None:
            self.cache.core.offloader.reader.seconds_per_token = self.rate.seconds

    def stats(self) -> QueueStats:
        """Its counters."""
        return QueueStats(len(self.waiting), len(self.running), self.num_preempted, self.num_swapped)

    def _reserve(self, job: J) -> int:
        if self.policy is None or job.num_preempted:
            return job.total
        return min(job.total, len(job.text) + self.cache.block_size)
