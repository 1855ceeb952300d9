"""This library's own manager behind the calls of ``kvpagoda.replay.engines.driver``."""

from __future__ import annotations

from kvpagoda import KVCache, Limits, Sequence
from kvpagoda.errors import Exhausted, NeverFits, OutOfBlocks
from kvpagoda.probe import Probe
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.texts import text_of
from kvpagoda.replay.trace import Ids32
from kvpagoda.schema import Attention, Layer, Schema

FULL = Schema((Layer(0, "full_attention", (Attention(1, 1, 1, "float16"),)),), "full attention")


class OwnManager:
    """Serves requests of ``chains`` with a ``KVCache`` of ``num_blocks`` blocks, without memory. What a step computes can be
    found from the next step on."""

    finds_all = False

    def __init__(self, chains: Chains, num_blocks: int, at_once: int, watermark: float = 0.0) -> None:
        self.chains, self.texts = chains, dict[int, Ids32]()
        self.running, self.due = dict[int, Sequence](), dict[int, int]()
        self.cache = KVCache(
            FULL, num_blocks=num_blocks, max_requests=at_once, block_size=chains.block_size, device="none",
            limits=Limits(int(chains.totals.max(initial=1)) + 1, watermark=watermark),
        )  # fmt: skip
        self._probe = Probe(self.cache)

    def step_starts(self) -> None:
        """See ``driver.Manager``."""
        for request in [*self.due]:
            self._commit(request)

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``. O(tokens)."""
        if request not in self.texts:
            self.texts[request] = text_of(self.chains.trace, request, self.chains.trace.block_size)[0]
        return int(self.cache.lookup(self.texts[request][:known]).resumable)

    def peek(self, request: int) -> int:
        """See ``driver.Manager``. O(tokens)."""
        return self.find(request, int(self.chains.prompts[request]))

    @property
    def num_evicted(self) -> int:
        """See ``driver.Manager``."""
        return self._probe.num_evicted

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """See ``driver.Manager``."""
        return end

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``. Room for the whole request is reserved."""
        try:
            text, total = self.texts[request][:known], int(self.chains.totals[request])
            self.running[request] = self.cache.open(text, capacity=end, reserve=total)
        except (Exhausted, NeverFits):
            return False
        self.due[request] = end
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        sequence = self.running[request]
        try:
            sequence.extend(end - sequence.length)
        except OutOfBlocks:
            return False
        self.due[request] = end
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``."""
        self._commit(request)
        self.running.pop(request).close()
        if is_complete:
            del self.texts[request]

    def _commit(self, request: int) -> None:
        """Say that the rows of the chunk that ``request`` was given are written."""
        end = self.due.pop(request, 0)
        sequence = self.running[request]
        if end > sequence.length:
            sequence.commit(self.texts[request][sequence.length : end])
