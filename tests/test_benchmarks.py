"""The benchmarks: each runs in a tiny size, absent peers are reported, and the ratios to peers hold with a margin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import count_hits, evict, head_cases, heads, hybrid, hybrid_peers, swap, top_k  # noqa: E402
from benchmarks.__main__ import NAMES  # noqa: E402
from benchmarks.__main__ import main as benchmarks_main  # noqa: E402
from benchmarks.peers import tasks  # noqa: E402
from benchmarks.peers.ours import FULL, Peer  # noqa: E402
from benchmarks.show import plots, table  # noqa: E402
from benchmarks.timing import Options, Peers, save  # noqa: E402
from benchmarks.workload import AT_ONCE, GENERATED, SHARE, TRACES, workload  # noqa: E402

from kvpagoda.replay import Trace  # noqa: E402

MARGIN = 1.5
OWN_PROCESS = {"match", "events", "metrics", "router"}
"""Benchmarks that run in their own process: ``match`` tests the command; ``router`` measures its memory; the other two
collect garbage repeatedly, which is slow in a test process with many objects."""


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvpagoda bench`` in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    command = [sys.executable, "-m", "kvpagoda", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs_in_a_tiny_size(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most run in this process, which has imported torch and transformers; ``OWN_PROCESS`` run by the command."""
    if name == "policies" and not TRACES.exists():
        pytest.skip(f"no traces at {TRACES}")
    if name == "metrics":
        pytest.importorskip("opentelemetry.sdk")
    asked = [name, "--quick", "--json", "--runs", "1", "--peers", "ours,nanovllm"]
    if name in OWN_PROCESS:
        done = bench(*asked, KVPAGODA_BENCH_NANOVLLM="/nowhere")
        assert done.returncode == 0, done.stderr
        told = done.stdout
    else:
        monkeypatch.setenv("KVPAGODA_BENCH_NANOVLLM", "/nowhere")
        benchmarks_main(asked)
        told = capsys.readouterr().out
    found = json.loads(told)[name]
    if name in ("shared_store", "adapters", "vllm_connector") and not found["rows"]:
        pytest.skip(str(found["absent"]))
    assert found["rows"] and found["quick"] and found["machine"]["numpy"] == np.__version__
    measured = (
        "us",
        "seconds",
        "us_a_block",
        "p50_ms",
        "bytes_a_block",
        "hit_percent",
        "lru",
        "bits_per_byte",
        "spread",
        "receive_ms",
        "target",
    )
    for row in found["rows"]:
        figures = [row[key] for key in measured if key in row]
        assert figures and all(figure > 0 for figure in figures[:1]), row
        assert row.get("warm_is_cold", True), row
    # benchmarks that compare with peers: "ours" is installed, "nanovllm" is not
    if name not in ("policies", "one_budget", "adapters") and found["versions"]:
        assert set(found["versions"]) == {"ours"} and "nanovllm" in found["absent"]["nanovllm"]
    lines = table(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert {row["case"] for row in found["rows"] if len(row.get("case", "")) in range(1, 81)} <= {*lines}


def test_a_wrong_name_is_reported_in_one_line() -> None:
    for arguments, said in (
        (("speed",), "no question speed; there are match"),
        (("match", "--peers", "nobody"), "no peer nobody; there are ours"),
        (("match", "--runs", "0"), "positive whole number, got 0"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_an_installed_package_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    pytest.importorskip("typer")
    from kvpagoda import cli

    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib" / "kvpagoda" / "cli.py"))
    done = here("bench", "--quick")
    assert (
        done.returncode == 2 and "the benchmarks are in the repository" in done.stderr and done.stderr.count("\n") == 1
    )
    done = here("bench", "--help")
    assert done.returncode == 0 and "Measure the host path" in done.stdout and "bench gpu" in done.stdout
    done = here("bench", "gpu", "--help")  # needs no checkout
    assert done.returncode == 0 and "--save" in done.stdout and "--peers" not in done.stdout


@pytest.mark.parametrize(
    "asked, is_quick", [([], True), (["all"], False), (["match"], False), (["--runs", "1"], False)]
)
def test_without_a_name_everything_is_measured_in_small_sizes(
    asked: list[str], is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(question: str, measure: object, options: Options) -> dict[str, object]:
        measured.append(options.quick)
        return {}

    monkeypatch.setattr("benchmarks.__main__.result", measure)
    benchmarks_main([*asked, "--json"])
    assert measured == [is_quick] * (1 if asked == ["match"] else len(NAMES))


def test_only_comparisons_with_peers_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"case": "one", "who": who, "us": us, "over_ours": us} for who, us in (("ours", 1.0), ("other", 8.0))]
    found = {"question": "Who?", "rows": rows}
    made = plots({"step": found, "match": {"question": "?", "rows": [{"case": "one", "us": 1.0}]}}, tmp_path)
    assert made == [tmp_path / "step.png"] and made[0].read_bytes()[:4] == b"\x89PNG"


def test_a_peer_that_is_measured_later_is_added_to_the_saved_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.timing.RESULTS", tmp_path)

    def result(machine: str, absent: dict[str, str], *rows: tuple[str, str, int]) -> dict[str, Any]:
        made = [{"case": case, "who": who, "us": us} for case, who, us in rows]
        return {"machine": machine, "versions": {who: "1" for _, who, _ in rows}, "absent": absent, "rows": made}

    def saved() -> list[tuple[str, str, int]]:
        return [(row["case"], row["who"], row["us"]) for row in json.loads(path.read_text())["rows"]]

    first = result("old", {"new": "not there"}, ("one", "ours", 1), ("one", "other", 5), ("two", "ours", 2))
    path = save("step", first)
    save(
        "step",
        result("now", {}, ("one", "ours", 3), ("one", "new", 9), ("two", "ours", 4), ("two", "new", 8)),
        is_part=True,
    )
    assert saved() == [
        ("one", "ours", 1),
        ("one", "other", 5),
        ("one", "new", 9),
        ("two", "ours", 4),
        ("two", "new", 8),
    ]
    found = json.loads(path.read_text())
    assert [row.get("machine") for row in found["rows"]] == ["old", "old", None, None, None]
    assert set(found["versions"]) == {"ours", "other", "new"} and not found["absent"]
    save("step", result("later", {}, ("one", "ours", 7)), is_part=True)  # ours alone replaces ours
    assert saved()[:3] == [("one", "other", 5), ("one", "new", 9), ("one", "ours", 7)]


def test_a_workload_is_the_same_every_time_and_never_waits() -> None:
    work = workload(GENERATED, 60)
    again = workload.__wrapped__(GENERATED, 60)
    for i in range(len(work)):
        assert np.array_equal(work.prompt(i), again.prompt(i)) and np.array_equal(work.output(i), again.output(i))
    chains = [tuple(work.trace.chain(i).tolist()) for i in range(len(work))]
    shared = [(i, j) for i in range(60) for j in range(i) if chains[i][:1] and chains[i][:1] == chains[j][:1]]
    assert shared and all(np.array_equal(work.prompt(i)[:64], work.prompt(j)[:64]) for i, j in shared)
    capacity, used, running = 30_000, 0, set()
    for i in work.steps(capacity):
        running ^= {i if i >= 0 else ~i}
        used = sum(work.length(one) for one in running)
        assert used <= SHARE * capacity and len(running) <= AT_ONCE
    assert not running


def test_the_replay_hits_everything_that_is_cached() -> None:
    """With room for everything, each request hits what it shares with any earlier one, except for its last token."""
    found = tasks.replay(Peer, trace=GENERATED, limit=40, capacity=3_000_000, block_size=16)
    work, best = workload(GENERATED, 40), 0
    texts = [np.concatenate((work.prompt(i), work.output(i))) for i in range(len(work))]
    for i in range(len(work)):
        prompt, longest = work.prompt(i), 0
        for earlier in texts[:i]:
            n = min(len(prompt) - 1, len(earlier))
            same = prompt[:n] == earlier[:n]
            longest = max(longest, n if same.all() else int(same.argmin()))
        best += longest
    assert found["requests"] == 40
    exact = 100 * best / found["prompt_tokens"]
    assert exact - 2 < found["hit_percent"] <= exact  # less: the ends of blocks that were still being written


@pytest.fixture
def tokenspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run other peers by the interpreter that has TokenSpeed's scheduler: the one that ``KVPAGODA_BENCH_PYTHON`` names, or
    that of ``make consumers``."""
    folder = Path(os.environ.get("KVPAGODA_CONSUMERS", ROOT / ".venv-consumers"))
    if "KVPAGODA_BENCH_PYTHON" not in os.environ and (folder / "bin" / "python").exists():
        monkeypatch.setenv("KVPAGODA_BENCH_PYTHON", str(folder / "bin" / "python"))


def test_tokenspeed_finds_the_same_prompts_cached(tokenspeed: None) -> None:
    """One at a time, with room for everything and with room for a tenth of the trace's tokens."""
    with Peers(Options(peers=("ours", "tokenspeed"))) as peers:
        if peers.absent:
            pytest.skip(f"{peers.absent}: make consumers")
        for capacity in (3_000_000, 30_000):
            asked = {"trace": GENERATED, "limit": 60, "capacity": capacity, "block_size": 16}
            ours, theirs = peers.ask("replay", **asked, at_once=1).values()
            assert ours["prompt_tokens"] == theirs["prompt_tokens"]
            assert ours["hit_percent"] == pytest.approx(theirs["hit_percent"], abs=0.1) and ours["hit_percent"] > 40
        assert [peer.name for peer in peers.ask("replay", **asked, at_once=2)] == ["ours"]
        assert not peers.absent


def test_tokenspeed_serves_layers_of_several_kinds(tokenspeed: None) -> None:
    """Every prompt is served, with blocks lost nowhere (the peer asserts it), in no more memory than it is given."""
    rows = hybrid_peers.measure(Options(quick=True, peers=("tokenspeed",), only="100GiB"))
    if "absent" in rows[-1]:
        pytest.skip(f"{rows[-1]['absent']}: make consumers")
    assert [row["model"] for row in rows] == [*hybrid_peers.MODELS]
    assert all(0 < row["hit_percent"] < 90 and row["preempted"] == 0 for row in rows), rows


def test_rules_by_which_hits_are_counted() -> None:
    """Two blocks of 512 tokens and a rest; a request with the same text later hits by the rules that its arrival allows."""
    lines = [
        {"timestamp": at, "input_length": length, "output_length": 24, "hash_ids": ids}
        for at, length, ids in ((0, 1000, [1, 2]), (1000, 1500, [1, 2, 3]), (20_000, 1500, [1, 2, 3]))
    ]
    trace = Trace.read(lines)
    *_, hits = count_hits.lru(trace)
    assert hits.tolist() == [0, 2, 3]
    found = count_hits.shares(trace, hits)
    assert found["blocks"] == 5 / 8 and found["the first block never hits"] == 3 / 8
    assert found["tokens"] == (1024 + 1500) / 4000
    assert found["tokens, and the last is computed"] == (1024 + 1499) / 4000
    assert found["whole blocks alone"] == (2 + 2) / (1 + 2 + 2)
    assert found["mean of the requests"] == pytest.approx((2 / 3 + 1) / 3)
    assert [count_hits.computed_for(trace, hits, after) for after in (0.5, 5, 19.5, 30)] == [5 / 8, 3 / 8, 2 / 8, 0]
    assert count_hits.nodes(trace, 2)[-1] == 2 / 8


def test_hybrid_layers_serve_the_same_requests() -> None:
    work = workload(GENERATED, 12)
    for name, schema in hybrid.schemas().items():
        seconds, hits = hybrid.serve(schema, schema.block_size(None), work, 200_000)
        assert seconds > 0 and 0 <= hits < 100, name


def test_two_heads_are_compared_case_by_case() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.heads", "--old", str(ROOT / "src"), "--quick", "--repeats", "1"]
    command += ["--only", "lookup,swap", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert {case.split()[0] for case in rows} == {"lookup", "swap"}
    assert all(row["old_ms"] > 0 and row["new_ms"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert all(row["calls"] == pytest.approx(1, abs=0.02) for row in rows.values()), (
        "the same tree makes the same calls"
    )


def test_every_case_of_a_head_runs() -> None:
    assert {name.split()[0].rstrip(",") for name in head_cases.cases()} == set(heads.WORDS)
    for name, case in head_cases.cases(quick=True).items():
        slices = case()
        assert next(slices) == 0 and head_cases.clock.found > 0, name


def test_a_folder_without_the_package_is_reported() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.heads", "--old", "/nowhere"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and "no package kvpagoda in /nowhere" in done.stderr


# -- the ratios that must hold: a small form of each comparison, with a margin for a busy machine ----------------------------


def ratios(task: str, others: tuple[str, ...], runs: int = 1, **asked: Any) -> dict[str, float]:
    """Return for each of ``others`` its time divided by ours, without the part that simulates GPU work. Skips the test
    if none of them is installed."""
    with Peers(Options(peers=("ours", *others))) as peers:
        told = {peer.name: figures for peer, figures in peers.ask(task, runs, block_size=16, **asked).items()}
        if len(told) == 1:
            pytest.skip(f"no peer is here: {peers.absent}; see benchmarks/peers")
    seconds = {name: figures["seconds"] - figures.get("excluded", 0.0) for name, figures in told.items()}
    return {name: seconds[name] / seconds["ours"] for name in others if name in seconds}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trace", "limit", "least"),
    [
        ("conversation", 1500, {"vllm": 40.0, "sglang_rust": 7.5, "prototype": 1 / 2.0}),
        ("synthetic", 1000, {"vllm": 45.0}),
    ],
)
def test_the_replay_keeps_its_ratios_to_peers(trace: str, limit: int, least: dict[str, float]) -> None:
    if not TRACES.exists():
        pytest.skip("the public traces are not beside the repository")
    found = ratios("replay", tuple(least), 5, trace=trace, limit=limit, capacity=3_000_000)
    assert all(found[name] >= least[name] / MARGIN for name in found), found


@pytest.mark.slow
def test_a_prompt_in_pieces_is_found_as_fast_as_in_a_compiled_tree() -> None:
    found = ratios("lookup", ("sglang_rust",), num_tokens=131_072, edges=128, repeats=9)
    assert found["sglang_rust"] >= 1 / 1.5 / MARGIN, found


@pytest.mark.slow
def test_a_decode_step_is_cheap_and_does_not_depend_on_the_context() -> None:
    with Peers(Options(peers=("ours",))) as peers:
        (short,), (long,) = (
            peers.ask("step", context=context, requests=256, block_size=16, repeats=50).values()
            for context in (1024, 131_072)
        )
    assert long["seconds"] <= 1.2 * MARGIN * short["seconds"], (short, long)
    found = ratios("step", ("vllm",), context=8192, requests=256, repeats=50)
    assert found["vllm"] >= 15 / MARGIN, found


@pytest.mark.slow
def test_evicting_stays_within_its_bounds() -> None:
    for row in evict.measure(Options()):
        if row["a_call"] == evict.MANY:
            most = 0.1 if row["shape"].startswith("edges") else 1.0
            assert row["us_a_block"] <= most * MARGIN, row


@pytest.mark.slow
@pytest.mark.parametrize("name", hybrid_peers.MODELS)
def test_hybrid_models_reuse_no_less_than_under_vllm(name: str) -> None:
    if not TRACES.exists():
        pytest.skip("the public traces are not beside the repository")
    rows = hybrid_peers.measure(Options(peers=("ours", "vllm"), only=f"{name} 100GiB"))
    if "absent" in rows[-1]:
        pytest.skip(f"vLLM is not here: {rows[-1]['absent']}; see benchmarks/peers")
    ours, theirs = rows
    assert ours["hit_percent"] >= theirs["hit_percent"] > 0 == theirs["never_fit"], rows


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 16, 1 << 18, 1 << 20])
def test_swapping_runs_at_nearly_the_speed_of_memory(size: int) -> None:
    for row in (*swap._engine(Options(), size, 128 << 20), *swap._spill(Options(), size, 128 << 20)):
        assert row["share_percent"] >= 80 / MARGIN, row
        assert size > 1 << 16 or row["instead"] is None or row["instead"] > 1, row


@pytest.mark.slow
@pytest.mark.parametrize("name", hybrid.schemas())
def test_hybrid_layers_cost_little_more_than_full_attention(name: str) -> None:
    work, schema = workload(GENERATED, 200), hybrid.schemas()[name]
    block_size = schema.block_size(None)
    times = [[hybrid.serve(one, block_size, work, 200_000)[0] for one in (schema, FULL)] for _ in range(5)]
    over = sorted(layers for layers, _ in times)[2] / sorted(full for _, full in times)[2]
    assert over <= 1.6 * MARGIN, over


def test_the_error_of_quantised_rows_with_an_indexer_is_other_tokens() -> None:
    """Read with the selection of raw rows, fp8 rows of DeepSeek-V3.2 err no more than those of DeepSeek-V3. Indexer keys
    change what is selected and nothing else."""
    rows = [
        *top_k.rows_of(top_k.Case("fp8", 128, 0)),
        *top_k.rows_of(top_k.Case("fp8", 128, 16)),
    ]
    errors = {(row["quantised"], row["selection"]): row["rms_error"] for row in rows}
    v3, own, held = errors["latents", "all"], errors["latents and keys", "own"], errors["latents and keys", "held"]
    assert held < 1.5 * v3 < 0.3 * own, errors
    assert errors["keys", "held"] == 0 < errors["keys", "own"]


def test_a_part_is_saved_of_a_benchmark_without_absentees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timing.RESULTS", tmp_path)
    for case in "ab":
        save("some", {"machine": {}, "versions": {}, "rows": [{"case": case, "figure": 1}]}, is_part=True)
    saved = json.loads((tmp_path / "some.json").read_text())
    assert [row["case"] for row in saved["rows"]] == ["a", "b"] and saved["absent"] == {}
