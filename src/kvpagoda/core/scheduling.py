"""A queue of jobs that decides which jobs run, which wait, and which are preempted when memory runs out. No tensors.

A job is preempted in the mode that is expected to cost least:

    recompute    its sequence is closed. Its committed blocks stay cached until they are evicted; the job later starts
                 again from the blocks that are still cached then
    part         its private memory is suspended to host memory: the unfinished block, windows and states. Its published
                 blocks stay cached, as in ``recompute``
    swap         everything that it holds is suspended to host memory, and it later resumes at the same position

In each mode the job keeps its text so far, and the tokens generated afterwards are the same.
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
from time import monotonic
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvpagoda.arrays import TokenIds, Tokens
from kvpagoda.core.cache.lookup import AnyNamespace
from kvpagoda.core.cache.request import Breakpoint, breakpoints_of, positions_of
from kvpagoda.core.cache.sequence import Sequence, published_request
from kvpagoda.core.cache.swap import Rate
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.core.offload.reader import Prefetch
from kvpagoda.errors import Exhausted, OutOfBlocks, RetryLater
from kvpagoda.tiers.health import Histogram, Latencies
from kvpagoda.units import ceil_div

WAITS = (0.001, 0.01, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0, 1800.0)
"""Upper bounds of the buckets of waiting times, in seconds."""
_log = logging.getLogger(__name__)


class PreemptionPolicy(Protocol):
    """Chooses the running sequence that is preempted when an older one needs memory."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        """Return the sequence to preempt.

        Args:
            candidates: running sequences younger than the one in need, oldest first, at least one.
        """
        ...


class Youngest:
    """Preempts the sequence that arrived last."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        return candidates[-1]


