"""Every public call, with values that no argument may have: it works, or raises an error of the library and changes
nothing. What an object of the caller raises itself may pass up: only ``Own`` here.

The calls are found by their signatures, so a new argument is tested from the day it exists."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda import Identity, KVCache, Limits, Namespace, PersistentBatch, Retention, Schema, Sequence
from kvpagoda.core.batch.batch import Batch
from kvpagoda.errors import BadInput, KVPagodaError, SchemaError
from kvpagoda.events import EventLog
from kvpagoda.handover import SharedMemory
from kvpagoda.tiers import host_tier
from models import TINY
from raises import raises
from random_driver.schemas import schema_named

VALUES = 12
"""How many values each argument gets, drawn with a seed of its own."""
CONFIG = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
SECONDS = 1.0
"""The most processor time of one call."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some texts are names of files that can be written."""
    monkeypatch.chdir(tmp_path)


class Own(Exception):
    """Raised by objects of the caller."""


class Raising:
    """Every question raises ``Own``."""

    def _raise(self, *_: object, **__: object) -> Any:
        raise Own

    __index__ = __len__ = __iter__ = __array__ = __float__ = __bool__ = __eq__ = __hash__ = _raise  # type: ignore[assignment]


class Unhashable(str):
    """Text that is in no table."""

    __hash__ = None  # type: ignore[assignment]


class Unprintable:
    """Has no ``repr``."""

    def __repr__(self) -> str:
        raise Own


