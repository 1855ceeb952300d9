"""Forms of other projects: each sample is made by hand in the form that its project documents."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda import BadLine
from kvpagoda.errors import BadInput
from kvpagoda.replay import Request, Trace, read_requests, replay
from raises import raises

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ids(requests: list[Request]) -> list[list[int]]:
    return [request.block_ids.tolist() for request in requests]


# alibaba-edu/qwen-bailian-usagetraces-anon, README, "Data Specification of the Traces"
CHAT = {
    "chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132, "type": "text",
    "turn": 1, "hash_ids": [1089, 1090, 1091],
}  # fmt: skip
TURN = {
    **CHAT,
    "chat_id": 160,
    "parent_chat_id": 159,
    "turn": 2,
    "timestamp": 70.5,
    "hash_ids": [1089, 1090, 1091, 6326],
}


def test_bailian_counts_seconds_and_sixteen_tokens_and_follows_parents(tmp_path: Path) -> None:
    other = {**CHAT, "chat_id": 3, "parent_chat_id": 99, "timestamp": 62}  # its parent is not in the trace
    trace = Trace.read(write(tmp_path / "qwen_traceA_blksz_16.jsonl", CHAT, TURN, other))
    assert trace.arrivals.tolist() == [61.114, 62.0, 70.5] and trace.block_size == 16
    assert trace.sessions is not None and trace.sessions.tolist() == [0, 1, 0]
    assert trace.tokens_of(np.array([2, 3, 3])).tolist() == [32, 40, 40]
    assert replay(trace, capacity_blocks=9).block_hits == 6


# LMCache, docs "Lookup Hash Logging", lmcache/tools/cache_simulator/README.md
LOOKUP = {
    "timestamp": 1711929600.5, "request_id": "req-001", "model_name": "DeepSeek-V3", "chunk_size": 256, "seq_len": 700,
    "dtypes": ["float8_e4m3fn"], "shapes": [[32, 256, 128]], "chunk_hashes": ["0xab", "0xcd"],
}  # fmt: skip


def test_lmcaches_lookups_share_chunks_only_within_a_model(tmp_path: Path) -> None:
    other = {**LOOKUP, "timestamp": 1711929602, "model_name": "Llama", "chunk_hashes": ["0xab"]}
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "lookup_hashes_20260401_143025_000000.jsonl", LOOKUP, other)
    write(tmp_path / "logs" / "lookup_hashes_20260401_203025_000001.jsonl", {**LOOKUP, "timestamp": 1711951200})
    found = list(read_requests(tmp_path / "logs"))
    assert ids(found) == [[0, 1], [2], [0, 1]], "the files of a folder are one trace"
    assert [r.arrival for r in found] == [0.0, 1.5, 21599.5] and [r.input_length for r in found] == [700] * 3
    assert Trace.read(tmp_path / "logs").tokens_of(np.array([2, 1, 0])).tolist() == [512, 256, 0], "the tail never hits"
    with raises(BadLine, field="chunk_hashes", line=1):
        list(read_requests([{**LOOKUP, "seq_len": 511}]))


# ai-dynamo/dynamo: docs/benchmarks/dynosim-runs.md, "Input Format"
SESSION = (
    {"session_id": "a", "timestamp": 1000, "input_length": 2048, "output_length": 128, "hash_ids": [1, 2, 3, 4]},
    {"session_id": "a", "delay_ms": 50, "input_tokens": 2560, "output_tokens": 128, "hash_ids": [1, 2, 3, 4, 5]},
    {"session_id": "b", "created_time": 1010, "input_length": 1024, "output_length": 64, "hash_ids": [9, 10]},
    {"session_id": "a", "delay": 10.0, "tool_wait_ms": 2500.0, "input_length": 9, "hash_ids": [2**64 - 1]},
)


def test_dynamos_sessions_aliases_and_delays(tmp_path: Path) -> None:
    found = list(read_requests(write(tmp_path / "mooncake.jsonl", *SESSION)))
    assert [round(r.arrival, 9) for r in found] == [1.0, 1.05, 1.01, 3.56], "a delay counts from the turn before"
    assert [r.session for r in found] == [0, 0, 1, 0] and [r.input_length for r in found] == [2048, 2560, 1024, 9]
    assert ids(found) == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [9, 10], [-1]], "64 bits without a sign"


# ai-dynamo/dynamo: docs, "Request Trace Reference", schema dynamo.request.trace.v1
END: dict[str, Any] = {
    "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1_700_000_002_000,
    "agent_context": {"session_id": "run-1"},
    "request": {
        "request_id": "r", "input_tokens": 130, "output_tokens": 7, "request_received_ms": 1_700_000_001_000,
        "finish_reason_metadata": {"tool_calls": [{"choice_index": 0, "tool_call_index": 0}]},
        "replay": {"trace_block_size": 64, "input_length": 130, "input_sequence_hashes": [2**63, 5, 6]},
    },
}  # fmt: skip


def test_dynamos_request_trace_alone_and_in_an_envelope(tmp_path: Path) -> None:
    later = {**END, "request": {**END["request"], "request_received_ms": 1_700_000_000_500}}
    passed_over = (
        {**END, "event_type": "tool_end"},
        {"timestamp": 3, "event": {**END, "event_type": "request_payload"}},
    )
    path = write(tmp_path / "dynamo-request-trace.jsonl", END, *passed_over, {"timestamp": 3, "event": later})
    first, second = read_requests(path)
    assert (first.arrival, second.arrival) == (0.0, -0.5), "a line is written when its request has ended"
    assert ids([first, second]) == [[-(2**63), 5, 6]] * 2 and first.calls_tool and first.session == second.session == 0
    short = {**END, "request": {**END["request"], "replay": {**END["request"]["replay"], "input_length": 128}}}
    with raises(BadLine, field="input_sequence_hashes", line=2) as caught:
        list(read_requests([END, short]))
    assert (caught.value.line, caught.value.field) == (2, "input_sequence_hashes")
    with raises(BadLine, field="schema", line=1):
        list(read_requests([{**END, "schema": "dynamo.request.trace.v9"}]))


# callanjfox/kv-cache-tester: docs/trace_replay_tester.md, "Trace Format"
STEP = {"t": 0.0, "type": "s", "model": "m", "in": 128, "out": 86, "hash_ids": [1, 2], "stop": "tool_use"}
AGENT = {"type": "subagent", "t": 5.0, "agent_id": "agent_001", "requests": [{**STEP, "t": 2.0, "hash_ids": [1, 7]}]}
TALK = {
    "id": "f64a", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 10, "system_tokens": 5,
    "requests": [STEP, AGENT, {**STEP, "t": 9.0, "in": 192, "hash_ids": [1, 2, 3], "stop": "end_turn"}],
}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
def test_wekas_conversations_are_files_with_ids_of_their_own(indent: int | None, tmp_path: Path) -> None:
    for name in ("trace_0001.json", "trace_0002.json"):
        (tmp_path / name).write_text(json.dumps(TALK, indent=indent))
    found = list(read_requests(tmp_path))
    assert ids(found) == [[1, 2], [1, 7], [1, 2, 3], [9, 10], [9, 15], [9, 10, 11]]
    assert [r.arrival for r in found[:3]] == [0.0, 7.0, 9.0], "the times of an agent count from its own"
    assert [r.session for r in found] == [0] * 3 + [1] * 3 and [r.calls_tool for r in found[:3]] == [True, True, False]
    bad = {**TALK, "requests": [STEP, {**AGENT, "requests": [{**STEP, "in": -1}]}]}
    (tmp_path / "trace_0002.json").write_text(json.dumps(bad, indent=indent))
    with raises(BadLine, field="requests[1].requests[0].in", needed=-1, line=1) as caught:
        list(read_requests(tmp_path))
    assert caught.value.field == "requests[1].requests[0].in"


def talk(scope: str, prompts: list[list[int]]) -> dict[str, Any]:
    steps = [{**STEP, "t": float(i), "in": 64 * len(prompt), "hash_ids": prompt} for i, prompt in enumerate(prompts)]
    return {"block_size": 64, "hash_id_scope": scope, "requests": steps}


def chains_of(talks: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the blocks of each request, each named by its scope."""
    return [
        [i if talk["hash_id_scope"] == "global" else (number, i) for i in step["hash_ids"]]
        for number, talk in enumerate(talks)
        for step in talk["requests"]
    ]


