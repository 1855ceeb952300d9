"""Independent replays: in several processes the same results, on Ctrl-C those that are done, progress on a terminal alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from json_schema import schema_of, violations
from kvpagoda.errors import BadInput
from kvpagoda.replay.jobs import run_jobs
from raises import raises

pytest.importorskip("typer")
Command = Callable[..., "subprocess.CompletedProcess[str]"]
SLOW = """
import time
from pathlib import Path

class Slow:
    '''Waits for an interrupt once more than 40 blocks were added.'''
    def __init__(self):
        self.leaves, self.added = {}, 0
    def add(self, keys, priority):
        self.added += len(keys)
        if self.added > 40:
            Path(__file__).with_name("waits").touch()
            time.sleep(60)
    def touch(self, keys, priority): pass
    def set_leaf(self, key, is_leaf): self.leaves.update({key: 1}) if is_leaf else self.leaves.pop(key)
    def choose(self, chain): return chain(next(iter(self.leaves)))[:1]
    def remove(self, keys, *, evicted): return keys
    def check(self, keys, leaves): pass
"""


def add(first: int, shared: int, on_request: Callable[[int], None] | None = None) -> int:
    if on_request is not None:
        on_request(first)
    return first + shared


def refuse(shared: int, on_request: object = None) -> int:
    raise BadInput("no", needed=shared)


def write(path: Path, chains: list[list[int]]) -> Path:
    records = [{"timestamp": i, "input_length": 9, "output_length": 1, "hash_ids": ids} for i, ids in enumerate(chains)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Return a short trace, and a long one on which the policy Slow of ``slow.py`` beside them waits."""
    (tmp_path / "slow.py").write_text(SLOW)
    short = write(tmp_path / "short.jsonl", [[1, 2, 3], [1, 2], [4], [1, 2, 3]])
    return [short, write(tmp_path / "long.jsonl", [[i % 7, 100 + i] for i in range(90)])]


def interrupted(
    arguments: list[str], is_time: Callable[[subprocess.Popen[str]], bool]
) -> subprocess.CompletedProcess[str]:
    """Run ``kvpagoda replay``, and press Ctrl-C when it is time."""
    command = [sys.executable, "-m", "kvpagoda", "replay", *arguments]
    pipe = subprocess.PIPE

    def as_at_a_terminal() -> None:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # a test that runs in the background ignores it, as its children do

    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, preexec_fn=as_at_a_terminal, start_new_session=True
    ) as process:
        try:
            end = time.monotonic() + 120
            while not is_time(process):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end, "it never was time"
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the group
            output, errors = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
    assert errors == ""
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_each_job_ends_once_with_its_number(processes: int) -> None:
    from functools import partial

    found: dict[int, int] = {}
    told: list[tuple[int, int]] = []
    jobs = [partial(add, number) for number in (3, 1, 2)]
    run_jobs(jobs, 10, processes, found.__setitem__, lambda number, requests: told.append((number, requests)))
    assert found == {0: 13, 1: 11, 2: 12} and {number for number, _ in told} == {0, 1, 2}
    with raises(BadInput, needed=10):
        run_jobs([refuse, refuse], 10, processes, found.__setitem__)
    with raises(BadInput, field="jobs", needed=0, available=1):
        run_jobs(jobs, 10, 0, found.__setitem__)


def plain(figures: Any) -> Any:
    return {name: value for name, value in figures.items() if name != "seconds"}


