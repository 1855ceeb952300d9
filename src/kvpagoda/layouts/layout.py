"""A layout: the place in memory of every element of a cache, as one value.

The expression (``expression.py``) defines order, packing and padding. The axes define the sizes, and the range that
this rank holds. Format and dialect define the meaning of the bytes of encoded parts. Offsets, strides and sizes in
bytes are computed from these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from kvpagoda.errors import LayoutError
from kvpagoda.layouts.axes import TOKENS, Axis, Ints, Sizes
from kvpagoda.layouts.expression import (
    PADS,
    ArrayPlace,
    Node,
    Parser,
    check_parts,
    drawing,
    own_axes,
    places,
    size_of,
    write,
)
from kvpagoda.units import ceil_div, whole_number

VERSION = 1
"""Version of the JSON form."""


@dataclass(frozen=True)
class Index:
    """The entries of a kernel's index array.

    ``of``: what an entry names: ``"block"``, ``"kernel page"``, ``"token"`` (page * N + offset) or ``"state"``.
    ``padding``: the value of padding entries (None: there are none).
    """

    of: str = "block"
    dtype: str = "int32"
    padding: int | None = None


@dataclass(frozen=True)
class View:
    """A part as a tensor, as ``as_strided`` takes it.

    Args:
        offset: byte of the first element.
        shape: in elements.
        strides: in elements.
        dtype: of an element.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """The places of a cache's parts, in bytes from the start of an allocation.

    Args:
        expression: order, packing and padding, in the layout language.
        axes: the sizes of its axes, or the ranges that a rank holds; the tokens ``T`` may fill their last page only
            partly.
        page_size: tokens of a kernel page (``N``).
        kernel_pages: kernel pages of a block (``P``).
        format: the encoding of rows (``"raw"``, ``"dsv4_584"``, ..).
        dialect: its rules of scale, floor and rounding.
        index: the index array that kernels take.
        offset: bytes before the first block.
        name: a label; layouts that differ only in it are equal and have the same fingerprint.

    Raises:
        LayoutError: an expression that cannot be laid out; the message names the rule.

    Examples:
        >>> layout = Layout.of("L B H N (k[D]:bfloat16 | v[D]:bfloat16)", L=2, B=3, N=4, H=2, D=4)
        >>> layout.nbytes, layout.strides("v"), layout.place("v").offset
        (768, {'L': 384, 'B': 128, 'H': 64, 'N': 16, 'D': 2}, 8)
        >>> layout == Layout.from_json(layout.to_json())
        True
    """

    expression: str
    axes: tuple[Axis, ...]
    page_size: int = 1
    kernel_pages: int = 1
    format: str = "raw"
    dialect: str = ""
    index: Index = Index()
    offset: int = 0
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for what in ("page_size", "kernel_pages", "offset"):
            number = whole_number(getattr(self, what), what, at_least=0 if what == "offset" else 1)
            object.__setattr__(self, what, number)
        texts = {"format": self.format, "dialect": self.dialect, "name": self.name, **vars(self.index)}
        for what, text in texts.items():
            if not isinstance(text, int | None if what == "padding" else str):
                raise LayoutError.of("syntax", f"{what} cannot be {text!r}")
        names = [axis.name for axis in self.axes]
        if len({*names}) != len(names):
            raise LayoutError.of("axis", f"an axis is given twice: {', '.join(names)}")
        object.__setattr__(self, "axes", tuple(sorted(self.axes, key=lambda axis: axis.name)))
        text = write(self.tree)
        object.__setattr__(self, "expression", text[1:-1] if text.startswith("(") and text.endswith(")") else text)
        check_parts(self.places, self._sizes)
        used = {axis for place in self.places for axis in place.axes}
        if self.nbytes >= 2**63:
            raise LayoutError.of(
                "size",
                f"{self.nbytes:,} bytes are more than an address of 64 bits can count",
                needed=self.nbytes, available=2**63 - 1,
            )  # fmt: skip
        if unused := sorted({*names} - used):
            raise LayoutError.of(
                "axis", f"{', '.join(unused)} has a size, but no place in {self.expression!r}", needed=unused
            )

    @classmethod
    def of(
        cls,
        expression: str,
        *,
        pieces: Mapping[str, int] | None = None,
        values: Mapping[str, Any] | None = None,
        **sizes: int,
    ) -> Layout:
        """Return a whole layout from sizes by letter: ``Layout.of("L B N H k[D]:float16", L=2, B=3, N=16, H=8, D=64)``.

        Args:
            expression: in the layout language.
            pieces: axis -> the most pieces into which tensor parallelism divides it; None: single heads ``H``.
            values: other fields of the layout.
            **sizes: ``N`` and ``P`` are page_size and kernel_pages; tokens are given as ``T``, or as ``B`` whole
                blocks; the others are axes.

        Raises:
            LayoutError: the expression breaks a rule of the language, or a size is missing, unknown or out of range.
        """
        page, kernel_pages = sizes.pop("N", 1), sizes.pop("P", 1)
        for word, size in {"N": page, "P": kernel_pages, **sizes}.items():
            whole_number(size, f"the size of {word!r}", at_least=1)
        if "B" in sizes:
            blocks = sizes.pop("B")
            tokens = sizes.setdefault(TOKENS, blocks * page * kernel_pages)
            if ceil_div(tokens, page * kernel_pages) != blocks:
                text = f"{tokens} tokens are not {blocks} blocks of {page * kernel_pages}; give one of B, T"
                raise LayoutError.of("size", text, needed=tokens, available=blocks)
        pieces = {"H": sizes.get("H", 0)} if pieces is None else pieces
        axes = tuple(Axis(axis, size, size, 0, pieces.get(axis, 0)) for axis, size in sizes.items())
        return cls(expression, axes, page, kernel_pages, **(values or {}))

    @cached_property
    def _sizes(self) -> Sizes:
        """The sizes of the words of the expression."""
        return Sizes((*self.axes, *own_axes(self.expression)), self.page_size, self.kernel_pages)

    @cached_property
    def tree(self) -> Node:
        """The parse tree of the expression."""
        return Parser(self.expression, self._sizes).tree()

    @cached_property
    def places(self) -> tuple[ArrayPlace, ...]:
        """Offset and strides of every part, in memory order, including parts without content (``PADS``)."""
        return tuple(places(self.tree, self.offset))

    @cached_property
    def movable(self) -> dict[str, ArrayPlace]:
        """Part -> its place. Parts without content are named after the part before them: ``scale+pad``.

        A copy also moves the parts without content if both sides have them, so that whole rows and pages stay one span.
        """
        by_part: dict[str, ArrayPlace] = {}
        for place in self.places:
            before = next(reversed(by_part), "")
            by_part[f"{before}+{place.name}" if place.name in PADS else place.name] = place
        return by_part

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the allocation, padding and ``offset`` included."""
        return self.offset + size_of(self.tree)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of content: only of the tokens in ``T``, without padding."""
        content = (place for place in self.places if place.name not in PADS)
        return sum(place.itemsize * int(np.prod([self.axis(name).size for name in place.axes])) for place in content)

    def axis(self, name: str) -> Axis:
        """Return an axis.

        Args:
            name: of the axis.

        Raises:
            LayoutError: it is unknown; the message lists the known names.
        """
        if name not in self._sizes.axes:
            text = f"no axis {name!r}; there are {', '.join(self._sizes.axes)}"
            raise LayoutError.of("axis", text, needed=name, available=tuple(self._sizes.axes))
        return self._sizes.axes[name]

    def place(self, part: str) -> ArrayPlace:
        """Return the place of a part.

        Args:
            part: its name.

        Raises:
            LayoutError: it is unknown; the message lists the known names.
        """
        for place in self.places:
            if place.name == part:
                return place
        text = f"no part {part!r}; there are {', '.join(place.name for place in self.places)}"
        raise LayoutError.of("part", text, needed=part)

    def strides(self, part: str) -> dict[str, int]:
        """Return digit -> bytes from value to value, for the digits of a part, outermost first.

        Args:
            part: its name.

        Raises:
            LayoutError: the part is unknown; the message lists the known names.
        """
        return {fold.word: stride for fold, stride in self.place(part).strides}

    def view(self, part: str, *words: str, at: Mapping[str, int] | None = None) -> View:
        """Return a part as a tensor: ``view("k", "B", "N", "H", "D", at={"L": 3})`` is K of layer 3.

        Args:
            part: its name.
            *words: the digits that are its dimensions, in order.
            at: values of digits that are not dimensions; digits in neither are taken at 0.

        Raises:
            LayoutError: a digit that the part does not have, or a value out of range.
        """
        place, fixed = self.place(part), dict(at or {})
        digits = {fold.word: (fold.count, stride) for fold, stride in place.strides}
        for word in (*words, *fixed):
            if word not in digits:
                text = f"part {part!r} has no digit {word!r}; it has {', '.join(digits)}"
                raise LayoutError.of("axis", text, needed=word, available=tuple(digits))
            if not 0 <= fixed.get(word, 0) < digits[word][0]:
                text = f"digit {word!r} of part {part!r} is 0 to {digits[word][0] - 1}, not {fixed[word]}"
                raise LayoutError.of("size", text, needed=fixed[word], available=digits[word][0] - 1)
        shape, strides = [digits[word][0] for word in words], [digits[word][1] // place.itemsize for word in words]
        for dim in reversed(range(len(shape))):
            if shape[dim] == 1:  # this stride is never used as an address, but TMA descriptors contain it (vllm#40737)
                strides[dim] = strides[dim + 1] * shape[dim + 1] if dim + 1 < len(shape) else 1
        offset = place.offset + sum(value * digits[word][1] for word, value in fixed.items())
        return View(offset, tuple(shape), tuple(strides), place.dtype)

    def addresses(self, part: str) -> Ints:
        """Return the byte of every element of a part: int64, one dimension per axis, as in ``place(part).axes``.

        Args:
            part: its name.
        """
        place = self.place(part)
        addresses = np.array(place.offset, dtype=np.int64)
        for name in place.axes:
            addresses = addresses[..., None] + self.along(place, name, np.arange(self.axis(name).size))
        return addresses

    def along(self, place: ArrayPlace, axis: str, indices: Ints) -> Ints:
        """Return the bytes that each index of an axis adds to an element's address, as int64.

        Args:
            place: of the part.
            axis: its name.
            indices: int64 ``[n]``.
        """
        added = np.zeros_like(indices)
        for fold, stride in place.strides:
            if fold.axis == axis:
                added += fold.of(indices) * stride
        return added

    def resized(self, **sizes: int) -> Layout:
        """Return this layout with other sizes.

        Args:
            **sizes: as in ``of``: ``T`` tokens or ``B`` blocks, ``N`` tokens of a page, ``P`` kernel pages of a block,
                or the size of an axis.

        Raises:
            LayoutError: an axis of which this layout has only a rank's range.
        """
        page, kernel_pages = sizes.pop("N", self.page_size), sizes.pop("P", self.kernel_pages)
        if "B" in sizes:
            sizes[TOKENS] = sizes.pop("B") * page * kernel_pages
        changed = {name: self.axis(name) for name in sizes}
        if parts := [name for name, axis in changed.items() if axis.size != axis.total]:
            text = f"axis {parts[0]!r} is a rank's part; resize the whole layout, then split it"
            raise LayoutError.of("size", text, needed=parts[0])
        axes = []
        for axis in self.axes:
            size = sizes.get(axis.name, axis.size)
            pieces = size if axis.pieces == axis.total else axis.pieces
            axes.append(axis if axis.name not in sizes else Axis(axis.name, size, size, pieces=pieces))
        return replace(self, axes=tuple(axes), page_size=page, kernel_pages=kernel_pages)

    def split(self, tp: int = 1, pp: int = 1) -> tuple[Layout, ...]:
        """Return the layout of each rank, those of the first stage first.

        Axes without pieces (a latent, an indexer key) are whole on every rank.

        Args:
            tp: tensor-parallel ranks of a stage.
            pp: stages of layers ``L``.

        Raises:
            LayoutError: an axis cannot be divided.
        """
        tp, pp = whole_number(tp, "tp", at_least=1), whole_number(pp, "pp", at_least=1)
        if pp > 1 and "L" not in {axis.name for axis in self.axes}:
            text = f"pipeline stages divide layers, and {self.expression!r} has no axis L"
            raise LayoutError.of("divide", text, needed="L")

        def part(axis: Axis, stage: int, rank: int) -> Axis:
            return axis.stage(stage, pp) if axis.name == "L" else axis.piece(rank, tp)

        ranks = product(range(pp), range(tp))
        return tuple(replace(self, axes=tuple(part(axis, *rank) for axis in self.axes)) for rank in ranks)

    def _identity(self) -> dict[str, Any]:
        """Return all fields but ``name`` as plain data."""
        return {
            "layout": VERSION,
            "expression": self.expression,
            "axes": {axis.pop("name"): axis for axis in map(asdict, self.axes)},
            "page_size": self.page_size,
            "kernel_pages": self.kernel_pages,
            "format": self.format,
            "dialect": self.dialect,
            "index": asdict(self.index),
            "offset": self.offset,
        }

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE2b-128 of all fields but ``name``, as 32 hexadecimal digits.

        Caches with different fingerprints have different bytes, or give them a different meaning.
        """
        text = json.dumps(self._identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, and under ``follows`` the offsets, strides and sizes computed from them."""
        parts: list[dict[str, Any]]
        parts = [{"name": place.name, "dtype": place.dtype, "offset": place.offset} for place in self.places]
        for part, place in zip(parts, self.places):
            part["strides"] = [
                {"digit": fold.word, "axis": fold.axis, "step": fold.step, "count": fold.count, "stride": stride}
                for fold, stride in place.strides
            ]
        follows = {"nbytes": self.nbytes, "payload_nbytes": self.payload_nbytes, "fingerprint": self.fingerprint}
        return {**self._identity(), "name": self.name, "follows": {**follows, "parts": parts}}

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Return the layout that ``to_json`` wrote.

        Args:
            text: ``follows`` may be absent in it; if present, its values must be right.

        Raises:
            LayoutError: text that is not a layout, has another version or wrong values in ``follows`` (rule
                'descriptor').
        """
        try:
            data = json.loads(text)
            if data["layout"] != VERSION:
                raise LayoutError.of("descriptor", f"version {data['layout']!r} of the layout form is not {VERSION}")
            axes = tuple(Axis(name, **axis) for name, axis in data["axes"].items())
            kept = {
                key: data[key] for key in ("page_size", "kernel_pages", "format", "dialect", "offset") if key in data
            }
            layout = cls(
                data["expression"], axes, **kept, index=Index(**data.get("index", {})), name=data.get("name", "")
            )
            claimed, follows = dict(data.get("follows", {})), layout.to_dict()["follows"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError.of(
                "descriptor", f"this text is not a layout: {type(error).__name__} {error}", needed=type(error).__name__
            ) from None
        if wrong := [key for key, value in claimed.items() if follows.get(key) != value]:
            raise LayoutError.of("descriptor", f"{', '.join(wrong)} does not follow from {layout.expression!r}")
        return layout

    def __str__(self) -> str:
        title = ", ".join(filter(None, (self.name or "layout", self.format, self.dialect)))
        ranges = [
            (x.name, f"{x.size:,}" if x.size == x.total else f"{x.first:,}..{x.first + x.size - 1:,}")
            for x in self.axes
        ]
        sizes = ", ".join(f"{name} {size}" for name, size in ranges)
        padding = "" if self.index.padding is None else f", {self.index.padding} is padding"
        index = f"index of a {self.index.of}: {self.index.dtype}{padding}"
        head = f"{title}: {self.nbytes:,} bytes, {self.payload_nbytes:,} of them content"
        return "\n".join([head, self.expression, f"{sizes}; {index}", *drawing(self.tree, self.offset)])
