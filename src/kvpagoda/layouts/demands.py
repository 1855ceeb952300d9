"""What kernels demand of the tensors that they are given: the table ``demands.json`` as values.

A kernel names its tensors and their axes, and lists its demands, each with its source. A demand is one comparison:

    {"demand": "page stride", "of": "kv.stride.block", "arch": ["sm100"], "multiple_of": 576, "else": "reject", "source": ".."}

``of`` names *quantities*, separated by spaces, each of which must pass; ``a*b`` is a product:

    kv.size.token     number of tokens of a page         kv.dtype   its dtype             declared.topk   what the caller
    kv.stride.block   elements from page to page         kv.base    alignment in bytes                    says where shapes
    kv.bytes.block    the same in bytes                  kv.given   whether there is one                  cannot tell
    kv.dense.block    elements, were the tensor dense    kv.packed  whether it is dense in some order of its axes
    kv.stride.block,token   several axes; ``outer``: all but the last; ``all``; ``last``     each.stride.block   every tensor

One comparison of each: ``multiple_of``, ``divides``, ``one_of``, ``equals``, ``at_least``, ``at_most`` (of a value or of
another quantity, plus ``offset`` or ``rounded_up_to``), ``power_of_two``. ``when`` and ``arch`` say where a demand holds;
``addresses``: the stride only forms addresses, so that of an axis of one element does not matter. ``else`` is what happens
where the demand is not met. A row that is ``like`` another one has its tensors and demands too, but those in ``without``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from kvpagoda.errors import unknown_name
from kvpagoda.loading import read_json

OUTCOMES = ("reject", "garbage", "copy")
"""What a violation does, in the order in which it would be noticed: a kernel refuses before it reads."""
COMPARISONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "multiple_of": ("be a multiple of ", lambda value, wanted: value % wanted == 0),
    "divides": ("divide ", lambda value, wanted: value > 0 and wanted % value == 0),
    "one_of": ("be one of ", lambda value, wanted: value in wanted),
    "equals": ("be ", operator.eq),
    "at_least": ("be at least ", operator.ge),
    "at_most": ("be at most ", operator.le),
    "power_of_two": ("be a power of two", lambda value, _: value > 0 and value & (value - 1) == 0),
}
"""What a quantity must do or be, as a sentence goes on, and whether it does: of its value and the right side."""


@dataclass(frozen=True)
class Demand:
    """One comparison that a kernel's tensors must pass; see the head of this file for the words.

    ``comparison`` is one of ``COMPARISONS`` and ``value`` its right side. ``outcome``: "reject" (the kernel refuses),
    "garbage" (it reads or writes wrong bytes and says nothing) or "copy" (it copies the cache on every call).
    """

    name: str
    of: tuple[str, ...]
    comparison: str
    value: Any
    source: str
    outcome: str = "reject"
    remedy: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """``when``, ``arch``, ``addresses``, ``offset``, ``rounded_up_to``, where given."""


@dataclass(frozen=True)
class Kernel:
    """One row of the table: ``name``, what it is, where ``layouts.md`` describes it, and all of its demands.

    ``tensors`` gives the tuples of axis names that a tensor may have, by the name of that form; ``needed`` are the sets of
    tensors of which one must be there. ``role``: what it does to the cache, "read", "write" or "move".
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


def kernels() -> tuple[str, ...]:
    """The names of all kernels in the table, without their other names. O(kernels)."""
    return tuple(_table()["kernels"])


@cache
def kernel(name: str) -> Kernel:
    """The row of the kernel called ``name``, or by one of its other names. Raises BadInput with the names that there
    are. O(demands), once a name."""
    table = _table()["kernels"]
    spelled = name.lower().replace("-", "_").replace(" ", "_")
    known = {other: key for key, row in table.items() for other in (key, *row.get("also", ()))}
    if spelled not in known:
        raise unknown_name("kernel", name, sorted(table))
    return _kernel(known[spelled])


def other_names(kind: str) -> Mapping[str, list[str]]:
    """Other names under which callers give ``kind`` ("tensors" or "declared"), by the name that the table uses."""
    names: Mapping[str, list[str]] = _table()["also"][kind]
    return names


def family(arch: str) -> str:
    """The architecture whose kernels run on ``arch``: "sm103a" -> "sm100"; "any" stays. Raises BadInput for an unknown one."""
    archs: dict[str, list[str]] = _table()["archs"]
    spelled = str(arch).lower().replace("_", "").rstrip("af")
    found = [name for name, members in archs.items() if spelled in members]
    if spelled != "any" and not found:
        raise unknown_name("architecture", arch, ("any", *chain.from_iterable(archs.values())))
    return found[0] if found else "any"


@cache
def _table() -> dict[str, Any]:
    return read_json("kvpagoda.layouts", "demands.json")


def _kernel(key: str) -> Kernel:
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
    return Kernel(
        key, row["title"], row["section"], row["source"], archs, tensors, needed, demands, row.get("role", "read")
    )


def _demand(row: dict[str, Any]) -> Demand:
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
