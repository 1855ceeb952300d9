"""A decode loop for a GPU: one captured graph for every step, and the host prepares the next step while the device works.

    host     commit 1, prepare 2, launch 2 │ read 1 │ commit 2, prepare 3, launch 3 │ read 2 │ ..
    device   step 1 ───────────────────────┤ step 2 ────────────────────────────────┤ step 3 ──

A token that step 1 chooses stays on the device, where step 2 is fed with it. The host reads it after step 2 was launched,
and so the device never waits for the host. It costs one step a request: a request is known to be done when the step after
its last token is running, and what that step chooses for it is dropped.

Requests join and leave between steps. Nothing here waits for the device except ``_read``. On a CPU the same code runs
without a graph. At the end, every token is compared with a computation that uses no cache.

    python examples/gpu_engine.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny_model import LONGEST, VOCAB, TinyModel, is_exact

from kvpagoda import Batch, KVCache, LayerView, Limits, RetryLater, Sequence

STOP = 7  # the token that ends an answer


@dataclass(eq=False)
class Request:
    """A prompt, and behind it in ``text`` what the model writes: ``max_new_tokens``, or fewer that end with STOP."""

    text: list[int]
    prompt_length: int
    max_new_tokens: int
    sequence: Sequence | None = None

    @property
    def is_done(self) -> bool:
        written = len(self.text) - self.prompt_length
        return written >= self.max_new_tokens or (written > 0 and self.text[-1] == STOP)


class Engine:
    """Runs up to ``num_rows`` requests at once on ``device``. ``settings`` are those of ``KVCache``."""

    def __init__(self, model: TinyModel, budget: str, num_rows: int, device: str = "cpu", **settings: Any) -> None:
        limits = Limits(max_context=LONGEST, step_tokens=32)
        self.model, self.on_gpu = model, torch.device(device).type == "cuda"
        self.cache = KVCache(
            model.schema, budget, device=device, max_requests=num_rows, block_size=8, limits=limits, **settings
        )
        self.running = self.cache.persistent_batch(num_rows=num_rows, tokens_per_row=1)
        self.waiting: list[Request] = []
        self.rows: list[Request] = []  # of the step that was launched last
        self.num_steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        # All that the graph reads and writes has one address: arrays of a persistent batch, the cache's memory, and
        # these. feed[0]: the row of the step before whose choice is this row's token, or -1: the token is in feed[1].
        self.feed = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.going_on = np.stack([np.arange(num_rows), np.zeros(num_rows, np.int64)])
        self.fed: np.ndarray | None = None
        # Two, as the host reads the choices of one step while the next one runs.
        self.answers = [torch.zeros(num_rows, dtype=torch.int64, pin_memory=self.on_gpu) for _ in range(2)]
        self.events = [torch.cuda.Event() for _ in range(2)] if self.on_gpu else []

    def submit(self, prompt: list[int], max_new_tokens: int) -> Request:
        """Queue a request and return it."""
        request = Request([*prompt], len(prompt), max_new_tokens)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Launch the next step, while the device computes the one before; then read what that one chose."""
        before = self.rows
        if before:  # their rows are written when this step runs; what is enqueued from now on runs later
            self.running.commit(np.array([request.text[-1] for request in before], np.int32))
        self._leave()
        self._join()
        of = {request.sequence: request for request in (*before, *self.joined)}
        self.rows = [of[sequence] for sequence in self.running.sequences]
        if self.rows:
            feed = self.going_on if self.rows == before else self._sources(before)
            if feed is not self.fed:
                self.feed.copy_(self._sent(feed), non_blocking=True)
                self.fed = feed
            self._launch(self.running.extend())
        if before:
            self._read(before)
        self.num_steps += 1

    def run(self) -> None:
        """Run steps until every request is done."""
        while self.waiting or self.rows:
            self.step()

    # -- requests join and leave -------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Close the requests that are done. The step that runs still writes to their blocks, and whoever gets these writes
        later, in the order of the stream."""
        for request in self.rows:
            if request.is_done and request.sequence is not None:
                self.running.remove(request.sequence)
                request.sequence.close()
                request.sequence = None

    def _join(self) -> None:
        """Open waiting requests while there are rows and memory, and compute their prompts but for the last token."""
        self.joined: list[Request] = []
        while self.waiting and len(self.running.sequences) < self.running.num_rows:
            request = self.waiting[0]
            most = request.prompt_length + request.max_new_tokens
            try:  # with all blocks reserved, extend never raises OutOfBlocks
                request.sequence = sequence = self.cache.open(request.text, capacity=0, reserve=most)
            except RetryLater:
                return
            self.joined.append(self.waiting.pop(0))
            while missing := request.prompt_length - 1 - sequence.length:
                n = min(missing, int(self.cache.step_limit(sequence)))
                tokens = np.array(request.text[sequence.length : sequence.length + n], np.int32)
                sequence.extend(n)
                self.model.forward(self.cache.batch([sequence], [n]), self._sent(tokens), attend_paged)
                sequence.commit(tokens)
            self.running.add(sequence)

    def _sources(self, before: list[Request]) -> np.ndarray:
        """Return ``feed`` for rows that are others than those of the step ``before``."""
        row_of, feed = {request: row for row, request in enumerate(before)}, np.zeros_like(self.going_on)
        for row, request in enumerate(self.rows):
            feed[0, row] = row_of.get(request, -1)
            feed[1, row] = request.text[-1] if request not in row_of else 0
        return feed

    # -- what the device does ----------------------------------------------------------------------------------------

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """Return ``array`` on the device. A copy from page-locked memory is enqueued, and nobody waits for it."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.feed.device, non_blocking=True) if self.on_gpu else tensor

    def _compute(self, batch: Batch) -> None:
        """Compute a step: this is what the graph holds. All shapes are those of ``num_rows``, and nothing asks the host."""
        source, given = self.feed
        tokens = torch.where(source < 0, given, self.chosen[source.clamp(min=0)])
        self.chosen.copy_(self.model.forward(batch, tokens, attend_paged).argmax(-1))

    def _launch(self, batch: Batch) -> None:
        for layer in range(len(self.model.layers)):  # an array is sent when it is read here: a graph has only addresses
            view = batch.layer(layer)
            _ = view.block_table, view.cache_seqlens, view.slot_mapping
        if self.on_gpu and self.graph is None:
            self._capture(batch)
        if self.graph is None:
            self._compute(batch)
        else:
            self.graph.replay()
        self.answers[self.num_steps % 2].copy_(self.chosen, non_blocking=True)
        if self.on_gpu:
            self.events[self.num_steps % 2].record()

    def _capture(self, batch: Batch) -> None:
        """Capture the first step. It is fed with tokens of the host alone, and may therefore run once more before, so that
        all libraries are loaded and all kernels compiled."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._compute(batch)
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._compute(batch)

    def _read(self, rows: list[Request]) -> None:
        """Wait for the step before the one that was launched last, and append what it chose for its ``rows``."""
        if self.on_gpu:
            self.events[(self.num_steps - 1) % 2].synchronize()
        for request, token in zip(rows, self.answers[(self.num_steps - 1) % 2].tolist()):
            if request.sequence is not None:  # else it was done one step ago
                request.text.append(token)


def attend_paged(q: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Compute attention of ``q``, ``[T, heads, dim]``, over the rows that the block table of ``view`` names, all in shapes
    that do not depend on lengths. Returns ``[T, heads * dim]``. An engine calls FlashAttention or FlashInfer here."""
    size, of = view.page_size, view.step.request_ids.long()
    columns = torch.arange(view.block_table.shape[1], device=q.device)
    is_used = columns * size < view.cache_seqlens[:, None]  # the other cells are undefined
    table = view.block_table.masked_fill(~is_used, 0)[of]  # [T, columns]
    positions = torch.arange(len(columns) * size, device=q.device)
    visible = view.layer.growth.reads(view.step.positions[:, None], positions)  # [T, columns * size]
    k, v = (view[name][table].flatten(1, 2).to(q.dtype) for name in ("k", "v"))  # [T, columns * size, kv heads, dim]
    q = q.unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("tkgd,trkd->tkgr", q, k).masked_fill(~visible[:, None, None], -torch.inf)
    v = v.masked_fill(~visible[:, :, None, None], 0)  # what nobody owns may be NaN
    return torch.einsum("tkgr,trkd->tkgd", scores.softmax(-1), v).flatten(1)


