"""Metrics for Prometheus: a collector that reads the counters of caches when it is scraped, and at no other time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from time import sleep
from typing import Any

from kvpagoda.cache.namespace import namespace_key
from kvpagoda.cache.stats import stats_of
from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.kv_cache import KVCache
from kvpagoda.metrics.names import COMMON, METRICS, VLLM, Metric, Moment
from kvpagoda.scheduling import RunQueue
from kvpagoda.tiers.latency import Histogram

with MissingExtra.unless("prometheus_client", "metrics need prometheus_client; pip install 'kvpagoda[metrics]'"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector

_TRIES, _PAUSE = 20, 1e-3
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class CacheCollector(Collector):
    """The figures of ``sources``, caches or run queues in front of them, for a registry of ``prometheus_client``.

    ``engine`` is the number of each, from 0 on, and ``model_name`` the name of their model: labels of all metrics.
    ``namespaces``: names to show for namespaces; a salt is a secret, so that by default a keyed digest stands for it.
    ``vllm``: what stands before the names that are vLLM's; another one where vLLM's own metrics are in the same registry.

    Scraped from any thread, while the owner of a cache works: nothing is locked, so that a figure may be some microseconds
    older than the next. Counters never go back, also where a sequence is rewound. Raises BadInput, MissingExtra.
    """

    def __init__(
        self,
        *sources: KVCache | RunQueue,  # type: ignore[type-arg]  # of any job
        model_name: str = "",
        namespaces: Mapping[Any, str] | None = None,
        vllm: str = VLLM,
    ) -> None:
        odd = [one for one in sources if not isinstance(one, KVCache | RunQueue)]
        if odd or not sources:
            raise BadInput(f"a collector is given caches or run queues, at least one; got {odd[:1] or 'none'}")
        self._sources, self._model_name, self._vllm = sources, model_name, vllm
        self._namespaces = {namespace_key(one): name for one, name in (namespaces or {}).items()}
        self._most: dict[tuple[str, tuple[str, ...]], float] = {}

    def describe(self) -> Iterable[Family]:
        """The names, for a registry that looks whether others have them too."""
        return [self._family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Every metric with its samples now. O(groups, requests, namespaces)."""
        moments = [self._moment(source) for source in self._sources]
        for metric in METRICS:
            family = self._family(metric)
            for number, moment in enumerate(moments):
                for own, value in metric.read(moment):
                    self._add(family, metric, (self._model_name, str(number), *own), value)
            yield family

    def _family(self, metric: Metric) -> Family:
        name, labels = metric.name, (*COMMON, *metric.labels)
        if name.startswith(VLLM):
            name = self._vllm + name.removeprefix(VLLM)
        family: Family = _FAMILIES[metric.kind](name, metric.text, labels=labels)
        return family

    def _add(self, family: Family, metric: Metric, labels: tuple[str, ...], value: float | Histogram) -> None:
        if isinstance(value, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            bounds = [*map(str, value.bounds), "+Inf"]
            family.add_metric(labels, [*zip(bounds, accumulate(value.counts))], value.total)
            return
        if metric.kind == "counter":
            value = self._most[metric.name, labels] = max(value, self._most.get((metric.name, labels), 0))
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric(labels, value)

    def _moment(self, source: KVCache | RunQueue) -> Moment:  # type: ignore[type-arg]
        """What the counters of ``source`` say, while somebody else may change them."""
        cache, queue = (source, None) if isinstance(source, KVCache) else (source.cache, source.stats())
        labels = {cache.core.counters.label(own): name for own, name in self._namespaces.items()}
        for _ in range(_TRIES):
            try:
                return Moment(stats_of(cache.core, labels), queue)
            except (AttributeError, KeyError, RuntimeError):  # what was read is gone
                sleep(_PAUSE)
        return Moment(stats_of(cache.core, labels), queue)
