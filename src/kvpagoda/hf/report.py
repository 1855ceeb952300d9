"""The main job as a person sees it: load, generate with a progress line, print a table or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from kvpagoda.errors import BadInput
from kvpagoda.hf.embedded import PROMPTS, ByteTokenizer, embedded_model
from kvpagoda.hf.generator import Generator
from kvpagoda.stats import CacheStats
from kvpagoda.units import format_bytes


def run(
    model_name: str | None,
    prompt_file: Path | None,
    as_json: bool,
    generator_arguments: dict[str, Any],
    how: dict[str, Any],
    dtype: str,
) -> None:
    """Generate and print. ``how``: what ``Generator.generate`` takes. Progress goes to standard error, and only on a
    terminal."""
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
    outputs = generate(generator, prompts, how, Console(stderr=True))
    seconds = time.perf_counter() - began
    generator.cache.flush()
    stats, new_tokens = generator.stats(), sum(len(output) for output in outputs)
    generator.cache.close()
    texts = [text for text in texts for _ in range(how["n"])]
    prompts = [prompt for prompt in prompts for _ in range(how["n"])]
    if as_json:
        results = [
            {"prompt": text, "tokens": output, "text": tokenizer.decode(output)} for text, output in zip(texts, outputs)
        ]
        figures = {
            "seconds": round(seconds, 3),
            "new_tokens": new_tokens,
            "proposed_tokens": generator.num_proposed,
            "accepted_tokens": generator.num_accepted,
            "stats": stats.to_dict(),
        }
        print(json.dumps({"results": results, **figures}, indent=2))
        return
    console = Console(highlight=False, markup=False)
    counts = [f"{len(prompt)} + {len(output)}" for prompt, output in zip(prompts, outputs)]
    room = max(8, (console.width - max(map(len, counts)) - 4) // 2)
    table = Table(box=None, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("new text", no_wrap=True)
    for text, count, output in zip(texts, counts, outputs):
        table.add_row(clipped(text, room), count, clipped(tokenizer.decode(output), room))
    console.print(table)
    console.print()
    groups = ", ".join(f"{group.name}: at most {group.peak_held} of {group.total} blocks" for group in stats.groups)
    console.print(
        f"{len(outputs)} answers, {new_tokens} new tokens in {seconds:.2f} s: {new_tokens / seconds:.0f} a second"
    )
    if generator.num_proposed:
        console.print(f"{generator.num_accepted} of {generator.num_proposed} proposed tokens accepted")
    console.print(f"{stats.computed_tokens} tokens computed; cache {format_bytes(stats.nbytes)}; {groups}")
    if stats.tiers:
        tiers = ", ".join(
            f"{tier.name}: {tier.num_records} records, {format_bytes(tier.nbytes)}" for tier in stats.tiers
        )
        console.print(f"{stats.loaded_tokens} tokens loaded from tiers; {tiers}")


def load(name: str, dtype: str) -> tuple[Any, Any]:
    """A transformers model and its tokenizer. Raises BadInput where transformers cannot find or read them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot load {name!r}: {str(error).splitlines()[0]}") from None


def generate(generator: Generator, prompts: list[list[int]], how: dict[str, Any], console: Console) -> list[list[int]]:
    """``generator.generate`` with a line that shows requests, tokens a second and cache use."""
    if not console.is_terminal:
        return generator.generate(prompts, **how)
    columns = (TextColumn("{task.completed}/{task.total} tokens"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        total = sum(len(prompt) + how["n"] * (how["max_new_tokens"] - 1) for prompt in prompts)
        task = progress.add_task("", total=total, note="")
        return generator.generate(prompts, on_step=_shower(progress, task), **how)


def _shower(progress: Progress, task: Any) -> Callable[[CacheStats], None]:
    began = time.perf_counter()

    def show(stats: CacheStats) -> None:
        speed = stats.computed_tokens / (time.perf_counter() - began)
        held = ", ".join(f"{group.name} {group.held}/{group.total}" for group in stats.groups)
        note = f"{stats.running} running, {speed:.0f} tokens/s, blocks {held}"
        progress.update(task, completed=stats.computed_tokens, note=note)

    return show


def clipped(text: str, width: int) -> str:
    """At most ``width`` characters on one line, none of them a control character."""
    line = "".join(c if c.isprintable() else "·" for c in text)
    return line if len(line) <= width else line[: width - 1] + "…"
