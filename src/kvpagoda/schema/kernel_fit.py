"""Choose block size, kernel page and padding so that the named kernels can read the cache, or report why they cannot.

Each kernel's demands are checked (``kvpagoda.layouts.judge``) against the tensors that ``LayerView`` will pass to it.
This happens before memory is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.layouts.demands import Demand, Kernel
from kvpagoda.layouts.judge import judge
from kvpagoda.layouts.pages import KIND_OF_ROWS, KINDS
from kvpagoda.schema.fields import Growth, itemsize
from kvpagoda.schema.kernel_forms import Argument, arguments, declared, kind_of, kinds_of, rows_named
from kvpagoda.schema.layers import Group, Layer
from kvpagoda.schema.layout import ALIGN, Page, RowLayout
from kvpagoda.schema.layout_choice import LayoutNames, by_kind

KernelNames = LayoutNames
"""One kernel, several, or {kind of rows: kernel} (``kvpagoda.layouts.pages.KINDS``). ``name-sm100``: on sm100 alone."""
_DOES = {"reject": "refuses", "copy": "copies the cache on each call", "garbage": "reads wrong bytes"}
"""Outcome of a violated demand -> what the kernel does, for error texts."""
_TOUCHES = {"read": "reads", "write": "writes", "move": "moves"}
"""Role of a kernel in the table of demands -> the same as a verb."""
LARGEST_BLOCK = 512
"""The most tokens of a block that is chosen for kernels."""
_PAGES = 64
"""Number of kernel pages in the tensors that are checked; a larger number would give the same verdicts."""


@dataclass(frozen=True)
class Reader:
    """A kernel that the caller named: it reads rows of ``kinds`` on GPU architecture ``arch``.

    ``rows``: the rows of the table of demands that ``name`` may mean; several if it is the prefix of several kernels.
    """

    name: str
    rows: tuple[Kernel, ...]
    arch: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """Sizes with which the kernels can read the records in place, without a copy.

    ``block_size``, ``kernel_page``: tokens of a block and of a kernel page. ``multiples``: growth law of a group -> the
    bytes that the size of its records is a multiple of. ``notes``: what was chosen for which kernel.
    """

    block_size: int
    kernel_page: int
    multiples: Mapping[Growth, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def block_layout(self, group: Group, order: str) -> RowLayout:
        """Return the record of one block of ``group``."""
        return group.block_layout(self.block_size, self.kernel_page, order, self.multiples.get(group.growth, ALIGN))


def readers_of(names: KernelNames) -> tuple[Reader, ...]:
    """Return the kernels of ``names``. Raises BadInput for an unknown kernel, or one that does not read its kind."""
    found = []
    for kind, name in by_kind(names):
        rows, arch = rows_named(name)
        kinds = tuple(dict.fromkeys(read for row in rows for read in kinds_of(row)))
        if kind and kind not in kinds:
            text = f"kernel {name!r} reads {', '.join(kinds) or 'no cache'}, not {kind!r}; kinds: {', '.join(KINDS)}"
            raise BadInput(text, needed=kind, available=kinds)
        found.append(Reader(name, rows, arch, (kind,) if kind else kinds))
    return tuple(found)


def fit(groups: Sequence[Group], readers: Sequence[Reader], sizes: Iterable[tuple[int, int]], order: str) -> Fit:
    """Return the first of ``sizes`` with which every reader can read the rows of its kinds.

    ``sizes``: pairs (tokens of a block, tokens of a kernel page). ``order``: of the arenas. Records are padded where
    readers demand it. Raises SchemaError if none of ``sizes`` suffices; the text says what the first pair lacks.
    """
    first_error: SchemaError | None = None
    for block_size, kernel_page in sizes:
        try:
            return _padded(Fit(block_size, kernel_page), groups, readers, order)
        except SchemaError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _padded(fit: Fit, groups: Sequence[Group], readers: Sequence[Reader], order: str) -> Fit:
    """Return ``fit`` with the padding that ``readers`` demand of records. Raises SchemaError if that is not enough."""
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
                raise SchemaError(_refusal(problem, fit, law), needed=problem.reader.name, available=problem.text)
            multiples[law] = math.lcm(multiples.get(law, ALIGN), multiple)
            notes.append(f"records of {law.name} are multiples of {multiples[law]:,} bytes for {problem.reader.name}")
    if fit.kernel_page != fit.block_size:
        notes.append(f"blocks of {fit.block_size} tokens are {fit.block_size // fit.kernel_page} kernel pages each")
    kept = {KIND_OF_ROWS.get(rows.name) for group in groups for layer in group.layers for rows in layer.rows()}
    for reader in readers:
        if not kept & {*reader.kinds}:
            text = f"kernel {reader.name!r} reads {', '.join(reader.kinds)}; no layer keeps such rows"
            raise SchemaError(text, needed=reader.name)
        where = "" if reader.arch == "any" else f" on {reader.arch}"
        title = reader.name if len(reader.rows) > 1 else f"{reader.rows[0].name}{where}"
        unit = "states" if kept & {*reader.kinds} <= {"recurrent", "conv"} else f"pages of {fit.kernel_page} tokens"
        what = ", ".join(kind for kind in reader.kinds if kind in kept)
        notes.append(f"{title} {_TOUCHES[reader.rows[0].role]} {what} in place, {unit}")
    return Fit(fit.block_size, fit.kernel_page, multiples, tuple(notes))


@dataclass(frozen=True)
class Problem:
    """A page that ``reader`` cannot read, and why.

    ``demand``: the demand that is not met; None if no tensor of the kernel has the form of the page. ``text``: the
    reason.
    """

    reader: Reader
    page: Page
    demand: Demand | None
    text: str


def unmet(
    layout: RowLayout, layers: Sequence[Layer], readers: Sequence[Reader], order: str, row_nbytes: int = 0
) -> Iterator[Problem]:
    """Yield the problems that ``readers`` have with the pages of ``layout``, the record of ``layers``.

    ``row_nbytes``: bytes from record to record (0: records follow each other without a gap). Equal pages are checked
    once. O(pages + kernels * demands).
    """
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
            if kind_of(page) in reader.kinds:
                step = stride if order == "block" else page.piece
                yield from _judged(reader, page, mates[page.layer], step, encoding)


def _judged(reader: Reader, page: Page, mates: Sequence[Page], stride: int, encoding: Any) -> Iterator[Problem]:
    """Yield at most one problem with ``page``; none if at least one of the reader's table rows accepts it."""
    first: Problem | None = None
    for row in reader.rows:
        found = arguments(row, page, mates)
        if found is None:
            taken = [(name, axes) for name, forms in row.tensors.items() for axes in forms.values()]
            wanted = "; ".join(
                f"{name} [{', '.join(axes)}]" for name, axes in taken if "block" in axes or "slot" in axes
            )
            text = f"it takes {wanted or 'no paged tensor'}, and these rows have no such form; choose another layout"
            first = first or Problem(reader, page, None, text)
            continue
        tensors = {name: _described(one, stride) for name, one in found.items()}
        verdict = judge(row.name, tensors, reader.arch, declared(found, encoding))
        if verdict.expect == "ok":
            return
        demand = next((demand for demand in row.demands if demand.name == verdict.rule), None)
        remedy = verdict.remedy or "choose another layout"
        text = f"it {_DOES[verdict.expect]}: {verdict.rule}: {verdict.reason}; {remedy} [{verdict.source}]"
        if first is None or ".size.dim" in " ".join(first.demand.of if first.demand else ()):
            first = Problem(reader, page, demand, text)
    if first is not None:
        yield first


