"""A follower of vLLM's own events, beside vLLM's own scheduler: the next hit of each, over random texts. ``make vllm``."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from vllm.distributed.kv_events import ZmqEventPublisher
from vllm_events import DENSE, EXACT, MODELS, Engine

from kvpagoda.events import Router, VllmFollower

STEPS = 200


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", EXACT)
@pytest.mark.parametrize("retention", [None, 0], ids=["dense", "sparse"])
def test_the_next_hit_is_that_of_the_engine(model: str, retention: int | None, seed: int) -> None:
    answers = Engine(model, seed, retention=retention).run(STEPS).answers
    assert answers["exact"] > 300 and answers["hits"] > 20
    assert answers["unsure"] + answers["bound"] <= 0.02 * answers["exact"] * (model == "large windows")


@pytest.mark.parametrize("model", DENSE)
def test_the_next_hit_is_that_of_the_engine_where_all_blocks_are_stored(model: str) -> None:
    answers = Engine(model, 3, retention=None).run(STEPS).answers
    assert answers["exact"] > 300 and answers["hits"] > 20 and not answers["unsure"] + answers["bound"]


@pytest.mark.parametrize("retention", [None, 0], ids=["dense", "sparse"])
@pytest.mark.parametrize("model", [*MODELS][6:])
def test_where_an_event_lacks_something_the_answer_is_at_most(model: str, retention: int | None) -> None:
    """No answer is less than the engine's hit, and each that is more says so (``Engine.compare``)."""
    answers = Engine(model, 1, retention=retention).run(STEPS).answers
    assert answers["hits"] > 20 and answers["exact"] > 20


@pytest.mark.parametrize("model", ["llama", "gpt-oss", "qwen3-next"])
def test_an_engine_that_speculates_has_at_most_so_much(model: str) -> None:
    answers = Engine(model, 1, drafts=True).run(STEPS).answers
    assert answers["bound"] > 20 and answers["hits"] > 20


def test_a_router_follows_the_publisher_of_vllm(tmp_path: Path) -> None:
    """Over sockets; the engine starts again."""
    ends = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with Router({"a": ends}, follower=VllmFollower) as router:
        worker = router.workers["a"]
        for seed in (5, 6):
            engine, publisher = Engine("gpt-oss", seed), ZmqEventPublisher(0, *ends)
            for _ in range(10):
                told = len(engine.sent.batches)
                engine.run(10)
                for batch in engine.sent.batches[told:]:
                    publisher.publish(batch)
                sleep(0.1)
            end = monotonic() + 30
            while worker.is_stale or worker.subscriber.follower._time < engine.sent.batches[-1].ts:
                assert monotonic() < end, (worker.subscriber.follower.wanted, worker.fault)
                sleep(0.01)
            for _ in range(50):
                engine.compare(lambda *asked: router.scores(*asked)["a"])
            assert engine.answers["hits"] > 20 and not engine.answers["bound"]
            publisher.shutdown()
