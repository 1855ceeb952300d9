"""Rows encoded, decoded and copied on a CPU by hand-made SIMD instructions (LLVM) in loops that numba compiles: an extra.
``kernels`` uses these names where numba is installed, and the torch reference of the same bytes elsewhere."""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.core.lanes.copies import copy_spans
    from kvpagoda.core.lanes.rows import Strides, vector_loop
    from kvpagoda.core.lanes.scaled import Places, run_loop

__all__ = ["Places", "Strides", "copy_spans", "run_loop", "vector_loop"]

if not TYPE_CHECKING:
    __getattr__ = load_when_used(
        __name__,
        {
            "kvpagoda.core.lanes.copies": ("copy_spans",),
            "kvpagoda.core.lanes.rows": ("Strides", "vector_loop"),
            "kvpagoda.core.lanes.scaled": ("Places", "run_loop"),
        },
    )
