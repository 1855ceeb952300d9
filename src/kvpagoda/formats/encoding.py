"""The encoding of one row of numbers, as plain data. ``codec`` applies it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.errors import SchemaError, unknown_name
from kvpagoda.formats.rule import SUFFIXES, Rule
from kvpagoda.loading import read_json
from kvpagoda.units import align_up

RULES = {name: Rule(**row) for name, row in read_json("kvpagoda.formats", "rules.json")["rules"].items()}
"""Encoding name -> how it computes codes and scales. The size of a group is a field of ``Encoding``."""


@dataclass(frozen=True)
class Encoding:
    """How one row of numbers is stored. ``kvpagoda.formats.encode`` and ``decode`` apply it.

    ``name`` is one of:

    ``raw``        the elements as they are.
    ``fp8``        E4M3 codes with one float32 inverse scale for each ``group`` elements (None: one per row); the last
                   ``kept`` elements stay bfloat16 (the RoPE part).
    ``fp8_ue8m0``  E4M3 codes with one power-of-two scale byte for each ``group``, the scale bytes padded to a multiple
                   of 8; the last ``kept`` elements stay bfloat16. With 448 + 64 elements: the 584-byte row of FlashMLA.
    ``mxfp4``      E2M1 codes, two per byte, with one power-of-two scale byte for each 32 elements.
    ``nvfp4``      E2M1 codes, two per byte, with one E4M3 scale for each 16 elements.
    ``int8``       integers of -127 .. 127 with one float32 scale for each ``group`` elements (None: one per row).

    The last three may leave their last ``kept`` elements unencoded too.

    >>> Encoding("fp8_ue8m0", kept=64, group=64).parts((512,), "bfloat16")
    (('_fp8', (448,), 'uint8'), ('_rope', (64,), 'bfloat16'), ('_scales', (8,), 'uint8'))
    """

    name: str = "raw"
    kept: int = 0
    group: int | None = None

    def parts(self, shape: tuple[int, ...], dtype: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return (suffix, shape, dtype) of each array that stores one row of ``shape``, whose last axis is encoded.

        Raises SchemaError for an unknown encoding, or a last axis that does not divide into groups.
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
        """How groups become scales and codes. Raises SchemaError for "raw", which has no rule, and unknown names."""
        if self.name not in RULES:
            raise unknown_name("encoding", self.name, ("raw", *RULES), SchemaError)
        return RULES[self.name]


RAW = Encoding()
MXFP4 = Encoding("mxfp4", group=32)
NVFP4 = Encoding("nvfp4", group=16)
