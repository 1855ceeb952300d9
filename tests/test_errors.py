"""Errors carry their numbers as attributes, and their message says the same."""

from __future__ import annotations

import doctest
import pickle
import re
from typing import Any
from unittest.mock import ANY

import pytest

from kvpagoda import KVCache, errors
from kvpagoda.errors import (
    BadInput,
    BadLine,
    KVPagodaError,
    MissingExtra,
    NeverFits,
    OutOfBlocks,
    RetryLater,
    SchemaError,
    did_you_mean,
    unknown_name,
)
from kvpagoda.replay import read_requests, replay
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.schema.fields import itemsize
from kvpagoda.tiers import tier_from_text
from raises import raises

SCHEMA = Schema((Layer(0, "full_attention", (Attention(2, 16, 16, "float32"),)),))
CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, KVPagodaError)]
DATA = {"needed": 12, "available": 3, "group": "full", "hint": "close a sequence"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_the_four_attributes(kind: type[KVPagodaError]) -> None:
    plain, full = kind("text"), kind("text", **DATA)
    assert str(plain) == str(full) == "text"
    assert {name: getattr(plain, name) for name in DATA} == dict.fromkeys(DATA)
    assert {name: getattr(full, name) for name in DATA} == DATA
    copied = pickle.loads(pickle.dumps(full))
    assert type(copied) is kind and str(copied) == "text" and {name: getattr(copied, name) for name in DATA} == DATA


def test_an_import_error_keeps_the_name() -> None:
    error = MissingExtra("needs torch", name="torch", hint="pip install")
    assert (error.name, error.hint) == ("torch", "pip install")


def test_an_installed_package_that_lacks_a_name_is_told_as_well() -> None:
    with raises(MissingExtra, name="json"), MissingExtra.unless("json", "needs json 5"):
        from json import no_such_name  # type: ignore[attr-defined]
    with pytest.raises(ImportError) as other, MissingExtra.unless("torch", "needs torch"):
        from json import no_such_name  # noqa: F401
    assert not isinstance(other.value, MissingExtra)


def test_unknown_names_list_the_known_ones_and_suggest_the_nearest() -> None:
    error = unknown_name("policy", "LURU", ("lru", "fifo"), SchemaError)
    assert isinstance(error, SchemaError) and (error.needed, error.available) == ("LURU", ("lru", "fifo"))
    assert error.hint == "did you mean 'lru'?" and str(error).endswith(error.hint)
    assert did_you_mean("banana", ("lru", "fifo")) is None and unknown_name("policy", "banana", ("lru",)).hint is None


def test_errors_of_requests_that_never_fit_carry_their_numbers() -> None:
    plan = SCHEMA.plan(num_blocks=4, max_requests=1)
    with pytest.raises(NeverFits) as caught:
        plan.blocks_wanted(1000)
    error = caught.value
    assert (error.needed, error.available, error.group) == (63, 4, "full") and str(error).endswith(str(error.hint))
    with pytest.raises(NeverFits) as caught:
        plan.blocks_wanted(60, longest=50)
    assert (caught.value.needed, caught.value.available) == (60, 50)
    with pytest.raises(NeverFits) as caught:
        SCHEMA.plan("1KiB", max_requests=1)
    assert caught.value.available == 1024 < caught.value.needed and "raise the budget" in str(caught.value.hint)


GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, "torch_dtype": "float32",
    "max_position_embeddings": 100_000,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 100_000, "torch_dtype": "float32",
}  # fmt: skip
LLAMA = {key: value for key, value in GEMMA.items() if key != "sliding_window"} | {"model_type": "llama"}
MISTRAL = {**GEMMA, "model_type": "mistral"}


