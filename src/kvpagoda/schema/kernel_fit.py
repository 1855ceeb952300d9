"""What the kernels that read a cache make of its records: block size, kernel page and padding, or why none is legal.

A kernel is judged (``kvpagoda.layouts.judge``) with the very tensors that ``LayerView`` will hand it, before memory is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.layouts.demands import Demand, Kernel, kernel, kernels
from kvpagoda.layouts.judge import judge
from kvpagoda.layouts.packed_row import PackedRow
from kvpagoda.layouts.pages import KIND_OF_ROWS, KINDS
from kvpagoda.schema.fields import Growth, itemsize
from kvpagoda.schema.layers import Group, Layer
from kvpagoda.schema.layout import ALIGN, KernelTensor, Page, RowLayout
from kvpagoda.schema.layout_choice import LayoutNames, by_kind

KernelNames = LayoutNames
"""A kernel, several, or one by kind of rows (``kvpagoda.layouts.pages.KINDS``); ``name-sm100`` where it runs on that alone."""
_OF_SECTION = {"1.1": ("attention",), "1.2": ("latent", "entries"), "1.3": ("indexer",)}
_ROWS_OF = {"k": ("k", "k_rope"), "v": ("v", "latent"), "ckv": ("latent",), "kpe": ("k_rope",)}
"""Tensors of kernels that are one field, and what that is called here."""
_DOES = {"reject": "refuses", "copy": "copies the cache on each call", "garbage": "reads wrong bytes"}
LARGEST_BLOCK = 512
_PAGES = 64
"""Kernel pages that the judged tensors have; more change nothing."""


@dataclass(frozen=True)
class Reader:
    """A kernel that reads ``kinds`` of rows on ``arch``; ``rows``: the rows of the table of demands that its name may mean."""

    name: str
    rows: tuple[Kernel, ...]
    arch: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """Records that kernels read as they are: tokens of a block and of a kernel page, and bytes that the records of each group
    are a multiple of. ``notes``: what was done for which kernel."""

    block_size: int
    kernel_page: int
    multiples: Mapping[Growth, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def block_layout(self, group: Group, order: str) -> RowLayout:
        """The record of one block of ``group``."""
        return group.block_layout(self.block_size, self.kernel_page, order, self.multiples.get(group.growth, ALIGN))


def readers_of(names: KernelNames) -> tuple[Reader, ...]:
    """The kernels that are named. Raises BadInput for one that is not known, or that does not read rows of its kind."""
    found = []
    for kind, name in by_kind(names):
        match = re.fullmatch(r"(.*?)(?:[-_ ](sm\d+[af]?))?", name.lower())
        assert match is not None
        plain = match[1].replace("-", "_").replace(" ", "_")
        rows = tuple(kernel(one) for one in kernels() if one.startswith(f"{plain}_"))
        try:
            rows = (kernel(plain),)
        except BadInput:
            if not rows:
                raise
        kinds = tuple(dict.fromkeys(one for row in rows for one in _kinds_of(row)))
        if kind and kind not in kinds:
            raise BadInput(
                f"kernel {name!r} reads {', '.join(kinds) or 'no cache'}, not {kind!r}; kinds: {', '.join(KINDS)}"
            )
        found.append(Reader(name, rows, match[2] or "any", (kind,) if kind else kinds))
    return tuple(found)


def _kinds_of(row: Kernel) -> tuple[str, ...]:
    if row.section == "1.4":
        return ("conv",) if "channel" in next(iter(row.tensors["state"].values())) else ("recurrent",)
    return _OF_SECTION.get(row.section, ())


def fit(groups: Sequence[Group], readers: Sequence[Reader], sizes: Iterable[tuple[int, int]], order: str) -> Fit:
    """The first of ``sizes`` (tokens of a block, of a kernel page) with which every one of ``readers`` reads what is of its
    kinds; records are padded as they ask for. Raises SchemaError with what the first sizes lack where none does."""
    why: SchemaError | None = None
    for block_size, kernel_page in sizes:
        try:
            return _padded(Fit(block_size, kernel_page), groups, readers, order)
        except SchemaError as error:
            why = why or error
    assert why is not None
    raise why


def _padded(fit: Fit, groups: Sequence[Group], readers: Sequence[Reader], order: str) -> Fit:
    multiples: dict[Growth, int] = {}
    notes: list[str] = []
    for group in groups:
        law = group.growth
        for _ in range(4):
            layout = Fit(fit.block_size, fit.kernel_page, multiples).block_layout(group, order)
            problem = next(unmet(layout, group.layers, readers, order), None)
            if problem is None:
                break
            multiple = _multiple(problem.demand) if order == "block" else None
            if multiple is None or multiples.get(law, ALIGN) % multiple == 0:
                raise SchemaError(_refusal(problem, fit, law))
            multiples[law] = math.lcm(multiples.get(law, ALIGN), multiple)
            notes.append(f"records of {law.name} are multiples of {multiples[law]:,} bytes for {problem.reader.name}")
    if fit.kernel_page != fit.block_size:
        notes.append(f"blocks of {fit.block_size} tokens are {fit.block_size // fit.kernel_page} kernel pages each")
    kept = {KIND_OF_ROWS.get(rows.name) for group in groups for layer in group.layers for rows in layer.rows()}
    for reader in readers:
        if not kept & {*reader.kinds}:
            raise SchemaError(f"kernel {reader.name!r} reads {', '.join(reader.kinds)}; no layer keeps such rows")
    return Fit(fit.block_size, fit.kernel_page, multiples, tuple(notes))


@dataclass(frozen=True)
class Problem:
    """What a kernel does not take of a page, and the demand that is not met (None: the form of the tensor itself)."""

    reader: Reader
    page: Page
    demand: Demand | None
    text: str


def unmet(
    layout: RowLayout, layers: Sequence[Layer], readers: Sequence[Reader], order: str, row_nbytes: int = 0
) -> Iterator[Problem]:
    """What ``readers`` do not take of records ``layout`` of ``layers``, ``row_nbytes`` apart (0: directly behind each other).
    Pages that are alike are judged once. O(pages + kernels * demands)."""
    encodings = {(layer.index, rows.name): rows.encoding for layer in layers for rows in layer.rows()}
    stride, seen = (row_nbytes or layout.nbytes) // layout.kernel_pages, set()
    mates: dict[int, list[Page]] = {}
    pages = [page if order == "block" else page.apart(_PAGES) for page in layout.pages]
    for page in pages:
        mates.setdefault(page.layer, []).append(page)
    for page in pages:
        encoding = encodings[page.layer, page.rows[0]]
        alike = (page.rows, page.nbytes, page.step, page.places[0].field, math.gcd(page.offset, 64), encoding)
        if alike in seen:
            continue
        seen.add(alike)
        for reader in readers:
            if _kind(page) in reader.kinds:
                step = stride if order == "block" else page.piece
                yield from _judged(reader, page, mates[page.layer], step, encoding)


def _judged(reader: Reader, page: Page, mates: Sequence[Page], stride: int, encoding: Any) -> Iterator[Problem]:
    """At most one problem: none where one of the rows of the table that the reader may be takes the page."""
    first: Problem | None = None
    for row in reader.rows:
        tensors, facts = _tensors(row, page, mates, stride)
        if tensors is None:
            taken = [(name, axes) for name, forms in row.tensors.items() for axes in forms.values()]
            wanted = "; ".join(
                f"{name} [{', '.join(axes)}]" for name, axes in taken if "block" in axes or "slot" in axes
            )
            text = f"it takes {wanted or 'nothing in pages'}, and these rows have no such form; choose another layout"
            first = first or Problem(reader, page, None, text)
            continue
        if isinstance(encoding, PackedRow):
            facts["packing"] = "footer" if encoding.packing.footer else "inline"
            facts["scales"] = "power_of_two" if encoding.rules.rule.has_power_of_two_scales else "raw"
            facts |= {"dialect": encoding.dialect, "padding": -1}
        verdict = judge(row.name, tensors, reader.arch, facts)
        if verdict.expect == "ok":
            return
        demand = next((one for one in row.demands if one.name == verdict.rule), None)
        remedy = verdict.remedy or "choose another layout"
        text = f"it {_DOES[verdict.expect]}: {verdict.rule}: {verdict.reason}; {remedy} [{verdict.source}]"
        if first is None or ".size.dim" in " ".join(first.demand.of if first.demand else ()):
            first = Problem(reader, page, demand, text)
    if first is not None:
        yield first


def _tensors(
    row: Kernel, page: Page, mates: Sequence[Page], stride: int
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The tensors of a call of ``row`` for ``page``, others of its layer among them, and what is to be declared of them; None
    where it has no such tensors."""
    needed = sorted(row.needed, key=lambda names: "kv" not in names) if page.packed else row.needed
    for names in needed:
        found: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        for name in names:
            source = next((one for one in mates if {*one.rows} & {*_ROWS_OF.get(name, page.rows)}), page)
            is_all = not any(one is not source and _kind(one) == _kind(source) for one in mates)
            tensor = source.whole if name not in _ROWS_OF and is_all else None
            if name in _ROWS_OF and not source.packed:
                fields = {place.field.name: place for place in source.places}
                tensor = next((source.tensor(fields[one]) for one in _ROWS_OF[name] if one in fields), None)
            spec = None if tensor is None else _spec(row, name, tensor, source, stride, facts)
            if spec is None:
                break
            found[name] = spec
        else:
            return found, facts
    return None, {}


