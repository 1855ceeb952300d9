"""Bytes of heads in every format that vLLM has too: those that the specs of the installed vLLM compute for the same layers.

vLLM runs in its own environment: ``.venv-vllm`` of ``make vllm``, or the folder that ``KVPAGODA_VLLM_VENV`` names; the Python
code of another version, of ``make consumers``, runs over the same dependencies.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpagoda import Schema

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("KVPAGODA_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
CONSUMERS = Path(os.environ.get("KVPAGODA_CONSUMERS", ROOT / ".venv-consumers"))
VERSIONS = ("installed", "consumers")
LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(
        model_type="llama", num_hidden_layers=4, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
    ),
    "gemma-3": dict(
        model_type="gemma3_text", num_hidden_layers=6, hidden_size=3840, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, sliding_window=1024, layer_types=[SLIDING] * 5 + [FULL],
    ),
    "gpt-oss": dict(
        model_type="gpt_oss", num_hidden_layers=4, hidden_size=2880, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL] * 2,
    ),
    "qwen3-next": dict(
        model_type="qwen3_next", num_hidden_layers=4, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, layer_types=[LINEAR] * 3 + [FULL], linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
}  # fmt: skip
DTYPES = ("bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")
BLOCK = 16


def layers_of(config: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """The layers with attention, from the fields of the config."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    types = config.get("layer_types") or [FULL] * config["num_hidden_layers"]
    return [
        {
            "heads": config["num_key_value_heads"], "dim": dim, "v_dim": dim, "block": BLOCK, "dtype": dtype,
            "window": config["sliding_window"] if each == SLIDING else None,
        }
        for each in types
        if each != LINEAR
    ]  # fmt: skip


@functools.cache
def by_vllm(version: str) -> dict[tuple[str, str], list[int]]:
    """(config, dtype) -> bytes of a page of each of its layers with attention. Skips where vLLM is not."""
    if not PYTHON.is_file():
        pytest.skip(f"no vLLM in {PYTHON.parents[1].name}: make vllm")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    if version == "consumers":
        found = sorted(CONSUMERS.glob("lib/python3*/site-packages/vllm"))
        if not found:
            pytest.skip(f"no vLLM in {CONSUMERS.name}: make consumers")
        environment["PYTHONPATH"] = str(found[0].parent)
    keys = [(name, dtype) for name in CONFIGS for dtype in DTYPES]
    layers = [layers_of(CONFIGS[name], dtype) for name, dtype in keys]
    given = json.dumps([one for of in layers for one in of])
    run = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("vllm_page_bytes.py"))], input=given, text=True, capture_output=True,
        env=environment, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    assert version == "installed" or answer["at"].startswith(str(CONSUMERS))
    numbers = iter(answer["nbytes"])
    return {key: [next(numbers) for _ in of] for key, of in zip(keys, layers)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_a_page_are_those_of_vllms_specs(name: str, dtype: str, version: str) -> None:
    kv_format = "raw" if dtype == "bfloat16" else dtype
    schema = Schema.from_hf_config(CONFIGS[name], dtype="bfloat16", kv_format=kv_format)
    ours = [
        sum(rows.row_nbytes for rows in layer.block_rows()) * BLOCK for layer in schema.layers if layer.block_rows()
    ]
    assert ours == by_vllm(version)[name, dtype]
    plan = schema.plan("4GiB", block_size=BLOCK)
    of_groups = [
        sum(place.nbytes for place in group.layout.places) for group in plan.groups if not group.growth.is_state
    ]
    assert sum(of_groups) == sum(ours), "the plan's records are these pages"
