"""Codes with one scale for a whole tensor: the reference against exact arithmetic, over every bfloat16."""

from unittest.mock import ANY

import numpy as np
import pytest
import torch
from exact_floats import E4M3, every_bf16, hard_floats, nearest_even

from kvpagoda.errors import BadInput
from kvpagoda.formats import decode, encode
from kvpagoda.formats.encoding import Encoding
from raises import raises

E5M2 = np.array([(c & 3) * 2.0**-16 if c < 4 else (4 + (c & 3)) * 2.0 ** ((c >> 2) - 17) for c in range(0x7C)])
"""Magnitudes of the codes 0..0x7B, ascending."""
TABLES = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
SCALES = [1.0, 0.5, 0.0217, 3.7, 1e-30, 1e30, 2.0**-120]
each = pytest.mark.parametrize("name", TABLES)


@each
@pytest.mark.parametrize("scale", SCALES)
def test_codes_are_the_nearest_to_x_over_scale_and_saturate(name: str, scale: float) -> None:
    encoding, table = Encoding(name, scale=scale), TABLES[name]
    assert table[-1] == {"fp8_e4m3": 448, "fp8_e5m2": 57344}[name]
    x = torch.cat([every_bf16(), hard_floats(table)])
    (codes,) = encode(encoding, x)
    with np.errstate(all="ignore"):
        y = x.numpy() / np.float32(scale)
    is_nan = np.isnan(x.numpy())
    assert codes.dtype == getattr(torch, encoding.parts((1,), "")[0][2])
    found = codes.view(torch.uint8).numpy()
    assert np.array_equal(found[~is_nan], nearest_even(y[~is_nan], table, 0x80))
    assert codes.float().isnan().numpy()[is_nan].all() and not codes.float()[~torch.from_numpy(is_nan)].isnan().any()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_numbers_are_code_times_scale_rounded_once(name: str, scale: float, dtype: torch.dtype) -> None:
    encoding = Encoding(name, scale=scale)
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, encoding.parts((1,), "")[0][2]))
    table = TABLES[name]
    values = np.concatenate([table, np.full(128 - len(table), np.nan)]).astype(np.float64)
    exact = torch.from_numpy(np.concatenate([values, -values]) * np.float64(np.float32(scale))).float().to(dtype)
    found, wanted = decode(encoding, (codes,), dtype), exact
    is_nan = codes.float().isnan()
    is_finite = codes.float().isfinite()
    assert torch.equal(found[is_finite], wanted[is_finite]) and found[is_nan].isnan().all()


@each
def test_rows_keep_their_shape(name: str) -> None:
    encoding, x = Encoding(name, scale=0.25), torch.randn(3, 2, 5)
    (codes,) = encode(encoding, x)
    assert codes.shape == x.shape and decode(encoding, (codes,), torch.float32).shape == x.shape
    assert encoding.keeps_shape and not encoding.is_packed and "scale=0.25" in repr(encoding)
    with raises(BadInput, needed=ANY, available="torch.uint8 [3, 2, 5]"):
        decode(encoding, (codes.view(torch.uint8),), torch.float32)
    with raises(BadInput, needed=codes.dtype, available=[3, 2, 5]):
        encode(encoding, codes)
