"""Small float32 schemas of every layer kind."""

from __future__ import annotations

from typing import Any

from kvpagoda.schema import (
    Attention,
    Encoding,
    Growth,
    IndexKeys,
    Latent,
    Layer,
    LayerKind,
    Recurrent,
    Rows,
    Schema,
    Shared,
)

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_BASE: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096,
)  # fmt: skip
_MOE: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=32)
_GEMMA: dict[str, Any] = dict(
    _BASE, model_type="gemma3_text", head_dim=8, num_key_value_heads=1, sliding_window=8,
    layer_types=[_SLIDING] * 3 + [_FULL],
)  # fmt: skip
_QWEN3_NEXT: dict[str, Any] = dict(
    _BASE, **_MOE, model_type="qwen3_next", head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=4, linear_value_head_dim=4, linear_conv_kernel_dim=4,
    layer_types=[_LINEAR] * 3 + [_FULL], num_experts=4, shared_expert_intermediate_size=32,
)  # fmt: skip
_DEEPSEEK_V4: dict[str, Any] = dict(
    _BASE, **_MOE, model_type="deepseek_v4", num_hidden_layers=3, num_key_value_heads=1, head_dim=16,
    partial_rotary_factor=0.25, q_lora_rank=24,
    layer_types=[_SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, sliding_window=8,
    index_n_heads=32, index_head_dim=8, index_topk=4, o_groups=2, o_lora_rank=16, hc_mult=2, hc_sinkhorn_iters=4,
    n_routed_experts=4, n_shared_experts=1, num_hash_layers=2,
)  # fmt: skip
_MAMBA: dict[str, Any] = dict(
    model_type="mamba", vocab_size=1000, hidden_size=16, num_hidden_layers=2, state_size=4, conv_kernel=4, expand=2,
    time_step_rank=4,
)  # fmt: skip


def _schema_of(*kinds: LayerKind | tuple[LayerKind, ...]) -> Schema:
    layers = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    return Schema(tuple(Layer(i, type(k[0]).__name__, k) for i, k in enumerate(layers)), "random", vocab_size=1000)


_ATTENTION, _WINDOW = Attention(1, 4, 4, "float32"), Attention(1, 4, 4, "float32", Growth(window=10))
_TENSOR, _INLINE = Encoding("fp8_e4m3", scale=0.02), Encoding("int8")
_PACKED = Encoding("gqa_int8_head", head_dim=4)
_STATES = Recurrent((Rows("conv", (6, 3), "float32"), Rows("recurrent", (2, 4, 4), "float32")))
_WIDE = Recurrent(
    (Rows("conv", (6, 3), "float32"), Rows("recurrent", (2, 64), "float32"), Rows("short", (4, 24), "float32"))
)
_SCHEMAS = {
    "full": _schema_of(_ATTENTION),
    "sliding": _schema_of(_WINDOW, _WINDOW),
    "gemma": Schema.from_hf_config(_GEMMA, dtype="float32"),
    "mla": _schema_of(Latent(8, 4, "float32", indexer=IndexKeys(4)), Latent(8, 4, "float32", indexer=IndexKeys(4))),
    "pooled": _schema_of(
        Latent(8, 0, "float32", indexer=IndexKeys(4, pool=4, parts=2)),
        Attention(1, 4, 4, "float32", indexer=IndexKeys(4, pool=2)), _STATES,
    ),
    "qwen3_next": Schema.from_hf_config(_QWEN3_NEXT, dtype="float32"),
    "deepseek_v4": Schema.from_hf_config(_DEEPSEEK_V4, dtype="float32"),
    "mamba": Schema.from_hf_config(_MAMBA, dtype="float32"),
    "mixed": _schema_of(
        Attention(2, 4, 4, "float32"), _WINDOW, (Attention(2, 4, 4, "float32"), _STATES),
        Attention(1, 4, 4, "float32", Growth(chunk=12)), Shared(0), Shared(1),
    ),
    "scaled": _schema_of(
        Attention(1, 8, 8, "bfloat16", encoding=Encoding("gqa_fp8_head", head_dim=8)),
        Attention(1, 32, 32, "bfloat16", encoding=Encoding("gqa_int4_group", head_dim=32)),
        Attention(1, 32, 64, "bfloat16", encoding=Encoding("mxfp4", group=32)),
        Attention(2, 20, 12, "float32", Growth(window=10), Encoding("gqa_int8_head")),
        Attention(2, 32, 32, "bfloat16", Growth(window=10), Encoding("gqa_nvfp4")),
        Attention(2, 16, 32, "bfloat16", Growth(window=10), Encoding("nvfp4", group=16)),
        Attention(1, 8, 4, "float32", Growth(chunk=12), Encoding("int8")),
    ),
    "fp8_heads": _schema_of(
        Attention(2, 4, 4, "float32", encoding=_TENSOR, v_encoding=_TENSOR.with_scale(0.5)),
        Attention(1, 4, 4, "float32", Growth(window=10), Encoding("fp8_e5m2")), Shared(0),
    ),
    "scaled_heads": _schema_of(
        Attention(2, 4, 4, "float32", encoding=_INLINE), Attention(1, 4, 4, "bfloat16", Growth(window=10), _PACKED),
        (Attention(2, 4, 4, "float32", encoding=_TENSOR), _STATES), _ATTENTION, Shared(1),
    ),
    "drafted": _schema_of(_WINDOW, _WINDOW).drafted_by(  # both groups of the draft are optional
        _schema_of(_ATTENTION, Attention(1, 4, 4, "float32", Growth(window=7)))
    ),
    "drafted_full": _schema_of(_ATTENTION, _ATTENTION).drafted_by(_schema_of(Attention(2, 4, 4, "float32"), _WINDOW)),
    "wide": _schema_of(_ATTENTION, _WINDOW, _WIDE),  # checkpoints at rest are codes of 8 bits with scales
}  # fmt: skip
SCHEMA_NAMES = tuple(_SCHEMAS)
RINGS_BESIDE_STATES = ("pooled",)


def schema_named(name: str, verify_width: int = 0) -> Schema:
    """Return the schema of that name, whose rings, windows and states can rewind ``verify_width`` tokens: all but one that has
    rings beside states."""
    return _SCHEMAS[name].rewindable(0 if name in RINGS_BESIDE_STATES else verify_width)


def draft_width(schema: Schema) -> int:
    """Return how many tokens of a step may stay uncommitted: as many as every state can rewind, at most 4."""
    return min((layer.rewinds for layer in schema.layers if layer.rewinds is not None), default=4)


def rewind_width(schema: Schema) -> int | None:
    """Return how many of the newest tokens every layer can rewind; None: any number."""
    widths = [layer.rewinds for layer in schema.layers if layer.rewinds is not None]
    widths += [layer.growth.slack for layer in schema.layers if layer.growth is not None and layer.growth.is_bounded]
    return min(widths, default=None)
