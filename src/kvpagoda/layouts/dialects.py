"""The packed formats and their numeric dialects: geometry, rule and source of each. The table is ``dialects.json``.

Every kernel of a format can read rows of all its dialects; the dialect decides which bytes a row gets when it is
written. Engines whose dialects differ in a floor write different bytes for rows of small numbers, so the dialect is
part of a layout's identity. The first dialect of a format is its default. For V3.2 that is the dialect with
power-of-two scales, because only these are read correctly on sm90 *and* sm100.
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
    """One way to write the rows of a format: the places of the bytes, the rule of the numbers, and its source."""

    packing: Packing
    rule: Rule
    source: str


def _read() -> dict[str, dict[str, Dialect]]:
    """Return the table of ``dialects.json``: format -> dialect -> ``Dialect``, the default of a format first."""
    table = read_json("kvpagoda.layouts", "dialects.json")
    packings = {
        name: Packing(**{**fields, "order": tuple(fields.get("order", Packing.order))})
        for name, fields in table["packings"].items()
    }
    return {
        format: {
            name: Dialect(packings[row["packing"]], Rule(**row["rule"]), row["source"]) for name, row in rows.items()
        }
        for format, rows in table["dialects"].items()
    }


DIALECTS = _read()


def dialect_of(format: str, dialect: str | None = None) -> Dialect:
    """Return the ``dialect`` (None: the default) of ``format``. Raises BadInput, which lists the known names."""
    if format not in DIALECTS:
        raise unknown_name("packed format", format, DIALECTS)
    known = DIALECTS[format]
    if dialect is not None and dialect not in known:
        raise unknown_name(f"dialect of {format}", dialect, known)
    return known[dialect or next(iter(known))]


def dialect_for_heads(format: str, dialect: str | None = None, head_dim: int | None = None) -> Dialect:
    """Return ``dialect_of(format, dialect)`` for heads of ``head_dim`` elements, if the format has heads (None: 64).

    Raises BadInput for an unknown name, a format without heads, or a ``head_dim`` that does not divide into groups.
    """
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
