"""What commands print with ``--json`` matches the JSON Schemas in ``docs/json``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from json_schema import FOLDER, schema_of, violations

pytest.importorskip("typer")

Command = Callable[..., "subprocess.CompletedProcess[str]"]
COMMANDS = {
    "version": ["--version"],
    "plan": ["plan", "deepseek-v4-flash"],
    "layout": ["layout", "sglang-mla,tp=2", "kvpagoda-mla"],
    "replay": ["replay", "--limit", "40", "--warm-up", "0.5", "--requests", "out.jsonl"],
    "replay_engine": ["replay", "--limit", "10", "--engine", "vllm-0.33,step_tokens=512", "--capacity", "900,2000"],
    "replay_schema": [
        "replay",
        "--limit",
        "10",
        "--schema",
        "qwen3-8b",
        "--budget",
        "1GiB,2GiB",
        "--policy",
        "lru,opt",
    ],
    "replay_workers": ["replay", "--limit", "10", "--schema", "qwen3-8b", "--budget", "1GiB", "--workers", "1"],
    "simulate": ["simulate", "--limit", "20", "--workers", "1,2", "--tier", "host:10GiB"],
    "doctor": ["doctor", "--tier", "host:64MiB"],
    "generate": ["generate", "--max-new-tokens", "2", "--prompts", "prompts.txt"],
    "top": ["top", "METRICS", "--once"],
    "tier": ["tier", "."],
    "bench": ["bench", "allocate", "--quick"],
}
SERVES = {"router", "audit"}
"""Commands that serve until they are stopped, and answer in JSON: ``tests/events/test_router.py`` has the answers; and one
that needs a server: ``tests/audit/test_audit_command.py``."""
NEEDS = {"top": "prometheus_client", "doctor": "torch", "generate": "transformers", "bench": "torch"}


@pytest.fixture
def run(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs ``kvpagoda`` in an empty folder, ``tmp_path``, and returns what it prints. ``bench``
    runs in a process of its own, as it starts one whose output ``here`` cannot read."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        if arguments[0] == "bench":
            command = [sys.executable, "-m", "kvpagoda", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        else:
            done = here(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def write_metrics(path: Path) -> None:
    """Write the metrics of a small cache to ``path``, as a Prometheus endpoint does."""
    from prometheus_client import CollectorRegistry, generate_latest

    from kvpagoda import KVCache, Schema
    from kvpagoda.metrics import CacheCollector
    from kvpagoda.schema import Attention, Layer

    schema, registry = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny"), CollectorRegistry()
    registry.register(CacheCollector(KVCache(schema, "64KiB", device="none")))
    path.write_bytes(generate_latest(registry))


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_as_described(name: str, run: Callable[..., str], tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if name == "top":
        write_metrics(tmp_path / "METRICS")
    (tmp_path / "prompts.txt").write_text("A block\nof a tree\n")
    printed = json.loads(run(*COMMANDS[name], "--json"))
    assert violations(printed, schema_of(name)) == []
    if name == "replay":
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        assert len(lines) == 40
        assert [text for line in lines for text in violations(json.loads(line), schema_of("replay_requests"))] == []


def test_models_without_growth_have_no_longest_context(run: Callable[..., str], tmp_path: Path) -> None:
    config = {
        "model_type": "mamba",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    printed = json.loads(run("plan", ".", "--json"))
    assert printed["longest_context"] is None and violations(printed, schema_of("plan")) == []


def test_every_description_belongs_to_a_command() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {
        *COMMANDS,
        "replay_requests",
        "replay_lines",
        "replay_traces",
        "top_sources",
        "audit",
        "bench_gpu",  # tests/test_bench_gpu.py: it needs a GPU, or what stands for one
    }


def test_every_command_has_a_description() -> None:
    from kvpagoda.cli import app

    names = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback is not None}
    assert names - SERVES - {"dashboard"} == {arguments[0] for arguments in COMMANDS.values()} - {"--version"}


def test_the_check_finds_what_is_wrong() -> None:
    schema = schema_of("doctor")
    good = {"broken": [], "findings": [{"name": "a", "state": "ok", "detail": ""}]}
    assert violations(good, schema) == []
    for bad, where in (
        ({**good, "broken": [3]}, "$.broken[0]"),
        ({**good, "more": 1}, "'more'"),
        ({"broken": []}, "'findings'"),
        ({**good, "findings": []}, "0 items"),
        ({**good, "findings": [{**good["findings"][0], "state": "fine"}]}, "'fine'"),
    ):
        (text,) = violations(bad, schema)
        assert where in text
    assert violations(True, {"type": "integer"}) and violations(-1, {"type": "integer", "minimum": 0})
