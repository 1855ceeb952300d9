"""Build the layers of a schema from a Hugging Face config. ``Schema.from_hf_config`` calls this module.

The type of a layer decides what the layer keeps. The family of the model (a row of ``families/model_types.json``) names
the config fields that hold the sizes. A model type or layer type that is not in that table was not verified and is an
error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpagoda.errors import SchemaError, did_you_mean, shown
from kvpagoda.formats.encoding import RAW
from kvpagoda.schema.config import REQUIRED, Config, fields_of
from kvpagoda.schema.families import (
    Family,
    known_types,
    mtp_layers,
    mtp_letters,
    mtp_refused,
    other_names,
    refused,
)
from kvpagoda.schema.families import layer_types as t
from kvpagoda.schema.fields import FULL, Growth, dtype_name
from kvpagoda.schema.kinds import Attention, Compressed, IndexKeys, Latent, LayerKind, Recurrent, Shared
from kvpagoda.schema.kv_format import KVFormat, KVFormatNames, as_kernels_read, check_used, formats_by_kind, kind_of
from kvpagoda.schema.kv_scheme import kv_scheme
from kvpagoda.schema.layers import Layer

NOT_CAUSAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (True, "all"),
    "is_causal": (False,),
    "attn_config.prefix_lm": (True,),
}
"""Config field -> the values with which a token also attends to later tokens, so that the model is not causal. They count on
every level of a nested config. ("vision": the tokens of one image, which a request has all or none of.)"""

ENCODER = {"is_encoder_decoder": (True,)}
"""The same for models with an encoder, which a family must know."""

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields in which the config of a multimodal model holds that of its text, perhaps one inside the other."""

LAYER_FIELDS = {
    "num_attention_heads_per_layer": "num_attention_heads",
    "num_key_value_heads_per_layer": "num_key_value_heads",
    "attn_type_list": "",
    "block_configs": "",
    "use_cla": "",
}
"""Fields of published configs with which layers differ from one another or read the rows of others -> the field that says
the same for all layers; "" if none does. What a family does not read is refused, not passed over."""

MOST_LAYERS = 10_000
"""No model has as many layers: the deepest that was published has 1,000."""


NO_ATTENTION = (t.LINEAR, t.CONV, t.MOE, t.MLP, t.CROSS)
"""Layer types that keep nothing of attention."""


def read_config(
    config: Any, *, dtype: str | None, kv_format: KVFormatNames
) -> tuple[tuple[Layer, ...], str, int | None, int | None, str | None, int | None]:
    """Return a ``Schema``'s fields for ``config``: (layers, name, max_positions, vocab_size, kv_scheme, encoder_positions).

    Raises SchemaError."""
    kv_format, scheme = format_of(config, kv_format)
    formats = formats_by_kind(kv_format)
    name, c, dtype = open_config(config, dtype)
    family: Family = known_types()[name]["family"]
    try:
        types = layer_types_of(c, family, name)
        again = looped(c, family, len(types))
        check_requirements(c, family)
        max_positions = family.max_positions(c)
        of_encoder = None if family.encoder is None else encoder_positions(c, family.encoder)
        vocab_size = None if c.get("vocab_size") is None else c.size("vocab_size")
    except SchemaError as error:
        raise error.within(f"{name} config") from None
    layers = list[Layer]()
    for index, layer_type in enumerate(types):
        try:
            owner = owner_of(c, types, index)
        except SchemaError as error:
            raise error.within(f"{name} config, layer {index} ({layer_type})") from None
        layer = read_layer(c, family, name, layer_type, index, dtype, formats)
        layers.append(layer if owner is None else replace(layer, kinds=(Shared(owner),)))
    layers += [replace(layers[source], index=len(types) + at) for at, source in enumerate(again)]
    if scheme is None:
        check_used(
            kv_format, Counter(word for layer in layers for kind in layer.kinds if (word := kind_of(kind))), name
        )
    return tuple(layers), name, max_positions, vocab_size, scheme, of_encoder


