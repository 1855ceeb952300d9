"""Rules for the type of layer i, for configs without ``layer_types``: the same rules as in the models' own code.

Below them the rules for windows, for the number of layers, for the longest context and for indexers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpagoda.errors import SchemaError
from kvpagoda.schema.config import Config

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV, INDEXED, BLOCK_INDEXED = "linear_attention", "conv", "indexed_attention", "minimax_m3_sparse"
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
MOE, MLP, CROSS = "moe", "mlp", "cross_attention"

LEGACY = {"mamba": LINEAR, "attention": FULL, "deepseek_sparse_attention": INDEXED}
"""Older name of a layer type -> its name now."""

LayerTypeRule = Callable[[Config, int], str]


def by_fields(c: Config, i: int) -> str:
    """Sliding layers if the config has a window, chunked if it has a chunk size, else full."""
    if c.get("sliding_window") is not None:
        return SLIDING
    return FULL if c.get("attention_chunk_size") is None else CHUNKED


# ---- functions that make a rule ----


def always(layer_type: str) -> LayerTypeRule:
    """Return a rule: every layer has type ``layer_type``."""
    return lambda c, i: layer_type


def every(
    period: int | str,
    default: int = 0,
    *,
    at: int | str = -1,
    also: Sequence[int] = (),
    hit: str = FULL,
    miss: str = SLIDING,
) -> LayerTypeRule:
    """Return a rule: type ``hit`` on layers ``at``, ``at + period``, ... and on layers ``also``, else ``miss``.

    ``at`` -1: the last layer of each period; -1 in ``also``: the last layer of the model. ``period`` and ``at`` are
    numbers or names of fields. ``default``: the period if that field is null (0: a null field is an error).
    """

    def rule(c: Config, i: int) -> str:
        step = period if isinstance(period, int) else c.size_or(period, default) if default else c.size(period)
        first = at if isinstance(at, int) else c.size(at, 0)
        is_hit = (i - first) % step == 0 or i in also or i - c.size("num_hidden_layers") in also
        return hit if is_hit else miss

    return rule


def listed(field: str, *, hit: str = FULL, miss: str = LINEAR) -> LayerTypeRule:
    """Return a rule: type ``hit`` on the layers that config field ``field`` lists, ``miss`` on the others."""
    return lambda c, i: hit if i in c.indices(field) else miss


def numbered(layers: Sequence[int], *, hit: str, miss: str) -> LayerTypeRule:
    """Return a rule: type ``hit`` on ``layers`` (fixed: those of the released model), else ``miss``."""
    return lambda c, i: hit if i in layers else miss


# ---- rules of one model type or a few ----


def zamba(c: Config, i: int) -> str:
    """Hybrid on layer 2, and later where (i - 3) mod ``attn_layer_period`` is ``attn_layer_offset``; else linear."""
    period, offset = c.size("attn_layer_period"), c.size("attn_layer_offset", 0)
    return HYBRID if i == 2 or (i > 2 and (i - 3) % period == offset) else LINEAR


def dots1(c: Config, i: int) -> str:
    """Sliding from layer ``max_window_layers`` on if the config has a window, else full."""
    return SLIDING if c.get("sliding_window") is not None and i >= c.size("max_window_layers", 0) else FULL


def qwen(c: Config, i: int) -> str:
    """Sliding layers only if ``use_sliding_window`` is set, from layer ``max_window_layers`` on."""
    return dots1(c, i) if c.get("use_sliding_window") else FULL


def qwen3_moe(c: Config, i: int) -> str:
    """As ``by_fields`` if ``use_sliding_window`` is set, else full."""
    return by_fields(c, i) if c.get("use_sliding_window") else FULL


def qwen2_moe(c: Config, i: int) -> str:
    """Sliding on even layers below ``max_window_layers`` if ``use_sliding_window`` is set, else full."""
    return SLIDING if c.get("use_sliding_window") and i % 2 == 0 and i < c.size("max_window_layers", 0) else FULL


def has_rope(c: Config, i: int) -> bool:
    """Return whether layer i has position embeddings.

    ``no_rope_layers`` has a 1 for each layer with embeddings; without it, all have them but the last of each
    ``no_rope_layer_interval`` layers.
    """
    return bool(c.item("no_rope_layers", i) if c.get("no_rope_layers") else (i + 1) % c.size("no_rope_layer_interval"))


def smollm3(c: Config, i: int) -> str:
    """Sliding on layers without position embeddings if a window is set and in use, else full."""
    slides = c.get("use_sliding_window") and c.get("sliding_window") is not None
    return SLIDING if slides and not has_rope(c, i) else FULL


def llama4(c: Config, i: int) -> str:
    """Chunked on layers with position embeddings, else full."""
    return CHUNKED if has_rope(c, i) else FULL


def exaone(c: Config, i: int) -> str:
    """Full on the last layer of each ``sliding_window_pattern``, or on all layers without a window, else sliding.

    A pattern of letters, "LLLG", repeats over the layers, L for sliding; the last layer is full whatever it says.
    """
    pattern = c.get("sliding_window_pattern")
    if c.get("sliding_window") is None:
        return FULL
    if not isinstance(pattern, str):
        return every("sliding_window_pattern")(c, i)
    if not pattern or {*pattern} - {"L", "G"}:
        text = f"sliding_window_pattern is {pattern!r}; expected a number, or letters L and G"
        raise SchemaError(text, field="sliding_window_pattern", needed=pattern)
    return SLIDING if pattern[i % len(pattern)] == "L" and i < c.size("num_hidden_layers") - 1 else FULL


def cohere2_moe(c: Config, i: int) -> str:
    """Full on the last layer of each period. The first ``first_k_dense_replace`` layers have a period of their own."""
    dense = c.size_or("first_k_dense_replace", 0) if c.get("first_k_dense_replace") else 0
    if i < dense:
        return every("prefix_dense_sliding_window_pattern")(c, i)
    return every("sliding_window_pattern")(c, i - dense)


def lfm3(c: Config, i: int) -> str:
    """Full on layers 2, 6, 10, .., sliding on layers 4, 8, 12, .., convolutions on the others."""
    return FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV


def lfm2(c: Config, i: int) -> str:
    """Full on the layers that ``full_attn_idxs`` lists (without the list: on all), convolutions on the others."""
    return FULL if c.get("full_attn_idxs") is None or i in c.indices("full_attn_idxs") else CONV


def kimi_linear(c: Config, i: int) -> str:
    """Full layers are listed, counted from 1, in the table ``linear_attn_config`` of a checkpoint's config."""
    table = Config(c.table("linear_attn_config"), {})
    if table.get("full_attn_layers") is None:
        return FULL if i and i % 4 == 0 else LINEAR
    return FULL if i + 1 in table.indices("full_attn_layers") else LINEAR


