"""Serves a trace with a whole cache for a schema, or one for each of several workers, without memory behind it: to
choose budgets, intervals and policies."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from kvpagoda.errors import RetryLater
from kvpagoda.events.event_log import EventLog
from kvpagoda.policies import EvictionPolicy, policy_name
from kvpagoda.probe import Probe
from kvpagoda.recording import Recording
from kvpagoda.replay.batching import AdmittedRequest, Batching, Piece
from kvpagoda.replay.jobs import process_pool
from kvpagoda.replay.readers import Source
from kvpagoda.replay.setup import Setup
from kvpagoda.replay.trace import Ints, Trace
from kvpagoda.schema import Schema
from kvpagoda.tiers.spec import TierSpec, tier_from_text
from kvpagoda.units import whole_number

_STEP, _COMPUTES, _CACHED, _TICK = 1000.0, 900.0, 300.0, 0.01
"""Microseconds on the clock of a recording: a step takes a millisecond; requests are admitted at its beginning, and have
computed after 0.9 of it; the cached part of a request is shown as 0.3 of it. Two events are a tick apart at least."""
_counts: Any = None  # in a worker: the number of requests that each worker has served


@dataclass(frozen=True)
class ServeResult:
    """The counts of a cache for one schema that served one trace."""

    trace: str
    """The name of the trace."""
    schema: str
    """The name of the schema."""
    policy: str
    """The name of the policy."""
    nbytes: int
    """Bytes of memory of the cache."""
    requests: int
    """Requests of the trace."""
    never_fit: int
    """Requests that are larger than the whole cache. They were not served."""
    prompt_tokens: int
    """Tokens of the prompts that were served."""
    matched_tokens: int
    """Prompt tokens that were in the tree."""
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    loaded_tokens: int
    """Of the cached tokens, those that came from tiers."""
    limited_by: dict[str, int]
    """The reason that limited a hit -> number of requests."""
    evicted_blocks: int
    """Blocks evicted, in all groups."""
    evicted_checkpoints: int
    """Checkpoints evicted."""
    mean_running: float
    """Running requests, on average over the steps."""
    unusable_percent: float
    """The share of the memory that was free or padding but could not be used, on average over the steps in which a
    request waited for memory or something was evicted."""
    pressed_steps: int
    """Steps in which a request waited for memory or something was evicted."""
    blocks_per_run: float
    """The mean length of the runs of neighbouring block ids in the block tables of requests when they end, of all
    groups."""
    steps: int
    """Steps that were computed."""
    short_tokens: dict[str, int]
    """The reason that limited a hit -> tokens that were in the tree but had to be computed."""
    groups: dict[str, dict[str, int]]
    """Group -> ``tokens``: prompt tokens for which it had what a request needs; ``evicted``: blocks."""
    each: Ints = field(repr=False, compare=False)
    """int64 ``[requests, 3]``: prompt tokens of each request, those in the tree, those cached; 0 if it never fit."""

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were cached, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields but ``each``, and the hit rate, for JSON."""
        plain = {column.name: getattr(self, column.name) for column in fields(self) if column.name != "each"}
        return {**plain, "hit_rate": self.hit_rate}