def test_several_traces_give_what_each_gives_alone(traces: list[Path], here: Command) -> None:
    options = ("--capacity", "2,3", "--policy", "lru,s3fifo,opt", "--json")
    alone = [json.loads(here("replay", str(path), *options).stdout) for path in traces]
    for more in (("--workers", "1"), ("--jobs", "2")):
        printed = json.loads(here("replay", *map(str, traces), *options, *more).stdout)
        assert violations(printed, schema_of("replay_traces")) == []
        assert not printed["partial"] and list(map(plain, printed["traces"])) == list(map(plain, alone))
    text = here("replay", *map(str, traces), *options[:-1], "--jobs", "2").stdout
    assert text.index("short.jsonl: 4 requests") < text.index("long.jsonl: 90 requests") and text.count("s3fifo") == 4
    served = json.loads(here("replay", *map(str, traces), "--schema", "qwen3-8b", "--jobs", "1", "--json").stdout)
    assert violations(served, schema_of("replay_traces")) == []
    assert [figures["schema"] for figures in served["traces"]] == ["qwen3-8b"] * 2
    refused = here("replay", *map(str, traces), "--plot", "a.png")
    assert refused.returncode == 2 and "--plot is a file about one trace; got 2" in refused.stderr
    absent = here("replay", str(traces[0]), "nowhere.jsonl", "--jobs", "2")
    assert absent.returncode == 2 and "no trace at 'nowhere.jsonl'" in absent.stderr


def test_a_grid_of_budgets_in_two_processes(here: Command) -> None:
    options = ("--limit", "30", "--schema", "qwen3-8b", "--budget", "1GiB,2GiB", "--policy", "lru,s3fifo,opt", "--json")
    one, two = (json.loads(here("replay", *options, "--jobs", jobs).stdout) for jobs in ("1", "2"))
    assert one == two and len(one["results"]) == 6 and not one["partial"]


def test_the_descriptions_of_one_and_of_several_traces_agree() -> None:
    items = schema_of("replay_traces")["properties"]["traces"]["items"]["anyOf"]
    for item, name in zip(items, ("replay", "replay_schema"), strict=True):
        assert item == {key: value for key, value in schema_of(name).items() if key not in ("$schema", "title")}


def test_an_interrupt_prints_what_is_done(traces: list[Path]) -> None:
    slow = traces[0].with_name("slow.py")
    waits = slow.with_name("waits")
    arguments = [str(traces[1]), "--capacity", "20,9", "--policy", f"lru,{slow}:Slow,opt"]
    done = interrupted([*arguments, "--json"], lambda process: waits.exists())
    assert done.returncode == 130
    figures = json.loads(done.stdout)
    assert violations(figures, schema_of("replay")) == [] and figures["partial"]
    assert [(r["capacity_blocks"], r["policy"]) for r in figures["results"]] == [
        (20, "lru"), (20, "opt"), (9, "lru"), (9, "opt"),
    ]  # fmt: skip
    waits.unlink()
    done = interrupted(arguments, lambda process: waits.exists())
    assert done.returncode == 130 and "partial: interrupted after 4 of 6 replays" in done.stdout
    waits.unlink()
    done = interrupted([*arguments[:-1], f"{slow}:Slow"], lambda process: waits.exists())
    assert (done.returncode, done.stdout) == (130, ""), "nothing was done"


