"""Which implementation of an operation runs: Triton on a GPU, numba on a CPU where it is installed and the operation has such
a form, the reference elsewhere.

The only file that imports Triton, which is optional. ``KVPAGODA_KERNELS=reference``, ``=numba`` or ``=triton`` forces one; an
operation without a numba form then runs its reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from kvpagoda.errors import BadInput

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["HAS_NUMBA", "VARIABLE", "backend", "jit", "tl", "triton"]

VARIABLE = "KVPAGODA_KERNELS"
HAS_NUMBA = find_spec("numba") is not None


def jit(**options: Any) -> Callable[[Any], Any]:
    """``triton.jit(**options)``; without Triton the function stays as it is, never to be called."""
    decorate: Callable[[Any], Any] = (lambda kernel: kernel) if triton is None else triton.jit(**options)
    return decorate


def backend(device_type: str, has_numba: bool = False) -> str:
    """``"reference"``, ``"triton"`` or, where an operation ``has_numba``, ``"numba"``, for a launch on ``device_type``.

    Raises BadInput if the variable names none of them, or names one that is not installed.

    >>> backend("cpu")
    'reference'
    """
    usual = "triton" if device_type == "cuda" and triton is not None else "reference"
    if device_type == "cpu" and has_numba and HAS_NUMBA:
        usual = "numba"
    chosen = os.environ.get(VARIABLE) or usual
    if chosen not in ("reference", "triton", "numba"):
        raise BadInput(f"{VARIABLE} is 'reference', 'numba' or 'triton', got {chosen!r}")
    if chosen == "triton" and triton is None:
        raise BadInput(f"{VARIABLE}=triton, but Triton is not installed; pip install 'kvpagoda[triton]'")
    if chosen == "numba" and not HAS_NUMBA:
        raise BadInput(f"{VARIABLE}=numba, but numba is not installed; pip install 'kvpagoda[cpu]'")
    return "reference" if chosen == "numba" and (device_type != "cpu" or not has_numba) else chosen
