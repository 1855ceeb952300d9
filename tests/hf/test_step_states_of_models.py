"""State modules leave checkpoints inside of a pass: fewer passes for a prompt, the same tokens, and hits at each position."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.hf.test_generator import greedy  # noqa: E402

from kvpagoda import Limits, Retention  # noqa: E402
from kvpagoda.errors import BadInput  # noqa: E402
from kvpagoda.hf import Generator, PagedCache  # noqa: E402
from models import VOCAB, tiny_model  # noqa: E402
from more_models import MORE  # noqa: E402
from raises import raises  # noqa: E402

MODELS = [
    "qwen3_next",
    "bamba",
    "kimi_linear",
    "falcon_h1",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "minimax",
    "jamba",
    "mamba",
]
PIECES = ("qwen3_next", "bamba", "kimi_linear", "falcon_h1", "lfm2", "mamba2", "nemotron_h", "minimax")
"""Those whose state modules run in pieces of several tokens; transformers' Mamba-1 scan cannot begin in a text."""
NEW = 4


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generator_of(name: str, named: int | None, **arguments: Any) -> tuple[Generator, list[int]]:
    """Return a generator, and the list to which each pass of its model appends its number of tokens."""
    limits = Limits(step_checkpoints=named)
    generator = Generator(
        model_of(name),
        num_blocks=60,
        max_requests=4,
        limits=limits,
        retention=Retention(20, 1),
        poison=True,
        **arguments,
    )
    passes: list[int] = []
    own = generator._runner.cache.batch

    def counted(sequences: Any, new_tokens: Any, *more: Any, **named: Any) -> Any:
        passes.append(max(new_tokens))
        return own(sequences, new_tokens, *more, **named)

    generator._runner.cache.batch = counted  # type: ignore[method-assign]
    return generator, passes


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_takes_one_pass_and_can_be_resumed_at_every_block(name: str) -> None:
    prompt = prompt_of(0)
    before, many = generator_of(name, 0)
    now, few = generator_of(name, None)
    expected = [greedy(model_of(name), prompt, NEW)]
    assert before.generate([prompt], NEW) == now.generate([prompt], NEW) == expected
    prompts = [n for n in many if n > 1], [n for n in few if n > 1]
    if name not in PIECES:
        assert many == few and now.cache.core.settings.limits.step_checkpoints is None
        return
    assert prompts == ([16] * 6 + [4], [100])
    now.cache.check()
    assert now.stats().passed_boundaries == 0 and now.stats().checkpoints >= 6
    for end in (16, 40, 64, 99):
        few.clear()
        text = [*prompt[:end], *prompt_of(end, 9)]
        assert now.cache.lookup(text).resumable == end // 16 * 16
        assert now.generate([text], NEW) == [greedy(model_of(name), text, NEW)], end
        assert sum(few) <= len(text) - end // 16 * 16 + NEW
    now.cache.check()


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_chunks_and_several_prompts_and_pressure(name: str) -> None:
    prompts = [prompt_of(seed, 30 + 11 * seed) for seed in range(6)] + [prompt_of(0, 30) + prompt_of(9, 40)]
    expected = [greedy(model_of(name), prompt, NEW) for prompt in prompts]
    limits = Limits(step_checkpoints=3)
    for arguments in (dict(num_blocks=60, max_requests=3), dict(budget="500KiB", max_requests=3)):
        generator = Generator(
            model_of(name),
            prefill_chunk=37,
            limits=limits,
            retention=Retention(40, 1),
            poison=True,
            **arguments,
        )
        for _ in range(2):
            assert generator.generate(prompts, NEW, lambda stats, one=generator: one.cache.check()) == expected
        assert generator.stats().cached_tokens > 0 or "budget" in arguments


def test_a_failed_pass_gives_the_blocks_back() -> None:
    generator, _ = generator_of("qwen3_next", None)
    model, prompt = generator._model, prompt_of(3)
    request = generator.submit(prompt, NEW)
    head, model.lm_head.forward = model.lm_head.forward, lambda *_: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            generator.step()
    finally:
        model.lm_head.forward = head
    assert not generator.cache.core.states.named
    generator.cache.check()
    while not request.done:
        generator.step()
    assert request.output == greedy(model, prompt, NEW)


def test_paged_cache_resumes_where_a_step_left_states() -> None:
    model = tiny_model("qwen3_next")
    prompt = prompt_of(4)
    own = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    cache = PagedCache(model, "4MiB", retention=Retention(checkpoint_every=1))
    found = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, cache=cache)
    assert found.tolist() == own.tolist()
    cache.reset()
    assert cache.cache.lookup(prompt[:50]).resumable == 48 and cache.stats().passed_boundaries == 0
    cache.cache.check()


@pytest.mark.parametrize("make", [Generator, PagedCache])
@pytest.mark.parametrize(
    "name", ["deepseek_v4", "inkling_text", "qwen4_exp_text", "jamba", "recurrent_gemma", "rwkv", "xlstm"]
)
def test_positions_inside_a_step_are_refused_where_no_module_leaves_states(name: str, make: Any) -> None:
    model = tiny_model(name, **MORE.get(name, {}))
    with raises(BadInput, needed=4, available=0):
        make(model, num_blocks=30, limits=Limits(step_checkpoints=4))
    make(model, num_blocks=30, limits=Limits(step_checkpoints=0))


@pytest.mark.parametrize("name", ["gemma3_text", "llama"])
def test_models_without_states_take_the_option(name: str) -> None:
    prompt = prompt_of(0, 30)
    generator = Generator(tiny_model(name), num_blocks=30, limits=Limits(step_checkpoints=4))
    assert generator.generate([prompt, [*prompt, 9]], NEW) == [
        greedy(tiny_model(name), text, NEW) for text in (prompt, [*prompt, 9])
    ]


def test_a_draft_leaves_no_states_inside_a_step() -> None:
    with raises(BadInput, needed=4, available=0):
        Generator(
            tiny_model("gemma3_text"), num_blocks=30, draft=tiny_model("llama"), limits=Limits(step_checkpoints=4)
        )
