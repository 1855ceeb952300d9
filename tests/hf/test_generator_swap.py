"""Requests that are preempted by suspending them: the tokens are those of any other way, and less is computed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import EXACT, model_of  # noqa: E402
from test_generator_pressure import DRAWN, NEW, assert_empty, assert_greedy, prompts, run, small  # noqa: E402

from kvpagoda import Limits  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.scheduling import Costs, LeastComputed, PreemptionMode, Youngest  # noqa: E402


@pytest.mark.parametrize("way", [PreemptionMode.PART, PreemptionMode.SWAP])
@pytest.mark.parametrize("name", sorted({*EXACT} - {"mistral", "kimi_linear", "bamba"}))
def test_tokens_equal_full_recomputation(name: str, way: PreemptionMode) -> None:
    generator = small(name, preemption=Youngest(), preemption_mode=lambda costs: way)
    found = generator.generate(prompts()[:5], NEW, lambda stats: generator.cache.check())
    for prompt, new in zip(prompts(), found):
        assert_greedy(model_of(name), prompt, new)
    assert generator.num_swapped == generator.num_preempted > 0
    told = generator.queue.stats()
    assert (told.preempted, told.swapped, told.waiting) == (generator.num_preempted, generator.num_swapped, 0)
    assert_empty(generator)
    stats = generator.stats()
    assert stats.suspended == stats.swap_nbytes == 0
    if way is PreemptionMode.SWAP:  # nothing is computed twice
        assert stats.computed_tokens + stats.cached_tokens == sum(map(len, prompts()[:5])) + 5 * (NEW - 1)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "deepseek_v4"])
def test_all_ways_in_turn_with_forks_proposals_and_too_little_swap(name: str) -> None:
    ways, told = itertools.cycle(PreemptionMode), list[Costs]()

    def choose(costs: Costs) -> PreemptionMode:
        told.append(costs)
        return next(ways)

    arguments: dict[str, Any] = dict(preemption=LeastComputed(), lookup=3, preemption_mode=choose)
    limits = Limits(swap=small(name).cache.plan.nbytes // 4)
    generator = small(name, **arguments, limits=limits)
    found = generator.generate(prompts()[:4], NEW, lambda stats: generator.cache.check(), n=3, sampling=DRAWN)
    wide = Generator(model_of(name), num_blocks=200, max_requests=12)
    assert found == wide.generate(prompts()[:4], NEW, n=3, sampling=DRAWN)
    assert 0 < generator.num_swapped < generator.num_preempted == len(told)
    assert all(costs.recompute >= 0 and costs.part > 0 and costs.swap >= 0 for costs in told)
    assert_empty(generator)


def test_it_chooses_by_what_was_measured() -> None:
    for seconds, swapped in ((1e-12, False), (1e3, True)):
        generator = small("llama", preemption=Youngest())
        generator._queue.rate.add = lambda *measured, queue=generator._queue: None  # type: ignore[method-assign, misc]
        generator._queue.rate._seconds = seconds
        generator.generate(prompts(), NEW)
        assert generator.num_preempted >= 3 and (generator.num_swapped > 0) == swapped
        assert_empty(generator)


def test_a_step_measures_what_a_token_costs() -> None:
    generator = small("llama")
    generator.generate(prompts()[:1], 3)
    assert 1e-6 < generator._queue.rate.seconds < 10


def test_what_is_suspended_can_be_aborted() -> None:
    generator = small("qwen3_next", 7, preemption=Youngest(), preemption_mode=lambda costs: PreemptionMode.SWAP)
    first, second = generator.submit(prompts()[2], NEW), generator.submit(prompts()[1], NEW)
    while not generator.stats().suspended:
        generator.step()
    assert second.answers[0].suspended is not None and generator.stats().swap_nbytes
    generator.abort(second)
    assert not generator.stats().suspended and not generator.stats().swap_nbytes
    run(generator, first)
    assert_greedy(model_of("qwen3_next"), prompts()[2], first.output)
    assert_empty(generator)
