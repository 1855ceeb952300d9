"""The counters of a cache, as one picture of a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.cache.core import Core
from kvpagoda.cache.counters import Tally
from kvpagoda.cache.request import Request
from kvpagoda.tiers.level import LevelStats


@dataclass(frozen=True)
class GroupStats:
    """Blocks of one group: free + held = total, and held = private + shared + evictable."""

    name: str
    total: int
    free: int
    held: int
    private: int
    """Held by one request alone."""
    shared: int
    """Kept for reuse, and in use by a request or a pin."""
    evictable: int
    """Kept for reuse alone: they would be given up for a running request."""
    outstanding: int
    """Of the free and evictable ones: reserved by running requests."""
    peak_held: int
    block_nbytes: int
    evicted: int
    """Blocks given up so far."""
    found_tokens: int
    """Prompt tokens for which this group had what a request needs: where it is less than another's, it cut hits short."""


@dataclass(frozen=True)
class ShortHits:
    """Requests that were cut short for one reason (``PrefixMatch.limited_by``), and tokens that were found and had to be
    computed all the same."""

    reason: str
    requests: int
    tokens: int


@dataclass(frozen=True)
class NamespaceStats:
    """What requests of one namespace saved and cost. ``name`` does not give away its salt: see ``Counters.label``."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made."""

    running: int
    max_requests: int
    opened: int
    closed: int
    prompt_tokens: int
    """Prompt tokens that were looked up."""
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
    block_size: int
    checkpoints: int
    """Places to resume at that are kept now."""
    pins: int
    pinned_blocks: int
    groups: tuple[GroupStats, ...]
    short_hits: tuple[ShortHits, ...]
    namespaces: tuple[NamespaceStats, ...]
    tiers: tuple[LevelStats, ...] = ()

    @property
    def usage(self) -> float:
        """The share of the memory that running requests and pins hold, 0 to 1: what is kept for reuse alone does not count."""
        return sum((group.private + group.shared) * group.block_nbytes for group in self.groups) / self.nbytes

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """What a person asks first: requests, tokens, and the blocks of each group by state."""
        return "\n".join([
            f"requests  {self.running} of {self.max_requests} run, {self.suspended} suspended, {self.closed:,} closed",
            f"tokens    {self.prompt_tokens:,} looked up, {self.cached_tokens:,} cached ({self.loaded_tokens:,} from tiers), "
            f"{self.computed_tokens:,} computed",
            *(
                f"blocks    {one.name}: {one.private:,} private, {one.shared:,} shared, {one.evictable:,} evictable, "
                f"{one.free:,} free; {one.evicted:,} evicted"
                for one in self.groups
            ),
        ])  # fmt: skip


def stats_of(core: Core, names: Mapping[str, str] = MappingProxyType({})) -> CacheStats:
    """The counters of a cache now. Changes nothing. ``names``: label of a namespace -> what to call it. O(groups, requests,
    namespaces and pins)."""
    counters, prefix = core.counters, core.prefix
    running, suspended = [*core.running.values()], [*core.suspended]
    namespaces = _namespaces(core, (*running, *suspended), names)
    pins = prefix.pins_of()
    return CacheStats(
        running=len(running),
        max_requests=core.plan.max_requests,
        opened=sum(one.requests for one in namespaces),
        closed=counters.closed,
        prompt_tokens=sum(one.prompt_tokens for one in namespaces),
        computed_tokens=sum(one.computed_tokens for one in namespaces),
        cached_tokens=sum(one.cached_tokens for one in namespaces),
        loaded_tokens=sum(one.loaded_tokens for one in namespaces),
        evicted_blocks=sum(prefix.num_evicted),
        evicted_checkpoints=prefix.num_evicted_checkpoints,
        passed_boundaries=counters.passed,
        nbytes=core.plan.nbytes,
        suspended=len(suspended),
        swap_nbytes=core.swap.used_nbytes,
        swap_capacity=core.swap.nbytes,
        block_size=core.block_size,
        checkpoints=len(prefix.kept),
        pins=len(pins),
        pinned_blocks=sum(pin.holding.lease.num_blocks for pin in pins),
        groups=tuple(_group(core, group) for group in core.groups),
        short_hits=tuple(
            ShortHits(reason, requests, counters.short_tokens[reason])
            for reason, requests in sorted(counters.short_requests.items())
        ),
        namespaces=namespaces,
        tiers=() if core.offloader is None else core.offloader.stats(),
    )


def _group(core: Core, group: BlockGroup) -> GroupStats:
    cached, idle = core.prefix.num_cached(group), core.prefix.num_evictable(group)
    return GroupStats(
        group.plan.name, core.num_blocks(group), group.free.num_free, group.num_held, group.num_held - cached, cached - idle,
        idle, group.outstanding, group.peak_held, group.plan.row_nbytes, core.prefix.num_evicted[group.index],
        core.counters.found[group.plan.name],
    )  # fmt: skip


def _namespaces(core: Core, alive: Iterable[Request], names: Mapping[str, str]) -> tuple[NamespaceStats, ...]:
    """What every namespace cost and saved, the requests ``alive`` included; those of one name together."""
    computed: dict[int, int] = {}
    for request in alive:
        key = id(request.tally)
        computed[key] = computed.get(key, 0) + request.length - request.match.resumable
    found: dict[str, Tally] = {}
    for label, tally in core.counters.tallies():
        sum_of = found.setdefault(names.get(label, label), Tally())
        sum_of.requests += tally.requests
        sum_of.prompt += tally.prompt
        sum_of.cached += tally.cached
        sum_of.loaded += tally.loaded
        sum_of.computed += tally.computed + computed.get(id(tally), 0)
    return tuple(
        NamespaceStats(name, one.requests, one.prompt, one.cached, one.loaded, one.computed)
        for name, one in sorted(found.items())
    )
