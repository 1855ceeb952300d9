"""What does an engine's scheduler cost the host with our block manager in it, compared with its own block manager?

nano-vllm's scheduler runs unchanged, in this process, from the checkout that ``KVPAGODA_NANO_VLLM`` names. No model
runs: the output tokens are random. Both block managers serve the same requests, in turns.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.bare import bare_packages
from benchmarks.timing import Options, Row, tell
from kvpagoda.adapters.nano_vllm import BlockManager

QUESTION = "What does the scheduler of another engine cost the host with our block manager in it?"
NANO_VLLM = "KVPAGODA_NANO_VLLM"
CALLS = ("can_allocate", "allocate", "can_append", "may_append", "hash_blocks", "deallocate")


class Case(NamedTuple):
    """A workload like that of nano-vllm's benchmark.

    ``num_requests`` requests, each with 100 to 1,024 prompt tokens of its own and as many tokens to generate.
    ``shared``: how many tokens of one of four texts come before them. The cache has ``num_blocks`` blocks of
    ``block_size`` tokens."""

    name: str
    num_requests: int
    shared: int
    num_blocks: int
    block_size: int = 256


CASES = (
    Case("256 requests, nothing shared, room for all", 256, 0, 2300),
    Case("256 requests, 2,048 tokens shared by 64, room for all", 256, 2048, 2300),
    Case("1,024 requests, 2,048 tokens shared by 256, room for 200", 1024, 2048, 1000),
    Case("256 requests, 2,048 tokens shared by 64, blocks of 16", 256, 2048, 36000, 16),
)


class Timed:
    """A wrapper that times the calls of a block manager. The time of an empty call is measured first and subtracted."""

    def __init__(self, manager: Any) -> None:
        self._taken, self._calls, rounds = 0.0, 0, 20_000
        for name in CALLS:
            setattr(self, name, partial(self._call, getattr(manager, name)))
        for _ in range(rounds):
            self._call(_nothing, None)
        self._clock, self._taken, self._calls = self._taken / rounds, 0.0, 0

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        answer = call(*arguments)
        self._taken += time.perf_counter() - start
        self._calls += 1
        return answer

    @property
    def seconds(self) -> float:
        """Seconds in all calls so far, without the overhead of timing them."""
        return self._taken - self._calls * self._clock


def _nothing(_: None) -> None: ...


def run(project: Any, case: Case, manager: type, *, is_timed: bool) -> tuple[float, float]:
    """Serve ``case``. Return (seconds in the scheduler, share of the prompt tokens that was cached). ``is_timed``:
    seconds in the block manager alone."""
    random = np.random.default_rng(7)
    heads = random.integers(0, 10_000, (4, case.shared)).tolist()
    project.Sequence.block_size = case.block_size
    config = SimpleNamespace(
        max_num_seqs=512, max_num_batched_tokens=16384, eos=-1, kvcache_block_size=case.block_size,
        num_kvcache_blocks=case.num_blocks,
    )  # fmt: skip
    project.scheduler.BlockManager = manager
    scheduler = project.scheduler.Scheduler(config)
    timed = Timed(scheduler.block_manager)
    if is_timed:
        scheduler.block_manager = timed
    for i in range(case.num_requests):
        tokens = heads[i % 4] + random.integers(0, 10_000, random.integers(100, 1025)).tolist()
        most = int(random.integers(100, 1025))
        scheduler.add(project.Sequence(tokens, project.SamplingParams(max_tokens=most, ignore_eos=True)))
    taken, computed, prompts = 0.0, 0, sum(len(seq) for seq in scheduler.waiting)
    while not scheduler.is_finished():
        start = time.perf_counter()
        seqs, is_prefill = scheduler.schedule()
        taken += time.perf_counter() - start
        computed += sum(seq.num_scheduled_tokens for seq in seqs) if is_prefill else 0
        tokens = random.integers(0, 10_000, len(seqs)).tolist()
        start = time.perf_counter()
        scheduler.postprocess(seqs, tokens, is_prefill)
        taken += time.perf_counter() - start
    return (timed.seconds if is_timed else taken), 1 - computed / prompts


def measure(options: Options) -> list[Row]:
    folder = os.environ.get(NANO_VLLM)
    if folder is None:
        return [{"who": "nano-vllm", "absent": f"{NANO_VLLM} is not set; set it to a checkout of nano-vllm"}]
    version = re.search(r'^version = "(.*)"', (Path(folder) / "pyproject.toml").read_text(), re.MULTILINE)
    rows: list[Row] = []
    with bare_packages({"nanovllm": Path(folder) / "nanovllm"}):
        scheduler = importlib.import_module("nanovllm.engine.scheduler")
        project = SimpleNamespace(
            scheduler=scheduler, Sequence=scheduler.Sequence,
            SamplingParams=importlib.import_module("nanovllm.sampling_params").SamplingParams,
        )  # fmt: skip
        managers = {"nano-vllm": scheduler.BlockManager, "ours": BlockManager}
        for case in CASES[:1] if options.quick else CASES:
            if options.only not in case.name:
                continue
            whole: dict[str, list[tuple[float, float]]] = {who: [] for who in managers}
            calls: dict[str, list[float]] = {who: [] for who in managers}
            for _ in range(options.runs):
                for who, manager in managers.items():
                    whole[who].append(run(project, case, manager, is_timed=False))
                    calls[who].append(run(project, case, manager, is_timed=True)[0])
            ours = median(taken for taken, _ in whole["ours"])
            for who in managers:
                taken = median(seconds for seconds, _ in whole[who])
                rows.append(
                    {
                        "case": case.name,
                        "who": who,
                        "us": 1e6 * taken / case.num_requests,
                        "manager_us": 1e6 * median(calls[who]) / case.num_requests,
                        "over_ours": taken / ours,
                        "manager_over_ours": median(calls[who]) / median(calls["ours"]),
                        "found_percent": 100 * median(found for _, found in whole[who]),
                        "version": "-" if who == "ours" or version is None else version[1],
                    }
                )
    return rows


if __name__ == "__main__":
    tell("adapters", QUESTION, measure)
