"""Every family against the tensors that transformers really keeps: measured, not restated."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvpagoda import Schema  # noqa: E402
from kvpagoda.hf.cache_name import cache_name_of  # noqa: E402
from kvpagoda.hf.model_cache import schema_of  # noqa: E402
from kvpagoda.schema import Attention, Compressed, Latent, Layer, Recurrent, Shared  # noqa: E402
from kvpagoda.schema.families import families  # noqa: E402
from models import FAMILIES as TINY_FAMILIES  # noqa: E402
from models import VOCAB, randomise, tiny_config  # noqa: E402
from more_models import MORE  # noqa: E402

TOKENS = 21
KEEPS_ALL_COLUMNS = {"qwen4_exp_text": ["conv_1", "conv_2"], "zaya": ["conv"]}
"""Families with convolutions that read the oldest column that transformers keeps, and which those are."""

TESTED = sorted({*TINY_FAMILIES, *MORE})
NOT_MEASURED = {
    "emu3_text_model": "transformers builds it inside a multimodal model alone",
    "inkling2_text": "transformers does not run it in bfloat16",
    "minimax": "its states are beside the layers of its cache",
    "mllama_text_model": "transformers builds it inside a multimodal model alone",
    "moshi": "its model attends to all tokens, its cache keeps those of a window",
    "recurrent_gemma": "its modules hold the states, and it does not give its cache back",
}
"""Types whose rows ``tests/hf`` alone verifies, by the tokens that follow from them, and why."""
OWN_STATES = sorted(name for name, family in families().items() if family.own_states)
"""Types that pass their states around outside of transformers' cache interface."""


def config_of(name: str, **changes: Any) -> Any:
    return tiny_config(name, **{**MORE.get(name, {}), "dtype": "bfloat16", **changes})


def model_of(config: Any) -> Any:
    """A random bfloat16 model: its float32 states then show."""
    torch.manual_seed(0)
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    randomise(model)
    return model


def forward(model: Any, ids: Any, cache: Any = None) -> tuple[Any, Any]:
    """(logits or hidden states, cache) of one step."""
    name = cache_name_of(model)
    with torch.no_grad():
        output = model(ids, use_cache=True, **({} if cache is None else {name: cache}))
    kept = getattr(output, name)
    return output[0], getattr(kept, "self_attention_cache", kept)


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_of(layer: Any, name: str) -> Any:
    """A tensor of one of transformers' cache layers; None if it has none, or an empty one."""
    tensor = getattr(layer, name, None)
    return tensor if torch.is_tensor(tensor) and tensor.numel() else None


def check_rows(layer: Layer, real: Any) -> None:
    """The rows of every token: heads, widths, dtypes, bytes a token, and how many tokens are kept."""
    rows = {row.name: row for row in layer.block_rows()}
    index_keys = "idx_keys" if hasattr(real, "idx_keys") else "indexer_keys"
    names = {"k": "keys", "v": "values", "latent": "keys", "k_rope": "values", "index_key": index_keys}
    kept = {attribute for attribute in set(names.values()) if tensor_of(real, attribute) is not None}
    assert kept == {names[name] for name in rows}
    for name, row in rows.items():
        tensor = tensor_of(real, names[name])
        by_token = tensor[0].transpose(0, 1) if tensor.dim() == 4 else tensor[0]
        by_token = by_token[:, 0] if name == "index_key" and tensor.dim() == 4 else by_token
        assert row.shape == tuple(by_token.shape[1:])
        assert row.dtype == dtype_of(tensor)
        assert row.row_nbytes == tensor.nbytes / len(by_token)
        span = layer.growth.span
        assert len(by_token) == (TOKENS if span is None else min(TOKENS, span - 1))


def states_of(real: Any) -> dict[str, Any]:
    """The state tensors of one of transformers' cache layers, by the names that they have here."""
    return {
        name if index == 0 else f"{name}_{index}": tensor
        for name, attribute in (("conv", "conv_states"), ("recurrent", "recurrent_states"))
        for index, tensor in (getattr(real, attribute, None) or {}).items()
        if tensor is not None
    }


