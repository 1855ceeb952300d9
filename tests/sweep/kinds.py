"""Small float32 models of every layer kind, and the memory of each. Only ``make_cache`` makes caches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvpagoda import Identity, KVCache, Limits, Retention, Schema
from kvpagoda.schema import Attention, Encoding, Growth, IndexKeys, Latent, Layer, LayerKind, Recurrent, Rows, Shared
from kvpagoda.tiers import TierSpec


def schema_of(*layers: LayerKind | tuple[LayerKind, ...]) -> Schema:
    kinds = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
    return Schema(tuple(Layer(i, type(k[0]).__name__, k) for i, k in enumerate(kinds)), "swept", vocab_size=1000)


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MODEL: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=4096,
)  # fmt: skip
DEEPSEEK_V4 = dict(
    MODEL, model_type="deepseek_v4", hidden_size=64, num_hidden_layers=3, head_dim=32, partial_rotary_factor=0.25,
    q_lora_rank=24, layer_types=[SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, sliding_window=8,
    index_n_heads=32, index_head_dim=16, index_topk=4, o_groups=2, o_lora_rank=16, hc_mult=2, hc_sinkhorn_iters=4,
    n_routed_experts=4, n_shared_experts=1, num_hash_layers=2, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
GEMMA = dict(
    MODEL, model_type="gemma3_text", num_hidden_layers=3, sliding_window=8, layer_types=[SLIDING, SLIDING, FULL]
)
QWEN3_NEXT = dict(
    MODEL, model_type="qwen3_next", num_hidden_layers=2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=4, linear_value_head_dim=4, linear_conv_kernel_dim=4, layer_types=[LINEAR, FULL], num_experts=4,
    shared_expert_intermediate_size=32, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
MAMBA = dict(
    model_type="mamba", vocab_size=1000, hidden_size=16, num_hidden_layers=2, state_size=4, conv_kernel=4, expand=2,
    time_step_rank=4,
)  # fmt: skip
HEAD, WINDOW = Attention(1, 4, 4, "float32"), Attention(1, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("conv", (6, 3), "float32"), Rows("recurrent", (2, 4, 4), "float32")))
WIDE = Recurrent(
    (Rows("conv", (6, 3), "bfloat16"), Rows("recurrent", (2, 64), "float32"), Rows("short", (3, 4), "float32"))
)
WIDTH = 4
"""How many tokens windows, rings and states can rewind."""


class Kind(NamedTuple):
    """A model, its memory, and which operations it supports."""

    schema: Callable[[], Schema]
    size: dict[str, Any]
    block_size: int = 4
    rewinds: bool = True
    partial: bool = False
    """Whether a hit may end inside a block, whose shared part is then copied."""
    shares: bool = True
    """Whether it has a group that keeps all tokens, whose blocks requests share."""
    evicts: bool = True
    """Whether memory can be so full that a request must evict cached blocks."""
    format: str | None = None
    """In which checkpoints keep states; None: as requests do."""

    @property
    def has_states(self) -> bool:
        return any(layer.state_rows() for layer in self.schema().layers)


def of_config(config: dict[str, Any], **settings: Any) -> Schema:
    return Schema.from_hf_config(config, dtype="float32", **settings)


KINDS = {
    "full": Kind(lambda: schema_of(HEAD), {"num_blocks": 24}, partial=True),
    "sliding": Kind(
        lambda: schema_of(WINDOW, WINDOW).rewindable(WIDTH), {"num_blocks": 20}, shares=False, evicts=False
    ),
    "gemma": Kind(lambda: of_config(GEMMA, verify_width=WIDTH), {"budget": "16KiB"}),
    "mla": Kind(
        lambda: schema_of(*[Latent(8, 4, "float32", indexer=IndexKeys(4))] * 2), {"num_blocks": 24}, partial=True
    ),
    "qwen3_next": Kind(lambda: of_config(QWEN3_NEXT), {"budget": "24KiB"}, rewinds=False),
    "deepseek_v4": Kind(lambda: of_config(DEEPSEEK_V4, verify_width=WIDTH), {"budget": "420KiB"}, block_size=8),
    "mamba": Kind(lambda: of_config(MAMBA, verify_width=WIDTH), {"budget": "40KiB"}, shares=False, evicts=False),
    "mixed": Kind(
        lambda: schema_of(
            HEAD, WINDOW, (HEAD, STATE), Attention(1, 4, 4, "float32", Growth(chunk=12)), Shared(0)
        ).rewindable(WIDTH),
        {"budget": "16KiB"},
    ),
    "scaled": Kind(
        lambda: schema_of(
            Attention(1, 8, 8, "bfloat16", encoding=Encoding("gqa_int8_head", head_dim=8)),
            Attention(1, 16, 32, "bfloat16", Growth(window=10), Encoding("nvfp4", group=16)),
        ).rewindable(WIDTH),
        {"budget": "16KiB"},
    ),
    "fp8_heads": Kind(
        lambda: of_config(GEMMA, kv_format={"full": "fp8_e5m2", "window": "fp8"}, verify_width=WIDTH),
        {"budget": "4KiB"},
    ),
    "drafted": Kind(  # its draft has a group of its own
        lambda: schema_of(HEAD, HEAD).drafted_by(schema_of(HEAD, WINDOW)).rewindable(WIDTH),
        {"budget": "16KiB"},
        partial=True,
    ),
    "at_rest": Kind(lambda: schema_of(HEAD, WIDE), {"num_blocks": 24}, rewinds=False, format="int8"),
}
SLOTS = 4


def make_cache(kind: str, tiers: tuple[TierSpec, ...] = ()) -> KVCache:
    """Make a cache of model ``kind`` with these tiers. All caches of these tests are made here."""
    size = KINDS[kind].block_size
    return KVCache(
        schemas(kind), device="cpu", max_requests=SLOTS, block_size=size, poison=True, tiers=tiers, identity=Identity("w"),
        limits=Limits(step_tokens=2 * size, step_checkpoints=2),
        retention=Retention(4, 1, checkpoint_format=KINDS[kind].format), **KINDS[kind].size,
    )  # fmt: skip


_SCHEMAS: dict[str, Schema] = {}


def schemas(kind: str) -> Schema:
    return _SCHEMAS.setdefault(kind, _SCHEMAS.get(kind) or KINDS[kind].schema())
