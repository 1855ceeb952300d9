"""Resolve layout names to layouts, one for each kind of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpagoda.errors import BadInput, SchemaError, shown
from kvpagoda.layouts.pages import KINDS, PageChoice, order_of, page_choice
from kvpagoda.schema.layers import Layer
from kvpagoda.units import all_of

LayoutNames = str | Sequence[str] | Mapping[str, str]
"""One name, several names, or {kind: name} (``KINDS``). ``"name:dialect"`` selects another dialect than the default."""


def by_kind(names: LayoutNames) -> Iterable[tuple[str, str]]:
    """Return the (kind, name) pairs of ``names``; the kind is "" where none is given. Raises BadInput."""
    wanted = "expected a name, several names, or {kind: name}"
    if isinstance(names, Mapping):
        return zip(all_of(names.keys(), str, wanted), map(str, all_of(names.values(), str, wanted)))
    given = (names,) if isinstance(names, str) else names
    return [("", str(name)) for name in all_of(given, str, wanted)]


def choices_of(layout: LayoutNames) -> dict[str, PageChoice]:
    """Return kind of rows -> layout, for the layouts named in ``layout``.

    Raises SchemaError for two layouts of one kind or a layout given for another kind than its own, and LayoutError for
    an unknown name.
    """
    choices: dict[str, PageChoice] = {}
    for kind, text in by_kind(layout):
        name, _, dialect = text.partition(":")
        choice = page_choice(name, dialect or None)
        if kind not in ("", choice.kind):
            raise SchemaError(
                f"layout {name!r} is for {choice.kind} rows, not for {kind!r}; kinds are {', '.join(KINDS)}",
                needed=kind, available=choice.kind,
            )  # fmt: skip
        if choice.kind in choices:
            raise SchemaError(
                f"{choices[choice.kind].name!r} and {name!r} are both for {choice.kind} rows; give one",
                needed=name, available=choices[choice.kind].name,
            )  # fmt: skip
        choices[choice.kind] = choice
    return choices


def arena_order(layers: Iterable[Layer], order: str | None) -> str:
    """Return the order of the arenas of ``layers``, ``"block"`` or ``"layer"``.

    It is ``order``; if that is None, the order that their layout needs, else ``"block"``. Raises BadInput for another
    value of ``order`` and SchemaError if their layout needs the other order.
    """
    if order is not None and (not isinstance(order, str) or order not in ("block", "layer")):
        raise BadInput(f"order is 'block' or 'layer', got {shown(order)}", field="order", needed=order)
    for page in {rows.page for layer in layers for rows in layer.block_rows()}:
        needed = order_of(page) or order
        if order not in (None, needed):
            outside = "blocks" if needed == "layer" else "layers"
            raise SchemaError(
                f"heads lie outside of {outside} in {page!r}: it needs order={needed!r}, not {order!r}; leave order out",
                field="order", needed=needed, available=order,
            )  # fmt: skip
        order = needed
    return order or "block"
