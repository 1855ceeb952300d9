"""Writes a tiny random model for mlx-lm: ``FOLDER KIND SEED``. It is run where mlx-lm is."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

BASE: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128, rms_norm_eps=1e-6,
    vocab_size=512, rope_theta=1e4, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(BASE, num_hidden_layers=4),
    "gemma3_text": dict(
        BASE, num_hidden_layers=6, query_pre_attn_scalar=16, sliding_window=64, sliding_window_pattern=6,
        rope_local_base_freq=1e4,
    ),
    "qwen3_next": dict(
        BASE, num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=0, num_experts_per_tok=0, decoder_sparse_step=1,
        shared_expert_intermediate_size=64, mlp_only_layers=[], moe_intermediate_size=64, partial_rotary_factor=0.5,
        norm_topk_prob=True, attention_bias=False, full_attention_interval=4,
    ),
}  # fmt: skip

if __name__ == "__main__":
    folder, kind, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    config = {**CONFIGS[kind], "model_type": kind, "bos_token_id": 1, "eos_token_id": 2}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))

    def drawn(value: mx.array) -> mx.array:
        return mx.random.normal(value.shape) * 0.3 if value.ndim > 1 else value

    weights = dict(tree_flatten(tree_map(drawn, model.parameters())))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
