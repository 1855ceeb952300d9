"""Encode rows of numbers to bytes and decode them, for every ``Encoding`` of the schema.

This code defines the encodings; the kernels give the same bits. A row is divided as follows:

    x[..., dim] = | coded: dim - kept elements, in groups, each group with one scale | kept: bfloat16, untouched |

All arithmetic is float32, one IEEE operation per step, so the bytes of a row depend only on that row, not on the
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.encoding import Encoding
from kvpagoda.formats.quantise import dequantise, quantise
from kvpagoda.units import align_up

Tensor = torch.Tensor

CHUNK = 1 << 17
"""Elements per step on the CPU, so that the temporaries stay in the CPU's cache (four times faster)."""


def encode(encoding: Encoding, x: Tensor) -> tuple[Tensor, ...]:
    """Encode ``x`` ``[..., dim]`` and return its parts.

    The parts are the tensors that ``encoding.parts((dim,), dtype)`` lists, each with the leading axes of ``x`` in
    front: new tensors on the device of ``x``. ``x`` is bfloat16, float16 or float32; ``raw`` takes any dtype and
    returns ``x`` itself. A group that holds inf or NaN gets codes of 0 and a NaN scale. The kept elements are bit-exact
    if ``x`` is bfloat16. Raises BadInput for a wrong dtype, SchemaError for an unknown encoding or a dim that does not
    divide into groups. O(elements).

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
        raise BadInput(f"encode takes bfloat16, float16 or float32 rows [..., dim], got {x.dtype} {list(x.shape)}")
    lead, dim = x.shape[:-1], x.shape[-1]
    layout = encoding.parts((dim,), "bfloat16")
    coded = dim - encoding.kept
    rows = x[..., :coded].reshape(lead.numel(), coded)
    parts = tuple(
        torch.empty((*lead, *shape), dtype=getattr(torch, dtype), device=x.device) for _, shape, dtype in layout
    )
    codes, scales = (parts[i].view(len(rows), *layout[i][1]) for i in (0, -1))
    for chunk in _chunks(rows):
        codes[chunk], scales[chunk] = _encode_rows(encoding, rows[chunk].to(torch.float32))
    if encoding.kept:
        parts[1].copy_(x[..., coded:])
    return parts


def decode(encoding: Encoding, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Decode ``parts``, as ``encode`` returned them, to a tensor ``[..., dim]`` of ``dtype`` on their device.

    Each value is code times scale, computed in float32. A group that held inf or NaN decodes to NaN. The result is a
    new tensor, except that ``raw`` may return its part itself. Raises BadInput for parts of the wrong number, dtype or
    shape, SchemaError for an unknown encoding. O(elements).

    >>> from kvpagoda.formats.encoding import MXFP4
    >>> x = torch.arange(32.0)
    >>> decode(MXFP4, encode(MXFP4, x), torch.float32)[24:].tolist()  # steps of 8: a 4-bit code and a scale of 8
    [24.0, 24.0, 24.0, 24.0, 32.0, 32.0, 32.0, 32.0]
    """
    lead, coded = _check_parts(encoding, parts)
    if encoding.name == "raw":
        return parts[0].to(dtype)
    codes = parts[0].reshape(lead.numel(), parts[0].shape[-1])
    scales = parts[-1].reshape(len(codes), *parts[-1].shape[len(lead) :])
    out = torch.empty(len(codes), coded + encoding.kept, dtype=dtype, device=codes.device)
    for chunk in _chunks(codes):
        out[chunk, :coded] = _decode_rows(encoding, codes[chunk], scales[chunk])
    if encoding.kept:
        out[:, coded:] = parts[1].reshape(len(codes), encoding.kept)
    return out.view(*lead, coded + encoding.kept)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Return slices that cover ``rows`` ``[n, k]``: of at most ``CHUNK`` elements on the CPU, else one slice."""
    step = CHUNK // rows.shape[1] if rows.device.type == "cpu" else len(rows)
    return (slice(start, start + max(1, step)) for start in range(0, len(rows), max(1, step)))


def _encode_rows(encoding: Encoding, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of float32 ``x`` ``[n, coded]``, in the shapes of the encoding."""
    codes, scales = quantise(x.view(len(x), -1, encoding.group or x.shape[1]), encoding.rule)
    if encoding.name == "fp8_ue8m0":
        scales = torch.nn.functional.pad(scales, (0, align_up(scales.shape[1], 8) - scales.shape[1]))
    return codes, scales if encoding.group else scales.squeeze(1)


def _decode_rows(encoding: Encoding, codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 ``[n, coded]`` for ``codes`` ``[n, k]`` and their ``scales``."""
    rule = encoding.rule
    groups = codes.shape[1] * rule.codes_per_byte // encoding.group if encoding.group else 1
    return dequantise(codes, scales.view(len(scales), -1)[:, :groups], rule)


def _check_parts(encoding: Encoding, parts: Sequence[Tensor]) -> tuple[torch.Size, int]:
    """Return (leading axes, coded elements) of ``parts``; raises BadInput unless they are one encoded tensor."""
    given = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
    if not parts or parts[0].ndim == 0:
        raise BadInput(f"decode needs the parts that encode gave, got: {given or 'none'}")
    lead = parts[0].shape[:-1]
    coded = parts[0].shape[-1] * (1 if encoding.name == "raw" else encoding.rule.codes_per_byte)
    layout = encoding.parts((coded + encoding.kept,), str(parts[0].dtype).removeprefix("torch."))
    wanted = [(getattr(torch, dtype), (*lead, *shape)) for _, shape, dtype in layout]
    if wanted != [(part.dtype, tuple(part.shape)) for part in parts]:
        expected = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in wanted)
        raise BadInput(f"{encoding.name!r} parts must be {expected}; got {given}")
    return lead, coded
