"""Answers prompts that arrive together, and measures how long each waits for its first token; also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kvpagoda import CacheStats
from kvpagoda.hf.embedded import embedded_model
from kvpagoda.hf.generator import Generator
from kvpagoda.replay.jobs import process_pool
from kvpagoda.schema.kv_format import KVFormatNames

Prompts = list[list[int]]
OnStep = Callable[[CacheStats], None]


class GenerationRun(NamedTuple):
    """The answers to some prompts, and what they took.

    ``seconds``: until all were answered. ``first_token_seconds``: until a prompt had its first token, on average.
    ``prompt_tokens``: of which ``cached_tokens`` were found and not computed; of these ``loaded_tokens`` came from a
    tier.
    """

    name: str
    outputs: list[list[int]]
    seconds: float
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int

    @property
    def computed_tokens(self) -> int:
        """The prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, for JSON; the answers are not among them."""
        figures = {**self._asdict(), "computed_tokens": self.computed_tokens}
        del figures["outputs"]
        return figures


def answer(
    name: str, generator: Generator, prompts: Prompts, how: dict[str, Any], on_step: OnStep | None = None
) -> GenerationRun:
    """Answer ``prompts``, all submitted at once. ``how``: other arguments of ``Generator.submit``. ``on_step`` is
    called with the cache's counters after each step."""
    before, began = generator.stats(), perf_counter()
    requests = [generator.submit(prompt, **how) for prompt in prompts]
    waiting, first = requests, list[float]()
    while not all(request.done for request in requests):
        generator.step()
        left = [request for request in waiting if not request.output]
        first += [perf_counter() - began] * (len(waiting) - len(left))
        waiting = left
        if on_step is not None:
            on_step(generator.stats())
    seconds, after = perf_counter() - began, generator.stats()
    return GenerationRun(
        name, [output for request in requests for output in request.outputs], seconds, sum(first) / len(first),
        after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens,
        after.loaded_tokens - before.loaded_tokens,
    )  # fmt: skip


def embedded_on_one_thread(kv_format: KVFormatNames) -> Any:
    """Load the embedded model, and compute a few tokens: the first steps of a process take longer.

    From now on torch uses one thread: the model is so small that several only wait for each other.
    """
    torch.set_num_threads(1)
    model = embedded_model()
    Generator(model, "8MiB", max_requests=1, kv_format=kv_format).generate([[32] * 300], 2)
    return model


def answer_after_restart(
    name: str, generator_arguments: dict[str, Any], prompts: Prompts, how: dict[str, Any]
) -> GenerationRun:
    """Answer ``prompts`` with the embedded model in a process of its own, which has nothing of this one but the tiers
    among ``generator_arguments``. Their folders must not be in use."""
    with process_pool(1) as submit:
        answered: GenerationRun = submit(_answer_in_a_process, name, generator_arguments, prompts, how).result()
        return answered


def _answer_in_a_process(
    name: str, generator_arguments: dict[str, Any], prompts: Prompts, how: dict[str, Any]
) -> GenerationRun:
    generator = Generator(embedded_on_one_thread(generator_arguments["kv_format"]), **generator_arguments)
    try:
        return answer(name, generator, prompts, how)
    finally:
        generator.cache.close()
