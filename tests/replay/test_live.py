"""``kvpagoda replay --json-lines``: each request is answered at once, as a whole replay counts it, to any language."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from json_schema import schema_of, violations
from kvpagoda import BadLine
from kvpagoda.errors import BadInput
from kvpagoda.replay import Request, Trace, read_requests, replay, serve
from kvpagoda.replay.live import SchemaAnswers, TreeAnswers, answer_lines, served_policy
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows, Schema
from raises import raises

LINES = schema_of("replay_lines")
FULL = Layer(0, "full", (Attention(1, 8, 8, "float16"),))
SCHEMAS = {
    "full": (Schema((FULL,)), "30KiB"),
    "window": (Schema((FULL, Layer(1, "window", (Attention(1, 8, 8, "float16", Growth(window=40)),)))), "40KiB"),
    "state": (Schema((FULL, Layer(1, "state", (Recurrent((Rows("r", (4, 4), "float32"),)),)))), "30KiB"),
}


def records(seed: int, num: int = 60) -> list[dict[str, Any]]:
    """Return requests whose chains share beginnings, with ids of any size."""
    rng = np.random.default_rng(seed)
    names = rng.integers(-(2**62), 2**62, 40)
    found = []
    for number in range(num):
        chain = [int(names[rng.integers(0, 3) * 10 + i]) for i in range(rng.integers(1, 9))]
        length = len(chain) * 16 - int(rng.integers(0, 16))
        found.append(
            {"timestamp": number, "input_length": length, "output_length": 5, "hash_ids": chain, "block_size": 16}
        )
    return found


def answers(given: list[str], answer: Any, strict: bool = False) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    answer_lines(given, answer, said.append, strict=strict)
    assert [text for line in said for text in violations(line, LINES)] == []
    return said


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "lfu"])
@pytest.mark.parametrize("capacity", [1, 7, 30])
def test_a_tree_answers_as_a_replay_counts(policy: str, capacity: int) -> None:
    for seed in range(4):
        given = records(seed)
        trace = Trace.read(given)
        whole = replay(trace, capacity_blocks=capacity, policy=policy)
        said = answers([json.dumps(record) for record in given], TreeAnswers(capacity, policy))
        assert [line["hit_blocks"] for line in said] == whole.hits.tolist()
        assert [line["hit_tokens"] for line in said] == trace.tokens_of(whole.hits).tolist()
        assert sum(line["evicted_blocks"] for line in said) == whole.evictions
        assert [line["request"] for line in said] == list(range(60)) and said[-1]["cached_blocks"] <= capacity


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_answers_as_one_request_at_a_time_is_served(name: str) -> None:
    schema, budget = SCHEMAS[name]
    given = records(3, 80)
    whole = serve(Trace.read(given), schema, budget, tokens_per_id=16, max_requests=1)
    said = answers([json.dumps(record) for record in given], SchemaAnswers(schema, budget))
    assert [[line["prompt_tokens"], line["matched_tokens"], line["hit_tokens"]] for line in said] == whole.each.tolist()
    assert whole.cached_tokens > 0 and whole.evicted_blocks > 0, "the budget is small, but not too small"
    assert sum(line["evicted_blocks"] for line in said) == whole.evicted_blocks
    assert sum(line["evicted_checkpoints"] for line in said) == whole.evicted_checkpoints
    for group, counts in whole.groups.items():
        assert sum(line["groups"][group]["tokens"] for line in said) == counts["tokens"]
        assert sum(line["groups"][group]["evicted_blocks"] for line in said) == counts["evicted"]
    reasons = [line["limited_by"] for line in said]
    assert {reason: reasons.count(reason) for reason in set(reasons)} == whole.limited_by


def test_a_request_that_never_fits_changes_nothing() -> None:
    schema, budget = SCHEMAS["state"]
    good, large = json.dumps(records(1, 1)[0]), {"input_length": 2**31 - 1, "output_length": 2**31 - 1, "hash_ids": [1]}
    said = answers([good, json.dumps(large), good], SchemaAnswers(schema, budget))
    assert [line["fits"] for line in said] == [True, False, True]
    assert said[1]["hit_tokens"] == said[1]["evicted_blocks"] == 0 and said[2]["hit_tokens"] > 0


def test_bad_lines_are_answered_and_change_nothing() -> None:
    given = [json.dumps(record) for record in records(2, 9)]
    bad = [
        "{",
        "[1]",
        '{"hash_ids": [1]}',
        '{"hash_ids": "x", "input_length": 3}',
        "\x00",
        '{"hash_ids": [], "input_length": -1}',
    ]
    mixed = [line for pair in zip(given, [*bad, "", " ", "{}"]) for line in pair]
    said = answers(mixed, TreeAnswers(9))
    good = [line for line in said if "error" not in line]
    keys = good[0].keys() - {"line"}
    assert [{key: line[key] for key in keys} for line in good] == [
        {key: line[key] for key in keys} for line in answers(given, TreeAnswers(9))
    ]
    wrong = [line for line in said if "error" in line]
    assert [line["line"] for line in wrong] == [2, 4, 6, 8, 10, 12, 18], "empty lines have no answer"
    assert [line["field"] for line in wrong] == [
        None,
        None,
        "input_length",
        "hash_ids",
        None,
        "input_length",
        "hash_ids",
    ]
    assert wrong[0]["error"].startswith("-, line 2: not JSON")
    heard: list[Any] = []
    with raises(BadLine, line=2):
        answer_lines(mixed, TreeAnswers(9), heard.append, strict=True)
    assert len(heard) == 2 and heard[1]["error"].startswith("-, line 2: not JSON"), "the answer comes before the end"


def test_lines_without_a_request_are_answered_too() -> None:
    given = [{"format": "weka-rle-v1", "block_size": 64}, {"conv": 1}, {"t": 1, "in": 128, "out": 1, "r": [1, 2]}]
    said = answers([json.dumps(line) for line in given], TreeAnswers(9))
    assert [line["request"] for line in said] == [None, None, 0]


def test_what_needs_the_whole_trace_is_refused() -> None:
    for policy in ("opt", "block-fifo"):
        with raises(BadInput, needed=policy):
            served_policy(policy)


# What a simulator in another language does: start the command, write a request, wait for the answer, and choose the next
# request by it. The next chain is as long as the hit, and one block more; every third line is bad.
NODE = r"""
const { spawn } = require("node:child_process");
const [program, ...rest] = process.argv.slice(2);
const child = spawn(program, rest, { stdio: ["pipe", "pipe", "inherit"] });
let turn = 0, hit = 0, buffered = "";
function ask() {
  const chain = Array.from({ length: (hit % 6) + 2 }, (_, i) => i + (turn % 4 === 3 ? 100 : 0));
  child.stdin.write(turn % 3 === 2 ? "{oops\n"
    : JSON.stringify({ timestamp: turn, input_length: chain.length * 512, hash_ids: chain }) + "\n");
}
child.stdout.on("data", (data) => {
  buffered += data;
  const end = buffered.indexOf("\n");
  if (end < 0) return;
  if (end !== buffered.length - 1) throw new Error("more than one answer to one line");
  const answer = JSON.parse(buffered);
  buffered = "";
  console.log(JSON.stringify(answer));
  if ("hit_blocks" in answer) hit = answer.hit_blocks;
  if (++turn === 12) child.stdin.end(); else ask();
});
child.on("close", (code) => process.exit(code));
ask();
"""
PERL = r"""
use strict; use warnings; use IPC::Open2; use JSON::PP;
my $pid = open2(my $answers, my $requests, @ARGV);
$requests->autoflush(1);
my ($hit, $json) = (0, JSON::PP->new->canonical);
for my $turn (0 .. 11) {
    my @chain = map { $_ + ($turn % 4 == 3 ? 100 : 0) } 0 .. $hit % 6 + 1;
    my %request = (timestamp => $turn, input_length => 512 * @chain, hash_ids => \@chain);
    print $requests $turn % 3 == 2 ? "{oops\n" : $json->encode(\%request) . "\n";
    my $answer = $json->decode(scalar <$answers>);
    print $json->encode($answer), "\n";
    $hit = $answer->{hit_blocks} if exists $answer->{hit_blocks};
}
close $requests;
waitpid $pid, 0;
exit $? >> 8;
"""
RUST = r"""
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut child = Command::new(&arguments[0]).args(&arguments[1..])
        .stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut requests = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    let mut hit = 0u64;
    for turn in 0..12u64 {
        let add = if turn % 4 == 3 { 100 } else { 0 };
        let chain: Vec<String> = (0..hit % 6 + 2).map(|i| (i + add).to_string()).collect();
        if turn % 3 == 2 { writeln!(requests, "{{oops").unwrap(); } else {
            writeln!(requests, "{{\"timestamp\": {}, \"input_length\": {}, \"hash_ids\": [{}]}}",
                turn, 512 * chain.len(), chain.join(",")).unwrap();
        }
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        print!("{}", answer);
        if let Some(at) = answer.find("\"hit_blocks\": ") {
            hit = answer[at + 14..].chars().take_while(|c| c.is_ascii_digit()).collect::<String>().parse().unwrap();
        }
    }
    drop(requests);
    std::process::exit(child.wait().unwrap().code().unwrap());
}
"""


def expected_turns() -> list[dict[str, Any]]:
    """Return what the program of another language is to hear, from the same loop in this process."""
    answer, said, hit = TreeAnswers(8), list[dict[str, Any]](), 0
    for turn in range(12):
        if turn % 3 == 2:
            said.append({"line": turn + 1, "field": None})
            continue
        chain = np.arange(hit % 6 + 2) + (100 if turn % 4 == 3 else 0)
        heard = answer(Request(turn, 512 * len(chain), 0, chain))
        said.append({"line": turn + 1, "request": turn - (turn + 1) // 3, **heard})
        hit = heard["hit_blocks"]
    return said


def program(language: str, folder: Path) -> list[str]:
    """Return the command that runs the program of ``language``. Skips the test without that language."""
    tool = {"node": "node", "perl": "perl", "rust": "rustc"}[language]
    found = shutil.which(tool) or shutil.which(tool, path=str(Path.home() / ".cargo" / "bin"))
    if found is None:
        pytest.skip(f"no {tool} on this machine")
    source = folder / {"node": "simulator.js", "perl": "simulator.pl", "rust": "simulator.rs"}[language]
    source.write_text({"node": NODE, "perl": PERL, "rust": RUST}[language])
    if language == "perl" and subprocess.run([found, "-MJSON::PP", "-e", "1"], capture_output=True).returncode:
        pytest.skip("this perl has no JSON::PP")
    if language != "rust":
        return [found, str(source)]
    built = subprocess.run(
        [found, "-o", str(folder / "simulator"), str(source)], capture_output=True, text=True, timeout=300
    )
    if built.returncode:
        pytest.skip(f"rustc cannot build here: {built.stderr[-300:]}")
    return [str(folder / "simulator")]


@pytest.mark.parametrize("language", ["node", "perl", "rust"])
def test_a_program_in_another_language_asks_and_waits(language: str, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "kvpagoda", "replay", "--json-lines", "-", "--capacity", "8"]
    done = subprocess.run([*program(language, tmp_path), *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    heard = [json.loads(line) for line in done.stdout.splitlines()]
    assert [text for line in heard for text in violations(line, LINES)] == []
    expected = expected_turns()
    assert any(line.get("hit_blocks") for line in expected) and any(line.get("evicted_blocks") for line in expected)
    assert [{key: line[key] for key in want} for line, want in zip(heard, expected, strict=True)] == expected


def test_strict_ends_with_an_answer_and_nobody_reading_is_no_error(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "kvpagoda", "replay", "--json-lines", "-", "--capacity", "8"]
    given = json.dumps(records(1, 1)[0]) + "\n"
    done = subprocess.run(
        [*command, "--strict"], input=given + "{\n" + given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and done.stderr.startswith("kvpagoda: -, line 2: not JSON")
    assert ["error" in json.loads(line) for line in done.stdout.splitlines()] == [False, True]
    reading, writing = os.pipe()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE, text=True) as process:
        os.close(writing)
        os.close(reading)
        _, errors = process.communicate(given * 3, timeout=300)
    assert (process.returncode, errors) == (0, "")


WRONG = {
    "no capacity": ([], "--json-lines needs --capacity, in blocks, or --schema"),
    "two capacities": (["--capacity", "3,4"], "--capacity takes one value with --json-lines, got '3,4'"),
    "a trace too": (["t.jsonl", "--capacity", "3"], "leave out TRACE"),
    "a bound": (["--capacity", "3", "--policy", "opt"], "opt cannot answer requests as they come"),
    "blocks of a schema": (["--capacity", "3", "--schema", "qwen3-8b"], "with --schema give --budget"),
    "a budget alone": (["--budget", "1GiB"], "--budget needs a model's layers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_one_line(case: str, here: Any) -> None:
    arguments, message = WRONG[case]
    done = here("replay", "--json-lines", "-", *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert "--strict is for --json-lines" in here("replay", "--strict").stderr


def test_a_file_is_answered_too(here: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records(5)))
    done = here("replay", "--json-lines", str(path), "--capacity", "9", "--policy", "s3fifo")
    hits = [json.loads(line)["hit_blocks"] for line in done.stdout.splitlines()]
    assert hits == replay(list(read_requests(path)), capacity_blocks=9, policy="s3fifo").hits.tolist()
