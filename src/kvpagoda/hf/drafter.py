"""A small model that proposes tokens of the same texts; its layers are the draft layers of the same cache.

    a step of the generator     the model computes new tokens of a text ──► the draft computes the same tokens
                                or: the draft proposes k tokens one by one ──► the model verifies them in one pass

So the draft has the row of every token that is committed, as the model has, and both are shared, found and evicted
together. What an optional group of the draft lacks after a hit is computed again before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from kvpagoda import KVCache, PrefixMatch, Sequence
from kvpagoda.arrays import Tokens
from kvpagoda.errors import SchemaError
from kvpagoda.hf.runner import ModelRunner, Work
from kvpagoda.schema import Schema


def check_draft(schema: Schema, draft: Schema) -> None:
    """Raise SchemaError unless a model with ``schema``, which can rewind a step's proposed tokens as far as its layers
    can, may be decoded with a model with ``draft`` that proposes them."""
    if any(layer.rewinds == 0 for layer in schema.layers):
        raise SchemaError(
            f"the model {schema.name} keeps recurrent states, which cannot go back to before a rejected token; decode "
            f"without a draft",
            needed=schema.name,
        )
    if draft.state_layout.nbytes:
        raise SchemaError(
            f"the draft {draft.name} keeps states, which cannot go back to before a rejected token; choose a draft with "
            f"attention or MLA alone",
            needed=draft.name,
        )


class Drafter:
    """Runs the draft ``model`` of type ``name`` over the draft layers of ``cache``.

    ``chunk``: the most tokens of one text in a pass that computes again what an optional group lacks. Raises SchemaError
    for a model whose longest text is shorter than those of the cache."""

    def __init__(self, model: Any, cache: KVCache, draft: Schema, chunk: int) -> None:
        schema = cache.schema.draft_alone(draft.name)
        self._runner = ModelRunner(model, cache, schema, cache.schema.draft_layers[0].index)
        self._chunk = chunk
        self._begun: dict[Sequence, PrefixMatch] = {}
        if draft.max_positions is not None and draft.max_positions < cache.max_context:
            raise SchemaError(
                f"the draft {draft.name} takes texts of {draft.max_positions:,} tokens and this cache has texts of up to "
                f"{cache.max_context:,}; set limits=Limits(max_context={draft.max_positions}) or choose another draft",
                needed=cache.max_context, available=draft.max_positions,
            )  # fmt: skip

    def begin(self, running: Many[tuple[Sequence, Tokens]]) -> None:
        """Compute the rows that optional groups lack of what the sequences of ``running``, with their texts, started
        from; once for each start."""
        lacking = list[tuple[Sequence, Tokens, int]]()
        for sequence, text in running:
            match = sequence.match
            if self._begun.get(sequence) is not match and match.lacking_from is not None:
                lacking.append((sequence, text, match.lacking_from))
        for sequence, text, first in lacking:
            for begin in range(first, sequence.length, self._chunk):
                end = min(begin + self._chunk, sequence.length)
                self._runner.step([(sequence, text[begin:end])], firsts=[begin])
        self._begun = {sequence: sequence.match for sequence, _ in running}

    def compute(self, work: Many[Work]) -> None:
        """Compute the rows of ``work``, pairs of (sequence, its next tokens)."""
        if work:
            self._runner.step(work)

    def propose(self, texts: Many[tuple[Sequence, Tokens]], most: Many[int]) -> list[Tokens]:
        """Propose ``most[i]`` tokens to follow each of ``texts``, all of whose tokens but the last are committed, each the
        most likely next one. The rows of the last token and of all proposed ones are computed. Returns int32
        ``[most[i]]`` for each.

        The sequences must have room for all these tokens. One pass for each proposed token, and one more."""
        tokens = [text[-1:] for _, text in texts]
        for number in range(max(most, default=-1) + 1):
            live = [i for i, count in enumerate(most) if count >= number]
            work = [(texts[i][0], tokens[i][-1:]) for i in live]
            logits = self._runner.step(work, firsts=[len(texts[i][1]) - 1 + number for i in live])
            for i, best in zip(live, logits.argmax(dim=-1).tolist()):
                if number < most[i]:
                    tokens[i] = np.append(tokens[i], np.int32(best))
        return [each[1:] for each in tokens]
