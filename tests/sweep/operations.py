"""Operations that a test interrupts: each is a generator with a name in ``OPERATIONS``.

The generator prepares a scene and yields one call. It receives what the call returned and whether it raised, and finds
out through public names what the call changed. If it changed nothing, the generator calls again. It returns "undone" or
"done".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from tests.sweep.kinds import Kind
from tests.sweep.scene import Scene

Told = tuple[Any, bool]
"""What the call returned, and whether it raised."""
Steps = Generator[Callable[[], Any], Told, str]
Operation = Callable[[Scene], Steps]
OPERATIONS: dict[str, Operation] = {}
WITH_TIER: set[str] = set()
ONLY: dict[str, Callable[[Kind], bool]] = {}


def operation(name: str, *, tier: bool = False, only: Callable[[Kind], bool] = lambda kind: True) -> Any:
    """Return a decorator that registers a generator function under ``name``. ``tier``: its cache has a tier. ``only``:
    which kinds support it."""

    def add(function: Operation) -> Operation:
        OPERATIONS[name], ONLY[name] = function, only
        if tier:
            WITH_TIER.add(name)
        return function

    return add
