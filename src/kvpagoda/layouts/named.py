"""Layouts of kernels and engines by name. ``named.json`` has their expressions, sizes and sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvpagoda.errors import LayoutError, did_you_mean
from kvpagoda.layouts.layout import Index, Layout
from kvpagoda.loading import read_json
from kvpagoda.text import text_in
from kvpagoda.units import whole_number


@cache
def table() -> dict[str, Any]:
    """Return ``named.json``: ``layouts`` by name, ``aliases``, and ``pages``: pages of the encoded formats."""
    return read_json("kvpagoda.layouts", "named.json")


def names() -> list[str]:
    """Return every name that ``named`` takes, aliases included."""
    return [*table()["layouts"], *table()["aliases"]]


def named(
    name: str, *, dialect: str | None = None, dtype: str | None = None, block_stride: int | None = None, **sizes: int
) -> Layout:
    """Return the layout of a kernel or an engine: ``named("flashmla-dsv4", page_size=64)``.

    Args:
        name: one of ``names()``.
        dialect: rules of scale and rounding of encoded rows; None: the kernel's own.
        dtype: of rows that are not encoded; None: the layout's own.
        block_stride: bytes from block to block, if blocks are padded.
        **sizes: ``layers``, ``tokens`` or ``blocks``, ``page_size``, ``heads``, ``head_dim``, ..; not given: 1 layer,
            256 tokens, and the usual sizes of the kernel.

    Raises:
        LayoutError: an unknown name, size, dtype or dialect; the message lists the known ones.

    Examples:
        >>> layout = named("vllm-blhnc", layers=2, blocks=3, page_size=16, heads=8, head_dim=128)
        >>> layout.expression, layout.strides("v")["B"]
        ('B L H N (k[D]:bfloat16 | v[Dv]:bfloat16)', 131072)
    """
    given = name.lower() if isinstance(name, str) else name
    given = table()["aliases"].get(given, given)
    if given not in table()["layouts"]:
        hint = did_you_mean(given, names()) or f"there are {', '.join(names())}"
        raise LayoutError.of("name", f"no layout is named {name!r}; {hint}", needed=name)
    entry = table()["layouts"][given]
    known = {*entry["defaults"], *(["blocks"] if "N" in entry["sizes"] else [])}
    if unknown := sorted(sizes.keys() - known):
        text = f"{name!r} has no size {unknown[0]!r}; it has {', '.join(sorted(known))}"
        raise LayoutError.of("size", text, needed=unknown[0], available=tuple(sorted(known)))
    letters = {letter: _size(entry, sizes, wanted) for letter, wanted in entry["sizes"].items()}
    whole = entry.get("pieces", {"H": "heads"} if "H" in letters else {})
    pieces = {axis: _size(entry, sizes, wanted) for axis, wanted in whole.items()}
    expression = entry["expression"]
    if "dtype" in entry:
        expression = expression.replace("{dtype}", dtype or entry["dtype"])
    elif dtype is not None:
        raise LayoutError.of("dtype", f"the rows of {name!r} are encoded; their dtypes cannot be chosen", needed=dtype)
    if block_stride is not None:
        expression, count = re.subn(r"\bB\b", f"B@{whole_number(block_stride, 'block_stride', 1)}", expression)
        if count != 1:
            text = f"{name!r} has no single stride of blocks: {entry['expression']!r}"
            raise LayoutError.of("stride", text, needed=count, available=1)
    dialects = entry.get("dialects", [""])
    if dialect is not None and dialect not in dialects:
        text = f"{name!r} has the dialects {', '.join(dialects) or '(none)'}, not {dialect!r}"
        raise LayoutError.of("dialect", text, needed=dialect, available=tuple(dialects))
    values = {
        "format": entry.get("format", "raw"),
        "dialect": dialects[0] if dialect is None else dialect,
        "index": Index(**entry.get("index", {"of": "kernel page", "padding": None})),
        "name": given,
    }
    return Layout.of(expression, pieces=pieces, values=values, **letters)


def _size(entry: Mapping[str, Any], sizes: Mapping[str, int], wanted: str) -> int:
    """Return the size ``wanted``: ``"head_dim"``, or a part of it, ``"head_dim/2"``. Raises LayoutError."""
    what, _, divisor = wanted.partition("/")
    if what == "tokens" and "blocks" in sizes:
        if "tokens" in sizes:
            raise LayoutError.of("size", "give tokens or blocks, not both", needed="tokens or blocks")
        return whole_number(sizes["blocks"], "blocks", 1) * _size(entry, sizes, "page_size")
    value = entry["defaults"][what]
    if what not in sizes and isinstance(value, str):  # the default is the value of another size
        return _size(entry, sizes, value)
    number = whole_number(sizes.get(what, value), what, at_least=1)
    if divisor and number % int(divisor):
        text = f"{what} must be a multiple of {divisor}, got {number}"
        raise LayoutError.of("size", text, field=what, needed=number, available=int(divisor))
    return number // int(divisor or 1)


def read(text: str) -> tuple[Layout, ...]:
    """Return the layouts, one per rank, that a command-line argument describes.

    Args:
        text: a name with sizes, ``"trtllm,page_size=32,tp=4,pp=2"``, or a file that ``to_json`` wrote,
            ``"pool.json,tp=4"``.

    Raises:
        LayoutError: text that is neither a known name with sizes nor a stored layout.
        OSError: a file that cannot be read.
    """
    name, *given = text.split(",")
    sizes: dict[str, Any] = {}
    for word in given:
        key, _, value = word.partition("=")
        if not key or not value:
            raise LayoutError.of(
                "syntax", f"cannot read {word!r} in {text!r}; write NAME,size=number,size=number", needed=word
            )
        sizes[key.strip()] = int(value) if value.strip().isdecimal() else value.strip()
    ranks = {ways: sizes.pop(ways, 1) for ways in ("tp", "pp")}
    if not name.endswith(".json"):
        return named(name, **sizes).split(**ranks)
    layout = Layout.from_json(text_in(Path(name)))
    return (layout.resized(**sizes) if sizes else layout).split(**ranks)
