"""Greedy tokens with the cache in kvpagoda are the tokens of full recomputation without any cache, family by family."""

from __future__ import annotations

import doctest
import functools
import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvpagoda.errors import BadInput, NeverFits  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from models import VOCAB, tiny_model  # noqa: E402
from raises import raises  # noqa: E402

EXACT = [
    "llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3", "kimi_linear", "bamba",
    "deepseek_v4",
]  # fmt: skip
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 33, 41)
"""One token; one more and one less than the tiny ratios (4, 8), windows (8) and blocks (16); well past the window."""
NEW = 7


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


@functools.cache
def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=source).tolist() for n in LENGTHS]


@functools.cache
def recomputed(name: str) -> list[list[int]]:
    """The oracle: every new token from a forward pass over the whole text, no cache."""
    return [greedy(model_of(name), prompt, NEW) for prompt in prompts()]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def told_again(model: Any, prompt: list[int], new: list[int]) -> list[int]:
    """What one forward pass without any cache says at each of the tokens that ``new`` answers: ``new`` itself if, and only if,
    ``greedy`` gives it. For models that look at nothing behind a token, not even at the length of the text.
    """
    logits = model(input_ids=torch.tensor([prompt + new[:-1]]), use_cache=False).logits
    return list(logits[0, len(prompt) - 1 :].argmax(-1).tolist())


@pytest.mark.parametrize("name", EXACT)
def test_tokens_equal_full_recomputation(name: str) -> None:
    """More requests than rows, recycled and poisoned rows, prompts in chunks of 7, ``check()`` after every step."""
    generator = Generator(model_of(name), num_blocks=60, max_requests=4, prefill_chunk=7, poison=True)
    found = generator.generate(prompts(), NEW, on_step=lambda stats: generator.cache.check())
    assert found == recomputed(name)
    stats = generator.stats()
    assert stats.running == 0 and all(group.free + group.evictable == group.total for group in stats.groups)
    assert stats.computed_tokens + stats.cached_tokens == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 9, 64])
@pytest.mark.parametrize("name", ["deepseek_v4", "gemma3_text", "qwen3_next"])
def test_any_chunk_size_gives_the_same_tokens(name: str, chunk: int) -> None:
    generator = Generator(model_of(name), num_blocks=80, max_requests=7, prefill_chunk=chunk, poison=True)
    assert generator.generate(prompts(), NEW) == recomputed(name)


@pytest.mark.parametrize("name", ["llama", "deepseek_v4", "bamba"])
def test_requests_arrive_while_others_run(name: str) -> None:
    generator = Generator(model_of(name), num_blocks=60, max_requests=3, prefill_chunk=16, poison=True)
    requests = []
    for prompt in prompts():
        requests.append(generator.submit(prompt, NEW))
        generator.step()
        generator.cache.check()
    while not all(request.done for request in requests):
        generator.step()
    assert [request.output for request in requests] == recomputed(name)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "bamba", "deepseek_v4"])
def test_all_requests_that_decode_share_one_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    generator = Generator(model, num_blocks=60, max_requests=6, prefill_chunk=64)
    requests = [generator.submit(prompt, NEW) for prompt in prompts()[6:12]]
    while not all(request.output for request in requests):
        generator.step()
    rows: list[int] = []
    body = model.get_input_embeddings()
    monkeypatch.setattr(body, "forward", lambda ids, own=body.forward: rows.append(ids.numel()) or own(ids))
    while running := sum(not request.done for request in requests):
        generator.step()
        assert rows.pop() == running and not rows


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_tokens_equal_the_models_own_generate_and_the_model_is_left_as_it_was(name: str) -> None:
    model = model_of(name)
    before = model.config._attn_implementation
    found = Generator(model, num_blocks=60, max_requests=4).generate(prompts()[4:7], NEW)
    assert model.config._attn_implementation == before
    for prompt, new in zip(prompts()[4:7], found):
        ids = torch.tensor([prompt])
        own = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert own[0, len(prompt) :].tolist() == new


