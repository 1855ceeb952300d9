"""How much memory is held where it cannot be used, with one budget for all layer kinds and with a fixed split?

A synthetic mix of chats, agents and shared documents is served without memory, at steady pressure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.timing import Options, Row, tell
from kvpagoda.compat.deepseek_v4 import PRESETS
from kvpagoda.replay import serve, synthetic
from kvpagoda.schema import Schema

QUESTION = "How much memory is of no use where it lies?"
GEMMA3_27B = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 16, "sliding_window": 1024, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 8, "sliding_window": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 256,
    "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4, "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any] | None, str]] = [
    ("Gemma-3-27B", GEMMA3_27B, "24GiB"),
    ("gpt-oss-120b", GPT_OSS_120B, "6GiB"),
    ("Qwen3-Next-80B", QWEN3_NEXT_80B, "12GiB"),
    ("DeepSeek-V4 Flash", None, "4GiB"),
]


def schema_of(config: dict[str, Any] | None) -> Schema:
    """Return the schema of a model of ``MODELS`` (None: DeepSeek-V4 Flash) without its limit on positions."""
    schema = PRESETS["deepseek-v4-flash"]("raw") if config is None else Schema.from_hf_config(config)
    return replace(schema, max_positions=None)


def measure(options: Options) -> list[Row]:
    trace, rows = synthetic(60 if options.quick else 250), []
    for name, config, budget in MODELS:
        for shared in (True, False):
            served = serve(
                trace, schema_of(config), budget,
                tokens_per_id=64, max_requests=32, step_tokens=1024, shared=shared,
            )  # fmt: skip
            rows.append(
                {
                    "model": name,
                    "budget": budget,
                    "memory": "one budget" if shared else "fixed split",
                    "unusable_percent": served.unusable_percent,
                    "hit_percent": 100 * served.hit_rate,
                    "mean_running": served.mean_running,
                    "steps": served.steps,
                }
            )
    return rows


if __name__ == "__main__":
    tell("one_budget", QUESTION, measure)
