"""Time to first token of the same prompts before and after a restart of the server, with a disk tier and without.

The model is that of ``kvpagoda generate``, in float32 on one thread. A prompt is 1,600 bytes of text, one token per
byte. Prompts are answered one after the other. Each start makes a new cache and a new tier; the model and the system's
page cache stay. A round runs all starts in turn, and begins with an empty folder.

``seconds``: mean time from a prompt to its first token. ``faster``: time of a restart without a tier, divided by
``seconds``.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.timing import Options, Row, seconds, tell
from kvpagoda import Identity
from kvpagoda.hf import Generator
from kvpagoda.hf.embedded import embedded_model, held_out_text
from kvpagoda.tiers import disk_tier

QUESTION = "How long does a server that was restarted take for prompts that it had answered before?"
LENGTH, QUICK = 1_600, 300


def measure(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    text, length = held_out_text(), QUICK if options.quick else LENGTH
    prompts = [list(text[begin : begin + length]) for begin in range(0, 4 * length, length)]
    model = embedded_model()
    found: dict[str, list[Row]] = {}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            for case in ("no tier, first start", "no tier, restart", "disk, first start", "disk, restart"):
                row = _start(model, prompts, Path(folder) if case.startswith("disk") else None)
                found.setdefault(case, []).append(row)
    cold = median(row["seconds"] for row in found["no tier, restart"])
    return [
        {"case": case, **rows[0], "seconds": taken, "faster": cold / taken}
        for case, rows in found.items()
        for taken in [median(row["seconds"] for row in rows)]
    ]


def _start(model: object, prompts: list[list[int]], folder: Path | None) -> Row:
    """Start a server, answer all prompts and stop it. Return the mean seconds from a prompt to its first token, and how
    many tokens were computed and loaded. ``folder``: of the disk tier; None: no tier."""
    tiers = [] if folder is None else [disk_tier(folder, "64MiB")]
    generator = Generator(
        model, "64MiB", max_requests=1, tiers=tiers, identity=Identity(weights="those of the package")
    )
    taken = [seconds(partial(generator.generate, [prompt], max_new_tokens=1)) for prompt in prompts]
    generator.cache.flush()
    stats = generator.stats()
    generator.cache.close()
    return {
        "seconds": sum(taken) / len(prompts),
        "prompt_tokens": stats.prompt_tokens,
        "computed_tokens": stats.computed_tokens,
        "loaded_tokens": stats.loaded_tokens,
    }


if __name__ == "__main__":
    tell("restart", QUESTION, measure)
