"""Rules for the K/V heads of a layer and the widths of its rows. ``model_types.json`` names these functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpagoda.errors import SchemaError
from kvpagoda.schema.config import Config
from kvpagoda.schema.families.layer_types import HYBRID_SLIDING, SLIDING


@dataclass(frozen=True)
class Heads:
    """The number of K/V heads of a layer, the elements of one head in a K row and in a V row, and the number of query
    heads."""

    number: int
    k_dim: int
    v_dim: int
    queries: int

    def __post_init__(self) -> None:
        if min(self.number, self.k_dim) < 1 or self.v_dim < 0:
            sizes = f"{self.number} K/V heads of {self.k_dim} and {self.v_dim} elements"
            text = f"{sizes}; expected at least 1 of each: hidden_size may be less than num_attention_heads"
            raise SchemaError(text, needed=1, available=min(self.number, self.k_dim))


def grouped(c: Config, layer_type: str) -> Heads:
    """Return ``num_key_value_heads`` heads (if null: as many as query heads) of ``head_dim`` elements.

    If ``head_dim`` is null, it is ``hidden_size`` divided by the query heads, rounded down as the models do.
    """
    queries = c.size("num_attention_heads")
    number = c.size_or("num_key_value_heads", queries)
    if queries % number:
        text = f"num_attention_heads is {queries}; expected a multiple of num_key_value_heads = {number}"
        raise SchemaError(text, field="num_attention_heads", needed=queries, available=number)
    dim = c.size("hidden_size") // queries if c.get("head_dim") is None else c.size("head_dim")
    return Heads(number, dim, dim, queries)


def every_head(c: Config, layer_type: str) -> Heads:
    """Return as many K/V heads as query heads, whatever else the config has."""
    number, dim = c.size("num_attention_heads"), c.ratio("hidden_size", "num_attention_heads")
    return Heads(number, dim, dim, number)


def multi_query(c: Config, layer_type: str) -> Heads:
    """Return one K/V head, ``num_kv_heads``, or as many as query heads. A newer architecture ignores ``multi_query``."""
    every_one = every_head(c, layer_type)
    if c.get("multi_query") and not c.get("new_decoder_architecture"):
        return replace(every_one, number=1)
    return (
        every_one
        if c.get("num_kv_heads") is None
        else replace(every_one, number=every_one.number // c.ratio("num_attention_heads", "num_kv_heads"))
    )


def dbrx(c: Config, layer_type: str) -> Heads:
    """Grouped heads; their number is ``kv_n_heads`` of the table ``attn_config``."""
    return grouped(c.replaced(num_key_value_heads=c.table("attn_config").get("kv_n_heads", 1)), layer_type)


def swa(c: Config, layer_type: str) -> Heads:
    """Grouped heads; those of sliding layers have sizes of their own, the ``swa_`` fields."""
    if layer_type != HYBRID_SLIDING:
        return grouped(c, layer_type)
    own = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return grouped(c.replaced(**{field: c.get(f"swa_{field}") for field in own}), layer_type)


def step(c: Config, layer_type: str) -> Heads:
    """Grouped heads; sliding layers have query heads of their own: ``num_sliding_attention_heads``, or those of the table
    ``attention_other_setting`` in checkpoints."""
    heads, other = grouped(c, layer_type), Config(c.table("attention_other_setting"), {})
    if layer_type != SLIDING:
        return heads
    if c.get("num_sliding_attention_heads") is not None:
        return replace(heads, queries=c.size("num_sliding_attention_heads"))
    return (
        replace(heads, queries=other.size("num_attention_heads")) if other.get("attention_type") == SLIDING else heads
    )


def nemotron_nas(c: Config, layer_type: str) -> Heads:
    """Grouped heads: ``n_heads_in_group`` query heads share one, which each layer's ``block_config`` names."""
    group = Config(Config(c.table("block_config"), {}).table("attention"), {}).size("n_heads_in_group")
    c = c.replaced(n_heads_in_group=group)
    return grouped(c.replaced(num_key_value_heads=c.ratio("num_attention_heads", "n_heads_in_group")), layer_type)


def mimo(c: Config, layer_type: str) -> Heads:
    """Grouped heads; V rows have a width of their own. Sliding layers have twice as many heads of the same sizes; each size
    that the config names in a ``swa_`` field, as checkpoints do, is that field's instead."""
    heads, v_dim = grouped(c, layer_type), c.size("v_head_dim")
    if layer_type != SLIDING:
        return replace(heads, v_dim=v_dim)
    own = grouped(
        c.replaced(
            num_attention_heads=c.size_or("swa_num_attention_heads", heads.queries),
            num_key_value_heads=c.size_or("swa_num_key_value_heads", 2 * heads.number),
            head_dim=c.size_or("swa_head_dim", heads.k_dim),
        ),
        layer_type,
    )
    return replace(own, v_dim=c.size_or("swa_v_head_dim", v_dim))


def zamba(c: Config, layer_type: str) -> Heads:
    """Grouped heads of double width, because attention reads the hidden state and the embedding side by side."""
    dim = 2 * c.size("hidden_size") // c.size("num_attention_heads")
    return grouped(c.replaced(head_dim=c.get("attention_head_dim") or dim), layer_type)


def gemma4(c: Config, layer_type: str) -> Heads:
    """Grouped heads; full layers have wider heads, and fewer if K and V are one projection."""
    if layer_type == SLIDING or "per_layer_config" in c.raw:
        return grouped(c, layer_type)
    number = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
    c = c.replaced(head_dim=c.get("global_head_dim", 512))
    return grouped(c.replaced(num_key_value_heads=number) if number else c, layer_type)


def latent(c: Config, layer_type: str) -> Heads:
    """One head: its K row is the latent, its V row is the RoPE key."""
    return Heads(1, c.size("kv_lora_rank"), c.size("qk_rope_head_dim"), c.size("num_attention_heads"))


def latent_alone(c: Config, layer_type: str) -> Heads:
    """A latent; its RoPE key has no elements in a model without position embeddings."""
    return Heads(1, c.size("kv_lora_rank"), c.size("qk_rope_head_dim", 0), c.size("num_attention_heads"))


def swa_latent(c: Config, layer_type: str) -> Heads:
    """A latent; sliding layers have widths of their own, from ``per_layer_config``, else the ``swa_`` fields."""
    if layer_type != SLIDING or "per_layer_config" in c.raw:
        return latent(c, layer_type)
    rest = c.size("swa_head_dim") - c.size("swa_qk_nope_head_dim")
    queries = c.size("swa_num_attention_heads")
    return Heads(1, c.size("swa_kv_lora_rank"), c.size_or("swa_qk_rope_head_dim", rest), queries)


HeadRule = Callable[[Config, str], Heads]
