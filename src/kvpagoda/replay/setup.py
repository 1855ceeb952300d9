"""What a run is set up with: how each cache is made and used, and which workers there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvpagoda import KVCache
from kvpagoda.errors import BadInput
from kvpagoda.policies import EvictionPolicy
from kvpagoda.replay.batching import cache_for
from kvpagoda.replay.engines.settings import DEFAULTS, EngineSettings, check_owner
from kvpagoda.replay.fleet.costs import Costs
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema
from kvpagoda.units import whole_number

OWN = "kvpagoda"
"""The engine whose workers have a whole cache of this library."""


@dataclass(frozen=True)
class Setup:
    """How each cache of a run is made and used.

    ``schema``, ``budget``: its layers and its memory. ``tokens_per_id``: tokens that an id of the trace stands for, unless
    the trace says it. ``max_requests``: the most that run at once. ``step_tokens``: the most tokens that a step computes,
    of each request (``serve``) or of all together (``simulate``). ``shared``: one budget for all groups; else a fixed
    split. ``block_size`` and ``policy`` are those of ``KVCache``, what begins with checkpoint those of ``Retention``, and
    ``watermark`` that of ``Limits``.
    Raises BadInput."""

    schema: Schema
    budget: int | str
    tokens_per_id: int = 512
    max_requests: int = 64
    step_tokens: int = 2048
    policy: str | EvictionPolicy = "lru"
    block_size: int | None = None
    shared: bool = True
    checkpoints: int | None = None
    checkpoint_every: int = 0
    checkpoint_format: str | None = None
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens_per_id", "max_requests", "step_tokens"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, at_least=1))

    def cache(self, trace: Trace | None, **parts: Any) -> KVCache:
        """Return a cache for the requests of ``trace``, see ``cache_for``. ``parts``: its tiers, events or record."""
        kept = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _OTHERS}
        return cache_for(trace, self.schema, self.budget, self.step_tokens, **kept, **parts)


_OTHERS = {"schema", "budget", "step_tokens", "tokens_per_id"}


@dataclass(frozen=True)
class Fleet:
    """The workers of a simulation, and how it goes; see ``simulate``. ``settings``: of the ``engine``. Raises BadInput."""

    costs: Costs | str = "h100"
    workers: int = 1
    routing: str = "round-robin"
    engine: str = OWN
    settings: EngineSettings = DEFAULTS
    tiers: Mapping[str, int | str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", whole_number(self.workers, "workers", at_least=1, below=10_001))

    def check(self, setup: Setup) -> None:
        """Raise BadInput if these workers cannot have caches of this ``setup``."""
        most, step_tokens = setup.max_requests, setup.step_tokens
        if step_tokens < most:
            text = f"a step gives each of {most} requests a token, so step_tokens must not be less, got {step_tokens}"
            raise BadInput(text, needed=most, available=step_tokens)
        check_owner(self.engine, self.settings)
        if self.engine == OWN:
            return
        plain = Setup(setup.schema, setup.budget)
        given = [name for name in _OURS if getattr(setup, name) != getattr(plain, name)] + ["tiers"] * bool(self.tiers)
        if given:
            text = f"the cache of {self.engine} evicts and keeps by its own rules; leave out {', '.join(given)}"
            raise BadInput(text, needed=given)


_OURS = ("policy", "shared", "checkpoints", "checkpoint_every", "checkpoint_format")
"""Settings that caches of other engines do not have."""
