"""``kvpagoda bench gpu`` on a CPU that stands for a GPU: each row is made, shares are right, and a case may fail alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import torch

from fake_cuda import FREE, NAME, NBYTES, TICK, FakeEvent, FakeGraph, FakeTorch
from json_schema import schema_of, violations
from kvpagoda.bench_gpu import card as card_module
from kvpagoda.bench_gpu import crossing, formats, loop, measure, report, rows, steps
from kvpagoda.bench_gpu.card import Card, driver_version
from kvpagoda.bench_gpu.rows import BenchCase, BenchRow, RowSizes, at_least, at_most
from kvpagoda.errors import BadInput, CheckFailed

Command = Callable[..., "subprocess.CompletedProcess[str]"]
TINY = RowSizes(moved=1 << 17, text=1 << 18, requests=3, contexts=(20,), steps=17, rounds=1, few=8, replays=2)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Let ``Card`` find a GPU, which is the CPU."""
    fake = FakeTorch()
    monkeypatch.setattr(card_module, "torch", fake)
    monkeypatch.setattr(card_module, "MATRIX", 8)
    monkeypatch.setattr(card_module.gc, "collect", lambda: 0)  # half a second, where so much is imported
    monkeypatch.setattr(crossing, "EVICTED", 2)
    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")  # others are compiled for each format
    return fake


@pytest.fixture
def card(fake: FakeTorch) -> Card:
    return Card(torch.device("cpu"))