def minimax(c: Config, i: int) -> str:
    """Linear are the layers that ``layer_types`` calls so, or has as 0 ``attn_type_list``, the list of checkpoints from
    before it; without both every second layer. The others go by ``by_fields``."""
    if c.get("layer_types") is not None:
        is_linear = c.item("layer_types", i) == LINEAR
    elif c.get("attn_type_list") is not None:
        is_linear = c.item("attn_type_list", i) == 0
    else:
        is_linear = bool(i % 2)
    return LINEAR if is_linear else by_fields(c, i)


def mimo(c: Config, i: int) -> str:
    """Sliding where ``hybrid_layer_pattern`` has 1; without it all layers but the first and every sixth."""
    if c.get("hybrid_layer_pattern") is not None:
        return SLIDING if c.item("hybrid_layer_pattern", i) == 1 else FULL
    return FULL if i == 0 or i % 6 == 5 else SLIDING


def minimax_m3(c: Config, i: int) -> str:
    """Layers with an indexer of blocks of tokens are listed in the table ``sparse_attention_config``."""
    table = Config(c.table("sparse_attention_config"), {})
    is_sparse = table.get("sparse_attention_freq") is not None and table.item("sparse_attention_freq", i)
    return BLOCK_INDEXED if is_sparse else FULL


def nemotron_h(c: Config, i: int) -> str:
    """One letter of ``hybrid_override_pattern`` for each layer."""
    letters = {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP}
    letter = c.item("hybrid_override_pattern", i)
    if letter not in letters:
        text = f"layer {i} of hybrid_override_pattern is {letter!r}; expected one of {', '.join(letters)}"
        raise SchemaError(text, field="hybrid_override_pattern", needed=letter, available=i)
    return letters[letter]


def nemotron_nas(c: Config, i: int) -> str:
    """Full, or no attention where the layer's entry in ``block_configs`` has none (``no_op``) or a linear map instead."""
    found = Config(Config({"layer": c.item("block_configs", i)}, {}).table("layer"), {}).table("attention")
    return MLP if any(found.get(field) is True for field in ("no_op", "replace_with_linear")) else FULL


