"""Pack rows of numbers into the pages that kernels read, and unpack them: the torch reference of all packed formats.

>>> rows = torch.ones(1, 2, 512, dtype=torch.bfloat16)
>>> pages = pack(rows, "dsv4_584", page_size=2, dialect="flashmla")
>>> pages.shape, pages[0, 1152:1160].tolist()  # the footer of row 0: seven exponents and a byte of padding
(torch.Size([1, 1168]), [119, 119, 119, 119, 119, 119, 119, 0])
>>> torch.equal(unpack(pages, "dsv4_584", page_size=2, dialect="flashmla", dtype=torch.bfloat16), rows)
True
"""

from __future__ import annotations

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.quantise import dequantise, quantise
from kvpagoda.formats.small_floats import e4m3_from_float32, e4m3_table, look_up
from kvpagoda.layouts.copying import Bytes
from kvpagoda.layouts.dialects import Dialect, dialect_for_heads
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.packings import Packing
from kvpagoda.layouts.recode import Recode
from kvpagoda.units import whole_number

Tensor = torch.Tensor

CHUNK = 1 << 17
"""Elements per step on the CPU, so that the temporaries stay in the CPU's cache."""


def pack(
    rows: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    head_dim: int | None = None,
    refuse_nan: bool = False,
) -> Tensor:
    """Pack bfloat16 ``rows`` ``[pages, page_size, D]`` into uint8 ``[pages, payload of a page]``, on their device.

    The format defines D: 576 for 656- and 352-byte rows (latent, then 64 RoPE dims), 512 for DSV4, 128 for indexer
    keys. For ``gqa_*``, D is ``2 * heads * head_dim`` (``head_dim`` None: 64), K of all heads, then V of all heads; the
    page stores head after head. ``dialect`` None: the format's default. Padding bytes inside the payload are 0.

    Raises BadInput, before anything is allocated, for an unknown format or dialect, for another shape or dtype, and for
    rows with inf or NaN if the dialect has no bytes for them. With ``refuse_nan`` it also raises if a reader of the
    pages would see inf or NaN (a dialect without a floor turns a group of zeros into NaN). O(elements).
    """
    chosen = dialect_for_heads(format, dialect, head_dim)
    page_size = whole_number(page_size, "page_size", at_least=1)
    heads = _check_rows(rows, format, chosen.packing, page_size)
    if chosen.rule.non_finite == "refused":
        _refuse(~rows.isfinite(), f"{format} in the dialect {dialect or 'by default'} has no bytes for inf and NaN")
    pages = torch.zeros(
        len(rows), chosen.packing.payload_nbytes(page_size, heads), dtype=torch.uint8, device=rows.device
    )
    places = views(pages, chosen.packing, page_size, heads)
    cells = rows.flatten(0, 1)
    step = max(1, CHUNK // cells.shape[1]) if rows.device.type == "cpu" else max(1, len(cells))
    index = torch.arange(len(cells), device=rows.device)
    for start in range(0, len(cells), step):
        page, row = index[start : start + step] // page_size, index[start : start + step] % page_size
        for part, values in encode_rows(cells[start : start + step], chosen, heads).items():
            places[part][page, row] = values
    if refuse_nan:
        back = unpack(pages, format, page_size=page_size, dialect=dialect, head_dim=head_dim)
        _refuse(~back.isfinite(), f"a reader of {format} would see inf or NaN")
    return pages


def unpack(
    pages: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int | None = None,
) -> Tensor:
    """Return the rows ``[pages, page_size, D]`` of ``dtype`` that uint8 ``pages`` ``[pages, payload]`` hold.

    An encoded element is code times scale, computed in float32; kept elements are returned unchanged. NaN stays NaN.

    Raises BadInput for an unknown format or dialect, and for another shape or dtype. O(elements).
    """
    chosen = dialect_for_heads(format, dialect, head_dim)
    page_size = whole_number(page_size, "page_size", at_least=1)
    one_head = chosen.packing.payload_nbytes(page_size)
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] == 0 or pages.shape[1] % one_head:
        many = " * heads" if chosen.packing.cells > 1 else ""
        raise BadInput(
            f"{format} pages of {page_size} rows are uint8 [pages, {one_head}{many}], "
            f"got {pages.dtype} {list(pages.shape)}; cut off the padding of the pages"
        )
    heads = pages.shape[1] // one_head
    if heads > 1 and chosen.packing.cells == 1:
        raise BadInput(f"{format} pages of {page_size} rows have {one_head} bytes, got {pages.shape[1]}")
    parts = views(pages, chosen.packing, page_size, heads)
    flat = {part: view.reshape(len(pages) * page_size, *view.shape[2:]) for part, view in parts.items()}
    return decode_rows(flat, chosen, dtype).view(len(pages), page_size, heads * chosen.packing.width)


