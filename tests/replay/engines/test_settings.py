"""Options of engines: one object or keywords, each checked once, and read by the command line."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from typing import Any
from unittest.mock import ANY

import pytest
from letters import trace

from kvpagoda import Schema, simulate
from kvpagoda.errors import BadInput
from kvpagoda.replay import EngineSettings, Group, Trace, replay, replay_engine, synthetic
from kvpagoda.replay.engine_sheet import engine_from_text, engines_from_text, settings_from_text
from kvpagoda.schema.presets import presets
from raises import raises

VLLM, SGLANG = "vllm-0.33", "sglang-0.5.23"
OTHERS: dict[str, Any] = {
    "retention": None, "match_unit": 8, "memory_ratio": 0.5, "states_per_path": 2, "unified_memory": True, "watermark": 0.5,
    "reserve_prompt": False,
}  # fmt: skip
"""Of each option a value that is not its default."""
LAYERS = Schema.from_hf_config(presets()["llama-3.1-8b"]["config"])
BLOCKS = 1_800
NBYTES = 16 * 128 * 1024 * (BLOCKS + 1)
"""Of so many blocks and the one that holds nothing."""


@cache
def requests() -> Trace:
    return synthetic(25)


def served(call: str, **settings: Any) -> list[int]:
    """What requests find that run at once in few blocks."""
    if call == "replay":
        found = replay(requests(), BLOCKS, engine=VLLM, at_once=8, step_tokens=512, shared=True, **settings)
        return found.per_request.tolist()
    more = {"engine": VLLM, "costs": "h100:llama-3.1-8b", "max_requests": 8, "step_tokens": 512, **settings}
    return simulate(requests(), LAYERS, NBYTES, **more).each.cached.tolist()


@pytest.mark.parametrize("call", ["replay", "simulate"])
def test_an_object_or_keywords(call: str) -> None:
    plain, careful = served(call), served(call, settings=EngineSettings(watermark=0.1))
    assert plain != careful and served(call, watermark=0.1) == careful
    both = served(call, settings=EngineSettings(watermark=0.1, reserve_prompt=False), watermark=0.0)
    assert both == served(call, reserve_prompt=False) != careful
    with pytest.raises(TypeError, match="blok"):
        served(call, blok=3)
    with raises(BadInput, field="settings", needed="dict"):
        served(call, settings={"watermark": 0.5})


def test_every_option_is_one_of_some_engine() -> None:
    assert {one.name for one in fields(EngineSettings)} == OTHERS.keys()
    for name, value in OTHERS.items():
        assert value != asdict(EngineSettings())[name]
        theirs = name in ("memory_ratio", "states_per_path", "unified_memory")
        for engine in ("kvpagoda", VLLM if theirs else SGLANG):
            if (engine, name) == ("kvpagoda", "watermark"):
                continue  # ours too
            with pytest.raises(BadInput, match=f"{engine} with {name}") as caught:
                replay_engine(trace("ab", size=64), engine, 40, block_size=64, **{name: value})
            assert caught.value.needed == engine
        engine = SGLANG if theirs else VLLM
        one, groups = EngineSettings(**{name: value}), Group.from_text("full+state")
        assert replay_engine(trace("ab", size=64), engine, 40, block_size=64, groups=groups, settings=one).requests == 1


@pytest.mark.parametrize(
    ("name", "value", "available"),
    [
        ("retention", -1, 0), ("retention", 1.5, 0), ("match_unit", 0, 1), ("states_per_path", "x", 1), ("watermark", -0.1, 0),
        ("watermark", float("nan"), 0),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_when_it_is_set(name: str, value: Any, available: int) -> None:
    with raises(BadInput, field=name, needed=value, available=available):
        EngineSettings(**{name: value})


def test_the_command_line_reads_each() -> None:
    text = ",".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in OTHERS.items())
    assert engine_from_text(f"{VLLM},{text.replace('None', 'none')}") == (VLLM, OTHERS)
    nothing = {one.name: None for one in fields(EngineSettings) if one.type == "int | None"}
    assert engine_from_text(",".join([VLLM, *(f"{name}=none" for name in nothing)])) == (VLLM, nothing)
    for wrong in ("memory_ratio=none", "watermark=none", "unified_memory=none", "reserve_prompt=yes"):
        with raises(BadInput, needed=f"{VLLM},{wrong}"):
            engine_from_text(f"{VLLM},{wrong}")


def test_ours_has_a_watermark_and_no_other_option() -> None:
    few = {"at_once": 8, "step_tokens": 512, "shared": True}
    plain, spared = (replay(requests(), BLOCKS, engine="kvpagoda", watermark=share, **few) for share in (0.0, 0.5))
    assert plain.per_request.tolist() != spared.per_request.tolist()
    given = {"costs": "h100:llama-3.1-8b", "max_requests": 8, "step_tokens": 512}
    plain, spared = (simulate(requests(), LAYERS, NBYTES, watermark=share, **given) for share in (0.0, 0.5))
    assert plain.waited["mean"] < spared.waited["mean"] and spared.finished == plain.finished
    for name, value in OTHERS.items():
        if name != "watermark":
            with raises(BadInput, needed="kvpagoda", available=value):
                simulate(requests(), LAYERS, NBYTES, **{name: value}, **given)


def test_engines_of_a_command_with_their_settings() -> None:
    text = "kvpagoda,watermark=0.3, vllm-0.33,retention=none,reserve_prompt=0,sglang-0.5.23"
    assert [settings_from_text(engine) for engine in engines_from_text(text)] == [
        ("kvpagoda", EngineSettings(watermark=0.3)), (VLLM, EngineSettings(retention=None, reserve_prompt=False)),
        (SGLANG, EngineSettings()),
    ]  # fmt: skip
    for wrong in ("watermark=0.3", "vllm-0.33,block_size=16", "vllm-0.33,watermark=x"):
        with raises(BadInput, needed=wrong, available=ANY):
            settings_from_text(engines_from_text(wrong)[0])
