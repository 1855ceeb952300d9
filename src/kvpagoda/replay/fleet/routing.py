"""Which worker of a simulation a request is sent to: at random, in turns, or to one that has much of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvpagoda import KVCache
from kvpagoda.abc import CacheObserver
from kvpagoda.errors import unknown_name
from kvpagoda.events.event_log import EventLog
from kvpagoda.probe import Probe
from kvpagoda.replay.fleet.engine_worker import EngineWorker
from kvpagoda.replay.fleet.worker import AnyWorker
from kvpagoda.replay.texts import text_of
from kvpagoda.replay.trace import Trace

RULES = ("round-robin", "random", "prefix-aware")
"""The names of the rules."""


class RoutingRule(Protocol):
    """Chooses a worker for each request, in the order of their arrival."""

    def choose(self, number: int) -> tuple[int, int]:
        """Return the index of the worker for request ``number``, and how many tokens of its prompt are expected to be
        computed there."""
        ...


class RoundRobin:
    """Request after request goes to the next worker."""

    def __init__(self, trace: Trace, num_workers: int) -> None:
        self._lengths, self._num_workers, self._next = trace.input_lengths, num_workers, 0

    def choose(self, number: int) -> tuple[int, int]:
        chosen, self._next = self._next, (self._next + 1) % self._num_workers
        return chosen, int(self._lengths[number])


class Random:
    """Each request goes to a worker at random, all equally likely."""

    def __init__(self, trace: Trace, num_workers: int, seed: int) -> None:
        self._lengths = trace.input_lengths
        self._drawn = np.random.default_rng(seed).integers(num_workers, size=len(trace))

    def choose(self, number: int) -> tuple[int, int]:
        return int(self._drawn[number]), int(self._lengths[number])


class Views(Protocol):
    """What a router knows of the caches of all workers."""

    def cached(self, number: int) -> Sequence[int]:
        """Return for each worker how many tokens of the prompt of request ``number`` it need not compute."""
        ...


class PrefixAware:
    """Each request goes to the worker where the fewest prompt tokens are to be computed before its first token: the worker's
    backlog, and what is not cached there of its own prompt. Of equal ones the worker with the fewest requests, then the one
    that was sent the fewest tokens so far."""

    def __init__(self, trace: Trace, workers: Sequence[AnyWorker], views: Views) -> None:
        self._lengths, self._workers, self._views = np.maximum(trace.input_lengths, 1), workers, views
        self._sent = [0] * len(workers)

    def choose(self, number: int) -> tuple[int, int]:
        num_prompt, ranks = int(self._lengths[number]), list[tuple[int, int, int, int, int]]()
        for worker, cached in zip(self._workers, self._views.cached(number)):
            expected = num_prompt - cached
            sent = self._sent[worker.index]
            ranks.append((worker.backlog + expected, worker.num_requests, sent, worker.index, expected))
        *_, chosen, expected = min(ranks)
        self._sent[chosen] += expected
        return chosen, expected


class Untold(EventLog):
    """Makes a cache publish blocks when it must for a router that follows it, and keeps no record of them."""

    on_cached = CacheObserver.on_cached
    on_evicted = CacheObserver.on_evicted


class OwnCaches:
    """What the prefix trees of the ``caches``, each with an event log, have now: the numbers of a ``Follower`` that has read
    all events of each. No event is made for that."""

    def __init__(self, trace: Trace, caches: Sequence[KVCache], tokens_per_id: int) -> None:
        self._trace, self._per_id = trace, tokens_per_id
        self._finds = [Probe(cache).resumable for cache in caches]

    def cached(self, number: int) -> list[int]:
        """See ``Views``. O(nodes on the path) and O(common tokens) for each cache."""
        text, num_prompt = text_of(self._trace, number, self._per_id)
        prompt = text[:num_prompt]
        return [find(prompt) for find in self._finds]


class EngineCaches:
    """What the caches of other engines would answer themselves."""

    def __init__(self, workers: Sequence[EngineWorker]) -> None:
        self._workers = workers

    def cached(self, number: int) -> list[int]:
        """See ``Views``. O(blocks) for each worker."""
        return [worker.cached(number) for worker in self._workers]


def rule_named(name: str, trace: Trace, workers: Sequence[AnyWorker], views: Views, seed: int) -> RoutingRule:
    """Return a new rule of ``RULES``. ``views``: for prefix-aware. ``seed``: of random. Raises BadInput."""
    if name == "prefix-aware":
        return PrefixAware(trace, workers, views)
    if name == "random":
        return Random(trace, len(workers), seed)
    if name == "round-robin":
        return RoundRobin(trace, len(workers))
    raise unknown_name("routing rule", name, RULES)
