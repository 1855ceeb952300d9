"""Encode rows of numbers to bytes and decode them, for every ``Encoding``: the one torch reference.

This code defines the encodings; the kernels give the same bits. A row is divided as follows:

    x[..., dim] = | coded: dim - kept elements, in groups, each group with one scale | kept: bfloat16, untouched |

All arithmetic is float32, one IEEE operation per step, so the bytes of a row depend only on that row, not on the
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.dialects import Packing, Rule
from kvpagoda.formats.encoding import Encoding
from kvpagoda.formats.quantise import dequantise, quantise
from kvpagoda.formats.small_floats import e4m3_from_float32, e4m3_table, look_up
from kvpagoda.formats.tensor_scale import from_codes, to_codes

Tensor = torch.Tensor

CHUNK = 1 << 17
"""Elements per step on the CPU, so that the temporaries stay in the CPU's cache (four times faster)."""


def encode(encoding: Encoding, x: Tensor) -> tuple[Tensor, ...]:
    """Encode ``x`` and return its parts, new tensors on its device. O(elements).

    Packed formats encode ``x`` rounded to bfloat16, from which engines write them; their dialect decides about inf and
    NaN. In other encodings a group that holds inf or NaN gets codes of 0 and a NaN scale. The kept elements are
    bit-exact if ``x`` is bfloat16.

    Args:
        encoding: of the rows.
        x: ``[..., dim]``, bfloat16, float16 or float32; ``raw`` takes any dtype and returns ``x`` itself.

    Returns:
        the tensors that ``encoding.parts((dim,), dtype)`` lists, each with the leading axes of ``x`` in front.

    Raises:
        BadInput: a wrong dtype.
        SchemaError: an unknown encoding, or a dim that does not divide into groups.
        LayoutError: a dim that a packed format does not hold.

    Examples:
        >>> x = torch.tensor([[1.0, -2.0, 448.0, 0.5]])
        >>> codes, inverse_scale = encode(Encoding("fp8"), x)
        >>> codes.tolist(), inverse_scale.tolist()
        ([[56, 192, 126, 48]], [1.0])
        >>> decode(Encoding("fp8"), (codes, inverse_scale), torch.float32).tolist()
        [[1.0, -2.0, 448.0, 0.5]]
    """
    if encoding.name == "raw":
        return (x,)
    if x.ndim == 0 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        text = f"encode takes bfloat16, float16 or float32 rows [..., dim], got {x.dtype} {list(x.shape)}"
        raise BadInput(text, needed=x.dtype, available=list(x.shape))
    if encoding.is_scaled:
        return (to_codes(encoding, x),)
    return encode_by(encoding.rule, encoding, x.to(torch.bfloat16) if encoding.is_packed else x)


def encode_by(rule: Rule, encoding: Encoding, x: Tensor) -> tuple[Tensor, ...]:
    """Return ``encode(encoding, x)`` by another ``rule`` for the same codes and scales. ``x`` is not checked."""
    lead, dim = x.shape[:-1], x.shape[-1]
    packing, layout = encoding.packing(dim), encoding.vector(dim)
    rows = x[..., : packing.coded].reshape(lead.numel(), packing.coded)
    parts = tuple(
        torch.empty((*lead, *shape), dtype=getattr(torch, dtype), device=x.device) for _, shape, dtype in layout
    )
    codes = parts[0].view(len(rows), parts[0].shape[-1])
    scales = parts[-1].view(len(rows), packing.groups + packing.scale_pad)
    for chunk in _chunks(rows):
        groups = rows[chunk].to(torch.float32).view(-1, packing.groups, packing.group)
        codes[chunk], found = quantise(groups, rule)
        found = found if packing.scale_lanes == 1 else found.index_select(1, _lanes(packing, x.device))
        scales[chunk] = torch.nn.functional.pad(found, (0, packing.scale_pad))
    if packing.kept:
        kept = x[..., packing.coded :]
        parts[1].copy_(e4m3_from_float32(kept.to(torch.float32)) if packing.kept_nbytes == 1 else kept)
    return parts


