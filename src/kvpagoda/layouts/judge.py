"""Decide whether a kernel can read a cache with a given layout, before memory is allocated. Needs no torch.

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
from typing import Any, Protocol

from kvpagoda.errors import BadInput, shown
from kvpagoda.layouts.demands import COMPARISONS, OUTCOMES, Demand, Kernel, family, kernel, other_names
from kvpagoda.layouts.expression import ITEMSIZE
from kvpagoda.units import align_up, whole_number

Quantity = tuple[str, Any, bool]
"""(its name, its value, whether it is a stride of an axis of one element)."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a kernel sees it: ``strides`` in elements, ``base_alignment`` in bytes (None: not known).

    ``axes``: the names of its axes if the caller gives them, because shapes alone cannot tell [2, B, ..] from [B, 2,
    ..].
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    base_alignment: int | None = None
    axes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a kernel does with given tensors. Made by ``judge``.

    Args:
        kernel: that was asked.
        expect: "ok", "reject" (it refuses), "copy" (it silently copies the cache on each call) or "garbage" (it reads
            wrong bytes without an error).
        rule: of the first demand that is not met; "" if there is none.
        reason: why it is not.
        source: where the kernel says so.
        remedy: what would meet it.
        assumed: facts that shapes cannot tell and that were not declared; they are taken to be as the kernel demands.
        unused: declared facts that no demand of this kernel uses.
        key: hashable, and equal only for equal kernel, tensors (strides included), architecture and declared facts. A
            cache of kernel plans must use it as its key.
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


class HasKernelTensors(Protocol):
    """Memory of a layer that says itself what it gives to a kernel: ``kvpagoda.LayerView``."""

    def kernel_tensors(self, kernel: str) -> Mapping[str, Any]:
        """Return the tensors that ``kernel`` takes, as ``judge`` reads them."""


def judge(
    name: str,
    tensors: Mapping[str, Any] | HasKernelTensors,
    arch: str = "any",
    declared: Mapping[str, Any] | None = None,
) -> Verdict:
    """Return whether a kernel can take these tensors, by the table of demands. No kernel is loaded or run; O(demands).

    Args:
        name: the kernel.
        tensors: the kernel's name of a tensor -> a torch tensor, or another object with shape, stride(), dtype and
            data_ptr(); a TensorSpec; or {"shape": [..], "strides": [..] in elements, "dtype": "bfloat16",
            "base_alignment": bytes, "axes": [names]}, the last two only if known. Or a LayerView, whose
            ``kernel_tensors(name)`` are judged.
        arch: "sm90", "sm100a", ..; "any": the demands of all architectures must be met.
        declared: facts that shapes cannot tell: {"order": "VK"}, {"layout": "HND"}, {"dialect": "flashmla"}, ..; they
            may also be in ``tensors``, under the key "declared".

    Raises:
        BadInput: an unknown kernel, architecture, tensor or dtype, a missing tensor that the kernel needs, or shapes
            and strides of different lengths.
    """
    row = kernel(name)
    if isinstance(tensors, type) or not (isinstance(tensors, Mapping) or hasattr(tensors, "kernel_tensors")):
        wanted = " or ".join(" and ".join(sorted(needed)) for needed in row.needed if needed) or "none"
        raise BadInput(
            f"tensors are a mapping from names to tensors ({row.name}: {wanted}) or a LayerView, got {shown(tensors)}",
            needed=wanted,
        )
    given = dict(tensors if isinstance(tensors, Mapping) else tensors.kernel_tensors(name))
    facts = {**(given.pop("declared", None) or {}), **(declared or {})}
    facts = {_own_name(fact, other_names("declared"), ()): value for fact, value in facts.items()}
    specs = _specs(row, given)
    arch = family(arch)
    key = (row.name, arch, tuple(sorted(specs.items())), tuple(sorted((k, repr(v)) for k, v in facts.items())))
    scene = _Scene(row, specs, facts)
    problems = [*_arch_refuses(row, arch), *scene.misnamed()]
    assumed: list[str] = []
    for demand in row.demands:
        if scene.concerns(demand, arch):
            problems += [
                (demand.outcome, demand.name, reason, demand.source, demand.remedy) for reason in scene.broken(demand)
            ]
            assumed += [f"{fact} is {demand.value}" for fact in demand.of if scene.is_undeclared(fact, demand)]
    problems.sort(key=lambda problem: OUTCOMES.index(problem[0]))  # stable: the first of the worst outcome
    first = problems[0] if problems else ("ok", "all demands", "every demand is met", row.source, "")
    return Verdict(row.name, *first, tuple(assumed), tuple(facts.keys() - _facts_of(row)), key)


