"""What monitoring sees: figures for Prometheus, spans for OpenTelemetry, a dashboard for Grafana, and ``kvpagoda top``.

Nothing of it is called by a cache: figures are read from ``stats``, spans are wrapped around the calls of one cache. Needs the
``metrics`` extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "CacheCollector": "prometheus",
    "METRICS": "names",
    "Tracing": "spans",
    "dashboard": "names",
    "trace": "spans",
}

__all__ = ["METRICS", "CacheCollector", "Tracing", "dashboard", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvpagoda.metrics' has no attribute {name!r}")
    return getattr(import_module(f"kvpagoda.metrics.{_PUBLIC[name]}"), name)
