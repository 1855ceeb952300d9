"""The demands of kernels on the tensors that they read or write: the table ``demands.json`` as values.

The row of a kernel names its tensors and their axes, and lists its demands with their sources. A demand is one
comparison:

    {"demand": "page stride", "of": "kv.stride.block", "arch": ["sm100"], "multiple_of": 576, "else": "reject",
    "source": ".."}

``of`` names *quantities*, separated by spaces, each of which must pass; ``a*b`` is a product:

    kv.size.token     number of tokens of a page         kv.dtype   its dtype          declared.topk   a fact that the
    kv.stride.block   elements from page to page         kv.base    alignment in bytes                 caller declares,
    kv.bytes.block    the same in bytes                  kv.given   whether it is given                not in shapes
    kv.dense.block    elements if the tensor is dense    kv.packed  whether it is dense in some order of its axes
    kv.stride.block,token   several axes; ``outer``: all but the last; ``all``; ``last``  each.stride.block every tensor

The comparison is one of ``multiple_of``, ``divides``, ``one_of``, ``equals``, ``at_least``, ``at_most`` (with a value
or with another quantity, plus ``offset`` or ``rounded_up_to``) and ``power_of_two``. ``when`` and ``arch`` restrict a
demand. ``addresses``: the stride only forms addresses, so the stride of an axis of one element does not matter.
``else``: the outcome if the demand is not met. A row that is ``like`` another row has its tensors and demands too,
except those in ``without``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from kvpagoda.errors import BadInput, did_you_mean, shown, unknown_name
from kvpagoda.loading import read_json

OUTCOMES = ("reject", "garbage", "copy")
"""The outcomes of a violation, in the order in which they are noticed: a kernel rejects before it reads."""
COMPARISONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "multiple_of": ("be a multiple of ", lambda value, wanted: value % wanted == 0),
    "divides": ("divide ", lambda value, wanted: value > 0 and wanted % value == 0),
    "one_of": ("be one of ", lambda value, wanted: value in wanted),
    "equals": ("be ", operator.eq),
    "at_least": ("be at least ", operator.ge),
    "at_most": ("be at most ", operator.le),
    "power_of_two": ("be a power of two", lambda value, _: value > 0 and value & (value - 1) == 0),
}
"""Comparison -> (its words after "must" in a reason, the test of (value, right side))."""


@dataclass(frozen=True)
class Demand:
    """One comparison that a kernel's tensors must pass; see the docstring of this file for the terms.

    ``comparison`` is one of ``COMPARISONS`` and ``value`` its right side. ``outcome``: "reject" (the kernel refuses),
    "garbage" (it reads or writes wrong bytes without an error) or "copy" (it copies the cache on every call).
    """

    name: str
    of: tuple[str, ...]
    comparison: str
    value: Any
    source: str
    outcome: str = "reject"
    remedy: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Those of ``when``, ``arch``, ``addresses``, ``offset`` and ``rounded_up_to`` that the table gives."""


@dataclass(frozen=True)
class Kernel:
    """One row of the table: a kernel and all of its demands.

    ``title``: its readable name. ``section``: where ``layouts.md`` describes it. ``archs``: the architectures it runs
    on. ``tensors``: tensor -> name of a form -> the axis names of that form. ``needed``: sets of tensors, one of which
    must be given. ``role``: what it does to the cache, "read", "write" or "move". ``is_joined``: whether its call also
    takes K and V as one tensor, with an axis of 2 after that of pages.
    """

    name: str
    title: str
    section: str
    source: str
    archs: tuple[str, ...]
    tensors: Mapping[str, Mapping[str, tuple[str, ...]]]
    needed: tuple[frozenset[str], ...]
    demands: tuple[Demand, ...]
    role: str = "read"
    is_joined: bool = False


def kernels() -> tuple[str, ...]:
    """Return the names of all kernels in the table, without their aliases. O(kernels)."""
    return tuple(_table()["kernels"])