def test_requests_finish_in_any_order() -> None:
    generator = Generator(model_of("llama"), num_blocks=60, max_requests=3)
    lengths = (7, 2, 5, 1)
    requests = [generator.submit(prompts()[9], n) for n in lengths]
    while not all(request.done for request in requests):
        generator.step()
    assert [request.output for request in requests] == [recomputed("llama")[9][:n] for n in lengths]


def test_it_stops_at_the_end_of_text_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("llama"), prompts()[6]
    end = recomputed("llama")[6][2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end])
    expected = recomputed("llama")[6]
    assert Generator(model, num_blocks=60).generate([prompt], NEW) == [expected[: expected.index(end) + 1]]


def test_an_answer_ends_where_the_models_own_generate_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``generation_config`` alone says where: without an end there, the one of the config does not count."""
    model, prompt, expected = model_of("llama"), prompts()[6], recomputed("llama")[6]
    monkeypatch.setattr(model.config, "eos_token_id", expected[2])
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert Generator(model, num_blocks=60).generate([prompt], NEW) == [expected]


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 6},
        {"suppress_tokens": [*range(64)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("lookup", [0, 3])
def test_what_the_generation_config_changes_is_changed(
    setting: dict[str, Any], lookup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    for name, value in ({"eos_token_id": recomputed("llama")[6][2], "pad_token_id": 0} | setting).items():
        monkeypatch.setattr(model.generation_config, name, value)
    expected = []
    for prompt in prompts()[4:8]:
        own = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        expected.append(own[0, len(prompt) :].tolist())
    assert expected != [recomputed("llama")[i][:NEW] for i in range(4, 8)]
    assert Generator(model, num_blocks=60, lookup=lookup).generate(prompts()[4:8], NEW) == expected


def test_guidance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(model.generation_config, "guidance_scale", 1.5)
    with raises(BadInput, needed=1.5):
        Generator(model, num_blocks=60).submit([1, 2])


def test_a_text_may_fill_the_longest_context_but_for_its_last_token() -> None:
    generator = Generator(model_of("llama"), num_blocks=4)
    prompt = (prompts()[6] * 64)[:62]
    assert len(generator.generate([prompt], 3)[0]) == 3
    with pytest.raises(NeverFits):
        generator.submit(prompt, 4)


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v4"])
def test_the_budget_is_kept(name: str) -> None:
    generator = Generator(model_of(name), "400KiB", max_requests=2)
    generator.generate(prompts()[:6], 2)
    assert generator.stats().nbytes == generator.cache.plan.nbytes <= 400 * 1024


def test_bad_input_is_one_clear_error() -> None:
    generator = Generator(model_of("llama"), num_blocks=4, max_requests=2)
    with raises(BadInput, needed=128, available=127):
        generator.submit([1, 128])
    with raises(BadInput, needed=1, available=0):
        generator.submit([])
    for bad in (0, 1.5, None):
        with raises(BadInput, field="max_new_tokens", needed=bad, available=1):
            generator.submit([1], bad)
    with raises(NeverFits, needed=69, available=64):
        generator.submit([1] * 60, 10)
    with raises(NeverFits, needed=24576, available=3072):
        Generator(model_of("llama"), "3KiB")
    with raises(BadInput, needed="NoneType"):
        generator.generate(None)
    with raises(BadInput, needed="NoneType"):
        Generator(None)
    with raises(BadInput, needed=(0, 0)):
        Generator(model_of("llama"), prefill_chunk=0)
    for device in ("none", "cuda:0"):
        with raises(BadInput, needed=device, available="cpu"):
            Generator(model_of("llama"), device=device)
    assert Generator(model_of("llama"), "1MiB", device="cpu").generate([[1, 2]], 2) == generator.generate([[1, 2]], 2)


def test_an_error_in_a_step_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(model_of("llama"), num_blocks=30, max_requests=2)

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(generator._runner, "step", fail)
        generator.generate(prompts()[:3], 2)
    generator.cache.check()
    assert generator.stats().running == 0
    assert generator.generate(prompts()[:3], NEW) == recomputed("llama")[:3]


def test_the_examples_run() -> None:
    tried = doctest.testmod(importlib.import_module("kvpagoda.hf.generator"))
    assert tried.attempted and not tried.failed
