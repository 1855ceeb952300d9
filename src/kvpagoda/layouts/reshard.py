"""Plan copies between layouts: ``reshard(source, target)`` returns which bytes to copy where. ``run`` copies them.

Each side is one layout, or one for each rank (``Layout.split``). The content must be equal: names of parts, dtypes,
names and sizes of axes. Everything else may differ: order, pages, packing, padding, and the ranges of the ranks.

Target rank r of W needs the sources that hold its heads: source floor(r * S / W) of S if there are fewer sources than
targets, a run of sources if there are more. If several sources hold the same range (a latent, or more ranks than
heads), one of them is chosen.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, LayoutError
from kvpagoda.layouts.axes import TOKENS, Axis, Ints
from kvpagoda.layouts.copying import Bytes, Moved, copy, cut, joined, of_parts
from kvpagoda.layouts.expression import PADS
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.recode import Recode, recode_of
from kvpagoda.units import format_bytes, whole_number

Slots = npt.ArrayLike | None
Pair = tuple[int, int]
"""(source rank, target rank)."""
Held = Mapping[str, Axis]
"""Name of an axis of a part -> the axis with the range that a rank holds."""


@dataclass(frozen=True)
class ReshardPlan:
    """The bytes to copy between every pair of ranks that share content. Made by ``reshard``.

    Args:
        sources: layouts of the ranks that are read.
        targets: layouts of the ranks that are written.
        moved: pair of ranks -> the parts to copy.
        slots: token slots of the source and of the target; None: all tokens in order.
        recode: None if both sides encode alike; else ``run`` recodes the rows into the target's dialect, but the spans
            do not: after a copy by ``spans`` the target holds rows in the source's dialect.
    """

    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    moved: Mapping[Pair, tuple[Moved, ...]]
    slots: tuple[Ints | None, Ints | None]
    recode: Recode | None

    @cached_property
    def by_rank(self) -> dict[Pair, Ints]:
        """(source rank, target rank) -> spans, int64 ``[n, 3]``: (source byte, target byte, bytes).

        They are merged and sorted by source byte.
        """
        return {ranks: of_parts(parts) for ranks, parts in self.moved.items()}

    @property
    def spans(self) -> Ints | dict[Pair, Ints]:
        """``by_rank``, or its only array if there is one source and one target."""
        return self.by_rank if len(self.sources) * len(self.targets) > 1 else self.by_rank[0, 0]

    @property
    def nbytes(self) -> int:
        """Bytes that the plan copies."""
        return sum(int(spans[:, 2].sum()) for spans in self.by_rank.values())

    def transfers(
        self, ranks: Pair, source: int | Sequence[int], target: int | Sequence[int], most: int | None = None
    ) -> tuple[Ints, Ints, Ints]:
        """Return source addresses, target addresses and lengths for a transfer engine, each int64 ``[n]``.

        Mooncake takes them as lists of buffers and sizes, NIXL as (address, length, device) on either side.

        Args:
            ranks: the pair of ranks.
            source: the address of a rank's memory, or the addresses of the equal pieces in which it is allocated (a
                tensor for each layer, or for K and V of each).
            target: as ``source``.
            most: the most bytes of one transfer.

        Raises:
            BadInput: unknown ranks or pieces that are not equal.
        """
        if not (0 <= ranks[0] < len(self.sources) and 0 <= ranks[1] < len(self.targets)):
            text = f"no ranks {ranks}; there are {len(self.sources)} sources and {len(self.targets)} targets"
            raise BadInput(text, needed=ranks, available=(len(self.sources), len(self.targets)))
        spans = self.by_rank.get(ranks, np.empty((0, 3), np.int64))
        if most is not None:
            spans = cut(spans, whole_number(most, "most", at_least=1), 0 * spans[:, 0])
        sides = (self.sources[ranks[0]], source), (self.targets[ranks[1]], target)
        pieces = []
        for column, (layout, given) in enumerate(sides):
            addresses = np.atleast_1d(np.asarray(given, np.int64))
            if not len(addresses) or layout.nbytes % len(addresses):
                text = f"{layout.nbytes:,} bytes are not {len(addresses)} equal pieces; give an address for each"
                raise BadInput(text, needed=layout.nbytes, available=len(addresses))
            pieces.append((addresses, layout.nbytes // len(addresses)))
            spans = cut(spans, pieces[-1][1], spans[:, column])
        begins, puts = (
            addresses[spans[:, column] // size] + spans[:, column] % size
            for column, (addresses, size) in enumerate(pieces)
        )
        return begins, puts, spans[:, 2]

    def run(self, sources: Any, targets: Any, threads: int | None = None) -> None:
        """Copy the bytes between memories of this host. All other bytes of the targets stay as they are.

        A side with one rank may be given without a list. Memories are numpy arrays, torch tensors on the CPU, or
        buffers.

        Args:
            sources: a memory for each rank.
            targets: a memory for each rank, writable.
            threads: that share the copies; None: one for every 16 MiB, at most 4 and the number of cores.

        Raises:
            BadInput: a wrong number of memories, or memory that is too short, read-only or overlaps; before anything is
                copied.
        """
        given = _memories(sources, self.sources, "source"), _memories(targets, self.targets, "target")
        for number, target in enumerate(given[1]):
            if not target.flags.writeable:
                raise BadInput(f"target {number} is read-only memory", needed="writeable memory", available=number)
            if any(np.may_share_memory(memory, target) for memory in (*given[0], *given[1][:number])):
                text = f"target {number} overlaps a source or another target; copy into other memory"
                raise BadInput(text, needed="memory of its own", available=number)
        if threads is not None:
            threads = whole_number(threads, "threads", at_least=1)
        else:
            threads = min(1 + self.nbytes // (16 << 20), 4, os.cpu_count() or 1)
        if self.recode is not None:
            self._recoded(self.recode, *given, threads)
            return
        copy(((parts, given[0][giver], given[1][taker]) for (giver, taker), parts in self.moved.items()), threads)

    def _recoded(self, recode: Recode, sources: list[Bytes], targets: list[Bytes], threads: int) -> None:
        """Run the plan with staging pages, which are recoded before any target changes."""
        from kvpagoda.layouts.packed import encoded_anew

        tokens = _held(self.targets[0], (TOKENS,), self.slots[1])[TOKENS].size
        before, after = recode.stages(self.targets, tokens)
        staged = [np.zeros(stage.nbytes, np.uint8) for stage in before]
        reshard(self.sources, before, source_slots=self.slots[0]).run(sources, staged, threads)
        staged = [encoded_anew(recode, stage, memory) for stage, memory in zip(before, staged)]
        reshard(after, self.targets, target_slots=self.slots[1]).run(staged, targets, threads)

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes and numbers of the copies, as plain data."""
        lengths = np.concatenate([spans[:, 2] for spans in self.by_rank.values()])
        return {
            "source": self.sources[0].fingerprint,
            "target": self.targets[0].fingerprint,
            "source_ranks": len(self.sources),
            "target_ranks": len(self.targets),
            "transfers": sum(len(spans) > 0 for spans in self.by_rank.values()),
            "nbytes": self.nbytes,
            "spans": len(lengths),
            "shortest": int(lengths.min()),
            "median": int(np.median(lengths)),
            "longest": int(lengths.max()),
            "recode": None if self.recode is None else str(self.recode),
        }

    def __str__(self) -> str:
        cost = self.to_dict()
        sizes = f"{cost['shortest']:,} bytes"
        if cost["shortest"] < cost["longest"]:
            sizes = f"{cost['shortest']:,} to {cost['longest']:,} bytes (median {cost['median']:,})"
        ranks = f", {cost['transfers']} pairs of {cost['source_ranks']} source and {cost['target_ranks']} target ranks"
        is_one = cost["source_ranks"] == cost["target_ranks"] == 1
        encoded = "" if self.recode is None else f"; recoded: {self.recode}"
        return f"{format_bytes(cost['nbytes'])} in {cost['spans']:,} spans of {sizes}{'' if is_one else ranks}{encoded}"


