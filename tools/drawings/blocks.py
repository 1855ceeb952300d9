"""Drawings of blocks, from caches that run without memory: what they show is read from the cache's own tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpagoda import KVCache, Limits, Retention, Schema
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from tools.drawings.svg import MARGIN, Picture

BLOCK, LEFT, CELL, STEP = 16, 96, 24, 30
FULL, WINDOW = Attention(1, 1, 1, "float16"), Attention(1, 1, 1, "float16", Growth(window=32))
STATE = Recurrent((Rows("recurrent", (1, 16), "float16"),))
SHADES: dict[str, tuple[str, str, str, bool]] = {
    "free": ("", "line", "faint", False),
    "held": ("warm", "warm", "on", False),
    "shared": ("main", "main", "on", False),
    "cached": ("pale", "pale", "ink", False),
    "checkpoint": ("pale", "main", "ink", False),
    "cold": ("", "main", "faint", True),
}
"""State of a block -> fill, edge, colour of its number, and whether its edge is dashed."""
MEANINGS = {
    "free": "free",
    "held": "held by one request",
    "shared": "held, and cached for others",
    "cached": "cached",
    "checkpoint": "cached, a checkpoint needs it",
    "cold": "cached, but cold: evicted first",
}


def model(*kinds: Any) -> Schema:
    """Return the schema of a model with one layer of each of ``kinds``."""
    return Schema(tuple(Layer(number, "layer", (kind,)) for number, kind in enumerate(kinds)), "drawn")


def feed(cache: KVCache, sequence: Any, tokens: range) -> None:
    """Commit ``tokens`` from the end of ``sequence`` on, in steps as long as ``step_limit`` allows and one block at
    most."""
    while sequence.length < tokens.stop - tokens.start:
        begin = tokens.start + sequence.length
        count = min(cache.step_limit(sequence), tokens.stop - begin, BLOCK)
        sequence.extend(count)
        sequence.commit(range(begin, begin + count))
    cache.lookup([0])  # what follows from commits is done when the tree is read


def state_of(cache: KVCache, group: BlockGroup, place: int) -> str:
    """Return the state of the block at ``place``, a key of ``SHADES``."""
    if place not in group.free.held_ids():
        return "free"
    rows = range(len(group.end))
    if any(place in group.own_places(slot) for slot in rows):
        return "held"
    if any(place in group.held_places(slot) for slot in rows):
        return "shared"
    if not group.growth.is_bounded:
        return "cached"
    name = group.names_at(np.array([place], np.int32))  # type: ignore[arg-type]
    kept = [names for checkpoint in cache._core.prefix.kept.values() for names in checkpoint.tails]
    is_kept = bool(np.isin(name, np.concatenate([[], *kept])).any())
    return "checkpoint" if is_kept else "cold"


def cell(picture: Picture, x: float, label: str, state: str, width: float = CELL) -> None:
    """Draw a block with its number at ``x``, in the row at ``y``."""
    fill, edge, ink, dashed = SHADES[state]
    picture.box(x, picture.y, width, 20, fill, edge, dashed=dashed)
    picture.text(x + width / 2, picture.y + 14, label, ink, 10, "middle")


def legend(picture: Picture, states: list[str]) -> None:
    """Draw what the shades of ``states`` mean, two in a row."""
    picture.y += 4
    for number, state in enumerate(states):
        x = MARGIN + (number % 2) * 190
        fill, edge, _, dashed = SHADES[state]
        picture.box(x, picture.y + 1, 12, 12, fill, edge, dashed=dashed)
        picture.text(x + 18, picture.y + 11, MEANINGS[state], "faint", 10)
        if number % 2 or number == len(states) - 1:
            picture.y += 18


def life() -> Picture:
    """Draw the blocks of requests from ``open`` to eviction, in a model with full attention and a window."""
    picture = Picture("The blocks of a request: open, commit, extend and slide, close, and eviction for other requests")
    schema, limits = model(FULL, WINDOW), Limits(step_tokens=BLOCK)
    cache = KVCache(
        schema, 1250, block_size=BLOCK, max_requests=1, device="none", order="layer", limits=limits
    )  # a memory of its own for each group
    seen: set[str] = set()

    def frame(title: str, text: str) -> None:
        cache.lookup([0])
        picture.heading(title)
        picture.paragraph(text, size=10)
        picture.y += 4
        for group in cache._core.groups:
            picture.text(MARGIN, picture.y + 14, group.plan.name, size=10)
            states = [state_of(cache, group, place) for place in range(1, group.plan.num_rows)]
            assert states.count("cold") == cache._core.prefix.cached[group.index].num_cold
            for column, state in enumerate(states):
                cell(picture, LEFT + column * STEP, str(column + 1), state)
            seen.update(states)
            picture.y += 25
        picture.y += 9

    def resumable() -> str:
        return f"The first text can be resumed after {cache.lookup([*range(96), 0]).resumable} of its 96 tokens."

    first = cache.open(range(40))
    frame("open: a prompt of 40 tokens", "Three blocks of 16 tokens in each group. A cell is a block with its id.")
    first.commit(range(40))
    frame("commit: their rows are written", "The two whole blocks are in the prefix tree: others can share them.")
    feed(cache, first, range(96))
    frame("extend, commit: 96 tokens", "The window slid: the request holds its last 32 tokens, in two blocks.")
    first.close()
    frame("close", f"The blocks stay cached until memory is short. {resumable()}")
    second = cache.open(range(900, 964))
    frame("open: another prompt, of 64 tokens", f"The window group lacks blocks: cold ones are evicted. {resumable()}")
    second.commit(range(900, 964))
    second.close()
    cache.open(range(800, 848))
    left = cache.lookup([*range(96), 0])
    frame(
        "open: a third prompt, of 48 tokens",
        f"The full group lacks blocks: the text that was used least recently loses its end. {left.cached} tokens of it are "
        f"left, without their last window: it can be resumed after {left.resumable}.",
    )
    legend(picture, [state for state in SHADES if state in seen])
    return picture


def shared() -> Picture:
    """Draw two requests with the same first 40 tokens over one memory."""
    picture = Picture("Two requests with the same first 40 tokens: their block tables name the same two blocks")
    cache = KVCache(model(FULL), num_blocks=8, block_size=BLOCK, max_requests=2, device="none")
    (group,) = cache._core.groups
    first = cache.open(range(40), reserve=48)
    first.commit([*range(40), *range(100, 108)])
    second = cache.open([*range(40), *range(200, 203)])
    found, step, memory = second.cached_tokens, 38, picture.y + 88

    def tokens(name: str, num_tokens: int, what: str) -> None:
        scale = 3 * step / 48
        picture.text(MARGIN, picture.y + 13, name, bold=True)
        picture.box(LEFT, picture.y, 40 * scale - 1, 18, "pale")
        picture.text(LEFT + 5, picture.y + 13, "40 tokens", size=10)
        picture.box(LEFT + 40 * scale, picture.y, (num_tokens - 40) * scale - 1, 18, "warm")
        picture.text(LEFT + 48 * scale + 6, picture.y + 13, what, "faint", 10)

    def table(sequence: Any, side: int) -> None:
        picture.text(MARGIN, picture.y + 14, "block table", "faint", 10)
        for column, place in enumerate(group.held_places(sequence.slot).tolist()):
            x, state = LEFT + column * step + 15, state_of(cache, group, place)
            cell(picture, x - 15, str(place), state, 30)
            begin, end = (picture.y + 20, memory) if side else (picture.y, memory + 20)
            picture.line([(x, begin), (LEFT + (place - 1) * step + 15, end)], SHADES[state][1])

    tokens("request 1", first.length, f"all {first.length} computed")
    picture.y += 24
    table(first, 1)
    picture.y = memory
    picture.text(MARGIN, memory + 14, "memory", bold=True)
    for place in range(1, group.plan.num_rows):
        cell(picture, LEFT + (place - 1) * step, str(place), state_of(cache, group, place), 30)
    picture.y = memory + 44
    table(second, 0)
    picture.y += 25
    tokens("request 2", second.prompt_length, f"{found} cached, {second.prompt_length - found} to compute")
    picture.y += 26
    copied = found % BLOCK
    source, target = (group.held_places(sequence.slot)[found // BLOCK] for sequence in (first, second))
    picture.paragraph(
        f"Whole blocks are shared by reference. The first {copied} rows of block {source} are copied into block {target}, "
        "so that a hit is exact to the token.",
        size=10,
    )
    legend(picture, ["shared", "held", "free"])
    return picture


def hit() -> Picture:
    """Draw what is cached of a text in a model with full attention, a window and states, and where it can be resumed."""
    picture = Picture("What a hit of a hybrid model needs: blocks of the text, the last window, and a copy of the states")
    cache = KVCache(
        model(FULL, WINDOW, STATE), 1600, block_size=BLOCK, max_requests=2, device="none",
        limits=Limits(step_tokens=BLOCK), retention=Retention(checkpoints=5),
    )  # fmt: skip
    for prompt, end in ((56, 72), (120, 152)):  # two turns of a chat
        with cache.open(range(prompt)) as turn:
            feed(cache, turn, range(end))
    with cache.open(range(900, 948)) as other:  # it needs memory: cold window blocks are evicted
        feed(cache, other, range(900, 948))
    text = np.arange(152, dtype=np.int32)
    prefix = cache._core.prefix
    match = prefix.tree.match(text, cache._core.namespaces.key(None))
    ((group, window),) = prefix.windows
    there = window.are_there(window.cells_of(match.ids)).tolist()
    copies, depth = [], match.num_blocks
    while depth > 0 and (last := prefix.tree.last_checkpoint(match, depth)) is not None:
        copies.append(last[0] // BLOCK)
        depth = copies[-1] - 1
    ends = range(1, match.num_blocks + 1)
    points = [end for end in ends if cache.lookup([*range(end * BLOCK), 999]).resumable == end * BLOCK]
    common = match.num_tokens - BLOCK // 2
    request = cache.open([*range(common), 999])
    at = request.cached_tokens // BLOCK
    needed = {
        "full": set(range(at)),
        group.plan.name: set(window.span(at)),
        "state": {at} if at in copies else set(),
    }
    left, step, bottom = 92, 34, 0.0

    def edge(end: int) -> float:
        return left + end * step - 2

    picture.paragraph(
        f"A new request has the first {common} tokens in common with a cached text. It starts after {at * BLOCK}, the last "
        "position there at which every group has what it needs."
    )
    picture.y += 10
    picture.text(MARGIN, picture.y + 10, "in common", "warm", 10)
    picture.line([(left, picture.y + 7), (left + common / BLOCK * step - 4, picture.y + 7)], "warm")
    picture.line([(left + common / BLOCK * step - 4, picture.y + y) for y in (2, 12)], "warm")
    picture.y += 18
    picture.text(MARGIN, picture.y + 9, "tokens", "faint", 10)
    for end in ends:
        picture.text(edge(end), picture.y + 9, str(end * BLOCK), "faint", 9, "middle")
    picture.y += 16
    top = picture.y
    for name, what in (("full", "every block"), (group.plan.name, "the last two"), ("state", "a copy there")):
        picture.text(MARGIN, picture.y + 9, name, size=11, bold=True)
        picture.text(MARGIN, picture.y + 21, what, "faint", 9)
        if name == "state":
            for end in copies:
                is_needed = end in needed[name]
                picture.dot(edge(end), picture.y + 11, 7, "main" if is_needed else "pale", "main")
        else:
            for block in range(match.num_blocks):
                is_cached = name == "full" or there[block]
                state = "free" if not is_cached else "shared" if block in needed[name] else "cached"
                cell(picture, left + block * step, "" if is_cached else "×", state, step - 4)
        picture.y += 32
    bottom = picture.y
    picture.line([(edge(at), top - 4), (edge(at), bottom + 4)], "warm", dashed=True)
    picture.text(MARGIN, picture.y + 13, "resumable", size=11, bold=True)
    for end in points:
        picture.line([(edge(end) - 4, picture.y + 12), (edge(end), picture.y + 4), (edge(end) + 4, picture.y + 12)], "warm")
        picture.text(edge(end), picture.y + 24, str(end * BLOCK), "warm", 10, "middle", bold=end == at)
    picture.y += 34
    for fill, border, text_of in (
        ("main", "main", "what the request reads"),
        ("pale", "", "cached too"),
        ("", "line", "× evicted: blocks outside of windows go first"),
    ):
        picture.box(MARGIN, picture.y + 1, 12, 12, fill, border)
        picture.text(MARGIN + 18, picture.y + 11, text_of, "faint", 10)
        picture.y += 17
    picture.dot(MARGIN + 6, picture.y + 7, 6, "pale", "main")
    picture.text(MARGIN + 18, picture.y + 11, "checkpoint: a copy of the states; the window before it is kept", "faint", 10)
    picture.y += 17
    return picture


def places() -> Picture:
    """Draw how a block moves: a sector changes its group, the block keeps its name and gets another place."""
    picture = Picture("Names and places: a block of the window group moves to another place and keeps its name")
    schema = Schema(
        (Layer(0, "full", (Attention(2, 1, 1, "float16"),)), Layer(1, "window", (WINDOW,))), "drawn"
    )  # a block of the full group has the bytes of two of the other
    cache = KVCache(
        schema, 1152, block_size=BLOCK, max_requests=3, device="none", limits=Limits(step_tokens=BLOCK),
        retention=Retention(checkpoints=0),
    )  # fmt: skip
    core = cache._core
    assert core.sectors is not None
    first = cache.open(range(48))
    first.commit(range(48))
    second = cache.open(range(100, 132))
    second.commit(range(100, 132))
    second.close()
    full, window = core.groups
    width, left = 48.0, MARGIN
    before = _row(cache, window, first)

    def memory(title: str) -> None:
        cache.lookup([0])
        picture.heading(title)
        for sector in range(1, core.plan.num_sectors):
            x = left + (sector - 1) * (width + 2)
            owner = int(core.sectors.owner[sector])
            picture.box(x - 1, picture.y, width, 36, "", "line")
            if owner < 0:
                continue
            group = core.groups[owner]
            for part in range(per := group.plan.per_sector):
                place = sector * per + part
                state = state_of(cache, group, place)
                is_own = state in ("held", "shared")
                name = int(group.names_at(np.array([place], np.int32))[0])  # type: ignore[arg-type]
                wide = (width - 4) / per - 1
                at = x + 1 + part * (wide + 1)
                fill, ink = ("warm", "on") if is_own and group is window else ("main", "on") if is_own else ("pale", "ink")
                if state == "free":
                    fill, ink = "", "faint"
                picture.box(at, picture.y + 3, wide, 18, fill)
                picture.text(at + wide / 2, picture.y + 16, "" if state == "free" else str(name), ink, 10, "middle", bold=is_own)
                picture.text(at + wide / 2, picture.y + 31, str(place), "faint", 8, "middle")
        picture.y += 42

    def tables() -> None:
        names, cells = _row(cache, window, first)
        for what, values in (("names, in the prefix tree", names), ("places, in the block table", cells)):
            picture.text(MARGIN, picture.y + 12, what, "faint", 10)
            picture.text(190, picture.y + 12, str(values), "ink", 11)
            picture.y += 16
        picture.y += 12

    memory("Before: no sector is free")
    tables()
    third = cache.open(range(200, 216))
    third.commit(range(200, 216))
    memory("A request needs a block of the full group")
    tables()
    after = _row(cache, window, first)
    assert core.capacity.num_moves == 1 and before[0] == after[0] and before[1] != after[1]
    moved = next(name for name, old, new in zip(before[0], before[1], after[1]) if old != new)
    old, new = (cells[before[0].index(moved)] for cells in (before[1], after[1]))
    picture.paragraph(
        f"Block {moved} of the window group moved from place {old} to place {new}, over a cold block. Its sector is the "
        "full group's now. In a cell: the block's name; below it: the place. Lists: the window blocks of the first request.",
        size=10,
    )
    picture.y += 4
    for number, (fill, text) in enumerate(
        (("main", "full group, in use"), ("warm", "window group, in use"), ("pale", "cached"))
    ):
        x = MARGIN + (0, 122, 262)[number]
        picture.box(x, picture.y + 1, 12, 12, fill)
        picture.text(x + 17, picture.y + 11, text, "faint", 10)
    picture.y += 16
    return picture


def _row(cache: KVCache, group: BlockGroup, request: Any) -> tuple[list[int], list[int]]:
    """Return the names and the places of the blocks that ``request`` holds in ``group``, in the order of the text."""
    cache.lookup([0])
    held = group.held_places(request.slot)
    return group.names_at(held).tolist(), held.tolist()


DRAWINGS: dict[str, Callable[[], Picture]] = {"life": life, "shared": shared, "hit": hit, "places": places}
