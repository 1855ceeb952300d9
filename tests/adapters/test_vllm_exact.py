"""States in runs of units, ``memory="exact"``: random traffic, admission, and what is refused. ``make vllm`` runs this.

The tokens of real engines are compared in ``test_vllm_memory``.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_run import EXACT, MODULES, Run

from kvpagoda import BadInput, CheckFailed
from raises import raises

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

import torch
from test_vllm_memory import attended, qwen3_next, settings, windows
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from kvpagoda.adapters.vllm import KVCacheManager, Options, Scheduler, memory
from kvpagoda.adapters.vllm.spans import SpanQueue

init_none_hash(sha256)

PROJECT = SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(f"vllm.{name}") for name in MODULES})


class Checked(KVCacheManager):
    """Proves itself in every step."""

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic(seed: int) -> None:
    """Every row that a step reads is that of its text, and a state is whole."""
    done = Run(PROJECT, seed, EXACT, Checked).run()
    manager = done.scheduler.kv_cache_manager
    manager.check()
    queue = manager.block_pool.free_block_queue
    assert isinstance(queue, SpanQueue) and manager.usage == 0 and not manager._spans._at_end
    assert queue.num_free_blocks == manager.block_pool.num_gpu_blocks - 1 and queue.num_free_blocks % 5 == 0
    assert manager.reset_prefix_cache()
    manager.check()


# -- admission and order ---------------------------------------------------------------------------------------------------

SIZE, UNITS = 4, 5


def manager_of(sectors: int, longest: int = 256, unit: int = SIZE, **more: Any) -> Checked:
    """A manager with memory for ``sectors`` states, of which one is the null block."""
    groups = groups_of()
    tensors = [KVCacheTensor(size=1, layers=[*group.layer_names], layer_stride=1, block_stride=1) for group in groups]
    config = KVCacheConfig(
        num_blocks=sectors * UNITS, kv_cache_tensors=tensors, kv_cache_groups=groups, prefix_cache_retention_interval=0
    )
    return Checked(config, longest, scheduler_block_size=SIZE, hash_block_size=unit, enable_caching=True, **more)


def groups_of() -> list[Any]:
    """Groups in which a state takes ``UNITS`` blocks of attention."""
    full = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32)
    state = MambaSpec(
        block_size=SIZE, shapes=((UNITS * SIZE * 32 - 1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    return [KVCacheGroupSpec(["s"], state), KVCacheGroupSpec(["a"], full)]


class Asked:
    """A request of a manager: ``begin`` looks up and allocates its prompt, ``go`` its next tokens."""

    def __init__(self, manager: Checked, tokens: list[int], answer: int = 4) -> None:
        sampling = PROJECT.sampling_params.SamplingParams(max_tokens=answer, ignore_eos=True)
        hasher = get_request_block_hasher(SIZE, sha256)
        self.manager, self.name = manager, f"{id(self)}"
        self.request = PROJECT.request.Request(self.name, tokens, sampling, None, block_hasher=hasher)

    def begin(self) -> int | None:
        """Return how many tokens were found; None if there is no room."""
        manager, request = self.manager, self.request
        manager.new_step_starts()
        blocks, found, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - found, found, blocks) is None:
            return None
        request.num_computed_tokens, request.status = request.num_tokens, PROJECT.request.RequestStatus.RUNNING
        return int(found)

    def found(self) -> int:
        """Return how many tokens are cached."""
        return int(self.manager.get_computed_blocks(self.request)[1])

    def go(self, count: int) -> bool:
        """Decode ``count`` tokens; return whether there was room."""
        for _ in range(count):
            self.manager.new_step_starts()
            self.request.append_output_token_ids(7)
            if self.manager.allocate_slots(self.request, 1) is None:
                return False
            self.request.num_computed_tokens += 1
        return True

    def end(self) -> None:
        self.manager.free(self.request)
        self.manager.check()

    def ids(self) -> tuple[list[int], list[int]]:
        """The blocks that it holds: states, and units of attention."""
        states, units = self.manager.get_block_ids(self.name)
        return [number for number in states if number], units


def words(seed: int, n: int) -> list[int]:
    return [1000 * seed + i for i in range(n)]


def test_a_state_takes_a_sector_and_attention_the_blocks_of_another() -> None:
    manager = manager_of(18)
    one, two = Asked(manager, words(1, 3 * SIZE)), Asked(manager, words(2, SIZE))
    assert (one.begin(), two.begin()) == (0, 0)
    assert (one.ids(), two.ids()) == (([5], [10, 11, 12]), ([15], [13]))
    assert manager.block_pool.num_gpu_blocks == 17 * UNITS + 1  # the null block's sector counts as one block
    assert manager.block_pool.get_num_free_blocks() == 17 * UNITS - 2 * UNITS - 4
    one.end(), two.end()
    assert manager.usage == 0


@pytest.mark.parametrize(("prompt", "begun"), [(SIZE - 1, 5), (SIZE, 3)])
def test_a_request_waits_while_no_sector_is_free_though_blocks_are(prompt: int, begun: int) -> None:
    """Of seven sectors attention has one. Those at the end of a block take a second state next, which is kept free."""
    manager = manager_of(8, longest=64)
    held = [Asked(manager, words(seed, prompt)) for seed in range(6)]
    assert [one.begin() for one in held] == [0] * begun + [None] * (6 - begun)
    assert manager.block_pool.get_num_free_blocks() >= UNITS
    assert all(one.go(1) for one in held[: begun - 1])  # attention takes a sector more at the end


def test_units_of_the_sector_used_longest_ago_are_handed_out_one_sector_after_the_other() -> None:
    manager = manager_of(9, longest=64)
    texts = [Asked(manager, words(seed, UNITS * SIZE)) for seed in range(3)]
    for one in texts:
        assert one.begin() == 0
        one.end()
    other = Asked(manager, words(9, 3 * UNITS * SIZE))
    assert other.begin() == 0
    _, units = other.ids()
    sectors = [number // UNITS for number in units]
    assert sectors == sorted(sectors, key=sectors.index) and len({*sectors}) <= 4
    other.end()
    assert [Asked(manager, words(seed, UNITS * SIZE + 1)).found() for seed in range(3)] == [0, 20, 20]


def test_a_state_evicts_the_units_in_its_sector_and_a_unit_the_state() -> None:
    """And the events of both say so."""
    manager = manager_of(9, longest=32, enable_kv_cache_events=True)
    random, removed, stored = np.random.default_rng(3), 0, 0
    for _ in range(60):
        one = Asked(manager, words(int(random.integers(12)), int(random.integers(5, 25))))
        assert one.begin() is not None
        one.end()
        for event in manager.take_events():
            removed += len(getattr(event, "block_hashes", ())) * (type(event).__name__ == "BlockRemoved")
            stored += len(getattr(event, "block_hashes", ())) * (type(event).__name__ == "BlockStored")
        cached = sum(block.block_hash is not None for block in manager.block_pool.blocks)
        assert stored - removed == cached
    assert removed > 30


def test_what_was_found_in_too_many_sectors_is_forgotten_before_a_request_that_runs_alone_is_stuck() -> None:
    manager = manager_of(7, longest=32)
    one = Asked(manager, words(1, 6 * SIZE), answer=8)
    assert one.begin() == 0
    one.end()
    again, queue = Asked(manager, words(1, 6 * SIZE + 1)), manager.block_pool.free_block_queue
    assert again.found() == 6 * SIZE
    own = queue.num_sectors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "num_sectors", lambda without=(): own(without) - 3 * bool([*without]))
        assert again.begin() is None
    assert again.found() == 0
    assert again.begin() == 0 and again.go(7)


def test_promises_count_the_blocks_of_a_state() -> None:
    manager = manager_of(18)
    one = Asked(manager, words(1, 2 * SIZE))
    keep = KvHintAction(action_id="a", action_type="kv.retain", action_version="1.0", payload={"seconds": 60})
    one.request.kv_hints = KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[keep])
    one.begin()
    one.request.status = PROJECT.request.RequestStatus.FINISHED_LENGTH_CAPPED
    one.end()
    assert manager.promises.num_blocks == UNITS + 2
    manager.promises.clear()
    assert manager.promises.num_blocks == 0 and manager.usage == 0


# -- what would happen, and what is refused --------------------------------------------------------------------------------


def test_a_copied_block_of_attention_would_overwrite_its_neighbours() -> None:
    """What the checks of hashes and of copies are for: vLLM copies an id in the views of all layers, also of states."""
    groups = groups_of()
    config = memory.config_of(settings(num_gpu_blocks_override=20), groups, 0)
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC)
    raw = torch.tensor([], dtype=torch.uint8).set_(views["a"].untyped_storage())
    unit = memory.id_nbytes(groups)
    raw.copy_(torch.arange(len(raw)) // unit)
    assert len(raw) == (20 + UNITS - 1) * unit
    copy_kv_cache_blocks_inplace(views.values(), 20, [(6, 12)])
    found = [int(raw[number * unit]) for number in range(20)]
    assert found[12] == 6
    assert found[13 : 12 + UNITS] == [7, 8, 9, 10]  # nobody asked for these


def test_copies_end_the_engine() -> None:
    manager = manager_of(18)
    blocks = manager.block_pool.blocks
    manager.coordinator.single_type_managers[1]._pending_cow_copies.append((blocks[6], blocks[12]))
    with raises(CheckFailed, available=[(6, 12)]):
        manager.take_kv_cache_block_copies()
    assert manager.take_kv_cache_block_copies() == ([], [])


def test_hashes_inside_of_blocks_are_refused() -> None:
    with raises(BadInput, needed=SIZE, available=SIZE // 2):
        manager_of(18, unit=SIZE // 2)


def test_memory_for_one_text_is_needed() -> None:
    with raises(BadInput, needed=(1 + 3 + 13) * UNITS, available=16 * UNITS) as error:
        manager_of(16)
    assert "--max-model-len" in str(error.value)
    manager_of(17)


SCHEDULER = "kvpagoda.adapters.vllm.Scheduler"


def exact(**more: Any) -> Any:
    """vLLM's configuration with the switch on, beside our scheduler."""
    found = settings(**more)
    found.additional_config = {"kvpagoda": {"memory": "exact"}}
    found.scheduler_config.scheduler_cls = more.get("scheduler_cls", SCHEDULER)
    found.parallel_config.world_size = more.get("world_size", 1)
    return found


