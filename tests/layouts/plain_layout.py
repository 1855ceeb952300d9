"""Layouts once more, the plain way: random trees are walked element by element in memory order, and nothing is clever.

A tree is ``("part", name, itemsize)``, ``("each", word, body, spare bytes)`` or ``("beside", items, align)``. Words are
digits; what one stands for is a function of the digits' values, kept in ``DIGITS``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvpagoda.layouts import Layout

DTYPES = {1: "uint8", 2: "uint16", 4: "float32"}


@dataclass
class Content:
    """What two layouts have in common: sizes of axes, parts with their itemsize and axes, which axes are divided."""

    sizes: dict[str, int]
    parts: dict[str, tuple[int, tuple[str, ...]]]
    pieces: dict[str, int]


@dataclass
class Plain:
    """A tree, how indices of an axis are written in digits, and what a rank holds."""

    tree: Any
    digits: dict[str, tuple[str, int, int]]  # word -> axis, step, count
    ranges: dict[str, range] = field(default_factory=dict)
    parts: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    offset: int = 0

    def bytes(self) -> dict[int, tuple[str, tuple[int, ...], int]]:
        """Byte -> part, indices of its axes in the order of its name, byte of the element."""
        found: dict[int, tuple[str, tuple[int, ...], int]] = {}
        self.end = self._walk(self.tree, self.offset, {}, found)
        return found

    def _walk(self, tree: Any, at: int, values: dict[str, int], found: dict[int, Any]) -> int:
        kind = tree[0]
        if kind == "part":
            _, name, itemsize = tree
            indices = []
            for axis in self.parts[name][1]:
                local = sum(
                    values[word] * step for word, (x, step, _) in self.digits.items() if x == axis and word in values
                )
                if local >= len(self.ranges[axis]):
                    return at + itemsize
                indices.append(self.ranges[axis][local])
            for byte in range(itemsize):
                assert at + byte not in found
                found[at + byte] = (name, tuple(indices), byte)
            return at + itemsize
        if kind == "each":
            _, word, body, spare = tree
            for value in range(self.digits[word][2]):
                at = self._walk(body, at, {**values, word: value}, found) + spare
            return at
        _, items, align = tree
        begin = at  # what is padded to a multiple is its size, wherever it begins
        for item in items:
            at = self._walk(item, at, values, found)
        return begin + -(-(at - begin) // align) * align


def plain_size(plain: Plain, tree: Any) -> int:
    if tree[0] == "part":
        return tree[2]
    if tree[0] == "each":
        return plain.digits[tree[1]][2] * (plain_size(plain, tree[2]) + tree[3])
    return -(-sum(plain_size(plain, item) for item in tree[1]) // tree[2]) * tree[2]


def text(plain: Plain, tree: Any) -> str:
    """The expression of a tree."""
    if tree[0] == "part":
        return f"{tree[1]}:{DTYPES[tree[2]]}"
    if tree[0] == "each":
        stride = f"@{plain_size(plain, tree[2]) + tree[3]}" if tree[3] else ""
        return f"{tree[1]}{stride} {text(plain, tree[2])}"
    return "(" + " | ".join(text(plain, item) for item in tree[1]) + ")" + (f"^{tree[2]}" if tree[2] > 1 else "")


def random_content(rng: random.Random) -> Content:
    sizes = {
        "L": rng.randint(1, 3),
        "T": rng.randint(1, 7),
        "H": rng.choice([1, 1, 2, 4]),
        "D": rng.choice([1, 2, 3, 4]),
    }
    parts: dict[str, tuple[int, tuple[str, ...]]] = {}
    for name in rng.choice([("k",), ("k", "v"), ("k", "v", "s"), ("r", "k"), ("r",)]):
        axes = {"k": "LTHD", "v": "LTHD", "s": "LTH", "r": "LTD"}[name]
        parts[name] = (rng.choice([1, 1, 2, 4]), tuple(axes))
    used = {axis for _, axes in parts.values() for axis in axes}
    sizes = {axis: size for axis, size in sizes.items() if axis in used}
    return Content(sizes, parts, {"H": sizes["H"]} if "H" in sizes else {})


def random_plain(rng: random.Random, content: Content, ranges: dict[str, range]) -> tuple[Plain, dict[str, int]]:
    """A random tree over the content that a rank holds, and the sizes of its pages."""
    words: dict[str, list[str]] = {axis: [axis] for axis in content.sizes}
    digits = {axis: (axis, 1, len(held)) for axis, held in ranges.items()}
    page = {"N": 1, "P": 1}
    tokens = len(ranges["T"])
    if rng.random() < 0.8:
        page = {"N": rng.choice([1, 2, 3, 4]), "P": rng.choice([1, 1, 2])}
        block = page["N"] * page["P"]
        words["T"] = ["B", "P", "N"]
        digits |= {"B": ("T", block, -(-tokens // block)), "P": ("T", page["N"], page["P"]), "N": ("T", 1, page["N"])}
    if "D" in words and rng.random() < 0.2:
        words["D"] = ["D/2", "D%2"]
        digits |= {"D/2": ("D", 2, -(-len(ranges["D"]) // 2)), "D%2": ("D", 1, 2)}
    plain = Plain(None, digits, ranges, content.parts)

    def grow(names: list[str], used: list[str]) -> Any:
        """A tree of these parts, below digits that are used already."""
        open_words = [
            [word for axis in content.parts[name][1] for word in words[axis] if word not in used] for name in names
        ]
        shared = [word for word in open_words[0] if all(word in others for others in open_words)]
        if len(names) == 1 and not shared:
            return ("part", names[0], content.parts[names[0]][0])
        widest = max(content.parts[name][0] for name in names)
        if shared and (len(names) == 1 or rng.random() < 0.7):
            word = rng.choice(shared)
            body = grow(names, [*used, word])
            return ("each", word, body, -plain_size(plain, body) % widest + (widest if rng.random() < 0.1 else 0))
        rng.shuffle(names)
        cut = rng.randint(1, len(names) - 1)
        items = [grow(names[:cut], used), grow(names[cut:], used)]
        if plain_size(plain, items[0]) % widest:
            items[0] = ("beside", [items[0]], widest)
        return ("beside", items, rng.choice([1, 1, 1, widest, 16]))

    plain.tree = grow(list(content.parts), [])
    plain.offset = rng.choice([0, 0, 0, 4, 64])
    return plain, page


def made(plain: Plain, content: Content, page: dict[str, int]) -> Layout:
    """The library's layout of the same."""
    from kvpagoda.layouts.axes import Axis

    axes = tuple(
        Axis(axis, len(plain.ranges[axis]), content.sizes[axis], plain.ranges[axis].start, content.pieces.get(axis, 0))
        for axis in content.sizes
    )
    return Layout(text(plain, plain.tree), axes, page["N"], page["P"], offset=plain.offset)
