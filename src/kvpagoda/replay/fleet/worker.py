"""One worker of a simulation: a cache, a queue, and steps that take time.

A step gives each request that decodes one token, then pieces of prompts to the others, in the order of their admission, until
``step_tokens`` tokens are given; while any are left, it admits waiting requests. What a step computes is in the cache, and
is seen by others, when the step ends.

    begin ──► the step's end is known ──► finish: commits, first tokens, ends of requests ──► begin ..

While all running requests decode and nobody can be admitted, nothing changes from step to step but the lengths. Such steps
are one *stretch*, which ends with the first request that ends; ``cut`` ends it earlier, at a request's arrival. The cache
is called only for those steps of a stretch in which a block is begun or completed; if it keeps full attention alone, evicts
by LRU and has no tiers, room is made for the whole stretch at once, since the same blocks are evicted for it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from kvpagoda.errors import RetryLater
from kvpagoda.probe import Probe
from kvpagoda.replay.batching import AdmittedRequest, Batching, Piece
from kvpagoda.replay.fleet.costs import PER_SECOND, Ticks
from kvpagoda.replay.setup import Setup
from kvpagoda.replay.trace import Floats, Ints

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_by_order = attrgetter("order")


class Outcomes:
    """What became of each request: columns with a row for each request, in the order of the trace.

    int64 ``[requests]``: ``worker``: which one served it, -1: none yet. ``prompt``, ``matched``, ``cached``, ``loaded``:
    tokens of its prompt, those in the tree, those that were not computed, those among them that came from tiers; 0 until
    it is admitted. ``arrived``, ``admitted``, ``first``, ``last``: picoseconds of its arrival, its admission, its first
    token and its end; -1: not yet, or never."""

    def __init__(self, arrivals: Floats) -> None:
        count = len(arrivals)
        self.arrived: Ints = np.round(arrivals * PER_SECOND).astype(np.int64)
        self.worker, self.admitted, self.first, self.last = (np.full(count, -1, np.int64) for _ in range(4))
        self.prompt, self.matched, self.cached, self.loaded = np.zeros((4, count), np.int64)

    def admit(self, worker: int, request: AdmittedRequest, now: int) -> None:
        """Note that ``worker`` admitted ``request``, and what it found."""
        number, sequence = request.number, request.sequence
        self.worker[number], self.admitted[number] = worker, now
        self.prompt[number], self.matched[number] = request.num_prompt, sequence.match.num_tokens
        self.cached[number], self.loaded[number] = sequence.cached_tokens, sequence.match.loaded

    def since_arrival(self, column: Ints) -> Floats:
        """Return the seconds from the arrival to ``column``, one of the times, float64 ``[requests]``; NaN where it is -1."""
        return np.where(column < 0, np.nan, (column - self.arrived) / PER_SECOND)


def summary(seconds: Floats) -> dict[str, Any]:
    """Return mean, quantiles and maximum of ``seconds``, NaN left out; None each if there are none."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return dict.fromkeys(("mean", *QUANTILES, "max"))
    quantiles = np.quantile(known, [*QUANTILES.values()]).tolist()
    return {"mean": float(known.mean()), **dict(zip(QUANTILES, quantiles)), "max": float(known.max())}


class AnyWorker(Protocol):
    """What a simulation calls of a worker, of ours and of ``engine_worker``. Times are whole picoseconds.

    ``until``: when its step or stretch ends; None while it has none. ``backlog``: prompt tokens that are expected to be
    computed before a request that arrives now. ``busy``: how long it computed."""

    index: int
    until: int | None
    backlog: int
    busy: int
    num_steps: int
    num_ended: int

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""

    @property
    def never_fit(self) -> int:
        """Requests that were larger than the cache."""

    @property
    def num_evicted(self) -> int:
        """Blocks that were evicted."""

    @property
    def nbytes(self) -> int:
        """Memory of its cache."""

    def enqueue(self, number: int, expected: int) -> None:
        """Let request ``number`` wait. ``expected``: the tokens of its prompt that will be computed."""

    def cut(self, now: int) -> int | None:
        """Return when the stretch in progress ends if a request that arrives ``now`` is to be admitted as soon as it can;
        ``until`` is set to it."""

    def begin(self, now: int) -> int | None:
        """Begin a step and return when it ends; None, beginning none, if there is nothing to do."""

    def finish(self) -> None:
        """End the step or stretch in progress, at ``until``."""

    def close(self) -> None:
        """Close the cache, which ends the threads of its tiers."""


