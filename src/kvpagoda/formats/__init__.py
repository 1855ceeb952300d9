"""HOW a row is encoded: raw, FP8 with float32 or power-of-two scales, MXFP4, NVFP4. Exact on every device."""

from kvpagoda.formats.codec import decode, encode

__all__ = ["decode", "encode"]
