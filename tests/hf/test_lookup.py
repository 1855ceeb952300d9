"""Prompt lookup proposes what followed before, and the tokens that come out are those of plain greedy decoding."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

from kvpagoda import Retention

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_every_family import tiny  # noqa: E402
from test_generator import greedy, model_of  # noqa: E402

from kvpagoda.errors import BadInput  # noqa: E402
from kvpagoda.hf import Generator, Sampling  # noqa: E402
from kvpagoda.hf.generator import propose  # noqa: E402
from models import VOCAB  # noqa: E402
from raises import raises  # noqa: E402

NEW = 14
STATES = ["qwen3_next", "mamba2", "nemotron_h", "kimi_linear", "lfm2", "falcon_h1"]
HYBRIDS = """bailing_hybrid bamba falcon_mamba granitemoehybrid jamba lfm2_moe lfm3 mamba minimax olmo_hybrid
qwen3_5_moe_text qwen3_5_text recurrent_gemma zamba zamba2 zaya""".split()
"""All other model types with states that go back."""
PATTERN = [1, 2, 1, 3, 1, 4, 5, 2]
"""What follows 1 or 2 depends on the tokens before it."""


def naive(text: list[int], most: int) -> list[int]:
    """Token by token: the latest earlier place of the last three, else two, and what follows it, again and again."""
    for n in (3, 2):
        for begin in range(len(text) - n - 1, -1, -1):
            if text[begin : begin + n] == text[-n:]:
                after = text[begin + n :]
                return [after[i % len(after)] for i in range(most)]
    return []


@pytest.mark.parametrize("vocab", [1, 2, 5, 30])
def test_propose_equals_the_plain_loop(vocab: int) -> None:
    source = np.random.default_rng(vocab)
    proposed = 0
    for _ in range(2000):
        text = source.integers(0, vocab, int(source.integers(1, 40))).astype(np.int32)
        most = int(source.integers(0, 6))
        found = propose(text, most)
        assert found.dtype == np.int32 and found.tolist() == naive(text.tolist(), most)
        proposed += len(found) > 0
    assert proposed > 20


@functools.cache
def prompts() -> list[list[int]]:
    """Texts that repeat themselves: around windows (8) and blocks (16), and one that does not."""
    source = torch.Generator().manual_seed(3)
    piece = torch.randint(0, VOCAB, (12,), generator=source).tolist()
    return [[5], [7, 7, 7], piece[:4] * 4 + piece[:1], piece + piece[:5], piece * 4, list(range(20))]


@functools.cache
def recomputed(name: str) -> list[list[int]]:
    return [greedy(model_of(name), prompt, NEW) for prompt in prompts()]


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v4", *STATES]
)
def test_tokens_stay_those_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals that are right for 0 to 9 tokens and then wrong, in a pool where rows are recycled and poisoned."""
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), recomputed(name))}

    def partly_right(text: np.ndarray, most: int) -> np.ndarray:
        begin = max((p for p in answers if tuple(text[: len(p)]) == p), key=len)
        proposed = np.array(answers[begin][len(text) - len(begin) :][:most], np.int32)
        proposed[len(text) * 7 % 10 :] += 1
        return proposed % VOCAB

    monkeypatch.setattr("kvpagoda.hf.generator.propose", partly_right)
    generator = Generator(
        model_of(name),
        num_blocks=60,
        max_requests=4,
        prefill_chunk=7,
        lookup=9,
        retention=Retention(checkpoints=2),
        poison=True,
    )
    assert generator.generate(prompts(), NEW, lambda stats: generator.cache.check()) == recomputed(name)
    assert 30 < generator.num_accepted < generator.num_proposed
    stats = generator.stats()  # what was refused was never committed
    assert stats.computed_tokens + stats.cached_tokens == sum(map(len, prompts())) + len(prompts()) * (NEW - 1)


def test_a_text_that_repeats_itself_takes_half_the_steps() -> None:
    model, prompt, steps = model_of("qwen3"), prompts()[2], []
    generator = Generator(model, num_blocks=60, lookup=4)
    assert generator.generate([prompt], 40, steps.append) == [greedy(model, prompt, 40)]
    assert len(steps) == 40 - generator.num_accepted <= 20 and generator.num_accepted < generator.num_proposed


@functools.cache
def learned(name: str) -> Any:
    """A model that has learned by heart what follows what in ``PATTERN``: it must remember more than the last token."""
    model = copy.deepcopy(model_of(name)).train()
    text = torch.tensor([PATTERN * 4])
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        logits = model(input_ids=text, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, text[0, 1:])
        loss.backward()
        optimiser.step()
        if loss < 0.02:
            break
    return model.eval()


