"""How to read what a model's layers keep from its config, for each model type.

The table is ``model_types.json``. The rules that it names are the functions of ``layer_types``, ``heads`` and
``states``. A model type is in the table only if a test has compared it with the tensors that transformers really keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

from kvpagoda.loading import read_json
from kvpagoda.schema.config import Config
from kvpagoda.schema.families import heads, layer_types, states
from kvpagoda.schema.families.heads import HeadRule, grouped
from kvpagoda.schema.families.layer_types import FULL, LayerTypeRule
from kvpagoda.schema.families.states import StateRule


@dataclass(frozen=True)
class Family:
    """The rules that read the layers of one family of models from a config.

    Rules take the config and, if they need it, a layer's index or type.

    layer_type   the type of layer i if the config has no ``layer_types``
    reads_layer_types  whether the model's code reads ``layer_types``; False: ``layer_type`` decides, and the list is
                 only checked
    verified     the layer types that were compared with transformers; any other type is an error
    heads        K/V heads and row widths of a layer with attention; for MLA the widths of the latent and its RoPE key
    repeats_heads  the field with which transformers' model keeps K/V heads repeated, one for each query head; engines,
                 and so schemas, keep them once
    per_layer    field that rules read -> the field that lists its values, one for each layer, if the config has it
    reads        those of ``LAYER_FIELDS`` that its rules read; if a config has others of them, it is refused
    states       the states of linear, convolution and hybrid layers (None: the family has no such layers)
    attention    "heads", "latent" (MLA) or "compressed" (DeepSeek-V4)
    has_indexer  whether layer i keeps indexer keys, if its type is indexed
    index_dtype  dtype of indexer keys ("": the dtype of the model)
    index_pool   the field that says of how many tokens one indexer key is made (None: of one)
    index_parts  rows that a token of an open pool has in the state: its key, and a gate if there are two
    window       tokens of the sliding window
    num_layers   number of layers that have a cache
    loop         the layers that run several times in a forward pass, and how often
    max_positions  tokens of the longest context that the config names; None if it names none
    encoder      the field with the most positions of its encoder's input ("": none names them), if the config may be of an
                 encoder-decoder, whose cross-attention keeps rows as its self-attention does; None: it has no encoder
    aligned      whether requests that share a forward pass must be equally long: the model counts positions from the
                 length of its cache, whatever positions are passed to it, or it ranks tokens without an indexer
    own_states   how the model passes its states if not through transformers' cache interface: "stacked" over the
                 layers, or "by_layer"
    batched      whether several requests may decode in one forward pass; False: the model's code would mix their rows
    own_attention  whether only other parts of the model (those for images) use transformers' attention interface
    fields       field that rules read -> the names of it in the config; the first name that the config has is used
    requires     field -> (the value that it must have, the reason)
    """

    layer_type: LayerTypeRule = layer_types.by_fields
    reads_layer_types: bool = True
    verified: tuple[str, ...] = (FULL,)
    heads: HeadRule = grouped
    repeats_heads: str = ""
    per_layer: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    states: StateRule | None = None
    attention: str = "heads"
    has_indexer: Callable[[Config, int], bool] = layer_types.every_layer
    index_dtype: str = ""
    index_pool: str | None = None
    index_parts: int = 1
    window: Callable[[Config], Any] = layer_types.sliding_window
    num_layers: Callable[[Config], int] = layer_types.hidden_layers
    loop: Callable[[Config], tuple[range, int]] = layer_types.no_loop
    max_positions: Callable[[Config], int | None] = layer_types.named_positions
    encoder: str | None = None
    aligned: bool = False
    own_states: str = ""
    batched: bool = True
    own_attention: bool = False
    fields: Mapping[str, list[str]] = field(default_factory=dict)
    requires: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


RULES: dict[str, ModuleType] = {
    **dict.fromkeys(("layer_type", "has_indexer", "window", "num_layers", "loop", "max_positions"), layer_types),
    "heads": heads,
    "states": states,
}
"""Field of ``Family`` -> the module that defines its rules."""


def read_family(row: Mapping[str, Any]) -> Family:
    """Return the ``Family`` of a row of ``model_types.json``.

    A rule is the name of a function, or {name: arguments} of a function that returns one.
    """

    def value(field: str, given: Any) -> Any:
        if field not in RULES:
            return tuple(given) if isinstance(given, list) else given
        if isinstance(given, str):
            return getattr(RULES[field], given)
        ((name, arguments),) = given.items()
        return getattr(RULES[field], name)(**arguments)

    return Family(**{field: value(field, given) for field, given in row.items()})


@lru_cache(maxsize=1)
def model_types() -> Mapping[str, Any]:
    """Return the rows of ``model_types.json``: model type -> its family and its defaults. Read at the first call.

    >>> row = model_types()["jetmoe"]
    >>> row["family"].fields["head_dim"], row["defaults"]["kv_channels"]
    (['kv_channels'], 128)
    """
    return _rows("model_types.json")


@lru_cache(maxsize=1)
def served_types() -> Mapping[str, Any]:
    """Return the rows of ``served_types.json``: types that engines serve and of which transformers has no causal model.

    >>> served_types()["rwkv7"]["family"].verified
    ('linear_attention',)
    """
    return _rows("served_types.json")


@lru_cache(maxsize=1)
def encoder_decoders() -> Mapping[str, Any]:
    """Return the rows of ``encoder_decoders.json``: types with an encoder of which transformers has no causal model.

    >>> encoder_decoders()["t5"]["family"].encoder
    ''
    """
    return _rows("encoder_decoders.json")


@lru_cache(maxsize=1)
def other_names() -> Mapping[str, str]:
    """Return what published configs call a type -> the type among ``known_types``. Read at the first call."""
    names: Mapping[str, str] = read_json(__name__, "served_types.json")["names"]
    return names


@lru_cache(maxsize=1)
def known_types() -> Mapping[str, Any]:
    """Return the rows of ``model_types``, ``served_types`` and ``encoder_decoders``."""
    return {**model_types(), **served_types(), **encoder_decoders()}


def _rows(file: str) -> Mapping[str, Any]:
    """Return the rows of a table of model types, each with its ``Family``."""
    table = read_json(__name__, file)
    families = {name: read_family(row) for name, row in table["families"].items()}
    for row in table["model_types"].values():
        row["family"] = families[row["family"]] if isinstance(row["family"], str) else read_family(row["family"])
    rows: Mapping[str, Any] = table["model_types"]
    return rows


@lru_cache(maxsize=1)
def refused() -> Mapping[str, str]:
    """Return the rows of ``refused.json``: model type -> why it is refused. Read at the first call.

    >>> refused()["cpmant"].partition(":")[0]
    'it is not causal'
    """
    table = read_json(__name__, "refused.json")
    return {**table["reasons"], **table["others"]}


@lru_cache(maxsize=1)
def mtp_layers() -> Mapping[str, Any]:
    """Return the rows of ``mtp.json``: model type -> the types and the number of its MTP layers. Read at the first call.

    >>> mtp_layers()["qwen3_next"]["types"]
    ['full_attention']
    """
    rows: Mapping[str, Any] = read_json(__name__, "mtp.json")["model_types"]
    return rows


@lru_cache(maxsize=1)
def mtp_refused() -> Mapping[str, str]:
    """Return model type -> why its MTP layers are refused. Read at the first call."""
    reasons: Mapping[str, str] = read_json(__name__, "mtp.json")["refused"]
    return reasons


@lru_cache(maxsize=1)
def mtp_letters() -> Mapping[str, str]:
    """Return letter -> layer type, for configs that write the types of MTP layers as text. Read at the first call."""
    letters: Mapping[str, str] = read_json(__name__, "mtp.json")["letters"]
    return letters


def families() -> dict[str, Family]:
    """Return model type -> its family."""
    return {name: row["family"] for name, row in model_types().items()}
