"""How the rows of one layer lie in one page: a named layout without what stands around its pages.

    trtllm          B L (H N k[D] | H N v[Dv])      ->  one page   (H N k[D] | H N v[Dv])
    sglang-mha      L T H k[D] | L T H v[Dv]        ->  two pages   N H k[D]   and   N H v[Dv]
    flashmla-v32    L B N (code | scale | rope)     ->  rows of ``PackedRow("v32_656", "flashmla")``
    vllm-lhbnc      L H B N (k[D] | v[Dv])          ->  one page   H B N (k[D] | v[Dv]),  heads outside of blocks

Blocks, layers and state slots are the arena's: it lays the pages of one record, or of one layer, one behind another. Where
heads lie outside of blocks or layers the page says so: all blocks, or all layers of a block, lie between two heads.
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
from kvpagoda.layouts.packed_row import PackedRow

KINDS = ("attention", "latent", "indexer", "entries", "recurrent", "conv")
"""What a layout may be of: K and V, MLA latents, indexer keys, compressed entries and their window, states."""
KIND_OF_ROWS = {
    "k": "attention", "v": "attention", "kv": "attention", "latent": "latent", "k_rope": "latent", "index_key": "indexer",
    "indexer_keys": "indexer", "entries": "entries", "swa": "entries", "recurrent": "recurrent", "conv": "conv",
}  # fmt: skip
"""Names of rows, and the kind that they are of; rows of other names (tails, positions) have one layout."""


@dataclass(frozen=True)
class PageChoice:
    """A named layout, read for a cache: which ``kind`` of rows it is of, and either the page that each of them lies in, by the
    rows' names (expressions; equal ones are one page), or their packed ``encoding``."""

    name: str
    kind: str
    pages: Mapping[str, str] = field(default_factory=dict)
    format: str = "raw"
    dialect: str = ""

    def encoding(self, head_dim: int | None = None) -> Encoding | PackedRow:
        """How rows lie in it: ``RAW``, or those of a packed format."""
        return RAW if self.format == "raw" else PackedRow(self.format, self.dialect, head_dim)


@cache
def page_choice(name: str, dialect: str | None = None) -> PageChoice:
    """Read the layout ``name``, for rows in ``dialect`` where they are encoded (None: the layout's own).

    Raises LayoutError for a name or dialect that is not known, and for a layout that a cache does not have, with the reason.

    >>> page_choice("trtllm").pages["v"]
    '(H N k[D]:{dtype} | H N v[Dv]:{dtype})'
    >>> page_choice("sglang-mla").pages
    {'latent': 'N (latent[512]:{dtype} | k_rope[64]:{dtype})', 'k_rope': 'N (latent[512]:{dtype} | k_rope[64]:{dtype})'}
    """
    layout = named(name, dialect=dialect)
    entry = table()["layouts"][layout.name]
    if "not_in_caches" in entry:
        raise LayoutError.of("divide", f"a cache has no layout {name!r}: {entry['not_in_caches']}")
    if layout.format != "raw":
        return PageChoice(layout.name, entry["kind"], {}, layout.format, layout.dialect)
    pages = {rows: page for page in entry["pages"] for rows in re.findall(r"(\w+)\[", page)}
    return PageChoice(layout.name, KIND_OF_ROWS[next(iter(pages))], pages)


def order_of(page: str) -> str:
    """The order that an arena must have for ``page``: ``"layer"`` where heads lie outside of blocks, ``"block"`` where they
    lie outside of layers, "" where it does not matter."""
    return "layer" if page.startswith("H B ") else "block" if page.startswith("H L ") else ""


@dataclass(frozen=True)
class PageRows:
    """Rows as a page sees them: their name, the names of their axes in the expression ("" for one of extent 1 that it does
    not have; the axis of a number in brackets is called ``name.0``), the sizes of the axes, the dtype."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


def arrange(page: str, count: int, parts: Sequence[PageRows]) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
    """Bytes of a ``page`` of ``count`` rows, and of each part its offset and the strides of (rows, its axes), all in bytes.

    Raises LayoutError for rows that do not have the axes of the expression.

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
    found = []
    for part in parts:
        place = layout.place(part.name)
        inside = [(fold.axis, stride) for fold, stride in place.strides if fold.word not in ("B", "L")]
        strides = dict(inside)
        if {*strides} != {*filter(None, part.axes)} | ({"T"} & {*strides}) or len(strides) != len(inside):
            raise LayoutError.of(
                "axis",
                f"rows {part.name!r} have the axes {', '.join(part.axes)}, and lie in {page!r}; choose another layout",
            )
        steps, inner = [], place.itemsize
        for axis, size in zip(reversed(part.axes), reversed(part.shape)):
            steps.append(strides.get(axis, inner))
            inner = steps[-1] * size
        found.append((place.offset, (strides.get("T", layout.nbytes), *reversed(steps))))
    return layout.nbytes, found
