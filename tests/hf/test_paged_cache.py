"""``model.generate`` with a PagedCache gives the tokens of ``model.generate`` without it, prefix hits included."""

from __future__ import annotations

import copy
import doctest
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_every_family import REST, VARIANTS, multimodal, tiny  # noqa: E402
from test_generator import EXACT, greedy, model_of, prompts, recomputed  # noqa: E402
from test_rope_switch import model_of as switching  # noqa: E402
from test_rope_switch import prompts as crossing  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from kvpagoda.errors import BadInput, MissingExtra, OutOfBlocks  # noqa: E402
from kvpagoda.hf import Generator, PagedCache, cache_name  # noqa: E402
from kvpagoda.hf.cache_name import CACHE_NAMES, OUTPUT_NAME, cache_name_of  # noqa: E402
from more_models import MULTIMODAL  # noqa: E402
from raises import raises  # noqa: E402

NEW = 7
PLAIN: dict[str, Any] = dict(do_sample=False, pad_token_id=0, max_new_tokens=NEW)
SOME = ["gemma3_text", "qwen3_next", "deepseek_v3", "deepseek_v4"]


def padded(texts: list[list[int]]) -> dict[str, Any]:
    """A batch as a tokenizer gives it, padded with token 0 on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return dict(input_ids=ids, attention_mask=mask)


def generated(model: Any, texts: list[list[int]], cache: Any = None, **options: Any) -> list[list[int]]:
    batch = padded(texts)
    out = model.generate(**batch, **{**PLAIN, **options}, **({} if cache is None else {"cache": cache}))
    return [row[batch["input_ids"].shape[1] :].tolist() for row in out]


@pytest.mark.parametrize("name", SOME)
def test_a_padded_batch_gives_the_tokens_of_each_prompt_alone(name: str) -> None:
    """Twice: the second time all but the last block of each prompt is found."""
    model, rows = model_of(name), (5, 13, 8, 12)
    texts, expected = [prompts()[i] for i in rows], [greedy(model, prompts()[i], NEW) for i in rows]
    cache = PagedCache(model, num_blocks=100, prefill_chunk=7, poison=True)
    for _ in range(2):
        before = cache.stats()
        assert generated(model, texts, cache) == expected
        cache.cache.check()
    cache.reset()
    after = cache.stats()
    assert after.running == 0 and after.cached_tokens - before.cached_tokens >= 16 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in sorted({*EXACT, *REST})), *VARIANTS])
def test_every_family(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = tiny(name, monkeypatch, **changes), torch.Generator().manual_seed(0)
    for field in ("bos_token_id", "eos_token_id"):
        monkeypatch.setattr(model.generation_config, field, None)
    texts = [torch.randint(2, 100, (n,), generator=source).tolist() for n in (1, 3, 17, 33)]
    expected = [greedy(model, text, NEW) for text in texts]
    cache = PagedCache(model, num_blocks=80, prefill_chunk=7, poison=True)
    for _ in range(2):
        assert generated(model, texts, cache) == expected
    assert [generated(model, [text], cache)[0] for text in texts] == expected
    cache.cache.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIMODAL)
def test_texts_of_multimodal_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = multimodal(name, monkeypatch), [[3, 4, 5, 6, 7, 8, 9] * 3, [7], [3, 4, 5, 6, 7, 8, 9] * 4]
    cache = PagedCache(model, num_blocks=60, prefill_chunk=7, poison=True)
    for _ in range(2):
        assert generated(model, texts, cache, max_new_tokens=5) == [greedy(model, text, 5) for text in texts]


def test_rows_of_one_batch_share_and_only_what_is_new_is_computed() -> None:
    model, head = model_of("llama"), prompts()[-1]
    cache = PagedCache(model, num_blocks=60)
    texts = [[*head, 1], [*head, 2, 3], [*head, 1, 4]]
    assert generated(model, texts, cache) == [greedy(model, text, NEW) for text in texts]
    cache.reset()
    stats = cache.stats()
    assert stats.cached_tokens == 2 * 32  # two rows found the two whole blocks of the first
    assert stats.computed_tokens == sum(map(len, texts)) - 2 * 32 + 3 * (NEW - 1)


def test_a_conversation_goes_on_from_what_is_cached() -> None:
    model, text = model_of("llama"), list(prompts()[-1])
    cache = PagedCache(model, num_blocks=60)
    for turn in range(3):
        found = cache.stats().cached_tokens
        answer = generated(model, [text], cache)[0]
        assert answer == greedy(model, text, NEW)
        assert cache.stats().cached_tokens - found == (0, 47, 61)[turn]  # all but the last token said
        text += [*answer, *prompts()[5]]


def test_beams_and_samples_are_those_of_the_model() -> None:
    model, texts = model_of("llama"), [prompts()[9], prompts()[9][:7]]
    for options in (dict(num_beams=3), dict(num_beams=2, num_return_sequences=2), dict(do_sample=True)):
        found = []
        for cache in (None, PagedCache(model, num_blocks=80, max_requests=16)):
            torch.manual_seed(3)
            found.append(generated(model, texts, cache, **options))
            if cache is not None:
                cache.cache.check()
        assert found[0] == found[1], options


def test_rows_that_stop_early(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = model_of("llama"), prompts()[6:9]
    end = recomputed("llama")[6][2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end])
    assert generated(model, texts, PagedCache(model, num_blocks=60)) == generated(model, texts)


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_texts_that_grow_past_the_switch_of_their_rotation(name: str) -> None:
    """Phi-3's own code drops any cache there."""
    model, texts = switching(name), crossing()[4:10]
    cache = PagedCache(model, num_blocks=80)
    for _ in range(2):
        assert generated(model, texts, cache) == [greedy(model, text, NEW) for text in texts]
    cache.cache.check()


