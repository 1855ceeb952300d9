"""An audit of a server of tests, in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_engine import Fault
from fake_server import DIALECTS, MODEL, FakeServer

from kvpagoda.audit.findings import find
from kvpagoda.audit.judge import Audit
from kvpagoda.audit.report import Report
from kvpagoda.audit.server import Server

FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"layers": ("full", "full")}, {"layers": ("full", "window", "full")}, {"layers": ("state", "full")},
    {"host": "1MiB"}, {"block": 32, "blocks": 40}, {"rows": 2}, {"blocks": 160}, {"pause": 0.002},
)  # fmt: skip
"""Servers that differ in what they keep, in units, sizes and tiers."""
NOISES: tuple[dict[str, float], ...] = (
    {}, {"noise": 0.003}, {"shape_noise": 0.003}, {"noise": 0.02}, {"shape_noise": 0.02}, {"noise": 0.05},
    {"noise": 0.01, "shape_noise": 0.03},
)  # fmt: skip
"""What servers on a GPU add: noise that differs from run to run, and noise that the sizes of a step decide."""


def audited(
    fault: Fault | None = None, dialect: str = "vllm", *, seed: int, max_requests: int = 400, after: str | None = None,
    **options: Any,
) -> Report:  # fmt: skip
    """Start a server with ``fault`` and ``options``, audit it, and return the report. ``after``: "restart" restarts it."""
    with FakeServer(fault, dialect, seed=seed, **options) as fake:
        server = Server(fake.url, max_requests=max_requests)
        try:
            audit = Audit(server, seed, model=MODEL, after=after, wait=lambda _: fake.restart())
            audit.run()
            return Report(audit, find(audit))
        finally:
            server.close()


def clean_server(seed: int) -> dict[str, Any]:
    """Return the dialect and the options of clean server number ``seed``, each one another combination."""
    random = np.random.default_rng((seed, 1))
    dialect = [*DIALECTS][seed % len(DIALECTS)]
    return {"dialect": dialect, **FEATURES[random.integers(len(FEATURES))], **NOISES[random.integers(len(NOISES))]}