def encoded_anew(recode: Recode, stage: Layout, memory: Bytes) -> Bytes:
    """Return the pages in ``memory``, those of ``stage`` (``Recode.stages``), in dialect ``recode.target``.

    Raises BadInput for rows for which the target dialect has no bytes (inf, NaN).
    """
    pages, size = torch.from_numpy(memory).view(-1, stage.strides("code")["B"]), stage.page_size
    rows = unpack(pages, recode.format, page_size=size, dialect=recode.source, dtype=torch.bfloat16)
    packed: Bytes = pack(rows, recode.format, page_size=size, dialect=recode.target).numpy().ravel()
    return packed


def views(pages: Tensor, packing: Packing, page_size: int, heads: int = 1) -> dict[str, Tensor]:
    """Return uint8 views ``[pages, page_size, heads, cells, nbytes]`` of each part of the rows in ``pages``.

    ``pages`` is ``[pages, at least the payload]``; its first axis may be strided. The views share its memory. O(1).
    """
    start = pages.storage_offset()
    return {
        part: pages.as_strided(
            (len(pages), page_size, heads, packing.cells, place.nbytes),
            (pages.stride(0), place.row, place.head, place.cell, 1),
            start + place.base,
        )
        for part, place in packing.places(page_size).items()
    }


def encode_rows(rows: Tensor, dialect: Dialect, heads: int = 1) -> dict[str, Tensor]:
    """Return part -> its bytes, uint8 ``[n, heads, cells, nbytes]``, of bfloat16 ``rows`` ``[n, D]``."""
    packing, rule = dialect.packing, dialect.rule
    cells = rows.reshape(len(rows), packing.cells, heads, -1).transpose(1, 2)
    x = cells.reshape(-1, packing.coded + packing.kept)
    groups = x[:, : packing.coded].to(torch.float32).reshape(len(x), packing.groups, packing.group)
    codes, scales = quantise(groups, rule)
    scale_bytes = scales.contiguous().view(torch.uint8).view(len(x), packing.groups, packing.scale_nbytes)
    scale_bytes = scale_bytes.index_select(1, _lanes(packing, x.device)).flatten(1)
    parts = {"codes": codes, "scales": torch.nn.functional.pad(scale_bytes, (0, packing.scale_pad))}
    if packing.kept:
        kept = x[:, packing.coded :].contiguous()
        parts["kept"] = (
            e4m3_from_float32(kept.to(torch.float32)) if packing.kept_nbytes == 1 else kept.view(torch.uint8)
        )
    return {part: values.view(len(rows), heads, packing.cells, -1) for part, values in parts.items()}


def decode_rows(parts: dict[str, Tensor], dialect: Dialect, dtype: torch.dtype) -> Tensor:
    """Return the rows ``[n, D]`` of ``dtype`` for the parts that ``encode_rows`` returns."""
    packing, rule = dialect.packing, dialect.rule
    n, heads = parts["codes"].shape[:2]
    flat = {part: values.flatten(0, 2) for part, values in parts.items()}
    scales = flat["scales"][:, : packing.groups * packing.scale_nbytes].reshape(
        -1, packing.groups, packing.scale_nbytes
    )
    places = torch.argsort(_lanes(packing, scales.device))
    scales = scales.index_select(1, places).flatten(1)
    values = dequantise(flat["codes"], scales.view(torch.float32) if rule.scale == "float32" else scales, rule)
    out = torch.empty(len(values), packing.coded + packing.kept, dtype=dtype, device=values.device)
    out[:, : packing.coded] = values
    if packing.kept:
        kept = flat["kept"]
        out[:, packing.coded :] = (
            look_up(e4m3_table(kept.device), kept) if packing.kept_nbytes == 1 else kept.view(torch.bfloat16)
        )
    return out.view(n, heads, packing.cells, out.shape[1]).transpose(1, 2).flatten(1)


def _lanes(packing: Packing, device: torch.device) -> Tensor:
    """Return int64 ``[groups]``: the index of the scale that is stored at each place of a row."""
    places = torch.arange(packing.groups, device=device)
    return places.view(packing.scale_lanes, -1).T.reshape(-1).argsort()


def _check_rows(rows: Tensor, format: str, packing: Packing, page_size: int) -> int:
    """Return the number of heads in ``rows``. Raises BadInput unless ``pack`` takes them."""
    width = packing.width
    wrong = rows.ndim != 3 or rows.shape[1] != page_size or rows.dtype != torch.bfloat16 or rows.shape[2] == 0
    if wrong or (rows.shape[2] % width if packing.cells > 1 else rows.shape[2] != width):
        many = " * heads" if packing.cells > 1 else ""
        raise BadInput(
            f"{format} packs bfloat16 rows [pages, {page_size}, {width}{many}], got {rows.dtype} {list(rows.shape)}: "
            f"give exactly the elements that the format holds"
        )
    return rows.shape[2] // width


def _refuse(bad: Tensor, why: str) -> None:
    """Raise BadInput, with the first place, if any element of ``bad`` ``[pages, N, D]`` is set."""
    if bool(bad.any()):
        page, row, element = bad.nonzero()[0].tolist()
        raise BadInput(
            f"{why}: {int(bad.any(-1).sum())} rows, the first is page {page}, row {row}, at element {element}; "
            f"mend the rows, or choose another dialect"
        )
