"""The metrics: what each is called, what its labels are, and where in the counters it is read. Data, and no client library.

What means the same as a metric of vLLM has its name, so that dashboards and routers made for vLLM read it; what vLLM has no
name for begins with ``kvpagoda:``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, NamedTuple

from kvpagoda.cache.stats import CacheStats, GroupStats, NamespaceStats
from kvpagoda.scheduling import QueueStats
from kvpagoda.tiers.latency import Histogram
from kvpagoda.tiers.level import CallStats, LevelStats

VLLM = "vllm:"
"""What stands before the names that are vLLM's."""
COMMON = ("model_name", "engine")
"""Labels of every metric, as vLLM's: the name of the model, and the number of the cache in its process."""


class Moment(NamedTuple):
    """What is read of one cache at a time; ``queue``: of the queue in front of it, if that is known."""

    cache: CacheStats
    queue: QueueStats | None = None


Sample = tuple[tuple[str, ...], float | Histogram]
"""The values of a metric's own labels, and its value."""


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` is without the ``_total`` that Prometheus adds to a counter. ``labels``: its own, after ``COMMON``.
    ``read``: its samples at a moment."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    text: str
    read: Callable[[Moment], Iterable[Sample]]

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores it."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


def _one(value: Callable[[CacheStats], float]) -> Callable[[Moment], Iterable[Sample]]:
    return lambda at: [((), value(at.cache))]


def _queue(value: Callable[[QueueStats], float]) -> Callable[[Moment], Iterable[Sample]]:
    return lambda at: [] if at.queue is None else [((), value(at.queue))]


def _groups(value: Callable[[GroupStats], float]) -> Callable[[Moment], Iterable[Sample]]:
    return lambda at: [((group.name,), value(group)) for group in at.cache.groups]


def _namespaces(value: Callable[[NamespaceStats], float]) -> Callable[[Moment], Iterable[Sample]]:
    return lambda at: [((one.name,), value(one)) for one in at.cache.namespaces]


def _levels(at: Moment) -> Iterable[tuple[tuple[str, str], LevelStats]]:
    """Each tier by its labels: its place below the device, from 1 on, and its name; two may have the same name."""
    return [((str(number), tier.name), tier) for number, tier in enumerate(at.cache.tiers, 1)]


def _tiers(value: Callable[[LevelStats], float]) -> Callable[[Moment], Iterable[Sample]]:
    return lambda at: [(labels, value(tier)) for labels, tier in _levels(at)]


def _calls(value: Callable[[CallStats], float | Histogram]) -> Callable[[Moment], Iterable[Sample]]:
    return lambda at: [((*labels, one.call), value(one)) for labels, tier in _levels(at) for one in tier.calls]


def _blocks(at: Moment) -> Iterable[Sample]:
    for group in at.cache.groups:
        for state in ("free", "private", "shared", "evictable"):
            yield (group.name, state), getattr(group, state)


def _outcomes(at: Moment) -> Iterable[Sample]:
    for labels, tier in _levels(at):
        for one in tier.calls:
            for outcome, records in sorted(one.outcomes.items()):
                yield (*labels, one.call, outcome), records


def _from_device(stats: CacheStats) -> int:
    return stats.cached_tokens - stats.loaded_tokens


METRICS = (
    Metric("vllm:num_requests_running", "gauge", (), "Requests that run.", _one(lambda at: at.running)),
    Metric("vllm:num_requests_waiting", "gauge", (), "Requests that wait.", _queue(lambda at: at.waiting)),
    Metric("vllm:num_preemptions", "counter", (), "Requests preempted.", _queue(lambda at: at.preempted)),
    Metric(
        "vllm:kv_cache_usage_perc", "gauge", (), "Share of the memory that requests and pins hold, 0 to 1.",
        _one(lambda at: at.usage),
    ),
    Metric("vllm:prefix_cache_queries", "counter", (), "Prompt tokens looked up.", _one(lambda at: at.prompt_tokens)),
    Metric("vllm:prefix_cache_hits", "counter", (), "Prompt tokens found on the device.", _one(_from_device)),
    Metric(
        "vllm:external_prefix_cache_queries", "counter", (), "Prompt tokens looked up in tiers: not found on the device.",
        lambda at: [((), at.cache.prompt_tokens - _from_device(at.cache))] if at.cache.tiers else [],
    ),
    Metric(
        "vllm:external_prefix_cache_hits", "counter", (), "Prompt tokens loaded from tiers.",
        lambda at: [((), at.cache.loaded_tokens)] if at.cache.tiers else [],
    ),
    Metric("kvpagoda:requests_max", "gauge", (), "Requests that may run at once.", _one(lambda at: at.max_requests)),
    Metric("kvpagoda:requests_suspended", "gauge", (), "Requests set aside.", _one(lambda at: at.suspended)),
    Metric("kvpagoda:requests_closed", "counter", (), "Requests that are over.", _one(lambda at: at.closed)),
    Metric("kvpagoda:requests_swapped", "counter", (), "Preempted and set aside.", _queue(lambda at: at.swapped)),
    Metric("kvpagoda:cache_bytes", "gauge", (), "Memory of the cache.", _one(lambda at: at.nbytes)),
    Metric("kvpagoda:swap_bytes", "gauge", (), "Host memory of suspended requests.", _one(lambda at: at.swap_nbytes)),
    Metric("kvpagoda:swap_capacity_bytes", "gauge", (), "The most of it.", _one(lambda at: at.swap_capacity)),
    Metric("kvpagoda:block_tokens", "gauge", (), "Tokens in a block.", _one(lambda at: at.block_size)),
    Metric(
        "kvpagoda:blocks", "gauge", ("group", "state"),
        "Blocks: free, private to a request, shared (kept for reuse and in use), evictable (kept for reuse alone).", _blocks,
    ),
    Metric("kvpagoda:block_bytes", "gauge", ("group",), "Bytes of a block.", _groups(lambda at: at.block_nbytes)),
    Metric("kvpagoda:blocks_reserved", "gauge", ("group",), "Reserved by requests.", _groups(lambda at: at.outstanding)),
    Metric("kvpagoda:blocks_evicted", "counter", ("group",), "Blocks given up.", _groups(lambda at: at.evicted)),
    Metric(
        "kvpagoda:found_tokens", "counter", ("group",), "Prompt tokens for which a group had what requests need.",
        _groups(lambda at: at.found_tokens),
    ),
    Metric("kvpagoda:checkpoints", "gauge", (), "Places to resume at that are kept.", _one(lambda at: at.checkpoints)),
    Metric("kvpagoda:checkpoints_evicted", "counter", (), "Given up.", _one(lambda at: at.evicted_checkpoints)),
    Metric(
        "kvpagoda:checkpoints_passed", "counter", (), "Places where states should have been copied, and steps went on.",
        _one(lambda at: at.passed_boundaries),
    ),
    Metric("kvpagoda:pins", "gauge", (), "Pins.", _one(lambda at: at.pins)),
    Metric("kvpagoda:pinned_blocks", "gauge", (), "Blocks of pinned texts.", _one(lambda at: at.pinned_blocks)),
    Metric(
        "kvpagoda:short_hits", "counter", ("reason",), "Requests whose hit was cut short.",
        lambda at: [((one.reason,), one.requests) for one in at.cache.short_hits],
    ),
    Metric(
        "kvpagoda:short_hit_tokens", "counter", ("reason",), "Tokens found, and computed all the same.",
        lambda at: [((one.reason,), one.tokens) for one in at.cache.short_hits],
    ),
    Metric("kvpagoda:requests", "counter", ("namespace",), "Requests opened.", _namespaces(lambda at: at.requests)),
    Metric("kvpagoda:prompt_tokens", "counter", ("namespace",), "Looked up.", _namespaces(lambda at: at.prompt_tokens)),
    Metric("kvpagoda:cached_tokens", "counter", ("namespace",), "Saved.", _namespaces(lambda at: at.cached_tokens)),
    Metric(
        "kvpagoda:loaded_tokens", "counter", ("namespace",), "Of the saved ones: from tiers.",
        _namespaces(lambda at: at.loaded_tokens),
    ),
    Metric(
        "kvpagoda:computed_tokens", "counter", ("namespace",), "Tokens that went through the model.",
        _namespaces(lambda at: at.computed_tokens),
    ),
    Metric("kvpagoda:tier_available", "gauge", ("level", "tier"), "1, or 0.", _tiers(lambda at: at.is_available)),
    Metric("kvpagoda:tier_records", "gauge", ("level", "tier"), "Records held.", _tiers(lambda at: at.num_records)),
    Metric("kvpagoda:tier_bytes", "gauge", ("level", "tier"), "Bytes held.", _tiers(lambda at: at.nbytes)),
    Metric(
        "kvpagoda:tier_capacity_bytes", "gauge", ("level", "tier"), "The most of them.",
        _tiers(lambda at: at.capacity_nbytes),
    ),
    Metric(
        "kvpagoda:tier_loaded_tokens", "counter", ("level", "tier"), "Prompt tokens whose blocks came from here.",
        _tiers(lambda at: at.loaded_tokens),
    ),
    Metric(
        "kvpagoda:tier_dropped_records", "counter", ("level", "tier"), "Not stored for want of staging memory.",
        _tiers(lambda at: at.dropped),
    ),
    Metric(
        "kvpagoda:tier_outcomes", "counter", ("level", "tier", "call", "outcome"),
        "Records asked for by store, lookup and load, by what became of them.", _outcomes,
    ),
    Metric(
        "kvpagoda:tier_moved_bytes", "counter", ("level", "tier", "call"), "Bytes stored and loaded.",
        _calls(lambda at: at.nbytes),
    ),
    Metric(
        "kvpagoda:tier_call_seconds", "histogram", ("level", "tier", "call"), "From a request to the answer.",
        _calls(lambda at: at.seconds),
    ),
)  # fmt: skip


def dashboard() -> str:
    """A dashboard of these metrics for Grafana: JSON to import."""
    return (files(__package__) / "dashboard.json").read_text()
