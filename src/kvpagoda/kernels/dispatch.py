"""Which implementation of an operation runs: a plain table by device type, and one environment variable to force one.

The only file that imports Triton, which is optional. ``KVPAGODA_KERNELS=reference`` or ``=triton`` overrides the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvpagoda.errors import BadInput

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["BACKENDS", "REFERENCE", "TRITON", "VARIABLE", "backend", "jit", "tl", "triton"]

VARIABLE = "KVPAGODA_KERNELS"
REFERENCE, TRITON = "reference", "triton"
BACKENDS = {"cuda": TRITON if triton is not None else REFERENCE}
"""Device type -> implementation; every other device runs the reference."""


def jit(**options: Any) -> Callable[[Any], Any]:
    """``triton.jit(**options)``; without Triton the function stays as it is, never to be called."""
    decorate: Callable[[Any], Any] = (lambda kernel: kernel) if triton is None else triton.jit(**options)
    return decorate


def backend(device_type: str) -> str:
    """``"reference"`` or ``"triton"`` for a launch on ``device_type``. Raises BadInput if the variable names neither,
    or names Triton where it is not installed.

    >>> backend("cpu")
    'reference'
    """
    forced = os.environ.get(VARIABLE)
    if not forced:
        return BACKENDS.get(device_type, REFERENCE)
    if forced not in (REFERENCE, TRITON):
        raise BadInput(f"{VARIABLE} is {REFERENCE!r} or {TRITON!r}, got {forced!r}")
    if forced == TRITON and triton is None:
        raise BadInput(f"{VARIABLE}={TRITON}, but Triton is not installed; pip install 'kvpagoda[triton]'")
    return forced
