"""Caches of SGLang's profiles that count, in every step, all that they hold."""

from __future__ import annotations

from typing import Any

from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import Schedule, serve_with
from kvpagoda.replay.engines.edge_states import StateLRU
from kvpagoda.replay.engines.edge_unified import InOneMemory


class Checked:
    """Before a ``StateLRU``, a ``WindowLRU`` or one of them ``InOneMemory`` among the bases of a class. ``all_free``: blocks,
    and states or windows of blocks, that are free in the beginning."""

    all_free = (0, 0)

    def find(self: Any, request: int, known: int) -> int:
        peeked, found = self.peek(request), super().find(request, known)  # type: ignore[misc]
        assert peeked == found or known > self.chains.prompts[request]
        return int(found)

    def step_starts(self: Any) -> None:
        super().step_starts()  # type: ignore[misc]
        self.tree.check()
        running = self.running.values()
        blocks = self.tree.num_blocks + sum(one.count - one.held for one in running)
        apart = self.tree.num_windows + sum(
            one.slots if isinstance(self, StateLRU) else one.count - max(one.held, one.slid) for one in running
        )
        if isinstance(self, InOneMemory):
            memory, held = self.memory, self._rest + blocks * self.memory.block + apart * self.memory.each
            assert (held, self._ids + apart) == (memory.nbytes, memory.num_ids) and self._rest >= 0
        else:
            assert (self.free + blocks, self.free_apart + apart) == self.all_free
            assert min(self.free, self.free_apart) >= 0


def serve_all(cache: Any, chains: Chains, schedule: Schedule) -> None:
    """Serve ``chains`` with ``cache``: each request fits, some find something, and something is evicted."""
    cache.all_free = cache.free, cache.free_apart
    served = serve_with(cache, chains, schedule)
    cache.step_starts()
    cache.check()
    assert not served.never_fit and served.hits.sum() > 0 and cache.num_evicted > 0