def check_states(layer: Layer, found: dict[str, Any], read_whole: list[str]) -> None:
    """The rows of a request: shapes, dtypes and bytes; of convolutions that are not ``read_whole``, transformers keeps one
    column more."""
    rows = {row.name: row for row in layer.state_rows()}
    assert found.keys() == rows.keys()
    found = {
        name: tensor[..., 1:] if name.startswith("conv") and name not in read_whole else tensor
        for name, tensor in found.items()
    }
    for name, tensor in found.items():
        assert rows[name].shape == tuple(tensor.shape[1:])
        assert rows[name].dtype == dtype_of(tensor)
        assert rows[name].row_nbytes == math.prod(tensor.shape) * tensor.element_size()
        if rows[name].heads:
            assert sum(number * width for number, width in rows[name].heads) == tensor.shape[1]


def check_compressed(layer: Layer, real: Any) -> None:
    """DeepSeek-V4: the raw rows of the window, and the entries, indexer keys and tails of both compressors."""
    (kind,) = layer.kinds
    assert isinstance(kind, Compressed)
    states = {row.name: row for row in layer.state_rows()}
    for raw in (real.keys, real.values):
        assert tuple(raw.shape[1:]) == (1, kind.window - 1, *states["swa"].shape)
        assert dtype_of(raw) == states["swa"].dtype
    entries = {row.name: row for row in layer.block_rows()}
    compressors = {"compressor": "", "indexer": "idx_"} if kind.index_dim else {"compressor": ""}
    if not kind.ratio:
        assert not entries
        return
    for name, prefix in compressors.items():
        row = entries["indexer_keys" if prefix else "entries"]
        kept = real.compressed_kv[name]
        assert tuple(kept.shape[1:]) == (TOKENS // row.tokens_per_row, *row.shape)
        assert dtype_of(kept) == row.dtype
        assert real.buffer_kv[name].shape[1] == TOKENS % row.tokens_per_row < row.tokens_per_row
        streams = [states[f"{prefix}tail_{part}"] for part in (("ka", "kb") if kind.overlap else ("ka",))]
        assert sum(stream.shape[0] for stream in streams) == real.buffer_kv[name].shape[-1]
        assert all(stream.count == kind.ratio - 1 for stream in streams)
        assert {stream.dtype for stream in streams} == {dtype_of(real.buffer_kv[name])}
        if kind.overlap:
            overlap = states[f"{prefix}overlap_k"]
            assert (overlap.count, *overlap.shape) == tuple(real.overlap_kv[name].shape[1:])


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bamba", dict(mamba_n_groups=2, mamba_d_head="auto")),
    ("deepseek_v4", dict(compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128})),
    ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2)),
    ("falcon", dict(multi_query=False)),
    ("falcon_h1", dict(mamba_d_ssm=None, mamba_d_head="auto")),
    ("gemma4_text", dict(attention_k_eq_v=True, num_global_key_value_heads=1, num_kv_shared_layers=0)),
    ("glm_moe_dsa", dict(index_topk_freq=2)),
    ("glm_moe_dsa", dict(indexer_types=["full", "shared", "shared", "full"])),
    ("gpt_bigcode", dict(multi_query=False)),
    ("llama", dict(head_dim=20, num_key_value_heads=1)),
    ("mistral", dict(sliding_window=None, head_dim=20)),
    ("mixtral", dict(sliding_window=8)),
    ("nemotron_h", dict(n_groups=2)),
    ("phi3", dict(sliding_window=8)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    ("qwen2_moe", dict(use_sliding_window=False)),
    ("qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    ("qwen3_moe", dict(use_sliding_window=False)),
    ("qwen3_next", dict(linear_key_head_dim=8, linear_value_head_dim=24)),
    ("smollm3", dict(use_sliding_window=True, no_rope_layer_interval=2)),
]  # fmt: skip
"""Families whose fields switch between several caches: the other settings."""


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {}) for name in TESTED if name not in {*NOT_MEASURED, *OWN_STATES}), *VARIANTS]
)
def test_what_a_forward_pass_keeps(name: str, changes: dict[str, Any]) -> None:
    config = config_of(name, **changes)
    assert Schema.from_hf_config(config) == Schema.from_hf_config(config.to_dict())
    schema = schema_of(config)
    torch.manual_seed(1)
    _, cache = forward(model_of(config), torch.randint(2, VOCAB, (1, TOKENS)))
    assert len(cache.layers) == len(schema.layers)
    for layer, real in zip(schema.layers, cache.layers, strict=True):
        if any(isinstance(kind, Compressed) for kind in layer.kinds):
            check_compressed(layer, real)
            continue
        check_rows(layer, real)
        check_states(layer, states_of(real), KEEPS_ALL_COLUMNS.get(name, []))
        for kind in layer.kinds:
            assert isinstance(kind, Attention | Latent | Recurrent | Shared)


