"""In no call of a step does the host wait for the device. What is tried on a GPU runs on a CPU first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda import KVCache
from kvpagoda.core.batch.batch import Batch
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater
from kvpagoda.schema import Attention, Encoding, Recurrent, Rows
from late_device import ARRAYS, Apart, Expected, compare, on_the_host, read
from test_persistent_batch import DEEP, FULL, STATE, WINDOW, cache_of, running

FP8 = Attention(2, 64, 64, "bfloat16", encoding=Encoding("fp8"))
SCALED = Attention(2, 64, 64, "bfloat16", encoding=Encoding("fp8_e4m3", scale=0.02))
WIDE = Recurrent((Rows("conv", (6, 3), "bfloat16"), Rows("recurrent", (2, 4, 128), "float32")))
CACHES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "full": ((FULL,), {"num_blocks": 24}),
    "poisoned": ((FULL, WINDOW), {"num_blocks": 30, "poison": True}),
    "sectors": ((FULL, WINDOW, STATE), {"budget": "2KiB", "checkpoints": 3}),
    "states that go back": ((FULL, DEEP), {"budget": "2KiB", "checkpoints": 3}),
    "fp8": ((FP8,), {"num_blocks": 24}),
    "a scale a tensor": ((SCALED,), {"num_blocks": 24}),
    "checkpoints in int8": (
        (FULL, WIDE),
        {"num_blocks": 24, "checkpoints": 3, "checkpoint_format": "int8", "rounds_states": True, "hit_grid": 4},
    ),
    "pages": ((FULL,), {"num_blocks": 24, "kernel_page": 2}),
}
NAMES = (*ARRAYS, "state_writes")
BUSY_MS = 4


class Life:
    """Requests that open, compute, fork, rewind, are evicted and close. ``seen`` counts what happened; ``shown`` has copies
    of the arrays of each step, and those of the host."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.random = cache, np.random.default_rng(0)
        self.together = cache.persistent_batch(num_rows=4)
        self.seen: Counter[str] = Counter()
        self.shown: list[tuple[dict[str, torch.Tensor], Expected]] = []

    def compute(self, batch: Batch) -> None:
        """Read all arrays, and write the rows of every layer, as an engine does."""
        found = {name: tensor.clone() for name, tensor in read(batch, NAMES).items()}
        self.shown.append((found, on_the_host(batch, NAMES)))
        tokens = batch.positions
        for view in (batch.layer(layer.index) for layer in self.cache.schema.layers):
            if view.blocks is not None:
                kinds = view.blocks.rows.items()
                view.write(**{name: torch.ones(len(tokens), *one.shape, device=tokens.device) for name, one in kinds})
        self.seen["steps"] += 1

    def open(self) -> Sequence:
        prompt = [int(self.random.integers(0, 4)), *range(30, 30 + int(self.random.integers(2, 18)))]
        sequence = self.cache.open(prompt, capacity=0)
        while sequence.length < len(prompt):
            new = prompt[sequence.length : sequence.length + 4]
            try:
                sequence.extend(len(new))
            except OutOfBlocks:
                sequence.close()
                raise
            self.compute(self.cache.batch([sequence], [len(new)], pad_to=2))
            sequence.commit(new)
        return sequence

    def operate(self) -> None:
        """Do one operation at random."""
        together, members, chance = self.together, self.together.sequences, self.random.random()
        if chance < 0.2 and len(members) < 4:
            together.add(self.open())
        elif chance < 0.27 and members:
            self.close(members[0])
        elif chance < 0.36 and 0 < len(members) < 4:
            together.add(members[-1].fork())
            self.seen["forked"] += 1
        elif chance < 0.45 and members:
            members[0].rewind(1)
            self.seen["rewound"] += 1
        elif members:
            self.compute(together.extend())
            together.commit([int(self.random.integers(0, 50)) for _ in members])

    def close(self, sequence: Sequence) -> None:
        self.together.remove(sequence)
        sequence.close()
        self.seen["closed"] += 1

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            try:
                self.operate()
            except BadInput:
                self.seen["refused"] += 1
            except (OutOfBlocks, RetryLater):
                self.close(max(self.together.sequences, key=lambda one: one.length))
        self.seen["evicted"] = sum(group.evicted for group in self.cache.stats().groups)

    def check(self) -> None:
        """Prove that all steps had the host's arrays."""
        for found, expected in self.shown:
            compare(found, expected)
        assert all(self.seen[what] for what in ("steps", "forked", "closed", "evicted")), self.seen
        kinds = [kind for layer in self.cache.schema.layers for kind in layer.kinds]
        assert self.seen["rewound"] or STATE in kinds or WIDE in kinds
        self.cache.check()


