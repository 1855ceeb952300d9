"""vLLM's own offloading connector in its real engine on a CPU, with our policy and our tier, and its own events to our router.

Only the worker that copies between device and host is ours (``vllm_cpu_spec``): vLLM's needs a GPU."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

import numpy as np
import tiny_vllm

from kvpagoda.adapters.vllm import cpu_policy
from kvpagoda.events import Router, VllmFollower

TOKENS = 384
"""Three blocks of the models here."""


class Engine(tiny_vllm.Engine):
    """vLLM's engine with room for one or two prompts; ``transfer``: the option of that name."""

    def __init__(self, folder: str, blocks: int, transfer: dict[str, Any] | None = None, **arguments: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            folder, skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=8, seed=0, max_num_batched_tokens=1024,
            max_model_len=1024, num_gpu_blocks_override=blocks, kv_transfer_config=transfer, enable_prefix_caching=True,
            **arguments,
        )  # fmt: skip

    @property
    def manager(self) -> Any:
        return self.core.scheduler.connector.connector_scheduler.manager


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 512, TOKENS + 20).tolist() for _ in range(6)]


@pytest.mark.parametrize(("kind", "blocks", "nbytes"), [("llama", 10, 1 << 20), ("gemma3_text", 60, 1 << 22)])
def test_texts_come_back_from_the_tier(kind: str, blocks: int, nbytes: int, tmp_path: Path) -> None:
    """The same tokens as without, what memory forgot is found, also after a restart."""
    folder = tiny_vllm.save(tmp_path, kind)
    tier = {
        "type": "KvpagodaTier", "module_path": "kvpagoda.adapters.vllm.secondary_tier",
        "tier": f"disk:{tmp_path}/tier:256MiB",
        "timeout": 120,  # a slow disk is a miss, and is not judged here
    }  # fmt: skip
    extra = {
        "spec_name": "CopyingSpec", "spec_module_path": "vllm_cpu_spec", "cpu_bytes_to_use": nbytes,
        "eviction_policy": "SIEVE", "cache_policy_module_path": "kvpagoda.adapters.vllm.cpu_policy",
        "secondary_tiers": [tier],
    }  # fmt: skip
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with Engine(folder, blocks) as engine:
        wanted = [engine.run([prompt]).tokens for prompt in prompts()]
    for is_restarted in (False, True):
        with Engine(folder, blocks, transfer) as engine:
            policy = engine.manager.primary_tier._policy
            assert isinstance(policy, cpu_policy.SIEVE)
            for number in range(2):
                runs, below = [engine.run([prompt]) for prompt in prompts()], engine.manager.secondary_tiers[0]
                assert [one.tokens for one in runs] == wanted
                below.drain_jobs()
                found, stats = TOKENS if is_restarted or number else 0, below._tier.stats()
                assert not stats.last_fault and not stats.last_error, stats
                assert [one.cached for one in runs] == [[found]] * len(runs), stats
            policy.check()


def test_a_router_says_what_the_engine_will_find(tmp_path: Path) -> None:
    """vLLM's own events over its own sockets, of a model with five groups of windows."""
    folder = tiny_vllm.save(tmp_path, "gemma3_text")
    ends = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": ends[0], "replay_endpoint": ends[1]}
    with Router({"a": ends}, follower=VllmFollower) as router, Engine(folder, 60, kv_events_config=events) as engine:
        random, texts, hits = np.random.default_rng(1), prompts()[:3], 0
        worker, publisher = router.workers["a"], engine.core.scheduler.kv_event_publisher
        for number in range(24):
            text = texts[random.integers(len(texts))]
            text = [*text[: random.integers(100, len(text))], *random.integers(3, 512, 50).tolist()]
            end = monotonic() + 20
            sleep(0.3)  # what the publisher's thread still has
            while number and (worker.is_stale or worker.subscriber.follower._next < len(publisher._buffer)):
                assert monotonic() < end
                sleep(0.01)
            said = router.scores(text)["a"]
            (found,) = engine.run([text]).cached
            assert said[1:] == (found, False)
            hits += found > 0
        assert hits > 5
