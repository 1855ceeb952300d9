"""A GPU as a benchmark sees it: what it is, work to queue on it, and what calls take of its time and of the host's.

host     queue │ record call call call record │ wait          calls are launched while the device is still busy,
device   busy ─────────── │ call call call │                  so what lies between the events is the device's time
"""

from __future__ import annotations

import gc
import math
import platform
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import kvpagoda
from kvpagoda.errors import BadInput

Call = Callable[[], object]
Facts = dict[str, str | int | None]

BUSY = 4e-3
"""Seconds of work that a step, or calls to be timed, are queued behind."""
MATRIX = 4096
"""Rows of the matrices whose product is that work."""


class Card:
    """One CUDA device. ``device``: which (None: the current one). Raises BadInput if there is none."""

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise BadInput(f"no GPU: {no_gpu()}")
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self.name = torch.cuda.get_device_name(self.device)

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which this is the current device."""
        return torch.cuda.device(self.device)

    def facts(self) -> Facts:
        """Return what the card is, and the versions of what runs on it."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return {
            "card": self.name, "card_nbytes": torch.cuda.get_device_properties(self.device).total_memory,
            "capability": f"{major}.{minor}", "driver": driver_version(), "cuda": torch.version.cuda,
            "torch": torch.__version__, "triton": next((one.version for one in distributions(name="triton")), None),
            "python": platform.python_version(), "kvpagoda": kvpagoda.__version__,
        }  # fmt: skip

    def free_nbytes(self) -> int:
        """Bytes of memory that nobody uses now."""
        return torch.cuda.mem_get_info(self.device)[0]

    def wait(self) -> None:
        """Wait until all queued work is done."""
        torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Give memory back that no tensor uses, after all queued work."""
        gc.collect()
        self.wait()
        torch.cuda.empty_cache()

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Return new uint8 ``[nbytes]``, page-locked and written."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)

    def queue(self, seconds: float = BUSY) -> None:
        """Queue work that keeps the device busy for about that long; return at once."""
        matrix, product, each = self._work
        for _ in range(math.ceil(seconds / each)):
            torch.mm(matrix, matrix, out=product)

    @cached_property
    def _work(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A matrix, room for its square, and the seconds of their product."""
        matrix = torch.zeros(MATRIX, MATRIX, dtype=torch.float16, device=self.device)
        product = torch.empty_like(matrix)
        multiply: Call = lambda: torch.mm(matrix, matrix, out=product)  # noqa: E731
        for _ in range(3):  # the first calls load the library, and raise the clock
            multiply()
        return matrix, product, max(self._between(multiply, 10), 1e-6)

    def device_seconds(self, call: Call, times: int = 3) -> float:
        """Return the seconds that the device takes for one ``call``: the mean of ``times`` in a row, launched while it is
        busy with other work. If ``call`` waits for the device, the seconds of that wait count."""
        self.queue()
        return self._between(call, times)

    def _between(self, call: Call, times: int) -> float:
        begin, end = _event(), _event()
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def event(self) -> torch.cuda.Event:
        """Return a new event, to be recorded and waited for."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replayed_seconds(self, call: Call, many: int = 20, times: int = 50) -> float:
        """Return the seconds that the device takes for one ``call`` in a graph of ``many``, replayed ``times`` in a row: a
        single replay and its events take 10 us, whatever is in it. ``call`` must be one that a graph can capture."""
        replay = self.captured(call, many)
        replay()
        return self.device_seconds(replay, times) / many

    def captured(self, call: Call, many: int = 1) -> Call:
        """Return a function that replays ``many`` times ``call``, captured in one graph."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # what is compiled or allocated once must not be in the graph
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(many):
                call()
        replay: Call = graph.replay
        return replay

    def host_seconds(self, call: Call, times: int = 20, rounds: int = 5) -> float:
        """Return the seconds that one ``call`` holds the host on an idle device: the median of ``rounds`` means."""
        call()
        taken = []
        for _ in range(rounds):
            self.wait()
            start = perf_counter()
            for _ in range(times):
                call()
            taken.append((perf_counter() - start) / times)
        self.wait()
        return median(taken)

    def held_seconds(self, call: Call, behind: bool = False) -> float:
        """Return the seconds that one ``call`` holds the host. ``behind``: while the device has ``BUSY`` of work to do."""
        self.wait()
        if behind:
            self.queue()
        start = perf_counter()
        call()
        taken = perf_counter() - start
        self.wait()
        return taken


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def no_gpu() -> str:
    """Say why torch finds no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA and ROCm: install the one for your GPU, if there is one"
        )
    return f"torch {torch.__version__} finds no device: see nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES"


def driver_version(said: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's driver, as the kernel module or nvidia-smi says it; None if neither does."""
    with suppress(OSError, UnicodeError):
        words = said.read_text().partition("Kernel Module")[2].split()
        versions = [word for word in words if word[0].isdigit()]
        if versions:
            return versions[0]
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip().partition("\n")[0].strip() or None
    return None
