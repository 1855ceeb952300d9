"""The two sides of the connector without vLLM: which blocks records hold, what is ordered, and that faults fill nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Thread, Timer
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch

from kvpagoda.adapters.connector.groups import LayerGroup, RecordGrid, grid_of, groups_of
from kvpagoda.adapters.connector.identity import adapter_of, files_digest, weights_of
from kvpagoda.adapters.connector.layer_rows import rows_of
from kvpagoda.adapters.connector.messages import Answers, Find, Load, MatchAnswer, Orders, Store
from kvpagoda.adapters.connector.options import ConnectorOptions, options_of
from kvpagoda.adapters.connector.scheduler import SchedulerSide
from kvpagoda.adapters.connector.stats import added, since
from kvpagoda.adapters.connector.worker import WorkerSide, _copying
from kvpagoda.errors import BadInput, LayoutError, SchemaError
from kvpagoda.pools import BlockRows
from kvpagoda.tiers import disk_tier, host_tier
from kvpagoda.tiers.level import RecordIdentity
from raises import raises

SIZE, BLOCKS = 4, 64
FULL = LayerGroup(0, SIZE, 96, ("a", "b"))
WINDOW = LayerGroup(1, SIZE, 48, ("c",), window=6)
STATE = LayerGroup(2, 2 * SIZE, 80, ("d",), is_state=True, is_handed=True)
CHUNK = LayerGroup(0, SIZE, 48, ("c",), chunk=3 * SIZE)
HYBRID = RecordGrid((FULL, WINDOW, STATE), 2 * SIZE)
ALONE = RecordGrid((FULL,), 2 * SIZE)


# -- groups and records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_needed_records_hold_every_block_that_a_request_reads(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 5))
    kind = [
        dict(),
        dict(window=int(random.integers(1, 40))),
        dict(chunk=int(random.integers(1, 40))),
        dict(is_state=True),
    ]
    group = LayerGroup(0, size, 1, ("x",), **kind[seed % 4])  # type: ignore[arg-type]
    grid = RecordGrid((group,), size * int(random.integers(1, 6)))
    for end in range(1, 14):
        tokens = end * grid.tokens
        read = {token // size for token in range(group.first_needed(tokens), tokens)}
        held = {block for number in grid.needed(group, end) for block in grid.blocks(group, number)}
        assert read <= held and (not group.keeps_all or len(held) == tokens // size)
        assert all(number < end for number in grid.needed(group, end))


def spec(kind: str, **fields: Any) -> Any:
    bases = ("SlidingWindowSpec", "MambaSpec", "FullAttentionSpec", "RSWASpec", "CrossAttentionSpec")
    assert kind in bases
    return type(kind, (), {"block_size": 16, "page_size_bytes": 100, **fields})()


def config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=one, layer_names=[f"l{i}", f"m{i}"]) for i, one in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=(*range(len(groups)),))


def test_groups_of_vllm() -> None:
    full = spec("FullAttentionSpec", sliding_window=None, attention_chunk_size=None)
    window = spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=2)
    state = spec("MambaSpec", mamba_cache_mode="align", block_size=48)
    groups = groups_of(config(full, window, state))
    assert [(g.window, g.is_state, g.is_handed, g.nbytes) for g in groups] == [
        (None, False, False, 200), (66, False, False, 200), (None, True, True, 200),
    ]  # fmt: skip
    assert (
        grid_of(groups, 1).tokens == 48 and grid_of(groups, 601).tokens == 96
    )  # three blocks of 200 bytes in 48 tokens
    both = spec("FullAttentionSpec", sliding_window=64, attention_chunk_size=None)
    assert groups_of(config(both))[0].keeps_all, "a window that vLLM keeps whole"
    for refused, figures in (
        (spec("RSWASpec"), {"needed": "RSWASpec", "available": 1}),
        (spec("CrossAttentionSpec"), {"needed": "CrossAttentionSpec", "available": 1}),
        (spec("MambaSpec", mamba_cache_mode="none"), {"field": "mamba_cache_mode", "needed": "align", "available": "none"}),
    ):  # fmt: skip
        with raises(SchemaError, **figures):
            groups_of(config(full, refused))


# -- options -----------------------------------------------------------------------------------------------------------


def test_options() -> None:
    made = options_of({"tiers": [{"tier": "disk:/x:1GiB", "timeout": 3}, "host:1MiB"], "checkpoint_tokens": 64})
    assert [one.name for one in made.specs()] == ["disk", "host"] and made.specs()[0].timeout == 3
    assert {one.write for one in made.specs()} == {"commit"} and made.least_record_nbytes == 1
    assert str(made.specs("rank1")[0].make.args[0]) == "/x/rank1"  # type: ignore[attr-defined]
    assert ConnectorOptions(tiers=("redis://localhost:1",)).least_record_nbytes == 1 << 20
    for wrong, figures in (
        ({"tiers": []}, {"field": "tiers", "needed": 1, "available": 0}),
        ({"tires": ["host:1GiB"]}, {"needed": "tires", "available": ANY}),
        ({"tiers": ["host:1GiB"], "load": "x"}, {"needed": "x", "available": ("async", "layerwise")}),
        ({"tiers": [{"tier": 3}]}, {"field": "tier", "needed": "int"}),
        ({"tiers": [{"tier": "host:1GiB", "speed": 1}]}, {"needed": "host:1GiB"}),
        ({"tiers": [{"tier": "host:1GiB", "write": "evict"}]}, {"field": "write", "needed": "evict", "available": "commit"}),
        ({"tiers": [{"tier": "host:1GiB", "record_nbytes": 4}]}, {"field": "record_nbytes", "needed": "host:1GiB"}),
        ({"tiers": ["host:1GiB"], "weights": ""}, {"field": "weights", "needed": ""}),
        ({"tiers": ["host:1GiB"], "checkpoint_tokens": -1}, {"field": "checkpoint_tokens", "needed": -1, "available": 0}),
        ({"tiers": ["host:1GiB"], "record_nbytes": "many"}, {"needed": "many"}),
        ({"tiers": ["host:1GiB"], "secret": "s" * 65}, {"field": "secret", "needed": 65, "available": 64}),
    ):  # fmt: skip
        with raises(BadInput, **figures):
            options_of(wrong)


def test_weights_are_named_by_their_content(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    data = np.random.default_rng(0).integers(0, 256, 70 << 20, np.uint8)
    data.tofile(file)
    model = SimpleNamespace(model=str(tmp_path), seed=0, revision=None, hf_config=SimpleNamespace(_commit_hash="c0"))
    first = weights_of(model, "auto")
    for at in (0, 33 << 20, len(data) - 1):  # in a page that is read of a file that is not read as a whole
        changed = data.copy()
        changed[at] ^= 1
        changed.tofile(file)
        files_digest.cache_clear()
        assert weights_of(model, "auto") != first
    model.model = "org/name"
    assert weights_of(model, "auto") == "org/name@c0" and "seed 0" in weights_of(model, "dummy")
    assert adapter_of(SimpleNamespace(lora_path=str(tmp_path), lora_name="x", lora_int_id=1)) == files_digest(
        str(tmp_path)
    )
    assert "x 1" in adapter_of(SimpleNamespace(lora_path="gone", lora_name="x", lora_int_id=1))


# -- the scheduler's side ----------------------------------------------------------------------------------------------


def request(name: str, tokens: Sequence[int], **fields: Any) -> Any:
    known = dict(
        request_id=name, all_token_ids=[*tokens], prompt_token_ids=[*tokens], num_prompt_tokens=len(tokens), mm_features=[],
        num_tokens=len(tokens), num_computed_tokens=0, num_preemptions=0, cache_salt=None, lora_request=None,
        skip_reading_prefix_cache=False, prompt_embeds=None,
    )  # fmt: skip
    return SimpleNamespace(**{**known, **fields})


def step(counts: dict[str, int], ids: Any = None, handed: Any = None) -> Any:
    """A SchedulerOutput, as far as it is read."""
    table = tuple([*range(1, BLOCKS)] for _ in range(3)) if ids is None else ids
    state = SimpleNamespace(boundary_state_offloads=handed or {}, get_block_ids=lambda _: table)
    return SimpleNamespace(
        num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), kv_connector_block_state=state
    )


def side(grid: RecordGrid = HYBRID, workers: int = 1, **options: Any) -> SchedulerSide:
    return SchedulerSide(
        ConnectorOptions(tiers=("host:1MiB",), **options), grid, workers, lambda lora: f"adapter {lora}"
    )


def orders_of(planner: SchedulerSide, one: Any, counts: Sequence[int], **more: Any) -> list[Store]:
    """What is stored while ``one`` computes ``counts`` tokens in each step."""
    planner.track(one)
    stored = []
    for count in counts:
        stored += planner.orders(step({one.request_id: count}, **more)).stores
        one.num_computed_tokens += count
    return stored


def test_what_is_stored_does_not_depend_on_the_steps() -> None:
    text = np.random.default_rng(0).integers(0, 99, 50)
    whole = orders_of(side(), request("r", text), [50])
    parts = orders_of(side(), request("r", text), [3, 7, 20, 1, 1, 18])
    assert {one for one in whole if one.group != 2} == {one for one in parts if one.group != 2} and len(whole) > 6
    assert [one.number for one in whole if one.group == 0] == [0, 1, 2, 3, 4, 5]
    assert [one.number for one in whole if one.group == 1] == [5], "a window is kept before the end of the prompt"
    every = orders_of(side(checkpoint_tokens=1), request("r", text), [50])
    assert [one.number for one in every if one.group == 1] == [0, 1, 2, 3, 4, 5]


def test_what_requests_share_is_stored_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, text, now = side(ALONE), [*range(50)], [1000.0]
    monkeypatch.setattr("kvpagoda.adapters.connector.scheduler.monotonic", lambda: now[0])
    counts = []
    for name, seconds in (("a", 0), ("b", 1), ("c", 58), ("d", 2)):
        now[0] += seconds
        counts.append(len(orders_of(planner, request(name, text), [50])))
    assert counts == [6, 0, 0, 6]
    more = orders_of(planner, request("e", [*text, *range(20)]), [70])
    assert [one.number for one in more] == [6, 7]


def test_states_are_stored_where_a_step_or_the_engine_says_so() -> None:
    text = [*range(64)]
    stored = orders_of(side(), request("r", text), [24, 9, 31])
    assert [(one.number, one.ids) for one in stored if one.group == 2] == [(2, (3,)), (7, (8,))]
    handed = {"r": [(2, 41, 16), (2, 42, 20), (2, 0, 8)]}  # 20 is no end of a record, id 0 is no block
    stored = orders_of(side(), request("r", text), [33], handed=handed)
    assert [(one.number, one.ids) for one in stored if one.group == 2] == [(1, (41,))]


def test_blocks_that_slid_away_are_not_stored() -> None:
    ids = ([*range(1, BLOCKS)], [0] * 9 + [*range(9, BLOCKS)], [*range(1, BLOCKS)])
    stored = orders_of(side(checkpoint_tokens=1), request("r", [*range(60)]), [60], ids=ids)
    assert [one.number for one in stored if one.group == 1] == [5, 6] and all(all(one.ids) for one in stored)


def test_tenants_adapters_and_media_have_texts_of_their_own() -> None:
    text, found = [*range(40)], []
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=9))
    other = SimpleNamespace(identifier="dog", mm_position=SimpleNamespace(offset=9))
    moved = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=10))
    for fields in (
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": "a"}, {"mm_features": [image]},
        {"mm_features": [other]}, {"mm_features": [moved]},
    ):  # fmt: skip
        found.append(
            [one.block_hash for one in orders_of(side(), request("r", text, **fields), [40]) if one.group == 0]
        )
    assert len({hashes[-1] for hashes in found}) == len(found)
    assert found[0][0] == found[4][0] == found[5][0] and found[4][1] != found[5][1], "an image changes what follows it"
    assert orders_of(side(), request("r", text, prompt_embeds=torch.ones(1)), [40]) == []


def test_finding_waits_for_all_workers_and_takes_what_all_have() -> None:
    planner, one = side(workers=2), request("r", [*range(60)])
    planner.track(one)
    assert planner.find(one, 0) == (None, False) == planner.find(one, 0)
    (find,) = planner.orders(step({})).finds
    assert len(find.hashes) == 7 and find.begin == 0
    planner.answered(Answers([MatchAnswer("r", find.attempt, (1, 2, 5))]), ())
    assert planner.find(one, 0) == (None, False)
    planner.answered(Answers([MatchAnswer("r", find.attempt, (2, 3, 7)), MatchAnswer("gone", 1, ())]), ())
    assert (
        planner.find(one, 0) == (16, True) and planner.find(one, 8) == (8, True) and planner.find(one, 16) == (0, False)
    )
    assert planner.find(one, 8) == (8, True)
    planner.allocated(one, [[*range(1, 16)]] * 3, 8)
    (load,) = planner.orders(step({})).loads
    assert (load.begin, load.end, load.is_layerwise) == (8, 2, False)
    assert [len(ids) for ids in load.ids] == [4, 4, 2]
    same = request("s", [*range(60)])
    planner.find(same, 8)
    (find,) = planner.orders(step({})).finds
    planner.answered(Answers([MatchAnswer("s", find.attempt, (2,))] * 2), ())
    assert planner.find(same, 8) == (None, False), "the same text is being loaded by another request"
    planner.answered(Answers(failed=["r"]), ["r"])
    assert planner.find(one, 8) == (0, False), "a load that failed is not tried again"
    assert planner.find(same, 8) == (8, True)
    assert not planner.finished(same)
    assert planner.orders(step({})).forget == ["s"]


def test_blocks_are_kept_until_they_are_copied_and_forgotten_when_others_get_them() -> None:
    planner, one = side(), request("r", [*range(64)])
    orders_of(planner, one, [40])
    one.num_preemptions = 1
    assert planner.orders(step({})).forget == ["r"]
    assert len(orders_of(planner, one, [20])), "what was dropped is stored again"
    assert planner.finished(one) and planner.orders(step({})).closing == ["r"]
    two = request("t", [*range(64)])
    orders_of(planner, two, [59, 1, 1, 1, 1])
    assert not planner.finished(two), "workers have reported that nothing waits"
    three = request("u", [*range(100, 164)])
    orders_of(planner, three, [59, 1, 1, 1, 1])
    planner.answered(Answers(waiting=["u"]), ())
    assert planner.finished(three)


def test_nothing_is_found_after_a_reset() -> None:
    planner, text = side(), [*range(40)]
    before = orders_of(planner, request("r", text), [20])
    planner.reset()
    assert not planner.orders(step({"r": 20})).stores, "it began with other weights"
    after = orders_of(planner, request("s", text), [20])
    assert len(after) == len(before) and {one.block_hash for one in after}.isdisjoint(one.block_hash for one in before)


# -- the worker's side -------------------------------------------------------------------------------------------------


def memory(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Layers as vLLM lays them out: a view of strided blocks, blocks of two kernel blocks, padded states."""
    torch.manual_seed(seed)
    made = {
        "a": torch.randn(2, BLOCKS, 2, 6, device=device)[0], "b": torch.randn(2 * BLOCKS, 6, device=device),
        "c": torch.randn(BLOCKS, 3, 4, device=device).transpose(1, 2),
        "d": torch.randint(0, 99, (BLOCKS, 100), dtype=torch.int8, device=device)[:, :80],
    }  # fmt: skip
    return made


