"""The same prompts answered cold, warm and after a restart: the time to the first token as bars."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from kvpagoda import console
from kvpagoda.hf.run import GenerationRun, Prompts
from kvpagoda.schema import Schema


@dataclass(frozen=True)
class Comparison:
    """What each of several runs took that answered the same prompts; the first found nothing cached.

    ``model``: its type; ``parameters``: how many it has. ``layers``: label -> how many layers have it. ``num_same``: how
    many of the ``num_answers`` answers have the same tokens in all runs.
    """

    model: str
    parameters: int
    layers: dict[str, int]
    prompt_lengths: list[int]
    num_answers: int
    num_same: int
    runs: list[GenerationRun]

    @classmethod
    def of(cls, model: Any, schema: Schema, prompts: Prompts, runs: list[GenerationRun]) -> Comparison:
        """``schema``: of ``model``."""
        answers = zip(*(run.outputs for run in runs))
        num_same = sum(all(output == outputs[0] for output in outputs) for outputs in answers)
        return cls(
            schema.name,
            sum(parameter.numel() for parameter in model.parameters()),
            dict(Counter(layer.label for layer in schema.layers)),
            [len(prompt) for prompt in prompts], len(runs[0].outputs), num_same, runs,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, for JSON."""
        return {**asdict(self), "runs": [run.to_dict() for run in self.runs]}

    @property
    def size(self) -> str:
        """The number of parameters as text: "1.2 M"."""
        return f"{self.parameters / 1e6:.1f} M"

    def say(self) -> None:
        """Print the bars, what they show, and whether the answers were the same."""
        least, most = min(self.prompt_lengths), max(self.prompt_lengths)
        lengths = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        kinds = ", ".join(f"{count} {label.replace('_', ' ')}" for label, count in self.layers.items())
        console.say(
            f"Time to the first token, mean of {len(self.prompt_lengths)} prompts of {lengths} tokens that arrive "
            "together, and where these tokens came from."
        )
        console.say(f"Model: a {self.model} of {self.size} parameters, on one thread; layers: {kinds}.")
        console.say("")
        cells = {run.name: _cells(run) for run in self.runs}
        seconds = {run.name: run.first_token_seconds for run in self.runs}
        console.bars(seconds, ("seconds", "computed", "memory", "disk"), cells)
        console.say("")
        first, *others = self.runs
        faster = [
            f"{first.first_token_seconds / run.first_token_seconds:.1f} times as fast {run.name}" for run in others
        ]
        console.say(f"{', '.join(faster)}: a new process found what the first cache left on disk.")
        tokens = sum(map(len, first.outputs))
        console.say(
            f"{self.num_same} of {self.num_answers} answers ({tokens:,} tokens in all) are the same in all "
            f"{len(self.runs)} runs."
        )


def _cells(run: GenerationRun) -> tuple[str, ...]:
    """Return the columns of ``run``: seconds, and how many prompt tokens came from where."""
    counts = (run.computed_tokens, run.cached_tokens - run.loaded_tokens, run.loaded_tokens)
    return f"{run.first_token_seconds:.2f}", *(f"{count:,}" for count in counts)
