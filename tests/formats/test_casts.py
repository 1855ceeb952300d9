"""The integer casts against exact tables and against torch's own cast."""

import numpy as np
import pytest
import torch
from exact_floats import E2M1, E4M3, every_bf16, hard_floats, nearest_even

from kvpagoda.formats.small_floats import (
    e2m1_from_float32,
    e2m1_pair_table,
    e4m3_from_float32,
    e4m3_table,
    e8m0_table,
    look_up,
    pack_nibbles,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cast", "magnitudes", "sign"),
    [(e4m3_from_float32, E4M3, 0x80), (e2m1_from_float32, E2M1, 8)],
    ids=["e4m3", "e2m1"],
)
def test_cast_is_nearest_even_and_saturates(cast, magnitudes, sign):
    bf16 = every_bf16()
    for x in (bf16[~bf16.isnan()], hard_floats(magnitudes)):
        expected = nearest_even(x.numpy(), magnitudes, sign)
        np.testing.assert_array_equal(cast(x).numpy(), expected)


def test_e4m3_cast_matches_torch_on_every_bf16():
    x = every_bf16()
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(e4m3_from_float32(x), expected)


def test_casts_of_nan():
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    nan = torch.cat([bits, bits | -(1 << 31)]).view(torch.float32)
    assert e4m3_from_float32(nan).tolist() == [0x7F] * 3 + [0xFF] * 3
    assert e2m1_from_float32(nan).tolist() == [7] * 3 + [15] * 3


def test_casts_leave_their_input_alone_and_take_strided_input():
    x = torch.linspace(-500, 500, 60).view(6, 10)
    before = x.clone()
    for cast in (e4m3_from_float32, e2m1_from_float32):
        assert torch.equal(cast(x.t()), cast(x).t())
        assert torch.equal(x, before)


def test_tables_decode_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        look_up(e4m3_table(CPU), codes).nan_to_num(99.0), codes.view(torch.float8_e4m3fn).float().nan_to_num(99.0)
    )
    finite = codes[(codes & 0x7F) != 0x7F]
    assert torch.equal(e4m3_from_float32(look_up(e4m3_table(CPU), finite)), finite)
    assert e8m0_table(CPU)[:255].double().log2().tolist() == list(range(-127, 128))
    assert e8m0_table(CPU)[255].isnan()


def test_low_nibble_is_the_even_index():
    x = torch.tensor([1.0, -6.0, 0.5, 0.0])
    packed = pack_nibbles(e2m1_from_float32(x))
    assert packed.tolist() == [0xF2, 0x01]
    assert look_up(e2m1_pair_table(CPU), packed).flatten().tolist() == x.tolist()
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(e2m1_from_float32(e2m1_pair_table(CPU).flatten())), every)