def test_a_loop_of_ones_own() -> None:
    model, text = model_of("llama"), prompts()[9]
    cache = PagedCache(model, num_blocks=30)
    ids, found = torch.tensor([text]), []
    for _ in range(NEW):
        with torch.no_grad():
            ids = model(input_ids=ids, cache=cache).logits[:, -1:].argmax(-1)
        found.append(int(ids))
    assert found == recomputed("llama")[9]
    cache.reset()
    both = torch.tensor([text, text])
    model(input_ids=both[:, :5], cache=cache)
    logits = model(input_ids=both[:, 5:], cache=cache).logits  # several tokens of each row at once
    assert logits.shape[:2] == (2, 1) and logits.argmax(-1).ravel().tolist() == [found[0]] * 2


def test_the_model_is_itself_with_any_other_cache_and_so_is_a_copy() -> None:
    model, text = copy.deepcopy(model_of("llama")), prompts()[9]
    PagedCache(model, num_blocks=30)
    assert generated(model, [text])[0] == recomputed("llama")[9]
    twin = copy.deepcopy(model)
    assert twin.forward.__self__ is twin and generated(twin, [text])[0] == recomputed("llama")[9]
    cache = PagedCache(twin, num_blocks=30)
    assert generated(twin, [text], cache)[0] == recomputed("llama")[9]


def test_a_model_whose_forward_was_replaced_is_refused() -> None:
    model = copy.deepcopy(model_of("llama"))
    model.forward = functools.partial(model.forward)
    with raises(BadInput, needed=["forward"]):
        PagedCache(model, num_blocks=30)


@pytest.mark.parametrize("make", [PagedCache, Generator])
def test_a_name_in_place_of_a_model_says_what_to_pass(make: Any) -> None:
    with raises(BadInput, needed="str"):
        make("gpt2")
    with raises(BadInput, needed="int"):
        make(3)


def test_the_cache_of_another_model_is_refused() -> None:
    model, text = model_of("llama"), prompts()[9]
    cache, twin = PagedCache(model, num_blocks=30), copy.deepcopy(model)
    for other in (twin, model_of("qwen3")):  # one that knows of such caches, one that does not
        with raises(BadInput, needed="LlamaForCausalLM"):
            other.generate(**padded([text]), **{OUTPUT_NAME: cache}, **PLAIN)


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_it_has_the_names_of_all_versions(family: str, name: str) -> None:
    model, text = model_of(family), prompts()[9]
    cache = PagedCache(model, num_blocks=60)
    out = model.generate(**padded([text]), **{name: cache}, **PLAIN, return_dict_in_generate=True)
    assert out.sequences[0, len(text) :].tolist() == greedy(model, text, NEW) and out[OUTPUT_NAME] is cache
    cache.reset()
    again = model(torch.tensor([text]), **{name: cache})
    assert again[OUTPUT_NAME] is cache and again.logits.argmax() == greedy(model, text, 1)[0]
    at = [*inspect.signature(model.forward).parameters].index(cache_name_of(model))
    cache.reset()
    assert torch.equal(model(torch.tensor([text]), *[None] * (at - 1), cache).logits, again.logits)


