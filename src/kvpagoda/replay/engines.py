"""Replays a trace as an engine's own manager of the cache would serve it: which tokens each request finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from kvpagoda.replay.chains import Chains
from kvpagoda.replay.driver import Manager, Schedule, serve_with
from kvpagoda.replay.edge_lru import EdgeLRU
from kvpagoda.replay.profiles import Profile, profile
from kvpagoda.replay.queued import QueuedManager
from kvpagoda.replay.readers import Source
from kvpagoda.replay.trace import Ints, Trace, readable
from kvpagoda.units import whole_number

ONE_AT_A_TIME = Schedule()


@dataclass(frozen=True)
class EngineResult:
    """What the requests of a trace find in the cache of an engine.

    ``never_fit``: requests that did not fit into an empty cache; they find nothing. ``preempted``: how often a running
    request had to give its memory to another; what it finds when it starts again is not counted. ``per_request`` int64
    ``[requests]``: the tokens of its prompt that each request found.
    """

    trace: str
    engine: str
    capacity_blocks: int
    block_size: int
    at_once: int
    step_tokens: int | None
    requests: int
    prompt_tokens: int
    hit_tokens: int
    never_fit: int
    preempted: int
    steps: int
    per_request: Ints = field(default_factory=lambda: np.empty(0, np.int64), compare=False, repr=False)

    @property
    def hit_rate(self) -> float:
        """The share of the tokens of the prompts that were found, 0 to 1."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the array, and the hit rate, for JSON."""
        plain = {column.name: getattr(self, column.name) for column in fields(self) if column.compare}
        return {**plain, "hit_rate": self.hit_rate}


def replay_engine(
    trace: Source | Trace,
    engine: str,
    capacity_blocks: int,
    *,
    block_size: int = 16,
    schedule: Schedule = ONE_AT_A_TIME,
    on_request: Callable[[int], None] | None = None,
) -> EngineResult:
    """Serve a trace with the cache of ``engine``, a name of ``PROFILES``, of ``capacity_blocks`` blocks of ``block_size``
    tokens.

    Requests run in their order, those that ``schedule`` lets run at once; their times are not used. The rest of a prompt
    that has no id, and every output, are tokens that no other request has. ``on_request`` is called after each step with the
    number of finished requests. Raises BadInput before anything runs.

    >>> chains = [1, 2], [1, 2], [1, 3]
    >>> records = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in chains]
    >>> replay_engine(records, "vllm-0.33", capacity_blocks=100).per_request.tolist()  # the last token is computed again
    [0, 1008, 512]
    """
    known = profile(engine)
    capacity = whole_number(capacity_blocks, "a capacity in blocks", at_least=1, below=2**31 - 1)
    columns = readable(trace)
    chains = Chains(columns, block_size)
    served = serve_with(_manager(known, chains, capacity, schedule), chains, schedule, on_request)
    return EngineResult(
        columns.name, engine, capacity, chains.block_size, schedule.at_once, schedule.step_tokens, len(chains),
        int(chains.prompts.sum()), int(served.hits.sum()), served.never_fit, served.preempted, served.steps, served.hits,
    )  # fmt: skip


def _manager(known: Profile, chains: Chains, capacity: int, schedule: Schedule) -> Manager:
    """Return the manager that a profile sets up."""
    if known.store == "tree":
        from kvpagoda.replay.own_manager import OwnManager  # imports a whole cache

        return OwnManager(chains, capacity, schedule.at_once)
    if known.store == "edges":
        return EdgeLRU(chains, capacity)
    return QueuedManager(chains, capacity, known)