def test_an_interrupt_leaves_the_bound_of_a_model_that_is_done(traces: list[Path]) -> None:
    slow = traces[0].with_name("slow.py")
    arguments = [str(traces[1]), "--schema", "qwen3-8b", "--budget", "2GiB", "--policy", f"opt,{slow}:Slow", "--json"]
    done = interrupted(arguments, lambda process: slow.with_name("waits").exists())
    figures = json.loads(done.stdout)
    assert done.returncode == 130 and violations(figures, schema_of("replay_schema")) == [] and figures["partial"]
    assert [result["policy"] for result in figures["results"]] == ["opt"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_prints_the_traces_that_are_done(jobs: str, traces: list[Path]) -> None:
    slow = traces[0].with_name("slow.py")
    waits = slow.with_name("waits")
    arguments = [*map(str, traces), "--capacity", "9", "--policy", f"lru,{slow}:Slow", "--jobs", jobs, "--json"]
    began: list[float] = []

    def is_time(process: subprocess.Popen[str]) -> bool:
        """A second after Slow waits: with two processes the short trace has ended in the other one by then, or never."""
        if waits.exists() and not began:
            began.append(time.monotonic())
        return bool(began) and time.monotonic() > began[0] + (3 if jobs == "2" else 0)

    done = interrupted(arguments, is_time)
    assert done.returncode == 130
    printed = json.loads(done.stdout)
    assert violations(printed, schema_of("replay_traces")) == [] and printed["partial"]
    names = [Path(figures["trace"]).name for figures in printed["traces"]]
    assert names == ["short.jsonl", "long.jsonl"][: len(names)], (
        "a trace that is half done is there if one process did it"
    )
    assert [len(figures["results"]) for figures in printed["traces"]] == [2, 1][: len(names)]
    assert len(names) == (2 if jobs == "1" else 1)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are found in /proc")
def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    seen: set[str] = set()

    def is_time(process: subprocess.Popen[str]) -> bool:
        seen.update(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        return len(seen) >= 3  # two of the pool, and the tracker of resources

    arguments = ["--limit", "20000", "--capacity", "3000,4000", "--policy", "lru,s3fifo,lfuda", "--jobs", "2", "--json"]
    done = interrupted(arguments, is_time)
    assert done.returncode == 130
    figures = json.loads(done.stdout)
    assert figures["partial"] and {r["policy"] for r in figures["results"]} >= {"lru"} and len(figures["results"]) < 6
    end = time.monotonic() + 20
    while any(is_running(pid) for pid in seen):
        assert time.monotonic() < end, "its processes go on"
        time.sleep(0.1)


def running_in(group: int) -> list[str]:
    """Return the processes of a process group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(pgrp) == group and state != "Z":
            found.append(path.parent.name)
    return found


WORKERS = ("--limit", "20000", "--schema", "qwen3-8b", "--workers", "2")
JOBS = ("--limit", "20000", "--capacity", "3000,4000", "--policy", "lru,s3fifo,lfuda", "--jobs", "2")


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processes are listed in /proc")
@pytest.mark.parametrize(
    ("number", "options", "children", "wait"),
    [
        (signal.SIGINT, JOBS, 2, 0.0),  # the command, the tracker of resources, one of the pool
        (signal.SIGINT, JOBS, 3, 0.0),
        (signal.SIGINT, JOBS, 3, 0.6),  # both import
        (signal.SIGINT, WORKERS, 3, 3.0),
        (signal.SIGKILL, JOBS, 3, 0.3),
        (signal.SIGKILL, JOBS, 3, 3.0),
        (signal.SIGKILL, WORKERS, 3, 3.0),
        (signal.SIGTERM, JOBS, 3, 3.0),
    ],
)
def test_the_processes_end_with_the_command(
    number: signal.Signals, options: tuple[str, ...], children: int, wait: float
) -> None:
    command = [sys.executable, "-m", "kvpagoda", "replay", *options, "--json"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}  # a thread that may take the interrupt
    started = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True)
    with subprocess.Popen(
        command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **started
    ) as process:  # type: ignore[call-overload]
        try:
            until(lambda: len(running_in(process.pid)) > children or process.poll() is not None)
            time.sleep(wait)
            assert process.poll() is None, process.communicate()
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does
            else:
                process.send_signal(number)
            process.communicate(timeout=60)  # until no process has its standard output
            until(lambda: not running_in(process.pid))
        finally:
            for pid in running_in(process.pid):
                os.kill(int(pid), signal.SIGKILL)
    assert process.returncode == (130 if number == signal.SIGINT else -number)


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.005)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_progress_is_for_a_terminal(traces: list[Path]) -> None:
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-m", "kvpagoda", "replay", str(traces[1]), "--policy", "lru,s3fifo"]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert piped.returncode == 0 and piped.stderr == ""
    reading, writing = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, env=environment, text=True) as process:
        os.close(writing)
        assert process.stdout is not None and "s3fifo" in process.stdout.read()
        shown = b""
        try:
            while more := os.read(reading, 4096):
                shown += more
        except OSError:  # the other side is closed
            pass
    os.close(reading)
    assert process.returncode == 0 and b"replays" in shown and b"/12" in shown
