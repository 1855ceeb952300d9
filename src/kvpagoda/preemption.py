"""Who runs, who waits, and who is set back when memory runs out. No tensors.

To set back is, whatever is expected to cost least,

    to recompute    close: what was committed stays cached as long as nobody needs its place, and the job starts again from
                    what is still there
    part            suspend what nobody else has: the unfinished block, windows and states; the rest as before
    to swap         suspend all of it: it goes on where it was

The text so far is kept in any case, and the tokens that follow are the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvpagoda.books import Books
from kvpagoda.errors import Exhausted, OutOfBlocks, RetryLater
from kvpagoda.finding import Prefetch
from kvpagoda.sequence import Sequence, Tokens
from kvpagoda.swap import Rate
from kvpagoda.units import ceil_div


class PreemptionPolicy(Protocol):
    """Chooses who gives way to a request that needs memory."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        """One of ``candidates``: running sequences that came after the one in need, oldest first, at least one."""
        ...


class Youngest:
    """Sets back the request that came last."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        return candidates[-1]


class LeastComputed:
    """Sets back the request that loses least: the fewest tokens computed since it started; of equals the youngest."""

    def victim(self, candidates: Many[Sequence]) -> Sequence:
        return min(reversed(candidates), key=lambda sequence: sequence.length - sequence.cached_tokens)


class Way(Enum):
    """How a sequence is set back."""

    RECOMPUTE = "recompute"
    PART = "part"
    SWAP = "swap"


@dataclass(frozen=True)
class Costs:
    """Seconds that are expected to go by, for each way of setting a sequence back, until it is where it was."""

    recompute: float
    part: float
    swap: float


def cheapest(costs: Costs) -> Way:
    """The way that costs least; of equals the one that moves least."""
    return min(Way, key=lambda way: getattr(costs, way.value))


