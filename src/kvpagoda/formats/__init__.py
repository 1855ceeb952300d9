"""HOW a row is encoded: raw, FP8 with float32 or power-of-two scales, MXFP4, NVFP4, and the dialects of other engines.

Exact on every device. ``encoding`` and ``rule`` are plain data; the rest needs torch and is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpagoda.formats.codec import decode, encode

__all__ = ["decode", "encode"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kvpagoda.formats.codec"), name)