def _spec(
    row: Kernel, name: str, tensor: KernelTensor, page: Page, stride: int, facts: dict[str, Any]
) -> dict[str, Any] | None:
    """``tensor`` in the form that the kernel gives it: of several, the one in whose order it lies in memory."""
    size = itemsize(tensor.dtype)
    ours = dict(zip(tensor.axes, zip(tensor.shape, tensor.strides)))
    found: list[tuple[bool, str, dict[str, Any]]] = []
    for form, axes in row.tensors[name].items():
        inner = [axis for axis in axes if axis not in ("block", "slot")]
        must = {axis for axis, (extent, _) in ours.items() if extent > 1 or axis not in ("one", "token")}
        is_paged = len(inner) < len(axes) and all(axis in ours or axis in ("one", "head") for axis in inner)
        if not is_paged or not must <= {*inner}:
            continue
        pairs = [ours.get(axis, (1, tensor.shape[-1])) for axis in inner]
        strides = [step for extent, step in pairs if extent > 1]
        spec: dict[str, Any] = {
            "shape": [_PAGES, *(extent for extent, _ in pairs)], "strides": [stride // size, *(step for _, step in pairs)],
            "dtype": tensor.dtype, "axes": axes, "base_alignment": math.gcd(page.offset + tensor.offset, 64),
        }  # fmt: skip
        found.append((strides == sorted(strides, reverse=True), form, spec))
    if not found:
        return None
    _, form, spec = max(found, key=lambda one: one[0])
    if form in ("NHD", "HND"):
        facts["layout"] = form
    if {"key", "value"} <= {*spec["axes"]}:
        facts["order"] = "VK" if ours["key"][1] < ours["value"][1] else "KV"
    return spec


def _kind(page: Page) -> str:
    return KIND_OF_ROWS.get(page.rows[0], "")


def _multiple(demand: Demand | None) -> int | None:
    """Bytes that records must be a multiple of to meet ``demand``; None where padding does not help."""
    if demand is None or demand.comparison != "multiple_of" or not isinstance(demand.value, int):
        return None
    return demand.value if any(".stride.block" in one or ".bytes." in one for one in demand.of) else None


def _refusal(problem: Problem, fit: Fit, law: Growth) -> str:
    """The text of the error, with what would make it legal."""
    rows = ", ".join(problem.page.rows)
    text = (
        f"kernel {problem.reader.name!r} on {problem.reader.arch} does not read {rows} of layer {problem.page.layer} "
        f"({law.name}, blocks of {fit.block_size} tokens in kernel pages of {fit.kernel_page}): {problem.text}"
    )
    demand = problem.demand
    if demand is not None and any(".size.token" in one for one in demand.of) and demand.comparison != "equals":
        text += f"; give another block_size or kernel_page ({demand.comparison} {demand.value})"
    if demand is not None and demand.comparison == "equals" and ".dense." in str(demand.value):
        text += "; order='layer' gives each layer pages of its own, one behind another"
    return text
