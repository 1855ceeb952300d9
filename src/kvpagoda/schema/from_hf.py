"""Build the layers of a schema from a Hugging Face config. ``Schema.from_hf_config`` calls this module.

The type of a layer decides what the layer keeps. The family of the model (a row of ``families/model_types.json``) names
the config fields that hold the sizes. A model type or layer type that is not in that table was not verified and is an
error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpagoda.errors import SchemaError, did_you_mean, shown
from kvpagoda.formats.encoding import RAW
from kvpagoda.schema.config import REQUIRED, Config, fields_of
from kvpagoda.schema.families import Family, known_types, mtp_layers, mtp_letters, refused
from kvpagoda.schema.families import layer_types as t
from kvpagoda.schema.fields import FULL, Growth, dtype_name
from kvpagoda.schema.kinds import Attention, Compressed, IndexKeys, Latent, LayerKind, Recurrent, Shared
from kvpagoda.schema.kv_format import KVFormat, KVFormatNames, as_kernels_read, check_used, formats_by_kind, kind_of
from kvpagoda.schema.layers import Layer

NOT_CAUSAL: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (True,), "use_bidirectional_attention": (True, "all")}
"""Config field -> the values with which a token also attends to later tokens, so that the model is not causal."""

MOST_LAYERS = 10_000
"""No model has as many layers: the deepest that was published has 1,000."""


NO_ATTENTION = (t.LINEAR, t.CONV, t.MOE, t.MLP, t.CROSS)
"""Layer types that keep nothing of attention."""


def read_config(
    config: Any, *, dtype: str | None, kv_format: KVFormatNames
) -> tuple[tuple[Layer, ...], str, int | None, int | None]:
    """Return a ``Schema``'s fields for ``config``: (layers, name, max_positions, vocab_size). Raises SchemaError."""
    formats = formats_by_kind(kv_format)
    name, c, dtype = open_config(config, dtype)
    family: Family = known_types()[name]["family"]
    try:
        types = layer_types_of(c, family, name)
        again = looped(c, family, len(types))
        check_requirements(c, family)
        max_positions = family.max_positions(c)
        vocab_size = None if c.get("vocab_size") is None else c.size("vocab_size")
    except SchemaError as error:
        raise SchemaError(f"{name} config: {error}") from None
    layers = list[Layer]()
    for index, layer_type in enumerate(types):
        try:
            owner = owner_of(c, types, index)
        except SchemaError as error:
            raise SchemaError(f"{name} config, layer {index} ({layer_type}): {error}") from None
        layer = read_layer(c, name, layer_type, index, dtype, formats)
        layers.append(layer if owner is None else replace(layer, kinds=(Shared(owner),)))
    layers += [replace(layers[source], index=len(types) + at) for at, source in enumerate(again)]
    check_used(kv_format, Counter(word for layer in layers for kind in layer.kinds if (word := kind_of(kind))), name)
    return tuple(layers), name, max_positions, vocab_size


def read_mtp(config: Any, *, dtype: str | None, kv_format: KVFormatNames) -> tuple[Layer, ...]:
    """Return the multi-token prediction layers of ``config``, with indices after its own layers.

    They keep what layers of their type of the model itself keep. ``families/mtp.json`` has the model types for which they
    are known. Raises SchemaError for others, and for a config that has no such layers.
    """
    name, c, dtype = open_config(config, dtype)
    rows = mtp_layers()
    if name not in rows:
        raise SchemaError(
            f"the MTP layers of model type {name!r} are not known; they are for {', '.join(rows)}. Give the config of a "
            f"draft model instead"
        )
    row, family, formats = rows[name], known_types()[name]["family"], formats_by_kind(kv_format)
    counted = next((field for field in row["number"] if c.get(field) is not None), row["number"][0])
    try:
        if c.get(counted) is None and "default" not in row:
            raise SchemaError(f"{counted} is missing, so its config names no MTP layers")
        number = row["default"] if c.get(counted) is None else c.size(counted, 0)
        if not 0 < number <= MOST_LAYERS:
            raise SchemaError(f"{counted} is {number}; expected 1 to {MOST_LAYERS:,} MTP layers for a draft")
        types = next((c.get(field) for field in row.get("types_in", ()) if c.get(field)), row["types"])
        if isinstance(types, str):
            types = [mtp_letters().get(letter, letter) for letter in types]
        first = family.num_layers(c)
    except SchemaError as error:
        raise SchemaError(f"{name} config: {error}") from None
    listed = [t.LEGACY.get(each, each) for _ in range(number) for each in types]
    return tuple(read_layer(c, name, layer_type, first + at, dtype, formats) for at, layer_type in enumerate(listed))


