"""The counters of a cache at one moment: ``CacheStats``, which ``KVCache.stats`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.counters import HIT_TOKENS, ResidencyStats, Tally
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.groups import CacheGroup
from kvpagoda.tiers.health import Histogram
from kvpagoda.tiers.level import LevelStats

_NO_HITS = Histogram(HIT_TOKENS, (0,) * (len(HIT_TOKENS) + 1), 0)


@dataclass(frozen=True)
class GroupStats:
    """Blocks of one group: total = free + held, and held = private + shared + evictable."""

    name: str
    """Of the group."""
    total: int
    """Blocks of the group."""
    free: int
    """Blocks that nothing is in."""
    held: int
    """Blocks that requests hold or that are cached."""
    private: int
    """Blocks that one request alone holds."""
    shared: int
    """Cached blocks that a request uses or a pin keeps."""
    evictable: int
    """Cached blocks that no request uses and no pin keeps: evicted when a request needs room."""
    outstanding: int
    """Blocks that running requests reserved and do not hold yet; the free and evictable blocks must cover these."""
    peak_held: int
    """The most blocks that were held at once."""
    block_nbytes: int
    """Bytes of a block, in all layers of the group."""
    evicted: int
    """Blocks evicted since the cache was made."""
    found_tokens: int
    """Prompt tokens for which this group had what a request needs. A group with fewer than another one cut hits short.
    """
    cold: int
    """Of the evictable blocks: those that slid out of every window and that no checkpoint needs, which are evicted first."""
    blocks_per_run: float = 0.0
    """The mean length of the runs of neighbouring block ids in the block tables of running requests; 0 without any. A run is
    one descriptor of a transfer, or one copy."""


@dataclass(frozen=True)
class ShortHits:
    """Requests whose hit was cut short for one reason.

    Args:
        reason: see ``PrefixMatch.limited_by``.
        requests: how many there were.
        tokens: those that were found but had to be computed nevertheless.
    """

    reason: str
    requests: int
    tokens: int


@dataclass(frozen=True)
class NamespaceStats:
    """What the requests of one namespace saved and cost.

    Args:
        name: does not reveal the salt of the namespace: see ``Counters.label``.
        requests: that were opened.
        prompt_tokens: that were looked up.
        cached_tokens: of these, those that did not have to be computed.
        loaded_tokens: of the cached ones, those that were loaded from tiers.
        computed_tokens: committed tokens that were not cached.
    """

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    cached_nbytes: int | None = None
    """Bytes that are cached of it on the device, in use or not, as ``Retention.quota`` counts them; None without quotas."""


@dataclass(frozen=True)
class CacheStats:
    """The counters of a cache, since it was made."""

    running: int
    """Requests that run now."""
    max_requests: int
    """The most requests that run at once."""
    opened: int
    """Requests that were opened."""
    closed: int
    """Requests that were closed."""
    prompt_tokens: int
    """Prompt tokens that were looked up."""
    computed_tokens: int
    """Tokens committed that were not cached: prompt and output tokens that went through the model."""
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    loaded_tokens: int
    """Of ``cached_tokens``: those that were loaded from tiers below the device."""
    evicted_blocks: int
    """Blocks evicted, in all groups."""
    evicted_checkpoints: int
    """Checkpoints evicted."""
    passed_boundaries: int
    """Positions in prompts at which states should have been copied, but a step went past them. No request can resume
    there; ``KVCache.step_limit`` avoids this."""
    nbytes: int
    """Bytes of memory that the cache has on its device."""
    suspended: int
    """Requests that are suspended now."""
    swap_nbytes: int
    """Bytes of host memory that suspended requests take, of ``swap_capacity``."""
    swap_capacity: int
    """Bytes of host memory for suspended requests (``Limits.swap``)."""
    block_size: int
    """Tokens of a block."""
    checkpoints: int
    """Checkpoints that are kept now."""
    pins: int
    """Pins that are held now."""
    pinned_blocks: int
    """Blocks that they keep."""
    groups: tuple[GroupStats, ...]
    """The blocks of each group."""
    short_hits: tuple[ShortHits, ...]
    """Requests whose hit was cut short, by the reason."""
    namespaces: tuple[NamespaceStats, ...]
    """What requests saved and cost, by namespace."""
    tiers: tuple[LevelStats, ...] = ()
    """The counters of each tier, the fastest first."""
    dropped: int = 0
    """Of the ``closed`` requests: those whose sequences were collected without ``close``. They run until slots or blocks are
    lacking."""
    publish_failures: int = 0
    """Errors while blocks or checkpoints were published, other than lack of memory. They are logged, and tried again."""
    hit_tokens: Histogram = _NO_HITS
    """Requests by the prompt tokens that they did not have to compute."""
    sleeps: int = 0
    """How often the cache gave its memory back (``KVCache.sleep``)."""
    is_asleep: bool = False
    """Whether the cache sleeps now."""
    page_locked_nbytes: int = 0
    """Bytes of host memory that are page-locked now (``Limits.page_locked``)."""
    residency: ResidencyStats | None = None
    """How long sampled blocks live; None unless a ``CacheCollector`` follows them."""

    @property
    def usage(self) -> float:
        """The share of the memory that running requests and pins hold, 0 to 1. Cached blocks that none of them uses do
        not count."""
        return sum((group.private + group.shared) * group.block_nbytes for group in self.groups) / self.nbytes

    def to_dict(self) -> dict[str, Any]:
        """Return the same values as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a summary in lines: requests, tokens, and the blocks of each group by state."""
        return "\n".join([
            f"requests  {self.running} of {self.max_requests} run, {self.suspended} suspended, {self.closed:,} closed",
            f"tokens    {self.prompt_tokens:,} looked up, {self.cached_tokens:,} cached ({self.loaded_tokens:,} from tiers), "
            f"{self.computed_tokens:,} computed",
            *(
                f"blocks    {group.name}: {group.private:,} private, {group.shared:,} shared, "
                f"{group.evictable:,} evictable, {group.free:,} free; {group.evicted:,} evicted"
                for group in self.groups
            ),
        ])  # fmt: skip


def stats_of(core: Core, names: Mapping[str, str] = MappingProxyType({})) -> CacheStats:
    """Return the counters of ``core`` now. Changes nothing.

    ``names``: label of a namespace -> the name to show for it. O(groups + requests + namespaces + pins + blocks of
    running requests)."""
    counters, prefix = core.counters, core.prefix
    # Before the requests: what one that ends meanwhile has computed is in neither then, and never in both.
    tallies = [(label, tally, replace(tally)) for label, tally in counters.tallies()]
    running, suspended = [*core.running.values()], [*core.suspended]
    namespaces = _namespaces(core, tallies, dict.fromkeys((*running, *suspended)), names)
    pins = prefix.pins_of()
    return CacheStats(
        running=len(running),
        max_requests=core.plan.max_requests,
        opened=sum(namespace.requests for namespace in namespaces),
        closed=counters.closed,
        prompt_tokens=sum(namespace.prompt_tokens for namespace in namespaces),
        computed_tokens=sum(namespace.computed_tokens for namespace in namespaces),
        cached_tokens=sum(namespace.cached_tokens for namespace in namespaces),
        loaded_tokens=sum(namespace.loaded_tokens for namespace in namespaces),
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
        pinned_blocks=prefix.num_pinned,
        groups=tuple(
            replace(group_stats(core, group), blocks_per_run=_blocks_per_run(core, group)) for group in core.groups
        ),
        short_hits=tuple(
            ShortHits(reason, requests, counters.short_tokens[reason])
            for reason, requests in sorted(counters.short_requests.items())
        ),
        namespaces=namespaces,
        tiers=core.tiers.stats(),
        dropped=counters.dropped,
        publish_failures=counters.failed,
        hit_tokens=Histogram(HIT_TOKENS, tuple(counters.hit_counts), counters.hit_total),
        sleeps=counters.sleeps,
        is_asleep=core.guard.aside is not None,
        page_locked_nbytes=core.memory.page_locked_nbytes,
        residency=None if core.residency is None else ResidencyStats(*core.residency()),
    )


def group_stats(core: Core, group: CacheGroup) -> GroupStats:
    """Return the counters of ``group``, one of ``core``, now, but for ``blocks_per_run``. O(1)."""
    cached, idle = group.num_cached, group.num_evictable
    return GroupStats(
        group.plan.name, core.num_blocks(group), group.free.num_free, group.num_held, group.num_held - cached, cached - idle,
        idle, group.outstanding, group.peak_held, group.plan.row_nbytes, core.prefix.num_evicted[group.index],
        core.counters.found[group.plan.name], group.num_cold,
    )  # fmt: skip


def _blocks_per_run(core: Core, group: CacheGroup) -> float:
    num_blocks, num_runs = group.runs([*core.running])
    return num_blocks / max(1, num_runs)


def _namespaces(
    core: Core, tallies: Iterable[tuple[str, Tally, Tally]], alive: Iterable[RequestState], names: Mapping[str, str]
) -> tuple[NamespaceStats, ...]:
    """Return the counters of every namespace, the requests ``alive`` included. Namespaces with the same name are added
    up. ``tallies``: label, counters, and a copy of them."""
    computed: dict[int, int] = {}
    for request in alive:
        key = id(request.tally)
        computed[key] = computed.get(key, 0) + request.length - request.match.resumable
    found: dict[str, Tally] = {}
    for label, own, tally in tallies:
        total = found.setdefault(names.get(label, label), Tally())
        total.requests += tally.requests
        total.prompt += tally.prompt
        total.cached += tally.cached
        total.loaded += tally.loaded
        total.computed += tally.computed + computed.get(id(own), 0)
    cached: dict[str, int | None] = {}
    if core.prefix.quota is not None:
        cached = dict.fromkeys(found, 0)
        for space, nbytes in core.prefix.quota.nbytes().items():
            label = core.counters.name(space)
            name = names.get(label, label)
            cached[name] = (cached.get(name) or 0) + nbytes
    return tuple(
        NamespaceStats(name, total.requests, total.prompt, total.cached, total.loaded, total.computed, cached.get(name))
        for name, total in sorted(found.items())
    )
