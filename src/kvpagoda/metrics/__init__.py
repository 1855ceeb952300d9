"""What monitoring sees: figures for Prometheus, spans for OpenTelemetry, a dashboard for Grafana, and ``kvpagoda top``.

Nothing of it is called by a cache: figures are read from ``stats``, spans are wrapped around the calls of one cache. Needs the
``metrics`` extra.
"""

from __future__ import annotations

from kvpagoda.loading import load_when_used

__all__ = ["METRICS", "CacheCollector", "Tracing", "dashboard", "trace"]

__getattr__ = load_when_used(
    __name__,
    {
        "CacheCollector": "kvpagoda.metrics.prometheus",
        "METRICS": "kvpagoda.metrics.names",
        "Tracing": "kvpagoda.metrics.spans",
        "dashboard": "kvpagoda.metrics.names",
        "trace": "kvpagoda.metrics.spans",
    },
)
