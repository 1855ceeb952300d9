"""Continuous batching over a transformers model whose whole cache lives in a ``KVCache``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpagoda.books import CacheStats
from kvpagoda.errors import BadInput, RetryLater
from kvpagoda.hf.compressed import CompressedRunner
from kvpagoda.hf.runner import ModelRunner, Runner
from kvpagoda.manager import KVCache
from kvpagoda.schema import Compressed, Schema
from kvpagoda.sequence import Sequence, Tokens, as_tokens


@dataclass(eq=False)
class Request:
    """A prompt on its way to being an answer."""

    prompt: Tokens
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    """New tokens so far; the last one is the end-of-text token if the model stopped by itself."""
    done: bool = False


class Generator:
    """Greedy generation for many requests at once, with the cache in kvpagoda.

    ``model``: a transformers causal language model. ``budget`` and all further keyword arguments are ``KVCache``'s.
    ``prefill_chunk``: the most prompt tokens of one request in one step. ``kv_format``: see ``Schema.from_hf_config``.
    The model is put in eval mode and is otherwise left as it was between steps.
    Raises SchemaError for a model whose layers are not known, NeverFits for a budget too small for one request.
    """

    def __init__(
        self,
        model: Any,
        budget: int | str = "512MiB",
        *,
        prefill_chunk: int = 512,
        kv_format: str = "raw",
        **cache_arguments: Any,
    ) -> None:
        if prefill_chunk < 1:
            raise BadInput(f"prefill_chunk must be at least 1 token, got {prefill_chunk}")
        model.eval()
        schema = Schema.from_hf_config(model.config, dtype=str(model.dtype).removeprefix("torch."), kv_format=kv_format)
        sizes = cache_arguments if "num_blocks" in cache_arguments else {"budget": budget, **cache_arguments}
        self.cache = KVCache(schema, device=model.device, step_tokens=prefill_chunk, **sizes)
        self._chunk = prefill_chunk
        compressed = any(isinstance(kind, Compressed) for layer in schema.layers for kind in layer.kinds)
        self._runner: Runner = (CompressedRunner if compressed else ModelRunner)(model, self.cache)
        self._ends = _end_tokens(model)
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[Request, Sequence]] = []

    def submit(self, prompt: Any, max_new_tokens: int = 64) -> Request:
        """Queue a prompt (ints, at least one); it starts when there is room. Raises BadInput and NeverFits at once."""
        ids = as_tokens(prompt, self.cache.vocab_size)
        if len(ids) == 0 or max_new_tokens < 1:
            raise BadInput(
                f"need at least one prompt token and max_new_tokens >= 1, got {len(ids)} and {max_new_tokens}"
            )
        self.cache.check_fits(len(ids) + max_new_tokens, room=min(self._chunk, len(ids)))
        request = Request(ids, max_new_tokens)
        self._waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Admit what fits, compute one step of everything that runs, and return the requests that it finished."""
        self._admit()
        if not self._running:
            return []
        work = []
        for request, sequence in self._running:
            if sequence.length < len(request.prompt):
                most = min(self._chunk, self._runner.most_tokens(sequence) or self._chunk)
                stop = self.cache.next_checkpoint(sequence) or len(request.prompt)
                tokens = request.prompt[sequence.length : min(sequence.length + most, stop)]
            else:
                tokens = np.array(request.output[-1:], np.int32)
            sequence.extend(len(tokens))
            work.append((sequence, tokens))
        chosen = self._runner.step(work).argmax(dim=-1).tolist()
        finished = []
        for (request, sequence), (_, tokens), token in zip(list(self._running), work, chosen):
            sequence.commit(tokens)
            if sequence.length < len(request.prompt):
                continue
            request.output.append(token)
            request.done = token in self._ends or len(request.output) == request.max_new_tokens
            if request.done:
                sequence.close()
                self._running.remove((request, sequence))
                finished.append(request)
        return finished

    def generate(
        self,
        prompts: Iterable[Any],
        max_new_tokens: int = 64,
        on_step: Callable[[CacheStats], None] | None = None,
    ) -> list[list[int]]:
        """New tokens for every prompt, in the order given; more prompts than rows wait their turn.

        ``on_step`` is called with the cache's counters after each step. On an error every running request is closed.
        """
        requests = [self.submit(prompt, max_new_tokens) for prompt in prompts]
        try:
            while not all(request.done for request in requests):
                self.step()
                if on_step is not None:
                    on_step(self.stats())
        except BaseException:
            self.abort()
            raise
        return [request.output for request in requests]

    def abort(self) -> None:
        """Drop all waiting and running requests; the cache is empty afterwards."""
        self._waiting.clear()
        for _, sequence in self._running:
            sequence.close()
        self._running.clear()

    def stats(self) -> CacheStats:
        """The cache's counters."""
        return self.cache.stats()

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            total = len(request.prompt) + request.max_new_tokens
            try:
                sequence = self.cache.open(request.prompt, room=0, reserve=total)
            except RetryLater:
                if not self._running:
                    raise  # somebody else holds the cache: waiting for our own requests would be waiting for ever
                return
            self._waiting.popleft()
            self._running.append((request, sequence))


def _end_tokens(model: Any) -> frozenset[int]:
    """The model's end-of-text tokens, as its own ``generate`` uses them."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = model.config.eos_token_id if ends is None else ends
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