def reshard(
    source: Layout | Sequence[Layout],
    target: Layout | Sequence[Layout],
    *,
    source_slots: Slots = None,
    target_slots: Slots = None,
) -> ReshardPlan:
    """Plan the copy of everything that ``target`` holds from ``source``. O(parts * pairs of ranks + spans).

    Args:
        source: a layout, or a list of layouts by rank.
        target: a layout, or a list of layouts by rank.
        source_slots: int ``[n]``, the token slot (block * tokens of a block + offset) of the i-th token on that side,
            the same on every rank; default: all tokens in order.
        target_slots: as ``source_slots``.

    Raises:
        LayoutError: the content differs (rule 'content': parts, dtypes, axes, sizes, format), the ranks do not hold
            everything exactly once ('shards'), or the dialect cannot be changed ('dialect').
        BadInput: slots out of range.
    """
    sources, targets = _ranks(source), _ranks(target)
    slots = _slots(source_slots, sources[0], "source_slots"), _slots(target_slots, targets[0], "target_slots")
    keys, recode = _alike(sources, targets, slots), recode_of(sources[0], targets[0])
    moved: dict[Pair, list[Moved]] = {}
    for key in keys:
        axes = targets[0].movable[key].axes
        held = [[_held(layout, axes, given) for layout in side] for side, given in zip((sources, targets), slots)]
        for rank, target_axes in enumerate(held[1]):
            for giver in _givers(key, held[0], target_axes, rank, len(targets)):
                sides = (sources[giver], held[0][giver], slots[0]), (targets[rank], target_axes, slots[1])
                moved.setdefault((giver, rank), []).append(_moved(key, *sides))
    return ReshardPlan(
        sources, targets, {pair: tuple(joined(parts)) for pair, parts in sorted(moved.items())}, slots, recode
    )