class Job:
    """A text that grows to at most ``total`` tokens: a prompt, and what follows it."""

    def __init__(self, prompt: Tokens, total: int, namespace: str | bytes | None = None) -> None:
        self._tokens = np.empty(total, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self.total, self.namespace = total, namespace
        self.sequence: Sequence | None = None
        """Its share of the cache while it runs."""
        self.ahead: Prefetch | None = None
        """What tiers have of it, being read while it waits."""
        self.aside: Sequence | None = None
        """What was suspended of it, while it waits."""
        self.number = -1
        """Its place in the order of arrival."""
        self.num_set_back = 0

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

    Without a ``policy`` a job is admitted when all that it may come to hold can be promised to it, and never set back.
    With one it is promised its text and one block; when there is no room for more, a younger job is set back, or
    the job itself if it is the youngest. So the oldest that runs goes on to its end, and no job is set back for one that
    came after it. A job that was set back starts again when the whole of it can be promised, before any younger one.

    ``choose`` says how a job is set back; what does not fit in the ``swap`` of the cache is recomputed. As long as
    nobody told how long computing ``took``, it costs nothing. What tiers have of the job that is next is read while it waits.
    """

    def __init__(
        self, books: Books, policy: PreemptionPolicy | None = None, choose: Callable[[Costs], Way] = cheapest
    ) -> None:
        self.books, self.policy, self.choose = books, policy, choose
        self.rate = Rate()
        self.waiting: list[J] = []
        self.running: list[J] = []
        self.num_set_back = self.num_swapped = 0
        self._arrived = 0

    def enter(self, job: J, *forks: J) -> None:
        """Let ``job`` wait. ``forks`` are to be forked from it: they come next in age, and enter by ``fork``."""
        for one in (job, *forks):
            one.number, self._arrived = self._arrived, self._arrived + 1
        self.waiting.append(job)

    def admit(self) -> None:
        """Start those waiting, oldest first, up to the first that does not fit.

        Raises RetryLater if it does not fit and no job runs: somebody else holds the cache, and waiting will not help.
        """
        while self.waiting:
            job = self.waiting[0]
            try:
                sequence = self._begin(job)
            except RetryLater:
                if not self.running:
                    raise
                if self.books.below is not None and job.ahead is None and job.aside is None:
                    job.ahead = self.books.prefetch(job.text, job.namespace)
                return
            del self.waiting[0]
            self._start(job, sequence)

    def fork(self, source: J, job: J) -> None:
        """Start ``job`` with all that ``source``, which runs, has committed; if there is no room, it waits instead."""
        assert source.sequence is not None
        try:
            sequence = source.sequence.fork(reserve=self._reserve(job))
        except RetryLater:
            insort(self.waiting, job, key=_by_age)
        else:
            self._start(job, sequence)

    def make_room(self, job: J, n: int) -> bool:
        """Room for the next ``n`` tokens of ``job``, which runs; False if it had to be set back itself.

        Raises OutOfBlocks without a policy, or if nobody else is left to give way.
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
                self.set_back(job)
                return False
            self.set_back(younger[self.policy.victim(list(younger))])

    def set_back(self, job: J, way: Way | None = None) -> None:
        """Close or suspend the sequence of ``job``, which runs, and let it wait again, with its text so far. ``way``: how, if
        that is known."""
        sequence = job.sequence
        assert sequence is not None
        way = self.choose(self.costs(job)) if way is None else way
        if way is not Way.RECOMPUTE:
            with suppress(Exhausted):
                sequence.suspend(whole=way is Way.SWAP)
                self.running.remove(job)
                job.sequence, job.aside = None, sequence
                self.num_swapped += 1
        if job.aside is None:
            self.remove(job)
        job.num_set_back += 1
        self.num_set_back += 1
        insort(self.waiting, job, key=_by_age)

    def costs(self, job: J) -> Costs:
        """What each way of setting ``job``, which runs, back is expected to cost.

        What it published is thought to be evicted, the end first, as far as the others that run, and the older ones that
        wait, may come to need more than there is without it.
        """
        books, sequence = self.books, job.sequence
        assert sequence is not None
        slot, length, size, full = sequence.slot, sequence.length, books.block_size, books.reuse.full
        published = left = sequence.lease.num_blocks
        if full is not None:
            others = [one for one in (*self.running, *self.waiting) if one.sequence or one.number < job.number]
            need = sum(
                ceil_div(one.total, size) - (full.end[one.sequence.slot] if one.sequence else 0) for one in others
            )
            need -= ceil_div(job.total, size) - full.end[slot]
            left += min(0, full.available() + full.claimed + full.end[slot] - full.shared[slot] - need)
        start = max(0, left) * size
        if books.reuse.bounded:
            tree = books.reuse.tree
            match = tree.match(sequence.keys(0, length), sequence.namespace)
            last = tree.last_checkpoint(match, min(match.num_blocks, start // size))
            start = 0 if last is None else last[0]
        recompute = (length - start) * self.rate.seconds
        part, whole = (books.swap.nbytes_of(slot, length, is_whole) for is_whole in (False, True))
        again = whole - (whole - part) * max(0, left) / max(1, published)
        per_byte = books.swap.rate.seconds
        return Costs(recompute, 2 * part * per_byte + recompute * (left < published), (whole + again) * per_byte)

    def remove(self, job: J) -> None:
        """Take ``job`` out, wherever it is; what it holds is given back. Does nothing for a job that is not here."""
        if job.sequence is not None:
            self.running.remove(job)
            job.sequence.close()
            job.sequence = None
        elif job in self.waiting:
            self.waiting.remove(job)
            if job.aside is not None:
                job.aside.close()
                job.aside = None
            if job.ahead is not None:
                job.ahead.close()
                job.ahead = None

    def _begin(self, job: J) -> Sequence:
        """Open a sequence for ``job``, or resume what it has."""
        aside = job.aside
        if aside is None:
            if job.ahead is not None and not job.ahead.is_done and self.running:
                raise RetryLater(f"job {job.number} waits for what tiers have of it")
            sequence = self.books.open(
                job.text, job.namespace, room=0, reserve=self._reserve(job), prefetch=job.ahead, layerwise=True
            )
            job.ahead = None
            return sequence
        aside.resume(room=0, reserve=self._reserve(job))
        job.aside = None
        return aside

    def _start(self, job: J, sequence: Sequence) -> None:
        job.sequence = sequence
        insort(self.running, job, key=_by_age)

    def took(self, seconds: float, num_tokens: int) -> None:
        """So long it took to compute so many tokens of texts that were known: what recomputing costs."""
        self.rate.add(seconds, num_tokens)
        if self.books.below is not None:
            self.books.below.finder.seconds_per_token = self.rate.seconds

    def _reserve(self, job: J) -> int:
        if self.policy is None or job.num_set_back:
            return job.total
        return min(job.total, len(job.text) + self.books.block_size)
