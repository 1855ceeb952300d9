"""``kvpagoda simulate``: what it prints, on a terminal and in a pipe, and after Ctrl-C."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpagoda.replay.fleet.simulation import Simulation
from kvpagoda.replay.fleet.worker import FleetWorker

Command = Callable[..., "subprocess.CompletedProcess[str]"]
pytest.importorskip("typer")


def test_every_combination_has_a_row(here: Command) -> None:
    done = here(
        "simulate", "--limit", "30", "--budget", "16GiB,40GiB", "--workers", "1,2", "--policy", "lru,fifo", width=150
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""  # quiet where standard error is no terminal
    lines = done.stdout.splitlines()
    assert lines[0] == "synthetic workload, seed 0: 30 requests with the layers of llama-3.1-8b"
    rows = [line.split()[:5] for line in lines[-8:]]
    assert rows == [
        [budget, policy, "kvpagoda", workers, "round-robin"]
        for budget in ("16GiB", "40GiB") for policy in ("lru", "fifo") for workers in ("1", "2")
    ]  # fmt: skip
    assert all(line.endswith(" 30") for line in lines[-8:])


def test_costs_and_tiers_change_times_and_hits(here: Command, tmp_path: Path) -> None:
    def result(*options: str) -> Any:
        done = here("simulate", "--limit", "60", "--budget", "2GiB", "--json", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    fast, slow, free = (result("--costs", costs)["results"][0] for costs in ("8xh100", "h100:llama-3.1-70b", "none"))
    assert 0 == free["last_token"]["max"] < fast["first_token"]["p50"] < slow["first_token"]["p50"]
    tiered = result("--tier", "host:40GiB", "--tier", "disk:1TiB")
    assert tiered["results"][0]["hit_rate"] > 1.1 * fast["hit_rate"]
    assert tiered["results"][0]["loaded_tokens"] > 0 and not tiered["partial"]
    assert tiered["costs"]["tiers"]["host"]["byte"] == 1 / 64e9
    states = ["--schema", "qwen3-next-80b-a3b", "--costs", "4xh100"]
    assert result(*states, "--tier", "host:100GiB")["results"][0]["loaded_tokens"] > 0
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"step": 0.5}))
    assert result("--costs", str(own))["results"][0]["first_token"]["p50"] >= 0.5


def test_engines_have_rows_of_their_own(here: Command) -> None:
    done = here(
        "simulate", "--limit", "60", "--budget", "2GiB", "--engine", "kvpagoda,vllm-0.33,sglang-0.5.23", "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert [row["engine"] for row in rows] == ["kvpagoda", "vllm-0.33", "sglang-0.5.23"]
    assert len({row["hit_rate"] for row in rows}) > 1 and all(row["finished"] + row["never_fit"] == 60 for row in rows)


def test_engines_with_settings_and_a_wrong_one_before_any_runs(here: Command) -> None:
    few = ("simulate", "--limit", "60", "--budget", "1GiB", "--json", "--engine")
    done = here(*few, "kvpagoda,watermark=0.5,kvpagoda")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert [row["engine"] for row in rows] == ["kvpagoda,watermark=0.5", "kvpagoda"]
    assert rows[0]["waited"]["mean"] > rows[1]["waited"]["mean"]
    for wrong in ("kvpagoda,vllm-0.33,states_per_path=3", "kvpagoda,no-such", "vllm-0.33,match_unit=8"):
        done = here(*few, wrong)
        assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_ctrl_c_prints_what_is_done(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, ended = FleetWorker.finish, list[int]()

    def interrupted(worker: FleetWorker) -> None:
        finish(worker)
        if worker.num_ended >= 10 and len(ended) == 0:
            ended.append(worker.num_ended)
            raise KeyboardInterrupt

    monkeypatch.setattr(FleetWorker, "finish", interrupted)
    done = here("simulate", "--limit", "40", "--policy", "lru,fifo", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 130 and told["partial"] and len(told["results"]) == 1
    assert told["results"][0]["finished"] == ended[0] < 40 == told["results"][0]["requests"]
    ended.clear()
    done = here("simulate", "--limit", "40")
    assert (
        done.returncode == 130
        and "partial: interrupted after 1 of 1 replays, in the middle of the last one" in done.stdout
    )


def test_progress_counts_the_requests_that_ended(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, run = list[int](), Simulation.run

    def watched(made: Simulation, on_request: Callable[[int], None]) -> None:
        run(made, lambda count: (counts.append(count), on_request(count))[0])

    monkeypatch.setattr(Simulation, "run", watched)
    assert here("simulate", "--limit", "20").returncode == 0
    assert counts[-1] == 20 and counts == sorted(counts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--costs", "h1"], "unknown GPU 'h1'; known: h100"),
        (["--costs", "h100:gpt"], "unknown model of public costs 'gpt'"),
        (["--workers", "two"], "--workers takes whole numbers of workers"),
        (["--routing", "nearest"], "unknown routing rule 'nearest'"),
        (["--tier", "tape:1GiB"], "unknown tier of these costs 'tape'"),
        (["--tier", "host"], "cannot read '' as a size"),
        (["--tier", "host:10KiB"], "holds no block"),
        (["--engine", "vllm"], "unknown engine 'vllm'; known: kvpagoda, "),
        (["--engine", "vllm-0.33", "--policy", "fifo"], "evicts and keeps by its own rules; leave out policy"),
        (
            ["--engine", "dynamo-1.6.1", "--schema", "gpt-oss-20b"],
            "of engines, only vLLM and SGLang have several kinds",
        ),
        (["--step-tokens", "8"], "step_tokens must not be less"),
    ],
)
def test_bad_options_are_told_in_a_line(here: Command, options: list[str], message: str) -> None:
    done = here("simulate", "--limit", "5", *options)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