def _described(one: Argument, stride: int) -> dict[str, Any]:
    """Return ``one`` as ``judge`` reads it, with pages that are ``stride`` bytes apart."""
    return {
        "shape": [_PAGES, *one.shape], "strides": [stride // itemsize(one.dtype), *one.strides], "dtype": one.dtype,
        "axes": one.axes, "base_alignment": math.gcd(one.page.offset + one.offset, 64),
    }  # fmt: skip


def _multiple(demand: Demand | None) -> int | None:
    """Return the bytes that record sizes must be a multiple of to meet ``demand``; None if padding cannot meet it."""
    if demand is None or demand.comparison != "multiple_of" or not isinstance(demand.value, int):
        return None
    return demand.value if any(".stride.block" in path or ".bytes." in path for path in demand.of) else None


def _refusal(problem: Problem, fit: Fit, law: Growth) -> str:
    """Return the error text for ``problem``, with what would make the kernel accept the cache."""
    rows = ", ".join(problem.page.rows)
    where = "" if problem.reader.arch == "any" else f" on {problem.reader.arch}"
    text = (
        f"kernel {problem.reader.name!r}{where} does not read {rows} of layer {problem.page.layer} "
        f"({law.name}, blocks of {fit.block_size} tokens in kernel pages of {fit.kernel_page}): {problem.text}"
    )
    demand = problem.demand
    if demand is not None and any(".size.token" in path for path in demand.of) and demand.comparison != "equals":
        text += f"; give another block_size or kernel_page ({demand.comparison} {demand.value})"
    if demand is not None and demand.comparison == "equals" and ".dense." in str(demand.value):
        text += "; order='layer' gives each layer pages of its own, one after another"
    return text
