"""vLLM's cache manager for simulators: by itself, and under that project's own scheduler where its path is given."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from projects import path_of, stubs
from rows import GroupRows, Kind, most_for_state, next_token
from vllm_run import MODULES, SHAPES, Run

from kvpagoda import BadInput, SchemaError
from kvpagoda.adapters.vllm.simulated import KVCacheManager


@dataclass
class Request:
    """A request as the manager sees it."""

    all_token_ids: list[int]
    request_id: str = field(default_factory=map(str, count()).__next__)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    status: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def spec_of(kind: Kind, block_size: int) -> Any:
    """A spec as the manager sees it."""
    name, span = kind
    more = {
        "full": {"sliding_window": None, "attention_chunk_size": None}, "window": {"sliding_window": span},
        "chunk": {"attention_chunk_size": span}, "state": {"mamba_cache_mode": "align"},
    }[name]  # fmt: skip
    return SimpleNamespace(block_size=block_size, **{"head_size": 1} if name != "state" else {}, **more)


def config(num_blocks: int = 9, block_size: int = 2, *kinds: Kind) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec_of(kind, block_size)) for kind in kinds or [("full", 0)]]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)


def admit(manager: KVCacheManager, request: Request) -> int:
    blocks, found, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - found, found, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    return found


def decode(manager: KVCacheManager, request: Request, token: int) -> Any:
    request.all_token_ids.append(token)
    added = manager.allocate_slots(request, 1)
    request.num_computed_tokens += added is not None
    return added


def test_computed_blocks_are_shared_from_the_next_step_on() -> None:
    manager = KVCacheManager(config(), 64, log_stats=True)
    first = Request([1, 2, 3, 4, 5])
    assert admit(manager, first) == 0 and manager.get_block_ids(first.request_id) == ([1, 2, 3],)
    assert manager.get_computed_blocks(Request([1, 2, 3, 4, 6]))[1] == 0  # scheduled, not known to be computed
    assert decode(manager, first, 6).get_block_ids(allow_none=True) is None
    assert manager.estimate_cached_tokens(first) == 4
    second = Request([1, 2, 3, 4, 6])
    assert admit(manager, second) == 4
    assert manager.get_blocks(second.request_id).blocks[0][1].block_id == 2 and manager.usage == 0.5
    manager.record_prefix_cache_stats(second, 4)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None and (stats.requests, stats.queries, stats.hits) == (1, 5, 4)
    for request in (first, second, Request([9])):
        manager.free(request)
    manager.check()
    assert manager.usage == 0 and manager.get_computed_blocks(Request([1, 2, 3, 4, 5, 6, 7]))[1] == 6


def test_a_worker_keeps_its_blocks_where_two_compute_the_same() -> None:
    manager = KVCacheManager(config(), 64)
    one, two = Request([1, 2, 3]), Request([1, 2, 3])
    for request in (one, two):
        admit(manager, request)
    before = manager.get_block_ids(two.request_id)
    for request in (one, two):
        decode(manager, request, 4)
    assert manager.get_block_ids(two.request_id) == before
    for request in (one, two):
        manager.free(request)
    manager.check()
    assert manager.block_pool.get_num_free_blocks() == 8 and manager.block_pool.get_usage() == 0


def test_no_room_is_none_and_changes_nothing() -> None:
    manager = KVCacheManager(config(num_blocks=4), 64, watermark=0.3)
    request = Request([1, 2, 3, 4])
    admit(manager, request)
    waiting = Request([7, 8], status=SimpleNamespace(name="WAITING"))
    assert manager.allocate_slots(waiting, 2) is None  # one block is left, and the watermark is one
    assert manager.allocate_slots(waiting, 2, has_scheduled_reqs=False, reserved_blocks=1) is None
    assert manager.allocate_slots(Request([1] * 9), 2, full_sequence_must_fit=True) is None
    decode(manager, request, 5)
    for token in (6, 7):
        last = decode(manager, request, token)
    assert last is None and len(manager.get_blocks(request.request_id).ids[0]) == 3
    manager.check()
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache() and manager.get_computed_blocks(Request([1, 2, 3]))[1] == 0
    manager.check()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_random_requests(shape: str, size: int) -> None:
    """Rows of every request are those of its text in the blocks that were told when they were added, also what a step reads
    that is still in flight."""
    kinds = SHAPES[shape]
    random, num_blocks = np.random.default_rng(size), 25 * len(kinds)
    manager, memory = KVCacheManager(config(num_blocks, size, *kinds), 64 * size), GroupRows(kinds, num_blocks, size)
    running, found, steps = dict[str, tuple[Request, list[list[int]], int]](), 0, 600
    last, reads = (
        dict[str, int](),
        dict[str, int](),
    )  # tokens of each one's last step; what the oldest step in flight reads
    heads = [random.integers(0, 5, 10 * size).tolist() for _ in range(2)]
    for step in range(steps):
        names, cached, blocks = [*running], 0, None
        if not names or random.random() < 0.1:
            head = heads[random.integers(2)][: random.integers(1, 10 * size)]
            request = Request([*head, *random.integers(0, 5, random.integers(1, 4)).tolist()])
            blocks, cached, _ = manager.get_computed_blocks(request)
            tables, prompt_end = [[*ids] for ids in blocks.ids], request.num_tokens
            memory.prove(request.all_token_ids, tables, cached, cached, request.request_id)
            found += cached
        else:
            request, tables, prompt_end = running[names[random.integers(len(names))]]
            request.num_in_flight_tokens = last[request.request_id] * int(random.integers(2))
        start = request.num_computed_tokens + cached
        n = int(random.integers(1, request.num_tokens - start + 1))
        n = most_for_state(start, n, prompt_end, size)
        added = manager.allocate_slots(request, n, cached, blocks)
        if added is None or random.random() < 0.05 or request.num_tokens == 64 * size:
            running.pop(request.request_id, None)
            manager.free(request)
            continue
        for table, more in zip(tables, added.ids):
            table += more
        running[request.request_id], last[request.request_id] = (request, tables, prompt_end), n
        reader = reads[request.request_id] = start - request.num_in_flight_tokens
        memory.prove(request.all_token_ids, tables, reader, start, request.request_id)
        memory.write(request.all_token_ids, tables, start, start + n)
        request.num_computed_tokens = start + n
        if start + n == request.num_tokens:
            request.all_token_ids.append(next_token(request.all_token_ids, 5))
        if step % 5 == 0:
            manager.check()
            for one, blocks_of, _ in running.values():
                end = one.num_computed_tokens
                memory.prove(one.all_token_ids, blocks_of, reads[one.request_id], end, one.request_id)
    assert found > 20


def test_a_state_that_a_step_ran_past_is_not_shared() -> None:
    manager = KVCacheManager(config(9, 2, ("full", 0), ("state", 0)), 64)
    first = Request([1, 2, 3, 4, 5])
    for n in (1, 2, 1):  # what is in the first block is the state after one token, not after two
        assert manager.allocate_slots(first, n) is not None
        first.num_computed_tokens += n
    assert [ids.count(0) for ids in manager.get_block_ids(first.request_id)] == [0, 1]
    assert manager.get_computed_blocks(Request([1, 2, 9]))[1:] == (0, 2)  # its state is worth keeping
    assert manager.allocate_slots(first, 1) is not None
    assert manager.get_computed_blocks(Request([1, 2, 3, 4, 9]))[1:] == (4, 0)
    manager.check()


def test_salts_adapters_and_requests_that_do_not_read() -> None:
    manager = KVCacheManager(config(), 64)
    first = Request([1, 2, 3], cache_salt="a")
    admit(manager, first)
    manager.free(first)
    lora = SimpleNamespace(lora_name="tuned")
    found = [
        manager.get_computed_blocks(Request([1, 2, 3], cache_salt="a", **more))[1]
        for more in ({}, dict(lora_request=lora), dict(skip_reading_prefix_cache=True))
    ]
    assert found == [2, 0, 0] and manager.get_computed_blocks(Request([1, 2, 3]))[1] == 0
    plain = KVCacheManager(config(), 64, enable_caching=False)
    for _ in range(2):
        request = Request([1, 2, 3])
        assert admit(plain, request) == 0
        plain.free(request)


def test_a_name_that_is_used_again_means_another_text() -> None:
    manager = KVCacheManager(config(), 64)
    first = Request([1, 2, 3], request_id="same")
    admit(manager, first)
    manager.free(first)
    found = [manager.get_computed_blocks(Request(tokens, request_id="same"))[1] for tokens in ([1, 2, 4], [4, 2, 3])]
    assert found == [2, 0]


def test_what_is_not_served_is_told() -> None:
    for more in (dict(extra_retained_tokens=2), dict(mamba_cache_mode="all"), dict(bounded_replay=True)):
        odd = config()
        vars(odd.kv_cache_groups[0].kv_cache_spec).update(more)
        with pytest.raises(SchemaError, match="is not supported here"):
            KVCacheManager(odd, 64)
    with pytest.raises(SchemaError, match="is not supported here"):
        KVCacheManager(SimpleNamespace(num_blocks=4, kv_cache_groups=[SimpleNamespace(kv_cache_spec=object())]), 64)
    two = config()
    two.kv_cache_groups += config(9, 4, ("window", 4)).kv_cache_groups
    with pytest.raises(SchemaError, match=r"blocks of \[2, 4\] tokens share no prefixes"):
        KVCacheManager(two, 64)
    assert KVCacheManager(two, 64, enable_caching=False).num_kv_cache_groups == 2
    for more in (dict(use_eagle=True), dict(dcp_world_size=2), dict(unknown=1), dict(watermark=1.0)):
        with pytest.raises(BadInput, match="no KVCacheManager with"):
            KVCacheManager(config(), 64, **more)
    manager = KVCacheManager(config(), 64, use_eagle=False, hash_block_size=2, pcp_world_size=1)
    with pytest.raises(BadInput, match="images"):
        manager.get_computed_blocks(Request([1, 2], mm_features=("image",)))
    with pytest.raises(BadInput, match="connectors"):
        manager.allocate_slots(Request([1, 2]), 1, num_external_computed_tokens=1)
    for request, cached in ((Request([1, 2, 3]), 1), (Request([1, 2, 3], num_computed_tokens=2), 0)):
        with pytest.raises(BadInput, match="has no blocks yet"):
            manager.allocate_slots(request, 1, cached)
    with pytest.raises(BadInput, match="at least 1"):
        manager.allocate_slots(Request([1, 2]), 0)
    manager.check()


# -- under the project's own scheduler -----------------------------------------------------------------------------------

HEAVY = (
    "torchvision", "xgrammar", "llguidance", "openai_harmony", "uvloop", "cbor2", "partial_json_parser", "fastapi", "cpuinfo",
    "cloudpickle", "cachetools", "pybase64", "openai", "aiohttp", "psutil",
)  # fmt: skip
"""Packages that vLLM imports and its scheduler does not use."""


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    path = path_of("KVPAGODA_VLLM", "vllm/v1/core/sched/scheduler.py")
    pytest.importorskip("torch")
    before, finders = dict(sys.modules), [*sys.meta_path]
    stubs.install(*(name for name in HEAVY if importlib.util.find_spec(name) is None))
    sys.path.insert(0, str(path))
    try:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
            try:
                yield SimpleNamespace(
                    **{name.rpartition(".")[2]: importlib.import_module(f"vllm.{name}") for name in MODULES}
                )
            except ImportError as error:
                pytest.skip(f"vLLM at {path} cannot be imported here: {error}")
    finally:
        sys.path.remove(str(path))
        sys.meta_path[:] = finders
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("vllm", *HEAVY):
                del sys.modules[name]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_random_traffic_of_its_own_scheduler(vllm: Any, shape: str, seed: int) -> None:
    checks, preempted = count(), 0

    class Checked(KVCacheManager):
        def new_step_starts(self) -> None:
            if next(checks) % 7 == 0:
                self.check()

        def free(self, request: Any) -> None:
            nonlocal preempted
            preempted += not request.is_finished()
            super().free(request)

    run = Run(vllm, seed, shape, Checked).run()
    manager = run.scheduler.kv_cache_manager
    manager.check()
    assert isinstance(manager, Checked) and manager.usage == 0 and not manager._running
    assert run.computed < run.tokens or preempted