@pytest.fixture
def command(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the command find that GPU, and measure tiny sizes."""
    made = Card.__init__
    monkeypatch.setattr(Card, "__init__", lambda self, device=None: made(self, torch.device("cpu")))
    monkeypatch.setattr(rows, "RowSizes", lambda: TINY)
    return


def test_every_row_is_made(card: Card) -> None:
    found = [*measure.run(card, measure.all_cases(card, TINY))]
    assert not [row for row in found if row.failed]
    assert len({(row.part, row.case) for row in found}) == len(found) == 1 + 3 + 1 + 12 + 16 + 3 + 5
    assert {row.part for row in found} == {*report.NOTES}
    for row in found:
        assert row.figures and all(value > 0 for value in row.figures.values()), row
        assert {*row.bounds} <= {*row.figures}


def test_figures_are_made_of_the_times_of_events(card: Card) -> None:
    """Each event is a tick after the one before; so three calls take a tick, and every share is 100 %."""
    figures = {row.case: row.figures for row in measure.run(card, [crossing.card_case(card, TINY)])}["copies"]
    half = TINY.moved // 2
    assert figures["device_gbps"] == pytest.approx(2 * half / (TICK / 3) / 1e9)
    assert figures["in_gbps"] == figures["out_gbps"] == pytest.approx(half / (TICK / 3) / 1e9)
    (form, *_) = formats.formats()
    figures, bounds = formats.measure_format(card, TINY, form)
    assert figures["append_percent"] == figures["gather_percent"] == pytest.approx(100)
    assert figures["few_device_us"] == pytest.approx(1e6 * TICK / TINY.replays / 20)
    assert FakeGraph.made[-1].replays == 1 + TINY.replays
    assert {name: str(bound) for name, bound in bounds.items()} == {
        "append_percent": ">= 85", "gather_percent": ">= 85", "few_host_us": "<= 30", "few_device_us": "<= 6",
    }  # fmt: skip
    figures, bounds = formats.measure_blocks(card, TINY, 8 << 10)
    assert figures["copy_percent"] == pytest.approx(100) and str(bounds["copy_percent"]) == ">= 88"


def test_a_share_is_the_time_of_a_copy_of_as_many_bytes(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def seconds(call: Any) -> float:
        if call is work:
            return 4.0
        copied.append(call())
        return 1.0

    work: Any = lambda: None  # noqa: E731
    monkeypatch.setattr(card, "device_seconds", seconds)
    assert formats.share(card, TINY, work, 10_000) == 25
    assert copied[0].nbytes == 5000, "it is read and written"


def test_crossings_are_shares_of_page_locked_copies() -> None:
    shares = crossing._shares(crossing.Link(inwards=50e9, outwards=40e9), 10**9, 0.05, 0.025)
    assert shares == pytest.approx({"out_gbps": 20, "in_gbps": 40, "out_percent": 50, "in_percent": 80})


def test_bounds_of_steps_follow_the_other_figures(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held step takes 10 us without a device, then 20 us, then 30 us behind work; 100 us where all begin a block."""
    scripted = iter([(10.0, 11.0), (20.0, 100.0), (30.0, 0.0), (10.0, 11.0), (40.0, 201.0), (48.0, 0.0)])
    monkeypatch.setattr(steps.BenchSteps, "timed", lambda self, time: next(scripted))
    begins: dict[int, tuple[float, float]] = {}
    made = steps.schemas()
    full = BenchRow("", "", *steps.measure_steps(card, TINY, "full", made["full"], 20, begins))
    assert [full.meets(name) for name in ("none_us", "idle_us", "behind_us", "begins_us")] == [None, True, False, None]
    gemma = BenchRow("", "", *steps.measure_steps(card, TINY, "Gemma-like", made["Gemma-like"], 20, begins))
    checked = ("idle_us", "behind_us", "none_begins_us", "begins_us")
    assert [gemma.meets(name) for name in checked] == [False, True, True, False]
    assert {name: str(bound) for name, bound in gemma.bounds.items()} == {
        "idle_us": "<= none + 25", "behind_us": "<= 1.2 x idle", "none_begins_us": "<= 2 x full", "begins_us": "<= 2 x full",
    }  # fmt: skip


def test_steps_tell_those_in_which_all_begin_a_block() -> None:
    made = steps.BenchSteps(steps.schemas()["Gemma-like"], "none", TINY, 20)
    lengths = []

    def time(step: Callable[[], object]) -> float:
        lengths.append(made._batch.sequences[0].length)
        step()
        return 1.0 if lengths[-1] % 16 else 9.0

    assert made.timed(time) == (1e6, 9e6)
    assert lengths == [*range(20 + steps.WARM_UP, 20 + steps.WARM_UP + 17)]
    made.close()


def test_a_step_behind_work_is_timed_after_the_work_was_queued(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(card, "queue", lambda: done.append("queue"))
    monkeypatch.setattr(card, "wait", lambda: done.append("wait"))
    assert card.held_seconds(lambda: done.append("step")) >= 0
    assert card.held_seconds(lambda: done.append("step"), behind=True) >= 0
    assert done == ["wait", "step", "wait", "wait", "queue", "step", "wait"]


def test_a_loop_commits_the_tokens_of_the_step_before(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ahead, a step is launched before the tokens of the one before it are read."""
    calls: list[str] = []
    for name in ("extend", "commit"):
        own = getattr(steps.BenchSteps, name)
        monkeypatch.setattr(
            steps.BenchSteps, name, lambda *given, own=own, name=name: (calls.append(name), own(*given))[1]
        )
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: calls.append("read"))
    before = len(FakeGraph.made)
    figures, bounds = loop.measure_loop(card, TINY)
    assert calls[-3 * TINY.steps :] == ["extend", "read", "commit"] * TINY.steps
    assert {*figures} == {"device_us", "waits_us", "ahead_us"} and {*bounds} == {"ahead_us"}
    assert FakeGraph.made[before].replays >= 2 * TINY.steps, "each step is a replay of one graph"


def test_work_is_queued_for_as_long_as_it_should_take(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten products take a tick of 3 ms; so 4 ms are 14 products."""
    products = []
    _ = card._work
    monkeypatch.setattr(card_module.torch, "mm", lambda *_, out: products.append(out), raising=False)
    card.queue()
    assert len(products) == 14


def test_a_case_that_fails_is_a_row_that_says_so(card: Card) -> None:
    def fail() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 30 GiB")

    told: list[tuple[float, str]] = []
    run = [BenchCase("the card", "bad", fail), crossing.card_case(card, TINY)]
    bad, good = measure.run(card, run, lambda done, note: told.append((done, note)))
    assert bad.failed == "OutOfMemoryError: CUDA out of memory. Tried to allocate 30 GiB" and not bad.figures
    assert bad.to_dict() == {"part": "the card", "case": "bad", "failed": bad.failed}
    assert not good.failed and told == [(0, "the card: bad"), (1, "the card: copies")]


def test_a_device_that_is_lost_fails_every_row(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(card, "tidy", lost)
    (row,) = measure.run(card, [BenchCase("the card", "a", lambda: ({"x_us": 1.0}, {}))])
    assert "afterwards: CUDA error: an illegal" in row.failed


def test_rows_that_are_read_back_wrong_fail(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "append_scaled", lambda *_: None)
    monkeypatch.setattr(formats, "copy_rows", lambda *_: None)
    (form, *_) = formats.formats()
    with pytest.raises(CheckFailed):
        formats.measure_format(card, TINY, form)
    with pytest.raises(CheckFailed):
        formats.measure_blocks(card, TINY, 8 << 10)


@pytest.mark.parametrize("measured", [crossing.measure_swap, crossing.measure_tier])
def test_bytes_that_come_back_wrong_fail(measured: Any, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, numbers = crossing._sums, iter(range(9))
    monkeypatch.setattr(crossing, "_sums", lambda *given, **named: sums(*given, **named) + next(numbers))
    with pytest.raises(CheckFailed):
        measured(card, TINY, *([crossing.SHAPES[0]] if measured is crossing.measure_tier else []))


def test_sizes_fit_in_free_memory() -> None:
    assert RowSizes().within(80 << 30) == RowSizes()
    small = RowSizes().within(1 << 30)
    assert small.moved == small.text == 128 << 20 and small.requests == 256


def test_the_text_has_every_figure_and_marks_what_misses_its_bound() -> None:
    text = report.text
    misses = {"append_percent": at_least(85), "few_host_us": at_most(30)}
    made = [
        BenchRow("heads", "int8, 128", {"append_percent": 90.04, "few_host_us": 142.4}, misses),
        BenchRow("heads", "fp8, 128", failed="OutOfMemoryError: none left"),
        BenchRow("a host tier", "64 KiB", {"out_gbps": 4.666}),
    ]
    for width in (80, 40, None):
        shown = text(made, width)
        assert all(part in shown for part in ("90.0", "142*", "4.7", "failed: fp8, 128: OutOfMemoryError"))
        assert "1 of 2 figures meet their bounds" in " ".join(shown.split()) and "1 of 3 cases failed" in " ".join(
            shown.split()
        )
        assert width is None or all(len(line) <= width for line in shown.splitlines()), shown
    assert ["%", "us"] in [line.split() for line in text(made).splitlines()]
    assert [">=", "85", "<=", "30"] in [line.split() for line in text(made).splitlines()]


def test_the_command_prints_saves_and_is_quiet_in_a_pipe(
    command: None, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report.kvpagoda, "__file__", str(tmp_path / "lib" / "kvpagoda" / "__init__.py"))
    some = {"the card": 1, "decode steps": 1, "index keys": 1}
    monkeypatch.setattr(
        report, "all_cases", lambda *given: [case for case in measure.all_cases(*given) if case.part in some]
    )
    done = here("bench", "gpu", "--save", width=80)
    assert done.returncode == 0 and done.stderr == "saved as gpu_nvidia_h100_80gb_hbm3.json\n"
    assert done.stdout.startswith(f"{NAME}, 80.0 GiB: driver ") and "figures meet their bounds" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    saved = json.loads((tmp_path / "gpu_nvidia_h100_80gb_hbm3.json").read_text())
    done = here("bench", "gpu", "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 0 and not done.stderr
    for found in (saved, printed):
        assert violations(found, schema_of("bench_gpu")) == []
        assert found["machine"]["card"] == NAME and found["machine"]["card_nbytes"] == NBYTES
        assert [row["case"] for row in found["rows"]][:2] == ["copies", "full, 20"]


def test_the_command_says_what_failed_and_exits_with_1(
    command: None, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise CheckFailed("wrong rows")

    monkeypatch.setattr(report, "all_cases", lambda *_: [BenchCase("heads", "fp8, 64", fail)])
    done = here("bench", "gpu", width=40)
    assert done.returncode == 1 and "failed: fp8, 64: CheckFailed: wrong" in " ".join(done.stdout.split())
    printed = json.loads(here("bench", "gpu", "--json").stdout)
    assert (
        violations(printed, schema_of("bench_gpu")) == [] and printed["rows"][0]["failed"] == "CheckFailed: wrong rows"
    )


def test_an_interrupt_prints_what_is_done(
    command: None, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report.kvpagoda, "__file__", str(tmp_path / "lib" / "kvpagoda" / "__init__.py"))
    done_first = BenchCase("the card", "first", lambda: ({"in_gbps": 1.0}, {}))
    monkeypatch.setattr(report, "all_cases", lambda *_: [done_first, BenchCase("heads", "second", interrupt)])
    done = here("bench", "gpu", "--save")
    assert done.returncode == 130 and "first" in done.stdout and "second" not in done.stdout
    assert not [*tmp_path.iterdir()], "a part of the figures is not saved"


def test_without_a_gpu_it_is_an_error_in_one_line(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = here("bench", "gpu")
    assert done.returncode == 2 and done.stderr.startswith("kvpagoda: no GPU: torch ") and done.stderr.count("\n") == 1
    with pytest.raises(BadInput):
        Card()


def test_the_doctor_runs_the_short_form(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHORT", TINY)
    said = measure.short(card)
    assert "GB/s on the device" in said and "heads in fp8 100 % of a copy" in said and "a step of 3 requests" in said
    monkeypatch.setattr(formats, "append_scaled", lambda *_: None)
    with pytest.raises(CheckFailed):
        measure.short(card)


def test_the_driver_is_named_by_the_kernel_or_by_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "version"
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 02:29:02 UTC 2025\nGCC version: 12.2\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@b)\nGCC version: 12.2\n",
    ):
        said.write_text(line)
        assert driver_version(said) == "570.86.15"
    answered = subprocess.CompletedProcess([], 0, "570.86.15\n570.86.15\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answered)
    assert driver_version(tmp_path / "none") == "570.86.15"

    def none(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", none)
    assert driver_version(tmp_path / "none") is None


def test_what_a_card_says_of_itself(card: Card) -> None:
    facts = card.facts()
    assert facts["card"] == NAME and facts["capability"] == "9.0" and card.free_nbytes() == FREE
    assert {"driver", "cuda", "torch", "triton", "python", "kvpagoda"} <= facts.keys()
    with card.active():
        card.tidy()
    assert FakeEvent.recorded >= 0