class Workers:
    """A worker over a disk, and what was stored of one text: ``BLOCKS`` tokens' worth of blocks."""

    def __init__(self, folder: Path, grid: RecordGrid, seed: int, device: str = "cpu", **options: Any) -> None:
        self.caches, self.grid = memory(seed, device), grid
        names = {name for group in grid.groups for name in group.layers}
        tiers = [disk_tier(folder, "4MiB", record_nbytes=1, timeout=2.0)]
        identity = RecordIdentity("w", "s", grid.tokens)
        used = {name: cache for name, cache in self.caches.items() if name in names}
        self.side = WorkerSide(tiers, identity, grid, used, BLOCKS, **options)
        self.level = self.side.levels[0]

    def run(self, orders: Orders, layers: Sequence[str] = ()) -> Answers:
        """One step of the engine."""
        self.side.begin(orders)
        self.side.start_loads(orders)
        for layer in layers:
            self.side.wait_for_layer(layer)
        self.side.save(orders)
        self.sent, self.received, self.failed = self.side.finished(orders)
        return self.side.answers() or Answers()

    def until(self, what: Any) -> Answers:
        """Idle steps until ``what(answers)``; what was received and failed in any of them is kept."""
        received, failed, end = set(self.received), set(self.failed), monotonic() + 10
        while monotonic() < end:
            answers = self.run(Orders(is_idle=True))
            received |= self.received
            failed |= self.failed
            self.received, self.failed = received, failed
            if what(answers):
                return answers
        raise AssertionError("not within 10 s")

    def block(self, layer: str, index: int) -> bytes:
        return rows_of(layer, self.caches[layer], BLOCKS)[index].cpu().numpy().tobytes()


