"""The metrics: the name and labels of each, and the counter that it is read from. The table is ``metrics.json``.

A metric that means the same as one of vLLM has vLLM's name, so that dashboards and routers made for vLLM read it. The
names of all others begin with ``kvpagoda_``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from kvpagoda import CacheStats
from kvpagoda.loading import read_json
from kvpagoda.scheduling import QueueStats
from kvpagoda.tiers.health import Histogram

VLLM = "vllm:"
"""The prefix of vLLM's metric names."""
COMMON = ("model_name", "engine")
"""Labels of every metric, as in vLLM: the name of the model, and the number of the cache in its process."""


class Moment(NamedTuple):
    """The counters of one cache at one time. ``queue``: those of the queue in front of the cache, None if it is not
    known."""

    cache: CacheStats
    queue: QueueStats | None = None


Told = tuple[tuple[str, ...], Any]
"""Values of labels, and the object whose fields are the figures for these labels."""
STATES = ("private", "shared", "evictable", "free")
"""States of blocks; those that requests hold come first."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    ``name``: without the ``_total`` that Prometheus adds to a counter. ``of``: where the value is read: one of
    ``SOURCES`` and, after a dot, the field of each object of that source; without a field the object itself is the
    value. ``text``: its help.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    of: str
    text: str

    @property
    def labels(self) -> tuple[str, ...]:
        """The metric's own labels, which follow ``COMMON``."""
        return SOURCES[self.of.partition(".")[0]][0]

    def read(self, at: Moment) -> list[tuple[tuple[str, ...], float | Histogram]]:
        """Return the samples of the metric at a moment: (values of its own labels, value) for each."""
        source, _, field = self.of.partition(".")
        return [(labels, getattr(figures, field) if field else figures) for labels, figures in SOURCES[source][1](at)]

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores the metric."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


class _LookUps(NamedTuple):
    """Prompt tokens that were looked up on the device, or in the tiers, and those that were found there."""

    asked: int
    found: int


def _on_device(at: Moment) -> _LookUps:
    return _LookUps(at.cache.prompt_tokens, at.cache.cached_tokens - at.cache.loaded_tokens)


def _below(at: Moment) -> Iterable[Told]:
    """Look-ups in tiers: of the prompt tokens that were not found on the device. Empty without tiers."""
    asked, found = _on_device(at)
    return [((), _LookUps(asked - found, at.cache.loaded_tokens))] if at.cache.tiers else []


def _tiers(at: Moment) -> Iterable[Told]:
    """Each tier with its labels: its level below the device, from 1 on, and its name, which two tiers may share."""
    return [((str(level), tier.name), tier) for level, tier in enumerate(at.cache.tiers, 1)]


def _calls(at: Moment) -> Iterable[Told]:
    return [((*labels, call.call), call) for labels, tier in _tiers(at) for call in tier.calls]


def _outcomes(at: Moment) -> Iterable[Told]:
    return [((*labels, outcome), n) for labels, call in _calls(at) for outcome, n in sorted(call.outcomes.items())]


def _blocks(at: Moment) -> Iterable[Told]:
    states = STATES[-1:] + STATES[:-1]
    return [((group.name, state), getattr(group, state)) for group in at.cache.groups for state in states]


_TIER = ("level", "tier")
SOURCES: dict[str, tuple[tuple[str, ...], Callable[[Moment], Iterable[Told]]]] = {
    "cache": ((), lambda at: [((), at.cache)]),
    "queue": ((), lambda at: [] if at.queue is None else [((), at.queue)]),
    "lookup": ((), lambda at: [((), _on_device(at))]),
    "lookup_below": ((), _below),
    "group": (("group",), lambda at: [((group.name,), group) for group in at.cache.groups]),
    "block": (("group", "state"), _blocks),
    "namespace": (("namespace",), lambda at: [((space.name,), space) for space in at.cache.namespaces]),
    "short_hit": (("reason",), lambda at: [((hits.reason,), hits) for hits in at.cache.short_hits]),
    "residency": ((), lambda at: [] if at.cache.residency is None else [((), at.cache.residency)]),
    "tier": (_TIER, _tiers),
    "call": ((*_TIER, "call"), _calls),
    "outcome": ((*_TIER, "call", "outcome"), _outcomes),
}
"""The sources of metrics, by the first word of ``Metric.of``: the names of the labels, and a function that returns the
objects of a moment, each with the values of these labels."""


METRICS = tuple(Metric(**row) for row in read_json("kvpagoda.metrics", "metrics.json")["metrics"])


def dashboard() -> str:
    """Return a dashboard of these metrics for Grafana: JSON to import."""
    return (files(__package__) / "dashboard.json").read_text()
