"""The drawing of sleep and wake: which blocks are dropped, which wait in host memory, and where they are afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.drawings.blocks import BLOCK, FULL, LEFT, STEP, cell, legend, model, state_of
from tools.drawings.svg import MARGIN, Picture

from kvpagoda import KVCache


def sleep() -> Picture:
    """Draw a cache in which a request runs and two texts are cached, before it sleeps, while it sleeps, and after."""
    picture = Picture("Sleep and wake: the memory is given back, and what was kept is at the same addresses afterwards")
    cache = KVCache(model(FULL), num_blocks=10, block_size=BLOCK, max_requests=2, device="cpu")
    (group,) = cache._core.groups
    for tokens in (range(900, 948), range(100, 132)):
        with cache.open(tokens) as sequence:
            sequence.commit(tokens)
    running = cache.open(range(40), reserve=48)
    running.commit(range(40))
    seen: set[str] = set()

    def frame(title: str, text: str) -> list[str]:
        cache.lookup([0])
        states = [state_of(cache, group, place) for place in range(1, group.plan.num_rows)]
        aside: Any = cache._core.guard.aside
        waiting = [] if aside is None else aside.copies[0].places.tolist()
        picture.heading(title)
        picture.paragraph(text, size=10.5)
        picture.y += 4
        picture.text(MARGIN, picture.y + 14, "addresses", size=10)
        for column, state in enumerate(states):
            if aside is None:
                cell(picture, LEFT + column * STEP, str(column + 1), state)
                seen.add(state)
            else:
                picture.box(LEFT + column * STEP, picture.y, 24, 20, "", "line", dashed=True)
                picture.text(LEFT + column * STEP + 12, picture.y + 14, str(column + 1), "faint", 10, "middle")
        picture.y += 25
        if waiting:
            picture.text(MARGIN, picture.y + 14, "host memory", size=10)
            for at, place in enumerate(waiting):
                cell(picture, LEFT + at * STEP, str(place), states[place - 1])
            picture.y += 25
        picture.y += 9
        return states

    frame("Awake", "A request holds three blocks. Two texts are cached, of three blocks and of two.")
    slept = cache.sleep("tree", nbytes=2 * group.plan.row_nbytes)
    kept = frame(
        'sleep("tree", nbytes=..): the bytes of two blocks',
        f"{slept.dropped} blocks are dropped, those that were used least recently. What the request holds and {slept.kept} "
        "cached blocks wait in host memory. No memory is behind the addresses.",
    )
    cache.wake()
    after = frame("wake", "Each block is at its own address again, and block tables are the same.")
    assert after == kept and (slept.kept, slept.dropped) == (2, 3)
    legend(picture, [state for state in ("shared", "held", "cached", "free") if state in seen])
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {"sleep": sleep}
