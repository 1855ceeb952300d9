"""The statistics of a cache: blocks by group and state, tokens by namespace, short hits by reason, calls by tier.

None of this needs torch.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from kvpagoda import KVCache, Limits, Namespace, Retention, Schema
from kvpagoda.core.cache.counters import MOST_NAMESPACES, OTHERS, Counters
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.namespace import Namespaces, fields_of, namespace_key, owner_of
from kvpagoda.schema import Attention, Layer
from kvpagoda.tiers import TierSpec, host_tier

FULL = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
GEMMA = Schema.from_hf_config(
    dict(
        model_type="gemma3_text", vocab_size=1000, hidden_size=48, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, sliding_window=8,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    dtype="float32",
)  # fmt: skip
QWEN = Schema.from_hf_config(
    {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "torch_dtype": "bfloat16",
    }
)  # fmt: skip


def serve(cache: KVCache, tokens: list[int], namespace: Namespace | str | None = None, step: int = 8) -> PrefixMatch:
    """Compute ``tokens`` in a request, ``step`` tokens at a time, and close it. Returns its match."""
    with cache.open(tokens, namespace, capacity=0) as sequence:
        found = sequence.match
        for at in range(sequence.length, len(tokens), step):
            sequence.extend(len(tokens[at : at + step]))
            sequence.commit(tokens[at : at + step])
    return found


def test_tokens_saved_and_computed_are_counted_by_namespace() -> None:
    cache = KVCache(FULL, num_blocks=64, block_size=4, device="none")
    first = Namespace(salt="a secret", adapter="poems")
    for namespace in (None, None, first, first, first, "another"):
        serve(cache, [*range(20)], namespace)
    stats = cache.stats()
    found = {one.name: one for one in stats.namespaces}
    (salted,) = [name for name in found if name.startswith("poems/salt-")]
    assert [found[name].requests for name in ("default", salted)] == [2, 3]
    assert [found[name].cached_tokens for name in ("default", salted)] == [19, 38]
    assert [found[name].computed_tokens for name in ("default", salted)] == [21, 22]
    assert stats.prompt_tokens == 120 and stats.cached_tokens == 57 == stats.prompt_tokens - stats.computed_tokens
    assert "secret" not in json.dumps(stats.to_dict()) and "another" not in json.dumps(stats.to_dict())
    cache.invalidate(first)
    serve(cache, [*range(20)], first)
    assert {one.name: one.requests for one in cache.stats().namespaces}[salted] == 4, "a renewed namespace goes on"


def test_running_requests_count_and_prompts_without_a_lookup_do_not() -> None:
    cache = KVCache(FULL, num_blocks=64, block_size=4, device="none")
    sequence = cache.open([*range(10)], lookup=False)
    sequence.commit([*range(7)])
    stats = cache.stats()
    assert (stats.opened, stats.closed, stats.prompt_tokens, stats.computed_tokens) == (1, 0, 0, 7)
    sequence.fork().close()
    assert (cache.stats().opened, cache.stats().closed) == (2, 1)


@pytest.mark.parametrize("schema", [FULL, GEMMA, QWEN], ids=["full", "window", "state"])
def test_reasons_of_short_hits_are_those_of_the_matches(schema: Schema) -> None:
    """Compared with a count over the matches of all sequences, in a cache that is too small for all texts."""
    budget = {"tiny": "1KiB"}.get(schema.name, "96KiB" if schema is GEMMA else "160KiB")
    cache = KVCache(
        schema, budget, device="none", max_requests=2, block_size=4, retention=Retention(checkpoint_every=2),
        limits=Limits(step_tokens=16, hit_grid=8),
    )  # fmt: skip
    random, requests, tokens, groups = np.random.default_rng(0), Counter[str](), Counter[str](), Counter[str]()
    for _ in range(60):
        common, own = int(random.integers(1, 40)), int(random.integers(0, 1000))
        match = serve(cache, [*range(common), *([own] * int(random.integers(1, 12)))])
        groups.update(match.groups)
        if match.limited_by != "nothing":
            requests[match.limited_by] += 1
            tokens[match.limited_by] += match.num_tokens - match.resumable
    stats = cache.stats()
    assert {one.reason: (one.requests, one.tokens) for one in stats.short_hits} == {
        reason: (requests[reason], tokens[reason]) for reason in requests
    }
    assert requests and {group.name: group.found_tokens for group in stats.groups} == {
        group.name: groups[group.name] for group in stats.groups
    }
    cache.check()


@pytest.mark.parametrize("schema", [FULL, GEMMA, QWEN], ids=["full", "window", "state"])
def test_every_block_is_in_one_state(schema: Schema) -> None:
    """Compared with the ids themselves: block tables have those that requests hold, the prefix cache those it owns."""
    cache = KVCache(schema, "4MiB", device="none", max_requests=4, block_size=4, limits=Limits(step_tokens=16))
    for first in range(3):
        serve(cache, [first, *range(30)])
    running = [cache.open([first, *range(30), 77]) for first in (0, 7)]
    running[1].commit([7, *range(20)])
    pin = cache.pin([1, *range(30)])
    stats, core = cache.stats(), cache.core
    assert stats.pins == 1 and stats.pinned_blocks == 7 and stats.checkpoints == len(core.prefix.kept)
    for group, told in zip(core.groups, stats.groups):
        owned = set(group.cached_ids().tolist())
        private = sum(len(group.own_places(one.slot)) for one in running)
        assert (told.private, told.shared + told.evictable) == (private, len(owned)), told
        assert told.free + told.held == told.total and told.held == told.private + told.shared + told.evictable
        assert told.block_nbytes == group.plan.row_nbytes
    full = next(told for group, told in zip(core.groups, stats.groups) if group is core.full)
    read = running[0].cached_tokens // 4
    assert full.shared == read + 7 + 5 and (
        read or core.prefix.states
    )  # read by the first, pinned, published by the second
    used = sum((told.private + told.shared) * told.block_nbytes for told in stats.groups)
    assert stats.usage == used / stats.nbytes > 0
    cache.unpin(pin)
    for sequence in running:
        sequence.close()
    assert cache.stats().usage == 0.0
    assert all(told.private == told.shared == 0 for told in cache.stats().groups)


def test_evicted_blocks_are_counted_by_group() -> None:
    cache = KVCache(GEMMA, "48KiB", device="none", max_requests=1, block_size=4, limits=Limits(step_tokens=8))
    for first in range(40):
        serve(cache, [first, *range(40)])
    stats = cache.stats()
    assert stats.evicted_blocks == sum(group.evicted for group in stats.groups)
    assert all(group.evicted > 0 for group in stats.groups)


def tiers() -> list[TierSpec]:
    return [host_tier("1MiB")]


def test_calls_of_a_tier_are_counted_and_timed() -> None:
    cache = KVCache(FULL, num_blocks=16, block_size=4, device="none", tiers=tiers())
    for first in range(12):
        serve(cache, [first] * 40)
    cache.flush()
    for first in range(12):
        serve(cache, [first] * 40)
    (tier,) = cache.stats().tiers
    calls = {one.call: one for one in tier.calls}
    assert calls["store"].outcomes["ok"] == tier.stored > 0 and calls["load"].outcomes["ok"] == tier.loaded > 0
    assert calls["store"].nbytes % tier.stored == 0 and calls["lookup"].nbytes == 0
    for one in calls.values():
        assert one.seconds.count > 0 and 0 < one.seconds.total < 60
        assert 0 < (one.seconds.quantile(0.5) or 0) <= (one.seconds.quantile(0.99) or 0)
    assert 0 <= tier.loaded_tokens - cache.stats().loaded_tokens < 12 * 4, "whole blocks of twelve requests"
    assert cache.stats().loaded_tokens == sum(one.loaded_tokens for one in cache.stats().namespaces) > 0
    json.dumps(cache.stats().to_dict())
    cache.close()


def test_a_key_tells_its_namespace_however_often_it_was_renewed() -> None:
    names = Namespaces("layout", b"epoch")
    for namespace in (None, "salt", b"", Namespace("s", b"adapter", "w"), Namespace(None, "n")):
        for _ in range(2):
            key = names.key(namespace)
            assert owner_of(key) == namespace_key(namespace)
            assert names.renew([namespace], {key, names.key("other")}) == {key}
    assert fields_of(namespace_key(Namespace("s", None, b"w"))) == [b"s", None, b"w"]


def test_labels_differ_by_namespace_and_by_secret() -> None:
    keys = [namespace_key(one) for one in ("a", "b", b"a", Namespace("a", "x"), Namespace(None, "x"), None)]
    one, same, other = Counters(b"key"), Counters(b"key"), Counters()
    labels = [one.label(key) for key in keys]
    assert len({*labels}) == len(keys) and labels[-2:] == ["x", "default"]
    assert labels == [same.label(key) for key in keys] != [other.label(key) for key in keys]


def test_namespaces_are_counted_one_by_one_up_to_a_bound() -> None:
    names, counters, match = Namespaces(), Counters(), PrefixMatch(3, 2, "window")
    for number in range(3 * MOST_NAMESPACES):
        for _ in range(2):
            counters.began(names.key(str(number)), match, 5)
    tallies = counters.tallies()
    assert len(tallies) == MOST_NAMESPACES + 1 and sum(tally.prompt for _, tally in tallies) == 30 * MOST_NAMESPACES
    assert dict(tallies)[OTHERS].prompt == 5 * 2 * 2 * MOST_NAMESPACES
    assert counters.short_tokens["window"] == counters.short_requests["window"] == 6 * MOST_NAMESPACES
