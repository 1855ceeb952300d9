"""The metrics: what each is called, what its labels are, and where in the counters it is read. The table is ``metrics.json``.

What means the same as a metric of vLLM has its name, so that dashboards and routers made for vLLM read it; what vLLM has no
name for begins with ``kvpagoda:``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from kvpagoda.cache.stats import CacheStats
from kvpagoda.loading import read_json
from kvpagoda.scheduling import QueueStats
from kvpagoda.tiers.latency import Histogram

VLLM = "vllm:"
"""What stands before the names that are vLLM's."""
COMMON = ("model_name", "engine")
"""Labels of every metric, as vLLM's: the name of the model, and the number of the cache in its process."""


class Moment(NamedTuple):
    """What is read of one cache at a time; ``queue``: of the queue in front of it, if that is known."""

    cache: CacheStats
    queue: QueueStats | None = None


Told = tuple[tuple[str, ...], Any]
"""Values of labels, and what has the figures of these."""
STATES = ("private", "shared", "evictable", "free")
"""Of blocks, those that are held for a request first."""


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` is without the ``_total`` that Prometheus adds to a counter. ``of``: where it is read, one of
    ``SOURCES`` and, after a dot, the field of what is found there; without a field, that itself is the value."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    of: str
    text: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Its own labels, after ``COMMON``."""
        return SOURCES[self.of.partition(".")[0]][0]

    def read(self, at: Moment) -> list[tuple[tuple[str, ...], float | Histogram]]:
        """The values of its own labels, and its value for them, at a moment."""
        source, _, field = self.of.partition(".")
        return [(labels, getattr(told, field) if field else told) for labels, told in SOURCES[source][1](at)]

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores it."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


class _LookUps(NamedTuple):
    """Prompt tokens that were looked up in one place, and those that were found there."""

    asked: int
    found: int


def _on_device(at: Moment) -> _LookUps:
    return _LookUps(at.cache.prompt_tokens, at.cache.cached_tokens - at.cache.loaded_tokens)


def _below(at: Moment) -> Iterable[Told]:
    """What the device did not have, where there are tiers to look it up in."""
    asked, found = _on_device(at)
    return [((), _LookUps(asked - found, at.cache.loaded_tokens))] if at.cache.tiers else []


def _tiers(at: Moment) -> Iterable[Told]:
    """Each tier by its labels: its place below the device, from 1 on, and its name; two may have the same name."""
    return [((str(number), tier.name), tier) for number, tier in enumerate(at.cache.tiers, 1)]


def _calls(at: Moment) -> Iterable[Told]:
    return [((*labels, one.call), one) for labels, tier in _tiers(at) for one in tier.calls]


def _outcomes(at: Moment) -> Iterable[Told]:
    return [((*labels, key), n) for labels, one in _calls(at) for key, n in sorted(one.outcomes.items())]


def _blocks(at: Moment) -> Iterable[Told]:
    states = STATES[-1:] + STATES[:-1]
    return [((one.name, state), getattr(one, state)) for one in at.cache.groups for state in states]


_TIER = ("level", "tier")
SOURCES: dict[str, tuple[tuple[str, ...], Callable[[Moment], Iterable[Told]]]] = {
    "cache": ((), lambda at: [((), at.cache)]),
    "queue": ((), lambda at: [] if at.queue is None else [((), at.queue)]),
    "lookup": ((), lambda at: [((), _on_device(at))]),
    "lookup_below": ((), _below),
    "group": (("group",), lambda at: [((one.name,), one) for one in at.cache.groups]),
    "block": (("group", "state"), _blocks),
    "namespace": (("namespace",), lambda at: [((one.name,), one) for one in at.cache.namespaces]),
    "short_hit": (("reason",), lambda at: [((one.reason,), one) for one in at.cache.short_hits]),
    "tier": (_TIER, _tiers),
    "call": ((*_TIER, "call"), _calls),
    "outcome": ((*_TIER, "call", "outcome"), _outcomes),
}
"""Where metrics are read, by the first word of ``Metric.of``: the labels, and what there is at a moment by their values."""


METRICS = tuple(Metric(**row) for row in read_json("kvpagoda.metrics", "metrics.json")["metrics"])


def dashboard() -> str:
    """A dashboard of these metrics for Grafana: JSON to import."""
    return (files(__package__) / "dashboard.json").read_text()
