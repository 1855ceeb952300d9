"""Draw the content of each byte range of a layout, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from kvpagoda.layouts.axes import TOKENS
from kvpagoda.layouts.expression import ITEMSIZE, PADS, Beside, Each, Node, Part, size_of, stride_of

_WORDS = {"L": "layers", "B": "blocks", "P": "kernel pages", "N": "tokens", "T": "tokens", "H": "heads", "S": "states"}


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
        assert isinstance(part, Part)
        note = {PADS[0]: ", undefined", PADS[1]: ", set to zero"}.get(part.name, "")
        nbytes = size_of(node)
        size = f" = {nbytes:,} bytes" if nbytes != ITEMSIZE[part.dtype] else ""
        yield depth, offset, f"{part.name}: {' x '.join(counts) or 1} {part.dtype}{size}{note}"