@pytest.mark.parametrize("seed", range(12))
def test_local_and_global_ids_in_one_trace_share_what_they_name(seed: int) -> None:
    rng = random.Random(seed)
    talks = [
        talk(rng.choice(["local", "global"]), [rng.sample(range(5), rng.randrange(1, 5)) for _ in range(3)])
        for _ in range(5)
    ]
    names: dict[Any, int] = {}
    found = [request.block_ids.tolist() for request in read_requests(talks)]
    for block_ids, chain in zip(found, chains_of(talks), strict=True):
        assert [names.setdefault(name, i) for i, name in zip(block_ids, chain, strict=True)] == block_ids
    assert len(set(names.values())) == len(names)
    one = [each for each in talks if each["hash_id_scope"] == talks[0]["hash_id_scope"]]
    assert min(i for request in read_requests(one) for i in request.block_ids.tolist()) >= 0, "as they are, or shifted"


def test_a_scope_or_an_id_that_means_nothing_is_a_bad_line() -> None:
    with raises(BadLine, field="hash_id_scope", line=1) as caught:
        list(read_requests([talk("file", [[1]])]))
    assert caught.value.field == "hash_id_scope"
    with raises(BadLine, field="requests[0].hash_ids", line=2):
        list(read_requests([talk("local", [[1]]), talk("local", [[2**64 - 1]])]))


