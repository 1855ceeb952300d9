"""Calls point down, as imports do: an ``open`` under pressure and a ``commit`` make almost no call into a higher room.

A call points up if caller and callee are both in the library and the callee's room comes later in ``LEVELS``. Calls of
constructors count; resumed generators and returns do not.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.test_layering import LEVELS, room

from kvpagoda import KVCache, Limits, Retention, Schema
from sources import SRC, module_of

MOST_OF_OPEN, MOST_OF_COMMIT = 2, 1
SIZE = 4
GEMMA = Schema.from_hf_config(
    dict(
        model_type="gemma3_text", vocab_size=1000, hidden_size=48, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, sliding_window=8,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    dtype="float32",
)  # fmt: skip


class Calls:
    """A context that counts calls inside the library, and those that enter a room above the caller's."""

    def __init__(self) -> None:
        self.count, self.upward = 0, Counter[str]()
        self._rooms: dict[str, int] = {}
        self._begun: dict[int, FrameType] = {}  # generators that have started, by id of their frame

    def __enter__(self) -> Calls:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._begun.clear()

    def _level(self, frame: FrameType | None) -> int:
        """Return the index in ``LEVELS`` of the room that ``frame`` belongs to; -1 outside the library."""
        if frame is None:
            return -1
        name = frame.f_code.co_filename
        if name not in self._rooms:
            path = Path(name)
            inside = path.is_relative_to(SRC) and path != SRC / "__init__.py"
            self._rooms[name] = LEVELS.index(room(module_of(path))) if inside else -1
        return self._rooms[name]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        caller, callee = self._level(frame.f_back), self._level(frame)
        if caller < 0 or callee < 0 or self._goes_on(frame):
            return
        self.count += 1
        if callee > caller:
            assert frame.f_back is not None
            names = [getattr(one.f_code, "co_qualname", one.f_code.co_name) for one in (frame.f_back, frame)]
            self.upward[f"{LEVELS[caller]}: {names[0]} -> {LEVELS[callee]}: {names[1]}"] += 1

    def _goes_on(self, frame: FrameType) -> bool:
        """Return whether ``frame`` is a generator that started before and is resumed now."""
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        if id(frame) in self._begun:
            return True
        self._begun[id(frame)] = frame
        return False

    def report(self) -> str:
        lines = [f"{count:4}  {what}" for what, count in self.upward.most_common()]
        return f"{self.upward.total()} of {self.count} calls go up\n" + "\n".join(lines)


def leave(cache: KVCache, first: int, length: int) -> None:
    """Compute ``length`` tokens in a request, a block at a time, and close it."""
    tokens = [first, *(i % 900 for i in range(1, length))]
    with cache.open(tokens, capacity=0) as sequence:
        compute(sequence, tokens)


def compute(sequence: Any, tokens: list[int]) -> None:
    """Compute ``tokens`` from the length of ``sequence`` on, a block at a time."""
    for at in range(sequence.length, len(tokens), SIZE):
        sequence.extend(len(tokens[at : at + SIZE]))
        sequence.commit(tokens[at : at + SIZE])


def pressured() -> KVCache:
    """Return a full cache: two requests run, and cached blocks of the group that keeps all tokens take the rest."""
    cache = KVCache(
        GEMMA, "24KiB", device="cpu", max_requests=4, block_size=SIZE, limits=Limits(step_tokens=4 * SIZE),
        retention=Retention(2),
    )  # fmt: skip
    for first in (1, 2):
        cache.open([first] * 3 * SIZE)
    for first in range(100, 160):
        leave(cache, first, 10 * SIZE)
        if cache.stats().evicted_blocks:
            return cache
    raise AssertionError("memory was never full")


def totals(cache: KVCache) -> list[int]:
    """Return how many blocks each group has memory for."""
    return [group.total for group in cache.stats().groups]


def test_an_open_under_pressure_calls_down() -> None:
    cache = pressured()
    before, evicted = totals(cache), cache.stats().evicted_blocks
    with Calls() as calls:
        sequence = cache.open([*range(200, 200 + 5 * SIZE)])
    print("open:", calls.report())
    changes = [now - then for now, then in zip(totals(cache), before)]
    assert cache.stats().evicted_blocks > evicted, "nothing was evicted"
    assert min(changes) < 0 < max(changes), f"no sector changed hands: {changes}"
    assert calls.count > 20
    cache.check()
    sequence.close()
    assert calls.upward.total() <= MOST_OF_OPEN, calls.report()


def test_a_commit_calls_down() -> None:
    cache = pressured()
    tokens = [*range(200, 200 + 4 * SIZE)]
    sequence = cache.open(tokens)
    compute(sequence, tokens[: 3 * SIZE])
    sequence.extend(SIZE)
    with Calls() as calls:  # a block becomes shareable, the window slides
        sequence.commit(tokens[3 * SIZE :])
    print("commit:", calls.report())
    assert calls.count > 10
    cache.check()
    assert calls.upward.total() <= MOST_OF_COMMIT, calls.report()


def test_a_call_upward_is_seen() -> None:
    """``errors`` is the lowest room, so its calls into another room point up. A generator counts once."""
    namespace: dict[str, Any] = {}
    source = (
        "def up(f):\n    return f()\n\ndef each(n):\n    yield from range(n)\n\ndef many():\n    return sum(each(5))\n"
    )
    exec(compile(source, str(SRC / "errors.py"), "exec"), namespace)
    upper: dict[str, Any] = {}
    exec(compile("def f():\n    return 1\n", str(SRC / "schema" / "plan.py"), "exec"), upper)
    outer: dict[str, Any] = {}
    exec(compile("def go(up, f, many):\n    up(f)\n    many()\n", str(SRC / "schema" / "plan.py"), "exec"), outer)
    with Calls() as calls:
        outer["go"](namespace["up"], upper["f"], namespace["many"])
    assert calls.count == 4 and dict(calls.upward) == {"errors: up -> schema: f": 1}
