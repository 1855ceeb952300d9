"""Monitoring: metrics for Prometheus, spans for OpenTelemetry, a dashboard for Grafana, and ``kvpagoda top``.

A cache calls nothing of this package: metrics are read from ``stats``, and spans wrap the calls of one cache. Needs the
``metrics`` extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.metrics.names import METRICS, dashboard
    from kvpagoda.metrics.prometheus import CacheCollector
    from kvpagoda.metrics.spans import Tracing, trace

__all__ = ["METRICS", "CacheCollector", "Tracing", "dashboard", "trace"]

_NAMES = {"names": ("METRICS", "dashboard"), "prometheus": ("CacheCollector",), "spans": ("Tracing", "trace")}
if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, {f"{__name__}.{module}": names for module, names in _NAMES.items()})
