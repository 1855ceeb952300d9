"""The number that a row must hold: no other text, layer or field has it, and it is exact in the field's dtype.

A text has one 64-bit *mark* for each of its tokens, a function of the namespace and of all tokens and media up to it. A
row is filled with the upper bits of (the mark of its last token times an odd number of the layer and field).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.uint64]
"""uint64 ``[n]``: one for each token of a text."""

_BITS = {"float32": 24, "float64": 53, "int32": 31, "uint8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8}
"""dtype -> so many bits that it holds every non-negative number of these bits exactly; of 8-bit floats, the bits of a code."""
_LONGEST = 4096
_random = np.random.default_rng(0xF1D0)
_TOKENS = _random.integers(0, 2**64, 1000, np.uint64)
_PLACES = _random.integers(0, 2**63, _LONGEST, np.uint64) * np.array([2], np.uint64) + np.array([1], np.uint64)
_ODD, _SHIFT = np.array([0x9E3779B97F4A7C15], np.uint64), np.array([32], np.uint64)


def _digest(what: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little")


def seed_of(namespace_key: Any) -> int:
    """Return 64 bits for a namespace in its present state."""
    return _digest(("namespace", namespace_key))


def marks_of(seeds: Marks, tokens: npt.NDArray[np.int32], media: Mapping[int, bytes]) -> Marks:
    """Return the marks of a text, uint64 ``[len(tokens)]``. ``seeds`` has the same shape and dtype: the namespace's
    seed at each token. At the offsets where media begin, their digest replaces the token."""
    own = _TOKENS[tokens]
    for offset, digest in media.items():
        if offset < len(own):
            own[offset] = np.uint64(_digest(("media", digest)))
    marks: Marks = (np.cumsum(own * _PLACES[: len(own)]) ^ seeds) * _ODD
    marks ^= marks >> _SHIFT
    return marks


class Stamp:
    """The numbers of one field of one layer: rows that end at tokens with ``marks`` hold ``stamp(marks)``. ``is_rounded``:
    numbers that a row of bfloat16, and one of codes of 8 bits with a scale, hold exactly: 127 times a power of two that is
    above the least scale."""

    def __init__(self, layer: int, field: str, dtype: str, *, is_rounded: bool = False) -> None:
        bits = 7 if is_rounded else _BITS.get(dtype)
        if bits is None:
            raise ValueError(f"no exact numbers are known for {dtype}; the driver's schemas are float32")
        dtype, self._is_rounded = "uint8" if dtype.startswith("float8") else dtype, is_rounded
        self._factor = np.array([_digest(("field", layer, field)) | 1], np.uint64)
        self._shift, self._dtype = np.array([64 - bits], np.uint64), np.dtype(dtype)

    def __call__(self, marks: Marks) -> npt.NDArray[Any]:
        numbers = ((marks * self._factor) >> self._shift).astype(self._dtype)
        if self._dtype == np.uint8:
            numbers[numbers == 255] = 0  # rows of nothing but this byte look like free memory
        return np.ldexp(self._dtype.type(127), numbers.astype(np.int32) - 32) if self._is_rounded else numbers
