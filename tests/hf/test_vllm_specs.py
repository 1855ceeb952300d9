"""Bytes of our schemas beside the specs of an installed vLLM: what was recorded holds, and a difference has a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from vllm_specs import EXPLAINED, PUBLISHED, PYTHON, RESULT, SERVED, SGLANG, TOLD, ask, compared, configs, ours, reason

from kvpagoda.schema.families import model_types, served_types
from kvpagoda.schema.presets import presets
from more_models import NEWEST

RESULTS: dict[str, Any] = json.loads(RESULT.read_text())
RECORDED: dict[str, Any] = RESULTS["types"]
ASKED = configs()
SAMPLE = ("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "mamba2", "qwen3_next")
"""Types with latents, windows, heads and states; all of them take minutes."""


def test_every_type_was_asked_for() -> None:
    assert RECORDED.keys() == ASKED.keys() == model_types().keys() - NEWEST


def test_why_a_type_was_not_built_is_known() -> None:
    """A new error has a reason of its own in ``reason``."""
    assert all(row["absent"] != reason("") for row in RECORDED.values() if "absent" in row)
    assert not TOLD.keys() - RECORDED.keys()


def test_sglang_keeps_the_same_rows_of_a_type_that_vllm_has_in_part() -> None:
    """Its states have the hidden state of one token, in bfloat16, where transformers' have half the values of a K/V head."""
    assert RESULTS["sglang"]["sizes"].keys() == SGLANG.keys() == {"zaya"}
    sizes, own, config = RESULTS["sglang"]["sizes"]["zaya"], ours(ASKED["zaya"]), ASKED["zaya"]
    assert sizes["token"] == own["full"] + own["window(8)"]
    values = config["num_key_value_heads"] * config["head_dim"] // 2
    assert sizes["state"] - own["state"] == 2 * config["num_hidden_layers"] * (config["hidden_size"] - values)


@pytest.mark.parametrize("name", sorted(name for name, row in RECORDED.items() if "ours" in row))
def test_our_bytes_are_vllms_or_the_difference_is_explained(name: str) -> None:
    row, own = RECORDED[name], ours(ASKED[name])
    assert own == row["ours"], "run python tests/hf/vllm_specs.py"
    assert (own == row["vllm"]) == (name not in EXPLAINED)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_presets_of_types_that_transformers_does_not_run(name: str) -> None:
    row, own = RESULTS["presets"][name], ours(name)
    assert own == row["ours"], "run python tests/hf/vllm_specs.py"
    assert (own == row["vllm"]) == (name not in EXPLAINED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_configs_as_they_are_published(name: str) -> None:
    row = RESULTS["published"][name]
    assert ours(PUBLISHED[name][0]) == row["ours"] == row["vllm"]


def test_a_preset_that_no_engine_was_asked_about_says_so() -> None:
    unverified = {name for name, row in presets().items() if "unverified" in row}
    asked = {name for name, row in presets().items() if row["config"]["model_type"] in {*served_types(), "kimi_linear"}}
    assert asked - unverified == SERVED.keys() == RESULTS["presets"].keys() and unverified <= asked


def test_only_differences_are_explained() -> None:
    assert EXPLAINED.keys() <= {name for name, row in RECORDED.items() if "ours" in row} | SERVED.keys()


def test_a_config_of_an_engine_is_the_presets_config() -> None:
    """But for the name of its type, and layers that are listed in another form."""
    for name, asked in SERVED.items():
        asked = asked.get("text_config", asked)
        for field, value in presets()[name]["config"].items():
            if field not in ("model_type", "linear_attn_config"):
                assert asked[field] == value, (name, field)


def test_the_installed_vllm_says_so_again() -> None:
    if not PYTHON.exists():
        pytest.skip("no vLLM here: make vllm, or KVPAGODA_VLLM_PYTHON")
    answer = ask({name: ASKED[name] for name in SAMPLE})
    assert {name: found.get("absent") for name, found in answer["specs"].items()} == dict.fromkeys(SAMPLE)
    if answer["vllm"] != json.loads(RESULT.read_text())["vllm"]:
        pytest.skip(f"recorded of another vLLM than {answer['vllm']}")
    assert compared(answer, ASKED) == {name: RECORDED[name] for name in SAMPLE}
