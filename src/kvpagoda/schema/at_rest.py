"""States at rest: the rows in which checkpoints keep copies of states in fewer bytes than running requests have."""

from __future__ import annotations

from dataclasses import replace

from kvpagoda.errors import SchemaError, unknown_name
from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.schema.fields import Rows, itemsize
from kvpagoda.schema.layers import Group, Layer
from kvpagoda.schema.layout import RowLayout, pages_of

FORMATS = ("bfloat16", "int8")
"""``bfloat16``: float32 rows are rounded to it. ``int8``: they become codes of 8 bits with one float32 scale for each 128 or
64 elements of the last axis, or for the whole of it; rows whose last axis is short are rounded to bfloat16."""
_SHORT = 16
"""Elements below which a scale takes more than int8 saves beside bfloat16."""


def checked_format(format: object) -> str | None:
    """Return ``format``, one of ``FORMATS`` or None. Raises SchemaError."""
    if format is None or (isinstance(format, str) and format in FORMATS):
        return format
    raise unknown_name("checkpoint_format", format, FORMATS, SchemaError)


def rows_at_rest(rows: Rows, format: str) -> Rows:
    """Return ``rows`` of a state as checkpoints keep them in ``format``. Integers, rows of 2 bytes an element and encoded rows
    stay as they are."""
    if rows.encoding != RAW or not rows.dtype.startswith("float") or itemsize(rows.dtype) != 4:
        return rows
    if format == "bfloat16" or not rows.shape or rows.shape[-1] < _SHORT:
        return replace(rows, dtype="bfloat16", page="")
    group = next((n for n in (128, 64) if rows.shape[-1] % n == 0), None)
    return replace(rows, encoding=Encoding("int8", group=group), page="")


def layer_at_rest(layer: Layer, format: str) -> tuple[Rows, ...]:
    """Return the rows of the state of ``layer`` at rest."""
    return tuple(rows_at_rest(rows, format) for rows in layer.state_rows())


def layout_at_rest(group: Group, format: str, order: str) -> RowLayout | None:
    """Return the record of one checkpoint of ``group``, the group of states, in ``format``; None if that is the record of a
    running request's state, and for other groups."""
    if not group.growth.is_state:
        return None
    pairs = [(layer, layer_at_rest(layer, format)) for layer in group.layers]
    if all(rest == layer.state_rows() for layer, rest in pairs):
        return None
    pages = (page for layer, rest in pairs for page in pages_of(layer.index, rest, lambda rows: rows.count))
    return RowLayout.of(pages, 1, order)
