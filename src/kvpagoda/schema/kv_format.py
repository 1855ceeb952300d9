"""The meaning of ``kv_format``: which rows of which layers are encoded, and how. The table is ``kv_formats.json``.

"fp8"                              every layer that has rows with such a form
{"full": "fp8", "window": "raw"}   by layer kind; kinds that are not named stay raw
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpagoda.errors import BadInput, LayoutError, SchemaError, shown, unknown_name
from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.loading import read_json
from kvpagoda.schema.kinds import Attention, Compressed, Latent, LayerKind
from kvpagoda.schema.layout_choice import choices_of

KVFormatNames = str | Mapping[str, str]
"""A name of ``KV_FORMATS``, or {layer kind (``LAYER_KINDS``): name}."""
LAYER_KINDS = {"full": "heads", "window": "heads", "chunk": "heads", "latent": "latents", "compressed": "entries"}
"""Layer kind, as a mapping names it -> the part of a ``KVFormat`` that it needs. Heads are named by their growth law."""


@dataclass(frozen=True)
class KVFormat:
    """The meaning of one format: the encodings of the rows that it changes; rows that it does not name stay raw.

    ``heads``: of K and V rows, each alone or, packed, both in one row; keys of an indexer beside them stay raw.
    ``latents``: of MLA latents and their indexers' keys. ``entries``: of compressed entries; the RoPE part of an entry
    is stored unencoded beside the codes. ``index_keys``: of the keys of compressed entries' indexers. ``layouts``:
    class name of a layer kind -> names of the packed layouts that kernels read, used where a bfloat16 model has rows of
    their sizes.
    """

    heads: Encoding = RAW
    latents: Encoding = RAW
    entries: Encoding = RAW
    index_keys: Encoding = RAW
    layouts: Mapping[str, list[str]] = field(default_factory=dict)

    def heads_of(self, k_dim: int, v_dim: int) -> Encoding:
        """Return the encoding of heads of these sizes. Raises SchemaError if it cannot hold them."""
        if not self.heads.is_packed:
            for dim in (k_dim, v_dim):
                self.heads.parts((1, dim), "bfloat16")
            return self.heads
        if k_dim != v_dim:
            raise SchemaError(
                f"{self.heads.name} packs K and V of one size, got K of {k_dim} and V of {v_dim} elements"
            )
        try:
            return Encoding(self.heads.name, dialect=self.heads.dialect, head_dim=k_dim)
        except BadInput as error:
            raise SchemaError(str(error)) from None


def _format(layouts: Mapping[str, list[str]] | None = None, **parts: Mapping[str, Any]) -> KVFormat:
    """Return the ``KVFormat`` of a row of ``kv_formats.json``."""
    return KVFormat(layouts=layouts or {}, **{part: Encoding(**row) for part, row in parts.items()})


KV_FORMATS = {name: _format(**row) for name, row in read_json("kvpagoda.schema", "kv_formats.json")["formats"].items()}
"""``kv_format`` name -> its encodings and layouts: the table ``kv_formats.json``."""


def formats_by_kind(kv_format: KVFormatNames) -> dict[str, KVFormat]:
    """Return layer kind -> format, for every layer kind. Raises SchemaError for unknown kinds and names.

    A mapping that gives a kind a format without such rows is an error too: ``{"latent": "fp8_e5m2"}``.

    >>> found = formats_by_kind({"full": "fp8", "window": "raw"})
    >>> found["full"].heads.name, found["window"].heads.name, found["latent"].latents.name
    ('fp8_e4m3', 'raw', 'raw')
    """
    if not isinstance(kv_format, Mapping) or not kv_format:
        return dict.fromkeys(LAYER_KINDS, _named(kv_format))
    found = dict.fromkeys(LAYER_KINDS, KV_FORMATS["raw"])
    for kind, name in kv_format.items():
        if kind not in tuple(LAYER_KINDS):
            raise unknown_name("layer kind of kv_format", kind, LAYER_KINDS, SchemaError)
        found[kind] = _named(name)
        if name != "raw" and getattr(found[kind], LAYER_KINDS[kind]) == RAW:
            fitting = [other for other, each in KV_FORMATS.items() if getattr(each, LAYER_KINDS[kind]) != RAW]
            raise SchemaError(f"kv_format {name!r} has no form for {kind!r} layers; these have: {', '.join(fitting)}")
    return found


def parsed(text: str) -> KVFormatNames:
    """Return the ``kv_format`` that ``text`` spells: a name, or ``full=fp8,window=raw``. Raises SchemaError for a kind that is
    given twice; names and kinds are not checked.

    >>> parsed("fp8"), parsed("full=fp8, window=raw")
    ('fp8', {'full': 'fp8', 'window': 'raw'})
    """
    if "=" not in text:
        return text
    found: dict[str, str] = {}
    for part in text.split(","):
        kind, _, name = (word.strip() for word in part.partition("="))
        if kind in found:
            raise SchemaError(f"kv_format {text!r} names the layer kind {kind!r} twice", needed=kind)
        found[kind] = name
    return found


def as_text(kv_format: KVFormatNames) -> str:
    """Return ``kv_format`` as ``parsed`` reads it."""
    return kv_format if isinstance(kv_format, str) else ",".join(f"{kind}={name}" for kind, name in kv_format.items())


def _named(name: Any) -> KVFormat:
    """Return the format ``name``. Raises SchemaError, which lists the known names."""
    if not isinstance(name, str) or str(name) not in KV_FORMATS:
        text = f"unknown kv_format {shown(name)}; known: {', '.join(KV_FORMATS)}"
        raise SchemaError(text, needed=name, available=tuple(KV_FORMATS))
    return KV_FORMATS[str(name)]


def kind_of(kind: LayerKind) -> str | None:
    """Return the word of ``LAYER_KINDS`` for ``kind``; None for a kind that no format changes."""
    if isinstance(kind, Attention):
        return kind.law.word
    return "latent" if isinstance(kind, Latent) else "compressed" if isinstance(kind, Compressed) else None


def check_used(kv_format: KVFormatNames, layers: Mapping[str, int], name: str) -> None:
    """Raise SchemaError unless ``kv_format`` changes rows of a model ``name``; of a mapping, every kind with a format.

    ``layers``: layer kind (``LAYER_KINDS``) -> how many layers of it the model has.
    """
    has = ", ".join(f"{number} {kind}" for kind, number in layers.items()) or "none that a format changes"
    if isinstance(kv_format, Mapping):
        absent = [kind for kind, each in kv_format.items() if each != "raw" and kind not in layers]
        if absent:
            raise SchemaError(
                f"kv_format names layers of kind {', '.join(map(repr, absent))}, and a {name} model has none; it has: {has}"
            )
        return
    if kv_format != "raw" and not any(getattr(_named(kv_format), LAYER_KINDS[kind]) != RAW for kind in layers):
        raise SchemaError(
            f"kv_format {kv_format!r} has no form for any layer of a {name} model; its layers: {has}; use 'raw' or another",
            needed=kv_format, available=has,
        )  # fmt: skip


def as_kernels_read(kind: LayerKind, packed: KVFormat) -> LayerKind:
    """Return ``kind`` in the layouts of ``packed`` if its rows have the sizes that these take; else ``kind`` itself."""
    names = packed.layouts.get(type(kind).__name__)
    if names is None or getattr(kind, "dtype", None) != "bfloat16":
        return kind
    try:
        laid = kind.laid_out(choices_of(names))
        for rows in (*laid.block_rows(), *laid.state_rows()):
            rows.fields(1)  # raises for other sizes
    except LayoutError:
        return kind
    return laid
