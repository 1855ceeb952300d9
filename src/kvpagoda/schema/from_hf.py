"""``Schema.from_hf_config``: from a transformers config to (label, kinds) of every layer."""

from __future__ import annotations

from typing import Any

from kvpagoda.errors import SchemaError
from kvpagoda.schema.kinds import Attention, LayerKind

LayerSpecs = list[tuple[str, tuple[LayerKind, ...]]]


def read_layers(config: Any, *, dtype: str | None, kv_format: str) -> tuple[str, LayerSpecs, int | None, int | None]:
    """(name, one (label, kinds) per layer, max positions, vocabulary size). Raises SchemaError."""
    get = config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    if get("model_type") != "llama":
        raise SchemaError(f"model type {get('model_type')!r} is not supported")
    dim = get("head_dim") or get("hidden_size") // get("num_attention_heads")
    kind = Attention(get("num_key_value_heads"), dim, dim, dtype or "bfloat16")
    specs: LayerSpecs = [("full_attention", (kind,))] * get("num_hidden_layers")
    return get("model_type"), specs, get("max_position_embeddings"), get("vocab_size")
