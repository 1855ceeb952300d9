"""Runs ``kvpagoda generate``: loads a model, generates with a progress line, and prints the answers and figures, or
JSON. With the embedded model it compares a cold cache, a warm one, and one that was restarted."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from kvpagoda import CacheStats, console
from kvpagoda.errors import BadInput
from kvpagoda.hf.comparison import Comparison
from kvpagoda.hf.embedded import ByteTokenizer, built_in_prompts, held_out_text
from kvpagoda.hf.generator import Generator
from kvpagoda.hf.held_out import format_cost
from kvpagoda.hf.run import GenerationRun, Prompts, answer, answer_after_restart, embedded_on_one_thread
from kvpagoda.schema.kv_format import as_text
from kvpagoda.text import text_in
from kvpagoda.tiers import disk_tier
from kvpagoda.units import format_bytes

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
    """Generate answers and print them. ``how``: arguments of ``Generator.submit``.

    The embedded model (``model_name`` None) prints what ``kv_format`` costs. Without tiers it also answers the same
    prompts from the cache, and in a new process from a file in a temporary folder. Raises BadInput, OSError.
    """
    texts = built_in_prompts() if prompt_file is None else [x for x in text_in(prompt_file).splitlines() if x]
    if not texts:
        raise BadInput(f"{prompt_file} has no prompts; write one on each line")
    is_embedded, kv_format = model_name is None, generator_arguments["kv_format"]
    with console.waiting("loading the model"):
        model, tokenizer = (
            (embedded_on_one_thread(kv_format), ByteTokenizer()) if model_name is None else load(model_name, dtype)
        )
    prompts = [tokenizer.encode(text) for text in texts]
    restarts = is_embedded and not generator_arguments["tiers"]
    with TemporaryDirectory(prefix="kvpagoda-generate-") as folder:
        if restarts:
            file = disk_tier(folder, generator_arguments["budget"])
            generator_arguments = {**generator_arguments, "tiers": [file]}
        generator = Generator(model, **generator_arguments)
        runs = [generate("cold" if restarts else "first", generator, prompts, how)]
        generator.cache.flush()
        stats = generator.stats()
        if restarts:
            runs.append(generate("warm", generator, prompts, how))
        generator.cache.close()
        if restarts:
            with console.waiting("a new process answers from the disk"):
                runs.append(answer_after_restart("restarted", generator_arguments, prompts, how))
    found = Comparison.of(model, generator.cache.schema, prompts, runs) if restarts else None
    cost = None
    if is_embedded and kv_format != "raw":
        with console.waiting(f"measuring what {as_text(kv_format)} costs"):
            cost = format_cost(model, kv_format, held_out_text()[:HELD_OUT_BYTES])
    answers = [(texts[i // how["n"]], output, tokenizer.decode(output)) for i, output in enumerate(runs[0].outputs)]
    if as_json:
        figures = {
            "results": [dict(zip(("prompt", "tokens", "text"), answer)) for answer in answers],
            "seconds": runs[0].seconds,
            "first_token_seconds": runs[0].first_token_seconds,
            "new_tokens": sum(map(len, runs[0].outputs)),
            "proposed_tokens": generator.num_proposed,
            "accepted_tokens": generator.num_accepted,
            "stats": stats.to_dict(),
            **({} if found is None else {"comparison": found.to_dict()}),
            **({} if cost is None else {"format_cost": cost.to_dict()}),
        }
        print(json.dumps(figures, indent=2))
        return
    if found is not None:
        found.say()
        console.say("")
        console.say(f"The text of a {found.size}-parameter model (end of the prompt | what it wrote):")
    for prompt, _, text in answers:
        say_answer(prompt, text, is_whole=found is None)
    for line in summary(generator, stats, runs[0]) if found is None else ():
        console.say(line)
    if cost is not None:
        console.say("")
        console.say(str(cost))


def generate(name: str, generator: Generator, prompts: Prompts, how: dict[str, Any]) -> GenerationRun:
    """Answer ``prompts``; on a terminal, with a progress line of requests, tokens per second and blocks in use."""
    began, total = perf_counter(), sum(len(prompt) + how["n"] * (how["max_new_tokens"] - 1) for prompt in prompts)
    with console.progress(total, "tokens") as moved:
        if moved is None:
            return answer(name, generator, prompts, how)
        before = generator.stats()

        def on_step(stats: CacheStats) -> None:
            computed = stats.computed_tokens - before.computed_tokens
            speed = computed / (perf_counter() - began)
            done = computed + stats.cached_tokens - before.cached_tokens
            held = ", ".join(f"{group.name} {group.held}/{group.total}" for group in stats.groups)
            moved(done, f"{name}: {stats.running} running, {speed:.0f} tokens/s, blocks {held}")

        return answer(name, generator, prompts, how, on_step)


def say_answer(prompt: str, answer: str, is_whole: bool) -> None:
    """Print the end of the prompt and the answer: ``is_whole``, wrapped to the width of the terminal; else what fits on
    a line."""
    width = console.output().width
    end = clipped(prompt, len(prompt)).rstrip()
    end = end if len(end) <= width // 4 else f"…{end[1 - width // 4 :]}"
    line = f"{end} | {clipped(answer.strip(), len(answer))}"
    lines = textwrap.wrap(line, width, subsequent_indent="    ") if is_whole else [clipped(line, width)]
    console.output().print("\n".join(lines))


def summary(generator: Generator, stats: CacheStats, run: GenerationRun) -> list[str]:
    """Return lines with the counts of computed, proposed and loaded tokens."""
    groups = ", ".join(f"{group.name} {group.peak_held} of {group.total} blocks" for group in stats.groups)
    tokens = sum(map(len, run.outputs))
    lines = [
        f"{len(run.outputs)} answers, {tokens} new tokens in {run.seconds:.2f} s: {tokens / run.seconds:.0f} a second; "
        f"{run.first_token_seconds:.2f} s to the first token, on average"
    ]
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


def clipped(text: str, width: int) -> str:
    """Return ``text`` on one line of at most ``width`` characters, with control characters replaced."""
    line = "".join(c if c.isprintable() else "·" for c in text)
    return line if len(line) <= width else line[: width - 1] + "…"