def deepseek_v4(c: Config, i: int) -> str:
    """``compress_ratios`` has one number per layer, and may have one more for the prediction layer."""
    ratios, layers = c.get("compress_ratios"), c.size("num_hidden_layers")
    if not isinstance(ratios, list | tuple) or len(ratios) not in (layers, layers + 1):
        text = f"compress_ratios is {ratios!r}; expected a list of {layers} or {layers + 1} numbers"
        raise SchemaError(text, field="compress_ratios", needed=layers, available=ratios)
    types = {0: SLIDING, 4: CSA, 128: HCA}
    if ratios[i] not in types:
        text = f"layer {i} has compress ratio {ratios[i]!r}; expected one of {', '.join(map(str, types))}"
        raise SchemaError(text, field="compress_ratios", needed=ratios[i], available=tuple(types))
    return types[ratios[i]]


def deepseek_v41(c: Config, i: int) -> str:
    """Compressed on the layers that ``kv_source_layer_ids`` lists; the others have a window, and may read those entries."""
    return CSA if i in c.indices("kv_source_layer_ids") else SLIDING


def dots3_note(c: Config, i: int) -> str:
    """Without ``layer_types``: sliding layers but for layers 0 and 1 and every fourth layer from 1 on.

    A checkpoint's config calls layers with an indexer "full"; they have one unless ``use_dsa`` is false.
    """
    slides = c.get("use_sliding_window", True) and i >= 2 and i % 4 != 1
    own = (SLIDING if slides else INDEXED) if c.get("layer_types") is None else c.item("layer_types", i)
    has_indexer = c.get("use_dsa", None if "per_layer_config" in c.raw else True)
    return own if own == SLIDING or has_indexer is None else INDEXED if has_indexer else FULL


def qwen4_exp(c: Config, i: int) -> str:
    """A checkpoint's config calls layers with an indexer "full"."""
    listed = c.get("layer_types")
    linear = (i + 1) % c.size_or("full_attention_interval", 4) if listed is None else c.item("layer_types", i) == LINEAR
    return LINEAR if linear else INDEXED


def recurrent_gemma(c: Config, i: int) -> str:
    """``block_types`` repeats over the layers."""
    pattern = c.get("block_types") or ()
    kinds = {"recurrent": LINEAR, "attention": SLIDING}
    if not isinstance(pattern, list | tuple) or not pattern or not kinds.keys() >= {*pattern}:
        text = f"block_types is {pattern!r}; expected a list of {' and '.join(kinds)}"
        raise SchemaError(text, field="block_types", needed=pattern)
    return kinds[pattern[i % len(pattern)]]


def inkling(c: Config, i: int) -> str:
    """Sliding on the layers that ``local_layer_ids`` lists; without the list, on all but every sixth."""
    local = c.indices("local_layer_ids") if c.get("local_layer_ids") is not None else None
    slides = (i + 1) % 6 != 0 if local is None else i in local
    return HYBRID_SLIDING if slides else HYBRID


def lara_mini(c: Config, i: int) -> str:
    """Linear, sliding, linear, full, sliding, and again from the first."""
    return (LINEAR, SLIDING, LINEAR, FULL, SLIDING)[i % 5]


def olmo_hybrid(c: Config, i: int) -> str:
    """Full on every fourth layer, and on the last layer of models with fewer than four, else linear."""
    layers = c.size("num_hidden_layers")
    return FULL if i % 4 == 3 or (layers < 4 and i == layers - 1) else LINEAR


# ---- tokens of the sliding window ----


def sliding_window(c: Config) -> Any:
    """``sliding_window`` as it is."""
    return c.get("sliding_window")


def mimo_window(c: Config) -> int:
    """The field of checkpoints counts only tokens before the current one; ``sliding_window`` counts that one too."""
    if c.get("sliding_window_size") is not None:
        return c.size("sliding_window_size") + 1
    return c.size("sliding_window")


def modernbert_window(c: Config) -> Any:
    """``sliding_window``; without it half of ``local_attention``, which counts the tokens on both sides."""
    window = c.get("sliding_window")
    return c.size("local_attention") // 2 if window is None else window


# ---- how many layers have a cache ----


def hidden_layers(c: Config) -> int:
    """``num_hidden_layers``. Raises SchemaError."""
    return c.size("num_hidden_layers")


def decoder_layers(c: Config) -> int:
    """``num_decoder_layers``, or ``num_hidden_layers`` if that is null. Raises SchemaError."""
    return c.size_or("num_decoder_layers", c.size("num_hidden_layers"))


