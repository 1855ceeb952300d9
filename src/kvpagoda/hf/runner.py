"""Running a step of a transformers model: the tokens of many requests in, the logits after each one's last tokens out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np
import torch

from kvpagoda.cache.request import Tokens
from kvpagoda.cache.sequence import Sequence
from kvpagoda.errors import SchemaError
from kvpagoda.hf.paged import ATTENTION, StepContext, in_step
from kvpagoda.hf.rope_switch import RopeSwitch
from kvpagoda.kv_cache import KVCache

Tensor = torch.Tensor
Work = tuple[Sequence, Tokens]


class Runner(Protocol):
    """Computes the next tokens of some sequences. Room is made before, ``commit`` follows.

    ``switch``: at which lengths of a text all that was computed of it becomes useless.
    """

    switch: RopeSwitch

    def step(self, work: Many[Work], kept: Many[int] | None = None, lengths: Many[int] | None = None) -> Tensor:
        """(sequence, its next tokens) pairs -> logits after the last ``kept[i]`` tokens of each (default one), those of one
        request behind those of another: float ``[sum(kept), vocab]``. ``lengths``: tokens of each text, as far as it is known
        (default: up to its next tokens)."""
        ...

    def most_tokens(self, sequence: Sequence) -> int | None:
        """The most tokens of ``sequence`` that the next step can take; None: as many as there is room for."""
        ...


class ModelRunner:
    """Any supported model through transformers' own code: its attention interface and its cache calls.

    Requests that compute one token, or verify equally many, form one batched forward pass; a longer piece of a prompt is a
    pass of its own. Texts on two sides of a ``switch`` are in passes of their own.
    The model's attention implementation is kvpagoda's only while a step runs. Raises SchemaError for a model that does
    not let it be set.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.model, self.cache, self.switch = model, cache, RopeSwitch(model)
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        taken = model.config._attn_implementation == ATTENTION
        model.set_attn_implementation(before)
        if not taken:
            raise SchemaError(f"{type(model).__name__} does not go through transformers' attention interface")
        configs = [
            part.config for part in model.modules() if hasattr(getattr(part, "config", None), "_attn_implementation")
        ]
        self._configs = list({id(config): config for config in configs}.values())
        self._columns: dict[int, int] = {}
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"
        scans = [part for part in model.modules() if hasattr(part, "A_log")]
        self._resumes = not any(hasattr(part, "x_proj") or hasattr(part, "x_proj_weight") for part in scans)

    @torch.no_grad()
    def step(self, work: Many[Work], kept: Many[int] | None = None, lengths: Many[int] | None = None) -> Tensor:
        lengths = [sequence.length + len(tokens) for sequence, tokens in work] if lengths is None else lengths
        sides = [self.switch.passed(length) for length in lengths]
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = ATTENTION
        try:
            return self._step(work, [1] * len(work) if kept is None else kept, sides)
        finally:
            for config, implementation in zip(self._configs, before):
                config._attn_implementation = implementation

    def most_tokens(self, sequence: Sequence) -> int | None:
        """transformers' selective scan of Mamba-1 (its modules project x to the scan's parameters) starts several tokens
        from a zero state whatever came before, so after the first piece of a prompt such models go on token by token."""
        return None if self._resumes or sequence.length == 0 else 1

    def _step(self, work: Many[Work], kept: Many[int], sides: Many[int]) -> Tensor:
        passes: dict[tuple[int, int], list[int]] = {}
        for i, (sequence, tokens) in enumerate(work):
            together = sequence.length > 0 and len(tokens) == kept[i]
            passes.setdefault((sides[i], len(tokens) if together else -1 - i), []).append(i)
        rows: dict[int, Tensor] = {}
        for (side, _), part in passes.items():
            with self.switch.rotating_past(side):
                rows.update(zip(part, self._forward([work[i] for i in part], kept[part[0]])))
        return torch.cat([rows[i] for i in range(len(work))])

    def _forward(self, work: Many[Work], kept: int) -> Tensor:
        """One pass over rows of equal length: logits ``[len(work), kept, vocab]``."""
        batch = self.cache.batch([sequence for sequence, _ in work], [len(tokens) for _, tokens in work])
        ids = torch.from_numpy(np.stack([tokens for _, tokens in work])).to(self.cache.device, torch.int64)
        positions = batch.positions.long().view(ids.shape)
        with in_step(StepContext(batch, self.cache.schema, self._columns)) as past:
            given = {self._cache_name: past, "position_ids": positions, "logits_to_keep": kept}
            out = self.model(input_ids=ids, use_cache=True, **given)
        return out.logits[:, -kept:].float()  # type: ignore[no-any-return]