def format_of(config: Any, kv_format: KVFormatNames) -> tuple[KVFormatNames, str | None]:
    """Return ``kv_format`` and None; for "auto" the format that ``config`` says, and what it says, see ``kv_scheme``."""
    return kv_scheme(levels_of(config)) if isinstance(kv_format, str) and kv_format == "auto" else (kv_format, None)


def read_mtp(config: Any, *, dtype: str | None, kv_format: KVFormatNames) -> tuple[Layer, ...]:
    """Return the multi-token prediction layers of ``config``, with indices after its own layers.

    They keep what layers of their type of the model itself keep. ``families/mtp.json`` has the model types for which they
    are known. Raises SchemaError for others, and for a config that has no such layers.
    """
    name, c, dtype = open_config(config, dtype)
    rows = mtp_layers()
    if name in mtp_refused():
        text = f"the MTP layers of model type {name!r} are not supported: {mtp_refused()[name]}"
        raise SchemaError(text, needed=name)
    if name not in rows:
        raise SchemaError(
            f"the MTP layers of model type {name!r} are not known; they are for {', '.join(rows)}. Give the config of a "
            f"draft model instead",
            needed=name, available=tuple(rows),
        )  # fmt: skip
    row, family = rows[name], known_types()[name]["family"]
    formats = formats_by_kind(format_of(config, kv_format)[0])
    counted = next((field for field in row["number"] if c.get(field) is not None), row["number"][0])
    try:
        if c.get(counted) is None and "default" not in row:
            raise SchemaError(f"{counted} is missing, so its config names no MTP layers", field=counted)
        number = row["default"] if c.get(counted) is None else c.size(counted, 0)
        if not 0 < number <= MOST_LAYERS:
            text = f"{counted} is {number}; expected 1 to {MOST_LAYERS:,} MTP layers for a draft"
            raise SchemaError(text, field=counted, needed=number, available=MOST_LAYERS)
        types = next((c.get(field) for field in row.get("types_in", ()) if c.get(field)), row["types"])
        if isinstance(types, str):
            types = [mtp_letters().get(letter, letter) for letter in types]
        first = family.num_layers(c)
    except SchemaError as error:
        raise error.within(f"{name} config") from None
    listed = [t.LEGACY.get(each, each) for _ in range(number) for each in types]
    family = replace(family, has_indexer=t.every_layer)  # each selects tokens itself
    return tuple(read_layer(c, family, name, each, first + at, dtype, formats) for at, each in enumerate(listed))


def draft_config(config: Any) -> Mapping[str, Any]:
    """Return the fields of the decoder in a draft's config: of an EAGLE head, whose config holds it as ``model`` or
    ``transformer_layer_config``, or ``config``'s own. Raises SchemaError."""
    fields = fields_of(config)
    for name in ("model", "transformer_layer_config"):
        if (inner := fields.get(name)) is not None:
            return fields_of(inner)
    return fields


def read_layer(
    c: Config, family: Family, name: str, layer_type: str, index: int, dtype: str, formats: Formats
) -> Layer:
    """Return layer ``index`` of type ``layer_type`` of a model of type ``name``. Raises SchemaError."""
    try:
        own = c.at(index)
        listed = {field: own.item(of, index) for field, of in family.per_layer.items() if own.get(of) is not None}
        own = own.replaced(**listed)
        kinds = layer_kinds(own, family, layer_type, index, dtype, formats)
        queries = query_heads(own, family, layer_type)
    except SchemaError as error:
        raise error.within(f"{name} config, layer {index} ({layer_type})") from None
    return Layer(index, layer_type, kinds, queries)


