"""Our cache manager inside the installed vLLM: its scheduler, its blocks, its options. ``make vllm`` runs this."""

from __future__ import annotations

import importlib
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from vllm_run import MODULES, SHAPES, Run

from kvpagoda import BadInput, CheckFailed
from raises import raises

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_group_id, get_request_block_hasher, init_none_hash

from kvpagoda.adapters.vllm import AsyncScheduler, KVCacheManager, Options, Scheduler, installed
from kvpagoda.adapters.vllm.eviction import EvictionQueue, PolicyQueue

PROJECT = SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(f"vllm.{name}") for name in MODULES})
init_none_hash(sha256)


class Checked(KVCacheManager):
    """Proves itself every few steps."""

    steps = count()

    def new_step_starts(self) -> None:
        super().new_step_starts()
        if next(self.steps) % 5 == 0:
            self.check()


def run(seed: int, shape: str, options: Options | None = None) -> Run:
    def make(**arguments: Any) -> Checked:
        return Checked(**arguments, options=options)

    return Run(PROJECT, seed, shape, make).run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_random_traffic(shape: str, seed: int) -> None:
    """Every row that a step reads is that of its text."""
    done = run(seed, shape)
    manager = done.scheduler.kv_cache_manager
    manager.check()
    assert isinstance(manager, Checked) and manager.usage == 0
    assert not manager._unchanged and not manager._positions
    assert done.computed < done.tokens


@pytest.mark.parametrize("policy", ["fifo", "lfu", "lfuda", "sieve", "s3fifo", "arc", "auto"])
@pytest.mark.parametrize("shape", ["full", "full, windows"])
def test_random_traffic_with_every_policy(shape: str, policy: str) -> None:
    done = run(1, shape, Options(policy))
    manager = done.scheduler.kv_cache_manager
    manager.check()
    assert isinstance(manager.block_pool.free_block_queue, PolicyQueue)
    assert manager.reset_prefix_cache()
    manager.check()


# -- what stays cached -------------------------------------------------------------------------------------------------

SIZE = 4


def manager_of(*kinds: str, blocks: int = 24, unit: int = SIZE, **more: Any) -> KVCacheManager:
    import torch

    interface = PROJECT.kv_cache_interface
    common = dict(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    specs = {
        "full": lambda: interface.FullAttentionSpec(**common),
        "window": lambda: interface.SlidingWindowSpec(**common, sliding_window=2 * SIZE),
        "state": lambda: interface.MambaSpec(
            block_size=SIZE, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        ),
    }
    groups = [interface.KVCacheGroupSpec([f"layer {i}"], specs[kind]()) for i, kind in enumerate(kinds)]
    config = interface.KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=0
    )
    return KVCacheManager(config, 256, scheduler_block_size=SIZE, hash_block_size=unit, **more)


def ask(manager: KVCacheManager, tokens: list[int], name: str, answer: int = 1, step: int = 256) -> int:
    """Run a request to its end, ``step`` tokens at a time; return how many tokens were found."""
    sampling = PROJECT.sampling_params.SamplingParams(max_tokens=answer, ignore_eos=True)
    hasher = get_request_block_hasher(manager.block_pool.hash_block_size, sha256)
    request = PROJECT.request.Request(name, tokens, sampling, None, block_hasher=hasher)
    blocks, found, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    begin: Any = (found, blocks)
    while request.num_computed_tokens + begin[0] < len(tokens) + answer:
        computed = request.num_computed_tokens + begin[0]
        n = min(step, request.num_tokens - computed)
        manager.new_step_starts()
        assert manager.allocate_slots(request, n, *begin) is not None
        _, retained = manager.take_kv_cache_block_copies()
        manager.block_pool.free_blocks(retained)
        request.status = PROJECT.request.RequestStatus.RUNNING
        request.num_computed_tokens, begin = computed + n, (0, None)
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(7)
    manager.free(request)
    manager.check()
    return found


def text(seed: int, n: int) -> list[int]:
    return [100 * seed + i for i in range(n)]


def test_blocks_that_left_their_window_are_used_again_before_texts() -> None:
    manager = manager_of("full", "window", blocks=1 + 2 * 14)
    assert isinstance(manager.block_pool.free_block_queue, EvictionQueue)
    assert ask(manager, text(1, 24), "a", step=SIZE) == 0
    assert ask(manager, text(2, 24), "b", step=SIZE) == 0  # 6 full and 6 window blocks each, and one for the answer
    assert ask(manager, text(3, 12), "c", step=SIZE) == 0  # fills the memory
    assert [ask(manager, [*text(n, size), 5], f"{n}") for n, size in ((1, 24), (2, 24), (3, 12))] == [24, 24, 12]


def test_where_texts_part_stays_resumable() -> None:
    manager, head = manager_of("full", "window", blocks=60), text(9, 32)
    found = [ask(manager, [*head, *text(n, 40)], f"{n}", step=SIZE) for n in range(1, 5)]
    assert found[0] == 0 and found[2:] == [32, 32]


def test_a_text_that_was_seen_before_parts_too_without_full_attention() -> None:
    manager, head = manager_of("window", blocks=13), text(9, 32)
    found = [ask(manager, [*head, *text(n, 40)], f"{n}", step=SIZE) for n in range(1, 5)]
    assert found == [0, 0, 32, 32]


def test_a_prompt_that_is_sent_again_is_found_up_to_its_last_block() -> None:
    for kind in ("window", "state"):
        manager = manager_of("full", kind, blocks=60)
        assert ask(manager, text(1, 41), "first", answer=20, step=SIZE) == 0
        assert ask(manager, text(1, 41), "again", answer=20, step=SIZE) == 40


