"""The cache manager and the prefix cache of mini-sglang: by themselves, and in that project's own scheduler."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from projects import Anything, bare_packages, path_of  # noqa: E402
from rows import Rows, next_token  # noqa: E402

from kvpagoda import BadInput, CheckFailed, NotOwned, OutOfBlocks, StaleHandle  # noqa: E402
from kvpagoda.adapters.mini_sglang import CacheManager, PrefixCache  # noqa: E402
from raises import raises  # noqa: E402


def ids(*tokens: int) -> Any:
    return torch.tensor(tokens, dtype=torch.int32)


def manager(num_pages: int = 8, page_size: int = 2, rows: int = 4) -> CacheManager:
    return CacheManager(num_pages, page_size, torch.full((rows, 64), -1, dtype=torch.int32))


def admit(cache: CacheManager, row: int, *tokens: int) -> Any:
    """A request with this prompt, computed."""
    prompt = ids(*tokens)
    handle = cache.match_req(SimpleNamespace(input_ids=prompt, input_len=len(prompt))).cuda_handle
    cache.lock(handle)
    cached = handle.cached_len
    cache.page_table[row, :cached] = handle.get_matched_indices()
    req = SimpleNamespace(
        input_ids=prompt, table_idx=row, cached_len=cached, device_len=len(prompt), cache_handle=handle
    )
    cache.allocate_paged([req])
    req.found, req.cached_len = cached, len(prompt)
    return req


def test_pages_are_shared_and_a_finished_request_leaves_its_whole_pages() -> None:
    cache = manager()
    first = admit(cache, 0, 1, 2, 3, 4, 5)
    cache.cache_req(first, finished=False)
    second = admit(cache, 1, 1, 2, 3, 4, 6)
    assert second.found == 4 and cache.page_table[1, :4].tolist() == cache.page_table[0, :4].tolist()
    assert cache.prefix_cache.size_info == (0, 4) and cache.available_size == 8
    for req in (first, second):
        cache.cache_req(req, finished=True)
    cache.check_integrity()
    assert cache.prefix_cache.size_info.total_size == 4 and len(cache.free_slots) == 6


def test_a_request_whose_pages_others_cached_first_reads_theirs() -> None:
    cache = manager()
    one, two = admit(cache, 0, 1, 2, 3), admit(cache, 1, 1, 2, 3)
    cache.cache_req(one, finished=False)
    assert cache.page_table[0, :2].tolist() != cache.page_table[1, :2].tolist()
    cache.cache_req(two, finished=False)
    assert cache.page_table[0, :2].tolist() == cache.page_table[1, :2].tolist()
    for req in (one, two):
        cache.cache_req(req, finished=True)
    cache.check_integrity()


def test_what_has_no_room_changes_nothing() -> None:
    cache = manager(num_pages=3)
    req = admit(cache, 0, 1, 2, 3, 4)
    cache.cache_req(req, finished=False)
    before = cache.page_table.clone()
    more = SimpleNamespace(table_idx=1, cached_len=0, device_len=4)
    with raises(OutOfBlocks, needed=2, available=1):
        cache.allocate_paged([more])
    assert torch.equal(before, cache.page_table) and cache.available_size == 2
    cache.cache_req(req, finished=True)
    cache.allocate_paged([more])
    assert cache.prefix_cache.size_info.total_size == 2


def test_calls_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(BadInput):
        PrefixCache("cpu", 0)
    cache = manager()
    with raises(BadInput, needed=1, available=0):
        cache.match_req(SimpleNamespace(input_ids=ids(), input_len=0))
    req = admit(cache, 0, 1, 2, 3)
    cache.cache_req(req, finished=True)
    with raises(BadInput, needed=0):
        cache.cache_req(req, finished=True)
    with raises(BadInput, needed=2):
        cache.unlock(req.cache_handle)
    handle = cache.prefix_cache.match_prefix(ids(1, 2)).cuda_handle
    assert cache.prefix_cache.evict(1).tolist() == [0, 1]
    with raises(StaleHandle, needed=1, available=0):
        cache.lock(handle)
    with raises(CheckFailed, needed=8, available=7):
        cache.check_integrity()


def test_the_prefix_cache_by_itself() -> None:
    cache = PrefixCache("cpu", 2)
    assert cache.insert_prefix(ids(1, 2, 3, 4, 5), torch.arange(5)).cached_len == 0
    found = cache.insert_prefix(ids(1, 2, 6, 7), torch.tensor([8, 9, 10, 11]))
    assert found.cached_len == 2 and found.handle.get_matched_indices().tolist() == [0, 1, 10, 11]
    with pytest.raises(NotOwned):
        cache.insert_prefix(ids(9, 9), torch.tensor([10, 11]))
    for _ in range(2):
        cache.lock_handle(found.handle)
    cache.lock_handle(found.handle, unlock=True)
    assert cache.size_info == (2, 4)
    with pytest.raises(OutOfBlocks):
        cache.evict(3)
    assert cache.evict(1).tolist() == [2, 3]
    cache.lock_handle(found.handle, unlock=True)
    cache.check_integrity()
    cache.reset()
    assert cache.size_info.total_size == 0


# -- in the project's own scheduler --------------------------------------------------------------------------------------


@pytest.fixture
def mini_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    path = path_of("KVPAGODA_MINI_SGLANG", "python/minisgl/scheduler/scheduler.py") / "python" / "minisgl"
    pytest.importorskip("transformers")
    stand_ins = {}
    for name in (
        "zmq",
        "zmq.asyncio",
        "msgpack",
        "tvm_ffi",
        "flashinfer",
        "sgl_kernel",
        "minisgl.engine",
        "minisgl.kernel",
    ):
        stand_ins[name] = module = type(sys)(name)
        module.__getattr__ = lambda _: Anything  # type: ignore[method-assign]
    for name in ("empty", "tensor"):
        own = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, own=own, pin_memory=False, **options: own(*args, **options)
        )  # no GPU to pin for
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with bare_packages({"minisgl": path, "minisgl.scheduler": path / "scheduler"}, stand_ins):
        importlib.import_module("minisgl.distributed").set_tp_info(0, 1)
        yield SimpleNamespace(
            path=path.parent.parent,
            **{name: importlib.import_module(f"minisgl.{name}") for name in ("core", "message", "kvcache")},
            **{name: importlib.import_module(f"minisgl.scheduler.{name}") for name in ("scheduler", "cache")},
        )


class Engine:
    """What the scheduler calls of an engine: the model is a function of the text, and rows are proved."""

    def __init__(self, num_rows: int, num_tokens: int, width: int) -> None:
        self.page_table = torch.full((num_rows + 1, width), -1, dtype=torch.int32)
        self.rows, self.max_seq_len, self.device = Rows(num_tokens), width, torch.device("cpu")
        self.graph_runner = SimpleNamespace(pad_batch=lambda batch: setattr(batch, "padded_reqs", batch.reqs))
        self.attn_backend = SimpleNamespace(prepare_metadata=lambda batch: None)
        self.sampler = SimpleNamespace(prepare=lambda batch: None)
        self.token_pool: Any = None
        self.computed = 0

    def forward_batch(self, batch: Any, args: Any) -> Any:
        spans, said = [], []
        for req in batch.reqs:
            text = self.token_pool[req.table_idx, : req.device_len].tolist()
            places = self.page_table[req.table_idx, : req.device_len].numpy().astype(np.int64)
            spans.append((req, text, places))
            self.rows.prove(text, places, req.cached_len, req.uid)
        assert batch.out_loc.tolist() == [int(place) for req, _, places in spans for place in places[req.cached_len :]]
        for req, text, places in spans:
            self.rows.write(text, places, req.cached_len, req.device_len)
            self.computed += req.extend_len
        for req, text, places in spans:
            self.rows.prove(text, places, req.device_len, req.uid)
            said.append(next_token(text, 9))
            req.complete_one()
        tokens = torch.tensor(said, dtype=torch.int32)
        return SimpleNamespace(next_tokens_gpu=tokens, next_tokens_cpu=tokens, copy_done_event=None)


class Run:
    """A random workload through the project's own scheduler; ``manager``: of its cache, None for its own."""

    def __init__(self, project: Any, seed: int, manager: Any, at_once: int, cache_type: str = "radix") -> None:
        self.project, self.random, self.at_once = project, np.random.default_rng(seed), at_once
        size, pages, width = int(self.random.choice([1, 2, 4])), int(self.random.integers(60, 160)), 120
        project.core._GLOBAL_CTX = project.core.Context(page_size=size)
        self.engine = engine = Engine(8, pages * size, width)
        scheduler = project.scheduler
        self.scheduler = one = scheduler.Scheduler.__new__(scheduler.Scheduler)
        one.engine, one.device, one.finished_reqs, one.eos_token_id = engine, engine.device, set(), -1
        one.table_manager = scheduler.TableManager(8, engine.page_table)
        one.cache_manager = (manager or scheduler.CacheManager)(pages, size, engine.page_table, cache_type)
        one.decode_manager = scheduler.DecodeManager(size)
        one.prefill_manager = scheduler.PrefillManager(one.cache_manager, one.table_manager, one.decode_manager)
        one.token_pool = engine.token_pool = one.table_manager.token_pool
        one.prefill_budget = int(self.random.integers(8, 80)) if at_once > 1 else 1000
        one.receive_msg, one.send_result = self.receive, self.reply
        heads = [self.random.integers(0, 9, 50).tolist() for _ in range(3)]
        self.waiting, self.uids, self.running = [], count(), 0
        for _ in range(60):
            text = heads[self.random.integers(3)][: self.random.integers(1, 50)]
            self.waiting.append([*text, *self.random.integers(0, 9, self.random.integers(1, 9)).tolist()])
        self.finished = self.tokens = 0

    def receive(self, blocking: bool) -> list[Any]:
        project, found = self.project, []
        is_free = self.at_once > 1 or not self.scheduler.prefill_manager.runnable
        for text in self.waiting[: self.random.integers(1, self.at_once + 1) if is_free else 0]:
            sampling = project.core.SamplingParams(max_tokens=int(self.random.integers(1, 30)), ignore_eos=True)
            self.tokens += len(text) + sampling.max_tokens - 1
            found.append(project.message.UserMsg(next(self.uids), torch.tensor(text, dtype=torch.int32), sampling))
        del self.waiting[: len(found)]
        one = self.scheduler
        active = [req.uid for req in (*one.prefill_manager.pending_list, *one.decode_manager.running_reqs)]
        if active and self.random.random() < 0.02:
            found.append(project.message.AbortBackendMsg(sorted(active)[self.random.integers(len(active))]))
            self.finished += 1
        return found

    def reply(self, reply: list[Any]) -> None:
        self.finished += sum(one.finished for one in reply)

    def run(self) -> Run:
        wait = SimpleNamespace(synchronize=lambda: None)
        own = self.scheduler._forward
        self.scheduler._forward = lambda data: (lambda out: (out.next_tokens_gpu, out.next_tokens_cpu, wait))(own(data))
        for _ in range(5000):
            self.scheduler.normal_loop()
            if self.finished == 60:
                break
        assert self.finished == 60
        self.scheduler.cache_manager.check_integrity()
        return self


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_of_its_own_scheduler(mini_sglang: Any, seed: int) -> None:
    run = Run(mini_sglang, seed, CacheManager, at_once=4).run()
    assert run.scheduler.cache_manager.prefix_cache.size_info.protected_size == 0
    assert run.engine.computed < 0.9 * run.tokens  # the rest was found