class FleetWorker:
    """Worker ``index`` of a simulation, with a ``KVCache``."""

    def __init__(self, index: int, batching: Batching, ticks: Ticks, setup: Setup, outcomes: Outcomes) -> None:
        self.index, self.batching, self.outcomes = index, batching, outcomes
        self._cache, self._ticks, self._step_tokens = batching.cache, ticks, setup.step_tokens
        self.until: int | None = None
        self.backlog = self.busy = self.num_steps = self.num_ended = 0
        self._expected: dict[int, int] = {}  # waiting request -> its share of the backlog
        self._prefilling: list[AdmittedRequest] = []
        self._decoding: set[AdmittedRequest] = set()
        self._pieces: list[Piece] = []  # of the step: a request, and where its piece ends
        self._began = self._stretch = 0  # when the step began; how many steps in one go
        self._probe = Probe(self._cache)
        self._has_tiers = bool(self._probe.num_loaded)
        self._is_plain = self._probe.is_plain and setup.policy == "lru"
        self._is_blocked = False  # whether the first waiting request found no room, and nothing ended since
        self._decoded = self._orders = self._context = 0  # decode steps; requests that decoded; tokens of ``_decoding``
        self._due: dict[
            int, list[AdmittedRequest]
        ] = {}  # number of a decode step -> requests that must commit at its end
        self._growing: list[AdmittedRequest] = []  # requests that begin a block in the next decode step

    @property
    def num_requests(self) -> int:
        """See ``AnyWorker``, as the others here."""
        return len(self._prefilling) + len(self._decoding) + len(self.batching.waiting)

    @property
    def never_fit(self) -> int:
        return self.batching.never_fit

    @property
    def num_evicted(self) -> int:
        return self._probe.num_evicted

    @property
    def nbytes(self) -> int:
        return self._cache.plan.nbytes

    def close(self) -> None:
        self._cache.close()

    def enqueue(self, number: int, expected: int) -> None:
        self.batching.waiting.append(number)
        self._expected[number] = expected
        self.backlog += expected

    # -- the beginning of a step ---------------------------------------------------------------------------------------

    def begin(self, now: int) -> int | None:
        self._begin_blocks()
        budget = self._step_tokens - len(self._decoding)
        for request in self._prefilling:
            budget -= self._plan_piece(request, budget, now)
        self._admit(budget, now)
        computed = sum(end - request.sequence.length for request, end in self._pieces)
        arriving = [request.ready for request in self._prefilling if request.ready > now]
        if self._pieces:
            self._stretch = 1
        elif self._decoding:
            self._stretch = min(request.ends_at for request in self._decoding) - self._decoded
        elif arriving:
            self._stretch = 0
        else:
            return None
        self._began = now
        if not self._stretch:
            self.until = min(arriving)
            return self.until
        self.until = now + self._seconds(self._stretch, computed)
        if arriving and not self._pieces:
            self._end_at(min(arriving))
        return self.until

    def cut(self, now: int) -> int | None:
        if self.until is not None and not self._pieces and not self._is_blocked and self._has_slot():
            if self._stretch:
                self._end_at(now)
            else:
                self.until = min(self.until, now)
        return self.until

    def _end_at(self, time: int) -> None:
        """End the stretch with the first of its steps that does not end before ``time``."""
        low, high = 1, self._stretch
        while low < high:
            middle = (low + high) // 2
            if self._began + self._seconds(middle) >= time:
                high = middle
            else:
                low = middle + 1
        self._stretch, self.until = low, self._began + self._seconds(low)

    def _seconds(self, steps: int, computed: int = 0) -> int:
        """Return the picoseconds of ``steps`` steps from now on, of which the first computes ``computed`` prompt tokens."""
        return self._ticks.of(steps, computed, len(self._decoding), self._context)

    def _has_slot(self) -> bool:
        return len(self._prefilling) + len(self._decoding) < self._cache.plan.max_requests

    def _plan_piece(self, request: AdmittedRequest, budget: int, now: int) -> int:
        """Make room for the next piece of a prompt, of at most ``budget`` tokens, and return its tokens."""
        length = request.sequence.length
        if budget <= 0 or request.ready > now:
            return 0
        end = request.extend(self.batching.piece(request, budget))
        self._pieces.append((request, end))
        return end - length

    def _admit(self, budget: int, now: int) -> None:
        """Open waiting requests, and give them pieces, while there are slots, memory and tokens of the ``budget``."""
        waiting = self.batching.waiting
        while waiting and not self._is_blocked and self._has_slot():
            if self.batching.next_waits(self._pieces) or budget <= 0:
                return
            if self._has_tiers:
                self._cache.flush(60.0)  # what was evicted is stored, however long this machine takes
            read = self._probe.num_loaded
            try:
                number, request = self.batching.open_next()
            except RetryLater:
                if not (self._prefilling or self._decoding):
                    raise
                self._is_blocked = True
                return
            self.backlog -= self._expected.pop(number)
            if request is None:
                continue
            self.outcomes.admit(self.index, request, now)
            loaded = [after - before for before, after in zip(read, self._probe.num_loaded)]
            request.ready = now + self._ticks.loading(loaded)
            self.backlog += request.num_prompt - request.sequence.length
            self._prefilling.append(request)
            budget -= self._plan_piece(request, budget, now)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        now = self.until
        assert now is not None
        self.busy += now - self._began if self._stretch else 0
        self.num_steps += self._stretch
        ended = self._decode(self._stretch) if self._decoding else []
        for request, end in self._pieces:
            self.backlog -= end - request.sequence.length
            request.commit(end)
            if end == request.num_prompt:
                self.outcomes.first[request.number] = now
                self._prefilling.remove(request)
                if len(request.text) - end <= 1:
                    ended.append(request)
                else:
                    self._begin_decoding(request)
        self._pieces.clear()
        for request in ended:
            self._last_token(request)
        for request in ended:
            request.sequence.close()
            self.outcomes.last[request.number] = now
        self.num_ended += len(ended)
        self._is_blocked = self._is_blocked and not ended
        self.until = None

    def _begin_decoding(self, request: AdmittedRequest) -> None:
        request.order, self._orders = self._orders, self._orders + 1
        request.since = self._decoded - request.num_prompt  # of a decode step, minus the tokens that it has after it
        request.ends_at = self._decoded + len(request.text) - request.num_prompt - 1
        self._decoding.add(request)
        self._context += request.num_prompt
        request.room = request.num_prompt + -request.num_prompt % request.block_size
        if request.room == request.num_prompt:
            self._growing.append(request)
        self._plan_commit(request, request.num_prompt)

    def _plan_commit(self, request: AdmittedRequest, length: int) -> None:
        """Note after which decode step ``request``, of ``length`` tokens now, must commit: at the end of a block, where the
        cache settles it, at its end."""
        at = (length // request.block_size + 1) * request.block_size
        if not self._is_plain:
            settles = self._probe.settles_at(request.sequence)
            at = settles if length < settles < at else at
        self._due.setdefault(min(request.ends_at, request.since + at), []).append(request)

    def _decode(self, steps: int) -> list[AdmittedRequest]:
        """Commit what ``steps`` decode steps complete. Return the requests that end with the last of them."""
        ended, first, self._decoded = list[AdmittedRequest](), self._decoded + 1, self._decoded + steps
        if self._is_plain and steps > 1:
            for request in self._decoding:
                self._grow(request, self._decoded - request.since)
            self._growing.clear()
        for step in range(first, first + steps):
            if self._growing:
                self._begin_blocks()
            if step in self._due:
                self._commit(self._due.pop(step), step, ended)
        self._context += steps * len(self._decoding)
        for request in ended:
            self._decoding.remove(request)
            self._context -= len(request.text) - 1
        return ended

    def _commit(self, due: list[AdmittedRequest], step: int, ended: list[AdmittedRequest]) -> None:
        """Commit all that the requests ``due`` have after decode step ``step``. Append those that end to ``ended``."""
        due.sort(key=_by_order)
        for request in due:
            length = step - request.since
            request.commit(length)
            if step == request.ends_at:
                ended.append(request)
                continue
            if length == request.room:
                self._growing.append(request)
            self._plan_commit(request, length)

    def _begin_blocks(self) -> None:
        """Make room for the next block of each request that begins one."""
        self._growing.sort(key=_by_order)
        for request in self._growing:
            self._grow(request, request.room + 1)
        self._growing.clear()

    @staticmethod
    def _grow(request: AdmittedRequest, length: int) -> None:
        """Make room for all blocks of the first ``length`` tokens."""
        end = min(len(request.text), length + -length % request.block_size)
        if end > request.room:
            request.room = request.extend(end)

    @staticmethod
    def _last_token(request: AdmittedRequest) -> None:
        """Commit the last token, which takes no step of its own: it was answered, and nobody computes with it."""
        end = len(request.text)
        if request.sequence.length < end:
            request.extend(end)
            request.commit(end)
