"""Runs ``kvpagoda generate``: loads a model, generates with a progress line, prints the answers and figures, or
JSON."""

from __future__ import annotations

import json
import logging
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpagoda import console
from kvpagoda.cache.stats import CacheStats
from kvpagoda.errors import BadInput
from kvpagoda.hf.embedded import PROMPTS, ByteTokenizer, embedded_model, held_out_text
from kvpagoda.hf.generator import Generator
from kvpagoda.hf.held_out import format_cost
from kvpagoda.units import format_bytes

Outputs = list[list[int]]
HELD_OUT_BYTES = 3072
"""How much of the held-out text is used: computing it takes seconds."""


def run(
    model_name: str | None,
    prompt_file: Path | None,
    as_json: bool,
    generator_arguments: dict[str, Any],
    how: dict[str, Any],
    dtype: str,
) -> None:
    """Generate answers and print them. ``how``: arguments of ``Generator.generate``. The embedded model (``model_name``
    None) then answers the same prompts again from the cache, and the cost of ``kv_format`` is printed. Raises BadInput,
    OSError."""
    texts = [text for text in (prompt_file or PROMPTS).read_text().splitlines() if text]
    if not texts:
        raise BadInput(f"{prompt_file} has no prompts; write one on each line")
    is_demo, kv_format = model_name is None, generator_arguments["kv_format"]
    if model_name is None:
        torch.set_num_threads(1)  # the embedded model is so small that several threads only wait for each other
        model, tokenizer = embedded_model(), ByteTokenizer()
        Generator(model, "8MiB", max_requests=1, kv_format=kv_format).generate([[32, 32]], 2)  # warm up torch
    else:
        model, tokenizer = load(model_name, dtype)
    generator = Generator(model, **generator_arguments)
    prompts = [tokenizer.encode(text) for text in texts]
    outputs, seconds = timed(generator, prompts, how)
    generator.cache.flush()
    stats = generator.stats()
    again = Again.of(generator, prompts, how, outputs, seconds) if is_demo else None
    generator.cache.close()
    cost = format_cost(model, kv_format, held_out_text()[:HELD_OUT_BYTES]) if is_demo and kv_format != "raw" else None
    rows = [(i, outputs[i * how["n"] + answer]) for i in range(len(texts)) for answer in range(how["n"])]
    if as_json:
        results = [{"prompt": texts[i], "tokens": output, "text": tokenizer.decode(output)} for i, output in rows]
        figures = {
            "seconds": round(seconds, 3),
            "new_tokens": sum(map(len, outputs)),
            "proposed_tokens": generator.num_proposed,
            "accepted_tokens": generator.num_accepted,
            "stats": stats.to_dict(),
            **({} if again is None else {"again": again._asdict()}),
            **({} if cost is None else {"format_cost": cost.to_dict()}),
        }
        print(json.dumps({"results": results, **figures}, indent=2))
        return
    for i, output in rows:
        say_answer(texts[i], len(prompts[i]), tokenizer.decode(output), len(output))
    for line in (*summary(generator, stats, outputs, seconds), cost, again):
        if line is not None:
            console.output().print(str(line))


def timed(generator: Generator, prompts: list[list[int]], how: dict[str, Any]) -> tuple[Outputs, float]:
    """Generate; return the answers, and the seconds that they took."""
    began = time.perf_counter()
    outputs = generate(generator, prompts, how)
    return outputs, time.perf_counter() - began


class Again(NamedTuple):
    """The figures of answering the same prompts a second time, with the prompts cached."""

    num_answers: int
    num_same: int
    prompt_tokens: int
    cached_tokens: int
    first_seconds: float
    seconds: float

    @classmethod
    def of(
        cls, generator: Generator, prompts: list[list[int]], how: dict[str, Any], outputs: Outputs, seconds: float
    ) -> Again:
        before = generator.stats()
        repeated, took = timed(generator, prompts, how)
        num_same = sum(first == second for first, second in zip(outputs, repeated))
        after = generator.stats()  # with several samples, some are forked and some look their prompt up too
        asked, cached = after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens
        return cls(len(outputs), num_same, asked, cached, round(seconds, 3), round(took, 3))

    def __str__(self) -> str:
        same = "the same answers" if self.num_same == self.num_answers else f"{self.num_same} of the answers equal"
        return (
            f"all prompts again: {self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens found in the cache, {same} in "
            f"{self.seconds:.2f} s instead of {self.first_seconds:.2f} s"
        )


def say_answer(prompt: str, prompt_tokens: int, answer: str, new_tokens: int) -> None:
    """Print the end of the prompt on one line, and the answer below it, wrapped and indented."""
    out = console.output()
    count = f"{prompt_tokens} + {new_tokens} tokens: "
    room = max(8, out.width - len(count))
    shown = clipped(prompt, len(prompt))
    out.print(count + (shown if len(shown) <= room else "…" + shown[1 - room :]))
    lines = textwrap.wrap(clipped(answer.rstrip(), len(answer)), max(8, out.width - 4)) or [""]
    out.print("\n".join(f"    {line}" for line in lines))
    out.print()


def summary(generator: Generator, stats: CacheStats, outputs: Outputs, seconds: float) -> list[str]:
    """Return lines with the counts of computed, proposed and loaded tokens."""
    groups = ", ".join(f"{group.name} {group.peak_held} of {group.total} blocks" for group in stats.groups)
    tokens = sum(map(len, outputs))
    lines = [f"{len(outputs)} answers, {tokens} new tokens in {seconds:.2f} s: {tokens / seconds:.0f} a second"]
    if generator.num_proposed:
        lines.append(f"{generator.num_accepted} of {generator.num_proposed} proposed tokens accepted")
    lines.append(f"{stats.computed_tokens:,} tokens computed, {stats.cached_tokens:,} found in the cache")
    lines.append(f"cache of {format_bytes(stats.nbytes)}; in use at most: {groups}")
    if stats.tiers:
        tiers = (f"{tier.name}: {tier.num_records} records, {format_bytes(tier.nbytes)}" for tier in stats.tiers)
        lines.append(f"{stats.loaded_tokens} tokens loaded from tiers; {', '.join(tiers)}")
    return lines


def load(name: str, dtype: str) -> tuple[Any, Any]:
    """Load a transformers model and its tokenizer. Raises BadInput if transformers cannot find or read them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no log of its retries: the error below is enough
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot load {name!r}: {str(error).splitlines()[0]}") from None


def generate(generator: Generator, prompts: list[list[int]], how: dict[str, Any]) -> Outputs:
    """Run ``generator.generate``; on a terminal, with a progress line of requests, tokens per second and blocks in
    use."""
    began, total = time.perf_counter(), sum(len(prompt) + how["n"] * (how["max_new_tokens"] - 1) for prompt in prompts)
    with console.progress(total, "tokens") as moved:
        if moved is None:
            return generator.generate(prompts, **how)
        before = generator.stats()

        def on_step(stats: CacheStats) -> None:
            computed = stats.computed_tokens - before.computed_tokens
            speed = computed / (time.perf_counter() - began)
            done = computed + stats.cached_tokens - before.cached_tokens
            held = ", ".join(f"{group.name} {group.held}/{group.total}" for group in stats.groups)
            moved(done, f"{stats.running} running, {speed:.0f} tokens/s, blocks {held}")

        return generator.generate(prompts, on_step=on_step, **how)


def clipped(text: str, width: int) -> str:
    """Return ``text`` on one line of at most ``width`` characters, with control characters replaced."""
    line = "".join(c if c.isprintable() else "·" for c in text)
    return line if len(line) <= width else line[: width - 1] + "…"