def blocks(c: Config) -> int:
    """``num_blocks``, or ``num_hidden_layers`` if that is null. Raises SchemaError."""
    return c.size_or("num_blocks", c.size("num_hidden_layers"))


def hrm_layers(c: Config) -> int:
    """One for each run of a layer: of two stacks, the lower one runs ``L_cycles`` times in each of ``H_cycles`` cycles.

    If the config names ``num_layers_per_stack``, its ``num_hidden_layers`` is this number already.
    """
    layers = c.size("num_hidden_layers")
    return layers if c.get("num_layers_per_stack") else layers * c.size("H_cycles") * (c.size("L_cycles") + 1)


def longcat_layers(c: Config) -> int:
    """Two for each layer, which has two attentions."""
    return 2 * c.size("num_layers")


def nemotron_h_layers(c: Config) -> int:
    """The length of the pattern; the config's number of layers is only a copy of it."""
    pattern = c.get("layer_types") or c.get("hybrid_override_pattern")
    return len(pattern) if isinstance(pattern, list | tuple | str) else c.size("num_hidden_layers")


def dory_layers(c: Config) -> int:
    """``num_hidden_layers``, or half of it where ``layer_types`` lists attention and MLP of a layer apart."""
    return c.size("num_hidden_layers") // _blocks_of_a_layer(c)


def _blocks_of_a_layer(c: Config) -> int:
    listed = c.get("layer_types")
    return 2 if isinstance(listed, list | tuple) and MLP in listed else 1


# ---- which layers run several times in a forward pass, and how often: each time but the first they have cache layers of
# their own, after those of all layers ----


def no_loop(c: Config) -> tuple[range, int]:
    """Every layer runs once."""
    return range(0), 1


def inkling_loop(c: Config) -> tuple[range, int]:
    """The layers from ``loop_layer_index_start`` to before ``loop_layer_index_end``, ``loop_num_passes`` times."""
    return range(c.size("loop_layer_index_start"), c.size("loop_layer_index_end")), c.size("loop_num_passes")


def dory_loop(c: Config) -> tuple[range, int]:
    """The layers between the ``n_input_layers`` first and the ``n_output_layers`` last, ``n_recurrent_loops`` times."""
    blocks, end = _blocks_of_a_layer(c), dory_layers(c)
    looped = range(c.size("n_input_layers", 0) // blocks, end - c.size("n_output_layers", 0) // blocks)
    if c.get("n_recurrent_layers") is not None and c.size("n_recurrent_layers", 0) // blocks != len(looped):
        raise SchemaError(
            f"n_recurrent_layers is {c.get('n_recurrent_layers')}; expected {len(looped) * blocks}, the layers between the "
            f"first and the last ones",
            field="n_recurrent_layers", needed=len(looped) * blocks, available=c.get("n_recurrent_layers"),
        )  # fmt: skip
    return looped, c.size("n_recurrent_loops")


# ---- the longest context in tokens, if the config itself names it: a default would be a guess ----


def named_positions(c: Config) -> int | None:
    """``max_position_embeddings``, or None if the config has no such field. Raises SchemaError."""
    own = Config(c.raw, {}, c.fields)
    return None if own.get("max_position_embeddings") is None else own.size("max_position_embeddings")


def positions_after_padding(c: Config) -> int | None:
    """``max_position_embeddings`` less ``pad_token_id + 1``: positions start after that of the padding token."""
    rows = named_positions(c)
    return None if rows is None else rows - c.size("pad_token_id", 0) - 1


# ---- which layers with an indexer keep its keys; the others reuse the selection of an earlier layer ----


def every_layer(c: Config, i: int) -> bool:
    """True for every layer."""
    return True


def glm_indexer(c: Config, i: int) -> bool:
    """By ``indexer_types`` or ``index_topk_pattern``.

    Without them: layers below ``index_skip_topk_offset``, then one in ``index_topk_freq``.
    """
    for field in ("indexer_types", "index_topk_pattern"):
        if c.get(field) is not None:
            return c.item(field, i) in ("full", "F")
    after = max(i + 1 - c.size_or("index_skip_topk_offset", 2), 0)
    return after % c.size_or("index_topk_freq", 1) == 0


def hy_indexer(c: Config, i: int) -> bool:
    """By ``indexer_types``; without it layers 0, 1, 5, 9, .."""
    return i == 0 or (i - 1) % 4 == 0 if c.get("indexer_types") is None else bool(c.item("indexer_types", i) == "full")
