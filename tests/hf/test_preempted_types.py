"""Types that memory alone seldom preempts, as windows and states are promised whole, are preempted and suspended here.

A request is preempted in every way in turn, in its prompt and after it; its tokens stay those of a run by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_every_family import TEXT_PARTS  # noqa: E402
from test_generator import told_again  # noqa: E402
from test_random_configs import model_of  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402

from kvpagoda import Schema  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.scheduling import PreemptionMode, Youngest  # noqa: E402
from models import FAMILIES, TINY, tiny_config  # noqa: E402
from more_models import MORE  # noqa: E402

NEW = 6


def has_promises(name: str) -> bool:
    """Whether the type has states, or no group of blocks that grows with the whole text."""
    schema = Schema.from_hf_config(tiny_config(name, **MORE.get(name, {})))
    return all(group.growth.is_bounded for group in schema.groups) or bool(schema.state_layout.nbytes)


NAMES = sorted(name for name in {*TINY, *MORE} - {*TEXT_PARTS} if name not in CONFIG_MAPPING or has_promises(name))
"""With those that the installed transformers does not have, which are skipped."""


@pytest.mark.parametrize("name", NAMES)
def test_tokens_stay_the_same_while_requests_are_preempted_in_every_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, changes = model_of(name, 4, monkeypatch)
    source = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 100, (n,), generator=source).tolist() for n in (19, 3, 33, 12)]
    generator = Generator(
        model, num_blocks=30, max_requests=3, prefill_chunk=7, preemption=Youngest(), poison=True
    )  # fmt: skip
    monkeypatch.setattr(generator, "_ends", frozenset())
    ways, steps = itertools.cycle(PreemptionMode), itertools.count()
    tried = dict.fromkeys(PreemptionMode, 0)
    requests = [generator.submit(prompt, NEW) for prompt in prompts]
    while not all(request.done for request in requests):
        generator.step()
        running = [answer for request in requests for answer in request.answers if answer.sequence is not None]
        if running and next(steps) % 2:
            way = next(ways)
            tried[way] += 1
            generator._queue.preempt(running[tried[way] % len(running)], way)
        generator.cache.check()
    for prompt, request in zip(prompts, requests):
        assert request.output == told_again(model, prompt, request.output) and len(request.output) == NEW, changes
    assert min(tried.values()) > 0 and generator.num_preempted == sum(tried.values())
    assert generator.num_swapped >= tried[PreemptionMode.SWAP]
    stats: Any = generator.stats()
    assert stats.running == stats.suspended == stats.swap_nbytes == 0


def test_there_are_such_types() -> None:
    assert len(NAMES) >= 33 and {"mistral", "mamba", "deepseek_v4"} <= {*NAMES} and {*FAMILIES} - {*NAMES}
