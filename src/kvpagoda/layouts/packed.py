"""Pack rows of numbers into the pages that kernels read, and unpack them, for all packed formats.

>>> rows = torch.ones(1, 2, 512, dtype=torch.bfloat16)
>>> pages = pack(rows, "dsv4_584", page_size=2, dialect="flashmla")
>>> pages.shape, pages[0, 1152:1160].tolist()  # the footer of row 0: seven exponents and a byte of padding
(torch.Size([1, 1168]), [119, 119, 119, 119, 119, 119, 119, 0])
>>> torch.equal(unpack(pages, "dsv4_584", page_size=2, dialect="flashmla", dtype=torch.bfloat16), rows)
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.codec import decode, encode_by
from kvpagoda.formats.dialects import Packing, Rule, dialect_for_heads
from kvpagoda.formats.encoding import Encoding, packed_row
from kvpagoda.layouts.copying import Bytes
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.recode import Recode
from kvpagoda.units import whole_number

Tensor = torch.Tensor

PARTS = "codes", "kept", "scales"
"""The parts of a packed row in the order of ``Encoding.parts``; rows without kept elements lack the second."""


def pack(
    rows: Tensor,
    format: str,
    *,
    page_size: int,
    dialect: str | None = None,
    head_dim: int | None = None,
    refuse_nan: bool = False,
) -> Tensor:
    """Pack bfloat16 rows into the pages of a packed format, on their device. O(elements).

    Args:
        rows: ``[pages, page_size, D]``. The format defines D: 576 for 656- and 352-byte rows (latent, then 64 RoPE
            dims), 512 for DSV4, 128 for indexer keys; for ``gqa_*``, ``2 * heads * head_dim``, K of all heads, then V
            of all heads.
        format: of the pages; those of ``gqa_*`` store head after head.
        page_size: tokens of a page.
        dialect: rules of scale, floor and rounding; None: the format's default.
        head_dim: of ``gqa_*``; None: 64.
        refuse_nan: also raise if a reader of the pages would see inf or NaN (a dialect without a floor turns a group of
            zeros into NaN).

    Returns:
        uint8 ``[pages, payload of a page]``; padding bytes inside the payload are 0.

    Raises:
        BadInput: an unknown format or dialect, another shape or dtype, or rows with inf or NaN if the dialect has no
            bytes for them; before anything is allocated.
    """
    chosen = dialect_for_heads(format, dialect, head_dim)
    encoding = packed_row(format, dialect, head_dim)
    page_size = whole_number(page_size, "page_size", at_least=1)
    heads = _check_rows(rows, format, chosen.packing, page_size)
    if chosen.rule.non_finite == "refused":
        _refuse(~rows.isfinite(), f"{format} in the dialect {dialect or 'by default'} has no bytes for inf and NaN")
    pages = torch.zeros(
        len(rows), chosen.packing.payload_nbytes(page_size, heads), dtype=torch.uint8, device=rows.device
    )
    places = views(pages, chosen.packing, page_size, heads)
    vectors = rows.view(-1, chosen.packing.cells, heads, chosen.packing.vector)
    for part, values in encode_rows(vectors, encoding, chosen.rule).items():
        places[part].copy_(values.view(len(rows), page_size, *values.shape[1:]))
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
    """Return the rows ``[pages, page_size, D]`` that packed pages hold. O(elements).

    An encoded element is code times scale, computed in float32; kept elements are returned unchanged. NaN stays NaN.

    Args:
        pages: uint8 ``[pages, payload]``; the payload may also be several axes, ``[pages, page_size, 1, bytes of a
            row]``.
        format: as in ``pack``.
        page_size: tokens of a page.
        dialect: as in ``pack``.
        dtype: of the rows.
        head_dim: as in ``pack``.

    Raises:
        BadInput: an unknown format or dialect, or another shape or dtype.
    """
    encoding = packed_row(format, dialect, head_dim)
    packing = encoding.rules.packing
    page_size = whole_number(page_size, "page_size", at_least=1)
    one_head = packing.payload_nbytes(page_size)
    pages = pages.flatten(1) if pages.ndim > 2 else pages
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] == 0 or pages.shape[1] % one_head:
        many = " * heads" if packing.has_heads else ""
        raise BadInput(
            f"{format} pages of {page_size} rows are uint8 [pages, {one_head}{many}], "
            f"got {pages.dtype} {list(pages.shape)}; cut off the padding of the pages",
            needed=[page_size, one_head], available=list(pages.shape),
        )  # fmt: skip
    heads = pages.shape[1] // one_head
    if heads > 1 and not packing.has_heads:
        text = f"{format} pages of {page_size} rows have {one_head} bytes, got {pages.shape[1]}"
        raise BadInput(text, needed=one_head, available=pages.shape[1])
    parts = views(pages, packing, page_size, heads)
    flat = {part: view.reshape(len(pages) * page_size, *view.shape[2:]) for part, view in parts.items()}
    return decode_rows(flat, encoding, packing.vector, dtype).view(len(pages), page_size, heads * packing.width)


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
        for part, place in packing.places(page_size, heads).items()
    }


def encode_rows(vectors: Tensor, encoding: Encoding, rule: Rule | None = None) -> dict[str, Tensor]:
    """Return part -> its bytes, uint8 ``[n, heads, cells, nbytes]``, of ``vectors`` ``[n, cells, heads, dim]``.

    ``encoding``: packed or not, but not "raw". ``rule``: that of a launch (None), or that of the packer which refuses
    rows.
    """
    parts = encode_by(rule or encoding.rule, encoding, vectors)
    return by_part([bytes_of(part, vectors.ndim).transpose(1, 2) for part in parts])


def by_part(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return part -> tensor, for the parts of rows in the order of ``Encoding.parts``."""
    return dict(zip(PARTS if len(parts) == 3 else (PARTS[0], PARTS[2]), parts))


