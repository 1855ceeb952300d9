"""Running a step of a transformers model: the tokens of many requests in, the logits after each one's last token out."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np
import torch

from kvpagoda.hf.paged import ATTENTION, StepContext, in_step
from kvpagoda.manager import KVCache
from kvpagoda.sequence import Sequence, Tokens

Tensor = torch.Tensor
Work = tuple[Sequence, Tokens]


class Runner(Protocol):
    """Computes the next tokens of some sequences. Room is made before, ``commit`` follows."""

    def step(self, work: Many[Work]) -> Tensor:
        """(sequence, its next tokens) pairs -> logits after the last token of each, float ``[len(work), vocab]``."""
        ...


class ModelRunner:
    """Any supported model through transformers' own code: its attention interface and its cache calls.

    All requests that compute one token form one batched forward pass; a longer piece of a prompt is a pass of its own.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        model.set_attn_implementation(ATTENTION)

    @torch.no_grad()
    def step(self, work: Many[Work]) -> Tensor:
        single = [i for i, (sequence, tokens) in enumerate(work) if len(tokens) == 1 and sequence.length]
        alone = [[i] for i in range(len(work)) if i not in set(single)]
        rows: dict[int, Tensor] = {}
        for part in [single, *alone] if single else alone:
            for i, logits in zip(part, self._forward([work[i] for i in part])):
                rows[i] = logits
        return torch.stack([rows[i] for i in range(len(work))])

    def _forward(self, work: Many[Work]) -> Tensor:
        """One pass over rows of equal length: logits ``[len(work), vocab]``."""
        batch = self.cache.batch([sequence for sequence, _ in work], [len(tokens) for _, tokens in work])
        ids = torch.from_numpy(np.stack([tokens for _, tokens in work])).to(self.cache.device, torch.int64)
        positions = batch.positions.long().view(ids.shape)
        with in_step(StepContext(batch, self.cache.schema)) as past:
            out = self.model(
                input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=1
            )
        return out.logits[:, -1].float()  # type: ignore[no-any-return]
