"""Numbers that cannot be right are refused with a typed error; numpy's integers are as good as Python's."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda.compat.deepseek_v4 import DSV4Config, build_schedule, compute_block_budget
from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.schema import Attention, Growth, Layer, Plan, Recurrent, Rows, Schema
from kvpagoda.units import parse_bytes, whole_number
from raises import raises

FULL = Attention(2, 16, 16, "float32")
WINDOW = Attention(2, 16, 16, "float32", Growth(window=64))
STATE = Recurrent((Rows("recurrent", (2, 4, 4), "float32"),))
SCHEMA = Schema(tuple(Layer(i, "layer", (kind,)) for i, kind in enumerate((FULL, WINDOW, STATE))))
LLAMA = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)

NUMBERS = ("max_requests", "block_size", "num_blocks", "step_tokens", "checkpoints")
ABSURD: list[Any] = [True, np.True_, 2.0, np.float32(2), "2", [2], -1, np.int64(-1), 2 + 0j]


def plan(**arguments: Any) -> Plan:
    if "num_blocks" not in arguments:
        arguments.setdefault("budget", "1MiB")
    return SCHEMA.plan(**arguments)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ABSURD, ids=repr)
def test_a_plan_refuses(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed: no layout is made."""
    monkeypatch.setattr(
        Schema, "_largest_groups", lambda *_: pytest.fail("computed before the arguments were looked at")
    )
    with raises(BadInput, field=name, needed=value, available=ANY):
        plan(**{name: value})


@pytest.mark.parametrize("name", ("max_requests", "block_size", "num_blocks", "step_tokens"))
def test_a_plan_refuses_zero_but_no_checkpoints_are_fine(name: str) -> None:
    with raises(BadInput, field=name, needed=0, available=1):
        plan(**{name: 0})
    assert plan(checkpoints=0).num_checkpoints == 0


@pytest.mark.parametrize("budget", [True, 1.5e9, np.float64(1e9), 0, -1, np.int64(0), "", "many", None, [1]], ids=repr)
def test_a_plan_refuses_a_budget(budget: Any) -> None:
    with pytest.raises(BadInput):
        SCHEMA.plan(budget)


@pytest.mark.parametrize("lengths", [(0,), (1.5,), (True,), (10, -1), ("10",)], ids=repr)
def test_a_plan_refuses_lengths(lengths: Any) -> None:
    with raises(BadInput, field="each of lengths", needed=ANY, available=1):
        plan(lengths=lengths)


def test_a_plan_needs_exactly_one_of_budget_and_num_blocks() -> None:
    for arguments in ({}, {"budget": "1MiB", "num_blocks": 3}):
        with raises(BadInput, needed=1, available=len(arguments)):
            SCHEMA.plan(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint16], ids=lambda integer: integer.__name__)
def test_numpy_integers_give_the_same_plan(integer: Any) -> None:
    numbers = {"max_requests": 4, "block_size": 32, "step_tokens": 100, "checkpoints": 2}
    same = {name: integer(number) for name, number in numbers.items()}
    assert plan(**same, lengths=(integer(50),)) == plan(**numbers, lengths=(50,))
    assert plan(**same, num_blocks=integer(77)) == plan(**numbers, num_blocks=77)
    assert plan(**same, budget=np.int64(2**20)) == plan(**numbers, budget=2**20)
    assert all(type(number) is int for number in (plan(**same).max_requests, plan(**same).block_size))


@pytest.mark.parametrize("value", [True, 1.5, "1", -1, None], ids=repr)
def test_schemas_refuse(value: Any) -> None:
    with raises(SchemaError, field="verify_width", needed=value, available=0):
        Schema.from_hf_config(object(), verify_width=value)  # looked at before the config is
    for name in ("tp", "pp", "rank"):
        with raises(BadInput, field=name, needed=value, available=ANY):
            SCHEMA.split(**{name: value})
    assert SCHEMA.split(tp=np.int64(2)) == SCHEMA.split(tp=2)  # type: ignore[arg-type]
    assert SCHEMA.rewindable(np.int64(3)) == SCHEMA.rewindable(3)  # type: ignore[arg-type]


def test_configs_may_hold_numpy_integers() -> None:
    wide = {name: np.int64(value) if isinstance(value, int) else value for name, value in LLAMA.items()}
    schema = Schema.from_hf_config(wide)
    assert schema == Schema.from_hf_config(LLAMA) and schema.fingerprint == Schema.from_hf_config(LLAMA).fingerprint
    for value in (np.int64(0), np.float64(2), np.True_):
        with raises(SchemaError, field="num_key_value_heads", needed=value, available=1):
            Schema.from_hf_config({**LLAMA, "num_key_value_heads": value})


@pytest.mark.parametrize("value", [7, [], {}, "float31", 1.5], ids=repr)
def test_a_dtype_or_a_format_that_is_none(value: Any) -> None:
    if value:
        with raises(SchemaError, needed=value, available=ANY):
            Schema.from_hf_config(LLAMA, dtype=value)
    with raises(SchemaError, needed=value, available=ANY):
        Schema.from_hf_config(LLAMA, kv_format=value)


def test_two_layers_of_one_index() -> None:
    with raises(SchemaError, needed=0):
        Schema((Layer(0, "a", (FULL,)), Layer(0, "b", (WINDOW,))))


def test_the_block_budget_takes_numpy_integers() -> None:
    config = DSV4Config.flash()
    schedule = build_schedule(config)
    found = compute_block_budget(config, schedule, np.int64(1000), np.int32(3))  # type: ignore[arg-type]
    assert found == compute_block_budget(config, schedule, 1000, 3)
    assert all(type(number) is int for number in found.values())


def test_whole_numbers() -> None:
    assert whole_number(np.uint8(200), "n") == 200 and type(whole_number(np.uint8(200), "n")) is int
    assert whole_number(0, "n", at_least=0) == 0
    with raises(BadInput, field="n", needed=-1, available=0):
        whole_number(-1, "n", at_least=0)
    with raises(SchemaError, field="n", needed=1.0, available=1):
        whole_number(1.0, "n", at_least=1, error=SchemaError)
    assert parse_bytes(np.int64(4096)) == 4096 and type(parse_bytes(np.int64(4096))) is int  # type: ignore[arg-type]
