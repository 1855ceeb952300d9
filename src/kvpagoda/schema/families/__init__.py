"""How each model type spells its cache: one row a family.

A model type is in the table only if a test has compared it with the tensors that transformers really keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvpagoda.schema.config import Config
from kvpagoda.schema.families import heads as h
from kvpagoda.schema.families import layer_types as t
from kvpagoda.schema.families import states as s
from kvpagoda.schema.families.layer_types import CONV, FULL, HYBRID, INDEXED, LINEAR, SLIDING


def own_window(c: Config) -> Any:
    return c.get("sliding_window")


def own_layers(c: Config) -> int:
    return c.size("num_hidden_layers")


@dataclass(frozen=True)
class Family:
    """One way of spelling a cache.

    types       the type of layer i where the config has no ``layer_types``
    known       the layer types that were compared with the real thing; any other is an error
    heads       K/V heads and widths of a layer with attention
    states      what linear, convolution and hybrid layers keep (None: the family has no such layers)
    attention   "heads", "latent" (MLA) or "compressed" (DeepSeek-V4)
    indexed     whether layer i keeps indexer keys, where its type is indexed
    window      tokens of the sliding window
    layers      number of layers that have a cache
    """

    types: t.TypeRule = t.by_fields
    known: tuple[str, ...] = (FULL,)
    heads: h.HeadRule = h.grouped
    states: s.States | None = None
    attention: str = "heads"
    indexed: Callable[[Config, int], bool] = lambda c, i: True
    window: Callable[[Config], Any] = own_window
    layers: Callable[[Config], int] = own_layers


MIXED = (FULL, SLIDING)
WITH_STATES = (FULL, LINEAR)
PLAIN = Family()
WINDOW = Family(known=MIXED)
MHA = Family(t.always(FULL), heads=h.every_head)
MLA = Family(t.always(FULL), attention="latent")
DSA = Family(t.always(INDEXED), (INDEXED,), attention="latent")
QWEN = Family(t.qwen, MIXED)
MAMBA1 = Family(
    t.always(LINEAR), (LINEAR,), states=s.mamba1("state_size", "conv_kernel", "expand", inner="intermediate_size")
)  # fmt: skip
MAMBA2 = s.mamba2(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_d_ssm"
)  # fmt: skip
GDN = Family(t.every("full_attention_interval", 4, miss=LINEAR), WITH_STATES, states=s.gated_delta)


def mixed(period: int | str, default: int = 0, **kwargs: Any) -> Family:
    """Sliding and full layers in turn."""
    return Family(t.every(period, default, **kwargs), MIXED)


def each(names: str, family: Family) -> dict[str, Family]:
    """One family under several names."""
    return dict.fromkeys(names.split(), family)


FAMILIES: dict[str, Family] = {
    **each(
        """apertus arcee aria_text bitnet cohere diffllama ernie4_5 ernie4_5_moe flex_olmo gemma glm glm4 glm4_moe
        glm4v_moe_text glm4v_text granite granitemoe granitemoeshared helium hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 llama minimax_m2
        nanochat nemotron olmo olmo2 olmoe phi qwen3_vl_moe_text qwen3_vl_text seed_oss solar_open
        stablelm""",
        PLAIN,
    ),
    **each(
        """biogpt bloom codegen ctrl gpt2 gpt_neo gpt_neox gpt_neox_japanese gptj mpt opt persimmon xglm""",
        MHA,
    ),
    **each("doge ministral ministral3 mistral mixtral phi3 phimoe starcoder2", WINDOW),
    **each("qwen2 qwen2_5_vl_text qwen2_vl_text qwen3", QWEN),
    "minimax_m3_vl_text": replace(PLAIN, types=t.minimax_m3),
    "dbrx": replace(PLAIN, heads=h.dbrx),
    "falcon": replace(MHA, heads=h.falcon),
    "gpt_bigcode": replace(MHA, heads=h.gpt_bigcode),
    "jetmoe": replace(PLAIN, heads=h.jetmoe),
    # sliding, chunked and mixed
    **each("laguna mellum", Family(t.always(FULL), MIXED)),
    **each("granite_swa granitemoe_swa cwm", mixed(4, at=0)),
    **each("gemma2 gpt_oss vaultgemma", mixed(2)),
    **each("gemma3n_text kolibri1", mixed(5)),
    **each("exaone4 exaone_moe", Family(t.exaone, MIXED)),
    "afmoe": mixed("global_attn_every_n_layers"),
    "beam": Family(t.sixth_and_last, MIXED),
    "cohere2": mixed("sliding_window_pattern", 4),
    "cohere2_moe": Family(t.cohere2_moe, MIXED),
    "dots1": Family(t.dots1, MIXED),
    "flint": Family(t.flint, MIXED),
    "gemma3_text": mixed("sliding_window_pattern", 6),
    **each("gemma4_text gemma4_unified_text", Family(t.sixth_and_last, MIXED, h.gemma4)),
    "llama4_text": Family(t.llama4, (FULL, t.CHUNKED)),
    "mimo_v2_flash": Family(t.mimo, MIXED, h.mimo, window=t.mimo_window),
    "modernbert-decoder": Family(
        t.every("global_attn_every_n_layers", 3, at=0),
        MIXED,
        h.every_head,
        window=lambda c: c.size("local_attention") // 2,
    ),
    "olmo3": mixed(4),
    "qwen2_moe": Family(t.qwen2_moe, MIXED),
    "qwen3_moe": Family(t.qwen3_moe, MIXED),
    "smollm3": Family(t.smollm3, MIXED),
    # latent attention, with an indexer or without
    **each("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 minicpm3 youtu", MLA),
    "longcat_flash": replace(MLA, layers=lambda c: 2 * c.size("num_layers")),
    **each("axk2 deepseek_v32", DSA),
    "glm_moe_dsa": replace(DSA, indexed=t.glm_indexed),
    "hy_v4": replace(DSA, indexed=t.hy_indexed),
    # compressed attention
    "deepseek_v4": Family(t.deepseek_v4, (SLIDING, t.CSA, t.HCA), attention="compressed"),
    # states
    **each("qwen3_5_moe_text qwen3_5_text qwen3_next", GDN),
    "olmo_hybrid": Family(t.olmo_hybrid, WITH_STATES, states=s.olmo_hybrid),
    "kimi_linear": Family(t.kimi_linear, WITH_STATES, states=s.kimi_delta, attention="latent"),
    "bailing_hybrid": Family(
        t.every("layer_group_size", miss=LINEAR), WITH_STATES, states=s.bailing_hybrid, attention="latent"
    ),
    **each("mamba falcon_mamba", MAMBA1),
    "mamba2": Family(
        t.always(LINEAR),
        (LINEAR,),
        states=s.mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand"),
    ),
    "bamba": Family(t.listed("attn_layer_indices"), WITH_STATES, states=MAMBA2),
    "granitemoehybrid": Family(t.always(LINEAR), WITH_STATES, states=MAMBA2),
    "falcon_h1": Family(t.always(HYBRID), (HYBRID,), states=MAMBA2),
    "jamba": Family(t.jamba, WITH_STATES, states=s.mamba1("mamba_d_state", "mamba_d_conv", "mamba_expand")),
    "nemotron_h": Family(
        t.nemotron_h,
        (*WITH_STATES, t.MOE, t.MLP),
        states=s.mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "expand"),
        layers=t.nemotron_h_layers,
    ),
    "zamba": Family(
        t.zamba,
        (LINEAR, HYBRID),
        h.zamba,
        s.mamba1("mamba_d_state", "mamba_d_conv", "mamba_expand", heads="n_mamba_heads"),
    ),
    "zamba2": Family(
        t.zamba2,
        (LINEAR, HYBRID),
        h.zamba,
        s.mamba2("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
    ),
    "zaya": Family(t.always(HYBRID), (HYBRID, t.HYBRID_SLIDING), states=s.zaya),
    "lfm2": Family(t.lfm2, (FULL, CONV), states=s.short_conv),
    "lfm2_moe": Family(t.listed("full_attn_idxs", miss=CONV), (FULL, CONV), states=s.short_conv),
    "lfm3": Family(t.lfm3, (FULL, SLIDING, CONV), states=s.short_conv),
}
"""model_type -> its family."""
