"""``kvpagoda audit`` on vLLM's own server with tiny models: clean with what vLLM has and with what is ours, not with a fault.

``make vllm`` runs this. A server is started once: a file says whether its fault strikes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make vllm installs it")
pytest.importorskip("httpx", reason="no httpx: the extra audit")

import tiny_vllm
import vllm_fault
from test_vllm_page import server, with_tokenizer

from kvpagoda.audit import Report, audit

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"num-gpu-blocks-override": 60, "max-model-len": 2048}),
    "gemma3_text": ({}, {"num-gpu-blocks-override": 240, "max-model-len": 2048, "dtype": "float32"}),
    # all experts for each token, so that rounding in bfloat16, all that it has on a CPU, chooses none; small, as a CPU without
    # AVX-512's bf16 takes seconds for a thousand tokens of a layer with states
    "qwen3_next": (
        dict(
            num_experts=2, initializer_range=0.1, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=1, linear_num_value_heads=2,
        ),
        {"num-gpu-blocks-override": 60, "max-model-len": 4096, "mamba-ssm-cache-dtype": tiny_vllm.STATES},
    ),
}  # fmt: skip
"""Kind of a model -> changes of its config, and its server's options."""
SCHEDULER = {"scheduler-cls": "kvpagoda.adapters.vllm.Scheduler"}
CONNECTOR = {
    "kv-transfer-config": json.dumps(
        {
            "kv_connector": "KvpagodaConnector", "kv_connector_module_path": "kvpagoda.adapters.vllm_connector",
            "kv_role": "kv_both", "kv_connector_extra_config": {"tiers": ["host:12MiB"]},
        }
    )
}  # fmt: skip
PLAIN = r"1\. The same prompt, asked again, gave other probabilities"
CHURNED = r"1\. After other prompts had filled the cache, the same prompt gave other probabilities"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that returns the folder of a model of a kind."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind: with_tokenizer(tiny_vllm.save(root, kind, **KINDS[kind][0]))


def set_unit(address: str) -> int:
    """The tokens of a block, as the server's own settings say."""
    with urlopen(f"{address}/metrics") as answer:
        (size,) = re.findall(r'vllm:cache_config_info\{.*[{,]block_size="(\d+)"', answer.read().decode())
    return int(size)


def first_line(report: Report) -> str:
    return next(iter(report.lines()))


@pytest.mark.parametrize(
    ("kind", "more", "fault", "found"),
    [
        pytest.param("llama", {}, "turned", PLAIN, id="full"),
        pytest.param("llama", SCHEDULER, "turned", PLAIN, id="full-scheduler"),
        pytest.param("llama", CONNECTOR, "loaded", CHURNED, id="full-connector"),
        pytest.param("gemma3_text", {}, "edge", PLAIN, id="windows"),
        pytest.param("gemma3_text", SCHEDULER | CONNECTOR, "edge", PLAIN, id="windows-both"),
        pytest.param("qwen3_next", {}, "uncopied", PLAIN, id="states"),
        pytest.param("qwen3_next", SCHEDULER | CONNECTOR, "uncopied", PLAIN, id="states-both"),
    ],
)
def test_a_server_is_clean_and_its_fault_is_found(
    kind: str, more: dict[str, str], fault: str, found: str, models: Callable[[str], str], tmp_path: Path
) -> None:
    options = {"enable-prompt-tokens-details": None, "max-num-seqs": 8, **KINDS[kind][1], **more}
    words = [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]
    path = vllm_fault.installed(tmp_path)
    with server(models(kind), tmp_path / "log", *map(str, words), path=path) as address:
        clean = audit(address, max_requests=200, seed=1)
        unit = set_unit(address)
        vllm_fault.choose(tmp_path, fault)
        wrong = audit(address, max_requests=200, seed=2)
    said = clean.to_dict()
    assert clean.code == 0 and not clean.findings, [*clean.lines()][:8]
    assert (said["hits"]["unit"], said["hits"]["least"]) == (unit, unit + 1)
    assert said["hits"]["share_found"] > (0.3 if kind == "qwen3_next" else 0.5)
    assert wrong.code == 1 and re.match(found, first_line(wrong)), [*wrong.lines()][:30]
