"""Scales of K and V: read from a checkpoint under every name that vLLM reads, and measured on running text."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from kvpagoda import KVCache, Limits, Schema  # noqa: E402
from kvpagoda.errors import BadInput, SchemaError  # noqa: E402
from kvpagoda.hf import Generator, calibrated_scales, checkpoint_scales  # noqa: E402
from kvpagoda.hf.runner import ModelRunner  # noqa: E402
from models import tiny_model  # noqa: E402
from raises import raises  # noqa: E402

NAMES = {
    "one tensor each": "model.layers.{}.self_attn.{}_scale",
    "of the attention module": "model.layers.{}.self_attn.attn.{}_scale",
    "beside a projection": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "beside a joined projection": "model.language_model.layers.{}.self_attn.qkv_proj.{}_scale",
    "beside a cache": "model.layers.{}.self_attn.{}_cache.scale",
    "of a mixer": "backbone.layers.{0}.mixer.{1}_proj.{1}_scale",
}


def schema() -> Schema:
    return Schema.from_hf_config(tiny_model("llama").config, dtype="float32", kv_format="fp8")


def stored(folder: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> Path:
    made = {key: torch.as_tensor(value, dtype=torch.float32) for key, value in tensors.items()}
    safetensors.save_file({**made, "model.layers.0.self_attn.q_scale": torch.tensor(9.0)}, folder / name)
    return folder


def of_layers(pattern: str, letters: str = "kv") -> dict[str, Any]:
    return {
        pattern.format(layer, letter): 0.5 + layer + 0.25 * (letter == "v") for layer in range(4) for letter in letters
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_vllm_reads(name: str, tmp_path: Path) -> None:
    more = {"vision_tower.layers.0.self_attn.k_scale": 7.0, "model.layers.0.mlp.down_proj.input_scale": 3.0}
    stored(tmp_path, {**of_layers(NAMES[name]), **more})
    scales = checkpoint_scales(tmp_path, schema())
    assert scales == {layer: (0.5 + layer, 0.75 + layer) for layer in range(4)}
    made = schema().scaled(scales)
    assert [rows.encoding.scale for rows in made.layers[2].block_rows()] == [2.5, 2.75]


def test_several_files_shapes_of_one_number_and_one_scale_for_both(tmp_path: Path) -> None:
    found = {key: [value] for key, value in of_layers("model.layers.{}.self_attn.{}_scale").items()}
    first = dict([*found.items()][:3])
    stored(tmp_path, first, "model-00001-of-00002.safetensors")
    stored(tmp_path, {key: found[key] for key in found.keys() - first}, "model-00002-of-00002.safetensors")
    assert checkpoint_scales(tmp_path, schema())[1] == (1.5, 1.75)
    for file in tmp_path.iterdir():
        file.unlink()
    stored(tmp_path, of_layers("model.layers.{}.self_attn.{}_scale", "k"))
    assert checkpoint_scales(tmp_path, schema())[1] == (1.5, 1.5)
    stored(tmp_path, {f"model.layers.{layer}.self_attn.kv_scale": 0.125 for layer in range(4)})
    assert checkpoint_scales(tmp_path, schema())[1] == (0.125, 0.125)


def test_layers_that_stay_raw_need_no_scales(tmp_path: Path) -> None:
    config = tiny_model("gemma3_text").config
    made = Schema.from_hf_config(config, dtype="float32", kv_format={"full": "fp8"})
    stored(tmp_path, {"model.layers.3.self_attn.k_scale": 0.5, "model.layers.3.self_attn.v_scale": 0.25})
    assert checkpoint_scales(tmp_path, made) == {3: (0.5, 0.25)}


def test_what_a_checkpoint_may_lack_or_have_wrong(tmp_path: Path) -> None:
    with raises(BadInput, needed=ANY):
        checkpoint_scales(tmp_path, schema())
    pattern, name = "model.layers.{}.self_attn.{}_scale", "model.layers.2.self_attn.v_scale"
    stored(tmp_path, {key: value for key, value in of_layers(pattern).items() if ".1." not in key})
    with raises(SchemaError, needed=4, available=3) as error:
        checkpoint_scales(tmp_path, schema())
    assert (error.value.needed, error.value.available) == (4, 3)
    stored(tmp_path, of_layers(pattern, "v"))
    with raises(SchemaError, needed=4, available=0):
        checkpoint_scales(tmp_path, schema())
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        stored(tmp_path, {**of_layers(pattern), name: bad})
        with raises(SchemaError, field="model.layers.2.self_attn.v_scale", needed=ANY if bad != bad else bad):
            checkpoint_scales(tmp_path, schema())
    stored(tmp_path, {**of_layers(pattern), name: [1.0, 2.0]})
    with raises(SchemaError, field="model.layers.2.self_attn.v_scale", needed=1, available=[2]):
        checkpoint_scales(tmp_path, schema())
    stored(tmp_path, {**of_layers(pattern), "model.layers.2.self_attn.attn.v_scale": 0.5})
    with raises(SchemaError, field="model.layers.2.self_attn.v_scale", needed=2.75, available=0.5):
        checkpoint_scales(tmp_path, schema())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_calibration_finds_the_largest_element_of_each_layer(name: str) -> None:
    """Against rows that are read back from a cache that keeps them all."""
    model, random = tiny_model(name), torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 90, (length,), generator=random).tolist() for length in (33, 5)]
    scales = calibrated_scales(
        model, texts, {"full": "fp8_e5m2", "window": "fp8"} if "gemma" in name else "fp8", step=8
    )
    raw = Schema.from_hf_config(model.config, dtype="float32")
    expected: dict[tuple[int, str], float] = {}
    for text in texts:
        cache = KVCache(raw, num_blocks=40, max_requests=1, device="cpu", limits=Limits(step_tokens=64), block_size=64)
        sequence = cache.open(text)
        ModelRunner(model, cache).step([(sequence, torch.tensor(text, dtype=torch.int32).numpy())])
        for layer in raw.layers:
            for row in layer.block_rows():
                most = cache.layer(layer.index)[row.name].abs().max().item()
                expected[layer.index, row.name] = max(most, expected.get((layer.index, row.name), 0.0))
        cache.close()
    assert {*scales} == {layer for layer, _ in expected}
    for layer, pair in scales.items():
        top = 57344 if name == "gemma3_text" and raw.layers[layer].growth.name == "full" else 448
        for found, row in zip(pair, "kv"):
            assert found * top == pytest.approx(expected[layer, row], rel=1e-4)
    tokens = Generator(model, "8MiB", kv_format="fp8", kv_scales=dict.fromkeys(range(4), (1.0, 1.0)) | scales)
    assert len(tokens.generate([texts[0]], 3)[0]) == 3


def test_calibration_that_cannot_be() -> None:
    model = tiny_model("llama")
    with raises(BadInput, needed=[]):
        calibrated_scales(model, [])
    with raises(BadInput, needed=[3, 0]):
        calibrated_scales(model, [[3, 4, 5], []])
    with raises(SchemaError, needed="int8"):
        calibrated_scales(model, [[3, 4]], "int8")
    for value in (0.0, float("nan")):
        with torch.no_grad():
            model = tiny_model("llama", seed=3)
            model.model.layers[1].self_attn.v_proj.weight.fill_(value)
        with raises(SchemaError, field="v", needed=ANY if value != value else value, available=1):
            calibrated_scales(model, [[3, 4, 5]])
