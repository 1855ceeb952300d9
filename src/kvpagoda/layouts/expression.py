"""The layout language: parse an expression into a tree, compute the offset and strides of every part, draw it.

    expression := item ('|' item)*                    items follow one after the other in memory
    item       := digit* (part | '(' expression ')' ['^' bytes])
    digit      := L, B, H, D/8, D%8, ..               the rest of the item is repeated for each value of the digit
    part       := name ['[' digit or number, .. ']'] ':' dtype

``L B N H (k[D]:bfloat16 | v[D]:bfloat16)`` stores K and V of one head and token side by side.
``L B (N H k[D]:bfloat16 | N H v[D]:bfloat16)`` stores K of a whole page before V of that page. ``(..)^576`` pads to a
multiple of 576 bytes, ``B@2048`` places blocks 2048 bytes apart. A number in brackets is an axis of that part alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvpagoda.errors import LayoutError
from kvpagoda.layouts.axes import TOKENS, Axis, Fold, Sizes, check_folds
from kvpagoda.units import align_up

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "int4_x2": 1, "int64": 8, "int32": 4, "uint32": 4, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip
"""dtype of a part -> bytes of one element. Of an ``_x2`` dtype, an element is a byte that holds two numbers."""
PADS = ("pad", "zero")
"""Names of parts without content: ``pad`` bytes are undefined and never read, ``zero`` bytes are written as zero."""
LONGEST = 200
"""The most words of an expression: more than any layout needs, and few enough for a recursive parser."""

_WORDS = {"L": "layers", "B": "blocks", "P": "kernel pages", "N": "tokens", "T": "tokens", "H": "heads", "S": "states"}
_TOKEN = re.compile(r"\s*([()|]|\^\d+|[A-Za-z]\w*(?:\[[^\]]*\])?:\w+|[A-Za-z]\w*(?:/\d+)?(?:%\d+)?(?:@\d+)?)")
_PART = re.compile(r"([A-Za-z]\w*)(?:\[([^\]]*)\])?:(\w+)$")


@dataclass(frozen=True)
class ArrayPart:
    """A leaf of the tree: a named array of ``dtype``. The digits in its brackets are ``Each`` nodes around it."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Each:
    """``body`` repeated for each value of digit ``fold``, ``stride`` bytes apart (None: without gaps).

    ``inside``: the digit is written in the brackets of a part.
    """

    fold: Fold
    body: Node
    stride: int | None = None
    inside: bool = False


@dataclass(frozen=True)
class Beside:
    """``items`` one after the other, padded at the end to a multiple of ``align`` bytes."""

    items: tuple[Node, ...]
    align: int = 1


Node = ArrayPart | Each | Beside