def decode(encoding: Encoding, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Decode parts to a tensor ``[..., dim]`` on their device. O(elements).

    Each value is code times scale, computed in float32. A group that held inf or NaN decodes to NaN.

    Args:
        encoding: of the rows.
        parts: as ``encode`` returned them.
        dtype: of the result.

    Returns:
        a new tensor, except that ``raw`` may return its part itself.

    Raises:
        BadInput: parts of the wrong number, dtype or shape.
        SchemaError: an unknown encoding.

    Examples:
        >>> from kvpagoda.formats.encoding import MXFP4
        >>> x = torch.arange(32.0)
        >>> decode(MXFP4, encode(MXFP4, x), torch.float32)[24:].tolist()  # steps of 8: a 4-bit code and a scale of 8
        [24.0, 24.0, 24.0, 24.0, 32.0, 32.0, 32.0, 32.0]
    """
    lead, dim = _check_parts(encoding, parts)
    if encoding.name == "raw":
        return parts[0].to(dtype)
    if encoding.is_scaled:
        return from_codes(encoding, parts[0], dtype)
    packing = encoding.packing(dim)
    codes = parts[0].reshape(lead.numel(), parts[0].shape[-1])
    scales = parts[-1].reshape(len(codes), packing.groups + packing.scale_pad)
    out = torch.empty(len(codes), dim, dtype=dtype, device=codes.device)
    found = scales[:, : packing.groups]
    if packing.scale_lanes > 1:
        found = found.index_select(1, _lanes(packing, codes.device).argsort())
    for chunk in _chunks(codes):
        out[chunk, : packing.coded] = dequantise(codes[chunk], found[chunk], encoding.rule)
    if packing.kept:
        kept = parts[1].reshape(len(codes), packing.kept)
        out[:, packing.coded :] = look_up(e4m3_table(kept.device), kept) if packing.kept_nbytes == 1 else kept
    return out.view(*lead, dim)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Return slices that cover ``rows`` ``[n, k]``: of at most ``CHUNK`` elements on the CPU, else one slice."""
    step = CHUNK // rows.shape[1] if rows.device.type == "cpu" else len(rows)
    return (slice(start, start + max(1, step)) for start in range(0, len(rows), max(1, step)))


@lru_cache(maxsize=64)
def _lanes(packing: Packing, device: torch.device) -> Tensor:
    """Return int64 ``[groups]``: the index of the scale that is stored at each place of a row. Do not write to it."""
    places = torch.arange(packing.groups, device=device)
    return places.view(packing.scale_lanes, -1).T.reshape(-1).argsort()


def _check_parts(encoding: Encoding, parts: Sequence[Tensor]) -> tuple[torch.Size, int]:
    """Return (leading axes, elements of a row) of ``parts``; raises BadInput unless they are one encoded tensor."""
    given = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
    if not parts or parts[0].ndim == 0:
        raise BadInput(f"decode needs the parts that encode gave, got: {given or 'none'}")
    lead, dim = parts[0].shape[:-1], parts[0].shape[-1]
    wanted = [(parts[0].dtype, tuple(parts[0].shape))]
    if encoding.is_scaled:
        wanted = [(getattr(torch, dtype), shape) for _, shape, dtype in encoding.parts(tuple(parts[0].shape), "")]
    elif encoding.name != "raw":
        dim = dim * encoding.rule.codes_per_byte + encoding.kept
        wanted = [(getattr(torch, dtype), (*lead, *shape)) for _, shape, dtype in encoding.vector(dim)]
    if wanted != [(part.dtype, tuple(part.shape)) for part in parts]:
        expected = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in wanted)
        raise BadInput(f"{encoding.name!r} parts must be {expected}; got {given}", needed=expected, available=given)
    return lead, dim
