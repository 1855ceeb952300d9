"""Runs a step of a transformers model: takes new tokens of many sequences, returns the logits after the last tokens of
each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kvpagoda import KVCache, Sequence
from kvpagoda.arrays import Tokens
from kvpagoda.hf.cache_name import cache_name_of
from kvpagoda.hf.paged import ATTENTION, OWN_STATES, StepContext, in_step, step_cache_class
from kvpagoda.hf.rope_switch import RopeSwitch
from kvpagoda.hf.state_modules import StateModules
from kvpagoda.hf.time_steps import TimeSteps
from kvpagoda.schema import Attention, Latent, Schema
from kvpagoda.schema.families import known_types

Tensor = torch.Tensor
Work = tuple[Sequence, Tokens]


class Runner(Protocol):
    """Computes the next tokens of sequences. The caller extends them before, and commits after.

    ``cache``: holds their rows. ``switch``: the lengths at which a growing text must be computed again.
    """

    cache: KVCache
    switch: RopeSwitch

    def step(self, work: Many[Work], kept: Many[int] | None = None, lengths: Many[int] | None = None) -> Tensor:
        """Compute ``work``, pairs of (sequence, its next tokens). Return the logits after the last ``kept[i]`` tokens
        of each sequence (default one), one sequence after another: float ``[sum(kept), vocab]``. ``lengths``: tokens of
        each text as far as it is known (default: up to its next tokens)."""
        ...

    def most_tokens(self, sequence: Sequence) -> int | None:
        """Return the most tokens of ``sequence`` that the next step can take; None: no limit."""
        ...


class ModelRunner:
    """Runs any supported model through transformers' own code: its cache calls, and its attention interface if it uses
    one.

    Requests that compute one token, or verify the same number of tokens, form one batched forward pass; a longer prompt
    piece is a pass of its own. Texts on different sides of a ``switch`` are in different passes.

    The model's attention implementation is replaced by kvpagoda's only while a step runs. A model with its own
    attention code keeps it, and a model that counts positions by itself counts them. In both cases the requests of a
    pass must be equally long, because the model assumes one past length for the batch. The same holds for a model that
    ranks tokens: which of equally ranked tokens it selects depends on their number. Raises SchemaError for a model that
    takes no cache, and see ``TimeSteps``.

    ``schema``: of the model's layers, which are layers ``first_layer ..`` of the cache; None: its own layers, without
    those of a draft.
    """

    def __init__(self, model: Any, cache: KVCache, schema: Schema | None = None, first_layer: int = 0) -> None:
        self.model, self.cache, self.switch = model, cache, RopeSwitch(model)
        self._schema = schema = cache.schema.without_drafts if schema is None else schema
        self._first_layer = first_layer
        self._time_steps = TimeSteps(model)
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        family = known_types()[schema.name]["family"]
        through_interface = model.config._attn_implementation == ATTENTION and not family.own_attention
        model.set_attn_implementation(before)
        accepted = inspect.signature(model.forward).parameters
        self._is_batched = family.batched
        self._cache_name = cache_name_of(model)
        self._attention = ATTENTION if through_interface else None
        self._trims_logits = "logits_to_keep" in accepted
        takes_positions = through_interface and "position_ids" in accepted and not family.aligned
        kinds = [kind for layer in schema.layers for kind in layer.kinds]
        ranks_tokens = any(isinstance(kind, Attention | Latent) and kind.indexer is not None for kind in kinds)
        self._is_aligned = bool(schema.groups) and (ranks_tokens or not takes_positions)
        configs = [
            part.config for part in model.modules() if hasattr(getattr(part, "config", None), "_attn_implementation")
        ]
        self._configs = list({id(config): config for config in configs}.values())
        self._columns: dict[tuple[int, int], int] = {}
        self._has_run = not schema.state_layout.nbytes
        self._padding = _padding_token(model)
        self._cache_class = OWN_STATES[family.own_states] if family.own_states else step_cache_class(model)
        self._states, self._places = StateModules(model, schema), schema.state_growth.places
        self._resumes = self._states.resume

    @torch.no_grad()
    def step(
        self, work: Many[Work], kept: Many[int] | None = None, lengths: Many[int] | None = None,
        firsts: Many[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``Runner``. ``firsts``: see ``KVCache.batch``."""
        starts = [sequence.length for sequence, _ in work] if firsts is None else firsts
        if any(starts) and not self._has_run:  # it has computed no text from its beginning: from a tier, or handed over
            self._learn_columns()
        self._has_run = True
        lengths = [start + len(tokens) for start, (_, tokens) in zip(starts, work)] if lengths is None else lengths
        sides = [self.switch.passed(length) for length in lengths]
        with self._attending():
            return self._step(work, [1] * len(work) if kept is None else kept, sides, starts, firsts is not None)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Replace the model's attention implementation inside this context."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = self._attention or config._attn_implementation
        try:
            yield
        finally:
            for config, implementation in zip(self._configs, before):
                config._attn_implementation = implementation

    def most_tokens(self, sequence: Sequence) -> int | None:
        """See ``Runner``. There is a limit after the first piece of a prompt for models with Mamba-1 or Griffin blocks:
        transformers' selective scan of Mamba-1 (whose modules project x to the scan's parameters) and its Griffin
        blocks compute several tokens from a zero state and ignore the past. So a step takes as many as these blocks
        compute one by one: see ``StateModules``."""
        return None if self._resumes or sequence.length == 0 else self._places

    def _learn_columns(self) -> None:
        """Compute a text of one token in a cache of its own, which shows what convolution tails are in transformers."""
        cache = KVCache(self.cache.schema, num_blocks=4, device=self.cache.device, block_size=self.cache.block_size)
        runner = ModelRunner(self.model, cache, self._schema, self._first_layer)
        runner.step([(cache.open([0]), np.zeros(1, np.int32))])
        cache.close()
        self._columns = runner._columns

    def _step(self, work: Many[Work], kept: Many[int], sides: Many[int], starts: Many[int], are_given: bool) -> Tensor:
        passes: dict[tuple[int, int, int], list[int]] = {}
        for i, (_, tokens) in enumerate(work):
            together = self._is_batched and starts[i] > 0 and len(tokens) == kept[i]
            past = starts[i] if self._is_aligned else 0
            passes.setdefault((sides[i], past, len(tokens) if together else -1 - i), []).append(i)
        rows: dict[int, Tensor] = {}
        for (side, _, _), part in passes.items():
            with self.switch.rotating_past(side), self._time_steps.clamped():
                firsts = [starts[i] for i in part] if are_given else None
                rows.update(zip(part, self._forward([work[i] for i in part], kept[part[0]], firsts)))
        return torch.cat([rows[i] for i in range(len(work))])

    def _forward(self, work: Many[Work], kept: int, firsts: Many[int] | None) -> Tensor:
        """Run one pass over sequences with the same number of new tokens: logits ``[len(work), kept, vocab]``."""
        counts = [len(tokens) for _, tokens in work]
        batch = self.cache.batch([sequence for sequence, _ in work], counts, firsts=firsts)
        ids = torch.from_numpy(np.stack([tokens for _, tokens in work])).to(self.cache.device, torch.int64)
        positions = batch.positions.long().view(ids.shape)
        if self._padding is not None:
            positions = self._positions_after_padding(work).to(self.cache.device)
        context = StepContext(
            batch, self._schema, self._columns, self._is_aligned, self._states.holders, self._first_layer
        )
        with (
            in_step(context, self._cache_class) as past,
            self._states.in_pieces(ids.shape[1], sorted(context.left), past.leave_states),
        ):
            given: dict[str, Any] = {self._cache_name: past, "position_ids": positions}
            if self._trims_logits:
                given["logits_to_keep"] = kept
            out = self.model(input_ids=ids, use_cache=True, **given)
        return out.logits[:, -kept:].float()  # type: ignore[no-any-return]

    def _positions_after_padding(self, work: Many[Work]) -> Tensor:
        """Return positions, int64 ``[B, S]``, for a model that counts from its padding token id on, and skips padding
        tokens in a text. O(tokens of the texts)."""
        assert self._padding is not None
        rows = []
        for sequence, tokens in work:
            before = np.count_nonzero(sequence.tokens != self._padding)
            counts = tokens != self._padding
            rows.append((before + np.cumsum(counts)) * counts + self._padding)
        return torch.from_numpy(np.stack(rows))


def _padding_token(model: Any) -> int | None:
    """Return the padding token of a model that numbers positions from its id on, as RoBERTa does; None for other
    models."""
    counting = (part for part in model.modules() if hasattr(part, "create_position_ids_from_input_ids"))
    return next((int(part.padding_idx) for part in counting), None)
