"""Metrics for Prometheus: a collector that reads the counters of caches only when it is scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from threading import Lock
from time import sleep
from typing import Any

from kvpagoda.core.cache.stats import stats_of
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.metrics.names import COMMON, METRICS, VLLM, Metric, Moment
from kvpagoda.metrics.residency import Residency
from kvpagoda.namespace import namespace_key
from kvpagoda.scheduling import RunQueue
from kvpagoda.tiers.health import Histogram
from kvpagoda.units import whole_number

with MissingExtra.unless("prometheus_client", "metrics need prometheus_client; pip install 'kvpagoda[metrics]'"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector

_TRIES, _PAUSE = 20, 1e-3  # attempts to read counters that change, seconds between two attempts
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class CacheCollector(Collector):
    """The metrics of caches for a registry of ``prometheus_client``.

    All metrics have two labels: ``engine``, the number of the source, from 0 on, and ``model_name``.

    Any thread may scrape it while the owner of a cache works. It takes no lock, so one metric may be some microseconds
    older than the next. Counters never decrease, even when a sequence is rewound.

    Args:
        *sources: each a cache, or the run queue in front of one.
        model_name: a label of all metrics.
        namespaces: names to show for namespaces. A salt is a secret, so by default a keyed digest is shown instead.
        vllm: the prefix of vLLM's metric names; set another one if vLLM's own metrics are in the same registry.
        sample: of so many cached blocks (128, for example; rounded up to a power of two) the life of one is followed,
            for the metrics ``kvpagoda_kv_block_*``; 0: of none, and there are no such metrics. A cache that has a
            collector already keeps its sample.

    Raises:
        BadInput: no source, one that is neither cache nor run queue, a namespace that is none, or ``sample`` below 0.
        MissingExtra: ``prometheus_client`` is not installed.
    """

    def __init__(
        self,
        *sources: KVCache | RunQueue,  # type: ignore[type-arg]  # of any job
        model_name: str = "",
        namespaces: Mapping[Any, str] | None = None,
        vllm: str = VLLM,
        sample: int = 0,
    ) -> None:
        unknown = [source for source in sources if not isinstance(source, KVCache | RunQueue)]
        if unknown or not sources:
            text = f"a collector takes one or more caches or run queues, got {unknown[:1] or 'none'}"
            raise BadInput(text, needed=unknown[:1])
        self._sources, self._model_name, self._vllm = sources, model_name, vllm
        self._namespaces = {namespace_key(space): name for space, name in (namespaces or {}).items()}
        sample = whole_number(sample, "sample", at_least=0)
        for source in sources if sample else ():
            core = (source if isinstance(source, KVCache) else source.cache).core
            if core.residency is None:
                residency = Residency(sample, [group.plan.name for group in core.groups if group.growth.is_state])
                core.observers.add(residency)
                core.residency = residency.stats
        self._most: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = Lock()

    def describe(self) -> Iterable[Family]:
        """Return every metric without samples. The registry uses their names to find duplicates."""
        return [self._family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield every metric with its samples at this moment. O(groups, requests, namespaces)."""
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
            with self._lock:  # two may scrape at once
                value = self._most[metric.name, labels] = max(value, self._most.get((metric.name, labels), 0))
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric(labels, value)

    def _moment(self, source: KVCache | RunQueue) -> Moment:  # type: ignore[type-arg]
        """Read the counters of ``source``, which another thread may change at the same time: a failed read is
        repeated."""
        cache, queue = (source, None) if isinstance(source, KVCache) else (source.cache, source.stats())
        labels = {cache.core.counters.label(own): name for own, name in self._namespaces.items()}
        for _ in range(_TRIES):
            try:
                return Moment(stats_of(cache.core, labels), queue)
            except (AttributeError, KeyError, RuntimeError):  # the owner changed what was being read
                sleep(_PAUSE)
        return Moment(stats_of(cache.core, labels), queue)
