"""Layouts by name, for the kinds of rows that they are of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.layouts.pages import KINDS, PageChoice, order_of, page_choice
from kvpagoda.schema.layers import Layer

LayoutNames = str | Sequence[str] | Mapping[str, str]
"""A name, several, or names by kind (``KINDS``); ``name:dialect`` where the dialect is not the layout's own."""


def by_kind(names: LayoutNames) -> Iterable[tuple[str, str]]:
    """(kind, name) of each: the kind is "" where it is not said."""
    given = {"": names} if isinstance(names, str) else names
    return given.items() if isinstance(given, Mapping) else [("", name) for name in given]


def choices_of(layout: LayoutNames) -> dict[str, PageChoice]:
    """The layouts that are named, by the kind that each is of. Raises SchemaError for two of a kind or a kind that a layout is
    not of, and LayoutError."""
    found: dict[str, PageChoice] = {}
    for kind, text in by_kind(layout):
        name, _, dialect = text.partition(":")
        choice = page_choice(name, dialect or None)
        if kind not in ("", choice.kind):
            raise SchemaError(
                f"layout {name!r} is of {choice.kind} rows, not of {kind!r}; kinds are {', '.join(KINDS)}"
            )
        if choice.kind in found:
            raise SchemaError(f"{found[choice.kind].name!r} and {name!r} are both of {choice.kind} rows; give one")
        found[choice.kind] = choice
    return found


def arena_order(layers: Iterable[Layer], order: str | None) -> str:
    """The order of the arenas of ``layers``: ``order``, or, if that is None, the one that their layout has, else ``"block"``.

    Raises BadInput for another word, SchemaError for an order that their layout cannot have.
    """
    if order not in (None, "block", "layer"):
        raise BadInput(f"order is 'block' or 'layer', got {order!r}")
    for page in {rows.page for layer in layers for rows in layer.block_rows()}:
        needed = order_of(page) or order
        if order not in (None, needed):
            outside = "blocks" if needed == "layer" else "layers"
            raise SchemaError(
                f"heads lie outside of {outside} in {page!r}, in arenas of order={needed!r}; leave order out"
            )
        order = needed
    return order or "block"