def with_agents(*agents: tuple[float, list[float]]) -> dict[str, Any]:
    """Return a conversation with agents: (time of the entry, times of the requests)."""
    entries = [{"type": "subagent", "t": t, "requests": [{**STEP, "t": each} for each in times]} for t, times in agents]
    return {**TALK, "requests": [STEP, *entries, {**STEP, "t": 200.0}]}


def test_times_of_agents_count_from_the_agent_or_from_the_conversation() -> None:
    for base, agent in (("agent", (100.0, [0.0, 110.0])), ("conversation", (100.0, [100.0, 210.0]))):
        trace = Trace.read([with_agents(agent)])
        assert (trace.arrivals.tolist(), trace.agent_times) == ([0.0, 100.0, 200.0, 210.0], base)
    nested = {"type": "subagent", "t": 5.0, "requests": [{**STEP, "t": 6.0}, {**AGENT, "t": 7.0}]}
    inner = {**nested, "requests": [nested["requests"][0], {**AGENT, "t": 7.0, "requests": [{**STEP, "t": 8.0}]}]}
    trace = Trace.read([{**TALK, "requests": [STEP, inner]}])
    assert (trace.arrivals.tolist(), trace.agent_times) == ([0.0, 6.0, 8.0], "conversation")
    assert Trace.read([{**TALK, "requests": [STEP, inner]}], agent_times="agent").arrivals.tolist() == [0, 11, 20]
    for quiet in (with_agents(), with_agents((0.0, [3.0]))):
        assert Trace.read([quiet]).agent_times is None, "no agents, or none that tells"
    with raises(BadInput, needed="agents", available=("agent", "conversation")):
        Trace.read([TALK], agent_times="agents")


def test_the_most_agents_of_a_trace_say_from_when_their_times_count(tmp_path: Path) -> None:
    """An agent whose first request comes later than its entry says nothing certain; one before its entry may be an error."""
    late, plain = with_agents((2.0, [3.0, 4.0])), with_agents((50.0, [0.0]), (60.0, [1.0]))
    records = [late, plain]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for source in (records, path):
        trace = Trace.read(source, keep_order=True)
        assert (trace.arrivals.tolist(), trace.agent_times) == ([0, 5, 6, 200, 0, 50, 61, 200], "agent")
    with raises(BadInput, needed="agent_times"):
        Trace.read(iter(records))
    assert Trace.read(iter(records), agent_times="agent").agent_times == "agent"
    wrong = with_agents((50.0, [49.0]), (60.0, [60.0]), (70.0, [70.0]))
    trace = Trace.read([wrong, with_agents((20.0, [20.0 - 1e-9]))], keep_order=True)
    assert (trace.arrivals.tolist(), trace.agent_times) == ([0, 49, 60, 70, 200, 0, 20 - 1e-9, 200], "conversation")


def test_the_output_says_from_when_the_times_of_agents_count(tmp_path: Path, here: Command) -> None:
    path = tmp_path / "talks.jsonl"
    for times, said in (([0.0], "the agent's own entry"), ([100.0], "the beginning of the conversation")):
        path.write_text(json.dumps(with_agents((100.0, times))) + "\n")
        for options in (["--capacity", "9"], ["--schema", "qwen3-8b"]):
            shown = here("replay", str(path), *options, "--policy", "lru").stdout
            assert f"the times of the requests of agents count from {said}\n" in shown