def _ranks(given: Layout | Sequence[Layout]) -> tuple[Layout, ...]:
    """Return one layout, or layouts by rank, as a tuple. Raises BadInput."""
    ranks = (given,) if isinstance(given, Layout) else tuple(given)
    if not ranks or not all(isinstance(one, Layout) for one in ranks):
        text = f"give a Layout, or a list of them by rank, not {type(given).__name__} {str(given)[:40]!r}"
        raise BadInput(text, needed=type(given).__name__)
    return ranks


def _slots(given: Slots, layout: Layout, name: str) -> Ints | None:
    """Return the token slots as int64; None for all tokens. Raises BadInput."""
    if given is None:
        return None
    slots, most = np.asarray(given), layout.axis(TOKENS).size
    if slots.ndim != 1 or not np.issubdtype(slots.dtype, np.integer) or not len(slots):
        text = f"{name} must be a vector of whole numbers, got {slots.dtype} {list(slots.shape)}"
        raise BadInput(text, field=name, needed=slots.dtype, available=list(slots.shape))
    if not 0 <= slots.min() <= slots.max() < most:
        text = f"{name} {slots.min()}..{slots.max()} are not all in 0..{most - 1}"
        raise BadInput(text, field=name, needed=[int(slots.min()), int(slots.max())], available=most - 1)
    if len(np.unique(slots)) < len(slots):
        text = f"{name} contain a slot twice; give every token a slot of its own"
        raise BadInput(text, field=name, needed=len(slots), available=len(np.unique(slots)))
    return slots.astype(np.int64)


Content = tuple[str, dict[str, int]]
"""(dtype of a part, name of an axis -> its whole size)."""


