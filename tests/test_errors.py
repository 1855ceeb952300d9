"""Errors carry their numbers as data, beside a text that says the same."""

from __future__ import annotations

import doctest
import pickle

import pytest

from kvpagoda import errors
from kvpagoda.errors import BadInput, KVPagodaError, MissingExtra, NeverFits, SchemaError, did_you_mean, unknown_name
from kvpagoda.replay import read_requests, replay
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.schema.fields import itemsize
from kvpagoda.tiers import tier_from_text

SCHEMA = Schema((Layer(0, "full_attention", (Attention(2, 16, 16, "float32"),)),))
CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, KVPagodaError)]
DATA = {"needed": 12, "available": 3, "group": "full", "hint": "close a sequence"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_the_four(kind: type[KVPagodaError]) -> None:
    plain, full = kind("text"), kind("text", **DATA)
    assert str(plain) == str(full) == "text"
    assert {name: getattr(plain, name) for name in DATA} == dict.fromkeys(DATA)
    assert {name: getattr(full, name) for name in DATA} == DATA
    copied = pickle.loads(pickle.dumps(full))
    assert type(copied) is kind and str(copied) == "text" and {name: getattr(copied, name) for name in DATA} == DATA


def test_an_import_error_keeps_the_name() -> None:
    error = MissingExtra("needs torch", name="torch", hint="pip install")
    assert (error.name, error.hint) == ("torch", "pip install")


def test_what_is_unknown_is_listed_and_the_nearest_asked_for() -> None:
    error = unknown_name("policy", "LURU", ("lru", "fifo"), SchemaError)
    assert isinstance(error, SchemaError) and (error.needed, error.available) == ("LURU", ("lru", "fifo"))
    assert error.hint == "did you mean 'lru'?" and str(error).endswith(error.hint)
    assert did_you_mean("banana", ("lru", "fifo")) is None and unknown_name("policy", "banana", ("lru",)).hint is None


def test_numbers_of_a_request_that_never_fits() -> None:
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


NEAR = {
    "policy": (lambda: replay([], capacity_blocks=1, policy="s3fif"), "s3fif", "did you mean 's3fifo'?"),
    "dtype": (lambda: itemsize("bfloat15"), "bfloat15", "did you mean 'bfloat16'?"),
    "tier": (lambda: tier_from_text("disc:/tmp:1GiB"), "disc:/tmp:1GiB", "did you mean 'disk'?"),
    "field": (lambda: list(read_requests([{"hash_id": [1]}])), "hash_ids", "did you mean 'hash_id'?"),
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
    with pytest.raises(BadInput, match="no field 'hash_ids'; there are hash_id; did you mean 'hash_id'"):
        list(read_requests([{"hash_id": [1]}]))


def test_the_examples_run() -> None:
    tried = doctest.testmod(errors)
    assert tried.attempted >= 3 and not tried.failed
