"""This library, through the whole life of a request: open with a reserve, commit, extend, commit, close."""

from __future__ import annotations

from benchmarks.workload import Tokens
from kvpagoda.books import Books
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.sequence import Sequence

FULL = Schema((Layer(0, "full_attention", (Attention(1, 1, 1, "float16"),)),), "full attention")


class Peer:
    """Books with no memory behind them, for ``capacity`` tokens of full attention."""

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int = 80) -> None:
        plan = FULL.plan(num_blocks=capacity // block_size, max_requests=at_once, block_size=block_size)
        self.books = Books(plan, max_context=longest)
        self._running: dict[int, Sequence] = {}

    @staticmethod
    def tokens(ids: Tokens) -> Tokens:
        return ids

    def admit(self, i: int, prompt: Tokens, num_output: int) -> int:
        sequence = self._running[i] = self.books.open(prompt, reserve=len(prompt) + num_output)
        hit = sequence.length
        sequence.commit(prompt[hit:])
        return hit

    def append(self, i: int, output: Tokens) -> None:
        sequence = self._running[i]
        sequence.extend(len(output))
        sequence.commit(output)

    def finish(self, i: int) -> None:
        self._running.pop(i).close()

    def check(self) -> None:
        self.books.check()
