"""After every change of a model's weights, answers are those of the new weights, and what was cached is found again
as long as nothing changes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import model_of, prompts  # noqa: E402
from test_paged_cache import generated  # noqa: E402

from kvpagoda import KVCache, Schema  # noqa: E402
from kvpagoda.hf import Generator, PagedCache  # noqa: E402
from kvpagoda.hf.weights import WeightsWatch  # noqa: E402
from models import tiny_model  # noqa: E402

NEW = 6
TEXT = prompts()[-1]


def own_model(name: str = "llama") -> Any:
    """A model that a test may change."""
    return copy.deepcopy(model_of(name))


def trained(**options: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, **options)
        ids = torch.tensor([TEXT])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return change


def copied_data(model: Any) -> None:
    for value in model.parameters():
        value.data.copy_(torch.randn_like(value) * 0.3)


def replaced_data(model: Any) -> None:
    for value in model.parameters():
        value.data = torch.randn_like(value) * 0.3


def written_through_numpy(model: Any) -> None:
    for value in model.parameters():
        array = value.detach().numpy()
        array[:] = torch.randn_like(value).numpy() * 0.3


def loaded(model: Any, assign: bool = False) -> None:
    model.load_state_dict(tiny_model("llama", seed=5).state_dict(), assign=assign)


def assigned(model: Any) -> None:
    loaded(model, assign=True)


def swapped_module(model: Any) -> None:
    model.model.layers[1].mlp = tiny_model("llama", seed=5).model.layers[1].mlp


def swapped_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def swapped_parameter(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * torch.randn_like(norm.weight))


def merged_adapter(model: Any) -> None:
    """As a low-rank adapter is merged: in place, behind the counters."""
    weight = model.model.layers[2].self_attn.v_proj.weight
    weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def exchanged_parameters(model: Any) -> None:
    first, second = model.model.layers[0].self_attn, model.model.layers[3].self_attn
    first.k_proj.weight, second.k_proj.weight = second.k_proj.weight, first.k_proj.weight


CHANGES = [
    trained(), trained(fused=True), trained(foreach=True), copied_data, replaced_data, written_through_numpy, loaded,
    assigned, swapped_module, swapped_activation, swapped_parameter, merged_adapter, exchanged_parameters,
]  # fmt: skip
IDS = ["AdamW", "fused AdamW", "AdamW foreach", *(change.__name__ for change in CHANGES[3:])]


@pytest.mark.parametrize("change", CHANGES, ids=IDS)
@torch.random.fork_rng()
def test_answers_after_a_change_are_those_of_the_new_weights(change: Callable[[Any], None]) -> None:
    model, texts = own_model(), [TEXT, [*TEXT, 3, 4]]
    torch.manual_seed(7)
    paged, generator = PagedCache(model, num_blocks=60), Generator(model, num_blocks=60)
    before = generated(model, texts, max_new_tokens=NEW)
    for _ in range(2):
        assert generated(model, texts, paged, max_new_tokens=NEW) == before
        assert generator.generate(texts, NEW) == before
    assert paged.stats().cached_tokens >= 3 * 32 and generator.stats().cached_tokens >= 3 * 32
    change(model)
    after = generated(model, texts, max_new_tokens=NEW)
    assert after != before
    for _ in range(2):
        assert generated(model, texts, paged, max_new_tokens=NEW) == after
        assert generator.generate(texts, NEW) == after
    assert paged.cache.epoch == generator.cache.epoch == 1  # one change, noticed once
    assert generator.stats().cached_tokens >= 6 * 32
    paged.cache.check()
    generator.cache.check()


def test_requests_that_are_admitted_after_a_change_start_from_no_older_row() -> None:
    model = own_model()
    generator = Generator(model, num_blocks=60, max_requests=1)
    first, second = generator.submit(TEXT, NEW), generator.submit([*TEXT, 3, 4], NEW)
    while len(first.output) < 2:
        generator.step()
    copied_data(model)
    while not second.done:
        generator.step()
    assert [second.output] == generated(model, [[*TEXT, 3, 4]], max_new_tokens=NEW)
    assert generator.stats().cached_tokens == 0


@pytest.mark.parametrize("make", [PagedCache, Generator])
def test_a_change_that_is_not_noticed_needs_a_call(make: Callable[..., Any]) -> None:
    """A row of the embedding, none of whose values is sampled, written behind torch's back."""
    model = own_model()
    cache, text = make(model, num_blocks=60), [5, *TEXT]

    def answer() -> list[list[int]]:
        if isinstance(cache, Generator):
            return cache.generate([text], NEW)
        return generated(model, [text], cache, max_new_tokens=NEW)

    answer()
    model.model.embed_tokens.weight.data[5].mul_(-9)
    expected = generated(model, [text], max_new_tokens=NEW)
    answer()
    assert cache.cache.epoch == 0
    cache.invalidate()
    assert answer() == expected and cache.cache.epoch == 1
    cache.invalidate(weights="digest")
    assert answer() == expected and cache.cache.epoch == 2
    cache.cache.check()


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v4", "gemma3_text", "mamba2"])
def test_a_model_that_only_answers_has_not_changed(name: str) -> None:
    generator = Generator(model_of(name), num_blocks=60)
    for _ in range(3):
        generator.generate(prompts()[6:9], NEW)
    assert generator.cache.epoch == 0


def watch_of(module: Any) -> WeightsWatch:
    schema = Schema.from_hf_config(dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
    return WeightsWatch(module, KVCache(schema, "1MiB", "none"))


def tensor_of_all_kinds() -> Any:
    module = torch.nn.Module()
    dense = torch.arange(40.0).reshape(5, 8)
    for name, value in {
        "scalar": torch.tensor(1.0), "empty": torch.empty(0, 3), "transposed": dense.clone().t(),
        "strided": dense.clone()[::2, ::3], "shorter": dense.bfloat16(), "eight": dense.to(torch.float8_e4m3fn),
        "whole": dense.long(), "flags": dense > 3, "not a number": dense * torch.nan, "expanded": torch.ones(1).expand(5),
        "elsewhere": torch.empty(3, device="meta"), "sparse": dense.to_sparse(),
    }.items():  # fmt: skip
        module.register_buffer(name, value)
    module.register_buffer("not_persistent", torch.ones(2), persistent=False)
    with torch.inference_mode():
        module.register_buffer("inferred", torch.ones(3, 4))
    return module


def test_tensors_of_every_kind_are_watched() -> None:
    module = tensor_of_all_kinds()
    watch = watch_of(module)
    watch.follow()
    assert watch._cache.epoch == 0
    module.not_persistent.add_(1)
    module.not_persistent = torch.zeros(3)
    watch.follow()
    assert watch._cache.epoch == 0
    for name in ("scalar", "transposed", "strided", "shorter", "whole", "flags", "expanded"):
        before = watch._cache.epoch
        getattr(module, name).data.flatten()  # reading changes nothing
        watch.follow()
        assert watch._cache.epoch == before
        value = getattr(module, name).data
        value.copy_(torch.zeros_like(value)) if name != "expanded" else value[:1].zero_()
        watch.follow()
        assert watch._cache.epoch == before + 1, name
    module.sparse.mul_(2)  # its counter alone
    watch.follow()
    module.inferred = torch.ones(3, 4)
    watch.follow()
    assert watch._cache.epoch == 9


def test_dropped_weights_are_freed() -> None:
    module = torch.nn.Linear(3, 4)
    watch, old = watch_of(module), weakref.ref(module.weight)
    module.weight = torch.nn.Parameter(torch.ones(4, 3))
    assert old() is None
    watch.follow()
    assert watch._cache.epoch == 1