@pytest.mark.parametrize("name", CACHES)
def test_the_life_that_a_gpu_is_tried_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpagoda.core.memory.device_memory.DeviceArrays", Apart)
    kinds, arguments = CACHES[name]
    life = Life(cache_of(*kinds, **arguments))
    life.run(300)
    life.check()


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Let torch raise wherever the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CACHES)
def test_no_call_waits_for_the_gpu(name: str) -> None:
    kinds, arguments = CACHES[name]
    cache = cache_of(*kinds, **{**arguments, "device": "cuda"})
    warm, life = Life(cache), Life(cache)
    warm.run(60)  # kernels are compiled, and the ring is allocated
    for sequence in warm.together.sequences:
        warm.close(sequence)
    with pytest.raises(RuntimeError, match="synchroniz"), waiting_raises():
        torch.ones(1, device="cuda").item()
    with waiting_raises():
        life.run(300)
    life.check()


def slowness(cache: KVCache, steps: int, milliseconds: float) -> float:
    """Return the median seconds of the host for a step, each behind ``milliseconds`` of work on the GPU."""
    together, taken = cache.persistent_batch([running(cache, 8 + i, i) for i in range(8)]), []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles = int(milliseconds * 10_000_000 / start.elapsed_time(end))
    for _ in range(steps):
        torch.cuda.synchronize()
        if cycles:
            torch.cuda._sleep(cycles)
        begin = perf_counter()
        read(together.extend(), NAMES)
        together.commit([1] * 8)
        taken.append(perf_counter() - begin)
    torch.cuda.synchronize()
    for sequence in together.sequences:
        sequence.close()
    return median(taken[steps // 3 :])


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [(FULL,), (WINDOW, FULL), (STATE, FULL)], ids=["full", "windows", "states"])
def test_a_step_behind_work_holds_the_host_no_longer_than_on_an_idle_gpu(kinds: tuple[Any, ...]) -> None:
    cache = cache_of(*kinds, num_blocks=900, max_requests=8, device="cuda")
    idle, behind = (slowness(cache, 60, milliseconds) for milliseconds in (0, BUSY_MS))
    assert behind < 1.5 * idle and behind < BUSY_MS / 1e3 / 2, (
        f"{1e6 * idle:.0f} us idle, {1e6 * behind:.0f} behind work"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [1, 100])
def test_the_host_may_be_many_steps_ahead(ahead: int) -> None:
    """Copies of the arrays that the GPU makes later are those of their steps, also when the ring was full."""
    cache = cache_of(FULL, WINDOW, STATE, num_blocks=900, max_context=300, device="cuda")
    together = cache.persistent_batch([running(cache, 5, 1), running(cache, 9, 50)], num_rows=3)
    shown = []
    torch.cuda._sleep(50_000_000)
    for _ in range(ahead):
        batch = together.extend()
        shown.append(({name: one.clone() for name, one in read(batch, NAMES).items()}, on_the_host(batch, NAMES)))
        together.commit([1, 2])
    for found, expected in shown:
        compare(found, expected)


@pytest.mark.gpu
def test_a_captured_graph_reads_the_arrays_of_each_step() -> None:
    cache = cache_of(FULL, WINDOW, num_blocks=900, max_context=300, device="cuda")
    together = cache.persistent_batch(num_rows=4, tokens_per_row=1)
    together.add(running(cache, 5))
    batch = together.extend()
    read(batch, NAMES)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = {name: one.clone() for name, one in read(batch, NAMES).items()}
    together.commit([1])
    for step in range(40):
        if step in (3, 9):
            together.add(running(cache, 7 + step, step))
        if step == 20:
            gone = together.sequences[0]
            together.remove(gone)
            gone.close()
        batch = together.extend()
        read(batch, NAMES)
        graph.replay()
        compare(copies, on_the_host(batch, NAMES))
        together.commit([1] * len(together.sequences))
