"""How engines divide memory: by hand, and by vLLM's own planning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from judges import judge

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.hits import MODELS, schema_of
from benchmarks.peers import Process

from kvpagoda import Schema
from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.replay import Group
from kvpagoda.replay.batching import cache_for
from kvpagoda.replay.engine_pool import EnginePool, pool_of
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from kvpagoda.units import parse_bytes

VLLM = "vllm-0.33"


def layers(*counts: tuple[int, str]) -> Schema:
    """A model of so many layers of each kind, each of 32 bytes a token, or with a state of 1,000 bytes."""
    kinds = {
        "full": (Attention(1, 8, 8, "float16"),),
        "window": (Attention(1, 8, 8, "float16", Growth(window=40)),),
        "wide": (Attention(1, 16, 16, "float16", Growth(window=40)),),
        "chunk": (Attention(1, 8, 8, "float16", Growth(chunk=64)),),
        "state": (Recurrent((Rows("r", (5, 50), "float32"),)),),
    }
    names = [kind for count, kind in counts for _ in range(count)]
    return Schema(tuple(Layer(i, name, kinds[name]) for i, name in enumerate(names)), "layers")


def pool(schema: Schema, budget: int | str, block_size: int | None = None, engine: str = VLLM) -> EnginePool:
    return pool_of(engine, schema, cache_for(None, schema, "1GiB", 64).plan, budget, block_size)


def test_groups_have_as_many_layers_each_and_share_the_blocks() -> None:
    assert pool(layers((3, "full")), 10 * 1536 + 1) == EnginePool(Group.from_text("full"), 16, 9, 1536)
    assert pool(layers((3, "full")), 10 * 1536, 64) == EnginePool(Group.from_text("full"), 64, 1, 6144)
    assert pool(layers((2, "full"), (5, "window")), "64KiB").groups == Group.from_text("full+3*window:40")
    assert pool(layers((2, "full"), (5, "window")), "64KiB").nbytes == 1024
    assert pool(layers((2, "full"), (3, "window")), "64KiB").groups == Group.from_text("full+2*window:40")
    assert pool(layers((3, "chunk"), (4, "full")), "64KiB")[:2] == (Group.from_text("chunk:64+full"), 16)
    assert pool(layers((3, "chunk"), (4, "full")), "64KiB").nbytes == 2048  # padded to four layers


def test_a_block_has_as_many_bytes_as_a_state() -> None:
    schema = layers((1, "full"), (3, "state"))
    assert (
        pool(schema, "64KiB") == EnginePool(Group.from_text("full+3*state"), 32, 63, 1024) == pool(schema, "64KiB", 32)
    )
    with pytest.raises(BadInput, match="as many bytes as a state of layers: 32 tokens, got 64"):
        pool(schema, "64KiB", 64)


def test_what_has_no_profile_is_refused() -> None:
    with pytest.raises(BadInput, match="as many bytes a token each; layers has others"):
        pool(layers((1, "full"), (1, "wide")), "64KiB")
    with pytest.raises(BadInput, match="unknown engine 'vllm'"):
        pool(layers((1, "full")), "64KiB", engine="vllm")
    with pytest.raises(BadInput, match=r"how sglang-0\.5\.23 divides 64KiB among states and tokens is not known"):
        pool(layers((1, "full"), (3, "state")), "64KiB", engine="sglang-0.5.23")
    with pytest.raises(NeverFits, match="makes no block of 512 bytes of 600") as raised:
        pool(layers((1, "full")), 600)
    assert (raised.value.needed, raised.value.available) == (1024, 600)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Process]:
    yield from judge("vllm_hybrid")


def test_vllm_plans_the_same(vllm: Process) -> None:
    hybrids = {name: config for name, config in MODELS.items() if "full attention" not in name}
    for name, config in hybrids.items():
        planned = vllm.ask("serve", config=config, budget=parse_bytes("20GiB"), limit=1)
        ours = pool(schema_of(config), "20GiB")
        assert planned["num_blocks"] == ours.num_blocks + 1, name  # its block of zeros
        assert (planned["block_size"], planned["num_groups"]) == (ours.block_size, len(ours.groups)), name
    assert len(hybrids) == 4
