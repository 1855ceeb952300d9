"""The drawing of a hit: what a request needs to start in a model with full attention, a window and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tools.drawings.blocks import BLOCK, FULL, STATE, WINDOW, cell, feed, model
from tools.drawings.svg import MARGIN, Picture

from kvpagoda import KVCache, Limits, Retention

LEFT, STEP = 92, 33


class Found(NamedTuple):
    """What a cache has of a text of ``num_blocks`` blocks, and what a request that has ``common`` tokens of it uses.

    ``window``: name of the window group. ``there``: which window blocks are cached. ``copies``: after how many blocks
    there is a copy of the states. ``points``: after how many blocks the text can be resumed. ``start``: after how many
    the request starts. ``span``: the window blocks that it reads."""

    num_blocks: int
    common: int
    window: str
    there: list[bool]
    copies: list[int]
    points: list[int]
    start: int
    span: range


def found() -> Found:
    """Run a chat of two turns, then another request that needs memory, and return what is left of the chat."""
    cache = KVCache(
        model(FULL, WINDOW, STATE), 1600, block_size=BLOCK, max_requests=2, device="none",
        limits=Limits(step_tokens=BLOCK), retention=Retention(checkpoints=5),
    )  # fmt: skip
    for prompt, end in ((56, 72), (120, 152)):
        with cache.open(range(prompt)) as turn:
            feed(cache, turn, range(end))
    with cache.open(range(900, 948)) as other:
        feed(cache, other, range(900, 948))
    prefix = cache._core.prefix
    match = prefix.tree.match(np.arange(152, dtype=np.int32), cache._core.namespaces.key(None))
    (group,) = prefix.windows
    there = group.are_there(group.cells_of(match.ids)).tolist()
    copies, depth = [], match.num_blocks
    while depth > 0 and (last := prefix.tree.last_checkpoint(match, depth)) is not None:
        copies.append(last[0] // BLOCK)
        depth = copies[-1] - 1
    lengths = range(BLOCK, match.num_tokens + 1, BLOCK)
    resumed = [cache.lookup([*range(length), 999]).resumable for length in lengths]
    points = [length // BLOCK for length, start in zip(lengths, resumed) if start == length]
    assert points == sorted(end for end in copies if all(there[block] for block in group.shared_columns(end)))
    common = match.num_tokens - BLOCK // 2
    start = cache.open([*range(common), 999]).cached_tokens // BLOCK
    assert start == max(end for end in points if end * BLOCK <= common)
    return Found(match.num_blocks, common, group.plan.name, there, copies, points, start, group.shared_columns(start))


def hit() -> Picture:
    """Draw what is cached of a text, and where it can be resumed."""
    picture = Picture(
        "What a hit of a hybrid model needs: blocks of the text, the last window, and a copy of the states"
    )
    text = found()
    picture.paragraph(
        f"A new request has the first {text.common} tokens in common with a cached text. It starts after "
        f"{text.start * BLOCK}, the last position there at which every group has what it needs."
    )
    picture.y += 10
    picture.text(MARGIN, picture.y + 10, "in common", "warm", 10)
    end = LEFT + text.common / BLOCK * STEP - 4
    picture.line([(LEFT, picture.y + 7), (end, picture.y + 7)], "warm")
    picture.line([(end, picture.y + 2), (end, picture.y + 12)], "warm")
    picture.y += 18
    picture.text(MARGIN, picture.y + 9, "tokens", "faint", 10)
    for end in range(1, text.num_blocks + 1):
        picture.text(_edge(end), picture.y + 9, str(end * BLOCK), "faint", 9, "middle")
    picture.y += 16
    _groups(picture, text)
    picture.text(MARGIN, picture.y + 13, "resumable", size=11, bold=True)
    for end in text.points:
        x = _edge(end)
        picture.line([(x - 4, picture.y + 12), (x, picture.y + 4), (x + 4, picture.y + 12)], "warm")
        picture.text(x, picture.y + 24, str(end * BLOCK), "warm", 10, "middle", bold=end == text.start)
    picture.y += 34
    for fill, edge, meaning in (
        ("main", "main", "what the request reads"),
        ("pale", "", "cached too"),
        ("", "line", "× evicted: blocks outside of windows go first"),
        ("pale", "main", "checkpoint: a copy of the states; the window before it is kept"),
    ):
        if meaning.startswith("checkpoint"):
            picture.dot(MARGIN + 6, picture.y + 7, 6, fill, edge)
        else:
            picture.box(MARGIN, picture.y + 1, 12, 12, fill, edge)
        picture.text(MARGIN + 18, picture.y + 11, meaning, "faint", 10)
        picture.y += 17
    return picture


def _groups(picture: Picture, text: Found) -> None:
    """Draw a row for each group, and a line through them where the request starts."""
    top = picture.y
    for name, what in (("full", "every block"), (text.window, "the last two"), ("state", "a copy there")):
        picture.text(MARGIN, picture.y + 9, name, size=11, bold=True)
        picture.text(MARGIN, picture.y + 21, what, "faint", 9)
        if name == "state":
            for end in text.copies:
                picture.dot(_edge(end), picture.y + 11, 7, "main" if end == text.start else "pale", "main")
        else:
            read = range(text.start) if name == "full" else text.span
            for block in range(text.num_blocks):
                is_cached = name == "full" or text.there[block]
                state = "free" if not is_cached else "shared" if block in read else "cached"
                cell(picture, LEFT + block * STEP, "" if is_cached else "×", state, STEP - 4)
        picture.y += 32
    x = _edge(text.start)
    picture.line([(x, top - 4), (x, picture.y + 4)], "warm", dashed=True)


def _edge(end: int) -> float:
    """Return where block ``end - 1`` ends."""
    return LEFT + end * STEP - 2


DRAWINGS: dict[str, Callable[[], Picture]] = {"hit": hit}
