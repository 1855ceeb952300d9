"""Which worker of a simulation a request is sent to: at random, in turns, or to one that has much of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvpagoda.cache.event_log import EventLog
from kvpagoda.errors import unknown_name
from kvpagoda.replay.texts import text_of
from kvpagoda.replay.trace import Trace
from kvpagoda.replay.worker import Worker

RULES = ("round-robin", "random", "prefix-aware")
"""The names of the rules."""


class Rule(Protocol):
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


class PrefixAware:
    """Each request goes to the worker where the fewest prompt tokens are to be computed before its first token: the worker's
    backlog, and what is not cached there of its own prompt. Of equal ones the worker with the fewest requests, then the one
    that was sent the fewest tokens so far.

    A ``Follower`` for each of the ``logs`` knows what the worker has cached, from the events of its cache alone. O(n) for
    each worker."""

    def __init__(self, trace: Trace, workers: Sequence[Worker], logs: Sequence[EventLog], tokens_per_id: int) -> None:
        from kvpagoda.events.follower import Follower  # needs the extra events
        from kvpagoda.events.stream import EventStream

        self._trace, self._per_id, self._workers = trace, tokens_per_id, workers
        self._streams = [EventStream(log, keep=1, encoding="array") for log in logs]
        self._followers = [Follower() for _ in logs]
        for stream, follower in zip(self._streams, self._followers):
            for message in stream.replay(0):
                follower.feed(*message)
        self._sent = [0] * len(workers)

    def choose(self, number: int) -> tuple[int, int]:
        text, num_prompt = text_of(self._trace, number, self._per_id)
        prompt, ranks = text[:num_prompt], list[tuple[int, int, int, int, int]]()
        for stream, follower, worker in zip(self._streams, self._followers, self._workers):
            message = stream.drain()
            if message is not None:
                follower.feed(*message)
            expected = num_prompt - follower.resumable(prompt).resumable
            sent = self._sent[worker.index]
            ranks.append((worker.backlog + expected, worker.num_requests, sent, worker.index, expected))
        *_, chosen, expected = min(ranks)
        self._sent[chosen] += expected
        return chosen, expected


def rule_named(
    name: str, trace: Trace, workers: Sequence[Worker], logs: Sequence[EventLog], tokens_per_id: int, seed: int
) -> Rule:
    """Return a new rule of ``RULES``. Raises BadInput, and MissingExtra if prefix-aware lacks its packages."""
    if name == "prefix-aware":
        return PrefixAware(trace, workers, logs, tokens_per_id)
    if name == "random":
        return Random(trace, len(workers), seed)
    if name == "round-robin":
        return RoundRobin(trace, len(workers))
    raise unknown_name("routing rule", name, RULES)