class LeastComputed:
    """Preempts the sequence with the fewest tokens computed since it started; the youngest if several have as few."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        return min(reversed(candidates), key=lambda sequence: sequence.length - sequence.cached_tokens)


class PreemptionMode(Enum):
    """How a sequence is preempted: see the docstring of this module."""

    RECOMPUTE = "recompute"
    PART = "part"
    SWAP = "swap"


@dataclass(frozen=True)
class Costs:
    """For each mode, the expected seconds of work until a preempted sequence is back at the same position.

    Args:
        recompute: close it, and compute its text again.
        part: suspend what is not shared.
        swap: suspend all of it.
    """

    recompute: float
    part: float
    swap: float


def cheapest(costs: Costs) -> PreemptionMode:
    """Return the mode that costs least; of several equal ones the one that moves fewer bytes.

    Args:
        costs: of the modes.
    """
    return min(PreemptionMode, key=lambda mode: getattr(costs, mode.value))


@dataclass(frozen=True)
class QueueStats:
    """The counters of a queue.

    Args:
        waiting: jobs that wait now.
        running: jobs that run now.
        preempted: preemptions so far.
        swapped: of these, those that suspended to host memory.
        waits: seconds that jobs waited until they first ran.
    """

    waiting: int
    running: int
    preempted: int
    swapped: int
    waits: Histogram


class Job:
    """A request in a ``RunQueue``: its prompt, and the tokens generated since. Its attribute ``media``: see
    ``KVCache.open``.

    Args:
        prompt: int32 ``[n]``.
        total: the most tokens of its text.
        namespace: only jobs of the same namespace share cached blocks.
        checkpoints: positions of the prompt at which others should be able to resume, see ``KVCache.open``.

    Raises:
        BadInput: other checkpoints.
    """

    def __init__(
        self, prompt: Tokens, total: int, namespace: AnyNamespace = None, checkpoints: TokenIds | None = None
    ) -> None:
        self._tokens = np.empty(total, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self.total, self.namespace = total, namespace
        self.asked = None if checkpoints is None else positions_of(checkpoints)
        self.told: tuple[Breakpoint, ...] = ()
        self.media: Mapping[int, bytes] = {}
        self.sequence: Sequence | None = None
        """Its open sequence while it runs, else None."""
        self.prefetch: Prefetch | None = None
        """The read of its text from tiers into host memory, while it waits; None if there is none."""
        self.entered_at: float | None = None
        """Time of ``monotonic`` when it began to wait for the first time; None before that, and once it ran."""
        self.suspended: Sequence | None = None
        """Its suspended sequence while it waits, if it was preempted by ``PART`` or ``SWAP``; else None."""
        self.number = -1
        """Its number in the order of arrival; -1 before ``RunQueue.enter``."""
        self.num_preempted = 0

    @property
    def text(self) -> Tokens:
        """All tokens so far, computed or not: int32 ``[n]``, a view that stays valid."""
        return self._tokens[: self._length]

    @property
    def checkpoints(self) -> tuple[Breakpoint, ...]:
        """What became of each position that was asked for, as ``Sequence.checkpoints``; of a job that does not run, when it
        ran last."""
        held = self.sequence or self.suspended
        return self.told if held is None else held.checkpoints

    def extend(self, tokens: Many[int]) -> None:
        """Append tokens to the text.

        Args:
            tokens: their ids.
        """
        end = self._length + len(tokens)
        self._tokens[self._length : end] = tokens
        self._length = end


J = TypeVar("J", bound=Job)
_by_age = attrgetter("number")


class RunQueue(Generic[J]):
    """Jobs on one cache, admitted in the order of arrival. ``waiting`` and ``running`` are lists, oldest first.

    Without a ``policy`` a job is admitted when blocks for its ``total`` tokens can be reserved, and is never preempted. Beside
    running jobs ``Limits.watermark`` of the memory stays free, with a ``policy`` too.

    With a ``policy`` the queue reserves blocks for the job's text and one block more. When a job needs more and no
    block is free, the policy chooses the younger job that is preempted; if there is no younger job, the job itself is
    preempted. So the oldest job always runs to its end. A preempted job starts again, before any younger one, when
    blocks for all its ``total`` tokens can be reserved.

    Until ``took`` is called, computing is taken to cost nothing. The oldest job, and those behind it, wait while a running
    one computes a part of its text (``KVCache.should_wait``). While the oldest job waits, its text is read from the tiers
    into host memory.

    Args:
        cache: all of its requests are jobs of this queue.
        policy: which job is preempted; None: none.
        choose: maps the costs of preempting a job to a mode; a sequence that does not fit in the cache's ``swap`` is
            recomputed.

    Examples:
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
        self._waits = Latencies(WAITS)

    def enter(self, job: J, *forks: J) -> None:
        """Add a job to the waiting jobs.

        Args:
            job: the new one.
            *forks: get the next numbers of arrival; start each of them by ``fork``.

        Raises:
            BadInput: checkpoints behind the longest context.
        """
        if job.asked is not None:
            breakpoints_of(job.asked, self.cache.max_context)
        for arrival in (job, *forks):
            arrival.number, self._arrived = self._arrived, self._arrived + 1
            arrival.entered_at = monotonic()
        self.waiting.append(job)

    def admit(self) -> None:
        """Start the waiting jobs, oldest first, up to the first that does not fit.

        Raises:
            RetryLater: that job does not fit and no job runs: then users outside this queue hold the cache, and waiting
                for jobs of the queue would not help.
        """
        while self.waiting:
            job = self.waiting[0]
            if self.running and not job.suspended and self.cache.should_wait(job.text, job.namespace, media=job.media):
                return
            try:
                sequence = self._begin(job)
            except RetryLater:
                if not self.running:
                    raise
                if self.cache.core.tiers.levels and job.prefetch is None and job.suspended is None:
                    job.prefetch = self.cache.prefetch(job.text, job.namespace, media=job.media)
                return
            del self.waiting[0]
            if job.entered_at is not None:
                self._waits.add(monotonic() - job.entered_at)
                job.entered_at = None
            self._start(job, sequence)

    def fork(self, source: J, job: J) -> None:
        """Start a job as a fork of a running one, with all its committed tokens. If blocks or slots are short, it waits
        instead.

        Args:
            source: the running job.
            job: the new one.
        """
        assert source.sequence is not None
        try:
            sequence = source.sequence.fork(reserve=self._reserve(job))
        except RetryLater:
            insort(self.waiting, job, key=_by_age)
        else:
            self._start(job, sequence)

    def make_room(self, job: J, n: int) -> bool:
        """Make room for the next tokens of a running job. Preempts younger jobs while blocks are short.

        Args:
            job: the running job.
            n: tokens.

        Returns:
            False if ``job`` itself was preempted.

        Raises:
            OutOfBlocks: no room, and no policy or no other job that runs.
        """
        assert job.sequence is not None
        while True:
            try:
                job.sequence.extend(n)
                return True
            except OutOfBlocks:
                if self.policy is None or len(self.running) == 1:
                    raise
            younger = {later.sequence: later for later in self.running[self.running.index(job) + 1 :] if later.sequence}
            if not younger:
                self.preempt(job)
                return False
            self.preempt(younger[self.policy.victim(list(younger))])

    def preempt(self, job: J, mode: PreemptionMode | None = None) -> None:
        """Close or suspend the sequence of a running job, which then waits again with its text so far.

        Args:
            job: the running job.
            mode: None lets ``choose`` decide. A sequence that cannot be suspended is closed and recomputed.
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
        """Return what preempting a running job is expected to cost in each mode. O(jobs).

        The estimate: if the other running jobs and the older waiting ones may need more blocks than there are without
        ``job``, the missing blocks are evicted from those that ``job`` published, last block first.

        Args:
            job: the running job.
        """
        core = self.cache.core
        assert job.sequence is not None
        request = published_request(job.sequence)
        slot, length, size, full = request.slot, request.length, core.block_size, core.full
        published = left = request.lease.num_blocks
        if full is not None:
            others = [one for one in (*self.running, *self.waiting) if one.sequence or one.number < job.number]
            need = sum(
                ceil_div(one.total, size) - (full.end[one.sequence.slot] if one.sequence else 0) for one in others
            )
            need -= ceil_div(job.total, size) - full.end[slot]
            available = core.capacity.available(full) + full.outstanding
            left += min(0, available + full.end[slot] - full.shared[slot] - need)
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
        """Remove a job, waiting or running, and free what it holds. Does nothing if it is not in the queue.

        Args:
            job: of this queue.
        """
        for queue in (self.running, self.waiting):
            if job in queue:
                queue.remove(job)
                for held in (job.sequence, job.suspended, job.prefetch):
                    if isinstance(held, Sequence):
                        job.told = held.checkpoints
                    if held is not None:
                        held.close()
                job.sequence = job.suspended = job.prefetch = None

    def _begin(self, job: J) -> Sequence:
        """Open a sequence for ``job``, or resume its suspended one. Raises RetryLater."""
        reserve, sequence = self._reserve(job), job.suspended
        if sequence is None:
            if job.prefetch is not None and not job.prefetch.is_done and self.running:
                raise RetryLater(f"job {job.number} waits until its text is read from the tiers")
            sequence = self.cache.open(
                job.text, job.namespace, capacity=0, reserve=reserve, media=job.media, prefetch=job.prefetch,
                layerwise=True, checkpoints=job.asked,
            )  # fmt: skip
        else:
            sequence.resume(capacity=0, reserve=reserve)
        job.suspended = job.prefetch = None
        return sequence

    def _start(self, job: J, sequence: Sequence) -> None:
        job.sequence = sequence
        insort(self.running, job, key=_by_age)

    def took(self, seconds: float, num_tokens: int) -> None:
        """Record how long computing took, to estimate the cost of recomputing.

        Args:
            seconds: of the step.
            num_tokens: known tokens that it computed.
        """
        self.rate.add(seconds, num_tokens)
        self.cache.core.tiers.took(self.rate.seconds)

    def stats(self) -> QueueStats:
        """Return the number of waiting and running jobs and of preemptions."""
        return QueueStats(
            len(self.waiting), len(self.running), self.num_preempted, self.num_swapped, self._waits.picture()
        )

    def _reserve(self, job: J) -> int:
        """Return for how many tokens blocks are reserved when ``job`` starts."""
        if self.policy is None or job.num_preempted:
            return min(job.total, self.cache.max_context)  # the last token of a text need not be computed
        return min(job.total, len(job.text) + self.cache.block_size)