def draft_config(config: Any) -> Mapping[str, Any]:
    """Return the fields of the decoder in a draft's config: of an EAGLE head, whose config holds it as ``model`` or
    ``transformer_layer_config``, or ``config``'s own. Raises SchemaError."""
    fields = fields_of(config)
    for name in ("model", "transformer_layer_config"):
        if (inner := fields.get(name)) is not None:
            return fields_of(inner)
    return fields


def read_layer(c: Config, name: str, layer_type: str, index: int, dtype: str, formats: Formats) -> Layer:
    """Return layer ``index`` of type ``layer_type`` of a model of type ``name``. Raises SchemaError."""
    family: Family = known_types()[name]["family"]
    try:
        kinds = layer_kinds(c.at(index), family, layer_type, index, dtype, formats)
        queries = query_heads(c.at(index), family, layer_type)
    except SchemaError as error:
        raise SchemaError(f"{name} config, layer {index} ({layer_type}): {error}") from None
    return Layer(index, layer_type, kinds, queries)


def open_config(config: Any, dtype: str | None) -> tuple[str, Config, str]:
    """Return (model type, config, dtype of the cache) of the text model, also where the config nests several models.

    ``dtype``: the caller's choice; None: the dtype that the config names, else bfloat16. Raises SchemaError.
    """
    raw, known = fields_of(config), known_types()
    nested, name = raw.get("text_config"), raw.get("model_type")
    if isinstance(name, str) and str(name) in refused():
        raise SchemaError(unknown_type(name))
    inner = raw if nested is None else fields_of(nested)
    if nested is not None:
        name = inner.get("model_type") or f"{name}_text"
    elif isinstance(name, str) and str(name) not in known and f"{name}_text" in known:
        name = f"{name}_text"
    if not isinstance(name, str) or str(name) not in known:
        raise SchemaError(unknown_type(name))
    name = str(name)
    for field, values in NOT_CAUSAL.items():
        if isinstance(inner.get(field), bool | str) and inner[field] in values:
            raise SchemaError(
                f"this {name} config is not of a causal decoder ({field} is {inner[field]!r}): it has no cache that grows "
                f"token by token, or not that alone"
            )
    defaults: Mapping[str, Any] = known[name]["defaults"]
    if nested is None:
        defaults = {field: value for field, value in defaults.items() if field not in REQUIRED}
    spellings = (source.get(field) for source in (inner, raw) for field in ("dtype", "torch_dtype"))
    chosen = dtype if dtype is not None else next((found for found in spellings if found is not None), "bfloat16")
    return name, Config({**inner, "model_type": name}, defaults, known[name]["family"].fields), dtype_name(chosen)


def check_requirements(c: Config, family: Family) -> None:
    """Raise SchemaError if a field lacks the value that the family requires to keep the cache that was verified."""
    for field, (value, why) in family.requires.items():
        if c.get(field) != value:
            raise SchemaError(f"{field} is {shown(c.get(field))}; expected {value!r}: {why}")


def unknown_type(name: Any) -> str:
    """Return the error text for a refused model type: the known reason, else known names with a similar spelling."""
    if not isinstance(name, str):
        return f"model_type must name the model family, got {shown(name)}"
    if str(name) in refused():
        return f"model type {name!r} is not supported: {refused()[name]}"
    hint = did_you_mean(name, known_types(), cutoff=0.8)
    why = "its cache was not verified" + (f"; {hint}" if hint else "")
    return f"model type {name!r} is not supported: {why} (docs/models.md lists those that are)"


