"""FP4 E2M1: sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two codes a byte, the low nibble is the even index.

Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3.
"""

from __future__ import annotations

from functools import lru_cache

import torch

Tensor = torch.Tensor

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The value of each of the eight positive codes."""


def e2m1_from_float32(x: Tensor) -> Tensor:
    """float32 ``[...]`` -> E2M1 codes uint8 ``[...]``, one a byte: nearest, ties to even, past 6 (also inf) to 6.

    E2M1 has no NaN: NaN gives 6 like the hardware's ``cvt.rn.satfinite`` (its sign kept); callers mark it in the scale.
    Below 1, adding 2^22 rounds to the step 0.5; from 1 on, 22 mantissa bits are dropped with ties to even. At 1 both
    give 2, so each is taken of the magnitude clamped to its side and the two are added.

    >>> e2m1_from_float32(torch.tensor([0.0, 0.5, 1.0, -6.0, 100.0])).tolist()
    [0, 1, 2, 15, 7]
    """
    bits = x.contiguous().view(torch.int32)
    a = bits & 0x7FFFFFFF
    high = a.clamp(min=127 << 23)
    code = high.bitwise_right_shift(22).bitwise_and_(1).add_(high).sub_((126 << 23) - 0x1FFFFF)
    code.bitwise_right_shift_(22).clamp_(max=7)
    low = a.clamp_(max=127 << 23).view(torch.float32).add_(4194304.0).view(torch.int32)
    code.add_(low.sub_(0x4A800000 + 2))
    return code.bitwise_or_(bits.bitwise_right_shift(28).bitwise_and_(8)).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes ``[..., 2k]`` below 16 -> bytes ``[..., k]``; low nibble = even index.

    >>> pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist() == [0x21, 0x43]
    True
    """
    return codes[..., 0::2] | codes[..., 1::2] << 4


@lru_cache(maxsize=64)
def e2m1_pair_table(device: torch.device) -> Tensor:
    """float32 ``[256, 2]``: the two values in every byte, even index first. Shared; do not write to it."""
    values = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    pairs = [[values[byte & 15], values[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device)
