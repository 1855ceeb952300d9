"""``kvpagoda replay``: table, JSON, picture, and one clear line with exit code 2 on bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("typer")

Command = Callable[..., "subprocess.CompletedProcess[str]"]
RECORD = {"timestamp": 0, "input_length": 9, "output_length": 1}
CHAINS = [[1, 2, 3], [1, 2], [4], [1, 2, 3]]


def kvpagoda_replay(*arguments: str, width: int = 80) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": str(width), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvpagoda", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({**RECORD, "hash_ids": chain}) + "\n" for chain in CHAINS))
    return path


def test_a_table(trace: Path, here: Command) -> None:
    done = here("replay", str(trace), "--capacity", "3,4", "--policy", "lru,opt")
    assert done.returncode == 0 and not done.stderr
    assert "t.jsonl: 4 requests, 9 block references" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert "capacity  of different   hit rate   hit rate  blocks   blocks".split() in lines
    assert "policy  in blocks        blocks  of blocks  of tokens     hit  evicted".split() in lines
    assert ["lru", "3", "75.0%", "44.44%", "48.78%", "4", "2"] in lines
    assert ["opt", "3", "75.0%", "55.56%", "51.22%", "5", "1"] in lines
    assert ["lru", "4", "100.0%", "55.56%", "51.22%", "5", "0"] in lines


def test_json(trace: Path) -> None:
    done = kvpagoda_replay(str(trace), "--capacity", "3", "--policy", "lru", "--json")
    assert done.returncode == 0 and not done.stderr
    found = json.loads(done.stdout)
    assert (found["requests"], found["block_refs"], found["distinct_blocks"]) == (4, 9, 4)
    (result,) = found["results"]
    assert (result["policy"], result["capacity_blocks"], result["block_hits"], result["evictions"]) == ("lru", 3, 4, 2)
    assert sum(row["references"] for row in found["reuse_distance"]) == 5
    assert found["working_set"]["blocks"] == [4] and found["working_set"]["requests"] == [4]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_synthetic_workload_is_the_default_and_fits_the_terminal(width: int, here: Command) -> None:
    done = here("replay", "--limit", "300", width=width)
    assert done.returncode == 0 and not done.stderr
    assert "synthetic workload, seed 0: 300 requests" in " ".join(done.stdout.split())
    assert all(len(line) <= width for line in done.stdout.splitlines())
    words = done.stdout.split()
    assert [words.count(policy) for policy in ("lru", "s3fifo", "opt")] == [6, 6, 6]
    if width < 64:  # where the table is wider it is turned
        names = [line for line in done.stdout.splitlines() if line.startswith("of different blocks  ")]
        assert len(names) > 1 and sum(line.count("%") for line in names) == 18
    assert "…" not in done.stdout


def test_what_every_request_hit_goes_to_a_file(trace: Path, here: Command) -> None:
    path = trace.with_name("out.jsonl")
    done = here(
        "replay", str(trace), "--capacity", "3", "--policy", "lru,opt", "--requests", str(path), "--warm-up", "0.5",
        "--tokens-per-id", "2", "--json",
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["request"] for record in records] == [0, 1, 2, 3] and records[0].keys() >= {
        "arrival",
        "input_length",
    }
    assert [record["blocks"] for record in records] == [3, 2, 1, 3]
    assert [record["counted"] for record in records] == [False, False, True, True]
    assert [[hit["blocks"] for hit in record["hits"]] for record in records] == [[0, 0], [2, 2], [0, 0], [2, 3]]
    assert records[3]["hits"][1] == {"policy": "opt", "capacity_blocks": 3, "blocks": 3, "tokens": 6}
    results = json.loads(done.stdout)["results"]
    assert [(r["block_hits"], r["token_hits"], r["token_refs"], r["requests"]) for r in results] == [
        (2, 4, 8, 2),
        (3, 6, 8, 2),
    ]


def test_many_references_leave_out_what_needs_a_tree(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from kvpagoda.replay import Trace, report

    monkeypatch.setattr(report, "MANY_REFS", 5)
    report.show([report.measured(lambda _: Trace.read(trace), [3], None)], as_json=False)
    shown = capsys.readouterr().out
    assert "s3fifo left out" in shown and "2 replays" in shown
    report.show([report.measured(lambda _: Trace.read(trace), [3], ["s3fifo"])], as_json=False)
    assert "1 replays" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture(trace: Path, ending: str, here: Command) -> None:
    pytest.importorskip("matplotlib")
    path = trace.with_name(f"rates.{ending}")
    done = here("replay", str(trace), "--capacity", "1,2,3,4", "--policy", "lru,s3fifo,opt", "--plot", str(path))
    assert done.returncode == 0, done.stderr
    begin = path.read_bytes()[:100]
    assert begin.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in begin


def test_a_file_out_of_order_is_ordered_by_arrival_and_the_output_says_so(trace: Path, here: Command) -> None:
    """One conversation after another, as in the file, hits at any capacity; the same requests mixed in time do not."""
    records = [
        {**RECORD, "timestamp": 10 * turn + chat, "hash_ids": [chat, 9]} for chat in range(4) for turn in range(3)
    ]
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = "6 of 12 requests were not in order of arrival; "
    for option, ending, hits, order in (
        ((), "ordered (--file-order keeps the order of the file)", 0, "arrival"),
        (("--file-order",), "left in the order of the file", 16, "file"),
    ):
        common = ("replay", str(trace), *option)
        shown = " ".join(here(*common, "--capacity", "2", "--policy", "lru").stdout.split())
        assert told + ending in shown
        found = json.loads(here(*common, "--capacity", "2", "--policy", "lru", "--json").stdout)
        assert found["results"][0]["block_hits"] == hits
        assert (found["order"], found["out_of_order"], found["notes"]) == (order, 6, [told + ending])
        with_schema = (*common, "--schema", "qwen3-8b", "--budget", "1GiB")
        assert told + ending in " ".join(here(*with_schema).stdout.split())
        assert json.loads(here(*with_schema, "--json").stdout)["order"] == order


def test_a_file_in_order_says_nothing(trace: Path, here: Command) -> None:
    found = json.loads(here("replay", str(trace), "--capacity", "3", "--policy", "lru", "--json").stdout)
    assert (found["order"], found["out_of_order"], found["notes"]) == ("arrival", 0, [])


OWN = """
from dataclasses import dataclass, field

