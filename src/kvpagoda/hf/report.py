"""What ``kvpagoda generate`` does: load a model, generate with a progress line, print a table or JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from kvpagoda import console
from kvpagoda.cache.stats import CacheStats
from kvpagoda.errors import BadInput
from kvpagoda.hf.embedded import PROMPTS, ByteTokenizer, embedded_model
from kvpagoda.hf.generator import Generator
from kvpagoda.units import format_bytes

Outputs = list[list[int]]


def run(
    model_name: str | None,
    prompt_file: Path | None,
    as_json: bool,
    generator_arguments: dict[str, Any],
    how: dict[str, Any],
    dtype: str,
) -> None:
    """Generate and print. ``how``: what ``Generator.generate`` takes."""
    texts = list(PROMPTS) if prompt_file is None else prompt_file.read_text().splitlines()
    texts = [text for text in texts if text]
    if not texts:
        raise BadInput(f"{prompt_file} holds no prompts; write one on each line")
    if model_name is None:
        torch.set_num_threads(1)  # the embedded model is so small that more threads wait for each other
        model, tokenizer = embedded_model(), ByteTokenizer()
    else:
        model, tokenizer = load(model_name, dtype)
    generator = Generator(model, **generator_arguments)
    prompts = [tokenizer.encode(text) for text in texts]
    began = time.perf_counter()
    outputs = generate(generator, prompts, how)
    seconds = time.perf_counter() - began
    generator.cache.flush()
    stats = generator.stats()
    generator.cache.close()
    rows = [
        (text, len(prompt), outputs[i * how["n"] + answer])
        for i, (text, prompt) in enumerate(zip(texts, prompts))
        for answer in range(how["n"])
    ]
    if as_json:
        results = [{"prompt": text, "tokens": output, "text": tokenizer.decode(output)} for text, _, output in rows]
        figures = {
            "seconds": round(seconds, 3),
            "new_tokens": sum(map(len, outputs)),
            "proposed_tokens": generator.num_proposed,
            "accepted_tokens": generator.num_accepted,
            "stats": stats.to_dict(),
        }
        print(json.dumps({"results": results, **figures}, indent=2))
        return
    out = console.output()
    counts = [f"{length} + {len(output)}" for _, length, output in rows]
    room = max(8, (out.width - max(map(len, counts)) - 4) // 2)
    cells = [
        (clipped(text, room), count, clipped(tokenizer.decode(output), room))
        for (text, _, output), count in zip(rows, counts)
    ]
    out.print(console.table(("prompt", "tokens", "new text"), cells, left=("prompt", "new text")))
    out.print()
    for line in summary(generator, stats, outputs, seconds):
        out.print(line)


def summary(generator: Generator, stats: CacheStats, outputs: Outputs, seconds: float) -> list[str]:
    """What was computed, proposed and loaded, in lines."""
    groups = ", ".join(f"{group.name}: at most {group.peak_held} of {group.total} blocks" for group in stats.groups)
    tokens = sum(map(len, outputs))
    lines = [f"{len(outputs)} answers, {tokens} new tokens in {seconds:.2f} s: {tokens / seconds:.0f} a second"]
    if generator.num_proposed:
        lines.append(f"{generator.num_accepted} of {generator.num_proposed} proposed tokens accepted")
    lines.append(f"{stats.computed_tokens} tokens computed; cache {format_bytes(stats.nbytes)}; {groups}")
    if stats.tiers:
        tiers = (f"{tier.name}: {tier.num_records} records, {format_bytes(tier.nbytes)}" for tier in stats.tiers)
        lines.append(f"{stats.loaded_tokens} tokens loaded from tiers; {', '.join(tiers)}")
    return lines


def load(name: str, dtype: str) -> tuple[Any, Any]:
    """A transformers model and its tokenizer. Raises BadInput where transformers cannot find or read them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot load {name!r}: {str(error).splitlines()[0]}") from None


def generate(generator: Generator, prompts: list[list[int]], how: dict[str, Any]) -> Outputs:
    """``generator.generate`` with a line on a terminal that shows requests, tokens a second and cache use."""
    began, total = time.perf_counter(), sum(len(prompt) + how["n"] * (how["max_new_tokens"] - 1) for prompt in prompts)
    with console.progress(total, "tokens") as moved:
        if moved is None:
            return generator.generate(prompts, **how)

        def on_step(stats: CacheStats) -> None:
            speed = stats.computed_tokens / (time.perf_counter() - began)
            held = ", ".join(f"{group.name} {group.held}/{group.total}" for group in stats.groups)
            moved(stats.computed_tokens, f"{stats.running} running, {speed:.0f} tokens/s, blocks {held}")

        return generator.generate(prompts, on_step=on_step, **how)


def clipped(text: str, width: int) -> str:
    """At most ``width`` characters on one line, none of them a control character."""
    line = "".join(c if c.isprintable() else "·" for c in text)
    return line if len(line) <= width else line[: width - 1] + "…"