def _facts_of(row: Kernel) -> set[str]:
    """Return the names of the declared facts that the demands of a kernel use."""
    texts = [*(q for d in row.demands for q in (*d.of, str(d.value), *d.conditions.get("when", ())))]
    return {"layout", *(fact for text in texts for fact in re.findall(r"declared\.(\w+)", text))}


def _own_name(name: str, others: Mapping[str, Sequence[str]], known: Any) -> str:
    """Return the table's name for ``name``, which may be an alias of a name in ``known`` (empty: any name)."""
    if name in known:
        return name
    return next((own for own, also in others.items() if name in also and (not known or own in known)), name)


def _specs(row: Kernel, given: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Return the table's name -> TensorSpec for the given tensors. Raises BadInput."""
    specs: dict[str, TensorSpec] = {}
    for called, spec in given.items():
        tensor = _own_name(called, other_names("tensors"), row.tensors)
        if tensor not in row.tensors or tensor in specs:
            text = f"{row.name} takes the tensors {', '.join(row.tensors)}, each once; got {', '.join(given)}"
            raise BadInput(text, needed=tensor, available=tuple(row.tensors))
        specs[tensor] = spec if isinstance(spec, TensorSpec) else _spec(called, spec)
    if not any(needed <= specs.keys() for needed in row.needed):
        wanted = " or ".join(" and ".join(sorted(needed)) for needed in row.needed)
        text = f"{row.name} needs the tensors {wanted}; got {', '.join(given) or 'none'}"
        raise BadInput(text, needed=wanted, available=tuple(given))
    return specs


def _described(tensor: Any) -> dict[str, Any]:
    """Return a torch tensor, or an object like one, as data."""
    address = tensor.data_ptr()
    found = {"shape": tensor.shape, "strides": tensor.stride(), "dtype": tensor.dtype}
    return {**found, "base_alignment": address & -address} if address else found


def _spec(name: str, given: Any) -> TensorSpec:
    """Return the tensor ``given``, itself or as data, as a TensorSpec. Raises BadInput."""
    if all(hasattr(given, part) for part in ("data_ptr", "stride", "shape", "dtype")):
        given = _described(given)
    if not isinstance(given, Mapping):
        text = f"tensor {name!r} is a tensor, a TensorSpec or a description, got {shown(given)}"
        raise BadInput(text, field=name, needed=type(given).__name__)
    missing = [part for part in ("shape", "strides", "dtype") if part not in given]
    if missing:
        text = f"tensor {name!r} has no {missing[0]}; give shape, strides (in elements) and dtype"
        raise BadInput(text, field=name, needed=missing[0])
    shape = tuple(whole_number(n, f"an extent of {name!r}") for n in given["shape"])
    strides = tuple(whole_number(n, f"a stride of {name!r}") for n in given["strides"])
    dtype = str(given["dtype"]).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        text = f"tensor {name!r} has the unknown dtype {dtype!r}; known: {', '.join(ITEMSIZE)}"
        raise BadInput(text, field=name, needed=dtype)
    axes = tuple(given["axes"]) if given.get("axes") else None
    if len(shape) != len(strides) or (axes and len(axes) != len(shape)):
        text = f"tensor {name!r} has {len(shape)} extents, {len(strides)} strides and the axes {axes}"
        raise BadInput(text, field=name, needed=len(shape), available=len(strides))
    base = given.get("base_alignment")
    if base is not None:
        base = whole_number(base, f"the base alignment of {name!r} in bytes", at_least=1)
    return TensorSpec(shape, strides, dtype, base, axes)


def _arch_refuses(row: Kernel, arch: str) -> list[tuple[str, str, str, str, str]]:
    """Return the problem of a kernel that does not run on ``arch``, as a list of one; [] if it runs there."""
    if arch == "any" or not row.archs or arch in row.archs:
        return []
    reason = f"{row.title} runs on {', '.join(row.archs)}, not on {arch}"
    return [("reject", "architecture", reason, row.source, f"use a kernel for {arch}")]


class _Scene:
    """The tensors of one call with named axes, and the declared facts. Evaluates demands on them."""

    def __init__(self, row: Kernel, specs: Mapping[str, TensorSpec], facts: Mapping[str, Any]) -> None:
        self.row, self.specs, self.facts = row, specs, facts
        self.axes = {tensor: self._axes(tensor) for tensor in specs}

    def _axes(self, tensor: str) -> tuple[str, ...] | None:
        """Return the names of the tensor's axes; None if its shape has no form that the kernel takes."""
        forms, spec = self.row.tensors[tensor], self.specs[tensor]
        chosen = str(self.facts.get("layout"))
        for axes in [forms[chosen]] if chosen in forms else forms.values():
            if len(axes) == len(spec.shape) and all(n == 1 for n, axis in zip(spec.shape, axes) if axis == "one"):
                return axes
        return None

    def misnamed(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yield problems: tensors of a form that the kernel does not take, or with other axes than the caller named."""
        for tensor, axes in self.axes.items():
            spec, forms = self.specs[tensor], [*self.row.tensors[tensor].values()]
            wanted = " or ".join(f"[{', '.join('1' if axis == 'one' else axis for axis in form)}]" for form in forms)
            if axes is None:
                reason = f"{tensor} {list(spec.shape)} is not {wanted}"
                yield "reject", "shape", reason, self.row.source, f"give {tensor} as {wanted}"
            elif spec.axes and spec.axes not in forms:
                reason = f"{tensor} is [{', '.join(spec.axes)}], read as [{', '.join(axes)}]: equal shapes, other axes"
                yield "garbage", "axes", reason, self.row.source, f"give {tensor} as {wanted}"

    def concerns(self, demand: Demand, arch: str) -> bool:
        """Return whether the demand applies on ``arch`` and to these tensors."""
        archs = demand.conditions.get("arch")
        if archs and arch != "any" and arch not in archs:
            return False
        conditions: Mapping[str, list[Any]] = demand.conditions.get("when", {})
        return all(self._first(quantity) in values for quantity, values in conditions.items())

    def is_undeclared(self, quantity: str, demand: Demand) -> bool:
        """Return whether ``quantity`` is a fact that must be one of given values and was not declared."""
        known = quantity.startswith("declared.") and quantity.removeprefix("declared.") not in self.facts
        return known and demand.comparison == "one_of" and "when" not in demand.conditions

    def broken(self, demand: Demand) -> Iterator[str]:
        """Yield the reason for each quantity of ``demand`` that does not pass. An unknown quantity passes."""
        words, passes = COMPARISONS[demand.comparison]
        left = [value for quantity in demand.of for value in self.quantities(quantity)]
        right: list[Quantity]
        if isinstance(demand.value, str) and "." in demand.value:
            right = [value for quantity in demand.value.split() for value in self.quantities(quantity)]
            right = right * len(left) if len(right) == 1 else right
        else:
            right = [("", demand.value, False)] * len(left)
        for (name, value, single), (wanted_name, wanted, wanted_single) in zip(left, right):
            if value is None or wanted is None or (demand.conditions.get("addresses") and (single or wanted_single)):
                continue
            wanted = _shifted(wanted, demand.conditions)
            if not passes(value, wanted):
                yield f"{name} = {_plain(value)} must {words}{_right_side(wanted_name, wanted)}"

    def quantities(self, path: str) -> list[Quantity]:
        """Return the values that ``path`` names (see ``demands.py``): one, several, or none if unknown."""
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
        return [
            value for tensor in (self.specs if owner == "each" else [owner]) for value in self._of_tensor(tensor, rest)
        ]

    def _first(self, path: str) -> Any:
        """Return the first value that ``path`` names; None if it is unknown."""
        found = self.quantities(path)
        return found[0][1] if found else None

    def _of_tensor(self, tensor: str, rest: str) -> list[Quantity]:
        """Return the quantities ``tensor.rest``; [] if the tensor is not given or has no form that the kernel takes."""
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
    """Return whether the elements fill a run of memory without gaps, in any order of the axes."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(spec.strides, spec.shape) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _shifted(wanted: Any, conditions: Mapping[str, Any]) -> Any:
    """Return the right side of a demand, plus ``offset`` or rounded up, if the demand has such a condition."""
    if "offset" in conditions:
        return wanted + conditions["offset"]
    return align_up(wanted, conditions["rounded_up_to"]) if "rounded_up_to" in conditions else wanted


def _plain(value: Any) -> str:
    """Return a value, or the values of a list, as text."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _right_side(name: str, wanted: Any) -> str:
    """Return the right side of a comparison as text, with its name if it is a quantity."""
    if wanted is True and not name:
        return ""
    return f"{name} = {_plain(wanted)}" if name else _plain(wanted)