class Old(LlamaForCausalLM):
    """Code from elsewhere, which names its cache as transformers before 5.24 does and takes any argument."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, **others, **{OUTPUT_NAME: past_key_values})


class New(LlamaForCausalLM):
    """The same with the name since 5.24."""

    def forward(self, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, **others, **{OUTPUT_NAME: cache})


@pytest.mark.parametrize("kind", [Old, New])
def test_code_from_elsewhere_keeps_its_own_name_of_the_cache(kind: type[LlamaForCausalLM]) -> None:
    own, text = model_of("llama"), prompts()[9]
    model = kind(own.config).eval()
    model.load_state_dict(own.state_dict())
    model.generation_config = own.generation_config
    expected, cache = greedy(own, text, NEW), PagedCache(model, num_blocks=60)
    assert Generator(model, num_blocks=60).generate([text], NEW) == [expected]
    assert generated(model, [text], cache) == generated(model, [text], cache) == [expected]
    assert cache.stats().cached_tokens > 0


def test_outputs_without_a_field_for_a_cache_say_which_versions_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_name, "CACHE_NAMES", ("kv_store",))
    with raises(MissingExtra, needed=("kv_store",)):
        cache_name._output_name()


def right_padded(model: Any, cache: PagedCache) -> None:
    ids = torch.tensor([[5, 6, 7], [5, 0, 0]])
    model.generate(ids, attention_mask=(ids != 0).long(), cache=cache, **PLAIN)


def empty_row(model: Any, cache: PagedCache) -> None:
    model(input_ids=torch.ones(2, 3), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]), cache=cache)


def in_chunks(model: Any, cache: PagedCache) -> None:
    generated(model, [prompts()[9]], cache, prefill_chunk_size=4)


def assisted(model: Any, cache: PagedCache) -> None:
    generated(model, [prompts()[9]], cache, prompt_lookup_num_tokens=3)


def embedded(model: Any, cache: PagedCache) -> None:
    model(inputs_embeds=torch.zeros(1, 2, 48), cache=cache)


def hidden(model: Any, cache: PagedCache) -> None:
    model(input_ids=torch.ones(1, 2, dtype=torch.int64), cache=cache, output_hidden_states=True)


def another_batch(model: Any, cache: PagedCache) -> None:
    model(input_ids=torch.ones(1, 2, dtype=torch.int64), cache=cache)
    model(input_ids=torch.ones(3, 1, dtype=torch.int64), cache=cache)


@pytest.mark.parametrize(
    ("call", "figures"),
    [
        (right_padded, {"needed": 1}),
        (empty_row, {"needed": 1}),
        (in_chunks, {"needed": "whole texts"}),
        (assisted, {"needed": "lookup"}),
        (embedded, {"needed": ["inputs_embeds"]}),
        (hidden, {"needed": ["output_hidden_states"]}),
        (another_batch, {"needed": [3, 1]}),
    ],
)
def test_what_it_does_not_do_is_told(call: Callable[[Any, PagedCache], None], figures: dict[str, Any]) -> None:
    model = model_of("llama")
    cache = PagedCache(model, num_blocks=30)
    with raises(BadInput, **figures):
        call(model, cache)
    cache.cache.check()
    assert generated(model, [prompts()[9]], cache)[0] == recomputed("llama")[9]


def test_a_batch_without_room_ends_and_the_cache_goes_on() -> None:
    model, text = model_of("llama"), prompts()[9]
    cache = PagedCache(model, num_blocks=3)
    with pytest.raises(OutOfBlocks):
        generated(model, [text], cache, max_new_tokens=60)
    cache.cache.check()
    assert cache.stats().running == 0
    assert generated(model, [text], cache)[0] == recomputed("llama")[9]
    with raises(BadInput, needed=0, available=1):
        PagedCache(model, prefill_chunk=0)


def test_the_example() -> None:
    failed, tried = doctest.testmod(importlib.import_module("kvpagoda.hf.paged_cache"))
    assert failed == 0 and tried
