"""This library, with its default checks. A request is: open with a reserve, commit, extend, commit, close."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvpagoda
from benchmarks.workload import Tokens
from kvpagoda import KVCache, Limits
from kvpagoda.core.batch.persistent import PersistentBatch
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.schema import Attention, Layer, Schema

VERSION, LEAST_BLOCK = kvpagoda.__version__, 1
FULL = Schema((Layer(0, "full_attention", (Attention(1, 1, 1, "float16"),)),), "full attention")
ARRAYS = ("block_table", "cache_seqlens", "slot_mapping", "kv_indptr", "kv_last_page_len")
"""The index arrays of FlashAttention and FlashInfer, without ``kv_indices``, which a kernel makes on a GPU."""
torch.set_num_threads(1)


class Peer:
    """A cache without memory. The first ``step`` makes a second cache with memory, for its index arrays."""

    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        self._longest = longest
        self.books = KVCache(
            FULL, num_blocks=capacity // block_size, max_requests=at_once, block_size=block_size, device="none",
            limits=Limits(longest),
        )  # fmt: skip
        self._plan = self.books.plan
        self._running: dict[int, Sequence] = {}
        self._namespace = b""
        self._stepping: tuple[PersistentBatch, Tokens] | None = None

    @staticmethod
    def tokens(ids: Tokens) -> Tokens:
        return ids

    def admit(self, i: int, prompt: Tokens, num_output: int) -> int:
        sequence = self._running[i] = self.books.open(prompt, reserve=len(prompt) + num_output)
        hit, self._namespace = sequence.length, sequence._request.namespace
        sequence.commit(prompt[hit:])
        return hit

    def append(self, i: int, output: Tokens) -> None:
        sequence = self._running[i]
        sequence.extend(len(output))
        sequence.commit(output)

    def finish(self, i: int) -> None:
        self._running.pop(i).close()

    def lookup(self, prompt: Tokens) -> int:
        return self.books.core.prefix.find(prompt, self._namespace)[1].num_tokens

    def step(self) -> None:
        """Run a step with one token for every request, and make the index arrays for FlashAttention and FlashInfer."""
        if self._stepping is None:
            self._stepping = self._with_memory()
        running, ones = self._stepping
        arrays = running.extend().layer(0).arrays
        for name in ARRAYS:
            getattr(arrays, name)  # an array is made when it is read
        running.commit(ones)

    def _with_memory(self) -> tuple[PersistentBatch, Tokens]:
        """Return a persistent batch of the running requests, in a new cache with memory, and a token for each."""
        plan = self._plan
        cache = KVCache(
            FULL, num_blocks=plan.groups[0].num_blocks, max_requests=plan.max_requests, block_size=plan.block_size,
            limits=Limits(max_context=self._longest), device="cpu",
        )  # fmt: skip
        sequences = []
        for old in self._running.values():
            sequence = cache.open(old.tokens, reserve=self._longest)
            sequence.commit(old.tokens[sequence.length :])
            sequences.append(sequence)
        return cache.persistent_batch(sequences), np.ones(len(sequences), np.int32)

    def take(self, num_blocks: int) -> Any:
        """Allocate blocks of the only group and return their ids."""
        group = self.books.core.groups[0]
        ids = group.free.peek(num_blocks)
        group.take(num_blocks)
        return ids

    def give(self, blocks: Any) -> None:
        self.books.core.groups[0].release(blocks)

    def evict(self, num_blocks: int) -> None:
        group = self.books.core.groups[0]
        self.books.core.capacity.ensure_free([group.free.num_free + num_blocks])

    def check(self) -> None:
        self.books.check()