class OnlyItems:
    """A sequence by its methods alone, without items."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise Own


def palette() -> list[Any]:
    """Return new hostile values: of wrong types, out of range, not finite, endless, foreign."""
    numbers: list[Any] = [
        None, True, False, -1, 0, 2, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 10**5000, 1.0, 1.5, -0.0, float("nan"),
        float("inf"), 1e300, complex(1), Fraction(1, 3), np.float32(2), np.int8(2), np.bool_(True),
    ]  # fmt: skip
    texts = [
        "",
        "a",
        "1",
        "\ud800",
        "nanGiB",
        "-1MiB",
        "9" * 400 + "GiB",
        b"",
        b"x" * 99,
        bytearray(b"ab"),
        memoryview(b"abc"),
    ]
    many: list[Any] = [
        (), [], [None], [-1], [2**40], [1.5], [float("nan")], ["a"], ["\ud800"], [[1, 2], [3]], [[]], [True], {}, {1: 2},
        {"a": "b"}, {2**70: b"y" * 16}, {-1: b"y" * 16}, {0: "x" * 16}, {1.5: b"x" * 16}, set(), {1}, range(3), range(10**18),
        iter([1]), (n for n in [1]), {}.keys(),
    ]  # fmt: skip
    arrays = [
        np.array(3), np.array([]), np.array([1, 2]), np.array([2**63], np.uint64), np.array([1.5]), np.array([True]),
        np.array(["a"]), np.array([None]), np.array([[1, 2]]), np.array([1], "datetime64[s]"), np.array([1j]),
        np.broadcast_to(np.int64(1), 2**40), np.ma.array([1, 2], mask=[0, 1]), torch.tensor(3), torch.tensor([1, 2]),
        torch.tensor([1.5]), torch.tensor([True]), torch.empty(2, dtype=torch.int64, device="meta"),
        torch.sparse_coo_tensor([[0]], [1], (2,), check_invariants=True), torch.tensor([1.5], requires_grad=True),
    ]  # fmt: skip
    objects = [
        object(), int, len, ..., NotImplemented, Raising(), Unhashable("lru"), Unprintable(), OnlyItems(), [Raising()],
        Namespace(salt=["x"]), Namespace(epoch=2**70), Namespace(epoch=1.5), Namespace(adapter="\ud800"),  # type: ignore[arg-type]
    ]  # fmt: skip
    return [*numbers, *texts, *many, *arrays, *objects]


class Stage:
    """A cache with cached blocks, a tier, a running and a suspended sequence, and batches."""

    def __init__(self, schema: Schema) -> None:
        self.cache = KVCache(schema, num_blocks=32, device="cpu", max_requests=4, tiers=[host_tier("1MiB")])
        with self.cache.open([1] * 40) as first:
            first.commit([1] * 40)
        self.asleep = self.cache.open([3] * 8)
        self.asleep.suspend()
        self.sequence = self.cache.open([2] * 8, reserve=32)
        self.sequence.commit([2] * 8)
        self.running = self.cache.persistent_batch([self.sequence], 2)
        self.running.extend()
        self.batch = self.cache.batch([self.sequence], [1])

    def good(self, name: str) -> Any:
        """Return what a call needs for its argument ``name``."""
        return {
            "token_ids": [2], "sequences": [self.sequence], "new_tokens": [1], "index": 0, "n": 1, "pin": None,
            "envelope": {"actions": []}, "config": CONFIG, "dtype": "float32", "layout": "trtllm", "verify_width": 1,
            "transfer": SharedMemory("1MiB"), "ticket": "{}", "ttl": 1.0, "encoder_tokens": [1],
        }[name]  # fmt: skip

    def owner(self, kind: type, name: str) -> Any:
        """Return the object whose method ``name`` of class ``kind`` is called."""
        owners = {KVCache: self.cache, PersistentBatch: self.running, Batch: self.batch, Schema: self.cache.schema}
        return owners.get(kind, self.asleep if name == "resume" else self.sequence)

    def state(self) -> Any:
        """Return what no failed call may change."""
        one, cache = self.sequence, self.cache
        requests = one.length, one.capacity, one.tokens.tolist(), one.is_open, self.asleep.is_open, cache.epoch
        groups = [(group.free, group.evictable) for group in cache.stats().groups]
        return requests, groups, self.running.sequences, cache.lookup([1] * 41)


METHODS = [
    (kind, name)
    for kind in (KVCache, Sequence, PersistentBatch, Batch, Schema)
    for name, member in vars(kind).items()
    if not name.startswith("_") and isinstance(member, FunctionType | classmethod) and name != "arrays"
]
"""All public methods but ``Batch.arrays``, which takes a group of the cache itself: only its own views call it."""


def arguments_of(call: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, list[str]]]:
    """Return each argument of ``call``, with the names of the others that it needs."""
    parameters = [one for one in inspect.signature(call).parameters.values() if one.kind is not one.VAR_KEYWORD]
    for one in parameters:
        needed = [
            other.name
            for other in parameters
            if other.default is other.empty and other.kind is not other.VAR_POSITIONAL
        ]
        yield one, [name for name in needed if name != one.name]


class Outcome(NamedTuple):
    """How a call ended: whether it returned, and what is wrong with that ("": nothing)."""

    is_done: bool
    fault: str


def outcome_of(call: Callable[..., Any], *positional: Any, **arguments: Any) -> Outcome:
    """Call ``call``. It may return or raise an error of the library or ``Own``, and must not take long."""
    begun, is_done = time.thread_time(), False
    try:
        call(*positional, **arguments)
        is_done = True
    except (KVPagodaError, Own):
        pass
    except Exception as error:
        return Outcome(False, f"raised {type(error).__name__}: {error}")
    seconds = time.thread_time() - begun
    return Outcome(is_done, f"took {seconds:.1f} s" if seconds > SECONDS else "")


def described(value: Any) -> str:
    """Return text for ``value`` in a failure."""
    try:
        return repr(value)[:60]
    except Exception:
        return type(value).__name__


def drawn(name: str) -> list[Any]:
    """Return the values for the argument ``name``: others for each argument, and the same in each run."""
    return random.Random(name).sample(palette(), VALUES)


@pytest.mark.parametrize("schema", ["full", "mixed"])
@pytest.mark.parametrize(("kind", "name"), METHODS, ids=[f"{kind.__name__}.{name}" for kind, name in METHODS])
def test_a_call_works_or_refuses_its_argument_and_changes_nothing(kind: type, name: str, schema: str) -> None:
    stage = Stage(schema_named(schema))
    faults = []
    for argument, needed in arguments_of(getattr(stage.owner(kind, name), name)):
        for value in drawn(f"{kind.__name__}.{name}.{argument.name}.{schema}"):
            call = getattr(stage.owner(kind, name), name)
            others = {other: stage.good(other) for other in needed}
            before = stage.state()
            if argument.kind is argument.VAR_POSITIONAL:
                is_done, fault = outcome_of(call, value, **others)
            else:
                is_done, fault = outcome_of(call, **others, **{argument.name: value})
            if is_done:
                stage.cache.close()
                stage = Stage(schema_named(schema))
            else:
                stage.cache.check()
                fault += "" if stage.state() == before else " changed the cache"
            faults += [f"{argument.name}={described(value)} {fault}"] * bool(fault)
    stage.cache.close()
    assert not faults, "\n".join(faults)


def cache_with(**arguments: Any) -> None:
    """Make a cache with ``arguments``, and run a request in it."""
    defaults = dict(schema=schema_named("mixed"), device="none", budget=None if "num_blocks" in arguments else "1MiB")
    cache = KVCache(**{**defaults, **arguments})
    with cache.open([1] * 30) as sequence:
        sequence.commit([1] * 30)
    cache.check()
    cache.close()


MAKERS: dict[str, tuple[Callable[..., Any], Callable[[Any], None]]] = {
    "Limits": (Limits, lambda made: cache_with(limits=made)),
    "Retention": (Retention, lambda made: cache_with(retention=made)),
    "Identity": (Identity, lambda made: cache_with(identity=made, device="cpu", tiers=[host_tier("1MiB")])),
    "EventLog": (EventLog, lambda made: cache_with(events=made)),
    "host_tier": (host_tier, lambda made: cache_with(tiers=[made], device="cpu")),
}
SETTINGS = {"host_tier": ("nbytes", "write", "record_nbytes", "staging", "timeout", "workers", "checksum")}


@pytest.mark.parametrize("name", MAKERS)
def test_options_are_refused_where_they_are_made_or_serve_a_cache(name: str) -> None:
    make, use = MAKERS[name]

    def made_and_used(**arguments: Any) -> None:
        use(make(**arguments))

    faults = []
    needed = {"nbytes": "1MiB"} if name == "host_tier" else {}
    for argument in SETTINGS.get(name, tuple(inspect.signature(make).parameters)):
        for value in drawn(f"{name}.{argument}"):
            fault = outcome_of(made_and_used, **{**needed, argument: value}).fault
            faults += [f"{argument}={described(value)} {fault}"] * bool(fault)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("argument", inspect.signature(KVCache).parameters)
def test_a_cache_is_made_and_runs_or_its_argument_is_refused(argument: str) -> None:
    tried = [(value, outcome_of(cache_with, **{argument: value}).fault) for value in drawn(f"KVCache.{argument}")]
    faults = [f"{described(value)} {fault}" for value, fault in tried if fault]
    assert not faults, "\n".join(faults)


def opened(config: dict[str, Any]) -> None:
    """Read ``config``; if it is accepted, plan a cache, and admit a request if the rows are small enough."""
    schema = Schema.from_hf_config(config)
    if max(schema.bytes_per_token, schema.state_layout.nbytes) < 10**6 and (schema.max_positions or 0) < 10**6:
        cache = KVCache(schema, "64MiB", "none", max_requests=2)
        if schema.vocab_size is None or schema.vocab_size > 3:
            cache.open([1, 2, 3][: cache.max_context]).close()
        cache.check()


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3_text", "qwen3_next", "mamba", "falcon_h1", "deepseek_v3", "deepseek_v4"]
)
def test_a_config_is_read_or_a_field_is_refused(name: str) -> None:
    plain = TINY[name]().to_dict()
    opened(plain)
    faults = []
    more = [
        "llm_config",
        "compression_config",
        "block_configs",
        "attn_type_list",
        "use_mla",
        "num_attention_heads_per_layer",
    ]
    for field in [*plain, "text_config", "rope_scaling", "quantization_config", "torch_dtype", "layer_types", *more]:
        for value in random.Random(f"{name}.{field}").sample(palette(), 4):
            fault = outcome_of(opened, {**plain, field: value}).fault
            faults += [f"{field}={described(value)} {fault}"] * bool(fault)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("layers", [10_001, 2**31 - 1, 2**31, pytest.param(10**5000, id="10^5000")])
def test_too_many_layers_are_refused_at_once(layers: int) -> None:
    config = {**TINY["llama"]().to_dict(), "num_hidden_layers": layers, "layer_types": None}
    begun = time.thread_time()
    with raises(SchemaError, field="num_hidden_layers", needed=layers, available=ANY):
        Schema.from_hf_config(config)
    assert time.thread_time() - begun < SECONDS


def test_more_blocks_than_ids_and_a_huge_array_as_policy_are_refused() -> None:
    with raises(BadInput, needed=44343134792570880, available=2**31 - 1):
        cache_with(budget=2**63 - 1)
    with raises(BadInput, needed=("add", "touch", "set_leaf", "remove", "check")):
        cache_with(policy=np.broadcast_to(np.int64(1), 2**40))
    with raises(BadInput, field="block_size", needed=2**31, available=1048575):
        cache_with(block_size=2**31)
