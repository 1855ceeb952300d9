"""Chooses the next token from the logits, one token of one answer at a time: first a model's ``generation_config`` may
change them, as transformers does it, then the largest is taken or one is drawn, with numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.arrays import Tokens
from kvpagoda.errors import BadInput

Change = Callable[[Tokens, torch.Tensor], torch.Tensor]
"""(text so far, logits ``[vocab]`` of its next token) -> changed logits, float32 ``[vocab]``."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Answer ``i`` of a request has its own random stream, seeded with ``seed + i``, so it does not depend on the other
    requests of a step.

    Args:
        temperature: 0 takes the token with the largest logit. Above 0 a token is drawn from the ``top_k`` likeliest
            tokens, reduced to the fewest that have ``top_p`` of the probability.
        top_p: above 0, at most 1.
        top_k: those equal to the last of them are drawn too; None: all tokens.
        seed: None: each answer is different every time.

    Raises:
        BadInput: a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0 and 0 < self.top_p <= 1):
            text = f"need temperature >= 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}"
            raise BadInput(text, needed=(self.temperature, self.top_p))
        if (self.top_k is not None and self.top_k < 1) or (self.seed is not None and self.seed < 0):
            text = f"need top_k >= 1 and seed >= 0, or None, got {self.top_k} and {self.seed}"
            raise BadInput(text, needed=(self.top_k, self.seed))

    def stream(self, number: int) -> np.random.Generator:
        """Return the random stream of an answer of a request; ``draw`` uses one number for each token.

        Args:
            number: of the answer.
        """
        return np.random.default_rng(None if self.seed is None else self.seed + number)

    def draw(self, logits: npt.NDArray[Any], stream: np.random.Generator) -> int:
        """Draw a token, at a temperature above 0. O(vocab), O(vocab log vocab) with ``top_p``.

        Args:
            logits: ``[vocab]``.
            stream: of the answer.
        """
        weights = np.exp((logits - logits.max()).astype(np.float64) / self.temperature)
        if self.top_k is not None and self.top_k < len(weights):
            weights[weights < np.partition(weights, -self.top_k)[-self.top_k]] = 0
        if self.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            held = np.cumsum(weights[order])
            weights[order[1:][held[:-1] >= self.top_p * held[-1]]] = 0
        held = np.cumsum(weights)
        return int(np.searchsorted(held, stream.random() * held[-1], side="right"))


GREEDY = Sampling()


def changes_of(model: Any, prompt: Tokens, total: int, encoder_ids: Tokens | None = None) -> Change | None:
    """Return what ``model.generate`` would do to the logits of a greedy answer to ``prompt`` before it chooses a token;
    None for nothing. ``total``: the most tokens of the text. ``encoder_ids``: what its encoder reads, if it has one. Raises
    BadInput for ``guidance_scale``, which needs a second text."""
    config = getattr(model, "generation_config", None)
    if config is None or not hasattr(model, "_get_logits_processor"):
        return None
    if getattr(config, "guidance_scale", None) not in (None, 1):
        text = f"generation_config has guidance_scale={config.guidance_scale}, which needs a second text"
        raise BadInput.with_hint(text, "set it to None", needed=config.guidance_scale)
    config = deepcopy(config)
    config.do_sample, config.num_beams, config.max_length = False, 1, total
    config.pad_token_id = config.pad_token_id or 0  # nothing is padded; without one transformers logs a warning
    model._prepare_special_tokens(config, device=model.device)
    ids = torch.from_numpy((prompt if encoder_ids is None else encoder_ids).astype(np.int64)).to(model.device)[None]
    processors = model._get_logits_processor(
        config, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device=model.device
    )
    if not processors:
        return None

    def change(text: Tokens, logits: torch.Tensor) -> torch.Tensor:
        ids = torch.from_numpy(text.astype(np.int64)).to(logits.device)
        changed: torch.Tensor = processors(ids[None], logits[None].to(torch.float32, copy=True))[0]
        return changed

    return change