def test_units_of_qwen3_next_are_blocks_of_64_tokens() -> None:
    groups = memory.groups_of(exact(), qwen3_next(64, None), lambda *_: pytest.fail("vLLM's own was asked"))
    assert [len(group.layer_names) for group in groups] == [36, 12]
    unit = 64 * 12 * 2048
    assert (memory.id_nbytes(groups), memory.units_per_state(groups)) == (unit, 50)
    assert 49 * unit < 36 * 2146304 <= 50 * unit
    for workers, ids in ((1, 1000 - 49), (2, 1000)):
        config = memory.config_of(exact(world_size=workers), groups, 1000)
        assert config.num_blocks == ids
        assert {tensor.block_stride for tensor in config.kv_cache_tensors} == {unit}
        assert {tensor.size for tensor in config.kv_cache_tensors} == {(ids + 49) * unit}
        assert [tensor.layers for tensor in config.kv_cache_tensors] == [group.layer_names for group in groups]


@pytest.mark.parametrize(
    ("more", "needed", "available"),
    [
        (dict(scheduler_cls=None), SCHEDULER, None),
        (dict(scheduler_cls="another.Scheduler"), SCHEDULER, "another.Scheduler"),
        (dict(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector")), None, "NixlConnector"),
        (dict(kv_transfer_config=SimpleNamespace(kv_connector="KvpagodaConnector")), None, "KvpagodaConnector"),
        (dict(prefix_match_unit=32), 64, 32),
        (dict(speculative_config="mtp"), "memory", "--speculative-config"),
        (dict(decode_context_parallel_size=2), "memory", "--decode-context-parallel-size"),
        (dict(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LHBNC), "is_block_compact", "LHBNC"),
    ],
)
def test_what_reads_an_id_as_a_whole_block_is_refused(more: dict[str, Any], needed: Any, available: Any) -> None:
    with raises(BadInput, needed=needed, available=available):
        memory.groups_of(exact(**more), qwen3_next(64, None), list)


@pytest.mark.parametrize("scheduler", [SCHEDULER, "kvpagoda.adapters.vllm.AsyncScheduler", Scheduler])
def test_our_schedulers_are_known(scheduler: Any) -> None:
    assert memory.groups_of(exact(scheduler_cls=scheduler, prefix_match_unit=64), qwen3_next(64, None), list)


@pytest.mark.parametrize("specs", [windows(10, 52), windows(12, 0), {}], ids=["Gemma-3", "full attention", "none"])
def test_other_models_are_refused(specs: dict[str, Any]) -> None:
    kinds = tuple(sorted({type(spec).__name__ for spec in specs.values()}))
    with raises(BadInput, needed=("FullAttentionSpec", "MambaSpec"), available=kinds):
        memory.groups_of(exact(), specs, list)


def test_a_block_is_one_that_the_kernels_take() -> None:
    config, specs = attended([16, 32, 64])
    assert memory.least_block(config, specs, 64, is_whole=True) == 64
    with raises(BadInput, needed=128, available=(16, 32, 64)):
        memory.least_block(config, specs, 128, is_whole=True)
    config, specs = attended([MultipleOf(48)])
    assert memory.least_block(config, specs, 64, is_whole=True) == 192


def test_other_policies_are_refused() -> None:
    with raises(BadInput, field="policy", needed="lru", available="lfu"):
        Options("lfu", memory="exact")