def layer_types_of(c: Config, family: Family, name: str) -> list[str]:
    """Return the type of every layer: the config's ``layer_types`` if the model reads it, else by the family's rule.

    Raises SchemaError for a list of the wrong length and for types that were not verified for the family, also in a
    list that the model does not read.
    """
    count = family.num_layers(c)
    if count > MOST_LAYERS:
        raise SchemaError(f"num_hidden_layers is {count:,}; expected at most {MOST_LAYERS:,}")
    by_rule, listed = [], c.get("layer_types")
    if listed is None or not family.reads_layer_types:
        by_rule = [family.layer_type(c, index) for index in range(count)]
    if listed is None:
        listed = by_rule
    drafts = "num_nextn_predict_layers"
    if isinstance(listed, list | tuple) and len(listed) > count and c.get(drafts) is not None:
        listed = listed[:count] if len(listed) == count + c.size(drafts, 0) else listed  # those of draft layers follow
    if isinstance(listed, list | tuple) and len(listed) == 2 * count and {*map(str, listed[1::2])} == {t.MLP}:
        listed = listed[::2]  # attention and MLP of a layer apart
    if not isinstance(listed, list | tuple) or len(listed) != count:
        found = f"has {len(listed)} types" if isinstance(listed, list | tuple) else f"is {shown(listed)}"
        raise SchemaError(f"layer_types {found}; expected one for each of num_hidden_layers = {count}")
    listed = [t.LEGACY.get(each, each) if isinstance(each, str) else each for each in listed]
    for index, layer_type in [*enumerate(listed), *enumerate(by_rule)]:
        if layer_type not in family.verified:
            expected = ", ".join(family.verified)
            raise SchemaError(
                f"layer {index} has type {shown(layer_type)}, which was not verified for {name}; expected {expected}"
            )
    return by_rule or listed


def looped(c: Config, family: Family, count: int) -> list[int]:
    """Return the layers of ``count`` that run again in a forward pass, once for each time: what they keep then stands
    after what all keep. Raises SchemaError."""
    layers, passes = family.loop(c)
    if layers.stop > count or len(layers) * (passes - 1) > MOST_LAYERS:
        raise SchemaError(
            f"layers {layers.start} to {layers.stop - 1} run {passes:,} times; expected layers below {count}, which run at "
            f"most {MOST_LAYERS:,} times in all"
        )
    return [*layers] * (passes - 1)


def owner_of(c: Config, types: list[str], index: int) -> int | None:
    """Return the layer whose K/V rows layer ``index`` shares: the last layer of its type before the sharing layers.

    None for a layer with K/V rows of its own. Raises SchemaError if there is no such layer.
    """
    if not c.get("num_kv_shared_layers"):
        return None
    first_shared = len(types) - c.size("num_kv_shared_layers")
    if index < first_shared:
        return None
    owners = [layer for layer in range(first_shared) if types[layer] == types[index]]
    if not owners:
        raise SchemaError(
            f"num_kv_shared_layers is {len(types) - first_shared}; expected a layer of this type before the shared ones"
        )
    return owners[-1]


Formats = Mapping[str, KVFormat]
"""Layer kind (``kv_format.LAYER_KINDS``) -> its format."""


def layer_kinds(
    c: Config, family: Family, layer_type: str, index: int, dtype: str, formats: Formats
) -> tuple[LayerKind, ...]:
    """Return the kinds of layer ``index`` of type ``layer_type``, encoded as ``formats`` say. Raises SchemaError."""
    kinds: list[LayerKind] = []
    if layer_type not in NO_ATTENTION:
        kinds.append(attention(c, family, layer_type, index, dtype, formats))
    if layer_type in (t.LINEAR, t.CONV, t.HYBRID, t.HYBRID_SLIDING) and family.states is not None:
        kinds.append(Recurrent(family.states(c.replaced(layer_type=layer_type, layer=index), dtype)))
    return tuple(kinds)


