"""Every limit, set to 0: it is refused when it is given, or the cache works with it through all calls. New limits are found
by their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvpagoda import BadInput, Exhausted, KVCache, Limits, Retention, Schema
from kvpagoda.hints import HintLimits, Hints
from kvpagoda.tiers import host_tier
from kvpagoda.tiers.spec import TierSpec

pytest.importorskip("torch")

MODELS = {
    "full": dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1),
    "window": dict(
        model_type="gemma3_text", num_hidden_layers=6, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=16,
    ),
    "state": dict(
        model_type="qwen3_next", num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_conv_kernel_dim=4, num_experts=0,
    ),
}  # fmt: skip
GIVEN: dict[type, Callable[[Any], dict[str, Any]]] = {
    HintLimits: lambda name: {"hints": Hints(limits=HintLimits(**{name: 0}))},
    Limits: lambda name: {"limits": Limits(**{name: 0})},
    Retention: lambda name: {"retention": Retention(**{name: 0})},
    TierSpec: lambda name: {"tiers": [host_tier("1MiB", **{name: 0})]},
    KVCache: lambda name: {name: 0},
}
"""Class of options -> what a cache is given, with the option of this name 0."""
NAMES = {
    kind: [one.name for one in dataclasses.fields(kind) if "int" in str(one.type) or "float" in str(one.type)]
    for kind in GIVEN
    if kind is not KVCache
} | {KVCache: ["num_blocks", "block_size", "max_requests"]}
REFUSED = {
    "max_context", "step_tokens", "hit_grid", "record_nbytes", "staging", "timeout", "workers", "num_blocks", "block_size",
    "max_requests",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in GIVEN for name in NAMES[kind]])
@pytest.mark.parametrize("model", MODELS)
def test_a_limit_of_0_is_refused_or_works(model: str, kind: type, name: str) -> None:
    schema = Schema.from_hf_config(MODELS[model])
    if name in REFUSED:
        with pytest.raises(BadInput):
            KVCache(schema, device="cpu", **{"num_blocks": 64, "block_size": 4, "max_requests": 3, **GIVEN[kind](name)})
        return
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_requests": 3, "tiers": [host_tier("1MiB")]}
    cache = KVCache(schema, device="cpu", **sizes, **GIVEN[kind](name))
    for first in range(4):
        serve(cache, first)
        cache.check()
    for payload in ({"session_id": "s", "event": "end"}, {"token_ids": [*range(40)]}, {"promise": "kv.pin"}):
        for action in ("kv.session", "kv.prefetch", "kv.demote", "kv.release", "kv.pin"):
            cache.apply(envelope(action, payload))
    assert cache.hints is not None
    cache.hints.ended()
    cache.prefetch(range(40)).close()
    for call in (lambda: cache.pin(range(40)), lambda: suspend(cache)):
        try:
            call()
        except (BadInput, Exhausted):  # no room for it, and nothing changed
            cache.check()
    cache.reset()
    serve(cache, 0)
    cache.check()
    cache.close()


def serve(cache: KVCache, first: int) -> None:
    """Compute a prompt and an answer, with hints that are told about at its end."""
    text = [*range(first, first + 40)]
    actions = [("kv.retain", {"seconds": 5}), ("kv.session", {"session_id": "s", "event": "begin"})]
    with cache.open(text, capacity=0, hints=envelope(*actions)) as sequence:
        while sequence.length < len(text):
            count = min(cache.step_limit(sequence), len(text) - sequence.length)
            assert count > 0
            sequence.extend(count)
            sequence.commit(text[sequence.length : sequence.length + count])
        sequence.extend(1)
        sequence.commit([1])


def suspend(cache: KVCache) -> None:
    with cache.open(range(100, 109)) as sequence:
        sequence.commit(range(100, 109)[: cache.step_limit(sequence)])
        sequence.suspend()
        sequence.resume()


def envelope(*given: Any) -> dict[str, Any]:
    actions = given if isinstance(given[0], tuple) else [given]
    return {
        "message_id": "m",
        "actions": [
            {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}
            for kind, payload in actions
        ],
    }
