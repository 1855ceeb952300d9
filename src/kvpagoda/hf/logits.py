"""What a model's ``generation_config`` changes about logits, such as a penalty for repetitions: as transformers does it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from kvpagoda.cache.request import Tokens
from kvpagoda.errors import BadInput

Change = Callable[[Tokens, torch.Tensor], torch.Tensor]
"""(text so far, logits ``[vocab]`` of its next token) -> changed logits, float32 ``[vocab]``."""


def changes_of(model: Any, prompt: Tokens, total: int) -> Change | None:
    """Return what ``model.generate`` would do to the logits of a greedy answer to ``prompt`` before it chooses a token;
    None for nothing. ``total``: the most tokens of the text. Raises BadInput for ``guidance_scale``, which needs a
    second text."""
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
    ids = torch.from_numpy(prompt.astype(np.int64)).to(model.device)[None]
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
