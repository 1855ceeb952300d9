"""``torch`` with a GPU that is the CPU: the names of ``torch.cuda`` that a benchmark uses, called as the real ones are.

Every call is checked against the signature of the real name. Between two events that are recorded one after the other,
``TICK`` passes on the device, whatever was called there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

NAME, NBYTES, FREE, TICK = "NVIDIA H100 80GB HBM3", 80 << 30, 8 << 20, 3e-3


class FakeEvent:
    """As ``torch.cuda.Event``."""

    recorded = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing, self.at = enable_timing, -1

    def record(self, stream: object = None) -> None:
        FakeEvent.recorded += 1
        self.at = FakeEvent.recorded

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.enable_timing and end_event.enable_timing and 0 <= self.at < end_event.at
        return 1e3 * TICK * (end_event.at - self.at)


class FakeGraph:
    """As ``torch.cuda.CUDAGraph``: ``replays`` counts."""

    made: ClassVar[list[FakeGraph]] = []

    def __init__(self) -> None:
        self.replays = 0
        FakeGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1


class FakeStream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.waited: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)


def _like(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``answer``, which takes what ``torch.cuda.<name>`` takes."""
    real = getattr(torch.cuda, name)
    signature = inspect.signature(real)

    def call(*arguments: Any, **named: Any) -> Any:
        signature.bind(*arguments, **named)
        return answer(*arguments, **named)

    return call


class FakeTorch:
    """``torch``, but for ``torch.cuda``, and memory that is page-locked."""

    def __init__(self) -> None:
        self.synchronised = 0
        properties = SimpleNamespace(total_memory=NBYTES)
        self.cuda = SimpleNamespace(
            Event=FakeEvent, CUDAGraph=FakeGraph, Stream=FakeStream,
            is_available=_like("is_available", lambda: True),
            current_device=_like("current_device", lambda: 0),
            get_device_name=_like("get_device_name", lambda device: NAME),
            get_device_capability=_like("get_device_capability", lambda device: (9, 0)),
            get_device_properties=_like("get_device_properties", lambda device: properties),
            mem_get_info=_like("mem_get_info", lambda device: (FREE, NBYTES)),
            empty_cache=_like("empty_cache", lambda: None),
            synchronize=_like("synchronize", self._synchronize),
            current_stream=_like("current_stream", lambda device: FakeStream()),
            device=_like("device", lambda device: nullcontext()),
            stream=_like("stream", lambda stream: nullcontext()),
            graph=_like("graph", lambda graph, capture_error_mode: nullcontext()),
        )  # fmt: skip

    def _synchronize(self, device: object) -> None:
        self.synchronised += 1

    def empty(self, *shape: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return torch.empty(*shape, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
