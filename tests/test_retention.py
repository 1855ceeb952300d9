"""The rule of retention: which positions of a text are kept, and how high what is new ranks; and that its users ask it."""

from __future__ import annotations

import numpy as np

from kvpagoda import KVCache, Schema
from kvpagoda.core.cache.prefix_cache import ResumePoints
from kvpagoda.retention import ColdAging, RetentionRule


def naive(rule: RetentionRule, prompt: int, cached: int, parted: int) -> list[int]:
    """The positions, one token after the other."""
    kept = set[int]()
    for at in range(cached + 1, max(prompt, parted + 1)):
        last_of = {end // rule.unit * rule.unit for end in range(at, at + rule.unit)}
        if at % rule.unit or at not in last_of:
            continue
        ends = range(at, at + rule.unit)  # all that are rounded down to ``at``
        is_kept = parted in ends
        is_kept |= rule.keeps_prompt_end and prompt - 1 in ends
        is_kept |= bool(rule.every) and any(end % rule.every == 0 and end < prompt for end in ends)
        is_kept |= bool(rule.coarse) and (prompt - 1) // rule.coarse * rule.coarse in ends
        if is_kept:
            kept.add(at)
    return sorted(kept)


def test_positions_are_those_of_a_walk_over_the_tokens() -> None:
    random = np.random.default_rng(0)
    seen = 0
    for _ in range(600):
        unit = int(random.choice([1, 4, 16]))
        rule = RetentionRule(
            unit, int(random.choice([0, 5, 24, 40])), int(random.choice([0, 32])),
            keeps_prompt_end=bool(random.integers(2)),
        )  # fmt: skip
        prompt = int(random.integers(1, 150))
        cached = int(random.integers(prompt)) // unit * unit
        parted = int(random.integers(prompt))
        positions = rule.positions(prompt, cached, parted)
        assert positions == naive(rule, prompt, cached, parted)
        seen += len(positions)
    assert seen > 1000


def test_a_cache_keeps_the_positions_of_its_rule_in_blocks() -> None:
    points = ResumePoints.of(16, 64, 8, checkpoint_cost=3.5, has_states=True)
    rule = points.rule
    assert (rule.unit, rule.every, rule.coarse, rule.slack, rule.checkpoint_cost) == (64, 128, 1024, 0, 3.5)
    assert points.due(10, 33, 2100) == [at // 16 for at in rule.positions(2100, 160, 33 * 16)]
    assert ResumePoints.of(16, 1, 0, checkpoint_cost=0.0, has_states=False).slack == 32


def test_a_prompt_leaves_checkpoints_at_the_positions_of_the_rule() -> None:
    config = dict(
        model_type="gemma3_text", num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    cache = KVCache(Schema.from_hf_config(config), num_blocks=64, max_requests=2, device="none")
    prompt = np.arange(150, dtype=np.int32)
    with cache.open(prompt) as sequence:
        for first in range(0, 150, 16):
            sequence.commit(prompt[first : first + 16])
        expected = cache.core.prefix.points.rule.positions(150, 0)
        index, lease = cache.core.prefix, sequence._request.lease
        kept = [n * 16 for n in range(1, lease.num_blocks + 1) if index.checkpoint_at(lease, n) is not None]
    assert kept == expected == [144]


def test_what_spares_more_for_its_bytes_and_found_more_ranks_higher() -> None:
    rule = RetentionRule(checkpoint_cost=10.0)
    ranks = [rule.rank(gain, found) for found in (0.0, 0.5, 1.0) for gain in (1, 10, 1000)]
    assert all(0 < rank < 1 for rank in ranks)
    assert ranks[0] < ranks[1] < ranks[2] < ranks[5] < ranks[8] and rule.rank(10, 1.0) == 0.5
    assert rule.rank(0, 1.0) == rule.rank(1, 1.0)
    assert {RetentionRule().rank(gain, found) for gain in (0, 9) for found in (0.0, 1.0)} == {1.0}


def test_cold_ages_faster_the_more_texts_are_missed() -> None:
    aging = ColdAging()
    assert aging.is_warm_next(9, 10) and not aging.is_warm_next(10, 10)  # plain least recently used
    for _ in range(9):
        aging.missed(0, 100)
    assert aging.factor == 3.0 and not aging.is_warm_next(10, 30) and aging.is_warm_next(10, 31)
    aging.missed(0, 0)
    aging.missed(50, 50)
    assert aging.factor == 3.0
    for _ in range(9):
        aging.missed(100, 0)
    assert aging.factor == 1.0