def _content(layout: Layout, slots: Ints | None) -> dict[str, Content]:
    """Return part -> its content; with slots, the token axis has as many tokens as there are slots."""
    return {
        key: (place.dtype, {name: axis.total for name, axis in sorted(_held(layout, place.axes, slots).items())})
        for key, place in layout.movable.items()
    }


def _alike(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], slots: tuple[Ints | None, Ints | None]
) -> list[str]:
    """Return the parts to copy: all parts with content, and the padding parts that every layout has.

    Raises LayoutError unless all layouts hold the same content, and each side has one dialect.
    """
    wanted = _content(targets[0], slots[1])
    parts = {key for key in wanted if targets[0].movable[key].name not in PADS}
    keys = [*wanted]
    for side, layouts, given in (("source", sources, slots[0]), ("target", targets, slots[1])):
        for rank, layout in enumerate(layouts):
            found, where = _content(layout, given), f"{side} rank {rank}"
            keys = [key for key in keys if found.get(key) == wanted[key]]
            if missing := {key for key in found if layout.movable[key].name not in PADS} ^ parts:
                raise LayoutError.of(
                    "content",
                    f"{where} has the parts {', '.join(found)}; the target has {', '.join(wanted)}: "
                    f"{', '.join(sorted(missing))} not in both",
                    needed=sorted(missing),
                )
            if differing := sorted(parts - {*keys}):
                source_text, target_text = _said(found[differing[0]]), _said(wanted[differing[0]])
                hint = "lay out the same content on both sides: resize one, or name the slots of the tokens that move"
                text = f"{where}: part {differing[0]!r} is {source_text}; in the target {target_text}; {hint}"
                raise LayoutError.of("content", text, needed=differing[0])
            if layout.dialect != layouts[0].dialect:
                text = f"{where} has dialect {layout.dialect!r}, rank 0 has {layouts[0].dialect!r}"
                raise LayoutError.of("dialect", text, needed=layouts[0].dialect, available=layout.dialect)
            if layout.format != targets[0].format:
                text = f"{where} has rows of format {layout.format!r}, the target {targets[0].format!r}"
                raise LayoutError.of("content", text, needed=targets[0].format, available=layout.format)
    return keys


def _said(content: Content) -> str:
    """Return ``content`` as text, for error messages."""
    return f"{content[0]} of {', '.join(f'{name} {size}' for name, size in content[1].items())}"


def _held(layout: Layout, axes: Sequence[str], slots: Ints | None) -> dict[str, Axis]:
    """Return the axes of a part on a rank; with slots, the token axis has as many tokens as there are slots."""
    held = {name: layout.axis(name) for name in axes}
    if slots is not None and TOKENS in held:
        held[TOKENS] = Axis(TOKENS, len(slots), len(slots))
    return held


Side = tuple[Layout, Mapping[str, Axis], Ints | None]
"""(layout of a rank, its axes of the part, its token slots)."""


def _moved(key: str, source: Side, target: Side) -> Moved:
    """Return what to copy of part ``key`` from one rank to another."""
    places = [layout.movable[key] for layout, _, _ in (source, target)]
    begins, axes = [place.offset for place in places], []
    for name in places[1].axes:
        both = _overlap(source[1][name], target[1][name])
        adds = []
        for place, (layout, held, slots) in zip(places, (source, target)):
            local = np.arange(both.start, both.stop) - held[name].first
            adds.append(layout.along(place, name, local if slots is None or name != TOKENS else slots[local]))
        strides = tuple((fold, stride) for place in places for fold, stride in place.strides if fold.axis == name)
        begins = [begin + int(added[0]) for begin, added in zip(begins, adds)]
        if len(both) > 1:
            axes.append((adds[0] - adds[0][0], adds[1] - adds[1][0], (both, strides)))
    axes.sort(key=lambda axis: abs(int(axis[0][1])))
    pairs, named = tuple((adds, puts) for adds, puts, _ in axes), tuple(name for _, _, name in axes)
    return Moved(begins[0], begins[1], places[1].itemsize, pairs, named)