def open_config(config: Any, dtype: str | None) -> tuple[str, Config, str]:
    """Return (model type, config, dtype of the cache) of the text model, also where the config nests several models.

    ``dtype``: the caller's choice; None: the dtype that the config names, else bfloat16. Raises SchemaError.
    """
    levels, known = levels_of(config), known_types()
    inner, name = levels[-1], levels[-1].get("model_type")
    for level in levels:
        if isinstance(outer := level.get("model_type"), str) and str(outer) in refused():
            raise SchemaError(unknown_type(outer), field="model_type", needed=outer)
    if len(levels) > 1:
        name = name or f"{levels[-2].get('model_type')}_text"
    elif isinstance(name, str) and str(name) not in known and f"{name}_text" in known:
        name = f"{name}_text"
    if isinstance(name, str):
        name = other_names().get(str(name), name)
    if not isinstance(name, str) or str(name) not in known:
        raise SchemaError(unknown_type(name), field="model_type", needed=name)
    name = str(name)
    defaults: Mapping[str, Any] = known[name]["defaults"]
    has_encoder = known[name]["family"].encoder is not None
    for level in levels:
        check_causal(Config(level, defaults if level is inner else {}), name, has_encoder=has_encoder)
    if len(levels) == 1:
        defaults = {field: value for field, value in defaults.items() if field not in REQUIRED}
    spellings = (source.get(field) for source in reversed(levels) for field in ("dtype", "torch_dtype"))
    chosen = dtype if dtype is not None else next((found for found in spellings if found is not None), "bfloat16")
    return name, Config({**inner, "model_type": name}, defaults, known[name]["family"].fields), dtype_name(chosen)


def levels_of(config: Any) -> list[Mapping[str, Any]]:
    """Return the fields of ``config``, of the model in it that has the text (``TEXT``), and so on: the outermost first.
    Raises SchemaError."""
    levels = [fields_of(config)]
    for _ in TEXT:  # no model nests as deep
        inner = next((levels[-1][field] for field in TEXT if levels[-1].get(field) is not None), None)
        if inner is None:
            break
        levels.append(fields_of(inner))
    return levels


def check_causal(c: Config, name: str, *, has_encoder: bool) -> None:
    """Raise SchemaError if a field of ``c``, one level of the config of a ``name`` model, says that it is not causal.
    ``has_encoder``: it may have an encoder, which is not."""
    for field, values in (NOT_CAUSAL if has_encoder else {**ENCODER, **NOT_CAUSAL}).items():
        table, _, key = field.rpartition(".")
        value = c.get(key) if not table else c.raw[table].get(key) if isinstance(c.raw.get(table), Mapping) else None
        if isinstance(value, bool | str) and value in values:
            raise SchemaError(
                f"this {name} config is not of a causal decoder ({field} is {value!r}): it has no cache that grows "
                f"token by token, or not that alone",
                field=field, needed=value,
            )  # fmt: skip


def encoder_positions(c: Config, field: str) -> int | None:
    """Return the most positions of an encoder's input, which ``field`` names; 0 if the config names none, None without an
    encoder. Raises SchemaError."""
    if not c.get("is_encoder_decoder"):
        return None
    own = Config(c.raw, {}, c.fields)
    return 0 if not field or own.get(field) is None else own.size(field)


def check_requirements(c: Config, family: Family) -> None:
    """Raise SchemaError if a field lacks the value that the family requires to keep the cache that was verified."""
    for field, (value, why) in family.requires.items():
        if c.get(field) != value:
            text = f"{field} is {shown(c.get(field))}; expected {value!r}: {why}"
            raise SchemaError(text, field=field, needed=value, available=c.get(field))
    if isinstance(use_mla := c.get("use_mla"), bool) and family.attention == ("heads" if use_mla else "latent"):
        text = f"use_mla is {use_mla}; layers of this type keep {family.attention} here, and no others were verified"
        raise SchemaError(text, field="use_mla", needed=use_mla)
    for field, alike in LAYER_FIELDS.items():
        value = c.get(field)
        if value is None or value is False or field in (*family.reads, *family.per_layer.values()):
            continue
        if not (alike and isinstance(value, list | tuple) and {*map(repr, value)} == {repr(c.get(alike))}):
            raise SchemaError(
                f"{field} is {shown(value)}; it changes what layers keep, and the code of this type does not read it. Give "
                f"the type of the model that does, or make the schema of its layers: Schema((Layer(0, 'name', kinds), ..))",
                field=field, needed=value,
            )  # fmt: skip


