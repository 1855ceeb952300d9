"""The packed formats and their numeric dialects: geometry, rule and source of each. The table is ``dialects.json``.

Every kernel of a format reads the bytes of all its dialects; which bytes a row gets is the dialect. Engines whose dialects
differ by a floor give small rows different bytes, so the dialect is part of a layout's identity. Of V3.2 only power-of-two
scales are read right on sm90 *and* sm100, so that dialect comes first: the first of a format is its default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.formats.rule import Rule
from kvpagoda.layouts.packings import Packing
from kvpagoda.loading import read_json
from kvpagoda.units import whole_number


@dataclass(frozen=True)
class Dialect:
    """One way to write the rows of a format: where bytes lie, which numbers they mean, and who writes them so."""

    packing: Packing
    rule: Rule
    source: str


def _read() -> dict[str, dict[str, Dialect]]:
    """The table of ``dialects.json``: format -> dialect -> its row, the default of a format first."""
    told = read_json("kvpagoda.layouts", "dialects.json")
    packings = {
        name: Packing(**{**fields, "order": tuple(fields.get("order", Packing.order))})
        for name, fields in told["packings"].items()
    }
    return {
        format: {
            name: Dialect(packings[row["packing"]], Rule(**row["rule"]), row["source"]) for name, row in rows.items()
        }
        for format, rows in told["dialects"].items()
    }


DIALECTS = _read()


def dialect_of(format: str, dialect: str | None = None) -> Dialect:
    """The row of the table for ``format`` and ``dialect`` (None: its default). Raises BadInput with those there are."""
    if format not in DIALECTS:
        raise unknown_name("packed format", format, DIALECTS)
    known = DIALECTS[format]
    if dialect is not None and dialect not in known:
        raise unknown_name(f"dialect of {format}", dialect, known)
    return known[dialect or next(iter(known))]


def dialect_for_heads(format: str, dialect: str | None = None, head_dim: int | None = None) -> Dialect:
    """``dialect_of``, for heads of ``head_dim`` elements where the format has heads (None: 64). Raises BadInput."""
    chosen = dialect_of(format, dialect)
    if head_dim is None:
        return chosen
    packing = chosen.packing
    group = packing.group if packing.groups > 1 else head_dim
    if packing.cells == 1 or whole_number(head_dim, "head_dim", at_least=1) % group:
        raise BadInput(
            f"{format} has no heads of {head_dim} elements; leave head_dim out, or give a multiple of {group}"
        )
    return replace(chosen, packing=replace(packing, coded=head_dim, group=group))