def _overlap(mine: Axis, theirs: Axis) -> range:
    """Return the indices of the whole axis that are in both ranges."""
    return range(max(mine.first, theirs.first), min(mine.first + mine.size, theirs.first + theirs.size))


def _givers(part: str, sources: Sequence[Held], target: Held, rank: int, ways: int) -> list[int]:
    """Return the source ranks from which target rank ``rank`` of ``ways`` copies ``part``, ascending.

    Together they hold every element of the target exactly once. Among sources with equal ranges, the first from
    ``rank * sources // ways`` on is chosen, else the last, so that targets are spread over the sources. Raises
    LayoutError with rule 'shards' if an element is missing, or if the ranges of two source ranks overlap without being
    equal. O(sources).
    """
    alike: dict[tuple[range, ...], list[int]] = {}
    for number, held in enumerate(sources):
        ranges = tuple(_overlap(held[name], axis) for name, axis in target.items())
        if all(ranges):
            alike.setdefault(ranges, []).append(number)
    first = rank * len(sources) // ways
    chosen = [next((number for number in ranks if number >= first), ranks[-1]) for ranks in alike.values()]
    wants = ", ".join(f"{axis.name} {axis.first}..{axis.first + axis.size - 1}" for axis in target.values())
    for left, right in combinations(alike, 2):
        if all(a.start < b.stop and b.start < a.stop for a, b in zip(left, right)):
            ranks = f"{alike[left][0]} and {alike[right][0]}"
            text = f"source ranks {ranks} overlap in {part!r} ({wants}) without holding the same range"
            raise LayoutError.of("shards", text, needed=part)
    found, wanted = sum(prod(map(len, ranges)) for ranges in alike), prod(axis.size for axis in target.values())
    if found < wanted:
        text = f"target rank {rank} needs {wants} of {part!r}; the sources have {found} of its {wanted} elements"
        raise LayoutError.of("shards", text, needed=wanted, available=found)
    return sorted(chosen)


def _memories(given: Any, layouts: Sequence[Layout], side: str) -> list[Bytes]:
    """Return the memory of each rank as a uint8 vector. Raises BadInput."""
    several = isinstance(given, list | tuple)
    if (several and len(given) != len(layouts)) or (not several and len(layouts) != 1):
        text = f"give a list of {len(layouts)} memories, one for each {side} rank"
        raise BadInput(text, field=side, needed=len(layouts))
    memories = []
    for rank, (buffer, layout) in enumerate(zip(given if several else [given], layouts)):
        try:
            memory = _tensor_bytes(buffer) if hasattr(buffer, "data_ptr") else np.asarray(memoryview(buffer))
        except (TypeError, ValueError) as error:
            raise BadInput(f"{side} rank {rank} is not host memory: {error}", field=side, needed=rank) from None
        if not memory.flags.c_contiguous:
            text = f"{side} rank {rank} is not one contiguous piece of memory"
            raise BadInput(text, field=side, needed=rank, available="pieces")
        memories.append(memory.reshape(-1).view(np.uint8))
        if memories[-1].nbytes < layout.nbytes:
            text = f"{side} rank {rank} has {memories[-1].nbytes:,} bytes; its layout takes {layout.nbytes:,}"
            raise BadInput(text, field=side, needed=layout.nbytes, available=memories[-1].nbytes)
    return memories


def _tensor_bytes(tensor: Any) -> Bytes:
    """Return the bytes of a dense torch tensor on the CPU, of any dtype (numpy has no bfloat16).

    The result shares the tensor's memory; the caller must keep the tensor alive.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a tensor must be dense and on the CPU, this one is on {tensor.device}; copy it by its spans")
    nbytes = tensor.numel() * tensor.element_size()
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()), np.uint8)
