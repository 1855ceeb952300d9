"""Tiny configs of the families outside ``models.TINY``: the fields that differ from ``models.BASE``."""

from __future__ import annotations

from typing import Any

from models import CONV, FULL, GDN, LINEAR, MLA, MOE, ROPES, SLIDING

EXPERTS = dict(
    num_local_experts=4, num_experts=4, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, **MOE
)  # fmt: skip
MLA_DIMS = {field: value for field, value in MLA.items() if not field.startswith("first_k")}
SLIDES = dict(sliding_window=8, head_dim=12)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=1)
INDEXER = dict(index_topk=8, index_head_dim=16, index_n_heads=32)


def mrope(*section: int) -> dict[str, Any]:
    """Return rotary parameters with one section each for time, height and width."""
    return dict(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section})


def each(names: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the same ``changes`` for each of the ``names``, which blanks separate."""
    return {name: dict(changes) for name in names.split()}


INKLING: dict[str, Any] = dict(
    head_dim=12, swa_num_attention_heads=6, swa_num_key_value_heads=3, swa_head_dim=8, sliding_window_size=8,
    d_rel=4, rel_extent=12, conv_kernel_size=3, **EXPERTS,
)  # fmt: skip
BERT = dict(is_decoder=True, pad_token_id=0, hidden_dropout_prob=0.0)
BART = dict(
    d_model=48, decoder_layers=4, decoder_attention_heads=4, decoder_ffn_dim=64, encoder_layers=4,
    encoder_attention_heads=2, encoder_ffn_dim=32, init_std=0.2, is_encoder_decoder=False, is_decoder=True,
    pad_token_id=0, decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    **each(
        """bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm
        roformer xlm-roberta xlm-roberta-xl""",
        **BERT,
    ),
    **each("bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr", **BART),
    "big_bird": dict(BERT, attention_type="original_full"),
    "roc_bert": dict(BERT, enable_pronunciation=False, enable_shape=False),
    "whisper": dict(BART, max_target_positions=512, num_mel_bins=8, max_source_positions=10),
    "xmod": dict(BERT, default_language="en_XX"),
}  # fmt: skip
"""Models that are decoders if their config says so: the BERT family, and the decoders of encoder-decoder models."""

MORE: dict[str, dict[str, Any]] = {
    **DECODERS,
    **each(
        """apertus apertus1p5_text arcee bitnet cohere diffllama ernie4_5 exaone gemma glm granite helium
        hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 nanochat nemotron olmo phi qwen3_vl_text seed_oss""",
        head_dim=12,
    ),
    **each(
        """aria_text ernie4_5_moe flex_olmo glm4_moe granitemoe granitemoeshared hunyuan_v1_moe hy_v3 minimax_m2
        olmoe qwen3_vl_moe_text sarvam_moe solar_open""",
        head_dim=12,
        **EXPERTS,
    ),
    **each("biogpt bloom falcon gpt_neox_japanese persimmon"),
    **each("doge exaone4 granite_swa ministral ministral3 olmo3 smollm3 starcoder2 vaultgemma", **SLIDES),
    **each("cohere2_moe exaone_moe flint granitemoe_swa mimo_v2_flash phimoe", **EXPERTS, **SLIDES),
    **each("laguna mellum", **EXPERTS, **SLIDES, layer_types=[SLIDING, FULL] * 2, rope_parameters=ROPES),
    **each(
        "qwen2_5_vl_text qwen2_vl_text", **mrope(2, 2, 2), use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    **each("axk1 glm4_moe_lite sarvam_mla youtu", **MLA_DIMS),
    "afmoe": dict(EXPERTS, **SLIDES, num_dense_layers=1, num_shared_experts=1),
    "axk2": dict(MLA_DIMS, **INDEXER),
    "bailing_hybrid": dict(MLA_DIMS, num_experts=4, num_shared_experts=1, head_dim=16, layer_group_size=4),
    "beam": dict(EXPERTS, **SLIDES, num_hidden_layers=7, rope_parameters=ROPES),
    "codegen": dict(rotary_dim=8, n_embd=48, n_layer=3, n_head=4),
    "ctrl": dict(n_embd=48, n_layer=3, n_head=4, dff=64),
    "cwm": dict(SLIDES, **TOKENS, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
    "dbrx": dict(
        d_model=48, n_layers=3, n_heads=4, attn_config=dict(kv_n_heads=2, rope_theta=10_000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": dict(EXPERTS, **SLIDES, max_window_layers=2, first_k_dense_replace=1),
    "gemma4_unified_text": dict(
        head_dim=16, global_head_dim=32, sliding_window=8, layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "glm4v_moe_text": dict(EXPERTS, **mrope(2, 1, 1), head_dim=16),
    "glm4v_text": mrope(2, 2, 2),
    "gpt_bigcode": dict(n_embd=48, n_layer=3, n_head=4, n_inner=64),
    "gpt_neo": dict(num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=8),
    "gptj": dict(rotary_dim=8, n_embd=48, n_layer=3, n_head=4),
    "hy_v4": dict(MLA_DIMS, **INDEXER),
    "hy_v4_vl_text": dict(MLA_DIMS, **INDEXER, **mrope(2, 1, 1)),
    "cohere_compass_text": dict(sliding_window=8, layer_types=[SLIDING, FULL] * 2, logit_scale=1.0, rope_parameters=ROPES),
    "dots3_note_text": dict(
        MLA_DIMS, **INDEXER, layer_types=["indexed_attention", SLIDING] * 2, sliding_window=8, swa_num_attention_heads=2,
        swa_num_key_value_heads=2, swa_q_lora_rank=20, swa_kv_lora_rank=28, swa_head_dim=22, swa_qk_nope_head_dim=16,
        swa_v_head_dim=12, head_dim=24, shared_experts_intermediate_size=32, n_routed_experts=4,
    ),
    "dory": dict(
        SLIDES, layer_types=[SLIDING, SLIDING, FULL, SLIDING], n_input_layers=1, n_output_layers=1, n_recurrent_loops=3
    ),
    "emu3_text_model": TOKENS,
    "git": dict(pad_token_id=0, vision_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
    "hrm_text": dict(head_dim=12, H_cycles=2, L_cycles=2, num_hidden_layers=1),
    "inkling2_text": dict(
        INKLING, layer_types=["hybrid_sliding", "hybrid"] * 2, unpadded_vocab_size=128, n_layers_per_attn_res_block=2
    ),
    "inkling2_loop_text": dict(
        INKLING, num_hidden_layers=6, layer_types=["hybrid_sliding", "hybrid"] * 3, unpadded_vocab_size=128,
        n_layers_per_attn_res_block=2, loop_layer_index_start=2, loop_layer_index_end=4, loop_gate_rank=8,
    ),
    "inkling_text": dict(INKLING, local_layer_ids=[0, 2], mlp_layer_types=["dense", "sparse"] * 2),
    "minimax": dict(EXPERTS, block_size=8, layer_types=[LINEAR, FULL] * 2),
    "minimax_m3_vl_text": dict(
        EXPERTS, head_dim=12, rotary_dim=4, layer_types=[FULL, "minimax_m3_sparse"] * 2, index_n_heads=2, index_head_dim=8,
        index_block_size=4, index_topk_blocks=3, index_local_blocks=1,
    ),
    "mllama_text_model": dict(TOKENS, cross_attention_layers=[1]),
    "moshi": dict(ffn_dim=64, sliding_window=8),
    "phi4_multimodal": dict(
        sliding_window=8, vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
        audio_config=dict(
            hidden_size=16, intermediate_size=16, num_blocks=1, num_attention_heads=2, ext_pw_out_channel=16,
            depthwise_separable_out_channel=16, nemo_conv_channels=16,
        ),
    ),
    "recurrent_gemma": dict(attention_window_size=8, block_types=["recurrent", "attention"], lru_width=40),
    "jetmoe": dict(kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    "kolibri1": dict(EXPERTS, **SLIDES, num_hidden_layers=5),
    "lara_mini": dict(GDN, sliding_window=8, layer_types=[LINEAR, SLIDING, LINEAR, FULL]),
    "lfm2_moe": dict(EXPERTS, layer_types=[CONV, CONV, FULL, CONV], conv_L_cache=3, num_dense_layers=1),
    "lfm3": dict(SLIDES, num_hidden_layers=6, rope_parameters=ROPES),
    "longcat_flash": dict(
        MLA_DIMS, num_layers=2, ffn_hidden_size=64, expert_ffn_hidden_size=32, moe_topk=2, zero_expert_num=2, head_dim=8
    ),
    "minicpm3": dict(MLA_DIMS, head_dim=8),
    "modernbert-decoder": dict(TOKENS, local_attention=16, num_hidden_layers=4, cls_token_id=1, sep_token_id=1),
    "mpt": dict(d_model=48, n_layers=3, n_heads=4),
    "olmo_hybrid": dict(head_dim=12, linear_conv_kernel_dim=4),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=48),
    "qwen2_moe": dict(
        EXPERTS, sliding_window=8, use_sliding_window=True, max_window_layers=2, shared_expert_intermediate_size=32
    ),
    "qwen3_5_moe_text": GDN,
    "qwen4_exp_text": dict(
        GDN, num_hidden_layers=3, layer_types=[LINEAR, LINEAR, "indexed_attention"], hc_count=2, hc_lowrank=8,
        ple_layer_ids=[2], ple_embed_dim=32, ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=64, eos_token_id=1,
        indexer_n_heads=32, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
    ),
    "qwen3_moe": dict(EXPERTS, **SLIDES, use_sliding_window=True),
    "rwkv": dict(attention_hidden_size=48, rescale_every=2),
    "xglm": dict(d_model=48, num_layers=3, attention_heads=4, ffn_dim=64),
    "xlstm": dict(num_blocks=4, num_heads=4, chunk_size=16),
    "zaya": dict(
        num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32, head_dim=16, router_hidden_size=16,
        sliding_window=8, layer_types=["hybrid", "hybrid_sliding"] * 2, cca_time0=2, cca_time1=3,
    ),
}  # fmt: skip

VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)  # fmt: skip
NEWEST = frozenset(
    """apertus1p5_text dory exaone hy_v4_vl_text inkling2_loop_text lara_mini sarvam_mla sarvam_moe""".split()
)
"""Types that transformers has from 5.24 on: skipped where it is older."""
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "dots3_note": (
        "dots3_note_text",
        dict(
            vision_config=dict(VISION, adapter_in_dim=16, adapter_out_dim=48, mlp_layer_types=["dense"]),
            audio_config=dict(VISION, adapter_input_size=16, adapter_out_dim=48),
        ),
    ),
    "emu3": ("emu3_text_model", {}),
    "fuyu": ("persimmon", dict(num_hidden_layers=1, hidden_size=48)),
    "gemma3": ("gemma3_text", dict(vision_config=VISION)),
    "gemma4": ("gemma4_text", dict(vision_config=VISION)),
    "gemma4_unified": ("gemma4_unified_text", {}),
    "got_ocr2": (
        "qwen2",
        dict(vision_config=dict(hidden_size=16, output_channels=16, num_hidden_layers=1, num_attention_heads=2,
                                image_size=32, patch_size=16, mlp_dim=16, global_attn_indexes=[0])),
    ),
    "llama4": ("llama4_text", {}),
    "mllama": ("mllama_text_model", {}),
    "moss_transcribe_diarize": (
        "qwen3",
        dict(audio_config=dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16)),
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen4_exp": ("qwen4_exp_text", {}),
}  # fmt: skip
"""Multimodal types that transformers builds as causal language models -> (the type of their text part, the fields that
make the other parts small)."""
