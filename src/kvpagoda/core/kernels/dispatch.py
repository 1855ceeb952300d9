"""Choose the implementation of an operation: Triton, numba or the torch reference.

Triton runs on a GPU, numba on a CPU if it is installed and the operation has a numba form, the reference everywhere
else. ``KVPAGODA_KERNELS=reference``, ``=numba`` or ``=triton`` forces one of them; with ``=numba``, an operation
without a numba form runs its reference. This is the only file that imports Triton, which is optional.
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

__all__ = ["HAS_NUMBA", "VARIABLE", "backend", "is_interpreting", "jit", "tl", "triton"]

VARIABLE = "KVPAGODA_KERNELS"
HAS_NUMBA = find_spec("numba") is not None


def jit(**options: Any) -> Callable[[Any], Any]:
    """Return ``triton.jit(**options)``; without Triton, a decorator that changes nothing (kernels are not called)."""
    decorate: Callable[[Any], Any] = (lambda kernel: kernel) if triton is None else triton.jit(**options)
    return decorate


def backend(device_type: str, has_numba: bool = False) -> str:
    """Return the implementation for a launch on ``device_type``: ``"reference"``, ``"triton"`` or ``"numba"``.

    ``has_numba``: whether the operation has a numba form. Raises BadInput if the environment variable names an unknown
    implementation, or one that is not installed.

    >>> backend("cpu")
    'reference'
    """
    usual = "triton" if device_type == "cuda" and triton is not None else "reference"
    if device_type == "cpu" and has_numba and HAS_NUMBA:
        usual = "numba"
    chosen = os.environ.get(VARIABLE) or usual
    if chosen not in ("reference", "triton", "numba"):
        raise BadInput(f"{VARIABLE} is 'reference', 'numba' or 'triton', got {chosen!r}", field=VARIABLE, needed=chosen)
    if chosen == "triton" and triton is None:
        text = f"{VARIABLE}=triton, but Triton is not installed; pip install 'kvpagoda[triton]'"
        raise BadInput(text, needed="triton")
    if chosen == "numba" and not HAS_NUMBA:
        raise BadInput(f"{VARIABLE}=numba, but numba is not installed; pip install 'kvpagoda[cpu]'", needed="numba")
    return "reference" if chosen == "numba" and (device_type != "cpu" or not has_numba) else chosen


def is_interpreting() -> bool:
    """Return whether Triton's kernels run in its interpreter (``TRITON_INTERPRET=1``), whose casts are its own."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
