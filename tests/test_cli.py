"""The command line: tables, JSON, and one clear line with exit code 2 on bad input.

An import of transformers takes seconds, so most commands run in the test process and only some in their own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpagoda.errors import BadInput

pytest.importorskip("typer")

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip


def kvpagoda(*arguments: str, width: int = 100) -> subprocess.CompletedProcess[str]:
    """Run ``kvpagoda`` in a process of its own, in a terminal of ``width`` columns."""
    env = {
        **os.environ,
        "COLUMNS": str(width),
        "TERM": "dumb",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "kvpagoda", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the config of a Llama model."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_plan_prints_a_table(llama: Path, here: Command) -> None:
    done = here("plan", str(llama), "--budget", "40GiB", "--max-requests", "256", "--lengths", "8192")
    assert done.returncode == 0 and not done.stderr
    assert "full_attention      32  131,072          0" in done.stdout
    assert "longest context      131,072 tokens (the model's own limit)" in done.stdout
    assert "at 8,192 tokens      39 requests" in done.stdout and "int64 offsets        full" in done.stdout


def test_plan_as_json_divides_over_ranks(llama: Path, here: Command) -> None:
    whole = json.loads(here("plan", str(llama), "--json").stdout)
    part = json.loads(here("plan", str(llama / "config.json"), "--json", "--tp", "4", "--pp", "2").stdout)
    assert whole["bytes_per_token"] == 131_072 == part["bytes_per_token"] * 8
    assert part["layer_kinds"] == [
        {"label": "full_attention", "num_layers": 16, "bytes_per_token": 16384.0, "state_bytes_per_request": 0}
    ]


def test_plan_takes_a_format_for_each_layer_kind(here: Command) -> None:
    made = json.loads(here("plan", "gpt-oss-20b", "--kv-format", "full=fp8,window=raw", "--json").stdout)
    assert made["bytes_per_token"] == 36_864 and [one["format"] for one in made["formats"]] == ["fp8_e4m3", "raw"]
    wrong = here("plan", "gpt-oss-20b", "--kv-format", "chunk=fp8")
    assert wrong.returncode == 2 and "a gpt_oss model has none; it has: 12 window, 12 full" in wrong.stderr


@pytest.mark.parametrize(("name", "per_token"), [("deepseek-v4-flash", 3514), ("deepseek-v4-pro", 5031)])
def test_plan_knows_presets(name: str, per_token: int, here: Command) -> None:
    made = json.loads(here("plan", name, "--kv-format", "fp8", "--json").stdout)
    assert int(made["bytes_per_token"]) == per_token and made["hit_granularity"] == 128


def test_presets_are_configs_of_known_models() -> None:
    from kvpagoda.schema import Schema
    from kvpagoda.schema.presets import find_preset, presets

    per_token = {}
    for name, entry in presets().items():
        config = entry["config"]
        schema = Schema.from_hf_config(config)
        assert len(schema.layers) == config["num_hidden_layers"] and schema.vocab_size
        assert schema.max_positions or not schema.groups  # states take texts of any length
        assert find_preset(entry["hub"]) == (name, config) == find_preset(name.upper())
        per_token[name] = schema.bytes_per_token
    assert len(per_token) >= 20
    published = {  # K and V, 2 bytes each: layers x heads x dims x 4; MLA: layers x (512 + 64) x 2
        "llama-3.1-8b": 32 * 8 * 128 * 4, "qwen3-235b-a22b": 94 * 4 * 128 * 4, "deepseek-v3": 61 * 576 * 2,
        "gpt-oss-120b": 36 * 8 * 64 * 4, "qwen3-next-80b-a3b": 12 * 2 * 256 * 4,
    }  # fmt: skip
    assert {name: per_token[name] for name in published} == published


def test_plan_says_which_presets_are_unverified(here: Command) -> None:
    assert "unverified: neither vLLM" in here("plan", "rwkv7-world-2.9b").stderr
    assert "unverified" not in here("plan", "kimi-k3").stderr


def test_plan_says_what_a_plan_of_the_type_does_not_do(here: Command, tmp_path: Path) -> None:
    from kvpagoda.schema.presets import presets

    told = "nothing between the prompt and the window of what is generated is freed"
    assert told in here("plan", "unlimited-ocr").stderr
    config = tmp_path / "config.json"
    config.write_text(json.dumps(presets()["unlimited-ocr"]["config"]))
    assert told in here("plan", str(config)).stderr
    assert "verify_width above 0 is refused" in here("plan", "glm-5.3-flash").stderr
    assert not here("plan", "kimi-k3").stderr


def test_plan_takes_a_preset_by_its_name_on_the_hub(here: Command) -> None:
    made = json.loads(here("plan", "meta-llama/Llama-3.1-8B", "--json", "--dtype", "float32").stdout)
    assert made["schema"] == "llama-3.1-8b" and made["bytes_per_token"] == 2 * 131_072
    assert "gpt-oss-120b" in here("plan", "--presets").stdout.split()


def test_plan_counts_no_request_beyond_the_model_s_limit(here: Command) -> None:
    made = json.loads(here("plan", "qwen3-8b", "--json", "--lengths", "40960,40961").stdout)
    assert made["requests_at"]["40960"] > 0 and made["requests_at"]["40961"] == 0
    assert (
        "at 40,961 tokens     0 (the model's limit is lower)" in here("plan", "qwen3-8b", "--lengths", "40961").stdout
    )


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "gemma-3-27b", "llama-3.1-8b"])
def test_plan_fits_the_terminal(model: str, width: int, here: Command) -> None:
    shown = here("plan", model, width=width).stdout
    assert all(len(line) <= width for line in shown.splitlines())
    widest = here("plan", model, width=160).stdout
    assert set(re.findall(r"[0-9][0-9,.]*", shown)) == set(re.findall(r"[0-9][0-9,.]*", widest)), "no number is cut"


def test_version(here: Command) -> None:
    from kvpagoda.version import installed

    done = here("--version")
    assert done.returncode == 0 and done.stdout == f"{installed()}\n"


def test_plan_says_of_every_kernel_that_it_fits(here: Command) -> None:
    shown = here("plan", "qwen3-8b", "--kernel", "fa3", "--kernel", "trtllm-gqa-sm100", width=160).stdout
    assert "flash_attention_3 reads attention in place, pages of 16 tokens" in shown
    assert "flashinfer_trtllm_gqa on sm100 reads attention in place, pages of 16 tokens" in shown
    made = json.loads(here("plan", "qwen3-next-80b-a3b", "--kernel", "fla", "--json").stdout)
    assert made["kernels"] == ["fla reads recurrent in place, states"]


def test_the_dashboard_is_printed(here: Command) -> None:
    from kvpagoda.metrics import dashboard

    done = here("dashboard")
    assert json.loads(done.stdout) == json.loads(dashboard()) and len(json.loads(done.stdout)["panels"]) == 18


BAD = {
    "hub name": (["plan", "some-lab/Some-Model"], "hf download some-lab/Some-Model config.json"),
    "near a preset": (["plan", "qwen3-8"], "did you mean 'qwen3-8b'?"),
    "dtype": (["plan", "deepseek-v4-flash", "--dtype", "banana"], "unknown dtype 'banana'"),
    "near a dtype": (["plan", "qwen3-8b", "--dtype", "bfloat"], "did you mean 'bfloat16'?"),
    "dtype of a preset": (["plan", "qwen3-8b", "--dtype", "banana"], "unknown dtype 'banana'"),
    "dtype of packed rows": (
        ["plan", "deepseek-v4-pro", "--kv-format", "fp8", "--dtype", "float32"],
        "is for raw rows",
    ),
    "json before a command": (["--json", "plan", "qwen3-8b"], "goes with --version"),
    "no argument": (["plan"], "Missing argument"),
    "no number": (["plan", "qwen3-8b", "--max-requests", "many"], "'--max-requests'"),
    "no such command": (["plna"], "Did you mean 'plan'"),
    "no such file": (["plan", "nowhere"], "no config at 'nowhere'"),
    "unknown model": (["plan", "unknown.json"], "'no_such_model'"),
    "missing field": (["plan", "missing.json"], "num_hidden_layers"),
    "absurd field": (["plan", "absurd.json"], "num_key_value_heads"),
    "not json": (["plan", "text.json"], "is not JSON"),
    "not an object": (["plan", "list.json"], "must hold a JSON object"),
    "deep": (["plan", "deep.json"], "deep.json is not JSON that can be read: it is nested too deeply"),
    "bytes": (["plan", "bytes.json"], "bytes.json is no text: its byte 3 (0xff) is not UTF-8"),
    "size": (["plan", "config.json", "--budget", "many"], "cannot read 'many' as a size"),
    "too small": (["plan", "config.json", "--budget", "1MiB"], "one request of up to 16 tokens needs 4,194,304 bytes"),
    "no requests": (["plan", "config.json", "--max-requests", "0"], "max_requests must be a positive whole number"),
    "block": (["plan", "deepseek-v4-pro", "--block-size", "100"], "multiple of 128"),
    "ranks": (["plan", "config.json", "--tp", "3"], "cannot be divided over 3"),
    "stages": (["plan", "config.json", "--pp", "99"], "pp=99"),
    "lengths": (["plan", "config.json", "--lengths", "a,b"], "whole numbers"),
    "format": (["plan", "config.json", "--kv-format", "fp3"], "fp3"),
    "kernels that other layouts suit": (
        ["plan", "deepseek-v3.2", "--kernel", "flashmla-sparse-sm100", "--kernel", "deepgemm-indexer-sm90"],
        "it fits with --layout flashmla-v32,deepgemm-indexer",
    ),
    "a kernel that no layout suits": (["plan", "qwen3-8b", "--kernel", "flashmla-dense"], "no layer keeps such rows\n"),
    "no such kernel": (["plan", "qwen3-8b", "--kernel", "fa9"], "flash_attention_3 (fa3), flash_attention_3_qv"),
    "nearly a kernel": (["plan", "qwen3-8b", "--kernel", "flash_attn3"], "did you mean 'flash_attn_3'?\n"),
    "layout": (["layout", "flashmla-v23"], "did you mean 'flashmla-v32'"),
    "layout size": (["layout", "trtllm,head_dim"], "write NAME,size=number"),
    "layout file": (["layout", "nowhere.json"], "nowhere.json"),
    "layout of a list": (["layout", "list.json"], "not a layout"),
    "layout of bytes": (["layout", "bytes.json"], "bytes.json is no text"),
    "deep layout": (["layout", "deep.json"], "not a layout"),
    "deep workers": (["router", "--workers", "deep.json"], "deep.json must hold JSON like"),
    "deep costs": (["simulate", "--limit", "3", "--costs", "deep.json"], "deep.json must hold a JSON object"),
    "costs of bytes": (["simulate", "--limit", "3", "--costs", "bytes.json"], "bytes.json is no text"),
    "metrics of bytes": (["top", "--once", "bytes.json"], "bytes.json is no text"),
    "other content": (
        ["layout", "trtllm", "flashmla-v32"],
        "has the parts k, v; the target has code, scale, rope: code, k, rope, scale, v not in both",
    ),
    "model": (["generate", "--model", "nowhere/at-all"], "cannot load 'nowhere/at-all'"),
    "prompts": (["generate", "--prompts", "nowhere.txt"], "nowhere.txt"),
    "prompts of bytes": (["generate", "--prompts", "bytes.json"], "bytes.json is no text"),
    "empty prompts": (["generate", "--prompts", "empty.txt"], "has no prompts"),
    "budget": (["generate", "--budget", "1KiB"], "needs"),
    "prompt too long": (["generate", "--prompts", "long.txt", "--max-new-tokens", "2"], "longest context of 8192"),
    "no new tokens": (["generate", "--max-new-tokens", "0"], "max_new_tokens must be a positive whole number"),
    "temperature": (["generate", "--temperature", "-1"], "temperature >= 0"),
}


OWN_PROCESS = {"size"}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, llama: Path, monkeypatch: pytest.MonkeyPatch, here: Command
) -> None:
    monkeypatch.chdir(llama)
    for name, changes in (
        ("unknown", {"model_type": "no_such_model"}),
        ("missing", {"num_hidden_layers": None}),
        ("absurd", {"num_key_value_heads": -3}),
    ):
        kept = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
        Path(f"{name}.json").write_text(json.dumps(kept))
    Path("text.json").write_text("not json")
    Path("list.json").write_text("[1]")
    Path("deep.json").write_text('{"a":' * 50_000)
    Path("bytes.json").write_bytes(b"{}\n\xff\xfe")
    Path("empty.txt").write_text("\n\n")
    Path("long.txt").write_text("x" * 9000)
    arguments, message = BAD[case]
    done = (kvpagoda if case in OWN_PROCESS else here)(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_help_groups_its_options_and_names_the_engines(here: Command) -> None:
    from kvpagoda.replay import POLICIES, PROFILES

    for name, panels in (
        ("replay", ["A cache of blocks", "A cache with a model's layers", "Which requests", "Files to write"]),
        ("simulate", ["Cache", "Workers and their steps", "Which requests"]),
        ("plan", ["Model", "Memory and requests", "Ranks"]),
        ("generate", ["Model", "Prompts and answers", "Cache"]),
    ):
        shown = here(name, "--help", width=80).stdout
        lines = shown.splitlines()
        heads = [line.strip("╭─╮ ") for line in lines if line.startswith("╭─")]
        assert [head for head in heads if head in panels] == panels and max(map(len, lines)) <= 80 and "…" not in shown
        text = shown[: shown.index("╭─")].strip().split("\n")
        paragraphs = "\n".join(line.strip() for line in text).split("\n\n")
        assert all(len(line) > 50 for paragraph in paragraphs for line in paragraph.split("\n")[:-1]), "no stray breaks"
        if "--engine" in shown:
            words = " ".join(shown.replace("│", " ").split())
            assert ", ".join(PROFILES) in words and ", ".join(POLICIES[:8]) in words


WRITES = {
    "version": ["--version"],
    "presets": ["plan", "--presets"],
    "plan": ["plan", "qwen3-8b"],
    "help": ["replay", "--help"],
    "replay": ["replay", "--limit", "30", "--policy", "lru"],
    "folder": ["tier", str(Path(__file__).parent / "hints")],
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("case", WRITES)
def test_an_output_that_takes_nothing_is_an_error_in_one_line(
    case: str, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = here(*WRITES[case])
        monkeypatch.undo()
    assert done.returncode == 2 and done.stderr == "kvpagoda: [Errno 28] No space left on device\n"


def test_the_interpreter_does_not_complain_about_an_output_at_its_end() -> None:
    command = [sys.executable, "-m", "kvpagoda", *WRITES["replay"]]
    reading, writing = os.pipe()
    os.close(reading)
    for out, code, said in ((open("/dev/full", "w"), 2, "No space left"), (open(writing, "w"), 1, "")):  # noqa: SIM115
        with out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == (code == 2)


def test_layout_prints_where_elements_are_and_what_a_copy_costs(here: Command) -> None:
    pair = "vllm-flashinfer,layers=2,tp=2", "trtllm,layers=2,page_size=16"
    done = here("layout", *pair)
    assert done.returncode == 0 and not done.stderr
    assert "source, rank 0 of 2: vllm-flashinfer, raw: 1,048,576 bytes" in done.stdout
    assert "0           L: 2 layers, 524,288 bytes apart" in done.stdout
    assert "copy: 2.0 MiB in 8,192 spans of 256 bytes" in done.stdout
    found = json.loads(here("layout", *pair, "--json").stdout)
    assert [len(found["source"]), len(found["target"]), found["copy"]["spans"]] == [2, 1, 8192]
    assert found["copy"]["target"] == found["target"][0]["follows"]["fingerprint"]
    assert "37,376      64 bytes of padding" in here("layout", "flashmla-dsv4").stdout


def test_generate_runs_the_embedded_model() -> None:
    done = kvpagoda("generate", "--max-new-tokens", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [len(result["tokens"]) for result in found["results"]] == [3] * 4 and found["new_tokens"] == 12
    assert found["stats"]["running"] == 0 and found["stats"]["nbytes"] <= 64 << 20
    compared = found["comparison"]
    assert compared["num_same"] == compared["num_answers"] == 4 and "format_cost" not in found
    cold, warm, restarted = compared["runs"]
    assert cold["cached_tokens"] == 0 == warm["loaded_tokens"]
    assert restarted["loaded_tokens"] == restarted["cached_tokens"] == warm["cached_tokens"]
    assert warm["cached_tokens"] > 0.9 * cold["prompt_tokens"], "what was computed is found"
    for run in (warm, restarted):
        assert run["first_token_seconds"] < cold["first_token_seconds"] / 5, "a difference that is plain"


def test_generate_says_what_a_format_saves_and_costs(
    tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("kvpagoda.hf.report"), "HELD_OUT_BYTES", 256)
    (tmp_path / "prompts.txt").write_text("The \n")
    done = here("generate", "--max-new-tokens", "2", "--prompts", str(tmp_path / "prompts.txt"), "--kv-format", "int8")
    lines = " ".join(done.stdout.split())
    assert done.returncode == 0 and not done.stderr
    assert re.search(r"int8: [\d,]+ bytes a token instead of [\d,]+ \(float32\), \d\d% saved", lines)
    assert re.search(r"[+-]0\.\d{4} bits for each of [\d,]+ bytes of text it was not trained on", lines)
    assert "1 of 1 answers (2 tokens in all) are the same in all 3 runs" in lines


def test_warnings_about_retries_of_the_hub_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    from kvpagoda.hf import report

    def unreachable(name: str, **_: object) -> None:
        told.append(logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING))
        raise OSError("no way to the hub\nand more")

    told: list[bool] = []
    monkeypatch.setattr(auto, "from_pretrained", unreachable)
    with pytest.raises(BadInput):
        report.load("some/model", "float32")
    assert told == [False]


@pytest.mark.parametrize("width", [40, 60, 120])
def test_generate_fits_the_terminal(width: int, tmp_path: Path, here: Command) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n" + "two " * 50 + "\n")
    done = here("generate", "--max-new-tokens", "2", "--prompts", str(prompts), width=width)
    assert done.returncode == 0 and not done.stderr
    assert all(len(line) <= width for line in done.stdout.splitlines())
    assert "\x1b" not in done.stdout
    lines = " ".join(done.stdout.split())
    assert "2 prompts of 3 to 200 tokens" in lines and "2 of 2 answers (4 tokens in all) are the same" in lines
    bars = [line.split() for line in done.stdout.splitlines() if line.startswith(("cold", "warm", "restarted"))]
    if width >= 60:
        assert [bar[0] for bar in bars] == ["cold", "warm", "restarted"] and "█" in bars[0][1]
        assert [bar[-3:] for bar in bars] == [["203", "0", "0"], ["75", "128", "0"], ["75", "0", "128"]]


@pytest.mark.parametrize("command", [[], ["plan"], ["layout"], ["generate"]])
def test_help(command: list[str], here: Command) -> None:
    done = here(*command, "--help")
    assert done.returncode == 0 and "Usage" in done.stdout


def test_without_a_command_the_help_is_shown(here: Command) -> None:
    done = here()
    assert done.returncode == 0 and done.stdout == here("--help").stdout and not done.stderr


def test_generate_loads_a_model_from_a_folder(tmp_path: Path, here: Command) -> None:
    """Runs the real loading code on a saved tiny checkpoint with its tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from models import tiny_model

    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    vocabulary = {chr(97 + i): i for i in range(26)} | {"[UNK]": 26}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    (tmp_path / "prompts.txt").write_text("a b c\nz\n")
    done = here(
        "generate", "--model", str(tmp_path), "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "4", "--json",
        "--budget", "1MiB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    import torch

    for result, prompt in zip(json.loads(done.stdout)["results"], ([0, 1, 2], [25])):
        ids = torch.tensor([prompt])
        own = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        assert result["tokens"] == own[0, len(prompt) :].tolist()


def test_generate_with_a_tier_finds_it_again_the_next_time(tmp_path: Path, here: Command) -> None:
    """With tiers of the user's there is one run, and the next process finds what they keep."""
    (tmp_path / "prompts.txt").write_text("two " * 50 + "\n")
    arguments = ["generate", "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "2"]
    arguments += ["--tier", f"disk:{tmp_path}/tier:64MiB"]
    found = json.loads(here(*arguments, "--json").stdout)
    assert "comparison" not in found and found["stats"]["cached_tokens"] == 0
    assert 0 < found["first_token_seconds"] <= found["seconds"]
    shown = here(*arguments).stdout
    assert "128 found in the cache" in shown and "128 tokens loaded from tiers; disk:" in shown
    assert "s to the first token" in shown


def test_generate_draws_several_answers_for_a_prompt(tmp_path: Path, here: Command) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    arguments = ["generate", "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "4", "--lookup", "2"]
    arguments += ["--max-requests", "6", "--samples", "3", "--temperature", "1", "--seed", "7", "--json"]
    done = here(*arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [result["prompt"] for result in found["results"]] == ["one"] * 3 + ["two"] * 3
    assert len({tuple(result["tokens"]) for result in found["results"]}) == 6 and found["new_tokens"] == 24
    assert found["comparison"]["num_same"] == 6, "the three runs sample from the same seeds"
    assert found["stats"]["computed_tokens"] == 2 * 3 + 6 * 3 and found["accepted_tokens"] <= found["proposed_tokens"]
