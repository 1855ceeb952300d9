"""Twenty layout bugs that engines had (issue numbers as reported): each is not "ok" before anything runs.

19 and 20 were read from the kernels' source, nobody reported them. For each bug: the layout that broke, and its neighbour that
is right, so that a rule which refuses everything fails here too.
"""

import pytest
from legal_tensors import CASES, fp4, fused, hnd, nhd, packed, pair, state, tensor

from kvpagoda.layouts.demands import kernel, kernels
from kvpagoda.layouts.judge import judge

CROSS_LAYER = fused(stride=61 * 64 * 576)  # one layer's view of blocks that hold 61 layers
PADDED_DSV4 = {"kv": tensor(8, 1, 64, 512, strides=(33280, 32768, 512, 1))}
CELLS = tensor(8, 2, 16, 128)  # [block, head, token, K|V], two heads
STATE = state(16, 32, 128, 128)
INTERLEAVED = pair(1040, 8, 128, strides=(2048, 128, 1))  # K and V of a token side by side in one pool
KERNEL_PAGES = {"kv": packed(64, 656, 65 * 656)}  # each page padded by a row

# number: (kernel, arch, (tensors, facts) that broke, what is said, (tensors, facts) that are right)
BUGS = {
    1: ("cutlass_mla", "sm100", (CROSS_LAYER, {}), "garbage", (fused(), {})),
    2: ("trtllm_sparse_dsv4", "sm100", (PADDED_DSV4, {}), "garbage", (PADDED_DSV4, {"indices": "remapped"})),
    3: (
        "vllm_triton_unified", "any",
        ({"kv": {**CELLS, "axes": ["block", "kv", "token", "dim"]}}, {}), "garbage",
        ({"kv": {**CELLS, "axes": ["block", "head", "token", "dim"]}}, {}),
    ),
    4: (
        "page_transfer", "any",
        ({}, {"stored_bytes": 64 * 132, "block_bytes": 2 * 64 * 132}), "garbage",
        ({}, {"stored_bytes": 2 * 64 * 132, "block_bytes": 2 * 64 * 132}),
    ),
    5: ("fla", "any", (STATE, {"order": "KV"}), "garbage", (STATE, {"order": "VK"})),
    6: (
        "flashinfer_trtllm_gqa", "sm100",
        (fp4(k={"strides": [4096, 512, 16, 1]}, v={"strides": [4096, 512, 16, 1]}), {}), "garbage", (fp4(), {}),
    ),
    8: (
        "flashinfer_append", "any",
        (nhd(strides=(16384, 1024, 128, 1), v_strides=(20000, 1024, 128, 1)), {}), "reject", (nhd(), {}),
    ),
    9: ("sglang_mha_pool", "any", (INTERLEAVED, {}), "garbage", (pair(1040, 8, 128), {})),
    10: (
        "flash_attention_2", "any",
        ({name: {**one, "axes": ["kv", "block", "token", "dim"]} for name, one in nhd(256).items()}, {}), "garbage",
        ({name: {**one, "axes": ["block", "token", "head", "dim"]} for name, one in nhd(256).items()}, {}),
    ),
    11: (
        "flashmla_sparse_v32", "sm100",
        (KERNEL_PAGES, {"pages_per_block": 2, "block_stride": 129 * 656}), "garbage",
        (KERNEL_PAGES, {"pages_per_block": 2, "block_stride": 130 * 656}),
    ),
    12: (
        "deepgemm_paged_mqa_logits_fp8", "sm90",
        ({"kv": packed(64, 132)}, {"packing": "pool_footer"}), "garbage",
        ({"kv": packed(64, 132)}, {"packing": "footer"}),
    ),
    13: (
        "trtllm_mla", "sm100",
        ({"kv": tensor(8, 1, 64, 576, strides=(36864, 1, 576, 1))}, {}), "reject",
        ({"kv": tensor(8, 1, 64, 576)}, {}),
    ),
    14: (
        "state_transfer", "any",
        ({}, {"replicas": [1, 2, 2], "part_replicas": [1, 1, 1]}), "garbage",
        ({}, {"replicas": [1, 2, 2], "part_replicas": [1, 2, 2]}),
    ),
    15: (
        "state_transfer", "any",
        ({}, {"parts": ["x", "B", "C"], "cuts": ["xBC"]}), "garbage",
        ({}, {"parts": ["x", "B", "C"], "cuts": ["x", "B", "C"]}),
    ),
    16: (
        "page_transfer", "any",
        ({}, {"layout_digest": "3f", "reader_layout": "a0"}), "garbage",
        ({}, {"layout_digest": "3f", "reader_layout": "3f"}),
    ),
    17: ("flashinfer_nvfp4_384", "sm120", ({"kv": packed(64, 360)}, {}), "reject", ({"kv": packed(64, 384)}, {})),
    18: (
        "page_transfer", "any",
        ({}, {"parts": ["kv", "indexer"], "stored_parts": ["kv"]}), "garbage",
        ({}, {"parts": ["kv", "indexer"], "stored_parts": ["kv", "indexer"]}),
    ),
    19: (
        "flashmla_sparse_v32", "sm100",
        ({"kv": packed(64, 656)}, {"dialect": "flashinfer_raw"}), "garbage",
        ({"kv": packed(64, 656)}, {"dialect": "flashmla"}),
    ),
    20: (
        "vllm_reshape_and_cache_flash", "any",
        (nhd(strides=(16384, 1024, 128, 1), v_strides=(20000, 1024, 128, 1)), {}), "garbage", (nhd(), {}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", BUGS)
def test_the_bug_is_caught_and_its_neighbour_is_not(number):
    name, arch, (tensors, facts), outcome, (right, right_facts) = BUGS[number]
    verdict = judge(name, tensors, arch, facts)
    assert verdict.expect == outcome and verdict.remedy + verdict.reason, str(verdict)
    assert judge(name, right, arch, right_facts).expect == "ok"


def test_bug_7_plans_are_keyed_by_strides():
    plans = {judge("flashinfer_trtllm_gqa", tensors, "sm100").key for tensors in (hnd(), fp4())}
    strided = hnd(strides=(65536, 4096, 128, 1))
    assert len(plans | {judge("flashinfer_trtllm_gqa", strided, "sm100").key}) == 3


def test_bug_8_what_writes_a_cache_is_in_the_table_beside_what_reads_it():
    writers = {name for name in kernels() if kernel(name).role == "write"}
    assert {"flashinfer_append", "vllm_reshape_and_cache_flash", "flashinfer_gdn_prefill"} <= writers
    tensors = CASES["flashinfer_fa2_prefill"][1]  # what this reader takes, its writer refuses
    assert (
        judge("flashinfer_fa2_prefill", tensors).expect == "ok"
        and judge("flashinfer_append", tensors).expect == "reject"
    )


def test_bug_19_sm90_rounds_such_scales_and_only_sm100_truncates_them():
    facts = {"dialect": "flashinfer_raw", "scales": "arbitrary"}
    assert judge("flashmla_sparse_v32", {"kv": packed(64, 656)}, "sm90", facts).expect == "ok"


def test_bug_20_in_the_reader():
    tensors = hnd(strides=(32768, 4096, 128, 1), v_strides=(65536, 4096, 128, 1))
    assert judge("flashinfer_trtllm_gqa", tensors, "sm100").expect == "garbage"