def serve(engine: Engine, num_requests: int, longest_answer: int, seed: int = 0) -> list[Request]:
    """Run ``num_requests``, of which three quarters begin with the same text; they arrive while others run."""
    random, requests = np.random.default_rng(seed), list[Request]()
    system = random.integers(0, VOCAB, 40).tolist()
    for number in range(num_requests):
        question = random.integers(0, VOCAB, random.integers(1, 60)).tolist()
        prompt = question if number % 4 == 0 else system + question
        requests.append(engine.submit(prompt, int(random.integers(1, longest_answer))))
        if number >= engine.running.num_rows:
            engine.step()
    engine.run()
    return requests


def main(num_rows: int = 6, num_requests: int = 20, longest_answer: int = 40) -> dict[str, int]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TinyModel(device=device)
    engine = Engine(model, "2MiB", num_rows, device)
    requests = serve(engine, num_requests, longest_answer)
    engine.cache.check()
    results = {
        "requests": len(requests), "done": sum(request.is_done for request in requests),
        "exact": sum(is_exact(model, np.array(request.text), request.prompt_length) for request in requests),
        "ended by the stop token": sum(request.text[-1] == STOP for request in requests), "steps": engine.num_steps,
        "written tokens": sum(len(request.text) - request.prompt_length for request in requests),
        "cached prompt tokens": engine.cache.stats().cached_tokens,
    }  # fmt: skip
    for name, value in results.items():
        print(f"{name:>24}  {value}")
    return results


if __name__ == "__main__":
    main()
