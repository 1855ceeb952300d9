"""HOW a row is encoded: raw, FP8 with float32 or power-of-two scales, MXFP4, NVFP4, and the dialects of other engines.

Exact on every device. ``encoding`` and ``rule`` are plain data; the rest needs torch and is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.formats.codec import decode, encode

__all__ = ["decode", "encode"]

__getattr__ = load_when_used(__name__, {"kvpagoda.formats.codec": __all__})
