"""Independent definitions for the tests of ``kvpagoda.formats``: exact arithmetic in float64, no bit tricks."""

import numpy as np
import torch

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array([(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(0x7F)])
"""Magnitudes of the codes 0..7 and 0..0x7E, ascending."""


def nearest_even(x, magnitudes, sign_bit):
    """Codes of float ``x``: the nearest magnitude, the even code on a tie, the last past the end. NaN is the caller's."""
    a = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(magnitudes, a), 1, len(magnitudes) - 1)
    below = above - 1
    to_below, to_above = a - magnitudes[below], magnitudes[above] - a
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(take_above, above, below)
    return (code | np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def every_bf16():
    """All 65,536 bfloat16 values as float32."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()


def hard_floats(magnitudes):
    """float32 of both signs: the magnitudes, their midpoints, all neighbours of these, and random bit patterns."""
    exact = np.concatenate([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    tricky = np.array([np.inf, 1e-45, 3.4028235e38, 464.0, 464.00003, 480.0], np.float32)
    x = np.concatenate([near, -near, tricky, -tricky, bits.view(np.float32)])
    return torch.from_numpy(x[~np.isnan(x)])
