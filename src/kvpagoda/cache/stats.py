"""The counters of a cache, as one picture of a moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpagoda.cache.core import Core
from kvpagoda.tiers.level import LevelStats


@dataclass(frozen=True)
class GroupStats:
    """Blocks of one group: free + held = total; ``evictable`` of the held ones would be given up for a running request, and
    ``outstanding`` of the free and evictable ones are reserved."""

    name: str
    total: int
    free: int
    held: int
    evictable: int
    outstanding: int
    peak_held: int


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made."""

    running: int
    max_requests: int
    opened: int
    closed: int
    computed_tokens: int
    """Tokens committed: prompt and output tokens that went through the model."""
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    loaded_tokens: int
    """Of these, prompt tokens that came from tiers below the device."""
    evicted_blocks: int
    evicted_checkpoints: int
    passed_boundaries: int
    """Places in prompts where states should have been copied, and a step went on past them: hits that are lost, which
    ``KVCache.step_limit`` avoids."""
    nbytes: int
    suspended: int
    """Requests that are set aside."""
    swap_nbytes: int
    """Bytes of host memory that they take, of ``swap_capacity``."""
    swap_capacity: int
    groups: tuple[GroupStats, ...]
    tiers: tuple[LevelStats, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)


def stats_of(core: Core) -> CacheStats:
    """The counters of a cache now. O(groups and requests)."""
    groups = tuple(
        GroupStats(
            group.plan.name, core.num_blocks(group), group.free.num_free, group.num_held, core.prefix.num_evictable(group),
            group.outstanding, group.peak_held,
        )
        for group in core.groups
    )  # fmt: skip
    alive, counters = (*core.running.values(), *core.suspended), core.counters
    return CacheStats(
        running=len(core.running),
        max_requests=core.plan.max_requests,
        opened=counters.opened,
        closed=counters.closed,
        computed_tokens=counters.computed + sum(request.length - request.match.resumable for request in alive),
        cached_tokens=counters.cached,
        loaded_tokens=counters.loaded,
        evicted_blocks=core.prefix.num_evicted_blocks,
        evicted_checkpoints=core.prefix.num_evicted_checkpoints,
        passed_boundaries=core.counters.passed,
        nbytes=core.plan.nbytes,
        suspended=len(core.suspended),
        swap_nbytes=core.swap.used_nbytes,
        swap_capacity=core.swap.nbytes,
        groups=groups,
        tiers=() if core.offloader is None else core.offloader.stats(),
    )
