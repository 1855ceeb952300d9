"""The layers of a hybrid model, as ``vllm_hybrid`` and ``tokenspeed_hybrid`` ask for them."""

from __future__ import annotations

from math import prod
from typing import Any

Shape = tuple[int, ...]


def kinds_of(config: dict[str, Any]) -> dict[int, str]:
    """Return "full", "window" or "state" for the number of each layer that has a cache."""
    count, model = config["num_hidden_layers"], config["model_type"]
    if model == "nemotron_h":
        kinds = {"M": "state", "*": "full"}
        return {i: kinds[kind] for i, kind in enumerate(config["hybrid_override_pattern"]) if kind in kinds}
    every = {
        "gemma3_text": config.get("sliding_window_pattern"), "gpt_oss": 2, "qwen3_next": config.get("full_attention_interval"),
    }.get(model)  # fmt: skip
    other = "state" if model == "qwen3_next" else "window" if config.get("sliding_window") else "full"
    return {i: "full" if every and i % every == every - 1 else other for i in range(count)}


def heads_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the number and the width of the heads of keys and values, which are bfloat16."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config["num_key_value_heads"], width


def states_of(config: dict[str, Any]) -> tuple[Shape, Shape]:
    """Return the shapes of the two states of a layer: rows of its convolution, bfloat16, and its matrices, float32."""
    if config["model_type"] == "nemotron_h":
        matrix = config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"]
        channels = prod(matrix[:2]) + 2 * config["n_groups"] * config["ssm_state_size"]
        return (config["conv_kernel"] - 1, channels), matrix
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    key = config["linear_key_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * key + heads * width
    return (config["linear_conv_kernel_dim"] - 1, channels), (heads, width, key)
