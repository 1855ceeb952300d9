"""Hostile lines: each is a BadLine with file, line and field, or is read; left out, the others are read as without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_reader_forms import AGENT, CHAT, END, LOOKUP, RESULT, SESSION, STEP, TALK, TURN

from kvpagoda import BadLine
from kvpagoda.errors import BadInput
from kvpagoda.replay import Request, Trace, hit_rate_curve, read_requests
from raises import raises

PUBLIC = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1, 2]}
RAG = {
    "timestamp": "82",
    "input_length": 31,
    "output_length": 1,
    "session_id": "x",
    "hash_ids": {"sys": [8], "user": [26]},
}
RUNS = {"t": 3.5, "in": 320, "out": 9, "r": [1, 3, 8, 2]}
LCP = {"t": 0.5, "n": 200, "o": 5, "p": -1, "l": 0}
GOOD: dict[str, list[dict[str, Any]]] = {
    "public": [PUBLIC, {**PUBLIC, "hash_ids": [0, 1, 5]}],
    "dynamo": list(SESSION[:3]),
    "grouped": [RAG, {**RAG, "timestamp": "93.5"}],
    "bailian": [CHAT, TURN],
    "lookups": [LOOKUP, LOOKUP],
    "request trace": [END, END],
    "conversations": [TALK, TALK],
    "results": [RESULT, RESULT],
    "prompts": [{"prompt": "a" * 99, "output_tokens": 3}, {"prompt": "a" * 70}],
    "run length": [{"format": "weka-rle-v1", "block_size": 64}, {"conv": 1}, RUNS, RUNS],
    "common prefix": [{"format": "lcp-v1"}, LCP, {**LCP, "p": 0, "l": 130}],
}
HUGE = json.loads("1" + "0" * 400)
HOSTILE = [
    None, True, "", "soon", "NaN", "1e999", -1, -(2**40), 0.5, float("nan"), float("inf"), 2**31, 2**63, 2**70, HUGE, 1e300,
    [], [None], [[1]], [1, "a"], ["a"], [1.5], [2**64], [-1, 2**63], {}, {"a": 1}, {"a": [1.5]}, {"a": {}}, [{}], [STEP],
    [AGENT], [{**STEP, "hash_ids": [-5]}], [0, 2**31 - 1], [3],
]  # fmt: skip
LINES = [
    "{",
    "[" * 100_000,
    '{"timestamp": 1, "hash_ids": [1, 2',
    "null",
    "3",
    '"text"',
    "\x00\x01",
    "{}",
    "[]",
    "\ufffd{",
]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    return path


def seen(requests: list[Request]) -> list[Hashable]:
    """Return what requests say, with ids and sessions numbered in the order in which they are first named."""
    names: dict[int, int] = {}
    sessions: dict[int, int] = {}
    return [
        (
            round(r.arrival, 6), r.input_length, r.output_length, r.calls_tool,
            tuple(names.setdefault(i, len(names)) for i in r.block_ids.tolist()),
            r.session if r.session < 0 else sessions.setdefault(r.session, len(sessions)),
        )
        for r in requests
    ]  # fmt: skip


def fields_of(record: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values in a record, those of nested ones too."""
    pairs = list(record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ())
    return [place for name, value in pairs for place in ((*where, name), *fields_of(value, (*where, name)))]


def changed(record: Any, place: tuple[Any, ...], value: Any) -> Any:
    copied = json.loads(json.dumps(record))
    inner = copied
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return copied


@st.composite
def hostile_lines(draw: st.DrawFn, name: str) -> tuple[str, int]:
    """Return (a hostile line, the number of the good line before which it stands)."""
    records = GOOD[name]
    if draw(st.booleans()):
        return draw(st.sampled_from(LINES)), draw(st.integers(1, len(records)))
    record = records[draw(st.integers(0, len(records) - 1))]
    if draw(st.integers(0, 9)) == 0:
        text = json.dumps(record)
        return text[: draw(st.integers(1, len(text) - 1))], draw(st.integers(1, len(records)))
    place = draw(st.sampled_from(fields_of(record)))
    return json.dumps(changed(record, place, draw(st.sampled_from(HOSTILE)))), draw(st.integers(1, len(records)))


