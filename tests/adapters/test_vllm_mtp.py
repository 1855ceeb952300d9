"""The bytes of MTP layers are those of the specs that vLLM computes for the same config. Runs where vLLM is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from kvpagoda.schema import Schema
from kvpagoda.schema.presets import presets

BLOCK = 16
TINY: dict[str, Any] = dict(
    hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000, max_position_embeddings=4096,
    num_nextn_predict_layers=2, dtype="bfloat16",
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3ForCausalLM", presets()["deepseek-v3"]["config"]),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", presets()["deepseek-v3.2"]["config"]),
    "glm-4.5": ("Glm4MoeForCausalLM", presets()["glm-4.5"]["config"]),
    "glm-4.5-air": ("Glm4MoeForCausalLM", presets()["glm-4.5-air"]["config"]),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {**presets()["qwen3-next-80b-a3b"]["config"], "num_nextn_predict_layers": 1},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", dict(TINY, model_type="glm4_moe", head_dim=64, num_key_value_heads=2)),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", dict(TINY, model_type="ernie4_5_moe", num_key_value_heads=4)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_mtp_layers_have_the_bytes_of_vllms_specs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    architecture, config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}), "utf-8")
    drafted = ModelConfig(
        model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True, runner="draft", dtype="bfloat16",
        hf_overrides=SpeculativeConfig.hf_config_override, max_model_len=4096,
    )  # fmt: skip
    heads, size = drafted.get_num_kv_heads(ParallelConfig()), drafted.get_head_size()
    kind = MLAAttentionSpec if drafted.use_mla else FullAttentionSpec
    spec = kind(block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)

    layers = Schema.from_hf_config(config, draft="mtp").draft_layers
    assert len(layers) == drafted.hf_config.n_predict
    for layer in layers:
        rows = [rows for rows in layer.block_rows() if rows.name != "index_key"]  # vLLM: a spec of its own
        assert sum(rows.row_nbytes for rows in rows) * BLOCK == spec.page_size_bytes
