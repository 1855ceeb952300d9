"""Models with an encoder in the generator: tokens and logits of transformers' own cache, and an input that is encoded once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import GenerationMixin  # noqa: E402

from encoder_decoders import ENCODERS, greedy, inputs_of, model_of, run  # noqa: E402
from kvpagoda.errors import BadInput, NeverFits, SchemaError  # noqa: E402
from kvpagoda.hf import Generator, PagedCache, Request, Sampling  # noqa: E402
from kvpagoda.scheduling import LeastComputed, PreemptionMode, Youngest  # noqa: E402
from kvpagoda.tiers import host_tier  # noqa: E402
from models import break_every, tiny_model  # noqa: E402
from raises import raises  # noqa: E402

NEW = 12
LENGTHS = (5, 20, 16, 33, 1, 7)
SHORT = (5, 7, 8, 3, 1, 2)
PROMPTS = [[1], [1, 7, 9], [1], [1, 5], [1, 4, 9, 11, 3, 8, 6, 2], [1]]
SOME = ("whisper", "t5", "bart")
DRAWN = Sampling(0.8, seed=3)
model = functools.cache(model_of)


@functools.cache
def wanted(name: str, n: int, lengths: tuple[int, ...]) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits of each request, alone, with transformers' own cache."""
    inputs = inputs_of(model(name), lengths)
    return [greedy(model(name), given, prompt, n) for given, prompt in zip(inputs, PROMPTS)]


