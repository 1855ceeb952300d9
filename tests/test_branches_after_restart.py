"""A text that parts from a stored one inside of it: after a restart as many whole blocks are found as memory had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import monotonic

import pytest

from kvpagoda import Identity, KVCache, Limits, Schema
from kvpagoda.tiers import Driver, RecordBuffer, Status, TierSpec, disk_tier, host_tier

BASE = dict(
    vocab_size=1000, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=4096,
)  # fmt: skip
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
CONFIGS = {
    "windows": dict(BASE, model_type="mistral", sliding_window=24),
    "windows and full attention": dict(BASE, model_type="gemma3_text", sliding_window=24, layer_types=WINDOWS),
    "chunks": dict(BASE, model_type="llama4_text", attention_chunk_size=32, no_rope_layers=[1, 1, 1, 0]),
    "states": dict(
        BASE, model_type="qwen3_next", linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4,
    ),
}  # fmt: skip
TEXT = [(7 * i) % 900 for i in range(149)]
CUTS = (17, 48, 49, 64, 97, 128, 130, 144, 149)


def found_warm_and_again(name: str, record_nbytes: int, folder: Path) -> tuple[list[int], list[int]]:
    """Return how many blocks texts that part from a stored one at ``CUTS`` find in memory, and after a restart."""
    schema = Schema.from_hf_config(CONFIGS[name], dtype="float32")

    def start() -> KVCache:
        tier = disk_tier(folder, "64MiB", staging="8MiB", admit_all=True, record_nbytes=record_nbytes)
        return KVCache(
            schema, "16MiB", "cpu", max_requests=2, block_size=16, identity=Identity("w"), tiers=[tier],
            limits=Limits(step_tokens=2048),
        )  # fmt: skip

    first = start()
    with first.open(TEXT) as sequence:
        while sequence.length < len(TEXT):
            n = min(len(TEXT) - sequence.length, int(first.step_limit(sequence)))
            sequence.commit(TEXT[sequence.length : sequence.length + n])
    warm = [first.lookup([*TEXT[:cut], 950]).resumable // 16 for cut in CUTS]
    first.flush()
    first.close()
    assert warm[-1] == 9 and (name == "states" or warm[1] > 0)
    again, blocks = start(), []
    for cut in CUTS:
        with again.open([*TEXT[:cut], 950]) as sequence:
            blocks.append(sequence.cached_tokens // 16)
        again.reset()
    again.check()
    again.close()
    return warm, blocks


@pytest.mark.parametrize("name", CONFIGS)
def test_a_branch_is_found_as_in_memory(name: str, tmp_path: Path) -> None:
    warm, blocks = found_warm_and_again(name, 1, tmp_path)
    assert blocks == warm


def test_blocks_that_share_a_record_are_found_where_a_checkpoint_is(tmp_path: Path) -> None:
    """Records of 20,000 bytes, blocks of a window of 8 KiB: no more records than blocks, and the checkpoint is found."""
    warm, blocks = found_warm_and_again("windows", 20_000, tmp_path)
    assert blocks == [9 * (one == 9) for one in warm] and blocks[-1] == 9


def test_blocks_for_branches_leave_room_for_those_that_are_needed(tmp_path: Path) -> None:
    """Staging memory of two checkpoints: the checkpoint itself is stored, and what it keeps for branches as far as it goes."""
    schema = Schema.from_hf_config(CONFIGS["windows"], dtype="float32")
    least = KVCache(schema, "16MiB", "cpu", tiers=[disk_tier(tmp_path / "a", "64MiB")], identity=Identity("w"))
    (level,) = least.core.tiers.levels
    record = level.buffer.record_nbytes
    least.close()
    tier = disk_tier(tmp_path / "b", "64MiB", staging=8 * record, admit_all=True)
    cache = KVCache(schema, "16MiB", "cpu", block_size=16, tiers=[tier], identity=Identity("w"))
    with cache.open(TEXT) as sequence:
        sequence.commit(TEXT)
    cache.flush()
    cache.reset()
    with cache.open([*TEXT, 950]) as sequence:
        assert sequence.cached_tokens == 144
    assert cache.stats().tiers[0].dropped == 0
    cache.close()


def slow(spec: TierSpec, go_on: Event) -> TierSpec:
    """Return ``spec`` with a driver that stores nothing before ``go_on`` is set."""

    def make(buffer: RecordBuffer) -> Driver:
        driver = spec.make(buffer)
        store = driver.store

        def later(keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
            go_on.wait(10.0)
            return store(keys, rows, deadline)

        driver.store = later  # type: ignore[method-assign]
        return driver

    return replace(spec, make=make)


@pytest.mark.parametrize(
    ("name", "staging", "num_texts"),
    [
        ("windows", 40 * 12_288, 5),
        ("windows and full attention", 20 * 4_096, 1),
        ("windows and full attention", 20 * 4_096, 3),
    ],
)
def test_staging_memory_that_is_short_costs_no_text(name: str, staging: int, num_texts: int) -> None:
    """A tier that is slow: what the texts need is stored, whatever the first ones keep for branches and whatever room blocks
    take that all requests share."""
    schema, go_on = Schema.from_hf_config(CONFIGS[name], dtype="float32"), Event()
    tier = slow(host_tier("64MiB", write="commit", staging=staging, timeout=10.0, workers=8), go_on)
    cache = KVCache(schema, "16MiB", "cpu", block_size=16, tiers=[tier], identity=Identity("w"))
    texts = [[(7 * i + first) % 900 for i in range(149)] for first in range(num_texts)]
    for text in texts:
        with cache.open(text) as sequence:
            sequence.commit(text)
        cache.check()
    go_on.set()
    assert cache.flush()
    assert cache.stats().tiers[0].dropped == 0
    cache.reset()
    for text in texts:
        with cache.open([*text, 950]) as sequence:
            assert sequence.cached_tokens == 144
    cache.close()


def computed(cache: KVCache, text: list[int], checkpoints: Sequence[int] | None = None) -> int:
    """Compute ``text`` in a request, and return how many of its blocks were cached."""
    with cache.open(text, capacity=0, checkpoints=checkpoints) as sequence:
        cached = sequence.cached_tokens // 16
        while sequence.length < len(text):
            n = min(len(text) - sequence.length, int(cache.step_limit(sequence)), 256)
            sequence.extend(n)
            sequence.commit(text[sequence.length : sequence.length + n])
    return cached


@pytest.mark.parametrize("name", CONFIGS)
def test_what_two_texts_had_in_common_is_found_by_a_third(name: str, tmp_path: Path) -> None:
    """They part further before their ends than a checkpoint there reaches back, and the second asks for a position before."""
    schema = Schema.from_hf_config(CONFIGS[name], dtype="float32")
    common, tails = [(7 * i) % 900 for i in range(800)], [[900 + number] * 700 for number in range(3)]

    def start() -> KVCache:
        tier = disk_tier(tmp_path, "64MiB", staging="8MiB", admit_all=True)
        return KVCache(schema, "32MiB", "cpu", max_requests=2, identity=Identity("w"), tiers=[tier])

    cache = start()
    computed(cache, common + tails[0])
    computed(cache, common + tails[1], (320,))
    warm = [cache.lookup(common[:cut] + tails[2]).resumable // 16 for cut in (800, 330)]
    cache.flush()
    cache.close()
    again = start()
    for cut, blocks in zip((800, 330), warm):
        assert computed(again, common[:cut] + tails[2]) == blocks > 0
        again.reset()
    again.close()


def test_a_checkpoint_does_not_wait_for_staging_memory_that_a_prefetch_holds(tmp_path: Path) -> None:
    """It is dropped, and counted: a prefetch may be open for long, and blocks behind the checkpoint are stored meanwhile."""
    schema = Schema.from_hf_config(CONFIGS["windows and full attention"], dtype="float32")
    tier = disk_tier(tmp_path, "64MiB", staging=81920, admit_all=True)
    cache = KVCache(schema, "16MiB", "cpu", block_size=16, tiers=[tier], identity=Identity("w"), max_requests=2)
    (level,) = cache.core.tiers.levels
    with cache.open(TEXT) as sequence:
        sequence.commit(TEXT)
    assert cache.flush()
    rows = level.acquire(level.num_readable_ahead, level.tier, 0.0)  # as a prefetch that nobody takes
    assert rows is not None and 0 < level.num_writable < 6
    other = [one + 1 for one in TEXT]
    with cache.open(other) as sequence:
        sequence.commit(other)
    begun = monotonic()
    assert cache.flush(5.0) and monotonic() - begun < 4 and cache.stats().tiers[0].dropped == 6
    level.buffer.release(rows)
    cache.check()
    cache.close()
