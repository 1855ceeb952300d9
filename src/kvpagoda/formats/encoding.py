"""How one row of numbers lies in memory, as data. Plain; ``codec`` applies it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.errors import SchemaError, unknown_name
from kvpagoda.formats.rule import SUFFIXES, Rule
from kvpagoda.loading import read_json
from kvpagoda.units import align_up

RULES = {name: Rule(**row) for name, row in read_json("kvpagoda.formats", "rules.json")["rules"].items()}
"""How each encoding makes codes and scales; groups are the encoding's own."""


@dataclass(frozen=True)
class Encoding:
    """How one row of numbers lies in memory. The codecs are in ``kvpagoda.formats``.

    ``raw``        the elements as they are.
    ``fp8``        E4M3 codes with one float32 inverse scale for each ``group`` elements (None: one a row); the last
                   ``kept`` elements stay bfloat16 (the RoPE part).
    ``fp8_ue8m0``  E4M3 codes with one power-of-two scale byte for each ``group``, the scale bytes padded to a multiple
                   of 8; the last ``kept`` elements stay bfloat16. With 448 + 64 elements: the 584-byte row of FlashMLA.
    ``mxfp4``      E2M1 codes, two a byte, with one power-of-two scale byte for each 32.
    ``nvfp4``      E2M1 codes, two a byte, with one E4M3 scale for each 16.
    ``int8``       whole numbers of -127 .. 127 with one float32 scale for each ``group`` elements (None: one a row).
                   These three may keep their last elements too.

    >>> Encoding("fp8_ue8m0", kept=64, group=64).parts((512,), "bfloat16")
    (('_fp8', (448,), 'uint8'), ('_rope', (64,), 'bfloat16'), ('_scales', (8,), 'uint8'))
    """

    name: str = "raw"
    kept: int = 0
    group: int | None = None

    def parts(self, shape: tuple[int, ...], dtype: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """(suffix, shape, dtype) of each array that one row of ``shape`` takes; the last axis is the encoded one.

        Raises SchemaError for an unknown encoding, or a last axis that it does not divide.
        """
        if self.name == "raw":
            return (("", shape, dtype),)
        rule, lead, coded = self.rule, shape[:-1], shape[-1] - self.kept
        group, per_byte = self.group or coded, rule.codes_per_byte
        if coded <= 0 or coded % group or coded % per_byte:
            raise SchemaError(
                f"encoding {self.name!r} cannot hold a row of {shape[-1]} elements: "
                f"{coded} to encode is not a positive multiple of {max(group, per_byte)}"
            )
        groups = coded // group
        codes = (SUFFIXES[rule.codes], (*lead, coded // per_byte), "uint8")
        if rule.scale == "float32":
            scales = ("_inv_scale", lead if self.group is None else (*lead, groups), "float32")
        else:
            scales = ("_scales", (*lead, align_up(groups, 8) if self.name == "fp8_ue8m0" else groups), "uint8")
        kept = (("_rope", (*lead, self.kept), "bfloat16"),) if self.kept else ()
        return (codes, *kept, scales)

    @property
    def rule(self) -> Rule:
        """How its groups become scales and codes. Raises SchemaError for "raw", which has none, and unknown names."""
        if self.name not in RULES:
            raise unknown_name("encoding", self.name, ("raw", *RULES), SchemaError)
        return RULES[self.name]


RAW = Encoding()
MXFP4 = Encoding("mxfp4", group=32)
NVFP4 = Encoding("nvfp4", group=16)
