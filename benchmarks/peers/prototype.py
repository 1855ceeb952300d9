"""An early prototype of this library, from ``KVPAGODA_BENCH_PROTOTYPE`` (a folder with ``radix_numpy.py``). It has no
groups, states, transactions or checks, and serves as the lower bound of the time."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import from_path
from benchmarks.workload import Tokens

radix_numpy = from_path("prototype", "radix_numpy")
VERSION, LEAST_BLOCK = "-", 1


class Peer:
    """The prototype's ``Manager``. The calls are described in ``benchmarks.peers``."""

    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        self.manager = radix_numpy.Manager(capacity // block_size, block_size)
        self._running: dict[int, Any] = {}

    @staticmethod
    def tokens(ids: Tokens) -> Tokens:
        return ids

    def admit(self, i: int, prompt: Tokens, num_output: int) -> int:
        self._running[i], hit = self.manager.admit(prompt)
        self.manager.commit(self._running[i])
        return int(hit)

    def append(self, i: int, output: Tokens) -> None:
        assert self.manager.append(self._running[i], output)

    def finish(self, i: int) -> None:
        self.manager.finish(self._running.pop(i))

    def lookup(self, prompt: Tokens) -> int:
        block_size = self.manager.page
        return int(self.manager.c.walk(prompt, (len(prompt) - 1) // block_size * block_size)[1])

    def take(self, num_blocks: int) -> Any:
        return self.manager.c.alloc(num_blocks)

    def give(self, blocks: Any) -> None:
        self.manager.c.release(blocks)

    def evict(self, num_blocks: int) -> None:
        self.manager.c.evict(num_blocks)

    def check(self) -> None: ...
