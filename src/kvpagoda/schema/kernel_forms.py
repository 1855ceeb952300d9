"""The tensors of a kernel's call: rows of a page with the axes that the kernel gives to each of its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpagoda.errors import BadInput
from kvpagoda.formats.encoding import Encoding
from kvpagoda.layouts.demands import Kernel, kernel, kernels_named
from kvpagoda.layouts.pages import KIND_OF_ROWS
from kvpagoda.schema.layout import KernelTensor, Page

_OF_SECTION = {"1.1": ("attention",), "1.2": ("latent", "entries"), "1.3": ("indexer",)}
"""Section of the table of demands -> kinds of rows that its kernels read."""
_ROWS_OF = {"k": ("k", "k_rope"), "v": ("v", "latent"), "ckv": ("latent",), "kpe": ("k_rope",)}
"""Name of a kernel tensor that is a single field -> the names of the rows that it may be."""


@dataclass(frozen=True)
class Argument:
    """A tensor of a kernel's call: part of ``page``, whose ``axes`` are pages or state slots first.

    ``form``: the name that the table gives to these axes, such as "HND". ``shape`` and ``strides``, in elements, of the
    other axes; ``offset``: its first byte in the page. ``order``: of a matrix of states, "KV" or "VK"; else "".
    """

    page: Page
    form: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    order: str = ""


def rows_named(name: str) -> tuple[tuple[Kernel, ...], str]:
    """Return the rows of the table that ``name`` may mean, and the architecture in it: "fa3-sm90" -> sm90, else "any".

    There are several if it begins the names of several kernels, such as "flashmla-sparse". Raises BadInput.
    """
    match = re.fullmatch(r"(.*?)(?:[-_ ](sm\d+[af]?))?", name.lower())
    assert match is not None
    plain = match[1].replace("-", "_").replace(" ", "_")
    begun = kernels_named(f"{plain}_")
    try:
        return (kernel(plain),), match[2] or "any"
    except BadInput:
        if not begun:
            raise
    return begun, match[2] or "any"


def kinds_of(row: Kernel) -> tuple[str, ...]:
    """Return the kinds of rows (``kvpagoda.layouts.pages.KINDS``) that the kernel of a table row reads."""
    if row.section == "1.4":
        return ("conv",) if "channel" in next(iter(row.tensors["state"].values())) else ("recurrent",)
    return _OF_SECTION.get(row.section, ())


def kind_of(page: Page) -> str:
    """Return the kind of the rows in ``page``; "" for rows that no kernel reads."""
    return KIND_OF_ROWS.get(page.rows[0], "")


def arguments(row: Kernel, page: Page, mates: Sequence[Page]) -> dict[str, Argument] | None:
    """Return the arguments of a call of kernel ``row`` for ``page``, by the table's names; None if ``page`` has no form
    that the kernel takes.

    ``mates``: all pages of the same layer, because a call may need several.
    """
    needed = sorted(row.needed, key=lambda names: "kv" not in names) if page.packed else row.needed
    for names in needed:
        found: dict[str, Argument] = {}
        for name in filter(names.__contains__, row.tensors):
            source = next((mate for mate in mates if {*mate.rows} & {*_ROWS_OF.get(name, page.rows)}), page)
            is_all = not any(mate is not source and kind_of(mate) == kind_of(source) for mate in mates)
            tensor = source.whole if name not in _ROWS_OF and is_all else None
            if name in _ROWS_OF and not source.packed:
                fields = {place.field.name: place for place in source.places}
                tensor = next((source.tensor(fields[one]) for one in _ROWS_OF[name] if one in fields), None)
            made = [] if tensor is None else [*_forms(row, name, tensor, source)]
            if not made:
                break
            # of several forms, that in the tensor's own memory order
            found[name] = max(made, key=lambda one: one[0])[1]
        else:
            return found
    return None


def _forms(row: Kernel, name: str, tensor: KernelTensor, page: Page) -> Iterator[tuple[bool, Argument]]:
    """Yield ``tensor`` in each form that kernel ``row`` takes as its argument ``name``, and whether it is that in which
    the tensor lies in memory."""
    ours = dict(zip(tensor.axes, zip(tensor.shape, tensor.strides)))
    for form, axes in row.tensors[name].items():
        if page.packed and axes == ("block", "bytes"):
            yield True, Argument(page, form, axes, (page.nbytes,), (1,), "uint8", 0)
            continue
        inner = [axis for axis in axes if axis not in ("block", "slot")]
        must = {axis for axis, (extent, _) in ours.items() if extent > 1 or axis not in ("one", "token")}
        is_paged = len(inner) < len(axes) and all(axis in ours or axis in ("one", "head") for axis in inner)
        if not is_paged or not must <= {*inner}:
            continue
        pairs = [ours.get(axis, (1, tensor.shape[-1])) for axis in inner]
        strides = [step for extent, step in pairs if extent > 1]
        order = ""
        if {"key", "value"} <= {*axes}:
            order = "VK" if ours["key"][1] < ours["value"][1] else "KV"
        shape, steps = (tuple(column) for column in zip(*pairs))
        yield (
            strides == sorted(strides, reverse=True),
            Argument(page, form, axes, shape, steps, tensor.dtype, tensor.offset, order),
        )


def declared(found: Mapping[str, Argument], encoding: Encoding) -> dict[str, Any]:
    """Return the facts about these arguments, of rows in ``encoding``, that shapes cannot tell ``judge``."""
    facts: dict[str, Any] = {}
    for one in found.values():
        if one.form in ("NHD", "HND"):
            facts["layout"] = one.form
        if one.order:
            facts["order"] = one.order
    if encoding.is_packed:
        facts["packing"] = "footer" if encoding.rules.packing.footer else "inline"
        facts["scales"] = "power_of_two" if encoding.rules.rule.has_power_of_two_scales else "raw"
        facts |= {"format": encoding.name, "dialect": encoding.dialect, "padding": -1}
    return facts