HASHES = tuple(bytes([number]) * 32 for number in range(6))
TABLES = tuple(tuple(range(1 + 20 * g, 1 + 20 * g + 12)) for g in range(3))


def stores(grid: RecordGrid) -> list[Store]:
    return [
        Store(
            "r", group.index, number, HASHES[number], tuple(TABLES[group.index][b] for b in grid.blocks(group, number))
        )
        for group in grid.groups
        for number in range(6)
    ]


def found(worker: Workers, name: str = "q", begin: int = 0) -> MatchAnswer:
    answers = worker.run(Orders(finds=[Find(name, 1, HASHES, begin)]))
    return (answers.found or worker.until(lambda got: got.found).found)[0]


def other_tables(grid: RecordGrid) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(2 + 20 * g, 2 + 20 * g + 48 // group.block_size)) for g, group in enumerate(grid.groups))


def assert_loaded(source: Workers, target: Workers, ids: Any, begin: int, end: int, grid: RecordGrid) -> None:
    """The blocks that a request reads are those that were stored; all others are as before."""
    before = Workers.__new__(Workers)
    before.caches = memory(7, str(target.caches["a"].device))
    for group in grid.groups:
        numbers = range(max(begin, group.first_needed(end)) // group.block_size, end // group.block_size)
        loaded = {ids[group.index][b]: TABLES[group.index][b] for b in numbers}
        for layer in group.layers:
            for index in loaded:
                assert target.block(layer, index) == source.block(layer, loaded[index]), (layer, index)
            assert target.block(layer, 0) == before.block(layer, 0)
            assert target.block(layer, BLOCKS - 1) == before.block(layer, BLOCKS - 1)


@pytest.mark.parametrize("grid", [ALONE, HYBRID], ids=["alone", "hybrid"])
@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize("begin", [0, 12])
def test_another_worker_loads_what_one_stored(grid: RecordGrid, load: str, begin: int, tmp_path: Path) -> None:
    one = Workers(tmp_path, grid, 1)
    one.run(Orders(stores=stores(grid), closing=["r"]))
    assert one.sent == {"r"} and one.side.close(5)
    two = Workers(tmp_path, grid, 7, is_layerwise=load == "layerwise")
    answer = found(two, begin=begin)
    assert answer.ends == tuple(range(begin // 8 + 1, 7)) and answer.is_held == (load == "layerwise")
    ids = other_tables(grid)
    order = Load("q", 1, begin, 6, ids, answer.is_held)
    layers = [name for group in grid.groups for name in group.layers]
    two.run(Orders(loads=[order]), layers if answer.is_held else ())
    if not answer.is_held:
        two.until(lambda _: "q" in two.received)
    assert not two.failed and not two.side.bad_ids()
    assert_loaded(one, two, ids, begin, 48, grid)
    assert two.side.stats()[0].loaded_tokens == 48 - begin // 8 * 8
    two.level.check()
    assert two.side.close(5)


@pytest.mark.parametrize("grid", [ALONE, HYBRID], ids=["alone", "hybrid"])
def test_a_damaged_record_fails_the_load_and_is_gone_afterwards(grid: RecordGrid, tmp_path: Path) -> None:
    one = Workers(tmp_path, grid, 1)
    one.run(Orders(stores=stores(grid)))
    assert one.side.close(5)
    data = np.fromfile(tmp_path / "records.slab", np.uint8)
    slot = int.from_bytes(data[16:24].tobytes(), "little")
    key = one.level.key(HASHES[5], b"group 0")
    at = next(at for at in range(4096, len(data) - slot + 1, slot) if data[at + 32 : at + 64].tobytes() == key)
    data[at + 128] ^= 255
    data.tofile(tmp_path / "records.slab")
    two = Workers(tmp_path, grid, 7)
    assert found(two).ends[-1] == 6
    told = two.run(Orders(loads=[Load("q", 1, 0, 6, other_tables(grid), False)]))
    told = told if told.failed else two.until(lambda got: got.failed)
    assert told.failed == ["q"] and two.received == {"q"}
    bad = two.side.bad_ids()
    if len(grid.groups) == 1:  # a batch is as good as its records
        assert not two.failed and bad >= set(other_tables(grid)[0][10:]) and bad <= set(other_tables(grid)[0])
    else:
        assert two.failed == {"q"} and not bad
    assert found(two, "p").ends[-1] == 5, "the damaged record is discarded"
    two.level.check()
    assert two.side.close(5)


def test_a_request_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    one = Workers(tmp_path, HYBRID, 1)
    one.run(Orders(stores=stores(HYBRID)))
    assert one.side.close(5)
    two = Workers(tmp_path, HYBRID, 7, is_layerwise=True)
    assert found(two).is_held
    two.run(Orders(forget=["q"]))
    two.run(Orders(finds=[Find("p", 1, HASHES, 0)], forget=["x"]))
    two.run(Orders(forget=["p"]))
    sleep(0.1)
    two.level.check()
    assert not two.level.buffer.owners() and not two.side._found
    told = two.run(Orders(loads=[Load("gone", 1, 0, 6, other_tables(HYBRID), False)]))
    told = told if told.failed else two.until(lambda got: got.failed)
    assert told.failed == ["gone"] and two.failed == {"gone"}
    assert two.side.close(5)


def test_blocks_wait_for_staging_memory(tmp_path: Path) -> None:
    caches = {name: cache for name, cache in memory(1).items() if name in "ab"}
    tiers = [host_tier("4MiB", record_nbytes=1, write="commit", staging="12KiB")]
    worker = WorkerSide(tiers, RecordIdentity("w", "s", 8), ALONE, caches, BLOCKS)
    order, told = Orders(stores=stores(ALONE), closing=["r"]), set[str]()
    worker.begin(order)
    worker.save(order)
    told |= worker.finished(order)[0]
    end = monotonic() + 5
    while not told and monotonic() < end:
        worker.save(Orders(is_idle=True))
        told |= worker.finished(Orders(is_idle=True))[0]
    assert told == {"r"} and worker.levels[0].settle(end)
    assert worker.stats()[0].stored == 6 and not worker.stats()[0].dropped
    assert worker.close(5)


def test_memory_that_is_not_in_blocks_is_refused() -> None:
    with raises(LayoutError, needed=5, available=320, rule="blocks"):
        rows_of("x", torch.zeros(3, BLOCKS, 5).transpose(0, 1), BLOCKS)
    shared = rows_of("x", torch.zeros(BLOCKS, 5), BLOCKS)
    assert BlockRows({"x": shared, "y": shared}).nbytes == 20, "layers that share memory are stored once"


def test_figures_are_since_the_last_time(tmp_path: Path) -> None:
    one = Workers(tmp_path, ALONE, 1)
    _, now = since({}, one.side.stats())
    one.run(Orders(stores=stores(ALONE)))
    assert one.level.settle(monotonic() + 5)
    changed, now = since(now, one.side.stats())
    assert changed["disk"]["stored"] == 6 == changed["disk"]["num_records"] and since(now, one.side.stats())[0] == {}
    assert added(changed, changed)["disk"]["stored"] == 12 and added(changed, changed)["disk"]["num_records"] == 6
    assert one.side.close(5)


@pytest.mark.gpu
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_on_a_gpu(load: str, tmp_path: Path) -> None:
    one = Workers(tmp_path, HYBRID, 1, "cuda")
    one.run(Orders(stores=stores(HYBRID)))
    assert one.side.close(5)
    two = Workers(tmp_path, HYBRID, 7, "cuda", is_layerwise=load == "layerwise")
    answer, ids = found(two), other_tables(HYBRID)
    two.run(Orders(loads=[Load("q", 1, 0, 6, ids, answer.is_held)]), ["a", "b", "c", "d"] if answer.is_held else ())
    if not answer.is_held:
        two.until(lambda _: "q" in two.received)
    torch.cuda.synchronize()
    assert not two.failed
    assert_loaded(one, two, ids, 0, 48, HYBRID)
    assert two.side.close(5)


@pytest.mark.parametrize("waits", [False, True])
def test_close_says_whether_the_engines_memory_is_still_written(waits: bool, tmp_path: Path) -> None:
    one = Workers(tmp_path, ALONE, 1)
    one.run(Orders(stores=stores(ALONE), closing=["r"]))
    assert one.side.close(5)
    two = Workers(tmp_path, ALONE, 7)
    found(two, "q")
    has_begun, goes_on, copy_in = Event(), Event(), two.side._copy_in

    def late(*given: Any) -> None:
        has_begun.set()
        assert goes_on.wait(10)
        copy_in(*given)

    two.side._copy_in = late  # type: ignore[method-assign]
    two.run(Orders(loads=[Load("q", 1, 0, 6, other_tables(ALONE), False)]))
    assert has_begun.wait(10)
    if waits:
        Timer(0.2, goes_on.set).start()
    assert two.side.close(5.0 if waits else 0.1) is waits
    before = two.caches["a"].clone()
    goes_on.set()
    two.side._loader.shutdown()
    assert bool((before == two.caches["a"]).all()) is waits


def test_a_loaders_copies_are_over_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with pytest.raises(torch.cuda.OutOfMemoryError), _copying(stream, "after the engine's step"):
        stream.copy()
        raise torch.cuda.OutOfMemoryError
    assert [name for name, *_ in stream.method_calls] == ["wait_event", "copy", "synchronize"]


def test_where_no_thread_can_be_started_loads_are_made_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = Workers(tmp_path, ALONE, 1)
    one.run(Orders(stores=stores(ALONE), closing=["r"]))
    assert one.side.close(5)
    two = Workers(tmp_path, ALONE, 7)
    monkeypatch.setattr(Thread, "start", start)
    found(two, "q")
    two.run(Orders(loads=[Load("q", 1, 0, 6, other_tables(ALONE), False)]))
    assert (two.received, two.failed, two.side._calls) == ({"q"}, set(), set())
    monkeypatch.undo()
    assert two.side.close(5)


def test_what_is_being_loaded_leaves_close_the_time_to_close_the_tiers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A load of several batches ends with the one that is being read."""
    one = Workers(tmp_path, ALONE, 1)
    one.run(Orders(stores=stores(ALONE), closing=["r"]))
    assert one.side.close(5)
    two = Workers(tmp_path, ALONE, 7)
    found(two, "q")
    (level,), has_begun = two.side.levels, Event()
    load = level.tier.driver.load

    def slow(*given: Any) -> Any:
        has_begun.set()
        sleep(0.5)
        return load(*given)

    monkeypatch.setattr(level.tier.driver, "load", slow)
    monkeypatch.setattr(level, "batch", 1)
    two.run(Orders(loads=[Load("q", 1, 0, 6, other_tables(ALONE), False)]))
    assert has_begun.wait(10) and two.side.close(1.5)