def query_heads(c: Config, family: Family, layer_type: str) -> int | None:
    """Return the number of query heads of a layer of type ``layer_type``; None without attention. Raises SchemaError."""
    if layer_type in NO_ATTENTION:
        return None
    return c.size("num_attention_heads") if family.attention == "compressed" else family.heads(c, layer_type).queries


def attention(c: Config, family: Family, layer_type: str, index: int, dtype: str, formats: Formats) -> LayerKind:
    """Return the attention kind of one layer: K/V heads, an MLA latent, or compressed entries. Raises SchemaError."""
    if family.attention == "compressed":
        return as_kernels_read(compressed(c, layer_type, index, dtype, formats["compressed"]), formats["compressed"])
    law = FULL
    if layer_type in (t.SLIDING, t.HYBRID_SLIDING):
        law = Growth(window=c.replaced(sliding_window=family.window(c)).size("sliding_window"))
    elif layer_type == t.CHUNKED:
        law = Growth(chunk=c.size("attention_chunk_size"))
    longest = family.max_positions(c)
    if law.span is not None and longest is not None and law.span >= longest:
        law = FULL  # no request is long enough for tokens to leave the window
    has_indexer = layer_type in (t.INDEXED, t.BLOCK_INDEXED) and family.has_indexer(c, index)
    indexer = None
    if has_indexer:
        pool, parts = (1, 1) if family.index_pool is None else (c.size(family.index_pool), family.index_parts)
        indexer = IndexKeys(c.size("index_head_dim"), dtype=family.index_dtype, pool=pool, parts=parts)
    heads = family.heads(c, layer_type)
    if family.attention == "latent":
        packed = formats["latent"]
        indexer = indexer and replace(indexer, encoding=packed.latents)
        return as_kernels_read(Latent(heads.k_dim, heads.v_dim, dtype, law, packed.latents, indexer), packed)
    kind = Attention(heads.number, heads.k_dim, heads.v_dim, dtype, law, indexer=indexer)
    return replace(kind, encoding=formats[law.word].heads_of(heads.k_dim, heads.v_dim))


def compressed(c: Config, layer_type: str, index: int, dtype: str, packed: KVFormat) -> Compressed:
    """Return a DeepSeek-V4 layer. If its entries are encoded, its tails are float32, as the model computes them.

    If the config has ``kv_source_layer_ids`` (DeepSeek-V4.1), only these layers have entries, which later layers read;
    their indexer keys are projected from the entries.
    """
    if c.get("kv_source_layer_ids") is not None:
        if packed.entries != RAW:
            raise SchemaError("kv_format is not 'raw'; packed rows of DeepSeek-V4.1 were not verified")
        ratio = 0 if layer_type == t.SLIDING else c.size_of("compress_ratios", index)
        keys = IndexKeys(c.size("index_head_dim"), projected=True) if ratio else None
        return Compressed(c.size("head_dim"), c.size("sliding_window"), dtype, ratio, keys)
    rates = {t.CSA: c.get("compress_rate_csa", 4), t.HCA: c.get("compress_rate_hca", 128), **c.table("compress_rates")}
    ratio = 0 if layer_type == t.SLIDING else Config(rates, {}).size(layer_type, 2)
    indexer = IndexKeys(c.size("index_head_dim"), packed.index_keys) if layer_type == t.CSA else None
    plain = Compressed(c.size("head_dim"), c.size("sliding_window"), dtype, ratio, indexer, tail_dtype=dtype)
    if packed.entries == RAW:
        return plain
    return replace(plain, dtype="bfloat16", encoding=replace(packed.entries, kept=rope_dim(c)), tail_dtype="float32")


def rope_dim(c: Config) -> int:
    """Return how many elements at the end of a DeepSeek-V4 row carry the position (RoPE)."""
    fraction = c.get("partial_rotary_factor")
    return int(c.size("head_dim") * fraction) if isinstance(fraction, float) else c.size("qk_rope_head_dim")