def tokens_of(name: str, n: int = NEW, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [tokens for tokens, _ in wanted(name, n, lengths)]


def small(name: str, num_blocks: int = 80, **arguments: Any) -> Generator:
    usual: dict[str, Any] = dict(max_requests=4, block_size=8, prefill_chunk=3, poison=True, sanitize=True)
    return Generator(model(name), num_blocks=num_blocks, **{**usual, **arguments})


@contextmanager
def encoder_runs(name: str) -> Iterator[list[int]]:
    """How often the encoder runs inside this context: the length of the list."""
    runs: list[int] = []
    hook = model(name).get_encoder().register_forward_hook(lambda *_: runs.append(1))
    try:
        yield runs
    finally:
        hook.remove()


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_tokens_and_logits_are_those_of_transformers_own_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, logits = small(name), dict[Request, list[torch.Tensor]]()
    take = generator._take

    def noted(piece: Any, scores: torch.Tensor, best: list[int]) -> None:
        before = len(piece.answer.text)
        take(piece, scores, best)
        if len(piece.answer.text) > before:
            logits.setdefault(piece.answer.request, []).append(scores[-1])

    monkeypatch.setattr(generator, "_take", noted)
    inputs = inputs_of(model(name), LENGTHS)
    requests = [generator.submit(prompt, NEW, encoder_input=given) for prompt, given in zip(PROMPTS, inputs)]
    with encoder_runs(name) as runs:
        while not all(request.done for request in requests):
            generator.step()
            generator.cache.check()
    assert len(runs) == len(requests)
    for request, (tokens, scores) in zip(requests, wanted(name, NEW, LENGTHS)):
        assert request.output == tokens
        torch.testing.assert_close(torch.stack(logits[request]), scores, rtol=1e-4, atol=1e-4)
    with encoder_runs(name) as runs:  # again: everything but the new tokens is found
        computed = generator.stats().computed_tokens
        assert generator.generate(PROMPTS, NEW, encoder_inputs=inputs) == tokens_of(name)
        assert generator.stats().computed_tokens - computed == len(PROMPTS) * NEW and runs == []
    assert generator.num_preempted == 0


@pytest.mark.parametrize("name", SOME)
def test_tokens_are_those_of_generate_with_its_changes_of_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model_of(name, num_layers=3) if name == "t5" else model(name)  # its generate counts the layers of the encoder
    changes = dict(repetition_penalty=1.7, no_repeat_ngram_size=2, forced_bos_token_id=9)
    if own.main_input_name == "input_ids":  # these read the input of the encoder
        changes |= dict(encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2)
    for field, value in changes.items():
        monkeypatch.setattr(own.generation_config, field, value)
    inputs = inputs_of(own, LENGTHS)
    found = Generator(own, num_blocks=80, max_requests=4, block_size=8).generate(PROMPTS, NEW, encoder_inputs=inputs)
    for given, prompt, tokens in zip(inputs, PROMPTS, found):
        whole = GenerationMixin.generate(
            own, torch.as_tensor(given)[None], decoder_input_ids=torch.tensor([prompt]), max_new_tokens=NEW,
            do_sample=False,
        )  # fmt: skip
        assert whole[0, len(prompt) :].tolist() == tokens
    assert found[0][0] == 9 and all(len({*pairs}) == NEW - 1 for tokens in found if (pairs := [*pairwise(tokens)]))


@pytest.mark.parametrize("name", SOME)
def test_another_input_is_another_text_and_a_part_of_one_is_found(name: str) -> None:
    generator = small(name)
    first, second = inputs_of(model(name), (20, 20))
    for given in (first, second, first):
        assert generator.generate([[1]], NEW, encoder_inputs=[given]) == [greedy(model(name), given, [1], NEW)[0]]
    again = [1, *greedy(model(name), first, [1], NEW)[0]][:5]
    assert generator.generate([again], 4, encoder_inputs=[first]) == [greedy(model(name), first, again, 4)[0]]
    whole = 16 if name == "whisper" else 24  # 10 and 20 positions, in blocks
    assert generator.stats().cached_tokens == whole + 0 + whole + 4
    request = generator.submit([1, 3], 2, encoder_input=first)
    generator.step()
    assert request.answers[0].sequence is not None
    assert request.answers[0].sequence.cached_tokens == whole + 1  # the start token


@pytest.mark.parametrize(
    ("name", "mode"),
    [*(("t5", mode) for mode in PreemptionMode), ("whisper", PreemptionMode.PART), ("bart", PreemptionMode.RECOMPUTE)],
)
def test_tokens_stay_the_same_while_requests_are_preempted(name: str, mode: PreemptionMode) -> None:
    generator = small(name, 11, max_requests=6, preemption=Youngest(), preemption_mode=lambda costs: mode)
    n = 40
    found = generator.generate(
        PROMPTS, n, lambda stats: generator.cache.check(), encoder_inputs=inputs_of(model(name), SHORT)
    )
    assert found == tokens_of(name, n, SHORT)
    assert generator.num_preempted >= 3
    assert (generator.num_swapped > 0) == (mode is not PreemptionMode.RECOMPUTE)


@pytest.mark.parametrize("name", SOME)
def test_answers_share_what_was_encoded(name: str) -> None:
    inputs = inputs_of(model(name), SHORT[:3])
    generator = small(name, max_requests=12)
    requests = [
        generator.submit(prompt, 24, n=3, sampling=DRAWN, encoder_input=given) for prompt, given in zip(PROMPTS, inputs)
    ]
    with encoder_runs(name) as runs:
        shared = 0
        while not all(request.done for request in requests):
            generator.step()
            generator.cache.check()
            for request in requests:
                slots = [answer.sequence.slot for answer in request.answers if answer.sequence is not None]
                tables = [generator.cache.core.groups[0].held_places(slot).tolist() for slot in slots]
                shared += len(tables) == 3 and tables[0][: request.begin // 8] == tables[1][: request.begin // 8]
    assert len(runs) == 3 and shared > 3
    tight = small(name, 11, max_requests=9, preemption=LeastComputed(), lookup=3)
    found = tight.generate(PROMPTS[:3], 24, n=3, sampling=DRAWN, encoder_inputs=inputs)
    assert found == [output for request in requests for output in request.outputs]
    assert tight.num_preempted > 0
    assert len({tuple(output) for output in requests[1].outputs}) > 1


@pytest.mark.parametrize("name", SOME)
def test_proposed_tokens_are_verified(name: str) -> None:
    generator = small(name, lookup=3)
    found = generator.generate(PROMPTS, 24, encoder_inputs=inputs_of(model(name), LENGTHS))
    assert found == tokens_of(name, 24)
    assert generator.num_accepted > 0


@pytest.mark.parametrize("name", SOME)
def test_aborted_requests_leave_nothing_and_others_go_on(name: str) -> None:
    generator, inputs = small(name), inputs_of(model(name), LENGTHS)
    requests = [generator.submit(prompt, NEW, encoder_input=given) for prompt, given in zip(PROMPTS, inputs)]
    for number in (3, 0):  # one that only has rows of its input, one that has tokens
        for _ in range(1 + 3 * (number == 0)):
            generator.step()
        generator.abort(requests[number])
        generator.cache.check()
    while not all(request.done for request in requests):
        generator.step()
    assert [request.output for request in requests][1:3] == tokens_of(name)[1:3]
    assert [request.output for request in requests][4:] == tokens_of(name)[4:]
    stats = generator.stats()
    assert stats.running == 0 and all(one.free + one.evictable == one.total for one in stats.groups)


@pytest.mark.parametrize("name", ["t5"])
def test_after_an_error_in_the_model_the_next_step_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = small(name)
    break_every(monkeypatch, model(name).decoder.block[1], 5)
    inputs = inputs_of(model(name), LENGTHS)
    requests = [generator.submit(prompt, 6, encoder_input=given) for prompt, given in zip(PROMPTS, inputs)]
    failed = 0
    while not all(request.done for request in requests):
        try:
            generator.step()
        except MemoryError:
            failed += 1
        generator.cache.check()
    monkeypatch.undo()
    assert failed > 2
    assert [request.output for request in requests] == [tokens[:6] for tokens in tokens_of(name)]


@pytest.mark.parametrize("name", SOME)
def test_inputs_that_were_evicted_are_found_in_a_tier(name: str) -> None:
    tokens_of(name)  # before encoder_runs counts
    generator = small(name, tiers=[host_tier("4MiB", staging="2MiB", write="commit")])
    inputs = inputs_of(model(name), LENGTHS)
    assert generator.generate(PROMPTS, NEW, encoder_inputs=inputs) == tokens_of(name)
    generator.cache.flush()
    generator.cache.reset()
    with encoder_runs(name) as runs:
        assert generator.generate(PROMPTS, NEW, encoder_inputs=inputs) == tokens_of(name)
    assert generator.stats().loaded_tokens > 0
    assert runs == []
    generator.cache.close()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_input_of_which_a_part_was_evicted_is_encoded_for_the_rest(name: str) -> None:
    generator, inputs = small(name, 9), inputs_of(model(name), (33, 20))
    for given in inputs:  # 40 and 24 tokens, and 12 of the decoder: 7 and 5 blocks of 9
        generator.generate([[1]], NEW, encoder_inputs=[given])
    request = generator.submit([1], NEW, encoder_input=inputs[0])
    with encoder_runs(name) as runs:
        generator.step()
        sequence = request.answers[0].sequence
        assert sequence is not None and len(runs) == 1 and 0 < sequence.cached_tokens < request.begin
    places = torch.from_numpy(generator.cache.core.groups[0].held_places(sequence.slot)).long()
    for index, layer in enumerate(run(model(name), inputs[0], [1]).past_key_values.cross_attention_cache.layers):
        for rows, real in (("k", layer.keys), ("v", layer.values)):
            found = generator.cache.layer(index)[rows][places].flatten(0, 1)[:33]
            torch.testing.assert_close(found, real[0].transpose(0, 1))
    while not request.done:
        generator.step()
    assert request.output == greedy(model(name), inputs[0], [1], NEW)[0]


@pytest.mark.parametrize("kv_format", ["fp8", "fp8_per_token_head"])
def test_rows_of_an_input_have_the_format_of_the_others(kv_format: str) -> None:
    """K and V apart, with a scale for each layer; and packed into one row."""
    own, lengths = model_of("t5", d_kv=16), SHORT[:3]
    generator = Generator(own, num_blocks=20, max_requests=4, block_size=8, kv_format=kv_format)
    found = [generator.generate(PROMPTS[:3], 6, encoder_inputs=inputs_of(own, lengths)) for _ in range(2)]
    assert found[0] == found[1] == [greedy(own, x, p, 6)[0] for x, p in zip(inputs_of(own, lengths), PROMPTS)]
    assert generator.cache.schema.bytes_per_token < 3 * 2 * 4 * 16 * 4 / 3


def test_weights_that_change_are_noticed() -> None:
    own, (given,) = model_of("t5"), inputs_of(model("t5"), (20,))
    generator = Generator(own, num_blocks=40, max_requests=2)
    generator.generate([[1]], NEW, encoder_inputs=[given])
    with torch.no_grad():
        own.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(-2)
    assert generator.generate([[1]], NEW, encoder_inputs=[given]) == [greedy(own, given, [1], NEW)[0]]
    assert generator.stats().cached_tokens == 0


def test_what_does_not_suit_is_refused() -> None:
    t5, whisper, bart, llama = small("t5"), small("whisper"), small("bart"), Generator(tiny_model("llama"), "1MiB")
    with raises(BadInput, needed="encoder_input", available="NoneType"):
        t5.submit([1])
    with raises(BadInput, needed="encoder_input", available="list"):
        llama.submit([1], encoder_input=[1])
    with raises(BadInput, needed=[8, 20], available=[8, 19]):
        whisper.submit([1], encoder_input=torch.zeros(8, 19))
    with raises(NeverFits, needed=0, available=0):
        t5.submit([1], encoder_input=[])
    with raises(NeverFits, needed=65, available=64):
        bart.submit([1], encoder_input=[5] * 65)
    with raises(NeverFits, needed=65, available=64):
        bart.submit([1] * 4, 62, encoder_input=[5] * 64)
    with pytest.raises(BadInput):
        t5.submit([1], encoder_input=[500])
    with raises(BadInput, needed=2, available=1):
        t5.generate([[1], [1]], encoder_inputs=[[5]])
    with raises(NeverFits, needed=768, available=640):
        t5.submit([1], encoder_input=[5] * 700)
    with raises(BadInput, needed="T5ForConditionalGeneration"):
        PagedCache(model("t5"), "1MiB")
    with raises(SchemaError, needed="llama", available="t5"):
        Generator(model("t5"), "1MiB", draft=tiny_model("llama"))
    assert not any(one.queue.waiting for one in (t5, whisper, bart, llama))
    assert bart.generate([[1] * 4], 61, encoder_inputs=[[5] * 64]) != [[]]
