"""nano-vllm: its ``BlockManager``, from ``KVPAGODA_BENCH_NANOVLLM`` (a checkout)."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import from_path
from benchmarks.workload import Tokens

BlockManager = from_path("nanovllm", "nanovllm.engine.block_manager").BlockManager
Sequence = from_path("nanovllm", "nanovllm.engine.sequence").Sequence
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
        assert self.manager.can_allocate(sequence)
        self.manager.allocate(sequence)
        return int(sequence.num_cached_tokens)

    def append(self, i: int, output: list[int]) -> None:
        """Append one token after another: its block manager has no call for several."""
        sequence = self._running[i]
        for token in output:
            sequence.append_token(token)
            assert self.manager.can_append(sequence)
            self.manager.may_append(sequence)

    def finish(self, i: int) -> None:
        self.manager.deallocate(self._running.pop(i))

    def check(self) -> None:
        assert not self.manager.used_block_ids
