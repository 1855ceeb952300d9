"""A request that is decoded with a draft goes on elsewhere: equal tokens, and equal proposals where its rows went along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_draft_model import prompts  # noqa: E402
from test_generator import greedy, model_of  # noqa: E402

from kvpagoda import RetryLater  # noqa: E402
from kvpagoda.handover import SharedMemory  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.model_cache import commit_step  # noqa: E402
from models import tiny_model  # noqa: E402

NEW, WIDTH = 14, 3
MODELS = {"llama": "window", "mistral": "full", "gemma3_text": "window", "qwen3_next": "window"}
"""A model, and the growth law of a draft that has a group of its own."""


class Side:
    """A model with a draft: the model of this type itself, over other rows where that is possible."""

    def __init__(self, name: str, block_size: int = 16, draft: bool = True) -> None:
        small = tiny_model("mistral", seed=0, sliding_window=6 if MODELS[name] == "window" else None)
        given: dict[str, Any] = dict(draft=small, lookup=WIDTH) if draft else {}
        self.generator = Generator(
            model_of(name), num_blocks=60, max_requests=4, prefill_chunk=7, block_size=block_size, poison=True, **given
        )
        self.cache, self.runner, self.drafter = (
            self.generator.cache, self.generator._runner, self.generator._drafter,
        )  # fmt: skip
        self.proposals: list[list[int]] = []

    def chunk(self, sequence: Any, text: Any, end: int) -> None:
        """Compute tokens of ``text`` up to ``end`` by the model and the draft, and commit them."""
        new = text[sequence.length : min(end, sequence.length + (self.cache.step_limit(sequence) or 7))]
        sequence.extend(len(new))
        if self.drafter is not None:
            self.drafter.begin([(sequence, text)])
            self.drafter.compute([(sequence, new)])
        self.runner.step([(sequence, new)])
        commit_step(sequence, new)

    def prefill(self, sequence: Any, text: Any, end: int, step: int = 7) -> None:
        while sequence.length < end:
            self.chunk(sequence, text, min(end, sequence.length + step))

    def decode(self, sequence: Any, text: Any) -> list[int]:
        """Compute what is left of ``text``, and ``NEW`` tokens more, of which the draft proposes some."""
        self.prefill(sequence, text, len(text) - 1)
        assert self.drafter is not None
        begin = len(text)
        while len(text) < begin + NEW:
            most = min(WIDTH, begin + NEW - 1 - len(text))
            sequence.extend(1 + most)
            self.drafter.begin([(sequence, text)])
            (proposed,) = self.drafter.propose([(sequence, text)], [most])
            logits = self.runner.step([(sequence, np.concatenate((text[-1:], proposed)))], [1 + most])
            best = logits.argmax(dim=-1).numpy().astype(np.int32)
            right = int((np.append(proposed, -1) == best).argmin())
            commit_step(sequence, np.concatenate((text[-1:], proposed))[: 1 + right])
            text = np.concatenate((text, best[: 1 + right]))
            self.proposals.append(proposed.tolist())
        return [int(token) for token in text[begin : begin + NEW]]


@pytest.mark.parametrize("how", ["whole", "chunks", "layers"])
@pytest.mark.parametrize("name", MODELS)
def test_decoding_goes_on_elsewhere_as_it_would_have_here(name: str, how: str) -> None:
    one, two, alone = Side(name), Side(name, 8), Side(name)
    assert any(group.growth.is_optional for group in one.cache.core.groups)
    transfer, landing = SharedMemory("8MiB"), SharedMemory()
    sender = one.cache.sender(transfer)
    for prompt in prompts()[4:]:
        text, end = np.array(prompt, np.int32), len(prompt) - 1
        wanted = alone.decode(alone.cache.open(text, capacity=0), text)
        assert wanted == greedy(model_of(name), prompt, NEW)
        sequence = one.cache.open(text, capacity=0)
        after = 0
        if how == "layers":
            ticket = sequence.hand_over(60.0, upto=end)
            sender.layer_done(ticket)  # what it began with
            while sequence.length < end:
                one.chunk(sequence, text, min(end, sequence.length + 7))
                for layer in range(len(one.cache.schema.layers)):
                    sender.layer_done(ticket, layer)
                with pytest.raises(RetryLater):
                    two.cache.receive(ticket, landing)
            sender.complete(ticket)
        else:
            if how == "chunks":
                one.prefill(sequence, text, end // 2)
                after = sequence.length
                two.cache.receive(sequence.hand_over(60.0, goes_on=True), landing).close()
            one.prefill(sequence, text, end)
            ticket = sequence.hand_over(60.0, after=after)
        received = two.cache.receive(ticket, landing, reserve=len(text) + NEW)
        assert (received.length, received.match.lacking_from) == (end, None)
        assert two.decode(received, text) == wanted
        received.close()
        sender.expire()
        assert two.generator.generate([prompt], NEW) == [wanted]  # what arrived is cached
        two.cache.check()
        one.cache.check()
    assert two.proposals == alone.proposals and len({*map(tuple, two.proposals)}) > 5
    assert sender.num_leases == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_sender_without_the_draft_gives_equal_tokens(name: str) -> None:
    """What the draft lacks is computed again at the receiver."""
    one, two = Side(name, draft=False), Side(name)
    transfer, landing = SharedMemory("8MiB"), SharedMemory()
    one.cache.sender(transfer)
    for prompt in prompts()[4:]:
        text = np.array(prompt, np.int32)
        sequence = one.cache.open(text, capacity=0)
        one.prefill(sequence, text, len(text) - 1)
        received = two.cache.receive(sequence.hand_over(60.0), landing, reserve=len(text) + NEW)
        assert received.length == len(text) - 1 and received.match.lacking_from is not None
        assert two.decode(received, text) == greedy(model_of(name), prompt, NEW)
        received.close()
        two.cache.check()