def unknown_type(name: Any) -> str:
    """Return the error text for a refused model type: the known reason, else known names with a similar spelling."""
    if not isinstance(name, str):
        return f"model_type must name the model family, got {shown(name)}"
    if str(name) in refused():
        return f"model type {name!r} is not supported: {refused()[name]}"
    hint = did_you_mean(name, [known for known in known_types() if is_typo(name, known)], cutoff=0.8)
    why = "its cache was not verified" + (f"; {hint}" if hint else "")
    return f"model type {name!r} is not supported: {why} (docs/models.md lists those that are)"


def is_typo(name: str, known: str) -> bool:
    """Whether ``name`` is ``known`` but for letters of its words. Another word or number is another model, of other layers.

    >>> is_typo("lama", "llama"), is_typo("nemotron-x", "nemotron"), is_typo("minicpm", "minicpm3")
    (True, False, False)
    """
    words, others = (re.split("[_-]", each) for each in (name.lower(), known))
    numbers = [[re.sub(r"\D", "", word) for word in each] for each in (words, others)]
    return numbers[0] == numbers[1] and all(map(did_you_mean, words, ([one] for one in others)))


def layer_types_of(c: Config, family: Family, name: str) -> list[str]:
    """Return the type of every layer: the config's ``layer_types`` if the model reads it, else by the family's rule.

    Raises SchemaError for a list of the wrong length and for types that were not verified for the family, also in a
    list that the model does not read.
    """
    count = family.num_layers(c)
    if count > MOST_LAYERS:
        text = f"num_hidden_layers is {count:,}; expected at most {MOST_LAYERS:,}"
        raise SchemaError(text, field="num_hidden_layers", needed=count, available=MOST_LAYERS)
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
        raise SchemaError(
            f"layer_types {found}; expected one for each of num_hidden_layers = {count}",
            field="layer_types", needed=count, available=len(listed) if isinstance(listed, list | tuple) else listed,
        )  # fmt: skip
    listed = [t.LEGACY.get(each, each) if isinstance(each, str) else each for each in listed]
    for index, layer_type in [*enumerate(listed), *enumerate(by_rule)]:
        if layer_type not in family.verified:
            expected = ", ".join(family.verified)
            text = f"layer {index} has type {shown(layer_type)}, which was not verified for {name}; expected {expected}"
            raise SchemaError(text, field="layer_types", needed=layer_type, available=tuple(family.verified))
    return by_rule or listed


def looped(c: Config, family: Family, count: int) -> list[int]:
    """Return the layers of ``count`` that run again in a forward pass, once for each time: what they keep then stands
    after what all keep. Raises SchemaError."""
    layers, passes = family.loop(c)
    if layers.stop > count or len(layers) * (passes - 1) > MOST_LAYERS:
        raise SchemaError(
            f"layers {layers.start} to {layers.stop - 1} run {passes:,} times; expected layers below {count}, which run at "
            f"most {MOST_LAYERS:,} times in all",
            needed=layers.stop, available=count,
        )  # fmt: skip
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
            f"num_kv_shared_layers is {len(types) - first_shared}; expected a layer of this type before the shared ones",
            field="num_kv_shared_layers", needed=len(types) - first_shared, available=index,
        )  # fmt: skip
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
            text = "kv_format is not 'raw'; packed rows of DeepSeek-V4.1 were not verified"
            raise SchemaError(text, field="kv_format", needed="raw")
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
