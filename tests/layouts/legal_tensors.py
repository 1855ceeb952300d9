"""Tensors as ``judge`` takes them, a legal set for every kernel, and what makes each set illegal."""

import math

HALF = "bfloat16"


def tensor(*shape, strides=None, dtype=HALF, base=16, **more):
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return {"shape": [*shape], "strides": [*(strides or dense)], "dtype": dtype, "base_alignment": base, **more}


def packed(tokens, row, page_stride=None, dtype="uint8", base=16, one=True):
    """A page of packed rows: [8, N, 1, row] bytes."""
    stride = page_stride or tokens * row
    if one:
        return tensor(8, tokens, 1, row, strides=(stride, row, row, 1), dtype=dtype, base=base)
    return tensor(8, tokens, row, strides=(stride, row, 1), dtype=dtype, base=base)


def pair(*shape, strides=None, v_strides=None, dtype=HALF, **more):
    return {
        "k": tensor(*shape, strides=strides, dtype=dtype, **more),
        "v": tensor(*shape, strides=v_strides or strides, dtype=dtype, **more),
    }


def nhd(tokens=16, dim=128, **more):
    return pair(8, tokens, 8, dim, **more)


def hnd(tokens=32, **more):
    return pair(8, 8, tokens, 128, **more)


def fp4(**scales):
    """Head-major NVFP4 pages of 32 rows of 128 elements, with their scales."""
    shape = (8, 8, 32, 8)
    k, v = ({**tensor(*shape, dtype="float8_e4m3fn"), **scales.get(name, {})} for name in ("k", "v"))
    return {**pair(8, 8, 32, 64, dtype="uint8"), "k_scale": k, "v_scale": v}


INT64_TABLE = {"table": tensor(4, 16, dtype="int64")}
WIDE_TABLE = {"table": tensor(4, 16, strides=(32, 2), dtype="int32")}
HUGE = 1 << 33
OTHER_V = {"strides": (16384, 1024, 128, 1), "v_strides": (20000, 1024, 128, 1)}


def mla(tokens=64, latent=512, rope=64, **more):
    return {"ckv": tensor(8, tokens, latent, **more), "kpe": tensor(8, tokens, rope, **more)}


def fused(tokens=64, width=576, stride=None, **more):
    return {"kv": tensor(8, tokens, width, strides=(stride or tokens * width, width, 1), **more)}


def qv(tokens=64, rope=64, latent=512, **more):
    return {"k": tensor(8, tokens, 1, rope, **more), "v": tensor(8, tokens, 1, latent, **more)}


def state(*shape, strides=None, dtype="float32"):
    return {"state": tensor(*shape, strides=strides, dtype=dtype)}


SQUARE = state(16, 32, 128, 128)
LONG = state(16, 32, 128, 256)
PADDED_SLOT = state(16, 32, 128, 128, strides=(600000, 16384, 128, 1))
PADDED_HEAD = state(16, 32, 128, 128, strides=(32 * 16500, 16500, 128, 1))