def test_with_a_unit_of_matching_a_prompt_is_found_up_to_its_end_inside_a_block() -> None:
    for unit, end in ((SIZE, 20), (SIZE // 2, 22)):
        manager = manager_of("full", "state", blocks=60, unit=unit)
        assert ask(manager, text(1, 23), "first", answer=3, step=2) == 0
        assert [ask(manager, [*text(1, 23), *text(n, 9)], f"{n}", step=2) for n in (2, 3)] == [end, end]
        assert ask(manager, text(4, 16 * SIZE), "other", step=SIZE) == 0
        assert ask(manager, text(1, 23), "again", step=2) == end


@pytest.mark.parametrize(("kind", "needed", "unit"), [("window", 2, SIZE), ("state", 1, SIZE), ("state", 1, SIZE // 2)])
def test_the_end_of_an_answer_stays_resumable_as_long_as_its_text(kind: str, needed: int, unit: int) -> None:
    """A state leaves its request when the next one is written, before the request ends."""
    manager = manager_of("full", kind, blocks=60, unit=unit)
    assert ask(manager, text(1, 20), "a", answer=10, step=SIZE) == 0
    queue = manager.block_pool.free_block_queue
    order = [block for block in queue.get_all_free_blocks() if block.block_hash is not None]
    kept = [block for block in order if get_group_id(block.block_hash) == 1 and not queue.is_cold(block)]
    assert len(kept) == needed
    texts = [block for block in order if get_group_id(block.block_hash) == 0]
    assert order.index(kept[-1]) > order.index(texts[0])  # freed with the text, not before


@pytest.mark.parametrize("kind", ["window", "state"])
def test_where_texts_part_is_as_recently_used_as_the_texts_that_pass_it(kind: str) -> None:
    manager, head = manager_of("full", kind, blocks=1 + 2 * 24), text(9, 16)
    for name in "abc":  # where they part is known after the second one
        ask(manager, [*head, *text(ord(name), 8)], name, step=SIZE)
    conversation = [*head, *text(ord("c"), 8)]
    for turn in range(6):  # goes on from its own end, and other texts come between
        conversation += [*text(50 + turn, 4)]
        assert ask(manager, conversation, f"c{turn}", step=SIZE) >= len(conversation) - 8
        ask(manager, text(70 + turn, 12), f"other {turn}", step=SIZE)
    assert ask(manager, [*head, *text(99, 8)], "d", step=SIZE) == 16


@pytest.mark.parametrize("every", [None, 8])
def test_checkpoint_every_keeps_more_places(every: int | None) -> None:
    manager = manager_of("full", "window", blocks=1 + 2 * 20, options=Options(checkpoint_every=every))
    ask(manager, text(1, 64), "a", step=SIZE)
    kept = manager.block_pool.free_block_queue._kept
    assert (sum(kept) > 8) == (every is not None)


def test_a_step_in_which_nothing_changes_asks_no_group() -> None:
    manager = manager_of("full", "window")
    sampling = PROJECT.sampling_params.SamplingParams(max_tokens=64)
    request = PROJECT.request.Request(
        "a", text(1, 9), sampling, None, block_hasher=get_request_block_hasher(SIZE, sha256)
    )
    assert manager.allocate_slots(request, 9) is not None
    request.status, request.num_computed_tokens = PROJECT.request.RequestStatus.RUNNING, 9
    asked = []
    own = manager.coordinator.get_num_blocks_to_allocate
    manager.coordinator.get_num_blocks_to_allocate = lambda **said: asked.append(request.num_tokens) or own(**said)
    for token in range(20):
        request.append_output_token_ids(token)
        added = manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        needs = [-(-request.num_tokens // SIZE)] * 2
        assert added is not None and [len(ids) for ids in manager.get_block_ids("a")] == needs
    assert 5 <= len(asked) <= 12


def test_check_finds_a_block_in_two_places() -> None:
    manager = manager_of("full", "window")
    ask(manager, text(1, 8), "a")
    manager.block_pool.blocks[3].ref_cnt += 1
    with pytest.raises(CheckFailed):
        manager.check()


# -- the schedulers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_async", "kind"), [(False, Scheduler), (True, AsyncScheduler)])
def test_the_scheduler_is_the_one_that_vllm_would_choose(is_async: bool, kind: type) -> None:
    made = _made(is_async, {"kvpagoda": {"policy": "sieve"}})
    assert type(made) is kind and isinstance(made.kv_cache_manager, KVCacheManager)
    assert made.kv_cache_manager.options.policy == "sieve"
    assert PROJECT.scheduler.KVCacheManager is not KVCacheManager  # vLLM itself is as it was


def test_a_wrong_option_is_an_error_before_anything_is_made() -> None:
    with raises(BadInput, needed="polcy", available=ANY):
        _made(False, {"kvpagoda": {"polcy": "lru"}})


def test_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpagoda.adapters.vllm.options._installed_version", lambda: "0.99.0")
    with raises(BadInput, needed=ANY, available="0.99.0"):
        _made(False, {})


def _made(is_async: bool, additional: dict[str, Any]) -> Any:
    def configured(vllm_config: Any, **arguments: Any) -> Any:
        vllm_config.scheduler_config.async_scheduling = is_async
        vllm_config.additional_config = additional
        return Scheduler(vllm_config=vllm_config, **arguments)

    return Run(PROJECT, 0, "full", None, configured).scheduler


def test_installed_ends_with_its_context() -> None:
    own = PROJECT.scheduler.KVCacheManager
    with installed(Options("fifo")):
        assert PROJECT.scheduler.KVCacheManager is not own
    assert PROJECT.scheduler.KVCacheManager is own


def test_a_model_without_attention_has_a_manager_too() -> None:
    manager = manager_of(blocks=2, enable_caching=False)
    manager.check()
    assert manager.usage == 0
