"""What monitoring sees: figures for Prometheus, spans for OpenTelemetry, a dashboard for Grafana, and ``kvpagoda top``.

Nothing of it is called by a cache: figures are read from ``stats``, spans are wrapped around the calls of one cache. Needs the
``metrics`` extra.
"""

from __future__ import annotations

from kvpagoda.loading import load_when_used

__all__ = ["METRICS", "CacheCollector", "Tracing", "dashboard", "trace"]

_NAMES = {"names": ("METRICS", "dashboard"), "prometheus": ("CacheCollector",), "spans": ("Tracing", "trace")}
__getattr__ = load_when_used(__name__, {f"{__name__}.{module}": names for module, names in _NAMES.items()})
