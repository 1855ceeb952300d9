"""How the rows of each layer kind are stored: what has a format, and what stays as the model computes it, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.schema.fields import Rows
from kvpagoda.schema.kv_format import kind_of
from kvpagoda.schema.layers import Layer

BESIDE = {
    "index_key": "keys of an indexer beside heads have no such form",
    "k_rope": "the RoPE key of a latent is not encoded",
    "swa_pos": "positions", "swa_head": "positions",
}  # fmt: skip
"""Name of rows -> why they are raw although rows of the same layer are encoded."""


@dataclass(frozen=True)
class RowFormat:
    """The rows of ``layers`` (indices) of one kind that are stored alike.

    ``kind``: ``full``, ``window``, ``chunk``, ``latent``, ``compressed`` or ``state``. ``rows``: their names.
    ``format``: the name of the encoding, ``raw`` for none, with its dialect. ``why``: for raw rows, why no format changed
    them; else "". Scales of tensors are not compared.
    """

    kind: str
    rows: tuple[str, ...]
    format: str
    layers: tuple[int, ...]
    why: str = ""

    def __str__(self) -> str:
        number = f"{len(self.layers)} {self.kind} layer{'s' if len(self.layers) > 1 else ''}"
        return f"{self.format}: {', '.join(self.rows)} of {number}" + (f" ({self.why})" if self.why else "")


def row_formats(layers: Iterable[Layer]) -> tuple[RowFormat, ...]:
    """Return the formats of all rows of ``layers``: those that are encoded first, then in the order of the layers.

    >>> from kvpagoda.schema import Attention, Encoding, Growth
    >>> full = Attention(2, 16, 16, "bfloat16", encoding=Encoding("fp8_e4m3"))
    >>> kinds = (full, Attention(2, 16, 16, "bfloat16", Growth(window=8)))
    >>> print(*row_formats(Layer(i, "attention", (kind,)) for i, kind in enumerate(kinds)), sep="\\n")
    fp8_e4m3: k, v of 1 full layer
    raw: k, v of 1 window layer (kv_format leaves them)
    """
    found: dict[tuple[str, tuple[str, ...], str, str], list[int]] = {}
    for layer in layers:
        for kind in layer.kinds:
            word = kind_of(kind)
            rows = (*kind.block_rows(), *kind.state_rows())
            is_encoded = any(one.encoding != RAW for one in rows)
            alike: dict[tuple[str, str], list[str]] = {}
            for one in rows:
                alike.setdefault((_format(one.encoding), _why(one, word, is_encoded)), []).append(one.name)
            for (format, why), names in alike.items():
                found.setdefault((word or "state", tuple(names), format, why), []).append(layer.index)
    made = [RowFormat(kind, names, format, tuple(of), why) for (kind, names, format, why), of in found.items()]
    return tuple(sorted(made, key=lambda one: one.format == "raw"))


def _format(encoding: Encoding) -> str:
    """Return the name of ``encoding``, with its dialect."""
    return f"{encoding.name} ({encoding.dialect})" if encoding.dialect else encoding.name


def _why(rows: Rows, word: str | None, is_encoded: bool) -> str:
    """Return why ``rows`` of a layer of kind ``word`` are raw; "" if they are not."""
    if rows.encoding != RAW:
        return ""
    if word is None:
        return "states stay as the model computes them"
    return BESIDE.get(rows.name, "working rows of a request") if is_encoded else "kv_format leaves them"
