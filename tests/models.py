"""Tiny random models, one for each cache family: small enough for a CPU, with the real mix of layers.

``TINY[name]()`` returns a config, ``tiny_model(name)`` a float32 model in eval mode. Weights are random and so large
that logits differ (standard deviation about 1.4). What models initialise to a constant (norms, sinks, position biases,
expert tables) is random too: otherwise a fault there would not show.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

VOCAB = 128

BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, dtype="float32",
    bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
"""Config fields that most families share."""

MOE: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=32)
MLA: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, **MOE,
)  # fmt: skip
GDN: dict[str, Any] = dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_conv_kernel_dim=4, layer_types=["linear_attention"] * 3 + ["full_attention"], num_experts=4,
    shared_expert_intermediate_size=32, **MOE,
)  # fmt: skip
MAMBA2: dict[str, Any] = dict(
    mamba_n_heads=4, mamba_d_head=24, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    mamba_chunk_size=16,
)  # fmt: skip
ROPES: dict[str, Any] = {
    kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
}
SLIDING, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"

FAMILIES: dict[str, dict[str, Any]] = dict(
    llama={},
    qwen2={},
    qwen3=dict(head_dim=16),
    mistral=dict(sliding_window=8),
    mixtral=dict(num_local_experts=4, num_experts_per_tok=2),
    phi3={},
    glm4=dict(head_dim=16),
    olmo2={},
    stablelm=dict(hidden_size=64),
    gpt2=dict(n_embd=48, n_layer=3, n_head=4, n_positions=512, n_inner=64),
    gpt_neox={},
    gemma2=dict(head_dim=16, sliding_window=8),
    gemma3_text=dict(head_dim=16, sliding_window=8, layer_types=[SLIDING] * 3 + [FULL], rope_parameters=ROPES),
    cohere2=dict(sliding_window=8, layer_types=[SLIDING] * 3 + [FULL], logit_scale=1.0),
    gpt_oss=dict(
        head_dim=16, sliding_window=8, layer_types=[SLIDING, FULL] * 2, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    llama4_text=dict(
        head_dim=16, attention_chunk_size=16, no_rope_layers=[1, 1, 1, 0], num_local_experts=2, num_experts_per_tok=1,
        intermediate_size_mlp=64, moe_layers=[1, 3],
    ),
    deepseek_v2=dict(MLA, topk_method="greedy"),
    deepseek_v3=MLA,
    deepseek_v32=dict(MLA, index_topk=8, index_head_dim=16, index_n_heads=32),
    glm_moe_dsa=dict(MLA, index_topk=8, index_head_dim=16, index_n_heads=32),
    kimi_linear=dict(
        {key: value for key, value in MLA.items() if not key.startswith(("n_", "num_experts"))}, q_lora_rank=None,
        num_experts=4, num_experts_per_token=2, num_shared_experts=1, num_expert_group=1, linear_head_dim=16,
        linear_num_heads=4, linear_conv_kernel_dim=4, layer_types=[LINEAR, LINEAR, LINEAR, FULL],
        model_max_length=4096,
    ),
    qwen3_next=GDN,
    qwen3_5_text=GDN,
    bamba=dict(MAMBA2, attn_layer_indices=[2]),
    granitemoehybrid=dict(
        MAMBA2, layer_types=[LINEAR, LINEAR, FULL, LINEAR], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=32, logits_scaling=1.0,
    ),
    jamba=dict(
        attn_layer_period=4, attn_layer_offset=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4,
        num_experts=4, num_experts_per_tok=2,
    ),
    falcon_h1=dict(MAMBA2, mamba_d_ssm=96, num_hidden_layers=3),
    zamba=dict(
        attn_layer_period=3, attn_layer_offset=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4,
        n_mamba_heads=2, num_hidden_layers=6, num_key_value_heads=4, attention_hidden_size=96,
    ),
    zamba2=dict(
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1, n_mamba_heads=4, chunk_size=16,
        layers_block_type=[LINEAR, "hybrid", LINEAR, "hybrid"], num_mem_blocks=1, adapter_rank=8,
        num_key_value_heads=4,
    ),
    nemotron_h=dict(
        layers_block_type=[LINEAR, "moe", FULL, "mlp", LINEAR], head_dim=16, ssm_state_size=16, mamba_num_heads=4,
        mamba_head_dim=24, n_groups=1, conv_kernel=4, chunk_size=16, n_routed_experts=4,
        moe_shared_expert_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1, **MOE,
    ),
    mamba=dict(state_size=16, conv_kernel=4, expand=2, time_step_rank=4, use_mambapy=False),
    falcon_mamba=dict(state_size=16, conv_kernel=4, expand=2, time_step_rank=4, use_mambapy=False),
    mamba2=dict(num_heads=4, head_dim=24, state_size=16, expand=2, conv_kernel=4, n_groups=1, chunk_size=16),
    lfm2=dict(conv_L_cache=3, full_attn_idxs=[2], block_auto_adjust_ff_dim=False),
    gemma3n_text=dict(
        head_dim=16, sliding_window=8, num_hidden_layers=6, num_kv_shared_layers=2, rope_parameters=ROPES,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING], hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB, altup_num_inputs=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 6,
    ),
    gemma4_text=dict(
        head_dim=16, global_head_dim=32, sliding_window=8, num_hidden_layers=6, num_kv_shared_layers=2,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL], hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
    ),
    deepseek_v4=dict(
        hidden_size=64, num_hidden_layers=5, num_key_value_heads=1, head_dim=32, partial_rotary_factor=0.25,
        q_lora_rank=24, layer_types=[SLIDING, *["compressed_sparse_attention", "heavily_compressed_attention"] * 2],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, sliding_window=8,
        index_n_heads=32, index_head_dim=16, index_topk=4, o_groups=2, o_lora_rank=16, hc_mult=2,
        hc_sinkhorn_iters=4, n_routed_experts=4, n_shared_experts=1, num_hash_layers=2, **MOE,
    ),
)  # fmt: skip
"""model_type -> the config fields that differ from ``BASE``."""


def config_class(name: str) -> Any:
    """Return transformers' class of configs of type ``name``. Skips the test if the installed version has none."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return CONFIG_MAPPING[name]


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the tiny config of family ``name``, with the fields ``changes`` applied last."""
    kwargs = {**BASE, **FAMILIES.get(name, {}), **changes}
    if name == "nemotron_h":
        del kwargs["num_hidden_layers"]
    config: PretrainedConfig = config_class(name)(**kwargs)
    return config


TINY: dict[str, Callable[..., PretrainedConfig]] = {name: functools.partial(tiny_config, name) for name in FAMILIES}
"""Family -> a function that returns its tiny config; keyword arguments change fields."""


def randomise(model: torch.nn.Module) -> None:
    """Make random what initialisation leaves constant: norms, biases, sinks, position biases, hash-router tables."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf in ("A_log", "D", "dt_bias") or "dt_proj" in name:
                continue
            if "sink" in leaf or leaf == "position_bias":
                value.normal_()
            elif value.dim() == 1 or leaf.startswith("hc_") or not math.isfinite(float(value.std())):
                value.add_(0.2 * torch.randn_like(value))
        for name, value in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                value.copy_(torch.stack([torch.randperm(experts)[: value.shape[1]] for _ in range(value.shape[0])]))
            elif name.endswith("e_score_correction_bias"):
                value.normal_(std=0.1)


def tiny_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a random causal language model of family ``name``: float32, in eval mode, with no token that stops it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=torch.float32)
    randomise(model)
    for field in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "encoder_no_repeat_ngram_size",
        "forced_eos_token_id",
    ):
        setattr(model.generation_config, field, None)
    return model.eval()


def break_every(patch: pytest.MonkeyPatch, module: torch.nn.Module, n: int) -> None:
    """Make each ``n``th call of ``module`` raise MemoryError, until ``patch`` is undone."""
    forward, numbers = module.forward, itertools.count(1)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) % n == 0:
            raise MemoryError
        return forward(*args, **kwargs)

    patch.setattr(module, "forward", broken)
