"""Simulates workers that serve a trace at its times of arrival: hits, and the time to the first and the last token.

    arrival ──rule──► FleetWorker ──steps──► Outcomes     one clock; a heap of the ends of steps

At one time the arrivals come first, then the ends of steps, then new steps begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from kvpagoda.policies import policy_name
from kvpagoda.probe import Probe
from kvpagoda.replay.batching import Batching
from kvpagoda.replay.engines.settings import DEFAULTS, EngineSettings
from kvpagoda.replay.fleet.costs import PER_SECOND, Costs, Ticks, tier_specs
from kvpagoda.replay.fleet.engine_worker import engine_workers
from kvpagoda.replay.fleet.routing import EngineCaches, OwnCaches, Untold, Views, rule_named
from kvpagoda.replay.fleet.worker import AnyWorker, FleetWorker, Outcomes, summary
from kvpagoda.replay.readers import Source
from kvpagoda.replay.setup import OWN, Fleet, Setup
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema
from kvpagoda.units import instance_of


@dataclass(frozen=True)
class WorkerResult:
    """The counts of one worker.

    Args:
        requests: that it served.
        prompt_tokens: of these.
        cached_tokens: prompt tokens that did not have to be computed.
        loaded_tokens: of the cached tokens, those that came from tiers.
        evicted_blocks: of its cache.
        steps: that it computed.
        busy: the share of the time, from the first arrival to the last end, in which it computed.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    evicted_blocks: int
    steps: int
    busy: float


@dataclass(frozen=True)
class SimulateResult:
    """What a simulation found. Times are in seconds; a time that begins with an arrival includes waiting."""

    trace: str
    """The name of the trace."""
    schema: str
    """The name of the schema."""
    policy: str
    """The name of the policy."""
    engine: str
    """Whose caches the workers have."""
    routing: str
    """The name of the rule."""
    nbytes: int
    """Memory of each worker's cache."""
    requests: int
    """Requests of the trace."""
    finished: int
    """Requests that ended; all others but ``never_fit`` are unfinished in a simulation that was interrupted."""
    never_fit: int
    """Requests that are larger than a whole cache. They were not served."""
    prompt_tokens: int
    """Tokens of the prompts that were admitted."""
    matched_tokens: int
    """Of these, those that were in the tree."""
    cached_tokens: int
    """Of these, those that did not have to be computed."""
    loaded_tokens: int
    """Of the cached tokens, those that came from tiers."""
    seconds: float
    """From the first arrival to the last end."""
    waited: dict[str, Any]
    """From the arrival to the admission: mean, p50, p90, p99, max."""
    first_token: dict[str, Any]
    """From the arrival to the first token."""
    last_token: dict[str, Any]
    """From the arrival to the last token."""
    between_tokens: dict[str, Any]
    """From token to token after the first, a mean for each request with two tokens or more."""
    workers: tuple[WorkerResult, ...]
    """The counts of each worker."""
    each: Outcomes = field(repr=False, compare=False)
    """What became of each request."""

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens of admitted requests that was not computed, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields but ``each``, and the hit rate, for JSON."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "each"}
        return {**plain, "hit_rate": self.hit_rate, "workers": [asdict(one) for one in self.workers]}


def simulate(
    trace: Source | Trace,
    schema: Schema,
    budget: int | str,
    *,
    costs: Costs | str = "h100",
    workers: int = 1,
    routing: str = "round-robin",
    tokens_per_id: int = 512,
    max_requests: int = 64,
    step_tokens: int = 2048,
    policy: str = "lru",
    engine: str = OWN,
    settings: EngineSettings = DEFAULTS,
    tiers: Mapping[str, int | str] | None = None,
    seed: int = 0,
    on_request: Callable[[int], None] | None = None,
    **more: Any,
) -> SimulateResult:
    """Serve a trace at its times of arrival with several caches, and count hits and times.

    Args:
        trace: a source of ``read_requests``, or a Trace.
        schema: of the model.
        budget: of each cache.
        costs: a ``Costs``, or a text that ``Costs.read`` takes, for the model that ``schema`` names.
        workers: caches, one each.
        routing: one of ``kvpagoda.replay.fleet.routing.RULES``.
        tokens_per_id: see ``kvpagoda.replay.setup.Setup``.
        max_requests: the most in a step of a worker (see ``kvpagoda.replay.fleet.worker``).
        step_tokens: the most that a step of a worker computes.
        policy: see ``Setup``.
        engine: whose cache the workers have, a name of ``PROFILES``; another engine's evicts, shares and preempts by
            its own rules, and has no policy, tiers or other settings but ``block_size``.
        settings: other options of the engine; of ours it is ``watermark`` alone.
        tiers: below each cache, the fastest first: a name in the costs -> bytes. They store what the cache evicts.
        seed: of random routing.
        on_request: called with the number of requests that ended.
        **more: block_size, shared, checkpoints, checkpoint_every, checkpoint_format, see ``Setup``; and fields of
            ``EngineSettings``, which count more than those of ``settings``.

    Raises:
        BadInput: an unknown policy, routing, engine, model or tier, a number out of range, fewer ``step_tokens`` than
            requests in a step, or a setting that another engine's cache does not have.
        NeverFits: a request does not fit into the empty cache.

    Examples:
        >>> from kvpagoda.replay import synthetic
        >>> trace = synthetic(50)
        >>> from kvpagoda.schema.presets import presets
        >>> schema = Schema.from_hf_config(presets()["llama-3.1-8b"]["config"])
        >>> result = simulate(trace, schema, "20GiB", costs="h100:llama-3.1-8b", tokens_per_id=64)
        >>> result.finished, round(result.hit_rate, 2), result.first_token["p50"] > 0.01
        (50, 0.71, True)
    """
    of_engine = {one.name: more.pop(one.name) for one in fields(EngineSettings) if one.name in more}
    settings = replace(instance_of(settings, EngineSettings, "settings"), **of_engine)
    setup = Setup(schema, budget, tokens_per_id, max_requests, step_tokens, policy, **more)
    fleet = Fleet(costs, workers, routing, engine, settings, tiers or {}, seed)
    made = Simulation(trace, setup, fleet)
    try:
        made.run(on_request)
        return made.result()
    finally:
        made.close()


