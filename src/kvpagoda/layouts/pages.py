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
_OF_FORMAT = {
    "v32_656": "latent", "nvfp4_352": "latent", "index_132": "indexer", "index_68": "indexer", "dsv4_584": "entries",
    "v41_528": "entries", "v41fp4_288": "entries", "nvfp4_384": "entries",
}  # fmt: skip
_ROWS = {"k": "k", "v": "v", "latent": "latent", "rope": "k_rope", "state": "recurrent"}
"""What a cache calls the parts of named layouts."""


@dataclass(frozen=True)
class PageChoice:
    """A named layout, read for a cache: which ``kind`` of rows it is of, and either the page that each of them lies in, by the
    rows' names (expressions; equal ones are one page), or their packed ``encoding``."""

    name: str
    kind: str
    pages: Mapping[str, str] = field(default_factory=dict)
    format: str = "raw"
    dialect: str = ""

    def encoding(self, head_dim: int | None = None) -> PackedRow:
        """The rows of a packed format."""
        return PackedRow(self.format, self.dialect, head_dim)


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
    if why := table()["layouts"][layout.name].get("not_in_caches"):
        raise LayoutError.of("divide", f"a cache has no layout {name!r}: {why}")
    if layout.format != "raw":
        kind = _OF_FORMAT.get(layout.format, "attention")
        PackedRow(layout.format, layout.dialect)
        return PageChoice(layout.name, kind, {}, layout.format, layout.dialect)
    text: str = table()["layouts"][layout.name]["expression"]
    if re.search(r"\bW\b", text):
        page = "W conv[C]:{dtype}" if re.search(r"\bW \(", text) else "conv[C,W]:{dtype}"
        return PageChoice(layout.name, "conv", {"conv": page})
    around = _around(name, [fold.word for fold, _ in layout.places[0].strides])
    apart = len(re.findall(r"\b[BT]\b", text)) > 1 or "^16" in text
    text = re.sub(rf"\b(?!{around or '-'})[LBS] +", "", re.sub(r"\bT\b", "N", text)).replace("^16", "")
    for part, rows in _ROWS.items():
        text = re.sub(rf"\b{part}(?=\[)", rows, text)
    parts = {_ROWS[place.name]: place for place in layout.places}
    pieces = [piece.strip(" ()") for piece in text.split("|")] if apart else [text]
    pages = {rows: next(piece for piece in pieces if f"{rows}[" in piece) for rows in parts}
    kind = "attention" if "k" in parts else "latent" if "latent" in parts else "recurrent"
    return PageChoice(layout.name, kind, pages)


def _around(name: str, digits: Sequence[str]) -> str:
    """What lies between two heads in a layout of these digits, outermost first: "B" blocks, "L" layers, "" neither."""
    last = max(at for at, word in enumerate(digits) if word in ("L", "B", "S"))
    outside = [word for word in digits[:last] if word not in ("L", "B", "S")]
    if outside and (outside != ["H"] or digits[last - 1] != "H"):
        raise LayoutError.of(
            "divide",
            f"a cache has no layout {name!r}: tokens lie outside of layers in it, as in pools on the host, so that a layer "
            f"would be copied row by row, and no attention kernel reads it; choose one in which the pages of a layer are "
            f"whole, and move rows to and from it with kvpagoda.layouts.reshard",
        )
    return digits[last] if outside else ""


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
