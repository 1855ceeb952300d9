"""A worker of a simulation whose cache is that of another engine: ``driver.Run`` with a clock.

    begin: one step of the run ──► its end is known ──► finish: first tokens, ends of requests ──► begin ..

What a step computes is looked up by others from the next step on, or in the same step, as the engine's profile says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpagoda.errors import BadInput
from kvpagoda.replay.batching import cache_for
from kvpagoda.replay.chains import Chains
from kvpagoda.replay.costs import Costs, Ticks
from kvpagoda.replay.driver import Manager, Run, Schedule, Step
from kvpagoda.replay.engine_pool import pool_of
from kvpagoda.replay.engines import manager_of
from kvpagoda.replay.trace import Trace
from kvpagoda.replay.worker import Outcomes
from kvpagoda.schema import Schema

OWN = "kvpagoda"
"""The engine whose workers have a whole cache of this library."""


class EngineWorker:
    """Worker ``index``, with the cache of ``manager``, which has ``nbytes`` bytes. See ``worker.Worker``."""

    def __init__(
        self, index: int, chains: Chains, manager: Manager, schedule: Schedule, ticks: Ticks, outcomes: Outcomes, nbytes: int
    ) -> None:  # fmt: skip
        self.index, self.outcomes, self.nbytes = index, outcomes, nbytes
        self._chains, self._manager, self._ticks = chains, manager, ticks
        self._run = Run(chains, manager, schedule, hits=outcomes.cached)
        self.until: int | None = None
        self.backlog = self.busy = self.num_steps = self.num_ended = self.never_fit = 0
        self._expected: dict[int, int] = {}  # waiting request -> the tokens of its prompt that will be computed
        self._waits = 0  # their sum
        self._began = 0
        self._step = Step()
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
        self._waits -= sum(self._expected.pop(number) for number in step.refused + step.admitted)
        for number in step.admitted:
            self.outcomes.worker[number], self.outcomes.admitted[number] = self.index, now
            self.outcomes.prompt[number] = self._chains.prompts[number]
            self.outcomes.matched[number] = self.outcomes.cached[number]
        self._first += step.admitted
        self.never_fit += len(step.refused)
        self._began = now
        steps = 1 if step.prefilled or step.decoding else 0  # else requests were refused, or found whole
        self.until = now + self._ticks.of(steps, step.prefilled, step.decoding, step.context)
        return self.until

    def finish(self) -> None:
        """End the step in progress, at ``until``."""
        now, running, prompts = self.until, self._run.running, self._chains.prompts
        assert now is not None
        ended = {*self._step.ended}
        answered = [one for one in self._first if one in ended or (one in running and running[one][0] >= prompts[one])]
        self.outcomes.first[answered] = now
        self._first = [one for one in self._first if one not in {*answered}]
        self.outcomes.last[self._step.ended] = now
        self.num_ended += len(ended)
        self.num_steps += now > self._began
        self.busy += now - self._began
        preempted = sum(known for one, known in self._run.known.items() if one not in running)
        self.backlog = self._waits + preempted + sum(known - length for length, known in running.values())
        self.until = None

    def close(self) -> None:
        """Do nothing: it has no memory and no threads."""


def engine_workers(
    count: int, trace: Trace, schema: Schema, budget: int | str, engine: str, costs: Costs, outcomes: Outcomes, per_id: int, *,
    max_requests: int, step_tokens: int, policy: str, tiers: Mapping[str, int | str], retention: int | None,
    block_size: int | None = None, **others: Any,
) -> list[EngineWorker]:  # fmt: skip
    """Return ``count`` workers with the cache that ``engine`` has in ``budget`` bytes. Raises BadInput, NeverFits."""
    if policy != "lru" or tiers or any(value is not None for value in others.values()):
        given = [name for name, value in others.items() if value is not None] + ["tiers"] * bool(tiers)
        given += [f"policy={policy}"] * (policy != "lru")
        raise BadInput(f"the cache of {engine} evicts and keeps by its own rules; leave out {', '.join(given)}")
    plan = cache_for(None, schema, budget, step_tokens, max_requests=max_requests).plan
    pool = pool_of(engine, schema, plan, budget, block_size)
    chains, schedule = (
        Chains(replace(trace, block_size=per_id), pool.block_size),
        Schedule(max_requests, step_tokens, True),
    )
    ticks, nbytes = Ticks(costs, plan), (pool.num_blocks + 1) * pool.nbytes
    managers = (manager_of(engine, chains, pool.num_blocks, schedule, pool.groups, retention) for _ in range(count))
    return [EngineWorker(i, chains, each, schedule, ticks, outcomes, nbytes) for i, each in enumerate(managers)]