def kernel(name: str) -> Kernel:
    """Return the row of the kernel with this name or alias. Raises BadInput, which lists the known names.

    O(demands) for the first call with a name.
    """
    known = _own_names()
    spelled = name.lower().replace("-", "_").replace(" ", "_") if isinstance(name, str) else ""
    if spelled not in known:
        shortest = {key: min((also for also in known if known[also] == key), key=len) for key in sorted(kernels())}
        listed = [key if short == key else f"{key} ({short})" for key, short in shortest.items()]
        hint = did_you_mean(spelled, known, cutoff=0.75)
        text = f"unknown kernel {shown(name)}; known: {', '.join(listed)}" + (f"; {hint}" if hint else "")
        raise BadInput(text, needed=name, available=tuple(known), hint=hint)
    return _kernel(known[spelled])


def kernels_named(beginning: str) -> tuple[Kernel, ...]:
    """Return the rows of the kernels that have a name or alias with this ``beginning``. O(kernels)."""
    return tuple(
        _kernel(key) for key in dict.fromkeys(k for name, k in _own_names().items() if name.startswith(beginning))
    )


@cache
def _own_names() -> dict[str, str]:
    """Return every name and alias of a kernel -> its name in the table."""
    return {alias: key for key, row in _table()["kernels"].items() for alias in (key, *row.get("also", ()))}


def other_names(kind: str) -> Mapping[str, list[str]]:
    """Return name in the table -> aliases that callers may use, for ``kind`` "tensors" or "declared"."""
    names: Mapping[str, list[str]] = _table()["also"][kind]
    return names


def family(arch: str) -> str:
    """Return the architecture whose kernels run on ``arch``: "sm103a" -> "sm100"; "any" stays. Raises BadInput."""
    archs: dict[str, list[str]] = _table()["archs"]
    spelled = str(arch).lower().replace("_", "").rstrip("af")
    found = [name for name, members in archs.items() if spelled in members]
    if spelled != "any" and not found:
        raise unknown_name("architecture", arch, ("any", *chain.from_iterable(archs.values())))
    return found[0] if found else "any"


@cache
def _table() -> dict[str, Any]:
    """Return the table ``demands.json``."""
    return read_json("kvpagoda.layouts", "demands.json")


@cache
def _kernel(key: str) -> Kernel:
    """Return the row ``key`` of the table, with what it inherits from the row that it is ``like``."""
    table = _table()
    row = table["kernels"][key]
    base = _kernel(row["like"]) if "like" in row else None
    forms = {
        tensor: {
            form: tuple(axes.split()) for form, axes in (given if isinstance(given, dict) else {"": given}).items()
        }
        for tensor, given in row.get("tensors", {}).items()
    }
    own = tuple(_demand(one) for one in row["demands"])
    if base is None:
        tensors: Mapping[str, Mapping[str, tuple[str, ...]]]
        tensors = {tensor.removesuffix("?"): given for tensor, given in forms.items()}
        always = " ".join(tensor for tensor in forms if not tensor.endswith("?"))
        needed = tuple(frozenset(one.split()) for one in row.get("need", [always]))
        inherited = tuple(_demand(one) for one in table["every kernel"])
    else:
        tensors, needed = base.tensors, base.needed
        inherited = tuple(one for one in base.demands if one.name not in row.get("without", ()))
    archs = tuple(row.get("arch", base.archs if base else ()))
    demands = own + inherited
    is_joined = row.get("joined", base is not None and base.is_joined)
    return Kernel(
        key,
        row["title"],
        row["section"],
        row["source"],
        archs,
        tensors,
        needed,
        demands,
        row.get("role", "read"),
        is_joined,
    )


def _demand(row: dict[str, Any]) -> Demand:
    """Return a demand of the table as a value."""
    (comparison,) = (name for name in COMPARISONS if name in row)
    known = {"demand", "of", "source", "else", "remedy", comparison}
    return Demand(
        name=row["demand"],
        of=tuple(row["of"].split()),
        comparison=comparison,
        value=row[comparison],
        source=row["source"],
        outcome=row.get("else", "reject"),
        remedy=row.get("remedy", ""),
        conditions={name: value for name, value in row.items() if name not in known},
    )
