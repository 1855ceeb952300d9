"""Engines on the command line: their settings in words, a table, and what does not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

from kvpagoda.errors import BadInput
from kvpagoda.replay import Group, replay_engine, synthetic
from kvpagoda.replay.engine_sheet import engine_from_text, measured
from raises import raises

VLLM = "vllm-0.33"


def test_engines_in_words() -> None:
    text = f"{VLLM},block_size=64,at_once=16,step_tokens=2048,shared=1,groups=full+window:128,retention=none"
    settings = {
        "block_size": 64, "at_once": 16, "step_tokens": 2048, "shared": True, "groups": Group.from_text("full+window:128"),
        "retention": None,
    }  # fmt: skip
    assert engine_from_text(text) == (VLLM, settings) and engine_from_text("kvpagoda") == ("kvpagoda", {})
    for wrong in ("blok=3", "block_size=x", "retention=all", "step_tokens=", "at_once"):
        with raises(BadInput, needed=f"{VLLM},{wrong}"):
            engine_from_text(f"{VLLM},{wrong}")
    with raises(BadInput, needed="windows", available=("full", "window", "chunk", "state")):
        engine_from_text(f"{VLLM},groups=windows:4")
    with raises(BadInput, needed="vlm-0.33", available=ANY):
        engine_from_text("vlm-0.33")


def test_a_sheet_has_the_results_of_each_capacity() -> None:
    trace = synthetic(40)
    sheet = measured(lambda _: trace, [2_000, 4_000], f"{VLLM},at_once=4,step_tokens=512", quiet=True)
    results = [replay_engine(trace, VLLM, size, at_once=4, step_tokens=512) for size in (2_000, 4_000)]
    assert sheet.figures["results"] == [result.to_dict() for result in results]
    assert [row[:2] for row in sheet.cells] == [
        (f"{result.capacity_blocks:,}", f"{result.hit_rate:.1%}") for result in results
    ]
    in_processes = measured(lambda _: trace, [2_000, 4_000], f"{VLLM},at_once=4,step_tokens=512", 2, quiet=True)
    assert in_processes.figures == sheet.figures
    assert "4 at once, 512 tokens a step" in sheet.lines[-1] and results[0].hit_tokens < results[1].hit_tokens


def test_the_command(here: Callable[..., Any]) -> None:
    done = here("replay", "--limit", "20", "--engine", VLLM, "--capacity", "3000")
    assert (
        done.returncode == 0 and "3,000" in done.stdout and "blocks of 16 tokens, 1 at once, each whole" in done.stdout
    )
    for options, told in {
        ("--engine", VLLM): "--engine goes with --capacity",
        ("--engine", VLLM, "--capacity", "9", "--policy", "lru", "--warm-up", "0.5"): "leave out --policy, --warm-up",
        ("--engine", "vllm", "--capacity", "9"): "unknown engine 'vllm'",
        ("--engine", VLLM, "--json-lines", "-"): "leave out --engine",
    }.items():
        done = here("replay", *options)
        assert done.returncode == 2 and told in done.stderr, done.stderr
