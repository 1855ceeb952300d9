"""Every field of a config that changes a cache or a mask, drawn: whatever of it transformers runs gives the tokens of full
recomputation in the generator and in ``PagedCache``, or is refused before anything is allocated."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from huggingface_hub.errors import StrictDataclassError  # noqa: E402
from test_every_family import multimodal  # noqa: E402
from test_generator import greedy  # noqa: E402
from test_paged_cache import generated  # noqa: E402
from test_random_configs import NAMES, drawn  # noqa: E402

from kvpagoda import Schema  # noqa: E402
from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.hf import Generator, PagedCache  # noqa: E402
from kvpagoda.hf.model_cache import runner_of  # noqa: E402
from kvpagoda.scheduling import Youngest  # noqa: E402
from kvpagoda.schema.families import families  # noqa: E402
from models import FAMILIES, tiny_config, tiny_model  # noqa: E402
from more_models import MORE, MULTIMODAL  # noqa: E402

NEW = 5
NOT_RUN = (ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ZeroDivisionError,
           StrictDataclassError)  # fmt: skip
"""What transformers raises for configs that it does not run."""
REFUSED = [
    "^doge config: is_moe is True; expected False: its router mixes the tokens of a forward pass",
    r"^qwen2_moe config, layer \d+ \(sliding_attention\): sliding_window is 0; expected",
    r"(conv_L_cache|conv_kernel_size|ple_conv_kernel_size) is 1; expected a whole number of at least 2$",
    r"layers \d+ to \d+ run \d+ times; expected layers below \d+|n_recurrent_layers is -\d+; expected",
]
"""Why configs that transformers runs are refused: the second is a layer with a window that windows are switched off for, the
third a layer that keeps nothing or, of n-grams, one that transformers does not run with a cache, the fourth a loop over
layers that the model does not have, which transformers does not run with a cache either."""

WINDOWS = [1, 2, 7, 15, 16, 19, 1000]
"""Itself alone; less than a block; a block and its neighbours; longer than every text."""
VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOWS),
    "local_attention": [2, 5, 32, 2000],
    "attention_chunk_size": [1, 3, 16, 19, 1000],
    **dict.fromkeys(
        ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache", "conv1d_width", "conv_kernel_size",
         "short_conv_kernel_size", "ple_conv_kernel_size"), [1, 2, 3, 5],
    ),
    **dict.fromkeys(("cca_time0", "cca_time1"), [1, 2, 4]),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), [2, 6, 24]),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), [1, 4, 7, 256]),
    "block_size": [1, 3, 16, 256],
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), [1, 2, 4]),
    **dict.fromkeys(("num_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), [1, 2, 3, 6]),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), [4, 16, 32, "auto"]),
    **dict.fromkeys(("expand", "mamba_expand"), [1, 3]),
    "mamba_d_ssm": [None, 48, 64],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), [1, 2, 3]),
    "linear_num_value_heads": [3, 4, 6],
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), [4, 8, 12]),
    "lru_width": [None, 8, 72],
    "kv_lora_rank": [4, 20], "q_lora_rank": [None, 8], "qk_rope_head_dim": [2, 4, 12], "qk_nope_head_dim": [4, 8],
    "v_head_dim": [4, 12, 20],
    "index_topk": [1, 2, 30, 1000], "index_head_dim": [12, 24],
    "swa_num_attention_heads": [3, 5], "swa_num_key_value_heads": [1, 5], "swa_head_dim": [4, 12],
    "global_head_dim": [8, 20], "num_global_key_value_heads": [1, 2],
    "num_kv_shared_layers": [0, 1, 3], "kv_channels": [4, 12], "attention_head_dim": [16, 24],
    "H_cycles": [1, 3], "L_cycles": [1, 3],
    "rotary_pct": [0.25, 1.0], "partial_rotary_factor": [0.5, 1.0], "rotary_dim": [4, 12],
    "num_hidden_layers": [1, 2, 3, 5, 7], "decoder_layers": [1, 2, 5], "n_layer": [1, 2, 5], "num_layers": [1, 2, 5],
    "n_layers": [1, 2],
    **dict.fromkeys(
        ("sliding_window_pattern", "global_attn_every_n_layers", "layer_group_size", "attn_layer_period",
         "prefix_dense_sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval"), [1, 2, 3],
    ),
    "attn_layer_offset": [0, 1], "first_k_dense_replace": [0, 1, 3], "max_window_layers": [0, 1, 3],
    **dict.fromkeys(("attn_layer_indices", "full_attn_idxs", "local_layer_ids", "cross_attention_layers"),
                    [[], [0], [1, 3], [0, 1]]),
    "block_types": [["attention"], ["recurrent"], ["attention", "recurrent", "recurrent"]],
    "no_rope_layers": [[0, 1, 1, 1], [0, 0, 1, 0], None],
    "indexer_types": [["full", "shared", "full", "shared"], ["full", "shared", "shared", "shared"]],
    "attention_types": [[[["local"], 4]], [[["local", "global"], 2]], [[["global"], 4]]],
    "num_attention_heads_per_layer": [[2, 4, 2, 4], [4, 8, 2, 2]],
    "max_position_embeddings": [80], "floor_scale": [4, 16], "log_scaling_n_floor": [4, 16],
    "rel_extent": [2, 100], "d_rel": [8], "hc_mult": [3], "hc_count": [3], "ngram_size": [2, 4],
    "ple_layer_ids": [[], [1], [1, 3]], "indexer_budget": [2, 4, 100], "indexer_compress_ratio": [1, 2],
    "index_block_size": [1, 3, 16, 128], "index_topk_blocks": [1, 2, 16], "index_local_blocks": [0, 1, 2],
    "qk_dim_factor": [1.0], "v_dim_factor": [0.5, 2.0], "attention_hidden_size": [32, 80], "num_blocks": [1, 3],
    "rescale_every": [0, 1], "num_kv_heads": [1, 2], "word_embed_proj_dim": [32],
    "compress_rates": [{"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
                       {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}],
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), [None, 5.0]),
    "query_pre_attn_scalar": [4, 100], "clip_qkv": [None, 0.5],
    "dtype": [None], "eos_token_id": [None], "tie_word_embeddings": [True],
}  # fmt: skip
"""Field -> values that it is given, where the config has it."""
LEFT = {
    "use_cache", "is_encoder_decoder", "is_decoder", "output_hidden_states", "output_attentions", "return_dict",
    "use_bidirectional_attention", "add_cross_attention", "use_mamba_kernels", "use_mem_eff_path", "init_device",
    "output_router_logits", "tie_word_embeddings", "is_causal",
}  # fmt: skip
"""Switches that say nothing about what a causal decoder computes."""
Make = Callable[..., Any]
"""Makes a model from changes of its config."""
SHORT = [1.0, 1.2, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0]
ROPES: list[Callable[[int], dict[str, Any]]] = [
    lambda half: {"partial_rotary_factor": 0.5},
    lambda half: {"rope_type": "linear", "factor": 3.0},
    lambda half: {"rope_type": "dynamic", "factor": 2.0},
    lambda half: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    lambda half: {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 20,
                  "short_factor": (SHORT * 8)[:half], "long_factor": (SHORT[::-1] * 8)[:half]},
    lambda half: {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 16},
]  # fmt: skip


def candidates(name: str, config: Any, source: random.Random) -> list[dict[str, Any]]:
    """Changes of ``config``, one after another in a drawn order."""
    fields, changes = config.to_dict(), [drawn(name, source)]
    for field, values in VALUES.items():
        if field in fields and source.random() < 0.5:
            changes.append({field: source.choice(values)})
    switches = [field for field, value in fields.items() if isinstance(value, bool) and field not in LEFT]
    changes += [{field: not fields[field]} for field in switches if source.random() < 0.3]
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and source.random() < 0.5:
        half = (fields.get("head_dim") or config.hidden_size // config.num_attention_heads) // 2
        more = source.choice(ROPES)(half)
        each = {key: {**value, **more} for key, value in rope.items() if isinstance(value, dict)}
        changes.append({"rope_parameters": each or {**rope, **more}})
    if fields.get("layer_types"):
        types = families()[name].verified
        for count in source.sample([1, 2, 3, 5, 7], 2):
            listed = [source.choice(types) for _ in range(count)]
            changes.append({"num_hidden_layers": count, "layer_types": listed})
    source.shuffle(changes)
    return changes


def built(make: Make, changes: dict[str, Any]) -> Any:
    """The model that ``make`` makes; None where transformers does not run it, or where it is refused for a reason known
    to be true."""
    try:
        model = make(**changes)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]), use_cache=False).logits
    except NOT_RUN:
        return None
    try:
        Schema.from_hf_config(model.config)
    except SchemaError as error:
        assert any(re.search(reason, str(error)) for reason in REFUSED), (str(error), changes)
        return None
    return model if bool(torch.isfinite(logits).all()) else None


def model_of(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch, make: Make | None = None
) -> tuple[Any, dict[str, Any]]:
    """A random model, and how its config differs from the tiny one: all drawn changes with which transformers runs it."""
    monkeypatch.setitem(FAMILIES, name, FAMILIES.get(name, MORE.get(name, {})))
    source, accepted = random.Random(f"fields of {name} {seed}"), dict[str, Any]()
    make = make or functools.partial(tiny_model, name, seed=seed)
    model = built(make, accepted)
    for changes in candidates(name, tiny_config(name), source):
        if (found := built(make, {**accepted, **changes})) is not None:
            model, accepted = found, {**accepted, **changes}
    assert accepted, f"transformers runs no drawn config of {name}"
    return model, accepted


def check(model: Any, changes: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(seed)
    text = torch.randint(2, 100, (50 + seed % 16,), generator=source).tolist()
    prompts = [text[:1], text[:9], text, [7, *text[:16]], text[:20] + text[:8], text[:34]]
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    generator = Generator(model, poison=True, num_blocks=60, max_requests=3, prefill_chunk=2 + seed % 9)
    monkeypatch.setattr(generator, "_ends", frozenset())
    for run in ("cold", "warm"):
        assert generator.generate(prompts, NEW) == expected, (run, changes)
    assert generator.generate(prompts[1:3], NEW, n=2) == [expected[1]] * 2 + [expected[2]] * 2, ("forked", changes)
    generator.cache.check()
    few = Generator(model, poison=True, num_blocks=8, max_requests=4, prefill_chunk=16, preemption=Youngest(), lookup=3)
    monkeypatch.setattr(few, "_ends", frozenset())
    for run in ("cold", "warm"):
        assert few.generate(prompts, NEW) == expected, ("under pressure, with proposals", run, changes)
    few.cache.check()
    cache = PagedCache(model, num_blocks=80, prefill_chunk=6, poison=True)
    if all(layer.rewinds is None or layer.rewinds >= 3 for layer in few.cache.schema.layers):
        assert after_a_rewind(model, prompts[1]) == expected[1], ("after rewinds", changes)
        assert after_a_rewind(model, prompts[2]) == expected[2], ("after rewinds", changes)
    for field in ("bos_token_id", "eos_token_id"):
        setattr(model.generation_config, field, None)
    for run in ("cold", "warm"):
        assert generated(model, prompts, cache, max_new_tokens=NEW) == expected, ("PagedCache", run, changes)
    cache.cache.check()


def after_a_rewind(model: Any, text: list[int]) -> list[int]:
    """Greedy tokens of a text behind which others were computed, committed and taken back."""
    runner, _ = runner_of(model, len(text), 3, "raw", dict(num_blocks=40, max_requests=2, poison=True))
    wrong, found = np.array([5, 6, 7], np.int32), list[int]()

    def advance(tokens: Any) -> int:
        sequence.extend(len(tokens))
        logits = runner.step([(sequence, tokens)])
        sequence.commit(tokens)
        return int(logits[0].argmax())

    with runner.cache.open(text) as sequence:
        best = advance(np.array(text, np.int32))
        for _ in range(NEW):
            advance(wrong)
            sequence.rewind(len(wrong))
            found.append(best)
            best = advance(np.array([best], np.int32))
        runner.cache.check()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_drawn_fields(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*model_of(name, seed, monkeypatch), seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIMODAL)
def test_tokens_of_drawn_fields_of_a_text_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(multimodal, name, monkeypatch)
    check(*model_of(MULTIMODAL[name][0], 1, monkeypatch, make), 1, monkeypatch)
