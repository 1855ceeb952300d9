"""How a row of numbers is encoded: raw, FP8 with float32 or power-of-two scales, MXFP4, NVFP4, and the packed rows of engines.

The codecs give the same bytes on every device. ``encoding`` and ``dialects`` are plain data; the other modules need torch
and are loaded on first use.
"""

from typing import TYPE_CHECKING

from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.formats.codec import decode, encode

__all__ = ["decode", "encode"]

if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, {"kvpagoda.formats.codec": __all__})