def serve(
    trace: Source | Trace,
    schema: Schema,
    budget: int | str,
    *,
    tokens_per_id: int = 512,
    max_requests: int = 64,
    step_tokens: int = 2048,
    batch_tokens: int | None = None,
    policy: str | EvictionPolicy = "lru",
    tiers: Many[TierSpec] = (),
    part: range | None = None,
    events: EventLog | None = None,
    record: str | os.PathLike[str] | None = None,
    on_request: Callable[[int], None] | None = None,
    **settings: Any,
) -> ServeResult:
    """Admit, compute, publish and close every request of a trace, in its order.

    The rest of a prompt, and every output, are tokens that no other request has, since traces do not contain outputs.

    Args:
        trace: a source of ``read_requests``, or a Trace.
        schema: of the model.
        budget: bytes of the cache, as a number or as text.
        tokens_per_id: tokens of an id (public Mooncake traces: 512), where the trace gives it no number of its own.
        max_requests: the most that run at once.
        step_tokens: the most of each request in a step.
        batch_tokens: the most of all requests in a step together, those that run longest first, and one of an output, as
            engines do (vLLM's ``max_num_batched_tokens``). A request then waits for the next step while a running one
            computes a part of its prompt, see ``KVCache.should_wait``. None: neither.
        policy: see ``kvpagoda.replay.setup.Setup``.
        tiers: below the cache; without memory behind the cache a record is one page.
        part: the numbers of the requests to serve; None: all.
        events: see ``KVCache``.
        record: a file for trace events (see ``kvpagoda.recording``), where a step takes a millisecond.
        on_request: called with the number of finished requests.
        **settings: block_size, shared, checkpoints, checkpoint_every, checkpoint_format, watermark, see ``Setup``.

    Raises:
        BadInput: an unknown policy or setting, a number out of range, a ``record`` that cannot be written, or a trace
            without blocks.
        NeverFits: a request does not fit into the empty cache.
    """
    setup = Setup(schema, budget, tokens_per_id, max_requests, step_tokens, policy, **settings)
    columns, clock = Trace.read(trace), TraceClock()
    recording = None if record is None else Recording(record, clock, _CACHED)
    cache = setup.cache(columns, tiers=tiers, events=events, record=recording)
    numbers = range(len(columns)) if part is None else part
    run = Steps(Batching(cache, columns, setup.tokens_per_id, numbers), setup.step_tokens, clock, batch_tokens)
    while run.step():
        if on_request is not None:
            on_request(run.probe.num_closed)
    if on_request is not None:
        on_request(len(numbers))
    result = _result(columns, setup, run, len(numbers))
    cache.close()
    return result


def _result(trace: Trace, setup: Setup, run: Steps, requests: int) -> ServeResult:
    """Return what ``run`` counted, which served ``requests`` of ``trace``."""
    batching, plan, stats = run.batching, run.batching.cache.plan, run.batching.cache.stats()
    unusable = run.unusable / max(1, run.pressed) / max(1, plan.nbytes)
    return ServeResult(
        trace=trace.name,
        schema=setup.schema.name,
        policy=policy_name(setup.policy),
        nbytes=plan.nbytes,
        requests=requests,
        never_fit=batching.never_fit,
        prompt_tokens=batching.prompt_tokens,
        matched_tokens=batching.matched,
        cached_tokens=stats.cached_tokens,
        loaded_tokens=stats.loaded_tokens,
        limited_by=dict(batching.limited_by),
        evicted_blocks=stats.evicted_blocks,
        evicted_checkpoints=stats.evicted_checkpoints,
        mean_running=run.running_steps / max(1, run.steps),
        unusable_percent=100 * unusable,
        pressed_steps=run.pressed,
        blocks_per_run=run.blocks / max(1, run.runs),
        steps=run.steps,
        short_tokens={hits.reason: hits.tokens for hits in stats.short_hits},
        groups={group.name: {"tokens": group.found_tokens, "evicted": group.evicted} for group in stats.groups},
        each=np.array(run.each, np.int64).reshape(-1, 3),
    )


def serve_multi_worker(
    trace: Source | Trace,
    schema: Schema,
    budget: int | str,
    *,
    workers: int,
    store: str | None = None,
    on_request: Callable[[int], None] | None = None,
    **settings: Any,
) -> list[ServeResult]:
    """``serve`` a trace with several processes at once; worker i modulo ``workers`` serves request i.

    How many hits come from the store depends on the timing of the workers, as in production.

    Args:
        trace: see ``serve``.
        schema: see ``serve``.
        budget: of each worker.
        workers: processes.
        store: a tier that all workers share, as ``tier_from_text`` reads it. A block is a record in it, without the
            bytes of rows.
        on_request: called with the number of finished requests.
        **settings: other arguments of ``serve``.

    Returns:
        one result for each worker.

    Raises:
        BadInput: ``workers`` is not 1 to 1,024, ``store`` is no tier, or an argument that ``serve`` refuses.
        NeverFits: a request does not fit into the empty cache.
    """
    workers = whole_number(workers, "workers", at_least=1, below=1025)
    from concurrent.futures import wait  # slow to load
    from multiprocessing import get_context

    _tiers(store)
    columns = Trace.read(trace)
    counts = get_context("spawn").Array("q", workers)
    with process_pool(workers, _begin, counts) as submit:
        work = partial(_serve, columns, schema, budget, store, workers, settings)
        futures = [submit(work, worker) for worker in range(workers)]
        waiting = set(futures)
        while waiting:
            waiting = wait(waiting, timeout=0.2).not_done
            if on_request is not None:
                on_request(sum(counts[:]))
        return [future.result() for future in futures]


