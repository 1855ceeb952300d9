"""Rows with one scale for a whole tensor: codes are x / scale, rounded and saturated. The torch reference.

This code defines the result; the loops of ``kernels.scaled_rows`` give the same bits. All arithmetic is float32, one
IEEE operation per step: divide, clamp to the largest code, cast; back: widen, multiply, round once to the result's dtype.
torch's own cast rounds ties to even and does not saturate, so the clamp is not optional. NaN passes through both.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kvpagoda.formats.encoding import TENSOR, Encoding

Tensor = torch.Tensor


def to_codes(encoding: Encoding, x: Tensor) -> Tensor:
    """Return the codes of floating-point ``x`` ``[...]``: a new tensor of its shape, of the encoding's float8 dtype.

    >>> to_codes(Encoding("fp8_e4m3", scale=0.5), torch.tensor([1.0, -2.0, 1e9, 0.3])).float().tolist()
    [2.0, -4.0, 448.0, 0.625]
    """
    dtype, top = TENSOR[encoding.name]
    assert encoding.scale is not None
    y = x.to(torch.float32)
    y = y.clamp(-top, top) if encoding.scale == 1 else y.div(_on(encoding.scale, x.device)).clamp_(-top, top)
    return y.to(getattr(torch, dtype))


def from_codes(encoding: Encoding, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return code times scale as a new tensor ``[...]`` of ``dtype``.

    >>> from_codes(Encoding("fp8_e4m3", scale=0.5), torch.tensor([2.0, -4.0]).to(torch.float8_e4m3fn), torch.float32).tolist()
    [1.0, -2.0]
    """
    assert encoding.scale is not None
    return codes.to(torch.float32).mul_(_on(encoding.scale, codes.device)).to(dtype)


@lru_cache(maxsize=1024)
def _on(scale: float, device: torch.device) -> Tensor:
    """Return ``scale`` as a tensor, which the device fills: nothing waits for a copy. torch divides by a plain number on a
    GPU as it multiplies by its reciprocal. Shared: do not write to it."""
    return torch.full((), scale, dtype=torch.float32, device=device)
