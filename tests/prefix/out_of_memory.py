"""A tree in which each call runs out of memory at its first numpy call, then at its second, until it succeeds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

import kvpagoda
from kvpagoda.core.prefix import Evicted, PrefixTree

PACKAGE = str(Path(kvpagoda.__file__).parent)
"""The folder of the library, and not its name, which the path of numpy in a ``.venv`` of a checkout may contain too."""

DISPATCHED = ("concatenate", "where", "zeros_like", "sort", "flatnonzero", "count_nonzero", "array_equal", "unique")
METHODS = (
    "match", "pin", "pin_partial", "unpin", "touch", "insert", "evict", "clear",
    "set_checkpoint", "last_checkpoint", "checkpoints.drop", "checkpoints.evict", "checkpoints.hold", "checkpoints.release",
)  # fmt: skip


class Failing:
    """A context in which the ``nth`` call into numpy's C code raises MemoryError instead. ``has_failed``: whether there
    was such a call."""

    def __init__(self, nth: int) -> None:
        self.left, self.has_failed = nth, False
        self._functions: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Failing:
        for name in DISPATCHED:  # the profiler does not see these
            self._functions[name] = getattr(np, name)
            setattr(np, name, self._counted(getattr(np, name)))
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        for name, function in self._functions.items():
            setattr(np, name, function)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self._count()
            return function(*arguments, **keywords)

        return call

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE):
            owner = getattr(function, "__self__", None)
            if isinstance(owner, np.ndarray | np.generic) or (getattr(function, "__module__", "") or "").startswith(
                "numpy"
            ):
                self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.has_failed = True
            raise MemoryError("as if there were none")


class OutOfMemory:
    """Stands for ``tree``: each call fails at its first numpy call, at its second and so on, until it succeeds. After
    each failure ``check`` must pass and the tree must be unchanged. An eviction may instead return what it evicted
    before the failure.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.num_failures = dict.fromkeys(METHODS, 0)
        self.num_parts = 0  # evictions that ended early

    def __getattr__(self, name: str) -> Any:
        return self._swept(name, getattr(self.tree, name))

    @property
    def checkpoints(self) -> Any:
        """The checkpoints of the tree, whose calls fail in the same way."""
        ours = self.tree.checkpoints
        names = [name for name in dir(ours) if not name.startswith("_")]
        return SimpleNamespace(**{name: self._swept(f"checkpoints.{name}", getattr(ours, name)) for name in names})

    def _swept(self, name: str, found: Any) -> Any:
        return found if name not in METHODS else lambda *a, **k: self._sweep(name, found, a, k)

    def _sweep(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make ``call`` fail at its first numpy call, at its second and so on; return its result when it succeeds."""
        nth, before, parts = 1, self._seen(), []
        while True:
            with Failing(nth) as failing:
                try:
                    result = call(*arguments, **keywords)
                except MemoryError:
                    result = None
            self.tree.check()
            if result is None and failing.has_failed:
                assert self._seen() == before, f"{name} failed at call {nth} and left something behind"
                self.num_failures[name] += 1
            elif name == "evict" and failing.has_failed and result.shortfall and self.tree.num_evictable:
                parts.append(result)
                arguments, before = (result.shortfall,), self._seen()
                self.num_parts += 1
            else:
                break
            nth += 1
        if not parts:
            return result
        parts.append(result)
        states = tuple(state for part in parts for state in part.states)
        return Evicted(np.concatenate([part.ids for part in parts], axis=1), states, result.shortfall)

    def _seen(self) -> tuple[Any, ...]:
        """Return what a failed call must not change."""
        tree = self.tree
        owned = [tree.owned_ids(group).tolist() for group in range(tree.num_groups)]
        checkpoints = len(tree.checkpoints.by_state), tree.checkpoints.num_held
        return (
            owned, tree.num_cached, tree.num_pinned, tree.num_leases, checkpoints, tree.namespaces(),
        )  # fmt: skip