# kernel: (arch, legal tensors, legal facts, [(tensors, facts, outcome, rule), ..]); tensors None: the legal ones; the facts
# may name another architecture
CASES = {
    "flash_attention_2": ("any", nhd(256), {}, [
        (nhd(256, dtype="float8_e4m3fn"), {}, "reject", "dtype"),
        ({"k": nhd(256)["k"], "v": nhd(256, dtype="float16")["v"]}, {}, "reject", "K and V dtype"),
        (nhd(64), {}, "reject", "page size"),
        (nhd(256, 320), {}, "reject", "head size"),
        ({"k": nhd(256)["k"], "v": nhd(256, 64)["v"]}, {}, "reject", "K and V shape"),
        (nhd(256, strides=(524288, 2048, 256, 2)), {}, "reject", "innermost stride"),
        ({**nhd(256), **INT64_TABLE}, {}, "reject", "table dtype"),
        ({**nhd(256), **WIDE_TABLE}, {}, "reject", "table stride"),
    ]),
    "vllm_flash_attention_2": ("sm90", nhd(48), {}, [(nhd(24), {}, "reject", "page size")]),
    "flash_attention_3": ("sm90", nhd(7), {}, [
        (nhd(dtype="float32"), {}, "reject", "dtype"),
        ({"k": nhd()["k"], "v": nhd(dtype="float16")["v"]}, {}, "reject", "K and V dtype"),
        (nhd(dim=72, dtype="float8_e4m3fn"), {}, "reject", "head size of fp8"),
        (nhd(dim=100), {}, "reject", "head size"),
        (nhd(dim=512), {}, "reject", "head size limit"),
        ({"k": nhd(16)["k"], "v": nhd(32)["v"]}, {}, "reject", "K and V shape"),
        (nhd(strides=(65536, 2048, 256, 2)), {}, "reject", "innermost stride"),
        ({**nhd(), "k_descale": tensor(4, 8)}, {}, "reject", "descale dtype"),
        ({**nhd(), **INT64_TABLE}, {}, "reject", "table dtype"),
        ({**nhd(), **WIDE_TABLE}, {}, "reject", "table stride"),
    ]),
    "flash_attention_4": ("sm100", nhd(64), {}, [
        (nhd(64, strides=(65543, 1024, 128, 1)), {}, "copy", "16-byte strides"),
        (nhd(64, base=8), {}, "copy", "16-byte base"),
        (nhd(64, strides=(131072, 2048, 256, 2)), {}, "copy", "innermost stride"),
    ]),
    "flashinfer_fa2_prefill": ("any", nhd(3, strides=(4000, 1024, 128, 1), v_strides=(5000, 1024, 128, 1)), {}, [
        (nhd(dtype="float32"), {}, "reject", "dtype"),
        (nhd(dtype="uint8"), {}, "reject", "NVFP4 scales"),
        ({"k": nhd()["k"], "v": nhd(dtype="float16")["v"]}, {}, "reject", "K and V dtype"),
        ({"k": nhd(16)["k"], "v": nhd(32)["v"]}, {}, "reject", "K and V shape"),
        (nhd(strides=(65536, 2048, 256, 2)), {}, "reject", "innermost stride"),
        (nhd(strides=(HUGE, 1024, 128, 1)), {}, "garbage", "32-bit strides"),
        ({**nhd(), "kv_indices": tensor(40, dtype="int64")}, {}, "reject", "table dtype"),
    ]),
    "flashinfer_fa2_decode": ("any", hnd(), {"layout": "HND"}, [(nhd(**OTHER_V), {}, "reject", "K and V strides")]),
    "flashinfer_fa3_prefill": ("sm90", nhd(strides=(16384, 1024, 128, 1), v_strides=(16384, 1024, 136, 1)), {}, [
        (nhd(strides=(32768, 2048, 128, 1), v_strides=(32768, 1024, 128, 1)), {}, "reject", "K and V strides"),
    ]),
    "flashinfer_append": ("any", fp4(), {"layout": "HND"}, [
        (nhd(**OTHER_V), {}, "reject", "K and V strides"),
        (fp4(v={"strides": [4096, 512, 8, 1]}), {"layout": "HND"}, "reject", "scale strides"),
    ]),
    "flashinfer_trtllm_gqa": ("sm100", fp4(), {}, [
        (hnd(dtype="float32"), {}, "reject", "dtype"),
        ({"k": hnd()["k"], "v": hnd(dtype="float16")["v"]}, {}, "reject", "K and V dtype"),
        (hnd(dtype="uint8"), {}, "reject", "NVFP4 scales"),
        (hnd(48), {}, "reject", "page size"),
        ({"k": hnd(32)["k"], "v": hnd(64)["v"]}, {}, "reject", "K and V shape"),
        (hnd(strides=(65536, 8192, 256, 2)), {}, "reject", "innermost stride"),
        (hnd(strides=(32772, 4096, 128, 1)), {}, "reject", "16-byte strides"),
        (hnd(base=8), {}, "reject", "16-byte base"),
        (hnd(strides=(32768, 4096, 128, 1), v_strides=(65536, 4096, 128, 1)), {}, "garbage", "V has K's strides"),
        (fp4(v={"strides": [4096, 256, 8, 1]}), {}, "garbage", "V scales have K's strides"),
        (fp4(k={"strides": [4096, 512, 16, 1]}, v={"strides": [4096, 512, 16, 1]}), {}, "garbage", "dense scale tail"),
        (fp4(), {"layout": "NHD"}, "copy", "head-major NVFP4"),
        (hnd(strides=(HUGE, 4096, 128, 1)), {}, "garbage", "32-bit strides"),
    ]),
    "vllm_trtllm_gqa": ("sm100", hnd(64), {}, [
        (hnd(8), {}, "reject", "page size offered"),
        (hnd(strides=(32768, 128, 1024, 1)), {}, "reject", "head-major block"),
    ]),
    "vllm_triton_unified": ("any", {"kv": tensor(8, 8, 48, 256)}, {}, [
        (nhd(24), {}, "reject", "page size"),
        ({"kv": tensor(8, 8, 48, 256)}, {"format": "gqa_int4_group"}, "garbage", "cells"),
    ]),
    "vllm_reshape_and_cache_flash": ("any", {**nhd(), "slot_mapping": tensor(7, dtype="int64")}, {"padding": -1}, [
        (nhd(**OTHER_V), {}, "garbage", "V has K's strides"),
        ({**nhd(), "slot_mapping": tensor(7, dtype="int32")}, {}, "garbage", "slot_mapping dtype"),
        (None, {"padding": 0}, "garbage", "padding mark"),
    ]),
    "vllm_reshape_and_cache_per_token_head": ("any", nhd(**OTHER_V), {}, [
        ({**nhd(), "slot_mapping": tensor(7, dtype="int32")}, {}, "garbage", "slot_mapping dtype"),
        (None, {"padding": 0}, "garbage", "padding mark"),
    ]),
    "sglang_mha_pool": ("any", pair(1040, 8, 128), {}, [
        (pair(1040, 8, 128, strides=(2048, 128, 1)), {}, "garbage", "dense"),
    ]),
    "torch_sdpa": ("any", pair(2, 8, 33, 128, strides=(8 * 33 * 128, 128, 1024, 1)), {}, [
        (pair(2, 8, 33, 128, strides=(50000, 4224, 128, 1)), {}, "copy", "dense view"),
    ]),
    "flashinfer_fa2_mla": ("any", mla(3), {}, [
        (mla(dtype="float8_e4m3fn"), {}, "reject", "dtype"),
        ({"ckv": mla()["ckv"], "kpe": mla(dtype="float16")["kpe"]}, {}, "reject", "latent and key dtype"),
        (mla(latent=576), {}, "garbage", "latent width"),
        (mla(rope=128), {}, "garbage", "RoPE key width"),
        ({"ckv": mla(64)["ckv"], "kpe": mla(32)["kpe"]}, {}, "garbage", "page size of both"),
        ({**mla(), "kpe": tensor(8, 64, 64, strides=(8192, 128, 2))}, {}, "garbage", "innermost stride"),
        ({**mla(), "kpe": tensor(8, 64, 64, strides=(HUGE, 64, 1))}, {}, "garbage", "32-bit strides"),
        ({**mla(), **INT64_TABLE}, {}, "reject", "table dtype"),
    ]),
    "flashinfer_fa3_mla": ("sm90", mla(3), {}, []),
    "flash_attention_3_qv": ("sm90", qv(7), {}, [
        (qv(dtype="float8_e4m3fn"), {}, "reject", "dtype"),
        ({"k": qv()["k"], "v": qv(dtype="float16")["v"]}, {}, "reject", "K and V dtype"),
        (qv(rope=128), {}, "reject", "RoPE key width"),
        (qv(latent=576), {}, "reject", "latent width"),
        ({"k": qv(64)["k"], "v": qv(32)["v"]}, {}, "reject", "K and V shape"),
        ({**qv(), "k": tensor(8, 64, 1, 64, strides=(8192, 128, 128, 2))}, {}, "reject", "innermost stride"),
        ({**qv(), **INT64_TABLE}, {}, "reject", "table dtype"),
        ({**qv(), **WIDE_TABLE}, {}, "reject", "table stride"),
    ]),
    "vllm_flash_attention_3_mla": ("sm90", qv(48), {}, [(qv(7), {}, "reject", "page size")]),
    "cutlass_mla": ("sm100", {**fused(), "table": tensor(4, 16, dtype="int32")}, {"query_heads": 128}, [
        (fused(width=512), {}, "reject", "row width"),
        (fused(48), {}, "reject", "page size"),
        (None, {"query_heads": 64}, "reject", "query heads"),
        ({**fused(), "table": tensor(4, 15, dtype="int32")}, {}, "reject", "table width"),
        (fused(stride=36928), {}, "garbage", "dense pages"),
    ]),
    "vllm_cutlass_mla": ("sm100", fused(128), {}, [(fused(64), {}, "reject", "page size")]),
    "trtllm_mla": ("sm100", fused(32, stride=20000), {"table_width": 8}, [
        (fused(16), {}, "reject", "page size"),
        (fused(width=640), {}, "reject", "row width"),
        (fused(), {"table_width": 7}, "reject", "table width"),
        ({"kv": tensor(8, 64, 576, strides=(73728, 1152, 2))}, {}, "reject", "innermost stride"),
        (fused(stride=36868), {}, "reject", "16-byte strides"),
        (fused(base=4), {}, "reject", "16-byte base"),
    ]),
    "flashmla_dense": ("sm90", {"kv": tensor(8, 64, 1, 512, strides=(40001, 512, 512, 1))}, {}, [
        ({"kv": tensor(8, 64, 1, 576, dtype="uint8")}, {}, "reject", "dtype"),
        ({"kv": tensor(8, 32, 1, 576)}, {}, "reject", "page size"),
        ({"kv": tensor(8, 64, 1, 656)}, {}, "reject", "row width"),
        ({"kv": tensor(8, 64, 1, 576, strides=(73728, 1152, 1152, 2))}, {}, "reject", "innermost stride"),
        ({"kv": tensor(8, 64, 1, 576, strides=(HUGE, 576, 576, 1))}, {}, "reject", "32-bit strides"),
        ({"kv": tensor(8, 64, 1, 576), **INT64_TABLE}, {}, "reject", "table dtype"),
        ({"kv": tensor(8, 64, 1, 576), **WIDE_TABLE}, {}, "reject", "table stride"),
    ]),
    "flashmla_sparse_v32": ("sm100", {"kv": packed(64, 656, 65 * 656)}, {"dialect": "flashmla", "topk": 2048}, [
        ({"kv": packed(64, 656, dtype="bfloat16")}, {}, "reject", "dtype"),
        ({"kv": packed(64, 640)}, {}, "reject", "row bytes"),
        ({"kv": tensor(8, 64, 1, 656, strides=(43008, 672, 672, 1), dtype="uint8")}, {}, "reject", "row stride"),
        ({"kv": tensor(8, 64, 1, 656, strides=(83968, 656, 656, 2), dtype="uint8")}, {}, "reject", "innermost stride"),
        ({"kv": packed(64, 656, 42000)}, {}, "reject", "page stride"),
        ({"kv": packed(64, 656, base=8)}, {}, "reject", "16-byte base"),
        ({"kv": packed(64, 656, 42648)}, {"arch": "sm90"}, "reject", "16-byte page stride"),
        ({"kv": packed(64, 656, 656 << 24)}, {}, "reject", "32-bit strides"),
        ({"kv": packed(64, 656), "indices": tensor(2, 1, 64, dtype="int64")}, {}, "reject", "index dtype"),
        (None, {"padding": 0}, "garbage", "index padding"),
        ({"kv": packed(64, 656), "indices": tensor(2, 1, 100, dtype="int32")}, {}, "reject", "topk"),
        (None, {"topk": 100}, "reject", "topk"),
        ({"kv": packed(64, 656), "extra_kv": packed(2, 656)}, {}, "reject", "no second cache"),
        (None, {"packing": "planar"}, "garbage", "packing"),
        (None, {"scales": "arbitrary"}, "garbage", "power-of-two scales"),
        (None, {"dialect": "sglang_raw"}, "garbage", "dialect"),
    ]),
    "flashmla_sparse_model1": ("sm100", {"kv": packed(64, 584, 37440), "extra_kv": packed(2, 584, 1728)}, {}, [
        ({"kv": packed(64, 584, 37440, dtype="bfloat16")}, {}, "reject", "dtype"),
        ({"kv": packed(64, 576)}, {}, "reject", "row bytes"),
        ({"kv": tensor(8, 64, 1, 584, strides=(37440, 576, 576, 1), dtype="uint8")}, {}, "reject", "row stride"),
        ({"kv": tensor(8, 64, 1, 584, strides=(74880, 584, 584, 2), dtype="uint8")}, {}, "reject", "innermost stride"),
        ({"kv": packed(64, 584, 37440), "extra_kv": packed(2, 584)}, {}, "reject", "page stride"),
        ({"kv": packed(64, 584, 37440, base=8)}, {}, "reject", "16-byte base"),
        ({"kv": packed(64, 584, 37384)}, {"arch": "sm90"}, "reject", "16-byte page stride"),
        ({"kv": packed(64, 584, 576 << 24)}, {}, "reject", "32-bit strides"),
        ({"kv": packed(64, 584, 37440), "indices": tensor(2, 1, 64, dtype="int64")}, {}, "reject", "index dtype"),
        (None, {"padding": 0}, "garbage", "index padding"),
        (None, {"packing": "row"}, "garbage", "packing"),
    ]),
    "flashinfer_sparse_sm120_v32": ("sm120a", {"kv": packed(3, 656, 2000, one=False)}, {}, [
        ({"kv": packed(64, 656, dtype="int8", one=False)}, {}, "reject", "dtype"),
        ({"kv": packed(64, 584, one=False)}, {}, "reject", "row bytes"),
        ({"kv": tensor(8, 64, 656, strides=(43008, 672, 1), dtype="uint8")}, {}, "reject", "row stride"),
        ({"kv": tensor(8, 64, 656, strides=(83968, 656, 2), dtype="uint8")}, {}, "reject", "innermost stride"),
        (None, {"packing": "footer"}, "garbage", "packing"),
        ({"kv": packed(64, 656), "indices": tensor(2, 64, dtype="int64")}, {}, "reject", "index dtype"),
    ]),
    "flashinfer_sparse_sm120_dsv4": ("sm120", {"kv": packed(64, 584, 40000, one=False)}, {}, [
        ({"kv": packed(64, 584, dtype="int8", one=False)}, {}, "reject", "dtype"),
        ({"kv": packed(64, 656, one=False)}, {}, "reject", "row bytes"),
        ({"kv": tensor(8, 64, 584, strides=(37440, 576, 1), dtype="uint8")}, {}, "reject", "row stride"),
        ({"kv": tensor(8, 64, 584, strides=(74880, 584, 2), dtype="uint8")}, {}, "reject", "innermost stride"),
        ({"kv": packed(32, 584, one=False)}, {}, "reject", "page size of decode"),
        (None, {"packing": "row"}, "garbage", "packing"),
        ({"kv": packed(64, 584), "indices": tensor(2, 64, dtype="int64")}, {}, "reject", "index dtype"),
    ]),
    "trtllm_sparse_dsv4": ("sm100", {"kv": tensor(8, 1, 64, 512)}, {}, [
        ({"kv": tensor(8, 1, 64, 512, dtype="float16")}, {}, "reject", "dtype"),
        ({"kv": tensor(8, 1, 64, 576)}, {}, "reject", "row width"),
        (None, {"scale": 0.5}, "garbage", "unit scale"),
        ({"kv": tensor(8, 1, 64, 512, strides=(33280, 32768, 512, 1))}, {}, "garbage", "dense pages"),
        ({"kv": tensor(8, 1, 64, 512, strides=(33000, 32768, 512, 1))}, {"indices": "remapped"},
         "garbage", "remapped page stride"),
    ]),
    "flashinfer_nvfp4_384": ("sm120", {"kv": tensor(8, 1, 2, 384, dtype="uint8")}, {}, [
        ({"kv": packed(64, 384, dtype="int8")}, {}, "reject", "dtype"),
        ({"kv": packed(64, 360)}, {}, "reject", "row bytes"),
        ({"kv": packed(64, 384, 24584)}, {}, "reject", "16-byte page stride"),
        ({"kv": packed(64, 384, base=8)}, {}, "reject", "16-byte base"),
        (None, {"packing": "row"}, "garbage", "packing"),
    ]),
    "vllm_flashmla": ("sm90", {"kv": tensor(8, 64, 1, 576)}, {}, []),
    "vllm_flashmla_sparse": ("sm90", {"kv": packed(128, 656, 130 * 656)}, {}, [
        ({"kv": packed(96, 656)}, {}, "reject", "page size"),
        ({"kv": packed(128, 656)}, {"arch": "sm100"}, "reject", "page size on sm100"),
        ({"kv": packed(64, 656, 42000)}, {}, "reject", "block stride of whole rows"),
    ]),
    "vllm_sparse_swa": ("any", {"kv": packed(96, 584)}, {}, [({"kv": packed(48, 584)}, {}, "reject", "page size")]),
    "sglang_mla_pool": ("any", {"kv": tensor(1040, 1, 576)}, {}, [
        ({"kv": tensor(1040, 1, 584, dtype="uint8")}, {}, "reject", "row width of bytes"),
        ({"kv": tensor(1040, 1, 512)}, {}, "reject", "row width"),
        ({"kv": tensor(1040, 1, 576, strides=(640, 640, 1))}, {}, "garbage", "dense"),
    ]),
    "sglang_dsv4_pool": ("any", {"kv": tensor(8, 37440, dtype="uint8")}, {"page_size": 64}, [
        ({"kv": tensor(8, 37440, dtype="bfloat16")}, {}, "reject", "dtype"),
        ({"kv": tensor(8, 37376, dtype="uint8")}, {}, "reject", "page bytes"),
        ({"kv": tensor(8, 38016, dtype="uint8")}, {"page_size": 64}, "reject", "page bytes of the rows"),
        ({"kv": tensor(8, 37440, strides=(40000, 1), dtype="uint8")}, {}, "garbage", "dense"),
    ]),
    "vllm_mla_dense_view": ("any", fused(), {}, [(fused(stride=61 * 36864), {}, "garbage", "dense pages")]),
    "deepgemm_paged_mqa_logits_fp8": ("sm90", {"kv": packed(64, 132, 8704)}, {"packing": "footer"}, [
        ({"kv": packed(64, 132, dtype="int8")}, {}, "reject", "dtype"),
        ({"kv": packed(64, 128)}, {}, "reject", "row bytes"),
        ({"kv": tensor(8, 64, 1, 132, strides=(9216, 144, 144, 1), dtype="uint8")}, {}, "reject", "row stride"),
        ({"kv": tensor(8, 64, 1, 132, strides=(16896, 132, 132, 2), dtype="uint8")}, {}, "reject", "innermost stride"),
        ({"kv": packed(32, 132)}, {}, "reject", "page size on sm90"),
        ({"kv": packed(128, 132)}, {"arch": "sm100"}, "reject", "page size"),
        ({"kv": packed(64, 132, 8450)}, {}, "reject", "page stride"),
        (None, {"packing": "row"}, "garbage", "packing"),
        ({"kv": packed(64, 132), **INT64_TABLE}, {}, "reject", "table dtype"),
        ({"kv": packed(64, 132), **WIDE_TABLE}, {}, "reject", "table stride"),
    ]),
    "deepgemm_paged_mqa_logits_fp4": ("sm100", {"kv": packed(32, 68)}, {}, [
        ({"kv": packed(64, 68, dtype="int8")}, {}, "reject", "dtype"),
        ({"kv": packed(64, 132)}, {}, "reject", "row bytes"),
        ({"kv": tensor(8, 64, 1, 68, strides=(5120, 80, 80, 1), dtype="uint8")}, {}, "reject", "row stride"),
        ({"kv": tensor(8, 64, 1, 68, strides=(8704, 68, 68, 2), dtype="uint8")}, {}, "reject", "innermost stride"),
        ({"kv": packed(16, 68)}, {}, "reject", "page size"),
        ({"kv": packed(64, 68, 4354)}, {}, "reject", "page stride"),
        (None, {"packing": "pool_footer"}, "garbage", "packing"),
        ({"kv": packed(64, 68), **INT64_TABLE}, {}, "reject", "table dtype"),
        ({"kv": packed(64, 68), **WIDE_TABLE}, {}, "reject", "table stride"),
    ]),
    "vllm_indexer": ("any", {"kv": packed(64, 132, one=False)}, {"model": "dsv4", "axes_order": "BLHNC"}, [
        ({"kv": packed(32, 132, one=False)}, {}, "reject", "page size"),
        (None, {"model": "dsv4", "axes_order": "LBHNC"}, "reject", "block outermost"),
    ]),
    "sglang_indexer": ("any", {"kv": tensor(8, 4352, dtype="uint8")}, {}, [
        ({"kv": tensor(8, 8448)}, {}, "reject", "dtype"),
        ({"kv": tensor(8, 8512, dtype="uint8")}, {}, "reject", "page bytes"),
        ({"kv": tensor(8, 8448, strides=(9000, 1), dtype="uint8")}, {}, "garbage", "dense"),
    ]),
    "flashinfer_gdn_decode": ("sm90", SQUARE, {"order": "VK", "K": 128, "V": 128}, [
        (state(16, 32, 128, 128, dtype="float16"), {}, "reject", "dtype"),
        (LONG, {"order": "KV"}, "reject", "state shape"),
        (LONG, {"order": "VK", "K": 128, "V": 256}, "reject", "state shape as declared"),
        (SQUARE, {"order": "KV"}, "garbage", "state order"),
        (state(16, 32, 64, 64), {}, "reject", "fp32 sizes"),
        (state(16, 32, 132, 128), {}, "reject", "fp32 V"),
        (state(16, 32, 128, 128, strides=(1 << 20, 1 << 15, 256, 2)), {}, "reject", "innermost stride"),
    ]),
    "flashinfer_gdn_mtp": ("sm90", state(16, 32, 64, 64, dtype="bfloat16"), {"order": "VK"}, []),
    "flashinfer_gdn_decode_nontranspose": ("any", LONG, {"order": "KV", "K": 128, "V": 256}, [
        (LONG, {"order": "VK"}, "reject", "state shape"),
        (LONG, {"order": "KV", "K": 256, "V": 128}, "reject", "state shape as declared"),
        (SQUARE, {"order": "VK"}, "garbage", "state order"),
    ]),
    "flashinfer_gdn_prefill": ("sm90", PADDED_SLOT, {"order": "VK"}, [
        (LONG, {"order": "KV"}, "reject", "state shape"),
        (LONG, {"order": "VK", "K": 128, "V": 256}, "reject", "state shape as declared"),
        (SQUARE, {"order": "KV"}, "garbage", "state order"),
        (PADDED_HEAD, {}, "garbage", "dense slot"),
    ]),
    "fla": ("any", PADDED_SLOT, {"order": "VK"}, [
        (LONG, {"order": "KV"}, "garbage", "state order"),
        (PADDED_HEAD, {}, "garbage", "dense heads"),
    ]),
    "mamba2_selective_state_update": ("any", state(16, 32, 64, 128), {}, [
        (state(16, 32, 64, 128, strides=(262144, 8192, 1, 64)), {}, "reject", "dstate innermost"),
        (state(16, 32, 128, 128), {"order": "NP"}, "garbage", "state order"),
    ]),
    "causal_conv1d_update": ("any", state(16, 1024, 3, strides=(3072, 1, 1024)), {"order": "SD", "kernel": 4}, [
        (state(16, 1024, 2), {"kernel": 4}, "reject", "columns"),
        (state(16, 3, 3), {"order": "SD"}, "garbage", "stored columns first"),
    ]),
    "sglang_conv": ("any", state(16, 1024, 3), {"order": "DS", "kernel": 4}, [
        (state(16, 3, 1024), {"kernel": 4}, "reject", "columns"),
        (state(16, 3, 3), {"order": "SD", "kernel": 4}, "garbage", "state order"),
    ]),
    "sglang_kda_conv": ("any", state(16, 3, 1024), {"order": "SD", "kernel": 4}, [
        (state(16, 1024, 3), {"kernel": 4}, "reject", "columns"),
        (state(16, 3, 3), {"order": "DS", "kernel": 4}, "garbage", "state order"),
    ]),
    "transformers_gdn": ("any", LONG, {"order": "KV"}, [(SQUARE, {"order": "VK"}, "garbage", "state order")]),
    "transformers_conv": ("any", state(16, 1024, 4), {"order": "DS", "kernel": 4}, [
        (state(16, 1024, 3), {"kernel": 4}, "reject", "columns"),
        (state(16, 4, 4), {"order": "SD", "kernel": 4}, "garbage", "state order"),
    ]),
    "page_transfer": ("any", {}, {"stored_bytes": 8448, "block_bytes": 8448, "parts": ["kv", "scales"]}, [
        (None, {"stored_bytes": 4224, "block_bytes": 8448}, "garbage", "whole block"),
        (None, {"stored_parts": ["kv"], "parts": ["kv", "indexer"]}, "garbage", "all parts"),
        (None, {"page_size": 64, "reader_page_size": 32}, "garbage", "same page size"),
        (None, {"dialect": "vllm", "reader_dialect": "flashmla"}, "garbage", "same dialect"),
        (None, {"layout_digest": "a", "reader_layout": "b"}, "garbage", "layout in the key"),
        ({"pages": tensor(8, 64, 576, strides=(40960, 640, 1))}, {}, "reject", "padding outermost"),
    ]),
    "state_transfer": ("any", {}, {"parts": ["x", "B", "C"], "cuts": ["x", "B", "C"]}, [
        (None, {"parts": ["x", "B", "C"], "cuts": ["xBC"]}, "garbage", "cut by parts"),
        (None, {"replicas": [1, 2, 2], "part_replicas": [1, 1, 1]}, "garbage", "replicas by parts"),
    ]),
}  # fmt: skip
