"""docs/vllm.md as a new user follows it, in the installed vLLM with a tiny model: its program, its servers, a restart.

``make vllm`` runs this. What the page says is run word by word, but for names and sizes of folders, and a port.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make vllm installs it")

import numpy as np
import tiny_vllm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT / "src"), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO",
}  # fmt: skip
START_SECONDS, STEP = 500, 0.5
TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model and a tokenizer."""
    return with_tokenizer(tiny_vllm.save(tmp_path_factory.mktemp("models"), "llama"))


def with_tokenizer(folder: str) -> str:
    """Put a tokenizer into the folder of a model, each of whose tokens is a word, and return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 512)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return folder


def command(option: str) -> list[str]:
    """The words after ``vllm serve MODEL`` of the first command on the page that has ``option``."""
    blocks = re.findall(r"vllm serve MODEL (.*?)\n```", PAGE, re.DOTALL)
    text = next(block for block in blocks if option in block)
    return shlex.split(text.replace("\\\n", " "), comments=True)


@contextmanager
def server(model: str, log: Path, *options: str, path: str = "") -> Iterator[str]:
    """vLLM's server, as the page starts it where ``vllm serve`` does not work; its address. ``path``: what more it may
    import from."""
    (words,) = re.findall(r"^(python -m vllm\.\S+ --model) MODEL", PAGE, re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, *shlex.split(words)[1:], model, *options, "--enforce-eager", "--port", str(port)]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{path}"}
    with log.open("w") as out, subprocess.Popen(start, env=environment, stdout=out, stderr=out) as process:
        address, until = f"http://127.0.0.1:{port}", monotonic() + START_SECONDS
        try:
            while True:
                try:
                    urlopen(f"{address}/health").close()
                    break
                except URLError:
                    assert process.poll() is None and monotonic() < until, log.read_text()[-4000:]
                    sleep(STEP)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def ask(address: str, model: str) -> str:
    prompt = " ".join(f"w{3 + number}" for number in range(TOKENS))
    said = json.dumps({"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    with urlopen(Request(f"{address}/v1/completions", said, {"Content-Type": "application/json"})) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def metrics(address: str) -> dict[str, float]:
    """Metric -> value; that of a tier by ``name/tier``."""
    with urlopen(f"{address}/metrics") as answer:
        lines = re.findall(r"^(vllm:\w+)\{(.*)\} (\S+)$", answer.read().decode(), re.MULTILINE)
    tiers = [re.search(r'tier="(\w+)"', labels) for _, labels, _ in lines]
    return {
        name + (f"/{tier[1]}" if tier else ""): float(value)
        for (name, _, value), tier in zip(lines, tiers, strict=True)
    }


def eventually(address: str, name: str, least: float) -> dict[str, float]:
    """The metrics when ``name`` is ``least``: vLLM tells of tiers when it steps, and at intervals."""
    until = monotonic() + 60
    while (found := metrics(address)).get(name, 0) < least and monotonic() < until:
        sleep(STEP)
    return found


def test_the_program_prints_what_the_page_says(model: str, tmp_path: Path) -> None:
    ((code, expected),) = re.findall(r"```python\n(from vllm.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "program.py").write_text(code.replace('"MODEL"', repr(model)))
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines(keepends=True) if "tokens were cached" in line]
    assert "".join(said) == expected
    assert done.stdout.count(" decides what stays in vLLM's cache: Options(policy='lfuda'") == 1


def test_a_server_finds_its_prompt_and_after_a_restart_on_the_disk(model: str, tmp_path: Path) -> None:
    tiers = [
        word.replace("/var/cache/kvpagoda:200GiB", f"{tmp_path}/cache:64MiB").replace("8GiB", "64MiB")
        for word in command("--kv-transfer-config")
    ]
    assert f"{tmp_path}/cache" in "".join(tiers)
    answers, prefix = list[str](), "vllm:kvpagoda_tier_"
    for number, (options, loaded) in enumerate((([*command("--scheduler-cls"), *tiers], 0), (tiers, 256))):
        with server(model, tmp_path / f"log {number}", *options) as address:
            answers += [ask(address, model), ask(address, model)]
            found = eventually(address, f"{prefix}num_records/disk", 2)
        assert found["vllm:prefix_cache_hits_total"] == 256 and found["vllm:prefix_cache_queries_total"] == 2 * TOKENS
        assert found[f"{prefix}loaded_tokens_total/disk"] == found["vllm:external_prefix_cache_hits_total"] == loaded
        assert {f"{prefix}{name}/{tier}" for name in tiers_metrics() for tier in ("host", "disk")} <= {*found}
        assert found[f"{prefix}num_records/disk"] == 2 and not found[f"{prefix}failed_total/disk"]
    assert len({*answers}) == 1
    assert "`vllm:prefix_cache_hits_total` is 256" in PAGE and "`vllm:prefix_cache_queries_total` 600" in PAGE
    first, second = ((tmp_path / f"log {number}").read_text() for number in (0, 1))
    groups = "groups of layers: 4 of FullAttentionSpec in blocks of 128 tokens"
    options = "Options(policy='lfuda', checkpoint_every=4096, promised=0.5, memory=None)"
    decides = f"decides what stays in vLLM's cache: {options}; {groups}"
    keeps = f"keeps vLLM's cache in tiers (kv_both): host, disk; records of 128 tokens of {groups}"
    assert re.findall(r"kvpagoda \d\S+ (.*)", first) == [keeps, decides]
    assert re.findall(r"kvpagoda \d\S+ (.*)", second) == [keeps]


def tiers_metrics() -> list[str]:
    """The names of a tier's metrics on the page, without what they begin with."""
    _, _, text = PAGE.partition("### Metrics")
    return re.findall(r"`(?:vllm:kvpagoda_tier)?_(\w+)`", text.partition("###")[0])


@pytest.mark.parametrize(("batched", "second"), [(8192, 0), (1152, 3456)])
def test_a_model_with_states_is_resumed_where_a_step_ended(batched: int, second: int, tmp_path: Path) -> None:
    """The numbers of the page. ``checkpoint_every`` keeps more of what there is, and makes no more of it."""

    def text(seed: int, length: int) -> list[int]:
        return [*map(int, np.random.default_rng(seed).integers(3, 500, length))]

    assert f"`--max-num-batched-tokens {max(batched, 8192)}`" in PAGE and tiny_vllm.BLOCK["qwen3_next"] == 1152
    ours = {"scheduler_cls": "kvpagoda.adapters.vllm.Scheduler", "max_model_len": 8192}
    options = {"kvpagoda": {"checkpoint_every": 1152}}
    model = tiny_vllm.save(tmp_path, "qwen3_next")
    with tiny_vllm.Engine(model, batched=batched, additional_config=options, **ours) as engine:
        long = text(1, 6000)
        prompts = [long, long[:3600] + text(2, 500), long[:3600] + text(3, 500), long + text(4, 50)]
        found = [engine.run([prompt], 2).cached[0] for prompt in prompts]
        engine.core.scheduler.kv_cache_manager.check()
    assert found == [0, second, 3456, 5760]