@dataclass(frozen=True)
class ArrayPlace:
    """The place of one part: the element with digits i, j, .. is at byte ``offset + i * stride_i + j * stride_j + ..``.

    ``strides``: (digit, stride in bytes), in memory order, the outermost first.
    """

    name: str
    dtype: str
    offset: int
    strides: tuple[tuple[Fold, int], ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of this part, in memory order of their outermost digits."""
        return tuple(dict.fromkeys(fold.axis for fold, _ in self.strides))


def own_axes(expression: str) -> list[Axis]:
    """Return the axes given as numbers in brackets: ``rope[64]`` has the axis ``rope.0`` of size 64."""
    axes = []
    for name, dims in re.findall(r"([A-Za-z]\w*)\[([^\]]*)\]", expression):
        for number, dim in enumerate(dims.split(",")):
            if dim.strip().isdecimal():
                axes.append(Axis(f"{name}.{number}", int(dim), int(dim)))
    return axes


class Parser:
    """A parser of one expression. Its methods raise LayoutError with rule 'syntax', 'axis', 'fold' or 'dtype'."""

    def __init__(self, expression: str, sizes: Sizes) -> None:
        self.text, self.sizes = expression, sizes
        self.tokens: list[str] = []
        at = 0
        while expression[at:].strip():
            match = _TOKEN.match(expression, at)
            if match is None:
                text = f"cannot read {expression[at:].strip()[:24]!r} in {expression!r}"
                raise LayoutError.of("syntax", text, needed=expression[at:].strip()[:24])
            self.tokens.append(match[1])
            at = match.end()
        if len(self.tokens) > LONGEST:
            text = f"an expression has at most {LONGEST} words, this one {len(self.tokens)}"
            raise LayoutError.of("syntax", text, needed=len(self.tokens), available=LONGEST)
        self.at = 0

    def tree(self) -> Node:
        """Return the tree of the whole expression."""
        node = self._items()
        if self.at < len(self.tokens):
            text = f"{self.tokens[self.at]!r} is not expected after {self._read()!r} in {self.text!r}"
            raise LayoutError.of("syntax", text, needed=self.tokens[self.at])
        return node

    def _read(self) -> str:
        """Return the words read so far, for error messages."""
        return " ".join(self.tokens[: self.at])

    def _next(self) -> str:
        """Return the next word without reading it; "" at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _items(self) -> Node:
        """Read items separated by ``|``."""
        items = [self._item()]
        while self._next() == "|":
            self.at += 1
            items.append(self._item())
        return items[0] if len(items) == 1 else Beside(tuple(items))

    def _item(self) -> Node:
        """Read one item: digits, then a part or an expression in parentheses."""
        word = self._next()
        self.at += 1
        if word == "(":
            body = self._items()
            if self._next() != ")":
                raise LayoutError.of("syntax", f"a ')' is missing after {self._read()!r} in {self.text!r}", needed=")")
            self.at += 1
            align = self._next()
            if not align.startswith("^"):
                return body
            self.at += 1
            if int(align[1:]) < 1:
                text = f"cannot pad to a multiple of {align[1:]} bytes in {self.text!r}"
                raise LayoutError.of("align", text, needed=int(align[1:]), available=1)
            return Beside(body.items if isinstance(body, Beside) and body.align == 1 else (body,), int(align[1:]))
        if ":" in word:
            return self._part(word)
        if not word or not word[0].isalpha():
            text = f"a part or a digit is missing after {self._read()!r} in {self.text!r}"
            raise LayoutError.of("syntax", text, needed="part")
        fold, stride = self.sizes.fold(word)
        return Each(fold, self._item(), stride)

    def _part(self, word: str) -> Node:
        """Return the tree of a part, ``name[dims]:dtype``."""
        match = _PART.match(word)
        if match is None or match[3] not in ITEMSIZE:
            text = f"{word!r} needs one of the dtypes {', '.join(ITEMSIZE)}"
            raise LayoutError.of("dtype", text, needed=word, available=tuple(ITEMSIZE))
        node: Node = ArrayPart(match[1], match[3])
        dims = [dim.strip() for dim in match[2].split(",")] if match[2] else []
        for number, dim in reversed([*enumerate(dims)]):
            if dim.isdecimal():
                fold, stride = Fold(dim, f"{match[1]}.{number}", 1, int(dim)), None
            else:
                fold, stride = self.sizes.fold(dim)
            node = Each(fold, node, stride, inside=True)
        return node


def write(node: Node) -> str:
    """Return the expression of a tree in its canonical spelling. Parsing it gives the same tree."""
    if isinstance(node, ArrayPart):
        return f"{node.name}:{node.dtype}"
    if isinstance(node, Beside):
        inside = " | ".join(write(item) for item in node.items)
        return f"({inside})" + (f"^{node.align}" if node.align > 1 else "")
    word = node.fold.word + ("" if node.stride is None else f"@{node.stride}")
    if not node.inside:
        return f"{word} {write(node.body)}"
    dims = [word]
    while isinstance(node.body, Each):
        node = node.body
        dims.append(node.fold.word + ("" if node.stride is None else f"@{node.stride}"))
    assert isinstance(node.body, ArrayPart)
    return f"{node.body.name}[{','.join(dims)}]:{node.body.dtype}"


def size_of(node: Node) -> int:
    """Return the bytes of a tree. Raises LayoutError for a stride that is shorter than the body it repeats."""
    if isinstance(node, ArrayPart):
        return ITEMSIZE[node.dtype]
    if isinstance(node, Beside):
        return align_up(sum(size_of(item) for item in node.items), node.align)
    return node.fold.count * stride_of(node)


def stride_of(node: Each) -> int:
    """Return the bytes from one value of the digit to the next. Raises LayoutError if copies would overlap."""
    body = size_of(node.body)
    if node.stride is not None and node.stride < body:
        raise LayoutError.of(
            "stride",
            f"{node.fold.word}@{node.stride} would lay {body} bytes on top of each other; the stride is at least {body}",
            needed=body, available=node.stride,
        )  # fmt: skip
    return body if node.stride is None else node.stride


def places(node: Node, offset: int = 0, outer: tuple[tuple[Fold, int], ...] = ()) -> Iterator[ArrayPlace]:
    """Yield the place of every part, in memory order. ``outer``: (digit, stride) of the enclosing nodes."""
    if isinstance(node, ArrayPart):
        yield ArrayPlace(node.name, node.dtype, offset, outer)
    elif isinstance(node, Each):
        yield from places(node.body, offset, (*outer, (node.fold, stride_of(node))))
    else:
        for item in node.items:
            yield from places(item, offset, outer)
            offset += size_of(item)


def check_parts(found: tuple[ArrayPlace, ...], sizes: Sizes) -> None:
    """Raise LayoutError unless parts have different names, complete axes, and aligned offsets and strides."""
    names = [place.name for place in found if place.name not in PADS]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        text = f"part {twice[0]!r} is given twice; give every part a name of its own"
        raise LayoutError.of("part", text, needed=twice[0])
    if not names:
        raise LayoutError.of("part", "a layout has at least one part that is content", needed=1, available=0)
    for place in found:
        check_folds(place.name, (fold for fold, _ in place.strides), sizes.axes)
        size = place.itemsize
        odd = [f"stride {stride} of {fold.word}" for fold, stride in place.strides if stride % size and fold.count > 1]
        if odd or place.offset % size:
            where = odd[0] if odd else f"offset {place.offset}"
            text = f"part {place.name!r} ({place.dtype}): {where} is not a multiple of {size} bytes"
            raise LayoutError.of("align", text, needed=size, available=where)


def drawing(tree: Node, offset: int) -> list[str]:
    """Return the drawing of ``tree``, one line for each byte range: its first byte and its content.

    The first byte is counted from the start of the enclosing range, the nearest line above with less indentation. A
    line ``N: 64 tokens, 576 bytes apart`` means 64 copies of the lines that are indented below it.
    """
    rows = [*_lines(tree, offset, 0)]
    width = max(len(f"{first:,}") + 2 * depth for depth, first, _ in rows)
    return [f"{' ' * 2 * depth + f'{first:,}':<{width}}  {' ' * 2 * depth}{what}" for depth, first, what in rows]


def _lines(node: Node, offset: int, depth: int) -> Iterator[tuple[int, int, str]]:
    """Yield (depth, first byte, text) for ``node`` and all nodes in it."""
    if isinstance(node, Each) and not node.inside:
        what = _WORDS.get(node.fold.word, "" if node.fold.axis != TOKENS else "tokens")
        what = what or f"of {node.fold.axis}"
        yield depth, offset, f"{node.fold.word}: {node.fold.count:,} {what}, {stride_of(node):,} bytes apart"
        yield from _lines(node.body, 0, depth + 1)
        if spare := stride_of(node) - size_of(node.body):
            yield depth + 1, size_of(node.body), f"{spare:,} bytes of padding"
    elif isinstance(node, Beside):
        end = offset
        for item in node.items:
            yield from _lines(item, end, depth)
            end += size_of(item)
        if spare := offset + size_of(node) - end:
            yield depth, end, f"{spare:,} bytes of padding"
    else:
        counts: list[str] = []
        part: Node = node
        while isinstance(part, Each):
            counts.append(f"{part.fold.count:,}")
            part = part.body
        assert isinstance(part, ArrayPart)
        note = {PADS[0]: ", undefined", PADS[1]: ", set to zero"}.get(part.name, "")
        nbytes = size_of(node)
        size = f" = {nbytes:,} bytes" if nbytes != ITEMSIZE[part.dtype] else ""
        yield depth, offset, f"{part.name}: {' x '.join(counts) or 1} {part.dtype}{size}{note}"
