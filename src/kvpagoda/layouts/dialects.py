"""The packed formats and their numeric dialects: geometry, rule and source of each. The table is the file.

Every kernel of a format reads the bytes of all its dialects; which bytes a row gets is the dialect. Engines whose dialects
differ by a floor give small rows different bytes, so the dialect is part of a layout's identity. Of V3.2 only power-of-two
scales are read right on sm90 *and* sm100, so that dialect comes first: the first of a format is its default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from kvpagoda.errors import BadInput
from kvpagoda.formats.rule import Rule
from kvpagoda.layouts import packings
from kvpagoda.layouts.packings import Packing
from kvpagoda.units import whole_number


@dataclass(frozen=True)
class Dialect:
    """One way to write the rows of a format: where bytes lie, which numbers they mean, and who writes them so."""

    packing: Packing
    rule: Rule
    source: str


# floors: on the scale (FlashMLA's reference and what follows it), or on amax
_E4M3_SCALE = Rule("e4m3", "e8m0", floor=1e-4, floor_on="scale", non_finite="computed")
_E4M3_AMAX = Rule("e4m3", "e8m0", floor=1e-4, non_finite="refused")
_E2M1_SCALE = Rule("e2m1", "e8m0", floor=1e-4, floor_on="scale", signed_zero=False, non_finite="refused")
_E2M1_FP8 = Rule("e2m1", "e4m3", floor=2.0**-9, floor_on="scale", non_finite="computed")
_HEAD = Rule("e4m3", "float32", floor=1e-6, floor_on="scale", by="reciprocal", non_finite="refused")

DIALECTS: dict[str, dict[str, Dialect]] = {
    "v32_656": {
        "flashmla": Dialect(
            packings.V32_656,
            replace(_E4M3_SCALE, scale="float32", power_of_two=True),
            "FlashMLA:tests/quant.py; flashinfer:tests/attention/test_sparse_mla_sm120.py quantize_kv_dsv3_2",
        ),
        "vllm": Dialect(
            packings.V32_656,
            Rule("e4m3", "float32", floor=2.0**-126, floor_on="scale", non_finite="refused"),
            "vllm:csrc/libtorch_stable/cache_kernels.cu concat_and_cache_ds_mla_kernel; read, not run",
        ),
        "flashinfer_raw": Dialect(
            packings.V32_656,
            Rule("e4m3", "float32", floor=1e-4, non_finite="refused"),
            "flashinfer:tests/attention/test_sparse_mla_sm120.py quantize_kv_glm_nsa",
        ),
        "sglang_raw": Dialect(
            packings.V32_656,
            Rule(
                "e4m3", "float32", by="reciprocal", non_finite="computed", skips_nan=True, subnormals="unshifted"
            ),  # no floor: a group of zeros has the scale 0 and NaN codes
            "sglang:kernels/ops/quantization/dsa_quant_k_cache.py",
        ),
    },
    "dsv4_584": {
        "flashmla": Dialect(packings.DSV4_584, _E4M3_SCALE, "FlashMLA:tests/quant.py MODEL1"),
        "vllm": Dialect(packings.DSV4_584, _E4M3_AMAX, "vllm:models/deepseek_v4/common/ops/cache_utils.py:61-190"),
    },
    "v41_528": {
        "sglang_footer": Dialect(
            packings.V41_528_FOOTER, _E4M3_SCALE, "sglang:test/kernels/deepseek_v4/dsv41_kv_quant_reference.py"
        ),
        "sglang_rows": Dialect(
            packings.V41_528, _E4M3_SCALE, "sglang:test/kernels/deepseek_v4/dsv41_kv_quant_reference.py"
        ),
        "vllm_rows": Dialect(packings.V41_528, _E4M3_AMAX, "vllm:models/deepseek_v41/common/ops/cache_utils.py:38-57"),
    },
    "v41fp4_288": {
        "sglang_footer": Dialect(
            packings.V41FP4_288_FOOTER,
            _E2M1_FP8,
            "sglang:test/kernels/deepseek_v4/dsv41_kv_quant_reference.py quantize_k_cache_v41_fp4",
        ),
        "sglang_rows": Dialect(
            packings.V41FP4_288,
            _E2M1_FP8,
            "sglang:kernels/ops/attention/dsv4/kv_layout.py:18-118; the bytes of sglang_footer, interleaved",
        ),
    },
    "index_132": {
        "deepgemm": Dialect(
            packings.INDEX_132,
            Rule("e4m3", "float32", floor=1e-4, by="reciprocal", non_finite="refused"),
            "DeepGEMM:tests/test_attention.py kv_cache_cast_to_fp8",
        ),
        "pow2_emulated": Dialect(
            packings.INDEX_132,
            replace(_E4M3_AMAX, scale="float32", power_of_two=True),
            "vllm:cache_kernels.cu indexer_k_quant_and_cache with power-of-two scales; emulated, not run",
        ),
    },
    "index_68": {
        "deepgemm": Dialect(
            packings.INDEX_68,
            replace(_E2M1_SCALE, floor_on="amax", ties="down"),
            "DeepGEMM:tests/test_attention.py kv_cache_cast_to_fp4",
        ),
        "sglang_threshold": Dialect(
            packings.INDEX_68, replace(_E2M1_SCALE, ties="down"), "sglang:kernels/ops/kvcache/dsv4_fp4_index_k_cache.py"
        ),
        "sglang_rne": Dialect(packings.INDEX_68, _E2M1_SCALE, "sglang:kernels/ops/kvcache/dsv4_fp4_index_k_cache.py"),
    },
    "nvfp4_384": {
        "emulated": Dialect(
            packings.NVFP4_384,
            Rule("e2m1", "e4m3", by="reciprocal", zero_groups="apart", non_finite="refused"),
            "flashinfer:csrc/fp4_kv_quantization.cu; its reciprocals are approximate: exact ties may differ there",
        ),
    },
    "nvfp4_352": {
        "emulated": Dialect(
            packings.NVFP4_352,
            Rule("e2m1", "e4m3", floor=2.0**-9, floor_on="scale", scale_up=True, by="reciprocal", non_finite="refused"),
            "vllm:csrc/libtorch_stable/nvfp4_ds_mla_cache.cu; emulated, not run",
        ),
    },
    "gqa_fp8_head": {
        "vllm": Dialect(packings.gqa_cell(), _HEAD, "vllm:v1/attention/ops/triton_reshape_and_cache_flash.py:219-276"),
    },
    "gqa_int8_head": {
        "vllm": Dialect(
            packings.gqa_cell(),
            replace(_HEAD, codes="int8", ties="away"),
            "vllm:v1/attention/ops/triton_reshape_and_cache_flash.py:219-276",
        ),
    },
    "gqa_int4_group": {
        "kvpagoda": Dialect(
            packings.gqa_cell(group=32, code_bits=4), replace(_HEAD, codes="int4"), "kvpagoda: no engine's bytes"
        ),
    },
}


def dialect_of(format: str, dialect: str | None = None) -> Dialect:
    """The row of the table for ``format`` and ``dialect`` (None: its default). Raises BadInput with those there are."""
    for name, known, what in ((format, DIALECTS, "packed format"), (dialect, DIALECTS.get(format, {}), "dialect")):
        if name is not None and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            of = "" if what == "packed format" else f" of {format!r}"
            raise BadInput(f"no {what} {name!r}{of}; known: {', '.join(known)}{hint}")
    return DIALECTS[format][dialect or next(iter(DIALECTS[format]))]


def dialect_for_heads(format: str, dialect: str | None = None, head_dim: int | None = None) -> Dialect:
    """``dialect_of``, for heads of ``head_dim`` elements where the format has heads (None: 64). Raises BadInput."""
    chosen = dialect_of(format, dialect)
    if head_dim is None:
        return chosen
    packing = chosen.packing
    group = packing.group if packing.groups > 1 else head_dim
    if packing.cells == 1 or whole_number(head_dim, "head_dim", at_least=1) % group:
        raise BadInput(
            f"{format} has no heads of {head_dim} elements; leave head_dim out, or give a multiple of {group}"
        )
    return replace(chosen, packing=replace(packing, coded=head_dim, group=group))
