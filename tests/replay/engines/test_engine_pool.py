"""How engines divide memory: by hand, and by vLLM's own planning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from judges import judge

sys.path.insert(0, str(Path(__file__).parents[3]))

from unittest.mock import ANY

from benchmarks.hits import MODELS, schema_of
from benchmarks.peers import Process

from kvpagoda import Schema
from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.replay import Group
from kvpagoda.replay.batching import cache_for
from kvpagoda.replay.engines.pool import EnginePool, pool_of
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from kvpagoda.units import parse_bytes
from raises import raises

VLLM, SGLANG = "vllm-0.33", "sglang-0.5.23"


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


def pool(
    schema: Schema,
    budget: int | str,
    block_size: int | None = None,
    engine: str = VLLM,
    ratio: float | None = None,
    unified: bool = False,
) -> EnginePool:
    return pool_of(engine, schema, cache_for(None, schema, "1GiB", 64).plan, budget, block_size, ratio, unified)


def test_groups_have_as_many_layers_each_and_share_the_blocks() -> None:
    assert pool(layers((3, "full")), 10 * 1536 + 1) == EnginePool(Group.from_text("full"), 16, 9, 10 * 1536)
    assert pool(layers((3, "full")), 10 * 1536, 64) == EnginePool(Group.from_text("full"), 64, 1, 2 * 6144)
    assert pool(layers((2, "full"), (5, "window")), "64KiB").groups == Group.from_text("full+3*window:40")
    assert pool(layers((2, "full"), (5, "window")), "64KiB").num_blocks == 63  # of 1,024 bytes
    assert pool(layers((2, "full"), (3, "window")), "64KiB").groups == Group.from_text("full+2*window:40")
    assert pool(layers((3, "chunk"), (4, "full")), "64KiB")[:2] == (Group.from_text("chunk:64+full"), 16)
    assert pool(layers((3, "chunk"), (4, "full")), "64KiB").num_blocks == 31  # padded to four layers


def test_a_block_has_as_many_bytes_as_a_state() -> None:
    schema = layers((1, "full"), (3, "state"))
    assert (
        pool(schema, "64KiB")
        == EnginePool(Group.from_text("full+3*state"), 32, 63, 1 << 16)
        == pool(schema, "64KiB", 32)
    )
    with raises(BadInput, needed=32, available=64):
        pool(schema, "64KiB", 64)


def test_what_has_no_profile_is_refused() -> None:
    with raises(BadInput, needed=1, available=2):
        pool(layers((1, "full"), (1, "wide")), "64KiB")
    with raises(BadInput, needed="vllm", available=ANY):
        pool(layers((1, "full")), "64KiB", engine="vllm")
    for kinds in ((1, "chunk"), (1, "window")), ((3, "window"),), ((1, "full"), (1, "window"), (1, "state")):
        with raises(BadInput, needed=tuple(kind for _, kind in kinds)):
            pool(layers(*kinds), "64KiB", engine=SGLANG)
    with raises(BadInput, needed="dynamo-1.6.1"):
        pool(layers((1, "full"), (1, "state")), "64KiB", engine="dynamo-1.6.1")
    with raises(NeverFits, needed=1024, available=600) as raised:
        pool(layers((1, "full")), 600)
    assert (raised.value.needed, raised.value.available) == (1024, 600)


def test_sglang_has_a_pool_for_each_kind_of_layers() -> None:
    """A token takes 32 bytes in a layer, and a state 1,000."""
    found = pool(layers((3, "full"), (1, "window")), 128 * 1600 + 8, engine=SGLANG)
    assert found == EnginePool(Group.from_text("full+window:40"), 16, 105, 105 * 1536 + 84 * 512, 84)
    assert pool(layers((2, "full"), (1, "wide")), "64KiB", engine=SGLANG).num_apart == 28  # windows of 64 bytes a token
    found = pool(layers((1, "full"), (3, "state")), 100_000, 64, SGLANG)
    assert found == EnginePool(Group.from_text("full+state"), 64, 26, 15 * 3000 + 26 * 2048, 14)


@pytest.mark.parametrize(
    ("kind", "unified"), [("full", False), ("window", False), ("state", False), ("window", True), ("state", True)]
)
def test_what_sglang_divides_is_never_more_than_the_budget(kind: str, unified: bool) -> None:
    schema = layers((3, "full"), (2, kind))
    with raises(NeverFits, needed=ANY, available=900) as caught:
        pool(schema, 900, engine=SGLANG, unified=unified)
    for budget in (caught.value.needed, *range(50_000, 90_000, 997)):
        found = pool(schema, budget, engine=SGLANG, unified=unified)
        assert 0.9 * budget - 4096 * unified < found.nbytes <= budget or budget < 50_000
        assert found.num_blocks > 0 and (found.num_apart > 0) == (kind != "full")


def test_blocks_that_sglang_refuses_with_states() -> None:
    with raises(BadInput, needed=48, available=256):
        pool(layers((1, "full"), (3, "state")), "64KiB", 48, SGLANG)


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
    assert len(hybrids) == 5


@pytest.fixture(scope="module")
def sglang() -> Iterator[Process]:
    yield from judge("sglang_pools")


def test_the_numbers_of_the_documents() -> None:
    qwen = next(config for config in MODELS.values() if config["model_type"] == "qwen3_next")
    made = pool(schema_of(qwen), "20GiB", 16, SGLANG)
    assert (made.num_apart, made.num_blocks) == (130, 28_871)  # docs/simulate.md


def test_the_ratio_of_what_sglang_sets_apart_is_a_setting() -> None:
    """As above, with half as much for windows, and as much for states as for texts."""
    found = pool(layers((3, "full"), (1, "window")), 64 * 1024, engine=SGLANG, ratio=0.5)
    assert (found.num_blocks, found.num_apart) == (36, 18)  # of 65,536 // (96 + 16) tokens
    found = pool(layers((1, "full"), (3, "state")), 96_000, 64, SGLANG, 1.0)
    assert (found.num_blocks, found.num_apart) == (23, 15)
    for kinds, engine, ratio in (
        ("window", SGLANG, 1.1),
        ("state", SGLANG, 0.0),
        ("full", SGLANG, 0.5),
        ("window", VLLM, 0.5),
    ):
        with raises(BadInput, needed=ANY, available=ratio):
            pool(layers((1, "full"), (2, kinds)), "64KiB", 64 if engine == SGLANG else None, engine, ratio)


def test_windows_that_sglang_keeps_like_full_attention() -> None:
    found = pool(replace(layers((3, "full"), (1, "window")), name="gemma-3-27b"), 128 * 1024, engine=SGLANG)
    assert found == EnginePool(Group.from_text("full"), 16, 64, 64 * 2048)


@pytest.mark.parametrize(
    ("budget", "block_size", "ratio"), [("20GiB", 16, None), ("33GiB", 64, None), ("33GiB", 64, 0.4)]
)
def test_sglang_plans_the_same(sglang: Process, budget: str, block_size: int, ratio: float | None) -> None:
    for config in MODELS.values():
        if config["model_type"] in ("gpt_oss", "qwen3_next", "nemotron_h", "llama", "gemma3_text"):
            planned = sglang.ask(
                "divide", config=config, budget=parse_bytes(budget), block_size=block_size, ratio=ratio
            )
            has_apart = config["model_type"] in ("gpt_oss", "qwen3_next", "nemotron_h")
            ours = pool(schema_of(config), budget, block_size, SGLANG, ratio if has_apart else None)
            assert (planned["blocks"], planned["windows"] + planned["slots"]) == (ours.num_blocks, ours.num_apart)
            assert (planned["slots"] > 0) == (config["model_type"] in ("qwen3_next", "nemotron_h"))


@pytest.mark.parametrize(("budget", "ratio"), [("20GiB", None), ("33333333333", 0.4)])
def test_sglang_plans_one_memory_of_the_same_bytes(sglang: Process, budget: str, ratio: float | None) -> None:
    for config in MODELS.values():
        if config["model_type"] in ("qwen3_next", "nemotron_h"):
            asked = {"config": config, "budget": parse_bytes(budget), "block_size": 64, "ratio": ratio}
            planned, schema = sglang.ask("divide", unified=True, **asked), schema_of(config)
            plan = cache_for(None, schema, "1GiB", 64).plan
            ours, apart = (pool_of(SGLANG, schema, plan, budget, 64, ratio, one) for one in (True, False))
            assert ours.shared is not None and (ours.num_blocks, ours.num_apart) == (apart.num_blocks, apart.num_apart)
            assert planned["slots"] == ours.num_apart and planned["blocks"] == ours.num_blocks
            assert ours.nbytes == planned["rest"] + planned["slots"] * ours.shared.each
            floor = ours.nbytes // ours.shared.block * ours.shared.block - ours.shared.nbytes
            assert floor == -(-max(ours.shared.each, ours.shared.block) // ours.shared.each) * ours.shared.each


@pytest.mark.parametrize(
    ("budget", "block_size", "ratio"), [("64MiB", 16, None), ("123456789", 64, 0.37), ("99MB", 1, 1.0)]
)
def test_sglang_makes_one_memory_for_windows_of_the_same_bytes(
    sglang: Process, budget: str, block_size: int, ratio: float | None
) -> None:
    config = MODELS["gpt-oss-120b"]
    asked = {"config": config, "budget": parse_bytes(budget), "block_size": block_size, "ratio": ratio}
    planned, ours = (
        sglang.ask("divide", unified=True, makes=True, **asked),
        pool(schema_of(config), budget, block_size, SGLANG, ratio, True),
    )
    assert (planned["blocks"], planned["windows"], planned["rest"]) == (ours.num_blocks, ours.num_apart, ours.nbytes)
    assert ours.shared is not None and planned["room"] == ours.shared.nbytes


@pytest.mark.parametrize(("least", "block_size"), [(5_898_240, 16), (9_437_184, 64)])
def test_sglang_refuses_the_same_memory_for_windows(sglang: Process, least: int, block_size: int) -> None:
    config = MODELS["gpt-oss-120b"]
    asked = {"config": config, "block_size": block_size, "unified": True, "makes": True}
    assert sglang.ask("divide", budget=least, **asked)["rest"] == least
    assert pool(schema_of(config), least, block_size, SGLANG, unified=True).nbytes == least
    with pytest.raises(RuntimeError, match="cannot fit ONE worst-case request"):
        sglang.ask("divide", budget=least - 1, **asked)
    with raises(NeverFits, needed=ANY, available=least - 1):
        pool(schema_of(config), least - 1, block_size, SGLANG, unified=True)