@dataclass
class Oldest:
    leaves: dict = field(default_factory=dict)
    def add(self, keys, priority): pass
    def touch(self, keys, priority): pass
    def set_leaf(self, key, is_leaf): self.leaves.update({key: 1}) if is_leaf else self.leaves.pop(key)
    def choose(self, chain): return chain(next(iter(self.leaves)))[:1]
    def remove(self, keys, *, evicted): return keys
    def check(self, keys, leaves): assert set(self.leaves) == leaves

class Half:
    def add(self, keys, priority): pass

class Sized:
    def __init__(self, capacity): pass
"""


def test_a_policy_of_the_users_own_beside_others(trace: Path, here: Command) -> None:
    file = trace.with_name("mine.py")
    file.write_text(OWN)
    arguments = ("replay", str(trace), "--capacity", "1,2,3,4", "--policy", f"lru,{file}:Oldest", "--json")
    results = json.loads(here(*arguments).stdout)["results"]
    assert [r["policy"] for r in results] == ["lru", "Oldest"] * 4
    assert results[-1]["block_hits"] == 5 and all(r["block_hits"] <= 5 for r in results)
    served = here(
        "replay", "--schema", "qwen3-8b", "--budget", "1GiB,2GiB", "--limit", "5", "--policy", f"{file}:Oldest"
    )
    assert served.returncode == 0 and served.stdout.count("Oldest") == 2, served.stderr
    for text, message in (
        (f"{file}:Youngest", "unknown class of"), (f"{file}:Half", "is no EvictionPolicy"),
        (f"{file}:Sized", "Sized() must make a policy"), (str(file), f"{file}:CLASS"), ("nowhere.py:Oldest", "no file"),
        (f"{trace.with_name('broken.py')}:Oldest", "cannot be run: ZeroDivisionError"),
    ):  # fmt: skip
        trace.with_name("broken.py").write_text("1 / 0\n")
        done = here("replay", str(trace), "--policy", text)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    with_workers = ("--schema", "qwen3-8b", "--workers", "2", "--policy", f"{file}:Oldest")
    assert "runs in one process" in here("replay", str(trace), *with_workers).stderr


@pytest.mark.parametrize(("capacities", "has_lines"), [([2, 4], False), ([1, 2, 3, 4, 5], True)])
def test_a_plot_of_few_capacities_has_no_lines_between_them(
    trace: Path, capacities: list[int], has_lines: bool
) -> None:
    pytest.importorskip("matplotlib")
    from kvpagoda.replay import Reuse, Trace, hit_rate_curve, page

    read, path = Trace.read(trace), trace.with_name("rates.png")
    figure, reuse = page.new_figure(path), Reuse.of(read)
    page.draw(figure, path, read, reuse, hit_rate_curve(read, capacities, ["lru", "fifo", "opt"]))
    styles = {line.get_label(): line.get_linestyle() for line in figure.axes[0].lines}
    assert (styles["fifo"], styles["opt (bound)"]) == (("-", "--") if has_lines else ("None", "None"))
    assert styles["lru"] == "None" and styles["lru, every capacity"] == "-"


BAD = {
    "no such trace": (["nowhere.jsonl"], "no trace at 'nowhere.jsonl'"),
    "bad line": (["bad.jsonl"], "bad.jsonl, line 2: 'hash_ids' must be a list of whole numbers"),
    "unknown form": (["text.txt"], "text.txt, line 1: no trace of a known form"),
    "no blocks": (["lengths.csv"], "names no blocks"),
    "policy": (["t.jsonl", "--policy", "lru,mru"], "unknown policy 'mru'; known: lru, fifo"),
    "capacity": (["t.jsonl", "--capacity", "3,many"], "whole numbers of blocks"),
    "capacity 0": (["t.jsonl", "--capacity", "3,0"], "a capacity in blocks must be a whole number from 1"),
    "limit": (["t.jsonl", "--limit", "0"], "a limit of requests must be a positive whole number"),
    "limit of none": (["--limit", "0"], "a limit of requests must be a positive whole number"),
    "seed": (["--seed", "-1"], "need block_size >= 1 and seed >= 0"),
    "budget without a schema": (["t.jsonl", "--budget", "4GiB"], "--budget needs a model's layers"),
    "checkpoints without a schema": (["--checkpoint-every", "0"], "--checkpoint-every needs a model's layers"),
    "workers and jobs": (["--workers", "2", "--jobs", "2"], "--workers without --schema is the same as --jobs"),
    "no number": (["--limit", "many"], "'--limit'"),
    "no such option": (["--capacties", "3"], "--capacity"),
    "warm-up": (["t.jsonl", "--warm-up", "1"], "warm_up must be a share of the requests"),
    "jobs": (["t.jsonl", "--jobs", "0"], "jobs must be a positive whole number"),
    "requests folder": (["t.jsonl", "--requests", "nowhere/out.jsonl"], "nowhere/out.jsonl"),
    "tokens of an id": (["t.jsonl", "--tokens-per-id", "0"], "block_size must be a positive whole number"),
    "no tree to serve with": (["--schema", "qwen3-8b", "--policy", "block-fifo"], "cannot serve requests"),
    "bound to serve with": (["--schema", "qwen3-8b", "--policy", "opt", "--workers", "2"], "opt cannot serve requests"),
    "bound of lines": (["--schema", "qwen3-8b", "--policy", "opt", "--json-lines", "-"], "opt"),
    "trace of a bound": (
        ["--schema", "qwen3-8b", "--policy", "opt", "--trace", "o.json"],
        "opt is a bound that serves none",
    ),
    "report of a bound": (["--schema", "qwen3-8b", "--policy", "opt", "--report", "o.html"], "add a policy"),
    "bound of ids of two sizes": (
        ["sizes.jsonl", "--schema", "qwen3-8b", "--policy", "lru,opt"],
        "stand for 2 to 3 tokens",
    ),
    "plot ending": (["t.jsonl", "--plot", "rates.xyz"], "its suffix must be one of"),
    "plot folder": (["t.jsonl", "--plot", "nowhere/rates.png"], "there is no folder"),
}


OWN_PROCESS = {"bad line"}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, trace: Path, monkeypatch: pytest.MonkeyPatch, here: Command
) -> None:
    if "plot" in case:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(trace.parent)
    Path("bad.jsonl").write_text(trace.read_text().splitlines()[0] + '\n{"hash_ids": 3}\n')
    Path("text.txt").write_text("hello\n")
    Path("sizes.jsonl").write_text(json.dumps({**RECORD, "hash_ids": [1, 2], "block_tokens": [2, 3]}))
    Path("lengths.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,5\n")
    arguments, message = BAD[case]
    done = kvpagoda_replay(*arguments) if case in OWN_PROCESS else here("replay", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("width", [40, 80, 160])
def test_help_names_what_there_is(width: int) -> None:
    done = kvpagoda_replay("--help", width=width)
    assert done.returncode == 0 and all(len(line) <= width for line in done.stdout.splitlines())
    for name in ("--capacity", "--checkpoint-every", "--tokens-per-id", "--file-order"):
        assert name in done.stdout.split()


def test_a_schema_is_served(here: Command) -> None:
    arguments = (
        "replay",
        "--schema",
        "deepseek-v4-flash",
        "--budget",
        "1GiB,4GiB",
        "--policy",
        "lru,opt",
        "--limit",
        "10",
    )
    done = here(*arguments, width=80)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert "checkpoint  tokens   tokens  requests   blocks    memory  blocks".split() in lines
    assert "budget  policy       every     hit  in tree   at once  evicted  unusable   a run".split() in lines
    assert [line[:3] for line in lines[-4:]] == [
        ["1GiB", "lru", "-"], ["1GiB", "opt", "-"], ["4GiB", "lru", "-"], ["4GiB", "opt", "-"]
    ]  # fmt: skip
    assert lines[-1][3].endswith("%") and lines[-1][4:] == ["-"] * 5 and "opt: no cache above" in done.stdout
    assert all(len(line) <= 60 for line in here(*arguments, width=60).stdout.splitlines())
    found = json.loads(here(*arguments, "--checkpoint-every", "0,4", "--json").stdout)
    assert [(r["budget"], r["policy"], r["checkpoint_every"]) for r in found["results"]] == [
        (budget, policy, every) for budget in ("1GiB", "4GiB") for policy in ("lru", "opt") for every in (0, 4)
    ]
    assert all(0 <= r["hit_rate"] <= 1 and r["requests"] == 10 for r in found["results"])
    done = here("replay", "--schema", "deepseek-v4-flash", "--capacity", "3")
    assert done.returncode == 2 and done.stderr.startswith("kvpagoda: --capacity counts blocks")


@pytest.mark.parametrize("at_once", ["1", "8"])
def test_opt_with_a_schema_is_the_bound_of_hybrid_models(at_once: str, here: Command) -> None:
    from kvpagoda.replay import hit_bound, synthetic
    from kvpagoda.schema import Schema

    options = ("--limit", "60", "--schema", "gpt-oss-120b", "--budget", "512MiB", "--max-requests", at_once)
    done = here("replay", *options, "--policy", "lru,opt", "--json")
    lru, opt = json.loads(done.stdout)["results"]
    trace, schema = synthetic(60), Schema.from_hf_config("gpt-oss-120b")
    most = hit_bound(trace, schema, "512MiB", tokens_per_id=trace.block_size, max_requests=int(at_once))
    assert opt == {"budget": "512MiB", "checkpoint_every": 0, **most.to_dict()}
    assert 0 < lru["cached_tokens"] == opt["served_tokens"] < opt["bound_tokens"]
    assert lru["hit_rate"] < opt["hit_rate"] == most.bound < most.unlimited
