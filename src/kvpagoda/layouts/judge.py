"""Whether a kernel can read a cache that is laid out in a given way, before any memory is allocated. Needs no torch.

>>> page = {"shape": [8, 64, 1, 584], "strides": [37376, 584, 584, 1], "dtype": "uint8", "base_alignment": 16}
>>> verdict = judge("flashmla_sparse_model1", tensors={"kv": page}, arch="sm100")
>>> print(verdict)
reject: page stride: kv.stride.block = 37376 must be a multiple of 576 [FlashMLA:csrc/sm100/decode/head64/kernel.cuh:911-912]
>>> verdict.remedy
'round the record that holds the page up to a multiple of 576 bytes'
>>> judge("flashmla_sparse_model1", tensors={"kv": page}, arch="sm90").expect
'ok'
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpagoda.errors import BadInput
from kvpagoda.layouts.demands import COMPARISONS, OUTCOMES, Demand, Kernel, family, kernel, other_names
from kvpagoda.layouts.expression import ITEMSIZE
from kvpagoda.units import align_up, whole_number

Quantity = tuple[str, Any, bool]
"""(how it is called, its value, whether it is a stride of an axis of one element)."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a kernel sees it: ``strides`` in elements, ``base_alignment`` in bytes (None: not known).

    ``axes`` are the names of its axes, where the caller says them: shapes alone cannot tell [2, B, ..] from [B, 2, ..].
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    base_alignment: int | None = None
    axes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a kernel does with the tensors that it was judged by.

    ``expect``: "ok", "reject" (it refuses), "copy" (it silently copies the cache on each call) or "garbage" (it reads wrong
    bytes and says nothing). ``rule``, ``reason``, ``source`` and ``remedy`` are those of the first demand that is not met;
    ``assumed`` lists facts that the shapes cannot tell, were not declared, and were taken to be what the kernel wants;
    ``unused`` the declared facts that no demand of this kernel looks at.
    ``key`` is hashable and equal only for equal kernels, tensors (strides too), architecture and declared facts: what a
    cache of kernel plans must be keyed by.
    """

    kernel: str
    expect: str
    rule: str
    reason: str
    source: str
    remedy: str
    assumed: tuple[str, ...]
    unused: tuple[str, ...]
    key: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.expect}: {self.rule}: {self.reason} [{self.source}]"


def judge(
    name: str, tensors: Mapping[str, Any], arch: str = "any", declared: Mapping[str, Any] | None = None
) -> Verdict:
    """Judge by the table of demands whether the kernel called ``name`` can take ``tensors``.

    ``tensors``   by the kernel's names for them, {"shape": [..], "strides": [..] in elements, "dtype": "bfloat16",
                  "base_alignment": bytes, "axes": [names], the last two where known}; a TensorSpec does too
    ``arch``      "sm90", "sm100a", ..; "any": whatever it runs on, so that the demands of every architecture hold
    ``declared``  what shapes cannot tell: {"order": "VK"}, {"layout": "HND"}, {"dialect": "flashmla"}, ..; it may also
                  stand in ``tensors`` under this name

    Nothing is loaded and nothing is run. Raises BadInput for a kernel, an architecture, a tensor or a dtype that is not
    known, for a tensor that the kernel needs and does not get, and for shapes and strides of different lengths.
    O(demands).
    """
    row = kernel(name)
    given = dict(tensors)
    facts = {**(given.pop("declared", None) or {}), **(declared or {})}
    facts = {_own_name(fact, other_names("declared"), ()): value for fact, value in facts.items()}
    specs = _specs(row, given)
    arch = family(arch)
    key = (row.name, arch, tuple(sorted(specs.items())), tuple(sorted((k, repr(v)) for k, v in facts.items())))
    scene = _Scene(row, specs, facts)
    found = [*_arch_refuses(row, arch), *scene.misnamed()]
    assumed: list[str] = []
    for demand in row.demands:
        if scene.concerns(demand, arch):
            found += [
                (demand.outcome, demand.name, said, demand.source, demand.remedy) for said in scene.broken(demand)
            ]
            assumed += [f"{one} is {demand.value}" for one in demand.of if scene.is_undeclared(one, demand)]
    found.sort(key=lambda one: OUTCOMES.index(one[0]))  # stable: the first demand of the worst outcome
    first = found[0] if found else ("ok", "all demands", "every demand is met", row.source, "")
    return Verdict(row.name, *first, tuple(assumed), tuple(facts.keys() - _facts_of(row)), key)


def _facts_of(row: Kernel) -> set[str]:
    """The declared facts that the demands of a kernel look at."""
    texts = [*(q for one in row.demands for q in (*one.of, str(one.value), *one.conditions.get("when", ())))]
    return {"layout", *(fact for text in texts for fact in re.findall(r"declared\.(\w+)", text))}


def _own_name(name: str, others: Mapping[str, Sequence[str]], known: Any) -> str:
    """The table's name for what the caller calls ``name``."""
    if name in known:
        return name
    return next((own for own, also in others.items() if name in also and (not known or own in known)), name)