@pytest.mark.parametrize("config", [GEMMA, QWEN3_NEXT, LLAMA, MISTRAL], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("shared", [True, False], ids=["one budget", "shares"])
def test_the_budget_that_is_named_holds_the_request(config: dict[str, Any], shared: bool) -> None:
    schema, named = Schema.from_hf_config(config), re.compile(r"(?:budget of|needs) ([\d,]+) bytes")
    for num_tokens in (20, 333, 5000):
        for room in (16, num_tokens if shared else 16):  # separate shares are capped: no budget gives more room
            with pytest.raises(NeverFits) as caught:
                schema.plan("9KiB", 3, shared=shared).blocks_wanted(num_tokens, room)
            found = named.search(str(caught.value))
            assert found, str(caught.value)
            if found[0].startswith("needs"):  # not even one block fits: the plan says which budget that needs
                with raises(NeverFits, needed=ANY, available=ANY, group=ANY) as caught:
                    plan = schema.plan(int(found[1].replace(",", "")), 3, shared=shared)
                    plan.blocks_wanted(max(num_tokens, 1000), room)
                found = named.search(str(caught.value))
                assert found
                schema.plan(int(found[1]), 3, shared=shared).blocks_wanted(max(num_tokens, 1000), room)
            else:
                schema.plan(int(found[1]), 3, shared=shared).blocks_wanted(num_tokens, room)


def small_cache(**arguments: Any) -> KVCache:
    return KVCache(SCHEMA, num_blocks=4, max_requests=2, device="none", **arguments)


def test_errors_for_want_of_room_carry_their_numbers() -> None:
    cache = small_cache()
    with cache.open(range(40)) as one:
        with pytest.raises(OutOfBlocks) as short:
            one.extend(70)
        assert (short.value.needed, short.value.available, short.value.group) == (2, 1, "full")
        with pytest.raises(RetryLater) as later:
            cache.open(range(100, 140))
        assert (later.value.needed, later.value.available, later.value.group) == (3, 1, "full")
        with pytest.raises(BadInput) as beyond:
            one.commit(range(49))
        assert (beyond.value.needed, beyond.value.available, beyond.value.hint) == (49, 48, "extend first")
        one.commit(range(40))
        with pytest.raises(BadInput) as back:
            one.rewind(41)
        assert (back.value.needed, back.value.available) == (41, 40)
        with pytest.raises(RetryLater) as busy:
            cache.reset()
        assert busy.value.available == [one.slot] and str(busy.value).endswith(str(busy.value.hint))
        two = cache.open(range(200, 210))
        with raises(RetryLater, needed=1, available=0) as full:
            cache.open(range(300, 310))
        assert (full.value.needed, full.value.available) == (1, 0)
        two.close()


NEAR = {
    "policy": (lambda: replay([], capacity_blocks=1, policy="s3fif"), "s3fif", "did you mean 's3fifo'?"),
    "dtype": (lambda: itemsize("bfloat15"), "bfloat15", "did you mean 'bfloat16'?"),
    "tier": (lambda: tier_from_text("disc:/tmp:1GiB"), "disc:/tmp:1GiB", "did you mean 'disk'?"),
    "field": (lambda: list(read_requests([{"hash_id": [1]}])), "hash_ids", "did you mean 'hash_id'?"),
    "policy of a cache": (lambda: KVCache(SCHEMA, "1MiB", "none", policy="lrru"), "lrru", "did you mean 'lru'?"),
    "number": (lambda: SCHEMA.plan("1MiB", max_requests=-3), -3, None),
}


@pytest.mark.parametrize("case", NEAR)
def test_errors_say_what_was_given(case: str) -> None:
    call, needed, hint = NEAR[case]
    with pytest.raises(BadInput) as caught:
        call()
    assert (caught.value.needed, caught.value.hint) == (needed, hint)
    assert hint is None or hint in str(caught.value)


def test_a_field_that_is_nearly_there() -> None:
    with raises(BadLine, field="hash_ids", needed="hash_ids", available=("hash_id",), line=1):
        list(read_requests([{"hash_id": [1]}]))


def test_the_examples_run() -> None:
    tried = doctest.testmod(errors)
    assert tried.attempted >= 3 and not tried.failed