def passes_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each further pass of ``model`` appends the shape of its token ids."""
    shapes: list[tuple[int, ...]] = []
    body = model.get_input_embeddings()
    own = body.forward
    monkeypatch.setattr(body, "forward", lambda ids: shapes.append(tuple(ids.shape)) or own(ids))
    return shapes


@pytest.mark.parametrize("name", STATES)
def test_states_go_back_and_a_text_that_repeats_itself_takes_fewer_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real proposals, most of them right: a text of a learned pattern, and one in which it is broken again and again."""
    model = learned(name)
    broken = [token if i % 5 else 7 for i, token in enumerate(PATTERN * 3)]
    texts, new = [PATTERN * 2 + PATTERN[:3], broken], 40
    expected, passes = [greedy(model, text, new) for text in texts], passes_of(model, monkeypatch)
    counts = {}
    for lookup in (0, 4):
        generator = Generator(model, num_blocks=60, max_requests=1, lookup=lookup, poison=True)
        passes.clear()
        assert generator.generate(texts, new) == expected
        generator.cache.check()
        counts[lookup] = len(passes)
    assert 0 < generator.num_accepted < generator.num_proposed
    assert counts[4] == counts[0] - generator.num_accepted < 0.6 * counts[0], counts


@pytest.mark.parametrize("name", ["rwkv", "xlstm", "inkling_text"])
def test_states_of_modules_that_are_not_known_are_computed_token_by_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RWKV and xLSTM pass their states around themselves; Inkling has four modules with states in each layer."""
    model = tiny(name, monkeypatch)
    generator = Generator(model, num_blocks=60, lookup=4)
    assert generator.cache.plan.rewinds[0][2] == 0 == generator.cache.plan.groups[-1].places - 1
    assert generator.generate(prompts()[4:5], 5) == [greedy(model, prompts()[4], 5)]
    assert generator.num_proposed == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_model_whose_states_are_known_verifies_several_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are right for a while: the states after each of them must be those of plain decoding."""
    model = tiny(name, monkeypatch)
    expected = [greedy(model, prompt, 9) for prompt in prompts()[1:4]]
    texts = [prompt + new for prompt, new in zip(prompts()[1:4], expected)]

    def partly_right(text: np.ndarray, most: int) -> np.ndarray:
        own = next(one for one in texts if one[:3] == text[:3].tolist() and len(one) > len(text))
        proposed = np.array(own[len(text) :][:most], np.int32)
        proposed[len(text) % 4 :] += 1
        return proposed % VOCAB

    monkeypatch.setattr("kvpagoda.hf.generator.propose", partly_right)
    generator = Generator(model, num_blocks=60, max_requests=3, prefill_chunk=7, lookup=3, poison=True)
    monkeypatch.setattr(generator, "_ends", frozenset())
    assert generator.generate(prompts()[1:4], 9, lambda stats: generator.cache.check()) == expected
    assert 5 < generator.num_accepted < generator.num_proposed


def test_verifying_takes_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that repeats itself: all requests of one step that verify equally many tokens share a pass."""
    model, texts = model_of("llama"), [prompts()[3], [7, *prompts()[4][1:]]]  # which do not begin alike
    expected = [greedy(model, text, 5) for text in texts]
    generator = Generator(model, num_blocks=60, max_requests=2, lookup=3)
    sizes: list[tuple[int, ...]] = []
    body = model.get_input_embeddings()
    monkeypatch.setattr(body, "forward", lambda ids, own=body.forward: sizes.append(tuple(ids.shape)) or own(ids))
    monkeypatch.setattr("kvpagoda.hf.generator.propose", lambda text, most: np.full(min(most, 3), 1, np.int32))
    requests = [generator.submit(prompt, 5) for prompt in texts]
    while not all(request.done for request in requests):
        generator.step()
    assert [request.output for request in requests] == expected
    assert sizes == [(1, 17), (1, 48), (2, 4), (2, 3), (2, 2), (2, 1)]
    assert (generator.num_proposed, generator.num_accepted) == (2 * (3 + 2 + 1), 0)


def test_drawn_tokens_are_the_same_with_and_without() -> None:
    sampling = Sampling(temperature=0.3, seed=1)
    found = []
    for most in (0, 4):
        generator = Generator(model_of("llama"), num_blocks=60, lookup=most)
        found.append(generator.generate(prompts(), NEW, sampling=sampling, n=2))
    assert found[0] == found[1] and 0 < generator.num_accepted < generator.num_proposed


def test_it_stops_at_an_accepted_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("llama"), prompts()[4]
    expected = recomputed("llama")[4]
    end = expected[4]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end])
    generator = Generator(model, num_blocks=60, lookup=8)
    monkeypatch.setattr(
        "kvpagoda.hf.generator.propose",
        lambda text, most: np.array(expected[len(text) - len(prompt) :], np.int32)[:most],
    )
    assert generator.generate([prompt], NEW) == [expected[: expected.index(end) + 1]]
    generator.cache.check()


def test_lookup_is_a_number_of_tokens() -> None:
    with raises(BadInput, needed=(512, -1)):
        Generator(model_of("llama"), num_blocks=4, lookup=-1)
