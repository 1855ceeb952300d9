"""A numeric dialect as plain data: how the elements of a group give its scale and codes. ``quantise`` applies it."""

from __future__ import annotations

from dataclasses import dataclass

TOPS = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}
"""Kind of code -> its largest magnitude, to which the largest element of a group is scaled."""
SUFFIXES = {"e4m3": "_fp8", "e2m1": "_fp4", "int8": "_int8", "int4": "_int4"}
"""Kind of code -> suffix of the name of an array of such codes."""


@dataclass(frozen=True)
class Rule:
    """How a group of elements becomes one scale and one code for each element.

        amax = max |x|, at least ``floor`` if ``floor_on`` is "amax"
        s    = amax / top, at least ``floor`` if ``floor_on`` is "scale"; then rounded to what ``scale`` can hold
        y    = x / s, x * (1 / s) or x * (top / amax), depending on ``by``
        code = y rounded to ``codes``; magnitudes above top become top

    ``codes``         "e4m3", "e2m1", "int8" or "int4" (two's complement)
    ``scale``         how s is stored: "float32", "e8m0" (one exponent byte) or "e4m3"
    ``power_of_two``  s is rounded up to a power of two although it is a float32; for e8m0 it always is
    ``scale_up``      s is rounded up to the next e4m3 number, not to the nearest
    ``by``            "quotient", "reciprocal" (x * (1 / s)) or "inverse" (x * (top / amax))
    ``ties``          "even", "down" (towards zero) or "away" (from zero)
    ``signed_zero``   a negative element that rounds to 0 gets the code of -0
    ``zero_groups``   "formula", or "apart": a group of zeros gets codes of 0; if s of another group rounds to 0,
                      all its elements get the top code
    ``non_finite``    result for a group with inf or NaN: "marked" (codes 0, a NaN scale), "computed" (the result of the
                      formulas, which a reader spreads further) or "refused" (``layouts.pack`` raises)
    ``skips_nan``     NaN does not take part in amax (Triton's ``max``)
    ``subnormals``    how a bfloat16 below 2^-126 is read: "exact", or "unshifted": its mantissa normalised without its
                      leading bit and not shifted back, as Triton's interpreter reads it (3.6). No GPU does this. It is
                      visible only where s has no floor, and groups that small have no right bytes there anyway
    """

    codes: str
    scale: str
    floor: float = 0.0
    floor_on: str = "amax"
    power_of_two: bool = False
    scale_up: bool = False
    by: str = "quotient"
    ties: str = "even"
    signed_zero: bool = True
    zero_groups: str = "formula"
    non_finite: str = "marked"
    skips_nan: bool = False
    subnormals: str = "exact"

    @property
    def has_power_of_two_scales(self) -> bool:
        """Whether every scale is a power of two; some readers accept no other scales."""
        return self.power_of_two or self.scale == "e8m0"

    @property
    def top(self) -> float:
        """The largest magnitude of a code."""
        return TOPS[self.codes]

    @property
    def codes_per_byte(self) -> int:
        """2 for codes of 4 bits (low nibble first), 1 for codes of 8 bits."""
        return 2 if self.codes in ("e2m1", "int4") else 1

    @property
    def scale_nbytes(self) -> int:
        """Bytes of one scale."""
        return 4 if self.scale == "float32" else 1
