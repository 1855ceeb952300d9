"""Append rows to packed pages and gather rows from them, for every packed format, in one launch each.

One program handles one vector: the row of one token, head and cell (K or V; formats of MLA and indexers have one cell).
The kernel is compiled for the places of the parts of a row in the page (``formats.dialects``):

    rows[i] -> codes, scales, kept  ->  pages[slots[i] // N]: row slots[i] mod N        a slot out of range: no row
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvpagoda.errors import BadInput
from kvpagoda.formats.dialects import Dialect, Rule
from kvpagoda.formats.encoding import Encoding, packed_row
from kvpagoda.kernels.copy_rows import flat_view
from kvpagoda.kernels.dispatch import backend
from kvpagoda.kernels.packed_rows_gpu import append_rows_kernel, gather_rows_kernel
from kvpagoda.layouts.packed import decode_rows, encode_rows, views

Tensor = torch.Tensor


def append_rows(
    rows: Tensor,
    slots: Tensor,
    pages: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    head_dim: int | None = None,
) -> None:
    """Write row i of ``rows`` into slot ``slots[i]`` of ``pages``, in place; a slot out of range marks a padded row.

    ``rows``   bfloat16 ``[n, D]``, D as ``pack`` takes it; rows may be strided
    ``slots``  int32 or int64 ``[n]``: page * page_size + row; no slot twice
    ``pages``  uint8 ``[pages, stride]``: at least the payload; the stride and the start are multiples of 4 bytes

    All on one device. The bytes are those of ``pack`` with two differences. A row with inf or NaN that ``pack`` refuses
    gets codes 0 and NaN scales, because a launch cannot raise; and every bfloat16 is read exactly. Other bytes of
    ``pages`` stay as they are. With Triton the launch allocates nothing and does not synchronise with the host; a CUDA
    graph can capture it.

    Raises BadInput for an unknown format or dialect and a wrong shape, dtype, stride or device, before anything is
    written. O(n * D).

    >>> pages = torch.zeros(2, 1168, dtype=torch.uint8)
    >>> rows, slots = torch.ones(2, 512, dtype=torch.bfloat16), torch.tensor([3, -1])
    >>> append_rows(rows, slots, pages, "dsv4_584", page_size=2)
    >>> out = torch.zeros(2, 512)
    >>> gather_rows(pages, slots, out, "dsv4_584", page_size=2)
    >>> out.sum(1).tolist()
    [512.0, 0.0]
    """
    encoding = packed_row(format, dialect, head_dim)
    heads = _check("append_rows", rows, slots, pages, encoding.rules, page_size)
    if rows.dtype != torch.bfloat16:
        raise BadInput(f"append_rows: rows must be bfloat16, got {rows.dtype}", field="rows", needed=rows.dtype)
    append_parts(rows, slots, Parts.of(views(pages, encoding.rules.packing, page_size, heads), encoding))


def gather_rows(
    pages: Tensor,
    slots: Tensor,
    out: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    head_dim: int | None = None,
) -> None:
    """Decode the row in slot ``slots[i]`` of ``pages`` into row i of ``out``, in place; zeros for a slot out of range.

    ``out`` bfloat16 or float32 ``[n, D]``; its rows may be strided. The other arguments and errors are as for
    ``append_rows``, but a slot may occur several times. Each number is code times scale in float32, rounded once to
    ``out``'s dtype. O(n * D).
    """
    encoding = packed_row(format, dialect, head_dim)
    heads = _check("gather_rows", out, slots, pages, encoding.rules, page_size)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise BadInput(f"gather_rows: out must be bfloat16 or float32, got {out.dtype}", field="out", needed=out.dtype)
    gather_parts(out, slots, Parts.of(views(pages, encoding.rules.packing, page_size, heads), encoding))


class Grid(NamedTuple):
    """Where the vectors of a page are, in bytes: for each part the steps from row to row, head to head, cell to cell.

    ``page``: rows of a page.
    """

    page: int
    heads: int
    cells: int
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """Encoded rows in memory: the parts of the row in slot s are in page s // N of each view, in its row s mod N.

    ``views``: part ("codes", "scales", and "kept" if there is one) -> uint8 ``[pages, N, heads, cells, nbytes]``,
    strided in any way; all are views of one allocation. They may be the parts of packed pages, or arrays of their own.
    ``rules``: the geometry and the rule of one vector.
    """

    views: Mapping[str, Tensor]
    encoding: Encoding
    rules: Dialect
    grid: Grid
    memory: Tensor

    @classmethod
    def of(cls, views: Mapping[str, Tensor], encoding: Encoding) -> Parts:
        """Return the rows of ``encoding``, not "raw", whose parts are ``views``."""
        codes, scales, kept = (views.get(part, views["codes"]) for part in ("codes", "scales", "kept"))
        _, page, heads, cells, nbytes = codes.shape
        grid = Grid(page, heads, cells, *(part.stride()[1:4] for part in (codes, scales, kept)))
        rule = encoding.rule
        coded = nbytes * rule.codes_per_byte
        memory = codes.as_strided((codes.untyped_storage().nbytes(),), (1,), 0)
        return cls(views, encoding, _rules(encoding, coded + encoding.kept), grid, memory)

    @property
    def num_slots(self) -> int:
        """Rows of all pages."""
        return len(self.views["codes"]) * self.grid.page

    @cached_property
    def places(self) -> list[Any]:
        """Of codes, scales and kept elements, in bytes of ``memory``: the first, from page to page, from row to row."""
        return [*zip(*((part.storage_offset(), *part.stride()[:2]) for part in self.starts))]

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The views of codes, scales and kept elements; the codes again if no elements are kept."""
        return self.views["codes"], self.views["scales"], self.views.get("kept", self.views["codes"])


