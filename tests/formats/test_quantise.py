"""``quantise`` by every rule of the table of dialects, against the definitions in exact arithmetic."""

import numpy as np
import pytest
import torch
from exact_floats import E2M1, E4M3, nearest_even

from kvpagoda.formats.dialects import DIALECTS, Rule
from kvpagoda.formats.quantise import dequantise, quantise

RULES = {f"{f}__{name}": (one.rule, one.packing.group) for f, by in DIALECTS.items() for name, one in by.items()}
every_rule = pytest.mark.parametrize(("rule", "group"), RULES.values(), ids=RULES)


def groups_of(group, n=400, seed=0):
    """bfloat16 numbers as float32 ``[n, 2, group]`` of many magnitudes, with ties, zeros and small negatives."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, group, generator=generator) * torch.exp2(8 * torch.randn(n, 2, 1, generator=generator))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(group // 8)
    x[1], x[2], x[3], x[4] = ties, -ties, 0.0, -0.0
    x[5, 0], x[6, :, 1:] = -ties * 0.0625, -1e-3
    x[7, :, :4] = torch.tensor([1.5, -2.5, 0.5, 448.0])
    return x.bfloat16().float()


def nearest(y, rule):
    """Codes of ``y`` by definition, one an element: sign bit and magnitude, or a whole number."""
    if rule.codes in ("int8", "int4"):
        whole = np.trunc(np.abs(y) + np.float32(0.5)) if rule.ties == "away" else np.rint(np.abs(y))
        codes = np.copysign(whole, y).clip(-rule.top - (rule.codes == "int8"), rule.top).astype(np.int8)
        return codes.view(np.uint8) & (15 if rule.codes == "int4" else 255)
    if rule.codes == "e4m3":
        return nearest_even(y, E4M3, 0x80)
    if rule.ties == "down":
        a = np.abs(y.astype(np.float64))
        code = np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, a, side="left").astype(np.uint8) | np.where(
            np.signbit(y), 8, 0
        )
    else:
        code = nearest_even(y, E2M1, 8)
    return np.where((code == 8) & (not rule.signed_zero), 0, code).astype(np.uint8)


@every_rule
def test_bytes_are_those_of_the_definition(rule, group):
    x = groups_of(group)
    codes, stored = quantise(x, rule)
    s = stored.numpy()
    if rule.scale == "e8m0":
        s = np.ldexp(np.float32(1), s.astype(int) - 127)
    elif rule.scale == "e4m3":
        s = E4M3[s].astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        y = x.numpy() * (np.float32(1) / s)[..., None] if rule.by == "reciprocal" else x.numpy() / s[..., None]
    clear = np.isfinite(y)  # scales of 0 have tests of their own
    wanted = nearest(np.where(clear, y, 0).astype(np.float32), rule)
    given = codes.numpy().reshape(len(x), 2, -1)
    if rule.codes_per_byte == 2:
        given = np.stack([given & 15, given >> 4], -1).reshape(x.shape)
    np.testing.assert_array_equal(given[clear], wanted[clear])
    assert clear.mean() > 0.8


@every_rule
def test_what_is_read_is_near_what_was_written(rule, group):
    x = groups_of(group)[10:]
    x = x[(x.abs().amax((1, 2)) < 100) & (x.abs().amax(-1).amin(1) > 0.1)]
    assert len(x) > 50
    back = dequantise(*quantise(x, rule), rule).view(x.shape)
    bound = {"e4m3": 0.04, "int8": 0.02, "e2m1": 0.2, "int4": 0.2}[rule.codes]
    assert ((back - x).norm(dim=-1) / x.norm(dim=-1)).max() < bound


@every_rule
def test_a_group_does_not_depend_on_its_batch(rule, group):
    x = groups_of(group, n=20)
    before = x.clone()
    codes, stored = quantise(x, rule)
    assert torch.equal(x, before)
    for i in range(len(x)):
        alone = quantise(x[i : i + 1], rule)
        assert torch.equal(codes[i], alone[0][0]) and torch.equal(stored[i], alone[1][0])


def test_a_group_of_zeros_without_a_floor_is_nan_to_its_reader():
    rule, _ = RULES["v32_656__sglang_raw"]
    codes, stored = quantise(torch.zeros(1, 1, 8), rule)
    assert stored.item() == 0 and codes.tolist() == [[0xFF] * 8] and dequantise(codes, stored, rule).isnan().all()


def test_a_scale_that_rounds_to_zero():
    """NVFP4 without a floor: a group of zeros is zeros, and a group below 2^-10 has the scale 0 and codes at the top."""
    rule, _ = RULES["nvfp4_384__emulated"]
    x = torch.zeros(2, 1, 16)
    x[0, 0, 3] = -0.0
    x[1, 0, :3] = torch.tensor([1e-5, -1e-5, 0.0])
    codes, stored = quantise(x, rule)
    assert stored.tolist() == [[0], [0]]
    assert codes[0].tolist() == [0, 0x80] + [0] * 6 and codes[1].tolist() == [0xF7] + [0x77] * 7


def test_a_scale_that_rounds_to_zero_with_codes_of_zero():
    """NVFP4 of heads: groups below 2^-10 times 6 are zeros, with the signs of their elements."""
    rule, _ = RULES["gqa_nvfp4__emulated"]
    x = torch.zeros(3, 1, 16)
    x[0, 0, 3], x[2, 0, 0] = -0.0, 6.0
    x[1, 0, :3] = torch.tensor([1e-3, -1e-3, 0.0])
    codes, stored = quantise(x, rule)
    assert stored.tolist() == [[0], [0], [0x38]]
    assert codes.tolist() == [[0, 0x80] + [0] * 6, [0x80] + [0] * 7, [7] + [0] * 7]
    assert not dequantise(codes, stored, rule)[:2].any()


def test_non_finite_groups_as_computed():
    rule, _ = RULES["dsv4_584__flashmla"]
    x = torch.ones(3, 1, 4)
    x[0, 0, 0], x[1, 0, 1], x[2, 0, 2] = torch.nan, torch.inf, -torch.inf
    codes, stored = quantise(x, rule)
    assert stored.tolist() == [[0xFF]] * 3
    assert codes.tolist() == [[0x7F] * 4, [0, 0xFF, 0, 0], [0, 0, 0xFF, 0]]
    assert dequantise(codes, stored, rule).isnan().all()


def test_unshifted_subnormals():
    """A bfloat16 m * 2^-133 reads as the mantissa below m's leading one, moved up to it; all others read as they are."""
    rule = Rule("e4m3", "float32", subnormals="unshifted", skips_nan=True, non_finite="computed")
    exact = Rule("e4m3", "float32", skips_nan=True, non_finite="computed")
    bits = torch.tensor([0x0001, 0x0003, 0x8003, 0x0041, 0x0080, 0x3F80], dtype=torch.int32)
    x = (bits << 16).view(torch.float32).view(-1, 1, 1)
    read = (torch.tensor([0x0000, 0x0040, 0x8040, 0x0002, 0x0080, 0x3F80], dtype=torch.int32) << 16).view(torch.float32)
    assert torch.equal(quantise(x, rule)[1], quantise(read.view(-1, 1, 1), exact)[1])