def deep(levels: int) -> dict[str, Any]:
    return {"t": 0, "requests": [deep(levels - 1)]} if levels else STEP


def test_agents_of_agents_end_somewhere() -> None:
    assert len(list(read_requests([{"block_size": 64, "requests": [deep(4)]}]))) == 1
    with raises(BadLine, field="requests[0].requests[0].requests[0].requests[0].requests[0]", line=1):
        list(read_requests([{"block_size": 64, "requests": [deep(5)]}]))


# vllm-project/vllm: vllm/benchmarks/serve.py, what --save-result --save-detailed saves
RESULT = {
    "date": "20260401-143025", "backend": "vllm", "num_prompts": 2, "request_rate": "inf", "duration": 3.5,
    "total_input_tokens": 30, "request_throughput": 0.57, "input_lens": [10, 20], "output_lens": [3, 4],
    "ttfts": [0.1, 0.2], "itls": [[], []], "start_times": [1000.5, 1001.0], "errors": ["", ""],
}  # fmt: skip


def test_vllms_bench_results_have_arrivals_and_lengths(tmp_path: Path) -> None:
    found = list(read_requests(write(tmp_path / "appended.json", RESULT, RESULT)))
    assert [(r.arrival, r.input_length, r.output_length) for r in found] == [
        (0.0, 10, 3), (0.5, 20, 4), (0.5, 10, 3), (1.0, 20, 4),
    ]  # fmt: skip
    assert not any(len(r.block_ids) for r in found)
    with raises(BadInput, needed="blocks"):
        replay(tmp_path / "appended.json", capacity_blocks=3)
    brief = {name: value for name, value in RESULT.items() if name not in ("input_lens", "output_lens", "start_times")}
    with raises(BadLine, field="input_lens", line=1):
        list(read_requests([brief]))
    with raises(BadLine, field="output_lens", line=1):
        list(read_requests([{**RESULT, "output_lens": [3]}]))


# vllm-project/vllm: docs/benchmarking/cli.md, data sets custom, ShareGPT and BurstGPT (HPMLL/BurstGPT, README)
def test_vllms_data_sets_of_texts_share_whole_blocks_of_64_bytes(tmp_path: Path) -> None:
    first, second = "a" * 64 + "b" * 64, "a" * 64 + "c" * 70
    custom = write(tmp_path / "custom.jsonl", {"prompt": first, "output_tokens": 9}, {"prompt": second})
    found = list(read_requests(custom))
    assert ids(found) == [[0, 1], [0, 2]] and [(r.input_length, r.output_length) for r in found] == [(128, 9), (134, 0)]
    talks = [
        {"id": i, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "ä"}]}
        for i, text in enumerate((first, second))
    ]
    shared = tmp_path / "ShareGPT_V3.json"
    shared.write_text(json.dumps([*talks, {"id": 2, "conversations": []}], indent=1))
    assert ids(list(read_requests(shared))) == [[0, 1], [0, 2]]
    assert [r.output_length for r in read_requests(shared)] == [2, 2]


def test_burstgpts_table(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path.write_text(header + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,12.0,0,12,API log\n")
    found = [(r.arrival, r.input_length, r.output_length) for r in read_requests(path)]
    assert found == [(5.0, 472, 18), (45.5, 12, 0)]
    path.write_text(header + "5,ChatGPT,many,18,490,Conversation log\n")
    with raises(BadLine, field="Request tokens", needed="many", line=2):
        list(read_requests(path))


def test_a_document_of_records_and_one_that_ends_too_soon(tmp_path: Path) -> None:
    records = [CHAT, TURN]
    (tmp_path / "list.json").write_text(json.dumps(records, indent=1))
    assert ids(list(read_requests(tmp_path / "list.json"))) == [CHAT["hash_ids"], TURN["hash_ids"]]
    (tmp_path / "list.json").write_text(json.dumps(records, indent=1)[:-9])
    with raises(BadLine, line=1):
        list(read_requests(tmp_path / "list.json", on_bad=lambda error: None))


def test_files_of_a_folder_have_one_form(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", CHAT)
    write(tmp_path / "2.jsonl", SESSION[0])
    write(tmp_path / ".hidden", {"anything": 1})
    with raises(BadLine, field="chat_id", needed="chat_id", available=ANY, line=1):
        list(read_requests(tmp_path))