@pytest.mark.parametrize("seed", range(4))
def test_its_own_manager_over_our_prefix_cache(mini_sglang: Any, seed: int) -> None:
    """One prompt at a time: its own manager reads freed pages where two that are alike are computed together."""
    names = mini_sglang.kvcache.SUPPORTED_CACHE_MANAGER
    size = mini_sglang.core.get_global_ctx
    names.register("kvpagoda")(lambda device: PrefixCache(device, size().page_size))
    run = Run(mini_sglang, seed, None, at_once=1, cache_type="kvpagoda").run()
    assert isinstance(run.scheduler.cache_manager.prefix_cache, PrefixCache)


def test_the_projects_own_tests_pass(mini_sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its cache manager, on ours."""
    path = path_of("KVPAGODA_MINI_SGLANG", "tests/core/test_cache_allocate.py") / "tests" / "core"
    monkeypatch.syspath_prepend(str(path))
    module = importlib.import_module("test_cache_allocate")
    monkeypatch.delitem(sys.modules, "test_cache_allocate")
    monkeypatch.setattr(module, "CacheManager", CacheManager)
    case, ran = module.TestAllocateEvictPageAlignment(), 0
    for name in dir(case):
        if name.startswith("test_"):
            monkeypatch.setattr(mini_sglang.core, "_GLOBAL_CTX", None)
            getattr(case, name)()
            ran += 1
    assert ran
