"""The place of one layer's rows in a page: a named layout, reduced to its pages.

    trtllm          B L (H N k[D] | H N v[Dv])      ->  one page   (H N k[D] | H N v[Dv])
    sglang-mha      L T H k[D] | L T H v[Dv]        ->  two pages   N H k[D]   and   N H v[Dv]
    flashmla-v32    L B N (code | scale | rope)     ->  rows of ``Encoding("v32_656", dialect="flashmla")``
    vllm-lhbnc      L H B N (k[D] | v[Dv])          ->  one page   H B N (k[D] | v[Dv]),  heads outside of blocks

Blocks, layers and state slots are left to the arena, which places the pages of one record, or of one layer, one after
another. If heads lie outside of blocks or layers, the page's expression keeps these digits (``H B``, ``H L``): all
blocks, or all layers of a block, lie between two heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from kvpagoda.errors import LayoutError
from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.named import named, table

KINDS = ("attention", "latent", "indexer", "entries", "recurrent", "conv")
"""The kinds of rows: K and V, MLA latents, indexer keys, compressed entries and their window, two kinds of states."""
KIND_OF_ROWS = {
    "k": "attention", "v": "attention", "kv": "attention", "latent": "latent", "k_rope": "latent", "index_key": "indexer",
    "indexer_keys": "indexer", "entries": "entries", "swa": "entries", "recurrent": "recurrent", "conv": "conv",
}  # fmt: skip
"""Name of rows -> their kind. Rows with other names (tails, positions) have only one layout."""


@dataclass(frozen=True)
class PageChoice:
    """A named layout as a cache uses it, for rows of ``kind``.

    ``pages``: name of rows -> expression of their page; rows with equal expressions share a page. Empty for encoded
    rows, which have a packed ``format`` and ``dialect`` instead.
    """

    name: str
    kind: str
    pages: Mapping[str, str] = field(default_factory=dict)
    format: str = "raw"
    dialect: str = ""

    def encoding(self, head_dim: int | None = None) -> Encoding:
        """Return the encoding of its rows: ``RAW``, or the packed rows of its format. Raises BadInput."""
        return RAW if self.format == "raw" else Encoding(self.format, dialect=self.dialect, head_dim=head_dim)


@cache
def page_choice(name: str, dialect: str | None = None) -> PageChoice:
    """Return the layout ``name`` as a cache uses it. ``dialect``: of encoded rows (None: the layout's own).

    Raises LayoutError for an unknown name or dialect, and, with the reason, for a layout that caches cannot use.

    >>> page_choice("trtllm").pages["v"]
    '(H N k[D]:{dtype} | H N v[Dv]:{dtype})'
    >>> page_choice("sglang-mla").pages
    {'latent': 'N (latent[512]:{dtype} | k_rope[64]:{dtype})', 'k_rope': 'N (latent[512]:{dtype} | k_rope[64]:{dtype})'}
    """
    layout = named(name, dialect=dialect)
    entry = table()["layouts"][layout.name]
    if "not_in_caches" in entry:
        raise LayoutError.of("divide", f"a cache cannot have the layout {name!r}: {entry['not_in_caches']}")
    if layout.format != "raw":
        return PageChoice(layout.name, entry["kind"], {}, layout.format, layout.dialect)
    pages = {rows: page for page in entry["pages"] for rows in re.findall(r"(\w+)\[", page)}
    return PageChoice(layout.name, KIND_OF_ROWS[next(iter(pages))], pages)


def order_of(page: str) -> str:
    """Return the order that an arena must have for the expression ``page``.

    ``"layer"`` if heads lie outside of blocks, ``"block"`` if they lie outside of layers, "" if either order will do.
    """
    return "layer" if page.startswith("H B ") else "block" if page.startswith("H L ") else ""


@dataclass(frozen=True)
class PageRows:
    """The rows that ``arrange`` places in a page.

    ``axes``: the names of their axes in the page's expression; "" for an axis of size 1 that the expression does not
    have. The axis of a number in brackets is called ``name.0``. ``shape``: the sizes of these axes.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


def arrange(page: str, count: int, parts: Sequence[PageRows]) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
    """Return (bytes of a ``page`` of ``count`` rows, [(offset, strides) of each of ``parts``]).

    The strides are those from row to row, then along each axis of the part. All numbers are in bytes. Raises
    LayoutError for rows that do not have the axes of the expression.

    >>> latent, rope = (PageRows(x, ("", f"{x}.0"), (1, n), "bfloat16") for x, n in (("latent", 512), ("k_rope", 64)))
    >>> arrange(page_choice("flashmla-dense").pages["latent"], 64, [latent, rope])
    (73728, [(0, (1152, 1024, 2)), (1024, (1152, 128, 2))])
    """
    text, sizes = page, {"N": count, "T": count, "L": 1}
    for part in parts:
        text = re.sub(rf"\b{part.name}\[\d+\]", f"{part.name}[{part.shape[-1]}]", text)
        sizes |= dict(zip(part.axes, part.shape))
    words = {*re.findall(r"\b[A-Z]\w*\b", text)}
    words |= {"T"} if "N" in words else set()
    given = {word: size for word, size in sizes.items() if word in words}
    layout = Layout.of(text.replace("{dtype}", parts[0].dtype), pieces=None, values=None, **given)
    placed = []
    for part in parts:
        place = layout.place(part.name)
        inside = [(fold.axis, stride) for fold, stride in place.strides if fold.word not in ("B", "L")]
        strides = dict(inside)
        if {*strides} != {*filter(None, part.axes)} | ({"T"} & {*strides}) or len(strides) != len(inside):
            raise LayoutError.of(
                "axis",
                f"rows {part.name!r} have axes {', '.join(part.axes)}, not those of {page!r}; choose another layout",
            )
        steps, inner = [], place.itemsize
        for axis, size in zip(reversed(part.axes), reversed(part.shape)):
            steps.append(strides.get(axis, inner))
            inner = steps[-1] * size
        placed.append((place.offset, (strides.get("T", layout.nbytes), *reversed(steps))))
    return layout.nbytes, placed
