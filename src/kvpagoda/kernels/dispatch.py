"""Which implementation of an operation runs: Triton on a GPU, the reference elsewhere; an environment variable forces one.

The only file that imports Triton, which is optional. ``KVPAGODA_KERNELS=reference`` or ``=triton`` forces one.
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

__all__ = ["VARIABLE", "backend", "jit", "tl", "triton"]

VARIABLE = "KVPAGODA_KERNELS"


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
    usual = "triton" if device_type == "cuda" and triton is not None else "reference"
    chosen = os.environ.get(VARIABLE) or usual
    if chosen not in ("reference", "triton"):
        raise BadInput(f"{VARIABLE} is 'reference' or 'triton', got {chosen!r}")
    if chosen == "triton" and triton is None:
        raise BadInput(f"{VARIABLE}=triton, but Triton is not installed; pip install 'kvpagoda[triton]'")
    return chosen