@lru_cache(maxsize=256)
def _rules(encoding: Encoding, dim: int) -> Dialect:
    """Return the geometry and the rule of one vector of ``dim`` elements: the same object for the same arguments."""
    return Dialect(encoding.packing(dim), encoding.rule, "")


def append_parts(rows: Tensor, slots: Tensor, parts: Parts) -> None:
    """Encode row i of ``rows`` and store its parts in slot ``slots[i]``: ``append_rows`` for rows in any memory.

    ``rows`` ``[n, D]``, D the elements of all cells and heads; ``slots`` int32 or int64 ``[n]``. Rows of another dtype
    than bfloat16 are encoded by the reference. The arguments are not checked.
    """
    if len(rows) == 0:
        return
    run = _backend(rows, parts) if rows.dtype == torch.bfloat16 else "reference"
    if run == "triton":
        return _launch(append_rows_kernel, rows, slots, parts, append_constants(parts.rules, parts.grid))
    if run == "numba":
        left = _loop(rows.view(torch.int16), slots, parts, _compiled(parts.rules))
        if not len(left):
            return
        rows, slots = rows[left], slots[left]
    live = ((slots >= 0) & (slots < parts.num_slots)).nonzero().squeeze(1)
    if not len(live):
        return
    slot, page = slots.index_select(0, live).long(), parts.grid.page
    vectors = rows.index_select(0, live).view(len(live), parts.grid.cells, parts.grid.heads, -1)
    for part, values in encode_rows(vectors, parts.encoding).items():
        parts.views[part][slot // page, slot % page] = values


def gather_parts(out: Tensor, slots: Tensor, parts: Parts) -> None:
    """Decode the row in slot ``slots[i]`` into row i of ``out``: ``gather_rows`` for rows in any memory, unchecked."""
    if len(out) == 0:
        return
    run, half = _backend(out, parts), out.dtype == torch.bfloat16
    bits = out.view(torch.int16) if half else out
    if run == "triton":
        return _launch(gather_rows_kernel, bits, slots, parts, gather_constants(parts.rules, parts.grid, half))
    if run == "numba":
        left = _loop(bits, slots, parts, _compiled(parts.rules, half))
        if len(left):
            out[left] = _gathered(slots[left], parts, out.dtype)
        return
    out.copy_(_gathered(slots, parts, out.dtype))


def _gathered(slots: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
    """Return the rows in ``slots`` as a new tensor: the reference of ``gather_parts``."""
    live = (slots >= 0) & (slots < parts.num_slots)
    slot, page = torch.where(live, slots, 0).long(), parts.grid.page
    found = {part: view[slot // page, slot % page] for part, view in parts.views.items()}
    return decode_rows(found, parts.encoding, parts.rules.packing.vector, dtype).masked_fill_(~live[:, None], 0)


def _backend(rows: Tensor, parts: Parts) -> str:
    """Return the implementation for ``rows``. The loops of numba handle pairs of elements."""
    packing = parts.rules.packing
    return backend(rows.device.type, has_numba=packing.group % 2 == 0 and packing.kept % 2 == 0)


def _check(name: str, rows: Tensor, slots: Tensor, pages: Tensor, dialect: Dialect, page_size: int) -> int:
    """Return the number of heads. Raises BadInput unless operation ``name`` takes the arguments."""
    width = dialect.packing.width
    if page_size < 1 or rows.ndim != 2 or rows.shape[1] < width or rows.shape[1] % width:
        text = f"{name}: rows are [n, {width}], page_size at least 1; got {list(rows.shape)}, {page_size}"
        raise BadInput(text, field="rows", needed=list(rows.shape), available=[page_size, width])
    heads = rows.shape[1] // width
    if heads > 1 and not dialect.packing.has_heads:
        text = f"{name}: rows of this format are [n, {width}], got {list(rows.shape)}"
        raise BadInput(text, field="rows", needed=list(rows.shape), available=width)
    if slots.dtype not in (torch.int32, torch.int64) or slots.shape != rows.shape[:1]:
        text = f"{name}: slots must be int32 or int64 [{len(rows)}], got {slots.dtype} {list(slots.shape)}"
        raise BadInput(text, field="slots", needed=list(slots.shape), available=slots.dtype)
    payload = dialect.packing.payload_nbytes(page_size, heads)
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] < payload:
        raise BadInput(
            f"{name}: pages must be uint8 [pages, at least {payload}] for {page_size} rows, "
            f"got {pages.dtype} {list(pages.shape)}",
            field="pages", needed=payload, available=list(pages.shape),
        )  # fmt: skip
    if not rows.device == slots.device == pages.device:
        text = f"{name}: tensors must be on one device, got {rows.device}, {slots.device}, {pages.device}"
        raise BadInput(text, field="device")
    steps = (pages.stride(0), pages.storage_offset())
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (rows, slots, pages)) or any(step % 4 for step in steps):
        text = f"{name}: last axes must be contiguous, and pages begin at multiples of 4 bytes, got {steps}"
        raise BadInput(text, needed=steps, available=4)
    return heads


@lru_cache(maxsize=256)
def _compiled(rules: Dialect, half: bool | None = None) -> Any:
    """Return the loop that numba compiles. ``half``: None to append, else to gather."""
    from kvpagoda.lanes import vector_loop

    numbers = _vector_constants(rules)
    return vector_loop(json.dumps(numbers | (_rule_constants(rules.rule) if half is None else {"HALF": half})))


def _loop(rows: Tensor, slots: Tensor, parts: Parts, loop: Any) -> Tensor:
    """Run the loop of ``_compiled``. Return the int64 indices of the rows that the reference must process.

    ``rows``: float32, or bfloat16 viewed as int16.
    """
    from kvpagoda.lanes import Strides

    numbers = flat_view(rows).numpy()
    numbers = numbers.view(np.uint16) if rows.dtype == torch.int16 else numbers
    places = Strides(parts.grid.page, parts.num_slots, rows.stride(0), *parts.places)
    return torch.from_numpy(loop(numbers, parts.memory.numpy(), slots.numpy(), places, _offsets(parts.grid)))


@lru_cache(maxsize=256)
def _offsets(grid: Grid) -> NDArray[np.int64]:
    """Return int64 ``[vectors, 3]``: bytes from the row of a page to the codes, scales and kept part of each vector."""
    cell, head = np.divmod(np.arange(grid.cells * grid.heads), grid.heads)
    steps = np.array([part[1:] for part in (grid.codes, grid.scales, grid.kept)])
    offsets: NDArray[np.int64] = head[:, None] * steps[:, 0] + cell[:, None] * steps[:, 1]
    return offsets


def _launch(kernel: Any, rows: Tensor, slots: Tensor, parts: Parts, constants: Constants) -> None:
    """Launch ``kernel``, one program per row, head and cell. Raises BadInput if a float32 scale would be misaligned."""
    scales = parts.views["scales"]
    if constants.SCALE == "float32" and any(step % 4 for step in (scales.storage_offset(), *scales.stride()[:4])):
        raise BadInput(
            f"heads of {constants.WIDTH} elements: their scales do not begin at multiples of 4 bytes; set "
            f"KVPAGODA_KERNELS=reference for them",
            needed=constants.WIDTH, available=4,
        )  # fmt: skip
    vectors, starts = constants.HEADS * constants.CELLS, parts.starts
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        kernel[(len(rows) * vectors,)](
            rows, slots, *starts, parts.num_slots, rows.stride(0), *(part.stride(0) for part in starts), constants,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


class Constants(SimpleNamespace):
    """The compile-time constants of a kernel. Hashable, so they must not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((*vars(self).values(),))


@lru_cache(maxsize=256)
def append_constants(rules: Dialect, grid: Grid) -> Constants:
    """Return the constants of ``append_rows_kernel``: the same object for the same arguments."""
    return Constants(**_vector_constants(rules), **_grid_constants(grid), **_rule_constants(rules.rule))


@lru_cache(maxsize=256)
def gather_constants(rules: Dialect, grid: Grid, half: bool) -> Constants:
    """Return the constants of ``gather_rows_kernel``. ``half``: whether the output is bfloat16, else float32."""
    return Constants(**_vector_constants(rules), **_grid_constants(grid), HALF=half)


def _vector_constants(rules: Dialect) -> dict[str, Any]:
    """Return the constants for the sizes of a vector and of its parts."""
    packing = rules.packing
    return {
        "WIDTH": packing.vector, "GROUP": packing.group, "GROUP_BLOCK": _block(packing.group),
        "GROUPS": packing.groups, "GROUPS_BLOCK": _block(packing.groups + packing.scale_pad),
        "LANES": packing.scale_lanes, "SCALE_PAD": packing.scale_pad,
        "KEPT": packing.kept, "KEPT_BLOCK": _block(packing.kept), "KEPT_NBYTES": packing.kept_nbytes,
        "CODES": rules.rule.codes, "SCALE": rules.rule.scale,
    }  # fmt: skip


def _grid_constants(grid: Grid) -> dict[str, Any]:
    """Return the constants for the places of the parts of a vector."""
    steps = {"CODES": grid.codes, "SCALES": grid.scales, "KEPT": grid.kept}
    names = ("ROW", "HEAD", "CELL")
    placed = {f"{part}_{name}": step for part, found in steps.items() for name, step in zip(names, found)}
    return {"PAGE": grid.page, "HEADS": grid.heads, "CELLS": grid.cells, **placed}


def _block(size: int) -> int:
    """Return the least power of two that is not below ``size``: Triton has no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def _rule_constants(rule: Rule) -> dict[str, Any]:
    """Return the constants that only writing needs: how scales and codes are computed."""
    return {
        "TOP": rule.top, "FLOOR": int(np.float32(rule.floor).view(np.int32)),
        "FLOORS_SCALE": rule.floor_on == "scale", "POWER_OF_TWO": rule.has_power_of_two_scales,
        "SCALE_UP": rule.scale_up, "RECIPROCAL": rule.by == "reciprocal", "INVERSE": rule.by == "inverse", "TIES": rule.ties,
        "SIGNED_ZERO": rule.signed_zero, "ZERO_GROUPS": rule.zero_groups, "MARKS": rule.non_finite == "marked",
        "SKIPS_NAN": rule.skips_nan,
    }  # fmt: skip
