"""Append rows to packed pages and gather rows from them, for every packed format, in one launch each.

A vector is the row of one token, head and cell (K or V; formats of MLA and indexers have one cell); a program of the Triton
kernels takes a tile of them. These are compiled for the places of the parts of a row in the page (``formats.dialects``):

    rows[i] -> codes, scales, kept  ->  pages[slots[i] // N]: row slots[i] mod N        a slot out of range: no row
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvpagoda.core.kernels.casts_gpu import casts
from kvpagoda.core.kernels.copy_rows import flat_view
from kvpagoda.core.kernels.dispatch import backend
from kvpagoda.core.kernels.launch import LARGE, OPTIONS, Constants, block, tile, warm_ups
from kvpagoda.core.kernels.packed_rows_gpu import append_rows_kernel, gather_rows_kernel
from kvpagoda.errors import BadInput
from kvpagoda.formats.dialects import Dialect, Rule
from kvpagoda.formats.encoding import Encoding, packed_row
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

    All tensors are on one device. The bytes are those of ``pack`` with two differences. A row with inf or NaN that
    ``pack`` refuses gets codes 0 and NaN scales, because a launch cannot raise; and every bfloat16 is read exactly.
    Other bytes of ``pages`` stay as they are. With Triton the launch allocates nothing and does not synchronise with
    the host; a CUDA graph can capture it. O(n * D).

    Args:
        rows: bfloat16 ``[n, D]``, D as ``pack`` takes it; rows may be strided.
        slots: int32 or int64 ``[n]``, page * page_size + row; no slot twice.
        pages: uint8 ``[pages, stride]``, at least the payload; the stride and the start are multiples of 4 bytes.
        format: of the pages.
        page_size: tokens of a page.
        dialect: see ``pack``; None: the format's default.
        head_dim: see ``pack``.

    Raises:
        BadInput: an unknown format or dialect, or a tensor has a wrong shape, dtype, stride or device; nothing is
            written.

    Examples:
        >>> pages = torch.zeros(2, 1168, dtype=torch.uint8)
        >>> rows, slots = torch.ones(2, 512, dtype=torch.bfloat16), torch.tensor([3, -1])
        >>> append_rows(rows, slots, pages, "dsv4_584", page_size=2)
        >>> out = torch.zeros(2, 512)
        >>> gather_rows(pages, slots, out, "dsv4_584", page_size=2)
        >>> out.sum(1).tolist()
        [512.0, 0.0]
    """
    form = _checked("append_rows", rows, slots, pages, format, page_size, dialect, head_dim)
    if rows.dtype != torch.bfloat16:
        raise BadInput(f"append_rows: rows must be bfloat16, got {rows.dtype}", field="rows", needed=rows.dtype)
    if len(rows) and backend(rows.device.type) == "triton":
        launch("append", rows, slots, pages, len(pages) * page_size, form)
    else:
        append_parts(rows, slots, _parts(pages, page_size, form))


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

    Each number is code times scale in float32, rounded once to ``out``'s dtype. O(n * D).

    Args:
        pages: as ``append_rows`` takes them.
        slots: as ``append_rows``, but a slot may occur several times.
        out: bfloat16 or float32 ``[n, D]``; its rows may be strided.
        format: of the pages.
        page_size: tokens of a page.
        dialect: as for ``append_rows``.
        head_dim: as for ``append_rows``.

    Raises:
        BadInput: as ``append_rows``.
    """
    form = _checked("gather_rows", out, slots, pages, format, page_size, dialect, head_dim)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise BadInput(f"gather_rows: out must be bfloat16 or float32, got {out.dtype}", field="out", needed=out.dtype)
    if len(out) and backend(out.device.type) == "triton":
        how = "gather half" if out.dtype == torch.bfloat16 else "gather"
        launch(how, out, slots, pages, len(pages) * page_size, form)
    else:
        gather_parts(out, slots, _parts(pages, page_size, form))


class Grid(NamedTuple):
    """Where vectors are: for each part the bytes from page to page, row to row, head to head, and cell to cell.

    ``page``: rows of a page.
    """

    page: int
    heads: int
    cells: int
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Form:
    """How rows are encoded and where their vectors are. A form keeps the constants of the kernels that were launched for it.

    ``rules``: the geometry and the rule of one vector. ``scales_at``, ``kept_at``: bytes from the first code to the first
    scale and to the first kept element.
    """

    encoding: Encoding
    rules: Dialect
    grid: Grid
    scales_at: int
    kept_at: int
    constants: dict[tuple[str, int, bool], Constants] = field(default_factory=dict)

    @classmethod
    def of(cls, views: Mapping[str, Tensor], encoding: Encoding) -> Form:
        """Return the form of rows whose parts are ``views``; see ``Parts``."""
        codes, scales, kept = (views.get(part, views["codes"]) for part in ("codes", "scales", "kept"))
        _, page, heads, cells, nbytes = codes.shape
        grid = Grid(page, heads, cells, *(part.stride()[:4] for part in (codes, scales, kept)))
        rules = _rules(encoding, nbytes * encoding.rule.codes_per_byte + encoding.kept)
        scales_at, kept_at = (int(part.storage_offset()) - int(codes.storage_offset()) for part in (scales, kept))
        return cls(encoding, rules, grid, scales_at, kept_at)

    @cached_property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.grid.heads * self.grid.cells

    @cached_property
    def elements(self) -> int:
        """Elements of the lines of a row; see ``packed_rows_gpu``."""
        packing = self.rules.packing
        return self.vectors * block(packing.groups + packing.scale_pad) * block(packing.group)


@dataclass(frozen=True)
class Parts:
    """Encoded rows in memory: the parts of the row in slot s are in page s // N of each view, in its row s mod N.

    ``views``: part ("codes", "scales", and "kept" if there is one) -> uint8 ``[pages, N, heads, cells, nbytes]``,
    strided in any way; all are views of one allocation. They may be the parts of packed pages, or arrays of their own.
    """

    views: Mapping[str, Tensor]
    form: Form
    memory: Tensor

    @classmethod
    def of(cls, views: Mapping[str, Tensor], encoding: Encoding) -> Parts:
        """Return the rows of ``encoding``, not "raw", whose parts are ``views``."""
        codes = views["codes"]
        memory = codes.as_strided((codes.untyped_storage().nbytes(),), (1,), 0)
        return cls(views, Form.of(views, encoding), memory)

    @cached_property
    def num_slots(self) -> int:
        """Rows of all pages."""
        return len(self.views["codes"]) * self.form.grid.page

    @cached_property
    def places(self) -> list[Any]:
        """Of codes, scales and kept elements, in bytes of ``memory``: the first, from page to page, from row to row."""
        starts = (self.views.get(part, self.views["codes"]) for part in ("codes", "scales", "kept"))
        return [*zip(*((part.storage_offset(), *part.stride()[:2]) for part in starts))]


@lru_cache(maxsize=256)
def _rules(encoding: Encoding, dim: int) -> Dialect:
    """Return the geometry and the rule of one vector of ``dim`` elements: the same object for the same arguments."""
    return Dialect(encoding.packing(dim), encoding.rule, "")


def append_parts(rows: Tensor, slots: Tensor, parts: Parts) -> None:
    """Encode row i of ``rows`` and store its parts in slot ``slots[i]``: ``append_rows`` for rows in any memory,
    unchecked.

    Args:
        rows: ``[n, D]``, D the elements of all cells and heads. Rows of another dtype than bfloat16 are encoded by the
            reference.
        slots: int32 or int64 ``[n]``, contiguous.
        parts: of the memory.
    """
    if len(rows) == 0:
        return
    run = _backend(rows, parts) if rows.dtype == torch.bfloat16 else "reference"
    form = parts.form
    if run == "triton":
        return launch("append", rows, slots, parts.views["codes"], parts.num_slots, form)
    if run == "numba":
        left = _loop(rows.view(torch.int16), slots, parts, _compiled(form.rules))
        if not len(left):
            return
        rows, slots = rows[left], slots[left]
    live = ((slots >= 0) & (slots < parts.num_slots)).nonzero().squeeze(1)
    if not len(live):
        return
    slot, page = slots.index_select(0, live).long(), form.grid.page
    vectors = rows.index_select(0, live).view(len(live), form.grid.cells, form.grid.heads, -1)
    for part, values in encode_rows(vectors, form.encoding).items():
        parts.views[part][slot // page, slot % page] = values


def gather_parts(out: Tensor, slots: Tensor, parts: Parts) -> None:
    """Decode the row in slot ``slots[i]`` into row i of ``out``: ``gather_rows`` for rows in any memory, unchecked.

    Args:
        out: ``[n, D]``, written.
        slots: int32 or int64 ``[n]``, contiguous.
        parts: of the memory.
    """
    if len(out) == 0:
        return
    run, half = _backend(out, parts), out.dtype == torch.bfloat16
    if run == "triton":
        how = "gather half" if half else "gather"
        return launch(how, out, slots, parts.views["codes"], parts.num_slots, parts.form)
    if run == "numba":
        left = _loop(out.view(torch.int16) if half else out, slots, parts, _compiled(parts.form.rules, half))
        if len(left):
            out[left] = _gathered(slots[left], parts, out.dtype)
        return
    out.copy_(_gathered(slots, parts, out.dtype))


def _gathered(slots: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
    """Return the rows in ``slots`` as a new tensor: the reference of ``gather_parts``."""
    live = (slots >= 0) & (slots < parts.num_slots)
    slot, page = torch.where(live, slots, 0).long(), parts.form.grid.page
    found = {part: view[slot // page, slot % page] for part, view in parts.views.items()}
    return decode_rows(found, parts.form.encoding, parts.form.rules.packing.vector, dtype).masked_fill_(
        ~live[:, None], 0
    )


def _backend(rows: Tensor, parts: Parts) -> str:
    """Return the implementation for ``rows``. The loops of numba handle pairs of elements."""
    packing = parts.form.rules.packing
    return backend(rows.device.type, has_numba=packing.group % 2 == 0 and packing.kept % 2 == 0)


def _checked(
    name: str, rows: Tensor, slots: Tensor, pages: Tensor, format: str, page_size: int, dialect: str | None,
    head_dim: int | None,
) -> Form:  # fmt: skip
    """Return the form of packed ``pages``. Raises BadInput unless operation ``name`` takes the arguments.

    What depends on shapes and strides alone is checked once for the same ones.
    """
    how = (name, rows.shape[1:], rows.stride(), pages.shape[1:], pages.stride(), pages.dtype)
    form = _page_form(*how, format, page_size, dialect, head_dim)
    if slots.dtype not in (torch.int32, torch.int64) or slots.shape != rows.shape[:1]:
        text = f"{name}: slots must be int32 or int64 [{len(rows)}], got {slots.dtype} {list(slots.shape)}"
        raise BadInput(text, field="slots", needed=list(slots.shape), available=slots.dtype)
    if not rows.device == slots.device == pages.device:
        text = f"{name}: tensors must be on one device, got {rows.device}, {slots.device}, {pages.device}"
        raise BadInput(text, field="device")
    if (len(slots) > 1 and slots.stride(0) != 1) or pages.storage_offset() % 4:
        raise BadInput(
            f"{name}: slots must be contiguous, and pages begin at multiples of 4 bytes, got a stride of "
            f"{slots.stride(0)} and {pages.storage_offset()}",
            needed=(pages.stride(0), pages.storage_offset()), available=4,
        )  # fmt: skip
    return form


@lru_cache(maxsize=1024)
def _page_form(
    name: str, row: tuple[int, ...], row_strides: tuple[int, ...], page: tuple[int, ...], strides: tuple[int, ...],
    dtype: torch.dtype, format: str, page_size: int, dialect: str | None, head_dim: int | None,
) -> Form:  # fmt: skip
    """Return the form of pages of shape ``[any, *page]``. Raises BadInput unless rows ``[n, *row]`` fit them."""
    encoding = packed_row(format, dialect, head_dim)
    packing = encoding.rules.packing
    width = packing.width
    if page_size < 1 or len(row) != 1 or row[0] < width or row[0] % width:
        text = f"{name}: rows are [n, {width}], page_size at least 1; got {['n', *row]}, {page_size}"
        raise BadInput(text, field="rows", needed=[*row], available=[page_size, width])
    heads = row[0] // width
    if heads > 1 and not packing.has_heads:
        text = f"{name}: rows of this format are [n, {width}], got {['n', *row]}"
        raise BadInput(text, field="rows", needed=[*row], available=width)
    payload = packing.payload_nbytes(page_size, heads)
    if dtype != torch.uint8 or len(page) != 1 or page[0] < payload:
        raise BadInput(
            f"{name}: pages must be uint8 [pages, at least {payload}] for {page_size} rows, got {dtype} {['n', *page]}",
            field="pages", needed=payload, available=[*page],
        )  # fmt: skip
    if row_strides[1] != 1 or strides[1] != 1 or strides[0] % 4:
        raise BadInput(
            f"{name}: last axes must be contiguous, and pages begin at multiples of 4 bytes, got {row_strides}, {strides}",
            needed=(strides[0], row_strides[1]), available=4,
        )  # fmt: skip
    one = torch.empty_strided((1, page[0]), strides, dtype=torch.uint8, device="meta")
    return Form.of(views(one, packing, page_size, heads), encoding)


def _parts(pages: Tensor, page_size: int, form: Form) -> Parts:
    """Return the rows of ``form`` in packed ``pages``."""
    return Parts.of(views(pages, form.rules.packing, page_size, form.grid.heads), form.encoding)


@lru_cache(maxsize=256)
def _compiled(rules: Dialect, half: bool | None = None) -> Any:
    """Return the loop that numba compiles. ``half``: None to append, else to gather."""
    from kvpagoda.core.lanes import vector_loop

    numbers = _vector_constants(rules)
    return vector_loop(json.dumps(numbers | (_rule_constants(rules.rule) if half is None else {"HALF": half})))


def _loop(rows: Tensor, slots: Tensor, parts: Parts, loop: Any) -> Tensor:
    """Run the loop of ``_compiled``. Return the int64 indices of the rows that the reference must process.

    ``rows``: float32, or bfloat16 viewed as int16.
    """
    from kvpagoda.core.lanes import Strides

    numbers = flat_view(rows).numpy()
    numbers = numbers.view(np.uint16) if rows.dtype == torch.int16 else numbers
    grid = parts.form.grid
    places = Strides(grid.page, parts.num_slots, rows.stride(0), *parts.places)
    return torch.from_numpy(loop(numbers, parts.memory.numpy(), slots.numpy(), places, _offsets(grid)))


@lru_cache(maxsize=256)
def _offsets(grid: Grid) -> NDArray[np.int64]:
    """Return int64 ``[vectors, 3]``: bytes from the row of a page to the codes, scales and kept part of each vector."""
    cell, head = np.divmod(np.arange(grid.cells * grid.heads), grid.heads)
    steps = np.array([part[2:] for part in (grid.codes, grid.scales, grid.kept)])
    offsets: NDArray[np.int64] = head[:, None] * steps[:, 0] + cell[:, None] * steps[:, 1]
    return offsets


def launch(
    how: str, rows: Tensor, slots: Tensor, codes: Tensor, num_slots: int, form: Form, is_large: bool | None = None
) -> None:
    """Launch the kernel of ``how``, "append", "gather" or "gather half" (to bfloat16). ``codes`` begins at the first code.

    ``is_large``: how many vectors a program takes; None: what suits the rows. Raises BadInput if a float32 scale would be
    misaligned.
    """
    n = len(rows)
    large = n * form.elements >= LARGE if is_large is None else is_large
    key = how, casts(rows.device), large
    constants = form.constants.get(key) or form.constants.setdefault(key, constants_of(form, *key))
    if constants.SCALE == "float32" and (codes.storage_offset() + form.scales_at) % 4:
        raise _misaligned(constants.WIDTH)
    kernel = append_rows_kernel if how == "append" else gather_rows_kernel
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        kernel[(-(-n * form.vectors // constants.TILE),)](
            rows, slots, codes, n, num_slots, rows.stride(0), form.scales_at, form.kept_at, constants, **OPTIONS
        )


def warm_up_parts(parts: Parts, how: str) -> None:
    """Compile the kernels of ``how`` that rows of any number need, with either dtype of slots. Writes nothing."""
    codes, form = parts.views["codes"], parts.form
    if backend(codes.device.type) == "triton":
        dtype = torch.float32 if how == "gather" else torch.bfloat16
        rows = torch.zeros(1, form.vectors * form.rules.packing.vector, dtype=dtype, device=codes.device)
        for slots, is_large in warm_ups(-1, codes.device):
            launch(how, rows, slots, codes, parts.num_slots, form, is_large)


def _misaligned(width: int) -> BadInput:
    return BadInput(
        f"heads of {width} elements: their scales do not begin at multiples of 4 bytes; set KVPAGODA_KERNELS=reference for "
        f"them",
        needed=width, available=4,
    )  # fmt: skip


def constants_of(form: Form, how: str, casts: int = 0, is_large: bool = False) -> Constants:
    """Return the constants of the kernel of ``how``. Raises BadInput if a float32 scale would be misaligned.

    ``casts``: as in ``casts_gpu``. They may equal those of other forms: then one compiled kernel serves both.
    """
    rules, rule = form.rules, form.rules.rule
    own = _rule_constants(rule) if how == "append" else {"HALF": how == "gather half"}
    numbers = _vector_constants(rules)
    scale, kept = 4 if rule.scale == "float32" else 1, rules.packing.kept_nbytes
    if any(step % scale for step in form.grid.scales) or (
        rules.packing.kept and any(step % kept for step in form.grid.kept)
    ):
        raise _misaligned(rules.packing.vector)
    return Constants(
        **numbers, **own, **_grid_constants(form.grid, scale, kept), CASTS=casts,
        TILE=tile(numbers["GROUPS_BLOCK"] * numbers["GROUP_BLOCK"], rules.packing.code_bits, is_large),
    )  # fmt: skip


def _vector_constants(rules: Dialect) -> dict[str, Any]:
    """Return the constants for the sizes of a vector and of its parts."""
    packing = rules.packing
    return {
        "WIDTH": packing.vector, "GROUP": packing.group, "GROUP_BLOCK": block(packing.group),
        "GROUP_NBYTES": packing.group * packing.code_bits // 8,
        "GROUPS": packing.groups, "GROUPS_BLOCK": block(packing.groups + packing.scale_pad),
        "LANES": packing.scale_lanes, "SCALE_PAD": packing.scale_pad,
        "KEPT": packing.kept, "KEPT_BLOCK": block(packing.kept), "KEPT_NBYTES": packing.kept_nbytes,
        "CODES": rules.rule.codes, "SCALE": rules.rule.scale,
    }  # fmt: skip


def _grid_constants(grid: Grid, scale: int, kept: int) -> dict[str, Any]:
    """Return the constants for the places of the parts of a vector: steps in elements, ``scale`` and ``kept`` bytes each."""
    steps = {"CODES": grid.codes, "SCALES": grid.scales, "KEPT": grid.kept}
    names, nbytes = ("PAGE", "ROW", "HEAD", "CELL"), {"CODES": 1, "SCALES": scale, "KEPT": kept}
    placed = {
        f"{part}_{name}": step // nbytes[part] for part, found in steps.items() for name, step in zip(names, found)
    }
    return {"PAGE": grid.page, "HEADS": grid.heads, "CELLS": grid.cells, **placed}


def _rule_constants(rule: Rule) -> dict[str, Any]:
    """Return the constants that only writing needs: how scales and codes are computed."""
    return {
        "TOP": rule.top, "FLOOR": int(np.float32(rule.floor).view(np.int32)),
        "FLOORS_SCALE": rule.floor_on == "scale", "POWER_OF_TWO": rule.has_power_of_two_scales,
        "SCALE_UP": rule.scale_up, "RECIPROCAL": rule.by == "reciprocal", "INVERSE": rule.by == "inverse", "TIES": rule.ties,
        "SIGNED_ZERO": rule.signed_zero, "ZERO_GROUPS": rule.zero_groups, "MARKS": rule.non_finite == "marked",
        "SKIPS_NAN": rule.skips_nan,
    }  # fmt: skip