def _specs(row: Kernel, given: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors as values, by the table's names. Raises BadInput."""
    specs: dict[str, TensorSpec] = {}
    for called, spec in given.items():
        tensor = _own_name(called, other_names("tensors"), row.tensors)
        if tensor not in row.tensors or tensor in specs:
            raise BadInput(f"{row.name} takes the tensors {', '.join(row.tensors)}, each once; got {', '.join(given)}")
        specs[tensor] = spec if isinstance(spec, TensorSpec) else _spec(called, spec)
    if not any(needed <= specs.keys() for needed in row.needed):
        wanted = " or ".join(" and ".join(sorted(needed)) for needed in row.needed)
        raise BadInput(f"{row.name} needs the tensors {wanted}; got {', '.join(given) or 'none'}")
    return specs


def _spec(name: str, given: Mapping[str, Any]) -> TensorSpec:
    missing = [part for part in ("shape", "strides", "dtype") if part not in given]
    if missing:
        raise BadInput(f"tensor {name!r} says no {missing[0]}; give shape, strides (in elements) and dtype")
    shape = tuple(whole_number(n, f"an extent of {name!r}") for n in given["shape"])
    strides = tuple(whole_number(n, f"a stride of {name!r}") for n in given["strides"])
    dtype = str(given["dtype"]).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise BadInput(f"tensor {name!r} has the unknown dtype {dtype!r}; known: {', '.join(ITEMSIZE)}")
    axes = tuple(given["axes"]) if given.get("axes") else None
    if len(shape) != len(strides) or (axes and len(axes) != len(shape)):
        raise BadInput(f"tensor {name!r} has {len(shape)} extents, {len(strides)} strides and the axes {axes}")
    base = given.get("base_alignment")
    if base is not None:
        base = whole_number(base, f"the base alignment of {name!r} in bytes", at_least=1)
    return TensorSpec(shape, strides, dtype, base, axes)


def _arch_refuses(row: Kernel, arch: str) -> list[tuple[str, str, str, str, str]]:
    if arch == "any" or not row.archs or arch in row.archs:
        return []
    said = f"{row.title} runs on {', '.join(row.archs)}, not on {arch}"
    return [("reject", "architecture", said, row.source, f"use a kernel for {arch}")]


class _Scene:
    """The tensors of one call with their axes named, and what is declared of them; answers what a demand asks."""

    def __init__(self, row: Kernel, specs: Mapping[str, TensorSpec], facts: Mapping[str, Any]) -> None:
        self.row, self.specs, self.facts = row, specs, facts
        self.axes = {tensor: self._axes(tensor) for tensor in specs}

    def _axes(self, tensor: str) -> tuple[str, ...] | None:
        """The names of the tensor's axes; None where it has no form that the kernel takes."""
        forms, spec = self.row.tensors[tensor], self.specs[tensor]
        chosen = str(self.facts.get("layout"))
        for axes in [forms[chosen]] if chosen in forms else forms.values():
            if len(axes) == len(spec.shape) and all(n == 1 for n, axis in zip(spec.shape, axes) if axis == "one"):
                return axes
        return None

    def misnamed(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Tensors of another form than the kernel takes, and tensors whose axes the caller calls otherwise."""
        for tensor, axes in self.axes.items():
            spec, forms = self.specs[tensor], [*self.row.tensors[tensor].values()]
            wanted = " or ".join(f"[{', '.join('1' if axis == 'one' else axis for axis in form)}]" for form in forms)
            if axes is None:
                said = f"{tensor} {list(spec.shape)} is not {wanted}"
                yield "reject", "shape", said, self.row.source, f"give {tensor} as {wanted}"
            elif spec.axes and spec.axes not in forms:
                said = f"{tensor} is [{', '.join(spec.axes)}], read as [{', '.join(axes)}]: the shapes agree, the axes do not"
                yield "garbage", "axes", said, self.row.source, f"give {tensor} as {wanted}"

    def concerns(self, demand: Demand, arch: str) -> bool:
        """Whether the demand holds on ``arch`` and for these tensors."""
        archs = demand.conditions.get("arch")
        if archs and arch != "any" and arch not in archs:
            return False
        conditions: Mapping[str, list[Any]] = demand.conditions.get("when", {})
        return all(self._first(quantity) in values for quantity, values in conditions.items())

    def is_undeclared(self, quantity: str, demand: Demand) -> bool:
        """Whether ``quantity`` is a fact that nobody declared and that has to be one of given values."""
        known = quantity.startswith("declared.") and quantity.removeprefix("declared.") not in self.facts
        return known and demand.comparison == "one_of" and "when" not in demand.conditions

    def broken(self, demand: Demand) -> Iterator[str]:
        """What is wrong, one sentence for each quantity that does not pass; one that is not known passes."""
        words, passes = COMPARISONS[demand.comparison]
        left = [one for quantity in demand.of for one in self.quantities(quantity)]
        right: list[Quantity]
        if isinstance(demand.value, str) and "." in demand.value:
            right = [one for quantity in demand.value.split() for one in self.quantities(quantity)]
            right = right * len(left) if len(right) == 1 else right
        else:
            right = [("", demand.value, False)] * len(left)
        for (name, value, single), (other, wanted, other_single) in zip(left, right):
            if value is None or wanted is None or (demand.conditions.get("addresses") and (single or other_single)):
                continue
            wanted = _shifted(wanted, demand.conditions)
            if not passes(value, wanted):
                yield f"{name} = {_plain(value)} must {words}{_right_side(other, wanted)}"

    def quantities(self, path: str) -> list[Quantity]:
        """What ``path`` names (see ``demands.py``): one or several values, or none where it is not known."""
        if "*" in path:
            sides = [self.quantities(side) for side in path.split("*")]
            if not all(sides) or any(value is None for side in sides for _, value, _ in side[:1]):
                return []
            factors = math.prod(side[0][1] for side in sides[1:])
            return [(path, value * factors, single) for _, value, single in sides[0]]
        owner, _, rest = path.partition(".")
        if owner.isdigit():
            return [(owner, int(owner), False)]
        if owner == "declared":
            return [(path, self.facts.get(rest), False)]
        if rest == "given":
            return [(path, owner in self.specs, False)]
        return [one for tensor in (self.specs if owner == "each" else [owner]) for one in self._of_tensor(tensor, rest)]

    def _first(self, path: str) -> Any:
        found = self.quantities(path)
        return found[0][1] if found else None

    def _of_tensor(self, tensor: str, rest: str) -> list[Quantity]:
        spec, axes = self.specs.get(tensor), self.axes.get(tensor)
        if spec is None or axes is None:
            return []
        what, _, which = rest.partition(".")
        of_all = {"dtype": spec.dtype, "base": spec.base_alignment}
        if what in ("dtype", "base", "packed"):
            return [(f"{tensor}.{what}", _is_packed(spec) if what == "packed" else of_all[what], False)]
        per_axis = {
            "size": spec.shape,
            "stride": spec.strides,
            "bytes": tuple(stride * ITEMSIZE[spec.dtype] for stride in spec.strides),
            "dense": tuple(math.prod(spec.shape[i + 1 :]) for i in range(len(axes))),
        }[what]
        chosen = {"all": axes, "outer": axes[:-1], "last": axes[-1:]}.get(which, tuple(which.split(",")))
        at = [axes.index(axis) for axis in chosen if axis in axes]
        return [(f"{tensor}.{what}.{axes[i]}", per_axis[i], what != "size" and spec.shape[i] == 1) for i in at]


def _is_packed(spec: TensorSpec) -> bool:
    """Whether the elements fill a run of memory without gaps, in whatever order of the axes."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(spec.strides, spec.shape) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _shifted(wanted: Any, conditions: Mapping[str, Any]) -> Any:
    """The right side, plus ``offset`` and rounded up, where the demand says so."""
    if "offset" in conditions:
        return wanted + conditions["offset"]
    return align_up(wanted, conditions["rounded_up_to"]) if "rounded_up_to" in conditions else wanted


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _right_side(name: str, wanted: Any) -> str:
    if wanted is True and not name:
        return ""
    return f"{name} = {_plain(wanted)}" if name else _plain(wanted)