@pytest.mark.parametrize("name", GOOD)
def test_a_hostile_line_is_refused_by_name_or_read(name: str, tmp_path: Path) -> None:
    good = [json.dumps(record) for record in GOOD[name]]
    clean = seen(list(read_requests(written(tmp_path / "good", good))))
    refused: list[BadLine] = []

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(hostile_lines(name))
    def run(drawn: tuple[str, int]) -> None:
        line, before = drawn
        path = written(tmp_path / "t", [*good[:before], line, *good[before:]])
        bad: list[BadLine] = []
        found = seen(list(read_requests(path, on_bad=bad.append)))
        if not bad:
            assert seen(list(read_requests(path))) == found
            return
        refused.extend(bad)
        with pytest.raises(BadLine) as caught:
            list(read_requests(path))
        first = caught.value
        assert str(first) == str(bad[0]) and str(first).startswith(f"{path}, line {first.line}: ")
        assert first.path == str(path) and first.line is not None and first.line > before
        if [error.line for error in bad] == [before + 1] and name not in ("run length", "common prefix"):
            assert found == clean, "the other lines are read as without it"
        trace = Trace.read(path, skip_bad=True)
        assert trace.skipped.lines == len(bad) and trace.skipped.first == [str(error) for error in bad[:3]]

    run()
    assert any(error.field for error in refused) and any(error.field is None for error in refused)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(st.text(max_size=30) | st.binary(max_size=30).map(lambda b: b.decode("latin-1")), max_size=5))
@example(["{}"])
def test_no_text_breaks_the_reader(lines: list[str]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = written(Path(folder) / "t", [line.replace("\n", " ") for line in lines])
        for on_bad in (None, lambda error: None):
            with pytest.raises(BadInput):
                list(read_requests(path, on_bad=on_bad))


def test_a_conversation_whose_beginning_is_lost_shares_nothing_with_the_one_before(tmp_path: Path) -> None:
    rows = [{"format": "weka-rle-v1", "block_size": 64}, {"conv": 1}, RUNS]
    lines = [*map(json.dumps, rows), '{"conv": 2', json.dumps(RUNS)]
    trace = Trace.read(written(tmp_path / "t", lines), skip_bad=True)
    (result,) = hit_rate_curve(trace, [99], ["lru"])
    assert result.block_hits == 0 and trace.num_distinct == 10


def test_a_prompt_that_is_lost_keeps_its_number(tmp_path: Path) -> None:
    rows: list[Any] = [{"format": "lcp-v1"}, LCP, {**LCP, "p": 0, "l": 130}, {**LCP, "p": 1, "l": 128}]
    lines = [*map(json.dumps, rows[:2]), "{", *map(json.dumps, rows[2:])]
    trace = Trace.read(written(tmp_path / "t", lines), skip_bad=True)
    assert trace.skipped.lines == 2 and "cannot share 128 bytes with prompt 1 of 0" in trace.skipped.first[1]
    assert [trace.chain(i).tolist() for i in range(2)] == [[0, 1, 2], [0, 1, 3]]


def test_a_line_cannot_ask_for_more_memory_than_a_prompt_needs(tmp_path: Path) -> None:
    for header, line, field, asked in (
        ({"format": "weka-rle-v1", "block_size": 1}, {**RUNS, "in": 2**31 - 1, "r": [0, 2**31 - 1]}, "r", 2**31 - 1),
        ({"format": "lcp-v1"}, {**LCP, "n": 2**31 - 1}, "n", 2**25 - 1),
    ):
        with raises(BadLine, field=field, needed=asked, available=2**24):
            list(read_requests([header, line]))


def test_nothing_but_bad_lines_is_an_error_even_when_they_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "t", ["{oops", "{", "[]"])
    with raises(BadInput, needed=1, available=0):
        Trace.read(path, skip_bad=True)


def test_the_command_says_what_it_left_out(here: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("typer")
    good = [json.dumps({**PUBLIC, "hash_ids": [0, i]}) for i in range(9)]
    path = str(written(tmp_path / "t.jsonl", [*good[:3], "{", "3", "[", "null", *good[3:]]))
    strict = here("replay", path, "--capacity", "4", "--policy", "lru")
    assert strict.returncode == 2 and strict.stderr.startswith(f"kvpagoda: {path}, line 4: not JSON")
    figures = json.loads(here("replay", path, "--capacity", "4", "--policy", "lru", "--skip-bad", "--json").stdout)
    assert figures["requests"] == 9 and figures["skipped"]["lines"] == 4 and len(figures["skipped"]["first"]) == 3
    said = " ".join(here("replay", path, "--capacity", "4", "--policy", "lru", "--skip-bad").stdout.split())
    assert (
        f"4 bad lines left out; the first 3: {path}, line 4: not JSON" in said and f"{path}, line 5: expected" in said
    )
