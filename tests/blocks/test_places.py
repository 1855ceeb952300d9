"""Names and places: a block keeps its name where its bytes move, and nothing takes one for the other."""

from __future__ import annotations

import numpy as np

from kvpagoda import KVCache, Schema
from kvpagoda.core.blocks.group import BlockNames, BlockPlaces, FixedPlaces, PlaceTable, places_for
from kvpagoda.errors import CheckFailed
from options import move_blocks, shuffled_places
from raises import raises

LLAMA = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1)


def names(*numbers: int) -> BlockNames:
    return BlockNames(np.array(numbers, np.intp))


def places(*numbers: int) -> BlockPlaces:
    return BlockPlaces(np.array(numbers, np.int32))


def test_blocks_keep_their_names_through_random_moves() -> None:
    rng, table = np.random.default_rng(3), PlaceTable(40)
    used = names(*range(1, 20))
    lies_at = dict(zip(used.tolist(), table.places_of(used).tolist()))
    for _ in range(200):
        free = sorted({*range(1, 40)} - {*lies_at.values()})
        count = int(rng.integers(1, 6))
        moved = rng.choice(used, count, replace=False)
        sources = np.sort(table.places_of(BlockNames(moved)))
        targets = places(*rng.choice(free, count, replace=False))
        decided = table.moving(BlockPlaces(sources), targets)
        assert dict(zip(used.tolist(), table.places_of(used).tolist())) == lies_at, "deciding changes nothing"
        table.commit(decided)
        target_of = dict(zip(sources.tolist(), targets.tolist()))
        lies_at = {name: target_of.get(place, place) for name, place in lies_at.items()}
        assert dict(zip(used.tolist(), table.places_of(used).tolist())) == lies_at
        assert table.names_at(table.places_of(used)).tolist() == used.tolist()
        table.check()


def test_two_blocks_at_one_place_are_noticed() -> None:
    table = PlaceTable(4)
    table._place_of[1] = 2
    with raises(CheckFailed, available=[1]):
        table.check()


def test_blocks_of_a_memory_of_their_own_have_one_number() -> None:
    fixed = places_for(8, may_move=False)
    assert type(fixed) is FixedPlaces and isinstance(places_for(8, may_move=True), PlaceTable)
    assert fixed.places_of(names(3, 1)).tolist() == fixed.names_at(places(3, 1)).tolist() == [3, 1]
    assert fixed.places_of(names(3)).dtype == np.int32


def test_a_moved_block_is_found_by_the_same_name_at_its_new_place() -> None:
    cache = KVCache(Schema.from_hf_config(LLAMA), num_blocks=16, block_size=4, device="none")
    group = cache.core.groups[0]
    with cache.open(range(9)) as sequence:
        sequence.commit(range(9))
        cache.lookup([1])  # publishes what waits
        before, name = group.held_places(sequence.slot), group.shared_names(sequence.slot)
        move_blocks(cache, group, before[:1])
        assert group.held_places(sequence.slot)[0] != before[0]
        assert group.shared_names(sequence.slot).tolist() == name.tolist()
        cache.check()
    after = cache.core.prefix.tree.match(np.arange(9, dtype=np.int32), cache.core.namespaces.key(None)).ids[0]
    assert after.tolist() == name.tolist()
    with cache.open(range(10)) as sequence:
        assert sequence.cached_tokens == 9 and group.held_places(sequence.slot)[0] not in before[:1]
    cache.check()


def test_shuffled_names_change_no_hit() -> None:
    def run() -> list[int]:
        cache = KVCache(Schema.from_hf_config(LLAMA), num_blocks=24, block_size=4, device="none", max_requests=4)
        rng, hits = np.random.default_rng(5), list[int]()
        for _ in range(60):
            prompt = [int(rng.integers(3)), *range(int(rng.integers(1, 40)))]
            with cache.open(prompt) as sequence:
                hits.append(sequence.cached_tokens)
                sequence.commit(prompt[sequence.cached_tokens :])
            cache.check()
        return hits

    plain = run()
    with shuffled_places(1):
        assert run() == plain
    assert sum(plain)
