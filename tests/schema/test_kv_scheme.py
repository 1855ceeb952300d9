"""The format of rows that a checkpoint's config names, which engines follow unless they are told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from kvpagoda import Schema
from kvpagoda.cli import app
from kvpagoda.errors import SchemaError
from raises import raises

S, F = "sliding_attention", "full_attention"
LLAMA_70B: dict[str, Any] = dict(
    model_type="llama", num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8
)
LAGUNA: dict[str, Any] = dict(
    model_type="laguna", num_hidden_layers=48, hidden_size=3072, num_attention_heads=48, num_key_value_heads=8,
    head_dim=128, sliding_window=512, layer_types=[F, S, S, S] * 12, num_attention_heads_per_layer=[48, 72, 72, 72] * 12,
)  # fmt: skip
GEMMA_31B: dict[str, Any] = dict(
    model_type="gemma4_text", num_hidden_layers=60, hidden_size=5376, num_attention_heads=32, num_key_value_heads=16,
    num_global_key_value_heads=4, head_dim=256, global_head_dim=512, attention_k_eq_v=True, sliding_window=1024,
    layer_types=[S, S, S, S, S, F] * 10, num_kv_shared_layers=0,
)  # fmt: skip
FP8 = {"type": "float", "num_bits": 8, "dynamic": False, "strategy": "tensor", "symmetric": True}


def quantised(method: str | None, config: dict[str, Any] = LLAMA_70B, /, **fields: Any) -> dict[str, Any]:
    return {**config, "quantization_config": {"quant_method": method, **fields}}


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (quantised("compressed-tensors", LAGUNA, kv_cache_scheme=FP8), 48 * 8 * 128 * 2),
        (
            quantised("modelopt", GEMMA_31B, quant_algo="NVFP4", kv_cache_scheme=FP8),
            50 * 16 * 256 * 2 + 10 * 4 * 512 * 2,
        ),
        (quantised("modelopt", kv_cache_quant_algo="FP8"), 80 * 8 * 128 * 2),
        (quantised("compressed_tensors", kv_cache_scheme={**FP8, "strategy": "attn_head"}), 80 * 8 * 128 * 2),
        (quantised("modelopt_fp4", kv_cache_scheme={"type": "float", "num_bits": 4}), 80 * 8 * 2 * (64 + 8)),
        (quantised("modelopt_fp4", kv_cache_quant_algo="nvfp4"), 80 * 8 * 2 * (64 + 8)),
        ({**LLAMA_70B, "compression_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}}, 163840),
        ({"text_config": quantised("modelopt", kv_cache_quant_algo="FP8")}, 163840),
        (quantised(None, producer={"name": "modelopt"}, quantization={"kv_cache_quant_algo": "FP8"}), 163840),
    ],
)
def test_rows_are_as_the_checkpoint_says(config: dict[str, Any], nbytes: int) -> None:
    schema = Schema.from_hf_config(config)
    assert schema.bytes_per_token == nbytes
    assert schema.kv_scheme is not None and schema.kv_scheme.startswith("kv_cache_")
    assert Schema.from_hf_config(config, kv_format="raw").bytes_per_token > nbytes * 1.9
    assert Schema.from_hf_config(config, kv_format="raw").kv_scheme is None
    assert schema == Schema.from_hf_config(config, kv_format=schema.kv_scheme.split()[-1])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA_70B, None),
        ({**LLAMA_70B, "quantization_config": None}, None),
        (quantised("fp8"), None),
        (quantised("compressed-tensors", kv_cache_scheme=None), None),
        (quantised("modelopt", kv_cache_quant_algo=None), None),
        (
            quantised("modelopt", kv_cache_quant_algo="INT8"),
            "kv_cache_quant_algo: 'INT8' of modelopt, which vLLM passes over",
        ),
        (
            quantised("modelopt", kv_cache_scheme={**FP8, "dynamic": True}),
            "8-bit float of modelopt, which vLLM passes over",
        ),
        (quantised("quark", kv_cache_scheme=FP8), "8-bit float of quark, which vLLM passes over, so raw"),
        (quantised(None, kv_cache_scheme=FP8), "of a method without a name, which vLLM passes over, so raw"),
    ],
)
def test_what_vllm_passes_over_is_raw_and_said(config: dict[str, Any], said: str | None) -> None:
    schema = Schema.from_hf_config(config)
    assert schema.bytes_per_token == 80 * 8 * 128 * 4
    assert (schema.kv_scheme is None) if said is None else (said in str(schema.kv_scheme))


@pytest.mark.parametrize(
    "change", [{"num_bits": 4}, {"type": "int"}, {"symmetric": False}, {"strategy": "channel"}, {"num_bits": None}]
)
def test_schemes_that_vllm_refuses(change: dict[str, Any]) -> None:
    config = quantised("compressed-tensors", kv_cache_scheme={**FP8, **change})
    with raises(SchemaError, field="kv_cache_scheme", needed=ANY):
        Schema.from_hf_config(config)
    assert Schema.from_hf_config(config, kv_format="raw").bytes_per_token == 80 * 8 * 128 * 4


@pytest.mark.parametrize("value", [3, "fp8", [1], {"num_bits": [8], "type": "float"}, {"type": 4}, True])
@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors", 7])
def test_what_is_no_scheme(method: Any, value: Any) -> None:
    for fields in ({"kv_cache_scheme": value}, {"quantization": {"kv_cache_scheme": value}}, {"quantization": value}):
        try:
            schema = Schema.from_hf_config(quantised(method, **fields))
            assert schema.kv_scheme is None or value == "fp8" or schema.kv_scheme.endswith("passes over, so raw")
        except SchemaError as error:
            assert "kv_cache_scheme of compressed-tensors is" in str(error) or "quantization is" in str(error)


def test_a_scheme_reaches_what_has_a_form_and_mtp_layers() -> None:
    scheme = quantised("modelopt", kv_cache_quant_algo="FP8")["quantization_config"]
    mamba = dict(model_type="mamba", num_hidden_layers=2, hidden_size=64, quantization_config=scheme)
    assert Schema.from_hf_config(mamba).formats[0].format == "raw"
    qwen = dict(model_type="qwen3_next", num_hidden_layers=4, hidden_size=64, num_attention_heads=4, head_dim=16)
    mtp = Schema.from_hf_config({**qwen, "num_key_value_heads": 2, "quantization_config": scheme}, draft="mtp")
    assert [one.format for one in mtp.formats] == ["fp8_e4m3", "raw"] and mtp.formats[0].layers == (3, 4)


def test_the_plan_says_it_and_reads_the_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))

    def run(*more: str) -> str:
        answer = CliRunner().invoke(app, ["plan", str(tmp_path), *more])
        assert answer.exit_code == 0, answer.output
        return answer.output

    assert "kv format            kv_cache_quant_algo: 'FP8' of modelopt, so fp8" in run()
    told = json.loads(run("--json"))
    assert (told["kv_scheme"], told["bytes_per_token"]) == ("kv_cache_quant_algo: 'FP8' of modelopt, so fp8", 163840)
    raw = json.loads(run("--json", "--kv-format", "raw"))
    assert (raw["kv_scheme"], raw["bytes_per_token"]) == (None, 327680)
    own = quantised("compressed-tensors", kv_cache_scheme=None)
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert json.loads(run("--json"))["kv_scheme"] is None  # the config's own goes before the file beside it
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with raises(SchemaError, needed="list"):
        Schema.from_hf_config(tmp_path)
