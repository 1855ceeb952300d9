"""What a simulation's steps cost: the arithmetic, the public figures and their sources."""

from __future__ import annotations

import doctest
import importlib
import json
from pathlib import Path
from unittest.mock import ANY

import pytest

from kvpagoda import Schema
from kvpagoda.errors import BadInput
from kvpagoda.replay.fleet.costs import Costs, Ticks, TierCosts, public_figures
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from kvpagoda.schema.presets import presets
from raises import raises

FULL = Layer(0, "full", (Attention(1, 8, 8, "float16"),))  # 32 bytes a token
WINDOW = Layer(1, "window", (Attention(1, 8, 8, "float16", Growth(window=48)),))
STATE = Layer(2, "state", (Recurrent((Rows("r", (4, 8), "float32"),)),))  # 128 bytes


def test_the_examples_of_the_module() -> None:
    assert doctest.testmod(importlib.import_module("kvpagoda.replay.fleet.costs")) == (0, 1)


def test_a_step_costs_the_sum_of_its_parts() -> None:
    plan = Schema((FULL, WINDOW, STATE)).plan("1MiB", 4, 16)
    ticks = Ticks(Costs(step=1.0, prefill_token=0.1, decode_token=0.01, read_byte=1e-6), plan)
    read = 48 * 32 + 128  # of the window and the state, which do not grow
    expected = 1.0 + 7 * 0.1 + 3 * (0.01 + read * 1e-6) + 500 * 32e-6
    assert ticks.of(1, 7, 3, 500) == round(expected * 1e12)


def test_many_steps_cost_what_each_costs_alone() -> None:
    plan = Schema((FULL,)).plan("1MiB", 4, 16)
    ticks = Ticks(Costs(0.0013, 0.00017, 0.00023, 1.7e-9), plan)
    alone = sum(ticks.of(1, 9 if step == 0 else 0, 5, 1000 + 5 * step) for step in range(40))
    assert ticks.of(40, 9, 5, 1000) == alone


def test_defaults_are_computed_from_public_figures() -> None:
    one, four = Costs.of("h100", "llama-3.1-70b"), Costs.of("h100", "llama-3.1-70b", gpus=4)
    assert one.prefill_token == pytest.approx(2 * 70.6e9 / (989.4e12 * 0.44))
    assert one.step == pytest.approx(2 * 70.6e9 / (3.35e12 * 0.57))
    assert four.step == one.step / 4 and four.prefill_token == one.prefill_token / 4
    assert one.tiers["host"].byte == 1 / 64e9
    sparse = Costs.of("h100", "gpt-oss-120b")
    assert sparse.prefill_token == pytest.approx(2 * 5.1e9 / (989.4e12 * 0.44))  # the active parameters
    assert sparse.step == pytest.approx(117e9 * 0.55 / (3.35e12 * 0.57))  # all of them are read


def test_every_public_figure_has_a_source() -> None:
    table = public_figures()
    rows = [row for part in ("gpus", "efficiency", "models", "tiers") for row in table[part].values()]
    assert len(rows) > 10
    for row in rows:
        assert row["source"] and isinstance(row["checked"], bool)
    assert table["models"].keys() <= presets().keys()


def test_costs_are_read_from_text(tmp_path: Path) -> None:
    assert Costs.read("none", "x") == Costs()
    assert Costs.read("h200", "qwen3-8b") == Costs.read("h200:qwen3-8b", "x") == Costs.of("h200", "qwen3-8b")
    assert Costs.read("4xh100:llama-3.1-70b", "x") == Costs.of("h100", "llama-3.1-70b", 4)
    own = Costs(0.001, 0.0001, 0.0002, 1e-12, {"host": TierCosts(0.00001, 1e-10)})
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own.to_dict()))
    assert Costs.read(str(path), "x") == own
    with raises(BadInput, field="gpus", needed=0, available=1):
        Costs.read("0xh100", "llama-3.1-8b")
    for text, wrong in (("h1000", "h1000"), ("h100:llama", "llama"), ("xh100", "xh100")):
        with raises(BadInput, needed=wrong, available=ANY):
            Costs.read(text, "llama-3.1-8b")
    for bad in ("[]", "{", '{"steps": 1}', '{"step": -1}', '{"tiers": {"host": {"late": 1}}}'):
        path.write_text(bad)
        with pytest.raises(BadInput):
            Costs.read(str(path), "x")
    with raises(BadInput, field="prefill_token", needed=ANY, available=0):
        Costs(prefill_token=float("nan"))