class Simulation:
    """A simulation that can be interrupted: ``result`` is what is done so far. Raises as ``simulate``."""

    def __init__(self, trace: Source | Trace, setup: Setup, fleet: Fleet) -> None:
        fleet.check(setup)
        setup = replace(setup, watermark=fleet.settings.watermark) if fleet.engine == OWN else setup
        self._trace, self._setup, self._fleet = Trace.read(trace), setup, fleet
        self.outcomes = Outcomes(self._trace.arrivals)
        costs = fleet.costs
        if isinstance(costs, str):
            costs = Costs.read(costs, setup.schema.name)
        self.workers: Sequence[AnyWorker]
        views: Views
        if fleet.engine == OWN:
            own = [self._worker(index, costs) for index in range(fleet.workers)]
            caches = [worker.batching.cache for worker in own]
            self.workers, views = own, OwnCaches(self._trace, caches, setup.tokens_per_id)
        else:
            others = engine_workers(self._trace, setup, fleet, costs, self.outcomes)
            self.workers, views = others, EngineCaches(others)
        self._rule = rule_named(fleet.routing, self._trace, self.workers, views, fleet.seed)

    def _worker(self, index: int, costs: Costs) -> FleetWorker:
        """Return worker ``index``, with a cache of ours."""
        setup, tiers = self._setup, self._fleet.tiers
        is_followed = self._fleet.routing == "prefix-aware"
        cache = setup.cache(self._trace, events=Untold() if is_followed else None)
        if tiers:  # their sizes in records follow from the plan
            cache = setup.cache(
                self._trace, events=Untold() if is_followed else None, tiers=tier_specs(tiers, cache.plan)
            )
            Probe(cache).load_always()  # what is found is loaded, whatever this machine measures
        batching, ticks = Batching(cache, self._trace, setup.tokens_per_id), Ticks(costs, cache.plan, tiers)
        return FleetWorker(index, batching, ticks, setup, self.outcomes)

    def run(self, on_request: Callable[[int], None] | None = None) -> None:
        """Serve all requests."""
        outcomes, workers, ends = self.outcomes, self.workers, list[tuple[int, int]]()
        order = np.argsort(outcomes.arrived, kind="stable").tolist()
        coming = [*zip(outcomes.arrived[order].tolist(), order)][::-1]
        while coming or ends:
            now = min(coming[-1][0] if coming else ends[0][0], ends[0][0] if ends else coming[-1][0])
            touched = set[int]()
            while coming and coming[-1][0] <= now:
                number = coming.pop()[1]
                index, expected = self._rule.choose(number)
                workers[index].enqueue(number, expected)
                end = workers[index].cut(now)
                if end is not None:
                    heappush(ends, (end, index))
                touched.add(index)
            while ends and ends[0][0] <= now:
                end, index = heappop(ends)
                if workers[index].until == end:  # else the stretch was cut, and its end is another entry
                    workers[index].finish()
                    touched.add(index)
            for index in sorted(touched):
                if workers[index].until is None and (end := workers[index].begin(now)) is not None:
                    heappush(ends, (end, index))
            if on_request is not None:
                on_request(sum(worker.num_ended for worker in workers))

    def close(self) -> None:
        """Close the caches, which ends the threads of their tiers."""
        for worker in self.workers:
            worker.close()

    def result(self) -> SimulateResult:
        """Return what was found so far."""
        each, trace = self.outcomes, self._trace
        ended = each.last[each.last >= 0]
        ticks = int(ended.max() - each.arrived.min()) if len(ended) else 0
        generated = np.where((each.last >= 0) & (trace.output_lengths > 1), trace.output_lengths - 1, np.nan)
        return SimulateResult(
            trace.name, self._setup.schema.name, policy_name(self._setup.policy), self._fleet.engine, self._fleet.routing,
            self.workers[0].nbytes, len(trace), len(ended),
            sum(worker.never_fit for worker in self.workers), int(each.prompt.sum()), int(each.matched.sum()),
            int(each.cached.sum()), int(each.loaded.sum()), ticks / PER_SECOND,
            summary(each.since_arrival(each.admitted)), summary(each.since_arrival(each.first)),
            summary(each.since_arrival(each.last)), summary((each.last - each.first) / PER_SECOND / generated),
            tuple(self._counts(worker, ticks) for worker in self.workers), each,
        )  # fmt: skip

    def _counts(self, worker: AnyWorker, ticks: int) -> WorkerResult:
        each, mine = self.outcomes, self.outcomes.worker == worker.index
        prompt, cached, loaded = (int(column[mine].sum()) for column in (each.prompt, each.cached, each.loaded))
        busy = worker.busy / max(1, ticks)
        return WorkerResult(int(mine.sum()), prompt, cached, loaded, worker.num_evicted, worker.num_steps, busy)
