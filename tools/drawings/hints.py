"""The drawing of promises: how long each text is kept, and what ended its promise."""

from __future__ import annotations

from collections.abc import Callable

from tools.drawings.blocks import BLOCK, FULL, model
from tools.drawings.svg import MARGIN, WIDTH, Picture

from kvpagoda import KVCache, Retention
from kvpagoda.hints import Hints

LEFT, SECOND = 92, 4.6  # where the axis begins; units of a second
END = 64


def hints() -> Picture:
    """Draw three promises of a running cache, from when they were given to when they ended."""
    picture, now = Picture("Three promises on an axis of time, and how each ended"), [0.0]
    cache = KVCache(
        model(FULL), num_blocks=14, block_size=BLOCK, max_requests=2, device="none",
        hints=Hints(lambda: now[0]), retention=Retention(pin_share=0.9),
    )  # fmt: skip
    begun: dict[str, float] = {}
    ended: list[tuple[str, float, str]] = []

    def at(seconds: float) -> None:
        now[0] = seconds
        ended.extend((one.action_id, seconds, one.status) for one in cache.hints.ended())

    def keep(name: str, text: range, **payload: object) -> None:
        with cache.open(text) as sequence:
            sequence.commit(text)
        action = {"action_id": name, "action_type": "kv.retain", "action_version": "1.0"}
        (outcome,) = cache.apply({"actions": [{**action, "payload": {"token_ids": [*text], **payload}}]})
        assert outcome.status == "accepted", outcome
        begun[name] = now[0]

    keep("tool runs", range(48), seconds=30)
    at(5)
    keep("low priority", range(100, 148), seconds=60, priority=10)
    at(12)
    keep("chat", range(200, 248), seconds=60)
    at(30)
    at(40)
    request = range(300, 460)
    with cache.open(request) as sequence:  # needs ten blocks of fourteen
        sequence.commit(request)
    at(40)
    at(50)
    cache.apply(
        {
            "actions": [
                {"action_id": "r", "action_type": "kv.release", "action_version": "1.0", "payload": {"promise": "chat"}}
            ]
        }
    )
    at(50)
    picture.heading("Promises")
    for name, start in begun.items():
        (found,) = [(when, status) for one, when, status in ended if one == name]
        when, status = found
        picture.text(MARGIN, picture.y + 13, name, size=10)
        picture.box(LEFT + start * SECOND, picture.y + 2, (when - start) * SECOND, 15, "pale", "main")
        picture.text(LEFT + when * SECOND + 4, picture.y + 13, status, "warm" if status == "taken" else "faint", 10)
        picture.y += 22
    picture.line([(LEFT, picture.y + 4), (min(WIDTH - MARGIN, LEFT + END * SECOND), picture.y + 4)])
    for seconds in range(0, END, 10):
        picture.text(LEFT + seconds * SECOND, picture.y + 17, f"{seconds} s", "faint", 9)
    picture.y += 24
    picture.paragraph(
        "A promise ends with its time (expired), when its application says so (released), or when a request could not run "
        "otherwise (taken): after 40 s one needs ten of fourteen blocks, and the promise of the lowest priority gives way.",
        size=10.5,
    )
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {"hints": hints}
