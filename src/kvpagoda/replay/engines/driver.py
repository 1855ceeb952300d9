"""Serves the requests of a trace with any manager of a cache: one order of admission and of chunks for all of them.

Each step computes a chunk of every running request, then admits waiting ones in their order, as long as they fit, then ends
those that are complete. A text that is cached as a whole needs no tokens of the step: when they are spent, one such text is
still admitted. A running request that does not fit preempts the youngest one, which starts again later, before those that
wait. So the schedulers of engines do; what a manager answers decides nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.trace import Ints
from kvpagoda.units import whole_number


class Manager(Protocol):
    """A manager of a cache without memory. ``request``: the number of a request in the trace."""

    @property
    def finds_all(self) -> bool:
        """Whether ``find`` can find all that is known of a text, its last token included."""

    def step_starts(self) -> None:
        """A step begins."""

    def find(self, request: int, known: int) -> int:
        """Return how many of the ``known`` tokens of ``request``, which has no blocks, are cached. Changes nothing."""

    def peek(self, request: int) -> int:
        """Return what ``find`` would find of the prompt of ``request`` between two steps, and leave no trace of it."""

    @property
    def num_evicted(self) -> int:
        """How many blocks that could be found were taken for others so far."""

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """Return where a chunk of ``request`` from ``begin`` on ends, at most at ``end``; ``begin``: none in this step, or
        all that is known is cached."""

    def start(self, request: int, end: int, known: int) -> bool:
        """Give ``request`` what ``find`` found and room for its first ``end`` tokens, of which the rest is computed now;
        False if there is no room, with nothing changed."""

    def grow(self, request: int, end: int, known: int) -> bool:
        """The same for a running request, without a look-up."""

    def stop(self, request: int, is_complete: bool) -> None:
        """End ``request``, or preempt it."""


@dataclass(frozen=True)
class Schedule:
    """How many requests run at once, and how many tokens a step computes.

    Args:
        at_once: requests.
        step_tokens: the most of each request in a step; None: a whole prompt, then a whole output.
        shared: of all requests together, and of an output one token a step, as engines do.

    Raises:
        BadInput: a number below 1.
    """

    at_once: int = 1
    step_tokens: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        whole_number(self.at_once, "at_once", at_least=1)
        if self.step_tokens is not None:
            whole_number(self.step_tokens, "step_tokens", at_least=1)


@dataclass
class Served:
    """What a run counted. ``hits`` int64 ``[requests]``: the tokens that each request found when it was first admitted.
    ``never_fit``: requests that did not fit into an empty cache."""

    hits: Ints
    never_fit: int = 0
    preempted: int = 0
    steps: int = 0


@dataclass
class EngineStep:
    """What a step did. ``admitted``: requests that were admitted for the first time; ``refused``: those that never fit,
    also one that fitted at first, was preempted, and has grown too large since;
    ``ended``: those that are complete. ``prefilled``: tokens of texts that were computed; ``decoding``: requests that
    computed the one token that they generated last, and ``context``: all their tokens before it."""

    admitted: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    prefilled: int = 0
    decoding: int = 0
    context: int = 0

    def count(self, begin: int, end: int, prompt: int) -> None:
        """Count a chunk from ``begin`` to ``end``."""
        if end == begin + 1 and begin >= prompt:
            self.decoding += 1
            self.context += begin
        else:
            self.prefilled += end - begin


class EngineRun:
    """The waiting and running requests of ``chains``. ``waiting``: their numbers, in order. ``hits``: see ``Served``; None:
    its own. ``running``: request -> [tokens that are computed, tokens that are known]."""

    def __init__(
        self,
        chains: Chains,
        manager: Manager,
        schedule: Schedule,
        waiting: Iterable[int] = (),
        hits: Ints | None = None,
    ) -> None:
        self.chains, self.manager, self.at_once = chains, manager, schedule.at_once
        self.most = self.left = schedule.step_tokens or 1 << 62
        self.shared = schedule.shared
        self.waiting = deque(waiting)
        self.known: dict[int, int] = {}  # of the requests that were preempted: their known tokens
        self.running: dict[int, list[int]] = {}
        self.served = Served(np.zeros(len(chains), np.int64) if hits is None else hits)
        self._done = EngineStep()
        self._alone = (-1, -1)  # the request that preempted itself last while no other ran, and after how many tokens

    @property
    def num_left(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def step(self) -> EngineStep:
        """Compute a step."""
        served, before, moved, self._done = self.served, self.served.preempted, False, EngineStep()
        self.manager.step_starts()
        self.left = self.most
        for request in [*self.running]:
            if request in self.running:
                moved |= self._compute(request)
        left = len(self.waiting)
        while self.waiting and len(self.running) < self.at_once and served.preempted == before:
            is_spent = not self.left  # then one text more that is cached as a whole
            if (is_spent and not self.manager.finds_all) or not self._admit() or is_spent:
                break
        served.steps += 1
        if not moved and left == len(self.waiting) and served.preempted == before:
            text = f"step {served.steps} computed nothing, with {len(self.running)} running requests"
            raise CheckFailed(text, needed=served.steps, available=len(self.running))
        for request, (length, _) in [*self.running.items()]:
            if length == self.chains.totals[request]:
                self.manager.stop(request, is_complete=True)
                del self.running[request]
                self.known.pop(request, None)
                self._done.ended.append(request)
        return self._done

    def _admit(self) -> bool:
        """Admit the first waiting request and compute its first chunk; False if it does not fit now."""
        request = self.waiting[0]
        known = self.known.get(request) or int(self.chains.prompts[request])
        hit = self.manager.find(request, known)
        end = self.manager.chunk(request, hit, min(known, hit + self.left), known)
        if end <= hit < known or not self.manager.start(request, end, known):
            if self.running:
                return False
            self._refuse()
            return True
        if request not in self.known:
            self.served.hits[request] = hit
            self._done.admitted.append(request)
        self.running[request] = [end, known]
        self.waiting.popleft()
        self.left -= self.shared * (end - hit)
        self._done.count(hit, end, int(self.chains.prompts[request]))
        return True

    def _refuse(self) -> None:
        """Give up the first waiting request, which no other one keeps from running."""
        self.served.never_fit += 1
        request = self.waiting.popleft()
        self.known.pop(request, None)
        self._done.refused.append(request)

    def _next(self, request: int, length: int, known: int) -> int:
        """Return how many tokens of ``request`` are known when its chunk after ``length`` tokens is computed."""
        more = (1 if self.shared else self.most) if length == known else 0
        return min(known + more, int(self.chains.totals[request]))

    def _compute(self, request: int) -> bool:
        """Compute the next chunk of ``request``, of its known text or of its output. Return whether there was one."""
        state = self.running[request]
        length, known = state[0], self._next(request, *state)
        state[1] = known
        end = self.manager.chunk(request, length, min(known, length + self.left), known)
        if end <= length:
            return False
        while not self.manager.grow(request, end, known):
            victim, (computed, text) = self.running.popitem()
            self.known[victim] = self._next(victim, computed, text) if self.shared else text
            self.manager.stop(victim, is_complete=False)
            self.waiting.appendleft(victim)
            self.served.preempted += 1
            if victim == request:
                if not self.running and self._alone == (request, length):  # it began again, and came no further
                    self._refuse()
                self._alone = (request, length) if not self.running else (-1, -1)
                return True
        state[0] = end
        self.left -= self.shared * (end - length)
        self._done.count(length, end, int(self.chains.prompts[request]))
        return True


def serve_with(
    manager: Manager, chains: Chains, schedule: Schedule, on_request: Callable[[int], None] | None = None
) -> Served:
    """Serve all requests of ``chains``. ``on_request`` is called after every step with the number of finished requests."""
    if not len(chains):
        raise BadInput(f"{chains.trace.name} has no requests")
    run = EngineRun(chains, manager, schedule, range(len(chains)))
    while run.num_left:
        run.step()
        if on_request is not None:
            on_request(len(chains) - run.num_left)
    return run.served
