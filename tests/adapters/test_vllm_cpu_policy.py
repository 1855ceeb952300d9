"""Our eviction policies in vLLM's CPU tier: by its configuration, in its own tests, and beside the policies themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

import vllm
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvpagoda.adapters.vllm import cpu_policy
from kvpagoda.policies.names import as_policy

MODULE, ROOT = "kvpagoda.adapters.vllm.cpu_policy", Path(__file__).resolve().parents[2]
VLLM_TESTS = Path(sys.prefix) / f"tests-{vllm.__version__.partition('+')[0]}"
POLICIES = cpu_policy.__all__


def manager_of(policy: str, chunks: int) -> CPUOffloadingManager:
    return CPUOffloadingManager(chunks, cache_policy=policy, cache_policy_module_path=MODULE)


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(number.to_bytes(8, "big"), group)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_traffic(policy: str) -> None:
    """Several requests at a time store, load, fail and finish; the policy proves itself after every call."""
    random, manager = np.random.default_rng(7), manager_of(policy, 24)
    heads, running, loading, storing = random.integers(0, 9, (4, 20)).cumsum(1) * 4, [], [], []
    evicted = hits = 0
    for number in range(400):
        kind = random.integers(6)
        if kind == 0 or not running:
            text = heads[random.integers(4)][: random.integers(1, 14)].tolist() + [1000 + number] * int(
                random.integers(2)
            )
            context = ReqContext(f"{number}")
            keys = [key(at, group) for at in dict.fromkeys(text) for group in (0, 1)]
            for end, one in enumerate(keys):
                context.set_offload_key_position(one, 16 * (1 + end // 2))
            manager.on_new_request(context)
            running.append((context, keys))
        context, keys = running[random.integers(len(running))]
        if kind in (1, 2):
            batch = keys[: random.integers(1, len(keys) + 1)]
            done = manager.prepare_store(batch, context)
            if done is not None:
                evicted += len(done.evicted_keys)
                assert not {*done.evicted_keys} & {*batch}
                storing.append((done.keys_to_store, context))
        elif kind == 3 and storing:
            batch, context = storing.pop(random.integers(len(storing)))
            manager.complete_store(batch, context, success=bool(random.random() < 0.9))
        elif kind == 4:
            found = [one for one in keys if (chunk := manager._policy.get(one)) is not None and chunk.is_ready]
            if found:
                hits += len(found)
                manager.prepare_load(found, context)
                loading.append((found, context))
        elif loading and random.random() < 0.7:
            manager.complete_load(*loading.pop(random.integers(len(loading))))
        elif random.random() < 0.5:
            manager.on_request_finished(context)
            running = [one for one in running if one[0] is not context]
            assert context.req_id not in manager._policy._young
        manager._policy.check()
        if number == 300:
            manager.reset_cache()
            running, loading, storing = [], [], []
    assert evicted > 50 and hits > 50


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_chooses_what_it_would_choose_alone(policy: str) -> None:
    """Requests one after another, of one chunk each: as if the policy were asked directly."""
    random, manager, order = np.random.default_rng(3), manager_of(policy, 8), as_policy(policy.lower(), 8)
    assert order is not None
    texts = np.minimum(random.zipf(1.3, 600), 60).tolist()
    there, numbers, last = set[int](), dict[int, int](), 0
    for number, text in enumerate(texts):
        context = ReqContext(f"{number}")
        manager.on_new_request(context)
        done = manager.prepare_store([key(text)], context)
        assert done is not None
        manager.complete_store([key(text)], context)
        manager.on_request_finished(context)
        if text in there:
            order.touch(np.array([numbers[text]], np.int32), 0)
            continue
        if len(there) == 8:
            victim = int(order.choose(lambda leaf: np.array([leaf], np.int32))[0])
            name = next(name for name in there if numbers[name] == victim)
            assert done.evicted_keys == [key(name)]
            there.remove(name)
            order.set_leaf(victim, False)
            gone = {*map(int, order.remove(np.array([victim], np.int32), evicted=True))}
            numbers = {name: at for name, at in numbers.items() if at not in gone}
        if text not in numbers:
            numbers[text], last = last, last + 1
        order.add(np.array([numbers[text]], np.int32), 0)
        order.set_leaf(numbers[text], True)
        there.add(text)


def test_ends_of_texts_go_before_their_beginnings_and_running_requests_last() -> None:
    manager = manager_of("FIFO", 6)
    for name, keys in (("a", [1, 2]), ("b", [3, 4]), ("c", [6, 5])):  # c stores its end first
        context = ReqContext(name)
        for end, number in enumerate(sorted(keys), 1):
            context.set_offload_key_position(key(number), 16 * end)
        manager.on_new_request(context)
        for batch in keys:  # a chunk a step
            assert manager.prepare_store([key(batch)], context) is not None
            manager.complete_store([key(batch)], context)
        if name != "a":
            manager.on_request_finished(context)
    done = manager.prepare_store([key(7), key(8), key(9)], ReqContext("d"))
    assert done is not None and done.evicted_keys == [key(4), key(3), key(6)]
    manager.complete_store([key(7), key(8), key(9)], ReqContext("d"))
    done = manager.prepare_store([key(10), key(11)], ReqContext("e"))
    assert done is not None and done.evicted_keys == [key(5), key(2)]


def test_vllm_finds_it_by_its_configuration() -> None:
    """What ``--kv-transfer-config`` has as ``kv_connector_extra_config``, through vLLM's own factory of specs."""
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    spec = SimpleNamespace(
        _manager=None, extra_config={"cpu_bytes_to_use": 1 << 20}, num_chunks=8, eviction_policy="SIEVE",
        cache_policy_module_path=MODULE, kv_events_config=SimpleNamespace(enable_kv_cache_events=False), cpu_info=None,
    )  # fmt: skip
    manager = CPUOffloadingSpec.get_manager(spec)
    assert isinstance(manager._policy, cpu_policy.SIEVE) and manager._policy.cache_capacity == 8


@pytest.mark.parametrize("policy", ["SIEVE", "ARC", "Auto"])
def test_vllms_own_tests_pass(policy: str) -> None:
    """All that do not look into vLLM's own policies."""
    files = ["cpu/test_manager.py", "cpu/policies", "tiering/test_tiering_offloading.py"]
    paths = os.pathsep.join(map(str, (ROOT / "src", Path(__file__).parent, VLLM_TESTS)))
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "vllm_policy_plugin", *(f"tests/v1/kv_offload/{file}" for file in files)],
        cwd=VLLM_TESTS, env={**os.environ, "PYTHONPATH": paths, "KVPAGODA_POLICY": policy}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 80
