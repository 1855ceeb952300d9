"""A worker of a simulation whose cache is that of another engine: ``driver.Run`` with a clock.

    begin: one step of the run ──► its end is known ──► finish: first tokens, ends of requests ──► begin ..

What a step computes is looked up by others from the next step on, or in the same step, as the engine's profile says."""

from __future__ import annotations

from dataclasses import replace

from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import EngineRun, EngineStep, Schedule
from kvpagoda.replay.engines.pool import pool_of
from kvpagoda.replay.engines.run import manager_of
from kvpagoda.replay.fleet.costs import Costs, Ticks
from kvpagoda.replay.fleet.worker import Outcomes
from kvpagoda.replay.setup import Fleet, Setup
from kvpagoda.replay.trace import Trace


class EngineWorker:
    """Worker ``index``, which serves with ``run``, in a cache of ``nbytes`` bytes. See ``worker.AnyWorker``."""

    def __init__(self, index: int, run: EngineRun, ticks: Ticks, outcomes: Outcomes, nbytes: int) -> None:
        self.index, self.outcomes, self.nbytes = index, outcomes, nbytes
        self._run, self._ticks = run, ticks
        self._chains, self._manager = run.chains, run.manager
        self.until: int | None = None
        self.backlog = self.busy = self.num_steps = self.num_ended = self.never_fit = 0
        self._expected: dict[int, int] = {}  # waiting request -> the tokens of its prompt that will be computed
        self._waits = 0  # their sum
        self._began = 0
        self._step = EngineStep()
        self._first: list[int] = []  # running requests without a first token

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self._run.num_left

    @property
    def num_evicted(self) -> int:
        """Blocks that were evicted."""
        return self._manager.num_evicted

    def cached(self, number: int) -> int:
        """Return how many tokens of the prompt of request ``number`` it would find now."""
        return self._manager.peek(number)

    def enqueue(self, number: int, expected: int) -> None:
        """Let request ``number`` wait. ``expected``: the tokens of its prompt that will be computed."""
        self._run.waiting.append(number)
        self._expected[number] = expected
        self._waits += expected
        self.backlog += expected

    def cut(self, now: int) -> int | None:
        """Return when the step in progress ends: no request is admitted before."""
        return self.until

    def begin(self, now: int) -> int | None:
        """Begin a step and return when it ends; None, beginning none, if there is nothing to do."""
        if not self._run.num_left:
            return None
        step = self._step = self._run.step()
        for number in step.refused + step.admitted:
            self._waits -= self._expected.pop(number, 0)  # 0: it was admitted once, was preempted, and is refused now
        for number in step.admitted:
            self.outcomes.worker[number], self.outcomes.admitted[number] = self.index, now
            self.outcomes.prompt[number] = self._chains.prompts[number]
            self.outcomes.matched[number] = self.outcomes.cached[number]
        self._first = [number for number in self._first if number not in step.refused] + step.admitted
        self.never_fit += len(step.refused)
        self._began = now
        steps = 1 if step.prefilled or step.decoding else 0  # else requests were refused, or found whole
        self.until = now + self._ticks.of(steps, step.prefilled, step.decoding, step.context)
        return self.until

    def finish(self) -> None:
        """End the step in progress, at ``until``."""
        now, step = self.until, self._step
        assert now is not None
        if self._first:
            self._answer(now)
        if step.ended:
            self.outcomes.last[step.ended] = now
            self.num_ended += len(step.ended)
        self.num_steps += now > self._began
        self.busy += now - self._began
        has_moved = step.prefilled or step.admitted or step.refused or self._run.known
        if has_moved:  # else each running request computed the one token that it did not have yet
            running = self._run.running
            preempted = sum(known for one, known in self._run.known.items() if one not in running)
            self.backlog = self._waits + preempted + sum(known - length for length, known in running.values())
        self.until = None

    def _answer(self, now: int) -> None:
        """Note the first tokens of those that have computed their prompts."""
        running, prompts, ended = self._run.running, self._chains.prompts, {*self._step.ended}
        answered = {one for one in self._first if one in ended or (one in running and running[one][0] >= prompts[one])}
        if answered:
            self.outcomes.first[[*answered]] = now
            self._first = [one for one in self._first if one not in answered]

    def close(self) -> None:
        """Do nothing: it has no memory and no threads."""


def engine_workers(trace: Trace, setup: Setup, fleet: Fleet, costs: Costs, outcomes: Outcomes) -> list[EngineWorker]:
    """Return workers with the cache that the engine of ``fleet`` has in the budget of ``setup``. Raises BadInput,
    NeverFits."""
    plan = replace(setup, block_size=None).cache(None).plan
    size, settings = setup.block_size, fleet.settings
    pool = pool_of(fleet.engine, setup.schema, plan, setup.budget, size, settings.memory_ratio, settings.unified_memory)
    chains = Chains(replace(trace, block_size=setup.tokens_per_id), pool.block_size)
    schedule, ticks = Schedule(setup.max_requests, setup.step_tokens, True), Ticks(costs, plan)
    workers = list[EngineWorker]()
    for index in range(fleet.workers):
        manager = manager_of(fleet.engine, chains, pool, schedule, settings)
        run = EngineRun(chains, manager, schedule, hits=outcomes.cached)
        workers.append(EngineWorker(index, run, ticks, outcomes, pool.nbytes))
    return workers
