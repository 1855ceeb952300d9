"""``repr`` of what a debugger or a log shows: one line with the figures that matter, at any time of an object's life."""

from __future__ import annotations

import pytest

from kvpagoda import Batch, KVCache, LayerView, PersistentBatch, Schema, Sequence
from kvpagoda.core.cache.guard import Guard

CONFIG = dict(model_type="llama", num_hidden_layers=1, hidden_size=16, num_attention_heads=1)
SCHEMA = Schema.from_hf_config(CONFIG, dtype="float32")
MIXED = Schema.from_hf_config(
    dict(CONFIG, num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    | dict(model_type="gpt_oss", num_key_value_heads=1, head_dim=16)
)


def test_a_cache_shows_its_memory_requests_and_blocks() -> None:
    cache = KVCache(SCHEMA, num_blocks=8, max_requests=3, block_size=4, device="none")
    size = "4.5 KiB without memory"
    assert repr(cache) == f"<KVCache of llama, {size}, open: 0 of 3 requests, blocks free + cached: full 8 + 0 of 8>"
    with cache.open(range(9)) as sequence:
        assert repr(sequence) == (
            "<Sequence running in slot 0, blocks for 12 tokens: 0 committed, a prompt of 9, of which 0 were cached>"
        )
        sequence.commit(range(9))
        assert "1 of 3 requests" in repr(cache) and "full 5 + 0 of 8" in repr(cache)
    assert "full 5 + 3 of 8" in repr(cache)
    assert repr(sequence) == "<Sequence closed: 9 committed, a prompt of 9, of which 0 were cached>"
    again = cache.open(range(9))
    again.suspend()
    assert repr(again) == "<Sequence suspended: 8 committed, a prompt of 9, of which 8 were cached>"


def test_a_cache_shows_that_it_sleeps_needs_a_reset_or_is_closed() -> None:
    cache = KVCache(SCHEMA, num_blocks=8, device="none")
    cache.sleep()
    assert ", asleep: " in repr(cache)
    cache.wake()
    cache._guard.is_torn = True
    assert ", needs reset: " in repr(cache)
    cache.close()
    assert ", closed: " in repr(cache)


def test_a_batch_and_its_views_show_their_rows() -> None:
    cache = KVCache(SCHEMA, num_blocks=8, block_size=4, device="none")
    batch = cache.batch([cache.open(range(3)), cache.open(range(5))], [3, 5], pad_to=4)
    assert repr(batch) == "<Batch of 4 rows (2 padded), 8 new tokens>"
    assert repr(batch.layer(0)) == (
        f"<LayerView of layer 0 (full_attention): without memory, pages of 4 tokens, of {batch}>"
    )
    view = batch.layer(0)
    running = cache.persistent_batch(num_rows=2)
    assert repr(running) == "<PersistentBatch of 2 rows (2 padded)>"
    cache.batch([cache.open([1])], [1])
    assert repr(batch) == "<Batch of 4 rows (2 padded), 8 new tokens, over>"
    assert repr(view).endswith("8 new tokens, over>>")
    assert repr(cache.layer(0)).endswith("of no batch>")


def test_views_and_pools_show_their_fields() -> None:
    pytest.importorskip("torch")
    cache = KVCache(SCHEMA, num_blocks=8, block_size=4, device="cpu")
    assert "on cpu, open" in repr(cache)
    view = cache.layer(0)
    assert repr(view) == ("<LayerView of layer 0 (full_attention): fields k, v, pages of 4 tokens, of no batch>")
    assert repr(view.blocks) == "<Pool of layer 0 on cpu: k [9, 4, 1, 16] float32, v [9, 4, 1, 16] float32>"
    cache.sleep()
    cache.close()
    assert repr(view.blocks).startswith("<Pool of layer 0 on cpu")


def test_an_object_that_was_not_made_to_its_end_shows_its_name() -> None:
    for kind in (KVCache, Sequence, Batch, LayerView, PersistentBatch):
        assert repr(kind.__new__(kind)) == f"<{kind.__name__}>"


def test_showing_takes_no_lock_and_is_one_line() -> None:
    """A debugger shows objects inside calls, and from other threads."""
    cache = KVCache(MIXED, num_blocks=8, device="none")
    sequence = cache.open(range(9))
    batch = cache.batch([sequence], [9])
    guard: Guard = cache._guard
    guard.lock = None  # whoever takes it fails
    assert "sliding" not in repr(cache) and "window(" in repr(cache) and "full" in repr(cache)
    for shown in (cache, sequence, batch, batch.layer(0)):
        assert "\n" not in repr(shown) and repr(shown).count(" ") > 3
