"""Hand-overs between processes, rank by rank, while senders and receivers are killed and links fail: right bytes, or a typed
miss; and nothing is held past its lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import pytest

pytest.importorskip("torch")

from tests.handover import layer_driver
from tests.handover.driver import FAULTS, Pair

KILLS = ("killed sender", "killed receiver")
GENTLE = tuple(fault for fault in FAULTS if fault not in (*KILLS, "wrong schema", "wrong weights"))
MODELS: list[tuple[str, tuple[int, int], tuple[int, int]]] = [
    ("llama", (1, 2), (8, 16)), ("gemma_tp", (2, 1), (16, 8)), ("qwen_tp", (2, 4), (8, 8)), ("mixed", (1, 1), (8, 8)),
    ("deepseek_v4", (1, 1), (8, 16)), ("mla", (1, 2), (16, 8)), ("mamba", (1, 1), (8, 8)), ("scaled", (1, 1), (8, 8)),
]  # fmt: skip
"""Every layer kind; ranks of sender and receiver; tokens of a block on either side."""
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
needs_mooncake = pytest.mark.skipif(
    find_spec("mooncake") is None, reason="mooncake-transfer-engine-non-cuda is not installed"
)


P = TypeVar("P", bound=Pair)


@contextmanager
def pair(*given: Any, kind_of_pair: Callable[..., P] = Pair, **named: Any) -> Iterator[P]:  # type: ignore[assignment]
    made = kind_of_pair(*given, **named)
    try:
        yield made
    finally:
        made.close()


def test_right_bytes_or_a_typed_miss() -> None:
    with pair("llama", (2, 1), (8, 16)) as one:
        for _ in range(4):
            one.hand_over()
        for fault in (*KILLS[1:], *GENTLE):
            one.fault(fault)
        assert one.rows > 100 and one.seen["HandoverMiss"] >= 3, one.seen


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "blocks"), MODELS)
def test_many_hand_overs_and_faults(kind: str, ranks: tuple[int, int], blocks: tuple[int, int]) -> None:
    """125 hand-overs and 38 faults, 6 of which kill a process, for each of 8 models: 1,000 and 304 in all, and 48 kills."""
    with pair(kind, ranks, blocks, seed=1) as one:
        faults = [*KILLS * 3, "wrong schema", "wrong weights", *(GENTLE * 4)[:30]]
        for number in range(125 - len(faults)):
            one.hand_over()
            if number % 2 == 0 and faults:
                one.fault(faults.pop())
        while faults:
            one.fault(faults.pop())
        assert one.seen["good"] >= 125, one.seen
        print(kind, ranks, dict(one.seen), one.rows)


def test_layer_by_layer() -> None:
    with pair("qwen_tp", (1, 2), (8, 16), kind_of_pair=layer_driver.LayerPair) as one:
        for _ in range(4):
            one.hand_over()
        for fault in (*KILLS[1:], *layer_driver.FAULTS[2:]):
            one.fault(fault)
        assert one.rows > 100 and one.seen["early"] > 10 and one.seen["HandoverMiss"] >= 10, one.seen


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "blocks"), MODELS)
def test_many_layer_by_layer(kind: str, ranks: tuple[int, int], blocks: tuple[int, int]) -> None:
    """45 hand-overs and 20 faults, 4 of which kill a process, for each of 8 models: 360 and 160 in all, and 32 kills."""
    with pair(kind, ranks, blocks, seed=2, kind_of_pair=layer_driver.LayerPair) as one:
        for fault in (*layer_driver.FAULTS, *layer_driver.FAULTS[:8]):
            one.hand_over()
            one.fault(fault)
        for _ in range(5):
            one.hand_over()
        assert one.seen["good"] >= 45 and one.seen["early"] > 20, one.seen
        print(kind, ranks, dict(one.seen), one.rows)


@needs_mooncake
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "blocks"), [("llama", (1, 2), (8, 16)), ("mixed", (1, 1), (8, 8))])
def test_over_mooncakes_engine(kind: str, ranks: tuple[int, int], blocks: tuple[int, int]) -> None:
    with pair(kind, ranks, blocks, transfer="mooncake") as one:
        for _ in range(5):
            one.hand_over()
        for fault in ("killed sender", "cut", "slow", "damaged", "replayed"):
            one.fault(fault)
        assert one.seen["HandoverMiss"] >= 3, one.seen


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("kind_of_pair", [Pair, layer_driver.LayerPair])
def test_over_nixl(kind_of_pair: type[Pair]) -> None:
    with pair("qwen_tp", (1, 2), (8, 16), transfer="nixl", kind_of_pair=kind_of_pair) as one:
        for _ in range(5):
            one.hand_over()
        for fault in ("killed sender", "killed receiver", "cut", "slow", "damaged", "replayed"):
            one.fault(fault)
        assert one.seen["HandoverMiss"] >= 3, one.seen