@pytest.mark.parametrize("name", OWN_STATES)
def test_states_outside_of_the_cache_interface(name: str) -> None:
    """The widths of xLSTM's heads are those of its layers. transformers rounds those of its own cache up to a multiple of 64,
    which they are here."""
    config = config_of(name, **(dict(hidden_size=128, num_heads=2) if name == "xlstm" else {}))
    schema = Schema.from_hf_config(config)
    assert schema == Schema.from_hf_config(config.to_dict())
    model = model_of(config)
    with torch.no_grad():
        output = model(torch.randint(2, VOCAB, (1, TOKENS)), use_cache=True)
    by_layer = (
        [[state[..., index] for state in output.state] for index in range(len(schema.layers))]
        if families()[name].own_states == "stacked"
        else list(output[cache_name_of(model)].rnn_state.values())
    )
    for layer, tensors in zip(schema.layers, by_layer, strict=True):
        check_states(layer, dict(zip([row.name for row in layer.state_rows()], tensors, strict=True)), [])


WITH_STATES = {name for name, family in families().items() if family.states is not None}
WITH_CONVOLUTION = sorted(WITH_STATES - NOT_MEASURED.keys() - {*OWN_STATES})


@pytest.mark.parametrize("name", WITH_CONVOLUTION)
def test_the_oldest_convolution_column_is_never_read(name: str) -> None:
    """Which is why ours keep one column less; the exceptions do read it."""
    config = config_of(name)
    model = model_of(config)
    ids = torch.randint(2, VOCAB, (1, TOKENS))
    _, cache = forward(model, ids)
    for step in (1, 3):
        spoiled = copy.deepcopy(cache)
        for layer in spoiled.layers:
            for state, tensor in states_of(layer).items():
                if state.startswith("conv"):
                    tensor[..., 0] += 100
        fresh, _ = forward(model, ids[:, :step], copy.deepcopy(cache))
        found, _ = forward(model, ids[:, :step], spoiled)
        assert torch.equal(fresh, found) == (name not in KEEPS_ALL_COLUMNS)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_shared_layers_name_the_layer_that_really_writes(name: str) -> None:
    """Zeroing the K/V of all owners, and nothing else, is what the readers see: no other layer has rows of that type."""
    config = config_of(name)
    schema = Schema.from_hf_config(config)
    shared = [layer for layer in schema.layers if layer.owner != layer.index]
    assert len(shared) == config.num_kv_shared_layers
    modes = config.kv_sharing_modes
    for layer in shared:
        assert modes[layer.index] == "reuse" and modes[layer.owner] == "store"
        assert config.layer_types[layer.index] == config.layer_types[layer.owner] == layer.label


def test_tiny_and_more_cover_the_table() -> None:
    """``kimi_k2`` is what checkpoints call ``deepseek_v3``."""
    assert {*TESTED, "kimi_k2"} == set(families())
    assert families()["kimi_k2"] == families()["deepseek_v3"]
    assert not set(TINY_FAMILIES) & set(MORE)