class TraceClock:
    """The clock of a recording. ``now``: microseconds."""

    now = 0.0

    def __call__(self) -> float:
        self.now += _TICK
        return self.now


class Steps:
    """Steps of up to ``step_tokens`` tokens of each running request, and their counters. ``batch_tokens``: see ``serve``."""

    def __init__(
        self, batching: Batching, step_tokens: int, clock: TraceClock, batch_tokens: int | None = None
    ) -> None:
        self.batching, self.step_tokens, self.clock = batching, step_tokens, clock
        self.batch_tokens = None if batch_tokens is None else whole_number(batch_tokens, "batch_tokens", at_least=1)
        self.left = 0  # of the tokens of a step
        self.probe = Probe(batching.cache)
        self.running: list[AdmittedRequest] = []
        self.steps = self.running_steps = self.pressed = self.unusable = self.evicted = 0
        self.blocks = self.runs = 0  # of requests that ended: see ``BlockGroup.runs``
        self.each: list[tuple[int, int, int]] = []  # see ServeResult

    def step(self) -> bool:
        """Admit requests and compute one step of all running ones. Return False when no request is left."""
        self.clock.now = max(self.clock.now, self.steps * _STEP)
        self.left = self.batch_tokens or 1 << 62
        due = [(request, self._due(request)) for request in self.running]
        is_pressed = self._admit(due)
        self.clock.now = max(self.clock.now, self.steps * _STEP + _COMPUTES)
        self.running = [request for request, end in due if self._compute(request, end)]
        before, self.evicted = self.evicted, self.probe.num_evicted + self.probe.num_evicted_checkpoints
        self.steps += 1
        self.running_steps += len(self.running)
        if is_pressed or self.evicted > before:
            self.pressed += 1
            self.unusable += self.probe.unusable_nbytes()
        return bool(self.running or self.batching.waiting)

    def _admit(self, due: list[Piece]) -> bool:
        """Open the waiting requests that there is room for, and tokens of this step, and add them to ``due`` with where
        their first pieces end. Return whether one has to wait for memory."""
        while self.batching.waiting and len(due) < self.batching.cache.plan.max_requests:
            if self.batch_tokens and (self.batching.next_waits(due) or not self.left):
                return False
            try:
                _, request = self.batching.open_next()
            except RetryLater:
                return True
            if request is None:
                self.each.append((0, 0, 0))
            else:
                due.append((request, self._due(request)))
                sequence = request.sequence
                self.each.append((request.num_prompt, sequence.match.num_tokens, sequence.cached_tokens))
        return False

    def _due(self, request: AdmittedRequest) -> int:
        """Return where the next piece of ``request`` ends: of the prompt at most at the next position where a checkpoint is
        due, of the output up to its last block boundary, or one token of it. Takes its tokens from those of the step."""
        total, length = len(request.text), request.sequence.length
        most = min(self.step_tokens, self.left)
        if not most:
            return length
        if length < request.num_prompt:
            end = self.batching.piece(request, most)
        elif self.batch_tokens:
            end = length + 1
        else:
            boundary = total // request.block_size * request.block_size
            end = min(length + most, boundary if length < boundary else total)
        if self.batch_tokens:
            self.left -= end - length
        return end

    def _compute(self, request: AdmittedRequest, end: int) -> bool:
        """Compute the piece of ``request`` up to ``end``. Return whether something is left; if not, close it."""
        total = len(request.text)
        if end == request.sequence.length:
            return True
        end = request.extend(end)
        request.commit(end)
        if end == total:
            num_blocks, num_runs = self.probe.runs(request.sequence)
            self.blocks += num_blocks
            self.runs += num_runs
            request.sequence.close()
        return end < total


def _tiers(store: str | None) -> tuple[TierSpec, ...]:
    return () if store is None else (tier_from_text(store, record_nbytes=1, write="commit", timeout=1.0),)


def _begin(counts: Any) -> None:
    global _counts
    _counts = counts


def _serve(
    trace: Trace,
    schema: Schema,
    budget: int | str,
    store: str | None,
    workers: int,
    settings: dict[str, Any],
    worker: int,
) -> ServeResult:
    part, count = range(worker, len(trace), workers), partial(_counts.__setitem__, worker)
    return serve(trace, schema, budget, tiers=_tiers(store), part=part, on_request=count, **settings)
