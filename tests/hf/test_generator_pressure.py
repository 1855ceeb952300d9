"""Requests that are preempted, aborted or hit by errors: the tokens stay the same, and nothing is left behind."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvpagoda import Retention

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import EXACT, model_of  # noqa: E402

from kvpagoda.errors import BadInput, OutOfBlocks  # noqa: E402
from kvpagoda.hf import Generator, Request, Sampling  # noqa: E402
from kvpagoda.scheduling import LeastComputed, PreemptionMode, Youngest  # noqa: E402
from models import VOCAB, break_every  # noqa: E402
from raises import raises  # noqa: E402

NEW = 20
DRAWN = Sampling(0.8, seed=3)


@functools.cache
def prompts() -> list[list[int]]:
    """Around the tiny windows and blocks (8); the third and fourth begin alike."""
    source = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, VOCAB, (n,), generator=source).tolist() for n in (3, 9, 17, 1, 16, 7, 21)]
    return [*texts[:3], texts[2][:12] + texts[3], *texts[4:]]


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], new: list[int]) -> None:
    """Each new token is what a forward pass without any cache says after the text before it."""
    logits = model(input_ids=torch.tensor([prompt + new[:-1]]), use_cache=False).logits
    assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == new


def small(name: str, num_blocks: int = 6, **arguments: Any) -> Generator:
    """A pool that just holds the longest of the requests."""
    return Generator(
        model_of(name), num_blocks=num_blocks, max_requests=4, block_size=8, prefill_chunk=5,
        retention=Retention(checkpoints=2), poison=True, **arguments,
    )  # fmt: skip


def run(generator: Generator, *requests: Request) -> None:
    while not all(request.done for request in requests):
        generator.step()
        generator.cache.check()


def assert_empty(generator: Generator) -> None:
    generator.cache.check()
    stats = generator.stats()
    assert stats.running == 0 and all(g.free + g.evictable == g.total and not g.outstanding for g in stats.groups)


@pytest.mark.parametrize("name", sorted({*EXACT} - {"mistral"}))  # whose windows are promised whole, and never grow
def test_tokens_equal_full_recomputation_while_requests_are_preempted(name: str) -> None:
    generator = small(name, preemption=Youngest())
    found = generator.generate(prompts(), NEW, lambda stats: generator.cache.check())
    for prompt, new in zip(prompts(), found):
        assert len(new) == NEW
        assert_greedy(model_of(name), prompt, new)
    assert generator.num_preempted >= 3
    assert_empty(generator)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v4"])
def test_forks_proposals_and_preemptions_together(name: str) -> None:
    """Drawn answers under pressure are those of a pool with room for all."""
    generator = small(name, preemption=LeastComputed(), lookup=3)
    found = generator.generate(prompts()[:4], NEW, lambda stats: generator.cache.check(), n=3, sampling=DRAWN)
    wide = Generator(model_of(name), num_blocks=200, max_requests=12)
    assert found == wide.generate(prompts()[:4], NEW, n=3, sampling=DRAWN)
    assert generator.num_preempted >= 3 and wide.num_preempted == 0
    assert_empty(generator)


def test_what_was_preempted_starts_from_what_is_still_cached() -> None:
    generator = small("llama", preemption=Youngest(), preemption_mode=lambda costs: PreemptionMode.RECOMPUTE)
    generator.generate(prompts(), NEW)
    stats = generator.stats()
    needed = sum(map(len, prompts())) + len(prompts()) * (NEW - 1)
    assert 0 < stats.computed_tokens - needed < 8 * generator.num_preempted + stats.cached_tokens


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "running", "forked", "preempted", "done"])
def test_a_request_can_be_aborted_in_every_state(state: str) -> None:
    generator = small("qwen3_next", 12 if state == "forked" else 7, preemption=Youngest())
    first = generator.submit(prompts()[2], NEW)
    second = generator.submit(prompts()[1], NEW, n=3 if state == "forked" else 1, sampling=DRAWN)
    reached = {
        "waiting": lambda: True,
        "in its prompt": lambda: second.answers[0].sequence is not None and not second.output,
        "running": lambda: second.answers[0].sequence is not None and len(second.output) == 2,
        "forked": lambda: sum(answer.sequence is not None for answer in second.answers) == 2,
        "preempted": lambda: second.answers[0].num_preempted == 1,
        "done": lambda: second.done,
    }[state]
    while not reached():
        generator.step()
        assert not first.done or state == "done"
    before = second.outputs
    for _ in range(2):
        generator.abort(second)
        generator.cache.check()
    assert second.done and second.aborted == (state != "done") and second.outputs == before
    run(generator, first)
    assert_greedy(model_of("qwen3_next"), prompts()[2], first.output)
    assert_empty(generator)


def test_abort_drops_all() -> None:
    generator = small("llama")
    requests = [generator.submit(prompt, NEW, n=2) for prompt in prompts()]
    generator.step()
    generator.abort()
    assert all(request.aborted for request in requests) and generator.step() == []
    assert_empty(generator)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v4"])
def test_after_an_error_in_the_model_the_next_step_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass breaks off half-way, in every ninth step: rows and states are half written then."""
    generator, model = small(name), model_of(name)
    requests = [generator.submit(prompt, 9) for prompt in prompts()]
    break_every(monkeypatch, list(model.model.layers)[2].mlp, 9)
    errors = 0
    while not all(request.done for request in requests):
        try:
            generator.step()
        except MemoryError:
            errors += 1
            assert_empty(generator)
    monkeypatch.undo()
    assert errors > 5
    for request in requests:
        assert_greedy(model, request.prompt.tolist(), request.output)


def test_an_error_in_generate_leaves_other_requests_alone() -> None:
    generator = small("llama")
    other = generator.submit(prompts()[0], NEW)
    with raises(BadInput, needed=128, available=127):
        generator.generate([prompts()[1], [VOCAB]], NEW)
    run(generator, other)
    assert_greedy(model_of("llama"), prompts()[0], other.output)
    assert generator.stats().opened == 1


def test_somebody_else_in_the_cache_is_an_error_and_no_livelock() -> None:
    generator = small("llama", preemption=Youngest())
    request = generator.submit(prompts()[6], NEW)
    generator.step()
    with generator.cache.open(range(16)), raises(OutOfBlocks, needed=1, available=0, group="full"):
        run(generator, request)
    run(generator, request)
    assert_greedy(model_of("llama"), prompts()[6], request.output)
