"""Positions of a prompt at which the caller of ``Generator.submit`` wants other texts to be able to resume."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvpagoda.errors import BadInput  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.scheduling import Youngest  # noqa: E402
from models import tiny_model  # noqa: E402
from raises import raises  # noqa: E402

SYSTEM = [7 + n % 50 for n in range(40)]
FIRST, SECOND = [*SYSTEM, *range(1, 31)], [*SYSTEM, *range(60, 90)]


def generator_of(name: str, **arguments: object) -> Generator:
    return Generator(tiny_model(name), "4MiB", max_requests=3, block_size=8, prefill_chunk=32, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "deepseek_v4"])
def test_another_text_resumes_where_the_caller_asked(name: str) -> None:
    plain = generator_of(name)
    expected = plain.generate([FIRST, SECOND], max_new_tokens=4)
    generator = generator_of(name)
    request = generator.submit(FIRST, 4, checkpoints=[len(SYSTEM), 86])
    assert request.checkpoints == ()
    while not request.done:
        generator.step()
    assert [(one.asked, one.position, one.state) for one in request.checkpoints] == [
        (40, 40, "kept"),
        (86, 0, "beyond"),
    ]
    before = generator.stats().cached_tokens
    assert [request.output, *generator.generate([SECOND], max_new_tokens=4)] == expected
    assert generator.stats().cached_tokens - before == 40


def test_without_being_asked_a_state_is_not_kept_there() -> None:
    generator = generator_of("qwen3_next")
    request = generator.submit(FIRST, 4)
    while not request.done:
        generator.step()
    assert request.checkpoints == ()
    assert generator.cache.lookup(SECOND).resumable == 0


def test_what_became_of_it_is_told_while_it_runs_and_after_it_was_preempted() -> None:
    generator = generator_of("qwen3_next", preemption=Youngest())
    request = generator.submit(FIRST, 4, n=2, checkpoints=[16, 40])
    generator.step()
    assert [one.state for one in request.checkpoints] == ["kept", "due"]
    job = request.answers[0]
    generator.queue.preempt(job)
    assert job.sequence is None and request.checkpoints[0].state in ("kept", "cached")
    while not request.done:
        generator.step()
    assert all(one.state in ("kept", "cached") for one in request.checkpoints)
    assert request.outputs[0] == generator_of("qwen3_next").generate([FIRST], max_new_tokens=4)[0]


@pytest.mark.parametrize("wrong", [[-1], [1.5], "end", [1 << 40]], ids=str)
def test_wrong_positions_are_refused_before_anything_is_queued(wrong: object) -> None:
    generator = generator_of("llama")
    with raises(BadInput, needed=wrong):
        generator.submit(FIRST, 4, checkpoints=wrong)
    assert not generator.queue.waiting