def bytes_of(part: Tensor, ndim: int) -> Tensor:
    """Return one of the parts of rows in ``ndim`` axes as a uint8 view with as many; a lone scale has one axis less."""
    return (part if part.ndim == ndim else part.unsqueeze(-1)).view(torch.uint8)


def decode_rows(parts: Mapping[str, Tensor], encoding: Encoding, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the rows ``[n, cells * heads * dim]`` of ``dtype`` for the parts that ``encode_rows`` returns."""
    given = [parts[name].transpose(1, 2).contiguous() for name in PARTS if name in parts]
    typed = [
        part.view(getattr(torch, kind)).view(*part.shape[:-1], *shape)
        for part, (_, shape, kind) in zip(given, encoding.vector(dim))
    ]
    return decode(encoding, typed, dtype).flatten(1)


def _check_rows(rows: Tensor, format: str, packing: Packing, page_size: int) -> int:
    """Return the number of heads in ``rows``. Raises BadInput unless ``pack`` takes them."""
    width = packing.width
    wrong = rows.ndim != 3 or rows.shape[1] != page_size or rows.dtype != torch.bfloat16 or rows.shape[2] == 0
    if wrong or (rows.shape[2] % width if packing.has_heads else rows.shape[2] != width):
        many = " * heads" if packing.has_heads else ""
        raise BadInput(
            f"{format} packs bfloat16 rows [pages, {page_size}, {width}{many}], got {rows.dtype} {list(rows.shape)}: "
            f"give exactly the elements that the format holds",
            needed=[page_size, width], available=list(rows.shape),
        )  # fmt: skip
    return rows.shape[2] // width


def _refuse(bad: Tensor, why: str) -> None:
    """Raise BadInput, with the first place, if any element of ``bad`` ``[pages, N, D]`` is set."""
    if bool(bad.any()):
        page, row, element = bad.nonzero()[0].tolist()
        raise BadInput(
            f"{why}: {int(bad.any(-1).sum())} rows, the first is page {page}, row {row}, at element {element}; "
            f"mend the rows, or choose another dialect",
            field=why, needed=(page, row, element),
        )  # fmt: skip
