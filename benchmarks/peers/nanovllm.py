"""nano-vllm: its ``BlockManager``, from ``KVPAGODA_BENCH_NANOVLLM`` (a checkout of April 2026 or later).

The calls are those of its scheduler at commit bb823b3: ``can_allocate`` says how many blocks are cached, ``allocate`` takes
that number, and ``hash_blocks`` publishes what a step has computed. Its package is not run, because it imports kernels.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from benchmarks.peers.bare import bare_packages
from benchmarks.workload import Tokens

_FOLDER = os.environ.get("KVPAGODA_BENCH_NANOVLLM")
if _FOLDER is None:
    raise ImportError("KVPAGODA_BENCH_NANOVLLM is not set; set it to the folder of nanovllm")
with bare_packages({"nanovllm": Path(_FOLDER) / "nanovllm"}):
    BlockManager = importlib.import_module("nanovllm.engine.block_manager").BlockManager
    Sequence = importlib.import_module("nanovllm.engine.sequence").Sequence
if not hasattr(BlockManager, "hash_blocks"):
    raise ImportError(f"nanovllm in {_FOLDER} is older than April 2026: its BlockManager has no hash_blocks")
VERSION, LEAST_BLOCK = "-", 16


class Peer:
    """nano-vllm's ``BlockManager``. The calls are described in ``benchmarks.peers``."""

    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        Sequence.block_size = block_size
        self.manager = BlockManager(capacity // block_size, block_size)
        self._running: dict[int, Any] = {}

    @staticmethod
    def tokens(ids: Tokens) -> list[int]:
        return list(ids.tolist())

    def admit(self, i: int, prompt: list[int], num_output: int) -> int:
        sequence = self._running[i] = Sequence(prompt)
        num_cached_blocks = self.manager.can_allocate(sequence)
        assert num_cached_blocks >= 0
        self.manager.allocate(sequence, num_cached_blocks)
        num_cached = int(sequence.num_cached_tokens)
        self._computed(sequence, len(prompt) - num_cached)
        return num_cached

    def append(self, i: int, output: list[int]) -> None:
        """Append one token after another: its block manager has no call for several."""
        sequence = self._running[i]
        for token in output:
            sequence.append_token(token)
            assert self.manager.can_append(sequence)
            self.manager.may_append(sequence)
            self._computed(sequence, 1)

    def finish(self, i: int) -> None:
        self.manager.deallocate(self._running.pop(i))

    def _computed(self, sequence: Any, num_tokens: int) -> None:
        """Publish the next ``num_tokens`` of ``sequence``, as the scheduler does after a step."""
        sequence.num_scheduled_tokens = num_tokens
        self.manager.hash_blocks(sequence)
        sequence.num_cached_tokens += num_tokens

    def check(self) -> None:
        assert not self.manager.used_block_ids
