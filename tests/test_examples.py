"""The examples run unchanged, and the claims of each are true."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LINES = {"engine": 300, "gpu_engine": 240}
"""Example -> the most lines that it may have; 150 for all others."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> Any:
    """Load an example from its file and return the module. By name it could be a folder of the tests."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look up their module here
    found.loader.exec_module(module)
    return module


def told(name: str) -> Any:
    """Run an example in this process and return what its ``main`` returns."""
    return example(name).main()


def told_without_torch(name: str) -> Any:
    """Run an example in a process without torch and return what its ``main`` returns."""
    code = "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1]); from {} import *; print(main())"
    done = subprocess.run(
        [sys.executable, "-c", code.format(name), str(EXAMPLES)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_all_examples_exist_and_are_short() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    names = {
        "engine",
        "gpu_engine",
        "speculate",
        "rollouts",
        "agents",
        "policy",
        "simulate",
        "sweep",
        "kernels",
        "tiny_model",
        "prefill_decode",
        "shared_prefix",
    }
    assert lengths.keys() == names
    assert not {name: n for name, n in lengths.items() if n > LINES.get(name, 150)}
    page = (EXAMPLES.parent / "docs" / "lifecycle.md").read_text()
    assert all(f"examples/{name}.py" in page for name in names - {"tiny_model"})


def test_a_sweep_on_ray_gives_what_the_command_gives(tmp_path: Path, here: Any) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for seed, path in enumerate(paths):
        random = np.random.default_rng(seed)
        lines = [
            {"timestamp": i, "input_length": 1500, "hash_ids": [int(random.integers(0, 5)), 10 + i % 7, 100 + i]}
            for i in range(80)
        ]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [*paths, "--capacity", "9,40", "--policy", "lru,s3fifo,opt"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "sweep.py"), *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, command = json.loads(done.stdout), json.loads(here("replay", *options, "--jobs", "1", "--json").stdout)
    assert not found["partial"] and not command["partial"]
    for mine, other in zip(found["traces"], command["traces"], strict=True):
        assert mine == {name: other[name] for name in mine} and len(mine["results"]) == 6
        assert any(result["block_hits"] and result["evictions"] for result in mine["results"])


def test_a_request_is_computed_in_one_process_and_answered_in_another() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "prefill_decode.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = {line[:36].strip(): line[36:].strip() for line in done.stdout.splitlines()}
    assert told == {
        "answers equal those of one process": "True", "tokens computed by prefill": "365", "tokens computed by decode": "150",
        "of these, for the answers": "60", "handed over": "4", "expired, computed again": "(1, 1)",
        "still running in prefill": "0",
    }  # fmt: skip


def test_engine_is_exact_under_pressure() -> None:
    counts = told("engine")
    assert counts["answers"] == counts["exact"] == 24
    for what in ("preempted", "forked", "accepted", "evicted blocks", "cached prompt tokens"):
        assert counts[what] > 0, what
    assert counts["accepted"] < counts["drafts"]  # rejected drafts were written, and no later step read them


def test_engine_detects_a_wrong_block() -> None:
    """The comparison of the example can fail: here one block of one layer gets the rows of another block."""
    engine, tiny_model = example("engine"), example("tiny_model")
    model = tiny_model.TinyModel()
    whole = engine.Engine(model, "80KiB")
    (answer,) = whole.submit(list(range(40)), 40)
    for _ in range(4):
        whole.step()
    assert answer.sequence is not None
    target, source = whole.cache.core.full.held_places(answer.sequence.slot)[:2].tolist()
    for field in whole.cache.layer(1).blocks.fields.values():
        field[target] = field[source]
    whole.run()
    assert not tiny_model.is_exact(model, np.array(answer.text), 40)


def test_gpu_engine_is_exact_while_requests_join_and_leave() -> None:
    counts = told("gpu_engine")
    assert counts["requests"] == counts["done"] == counts["exact"] == 20
    assert counts["ended by the stop token"] > 0 < counts["cached prompt tokens"]
    assert counts["written tokens"] / counts["steps"] > 4  # rows of a step in which a token is written; 6 at most


class Held:
    """A batch and its layers as a captured graph holds them: tensors at the addresses of one step, which it reads in all."""

    def __init__(self, batch: Any) -> None:
        self.positions, self.layers = batch.positions, []
        for view in map(batch.layer, (0, 1)):
            names = ("block_table", "cache_seqlens", "slot_mapping", "page_size", "step", "layer")
            self.layers.append(HeldLayer(view["k"], view["v"], **{name: getattr(view, name) for name in names}))

    def layer(self, index: int) -> Any:
        return self.layers[index]


class HeldLayer(SimpleNamespace):
    def __init__(self, k: Any, v: Any, **arrays: Any) -> None:
        super().__init__(**arrays)
        self.fields = {"k": k, "v": v}

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def write(self, **rows: Any) -> None:
        for name, values in rows.items():
            slots = self.slot_mapping
            self.fields[name][slots // self.page_size, slots % self.page_size] = values


@pytest.mark.parametrize("forgets", ["nothing", "block_table", "cache_seqlens", "slot_mapping"])
def test_what_a_captured_step_reads_has_one_address_and_is_sent_before_it(forgets: str) -> None:
    """Here each step computes over what the first one had. A loop that forgets to read an array, which sends it, is wrong."""
    gpu_engine, tiny_model = example("gpu_engine"), example("tiny_model")
    model = tiny_model.TinyModel()
    engine = gpu_engine.Engine(model, "2MiB", 6)
    compute, held = engine._compute, list[Held]()

    def replay(batch: Any) -> None:
        if not held:
            held.append(Held(batch))
        compute(held[0])

    def launch(batch: Any) -> None:
        for view in map(batch.layer, (0, 1)):
            for name in {"block_table", "cache_seqlens", "slot_mapping"} - {forgets}:
                getattr(view, name)
        replay(batch)
        engine.answers[engine.num_steps % 2].copy_(engine.chosen)

    engine._compute = replay
    if forgets != "nothing":
        engine._launch = launch
    requests = gpu_engine.serve(engine, 12, 30)
    exact = [tiny_model.is_exact(model, np.array(one.text), one.prompt_length) for one in requests]
    assert all(one.is_done for one in requests) and len(exact) == 12
    assert all(exact) == (forgets == "nothing")


def test_speculate() -> None:
    counts = told("speculate")
    assert counts["commit accepted: steps"] < counts["plain: steps"] / 2
    assert counts["commit accepted: blocks held"] == counts["plain: blocks held"] < counts["commit drafts: blocks held"]
    assert counts["tokens computed, 8 rewound"] == 10 + 20 - 1 + 3 + 10 - 1


def test_rollouts() -> None:
    counts = told("rollouts")
    assert counts["exact, epoch 0"] and counts["exact, epoch 1"] and counts["exact until the update"]
    assert not counts["exact for one model as a whole"]
    assert counts["computed"] < counts["computed without sharing"] / 2
    assert (
        counts["found before the update"] == 64
        and counts["found after the update"] == counts["found after it closed"] == 0
    )
    assert (
        counts["bytes for the trainer"] > 500_000
        and counts["blocks dropped"] > 8
        and counts["requests that slept"] == 1
    )
    assert [epoch for _, epoch in counts["epochs of the running sample"]] == [1, 2]
    assert counts["epochs of the second sample"] == [(0, 2)] and counts["both exact, old weights"]
    assert counts["found of the first sample"] == 64 and counts["found by the new weights"] == 0
    assert counts["found for the updated adapter"] == 0 < counts["found for the other adapter"]


def test_agents() -> None:
    pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")
    counts = told("agents")
    assert counts["exact"] == counts["agents"]
    for process in ("first process", "after a restart"):
        assert counts[f"{process}: found"] > counts[f"{process}: prompt tokens"] / 2
        assert counts[f"{process}: loaded from tiers"] > 0 < counts[f"{process}: evicted blocks"]
        assert counts[f"{process}: manual still pinned"]


def test_policy() -> None:
    rates = told_without_torch("policy")
    assert rates["replay, lru"] < rates["replay, used once first"] < rates["replay, bound"]
    assert rates["cache, lru"] < rates["cache, used once first"]


def test_simulate() -> None:
    small, preempting, large, same = told_without_torch("simulate").values()
    assert small["preempted"] == large["preempted"] == same["preempted"] == 0 < preempting["preempted"]
    assert preempting["first token, median s"] < small["first token, median s"]
    assert large["output tokens a second"] > small["output tokens a second"]
    assert all(0.3 < one["prompt tokens cached"] < 1 for one in (small, preempting, large))


def test_kernels() -> None:
    verdicts = told("kernels")
    assert verdicts[16]["flash_attention_2"].startswith("reject: k.size.token = 16 must be a multiple of 256")
    assert (
        set(verdicts[256].values())
        == {"ok"}
        == {said for name, said in verdicts[16].items() if "attention_2" not in name}
    )


def test_shared_prefix() -> None:
    counts = told("shared_prefix")
    assert counts["pages, 3 levels"] < counts["pages, 2 levels"] < counts["pages, without levels"] / 3
    assert counts["largest difference"] < 1e-5
