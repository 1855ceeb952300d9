"""Layouts by name, for the kinds of rows that they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpagoda.errors import SchemaError
from kvpagoda.layouts.pages import KINDS, PageChoice, page_choice

LayoutNames = str | Sequence[str] | Mapping[str, str]
"""A name, several, or names by kind (``KINDS``); ``name:dialect`` where the dialect is not the layout's own."""


def choices_of(layout: LayoutNames) -> dict[str, PageChoice]:
    """The layouts that are named, by the kind that each is of. Raises SchemaError for two of a kind or a kind that a layout is
    not of, and LayoutError."""
    given = {"": layout} if isinstance(layout, str) else layout
    pairs = [*given.items()] if isinstance(given, Mapping) else [("", name) for name in given]
    found: dict[str, PageChoice] = {}
    for kind, text in pairs:
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
