"""Drawings of blocks, from caches that run without memory: what they show is read from the cache's own tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tools.drawings.svg import MARGIN, Picture

from kvpagoda import KVCache, Limits, Schema
from kvpagoda.core.groups import CacheGroup
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows

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


def state_of(cache: KVCache, group: CacheGroup, place: int) -> str:
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
        picture.paragraph(text, size=10.5)
        picture.y += 4
        for group in cache._core.groups:
            picture.text(MARGIN, picture.y + 14, group.plan.name, size=10)
            states = [state_of(cache, group, place) for place in range(1, group.plan.num_rows)]
            assert states.count("cold") == group.num_cold
            for column, state in enumerate(states):
                cell(picture, LEFT + column * STEP, str(column + 1), state)
            seen.update(states)
            picture.y += 25
        picture.y += 9

    def resumable() -> str:
        return f"The first text can be resumed after {cache.lookup([*range(96), 0]).resumable} of its 96 tokens."

    first = cache.open(range(40))
    frame("open: a prompt of 40 tokens", "Three blocks of 16 tokens in each group; a cell is a block.")
    first.commit(range(40))
    frame("commit: their rows are written", "Whole blocks are in the prefix tree: others can share them.")
    feed(cache, first, range(96))
    frame("extend, commit: 96 tokens", "The window slid: two blocks hold the request's last 32 tokens.")
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


DRAWINGS: dict[str, Callable[[], Picture]] = {"life": life, "shared": shared}
