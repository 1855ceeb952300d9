"""Every published form is read, told apart by its content; what is malformed is told with file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpagoda.errors import BadInput, BadLine
from kvpagoda.replay import Request, Trace, read_requests
from raises import raises

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
RECORD = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1, 2]}
WEKA = {"format": "weka-rle-v1", "block_size": 64, "hash_id_scope": "local"}
STEP = {"t": 3.5, "in": 320, "out": 9, "r": [1, 3, 8, 2]}
LCP = {"format": "lcp-v1", "unit": "utf8 byte"}
PROMPT = {"t": 0.5, "ses": 1, "n": 200, "o": 5, "p": -1, "l": 0}
LENGTHS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,34,2\n"
)


def lines(*records: object) -> str:
    return "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)


def plain(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def packed(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()))
    return path


@pytest.mark.parametrize("write", [plain, packed])
def test_the_public_form(write: Callable[[Path, str], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "no-ending-to-go-by", lines(RECORD, "\n", {**RECORD, "hash_ids": [], "delay": 3}))
    first, second = read_requests(path)
    assert (first.arrival, first.input_length, first.output_length) == (1.5, 1000, 7)
    assert first.block_ids.tolist() == [0, 1, 2] and first.block_ids.dtype == np.int64
    assert second.block_ids.shape == (0,) and second.block_ids.dtype == np.int64
    assert [r.block_ids.tolist() for r in read_requests(str(path))] == [[0, 1, 2], []]


def test_an_iterable_of_records_or_requests() -> None:
    found = list(read_requests(iter([RECORD, {**RECORD, "hash_ids": np.array([5, 6], np.uint32)}])))
    assert [r.block_ids.tolist() for r in found] == [[0, 1, 2], [5, 6]]
    assert list(read_requests(found)) == found and isinstance(found[0], Request)


RAG = {
    "timestamp": "82", "input_length": 3112, "output_length": 192, "session_id": "x",
    "hash_ids": {"sys_prompt": [8302, 14332], "passages_ids": [7398, 8302], "history": [], "user_input": [26923]},
}  # fmt: skip


def test_groups_of_ids_and_texts_of_seconds(tmp_path: Path) -> None:
    """RAGPulse: an id of one group is not that of another, and each stands for an even share of the prompt, up to 512."""
    text = lines(
        RAG, {**RAG, "timestamp": "93.5", "input_length": 7, "hash_ids": {"sys_prompt": [8302], "history": [1]}}
    )
    first, second = read_requests(plain(tmp_path / "rag.jsonl", text))
    assert (first.arrival, second.arrival) == (82.0, 93.5)
    assert first.block_ids.tolist() == [0, 1, 2, 3, 4] and second.block_ids.tolist() == [0, 5]
    trace = Trace.read(tmp_path / "rag.jsonl")
    assert trace.block_tokens.tolist() == [512] * 5 + [4, 4]  # 3112 / 5 and 7 / 2, rounded half up
    assert trace.tokens_of(np.array([2, 1])).tolist() == [1024, 4]


def test_ids_that_are_texts_and_records_without_a_time() -> None:
    bare = {"input_length": 1000, "hash_ids": ["a", "b", "a"]}
    found = list(read_requests([bare, {**bare, "timestamp": 3000}, {**bare, "hash_ids": ["c", "a"]}]))
    assert [r.block_ids.tolist() for r in found] == [[0, 1, 0], [0, 1, 0], [2, 0]]
    assert [r.arrival for r in found] == [0.0, 3.0, 3.0] and found[0].output_length == 0


def test_how_many_tokens_a_block_stands_for() -> None:
    """What a record says of each id comes first, then its block size, then what the caller says, then 512."""
    sized, listed = {**RECORD, "block_size": 400}, {**RECORD, "block_tokens": [7, 8, 9]}
    whole = np.array([3, 3])
    assert Trace.read([RECORD, RECORD]).tokens_of(whole).tolist() == [1001] * 2, "a block holds at least a token"
    assert Trace.read([RECORD, RECORD], block_size=400).tokens_of(whole).tolist() == [1000] * 2
    assert Trace.read([sized, sized], block_size=64).tokens_of(np.array([1, 2])).tolist() == [400, 800]
    mixed = Trace.read([sized, listed], block_size=64)
    assert mixed.block_tokens.tolist() == [400, 400, 200, 7, 8, 9] and mixed.tokens_of(whole).tolist() == [1000, 24]
    assert mixed.take([1]).block_tokens.tolist() == [7, 8, 9]
    assert (Trace.read([sized, RECORD], block_size=64).block_tokens == [400, 400, 200, 64, 64, 64]).all()


def test_run_lengths_and_ids_of_a_conversation(tmp_path: Path) -> None:
    text = lines(
        WEKA, {"conv": 1}, STEP, {**STEP, "in": 64, "r": [1, 1]}, {"conv": 2}, STEP, {**STEP, "in": 5, "r": []}
    )
    a, b, c, d = (r.block_ids.tolist() for r in read_requests(packed(tmp_path / "w", text)))
    assert a == [1, 2, 3, 8, 9] and b == [1] and c == [11, 12, 13, 18, 19] and d == []
    assert next(read_requests(tmp_path / "w")).arrival == 3.5


def test_common_prefixes_share_whole_blocks(tmp_path: Path) -> None:
    text = lines(LCP, PROMPT, {**PROMPT, "n": 300, "p": 0, "l": 200}, {**PROMPT, "n": 130, "p": 1, "l": 127})
    a, b, c = read_requests(plain(tmp_path / "l", text))
    assert a.block_ids.tolist() == [0, 1, 2] and b.block_ids.tolist() == [0, 1, 2, 3] and c.block_ids.tolist() == [0, 4]
    assert (c.input_length, c.output_length, c.arrival) == (130, 5, 0.5)


def test_lengths_without_ids(tmp_path: Path) -> None:
    first, second = read_requests(plain(tmp_path / "a.csv", LENGTHS))
    assert (first.arrival, first.input_length, first.output_length, len(first.block_ids)) == (0.0, 4808, 10, 0)
    assert second.arrival == 1.5


BAD_LINES = {
    "not json": ("{oops\n", "not JSON"),
    "a list": ("[1]\n", "expected a JSON object, got list"),
    "no ids": (lines({**RECORD, "hash_ids": None}), "'hash_ids' must be a list of whole numbers"),
    "field absent": (lines({"timestamp": 0}), "no field 'hash_ids'; the fields are timestamp"),
    "half an id": (lines({**RECORD, "hash_ids": [1, 1.5]}), "'hash_ids' must be a list of whole numbers"),
    "a flag as id": (lines({**RECORD, "hash_ids": [1, True]}), "'hash_ids' must be a list of whole numbers"),
    "nested ids": (lines({**RECORD, "hash_ids": [[1]]}), "'hash_ids' must be a list of whole numbers"),
    "huge id": (lines({**RECORD, "hash_ids": [2**70]}), "must fit in 64 bits"),
    "negative length": (lines({**RECORD, "input_length": -1}), "'input_length' must be a whole number from 0"),
    "a word as time": (lines({**RECORD, "timestamp": "soon"}), "'timestamp' must be a finite number, or a text of one"),
    "endless time": (lines({**RECORD, "timestamp": "inf"}), "a text of one, got 'inf'"),
    "texts and numbers": (
        lines({**RECORD, "hash_ids": ["a", "b"]}),
        "whole numbers in some records and texts in others",
    ),
    "both in one": (lines({**RECORD, "hash_ids": ["a", 1]}), "'hash_ids' must be a list of whole numbers, or of texts"),
    "group of one": (lines({**RECORD, "hash_ids": {"history": 3}}), "each group of 'hash_ids' must be a list"),
    "tokens of two": (lines({**RECORD, "block_tokens": [5, 5]}), "'block_tokens' must be a list of 3 whole numbers"),
    "no tokens": (lines({**RECORD, "block_tokens": [5, 5, 0]}), "'block_tokens' must be whole numbers from 1"),
    "block of none": (lines({**RECORD, "block_size": 0}), "'block_size' must be a whole number from 1"),
    "no number": (
        '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}\n',
        "finite number, or a text of one, got nan",
    ),
    "no length": (lines({**RECORD, "output_length": None}), "'output_length' must be a whole number"),
}


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("write", [plain, packed])
def test_a_bad_line_is_named(write: Callable[[Path, str], Path], case: str, tmp_path: Path) -> None:
    bad, message = BAD_LINES[case]
    path = write(tmp_path / "t.jsonl", lines(RECORD, RECORD, bad, RECORD))
    found = []
    with pytest.raises(BadInput) as caught:
        found.extend(read_requests(path))
    assert f"{path}, line 3: " in str(caught.value) and message in str(caught.value)
    found = []
    with pytest.raises(BadInput):
        for request in read_requests(path):
            found.append(request)
    assert len(found) == 2, "requests before the bad line are handed out"


BAD_FORMS = {
    "odd runs": (
        lines(WEKA, {"conv": 1}, {**STEP, "r": [1, 2, 3]}),
        "line 3: 'r' must be a list of whole numbers in pairs",
    ),
    "runs too long": (lines(WEKA, {**STEP, "r": [1, 6]}), "line 2: 'r' names 6 blocks of 64 tokens, 'in' is 320"),
    "run below 0": (lines(WEKA, {**STEP, "r": [-1, 2]}), "line 2: 'r' holds a number below 0"),
    "no block size": (lines({"format": "weka-rle-v1"}, STEP), "line 1: no field 'block_size'"),
    "later parent": (
        lines(LCP, PROMPT, {**PROMPT, "p": 1, "l": 5}),
        "line 3: prompt 1 of 200 bytes cannot share 5 bytes",
    ),
    "shares too much": (lines(LCP, PROMPT, {**PROMPT, "p": 0, "l": 201}), "with prompt 0 of 200"),
    "shares with none": (lines(LCP, {**PROMPT, "l": 1}), "line 2: prompt 0 of 200 bytes cannot share 1 bytes"),
    "unknown format": (lines({"format": "weka-rle-v9"}), "line 1: unknown format 'weka-rle-v9'; known: JSON lines"),
    "csv of two": (LENGTHS + "2023-11-16 18:17:03,5\n", "line 4: expected time, tokens in, tokens out"),
    "csv of words": (LENGTHS + "2023-11-16 18:17:03,5,x\n", "line 4: expected time, tokens in, tokens out"),
    "csv without time": (LENGTHS + "yesterday,5,5\n", "line 4: "),
    "other csv": (
        "time,in,out\n1,2,3\n",
        "line 1: no trace of a known form: it begins with 'time,in,out'; known: JSON lines",
    ),
    "empty": ("", "line 1: the file is empty; known forms: JSON lines"),
    "blank": ("\n\n", "line 1: the first line is empty"),
    "binary": ("\x00\x01\x02", "line 1: no trace of a known form"),
}


@pytest.mark.parametrize("case", BAD_FORMS)
def test_a_bad_file_is_named(case: str, tmp_path: Path) -> None:
    text, message = BAD_FORMS[case]
    path = plain(tmp_path / "t", text)
    with pytest.raises(BadInput) as caught:
        list(read_requests(path))
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_file_that_is_absent_or_cut_off(tmp_path: Path) -> None:
    for absent in (tmp_path / "nowhere", tmp_path):
        with raises(BadInput, needed=str(absent)):
            list(read_requests(absent))
    whole = packed(tmp_path / "t.gz", lines(*[RECORD] * 5000)).read_bytes()
    (tmp_path / "t.gz").write_bytes(whole[: len(whole) // 2])
    with raises(BadLine, line=2348):
        list(read_requests(tmp_path / "t.gz"))
    (tmp_path / "t.gz").write_bytes(whole[:12] + b"\xff" * 20 + whole[32:])
    with raises(BadLine, line=1):
        list(read_requests(tmp_path / "t.gz"))
    with raises(BadInput, needed="int"):
        list(read_requests(5))  # type: ignore[arg-type]
    with raises(BadLine, line=2):
        list(read_requests([RECORD, 7]))  # type: ignore[list-item]


def test_a_trace_in_columns() -> None:
    records = [RECORD, {**RECORD, "timestamp": 0, "hash_ids": [0, 5]}, {**RECORD, "hash_ids": []}]
    trace = Trace.read(records, keep_order=True)
    assert (len(trace), trace.num_refs, trace.num_distinct) == (3, 5, 4)
    assert [trace.chain(i).tolist() for i in range(3)] == [[0, 1, 2], [0, 5], []]
    assert trace.arrivals.tolist() == [1.5, 0, 1.5] and trace.input_lengths.tolist() == [1000] * 3
    assert [trace.by_arrival().chain(i).tolist() for i in range(3)] == [[0, 5], [0, 1, 2], []]
    ordered = Trace.read(records)
    assert [ordered.chain(i).tolist() for i in range(3)] == [[0, 5], [0, 1, 2], []]
    assert (ordered.arrivals.tolist(), ordered.out_of_order, trace.out_of_order) == ([0, 1.5, 1.5], 1, 1)
    assert Trace.read(trace) is trace
    assert len(Trace.read(trace, limit=2)) == 2 and Trace.read(trace, limit=9) is trace
    assert [Trace.read(trace, limit=2).chain(i).tolist() for i in range(2)] == [[0, 1, 2], [0, 5]]
    with raises(BadInput, field="a limit of requests", needed=0, available=1):
        Trace.read([], limit=0)
    assert (len(Trace.read([])), Trace.read([]).num_refs, Trace.read([]).num_distinct) == (0, 0, 0)


def test_ids_of_any_size_are_renumbered_and_the_same_id_behind_another_chain_is_another_block() -> None:
    wide = Trace.read([{**RECORD, "hash_ids": [2**62, -5]}, {**RECORD, "hash_ids": [2**62, 7]}])
    assert wide.ids.tolist() == [2, 0, 2, 1] and wide.ids.dtype == np.int32 and wide.num_distinct == 3
    turned = Trace.read(
        [{**RECORD, "hash_ids": [1, 2, 2]}, {**RECORD, "hash_ids": [2, 1]}, {**RECORD, "hash_ids": [1, 2]}]
    )
    assert turned.blocks.tolist() == [0, 1, 2, 3, 4, 0, 1] and turned.num_distinct == 5


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
@pytest.mark.parametrize(
    ("name", "requests", "refs", "distinct"),
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 288_500, 182_790),
        ("mooncake_synthetic.jsonl.gz", 3_993, 121_877, 43_924),
        ("lmcache_agent_lcp.jsonl.gz", 1_619, 249_770, 25_075),
        ("azure_code_2023.csv.gz", 8_819, 0, 0),
        ("azure_conv_2023.csv.gz", 19_366, 0, 0),
    ],
)
def test_the_published_traces(name: str, requests: int, refs: int, distinct: int) -> None:
    trace = Trace.read(TRACES / name)
    assert (len(trace), trace.num_refs, trace.num_distinct) == (requests, refs, distinct)
    assert trace.blocks is trace.ids, "their ids stand for whole prefixes"


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
def test_the_first_requests_of_the_longest_published_trace() -> None:
    trace = Trace.read(TRACES / "weka_agentic_rle.jsonl.gz", limit=2_000)
    assert len(trace) == 2_000 and trace.blocks is trace.ids
    assert np.array_equal(np.diff(trace.starts), trace.input_lengths // 64)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
def test_the_longest_published_trace() -> None:
    trace = Trace.read(TRACES / "weka_agentic_rle.jsonl.gz")
    assert (len(trace), trace.num_refs) == (49_334, 94_310_647) and trace.blocks is trace.ids
    assert round(trace.input_lengths.mean()) == 122_379
