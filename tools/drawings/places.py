"""The drawing of names and places: a sector changes its group, and a block in it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tools.drawings.blocks import BLOCK, WINDOW, model, state_of
from tools.drawings.svg import MARGIN, Picture

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.schema import Attention

SECTOR = 46.5
TWICE = Attention(2, 1, 1, "float16")
"""Full attention whose blocks have the bytes of two window blocks."""


def places() -> Picture:
    """Draw how a block of the window group moves and keeps its name, when the full group needs the sector."""
    picture = Picture("Names and places: a block of the window group moves to another place and keeps its name")
    cache = KVCache(
        model(TWICE, WINDOW), 1152, block_size=BLOCK, max_requests=3, device="none", limits=Limits(step_tokens=BLOCK),
        retention=Retention(checkpoints=0),
    )  # fmt: skip
    first = cache.open(range(48))
    first.commit(range(48))
    second = cache.open(range(100, 132))
    second.commit(range(100, 132))
    second.close()
    names, before = _frame(picture, cache, first, "Before: no sector is free")
    window = cache._core.groups[1]
    cold = [place for place in range(1, window.plan.num_rows) if state_of(cache, window, place) == "cold"]
    third = cache.open(range(200, 216))
    third.commit(range(200, 216))
    still, after = _frame(picture, cache, first, "A request needs a block of the full group")
    assert cache._core.capacity.num_moves == 1 and names == still
    ((name, old, new),) = [moved for moved in zip(names, before, after) if moved[1] != moved[2]]
    assert new in cold
    picture.paragraph(
        f"Block {name} of the window group moved from place {old} to place {new}, over a cold block. Its sector is the "
        "full group's now. In a cell: the block's name; below it: the place. Lists: the window blocks of the first "
        "request.",
        size=10,
    )
    picture.y += 4
    for x, fill, text in (
        (MARGIN, "main", "full group, in use"), (128, "warm", "window group, in use"), (268, "pale", "cached"),
    ):  # fmt: skip
        picture.box(x, picture.y + 1, 12, 12, fill)
        picture.text(x + 17, picture.y + 11, text, "faint", 10)
    picture.y += 16
    return picture


def _frame(picture: Picture, cache: KVCache, request: Any, title: str) -> tuple[list[int], list[int]]:
    """Draw the sectors, and the window blocks of ``request``; return their names and their places."""
    cache.lookup([0])  # what follows from commits is done when the tree is read
    core = cache._core
    assert core.sectors is not None
    picture.heading(title)
    for sector in range(1, core.plan.num_sectors):
        x = MARGIN + 1 + (sector - 1) * (SECTOR + 2)
        picture.box(x - 1, picture.y, SECTOR, 36, "", "line")
        owner = int(core.sectors.owner[sector])
        if owner >= 0:
            _blocks(picture, cache, core.groups[owner], sector, x)
    picture.y += 42
    window = core.groups[1]
    held = window.held_places(request.slot)
    names, places = window.names_at(held).tolist(), held.tolist()
    for what, values in (("names, in the prefix tree", names), ("places, in the block table", places)):
        picture.text(MARGIN, picture.y + 12, what, "faint", 10)
        picture.text(190, picture.y + 12, str(values), "ink", 11)
        picture.y += 16
    picture.y += 12
    return names, places


def _blocks(picture: Picture, cache: KVCache, group: BlockGroup, sector: int, x: float) -> None:
    """Draw the blocks that ``group`` has in ``sector``, which begins at ``x``."""
    per = group.plan.per_sector
    width = (SECTOR - 4) / per - 1
    for part, place in enumerate(range(sector * per, (sector + 1) * per)):
        state, at = state_of(cache, group, place), x + 1 + part * (width + 1)
        is_held = state in ("held", "shared")
        held = "main" if group.index == 0 else "warm"
        if state != "free":
            picture.box(at, picture.y + 3, width, 18, held if is_held else "pale")
            name = int(group.names_at(np.array([place], np.int32))[0])  # type: ignore[arg-type]
            ink = "on" if is_held else "ink"
            picture.text(at + width / 2, picture.y + 16, str(name), ink, 10, "middle", bold=is_held)
        picture.text(at + width / 2, picture.y + 31, str(place), "faint", 8, "middle")


DRAWINGS: dict[str, Callable[[], Picture]] = {"places": places}
