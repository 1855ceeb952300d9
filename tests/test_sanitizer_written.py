"""``KVCache(sanitize=True)`` finds rows and states that nobody wrote before they were committed, and what a worker lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpagoda import CheckFailed, KVCache, Limits, Schema, Worker
from kvpagoda.core.memory.copies import Copies
from kvpagoda.schema import Attention, Layer
from random_driver.schemas import schema_named
from test_sanitizer import _BASE, BLOCK, HYBRID, WINDOW, cache_of, compute, step, tokens, write

torch = pytest.importorskip("torch")

LLAMA = Schema.from_hf_config(dict(_BASE, model_type="llama", num_hidden_layers=2), dtype="float32")


def fields_of(batch: Any) -> list[tuple[Layer, str]]:
    """The fields of all layers with blocks that must be written."""
    return [
        (layer, name)
        for layer in batch._schema.layers
        if layer.owner == layer.index and layer.growth is not None and not layer.growth.is_optional
        for name in batch.layer(layer.index).blocks.fields
    ]


def poisoned(batch: Any, layer: Layer, name: str, rows: slice) -> None:
    """Undo what was written to some of a step's rows of a field."""
    view = batch.layer(layer.index)
    slots = view.slot_mapping[rows].long()
    array = view[name].view(torch.uint8)
    array[slots // BLOCK, slots % BLOCK // (BLOCK // array.shape[1])] = 0xFF


@pytest.mark.parametrize("name", ["full", "mla", "gemma", "scaled", "fp8_heads", "scaled_heads", "drafted", "pooled"])
def test_one_row_of_one_field_that_nobody_wrote_is_found(name: str) -> None:
    """Of every encoding; a field with a row for several tokens has one that ends at the step's last token."""
    cache, text = cache_of(schema_named(name)), tokens(1, 2 * BLOCK)
    with cache.open(text) as sequence:
        count = len(fields_of(cache.batch([sequence], [1])))
    for number in range(count):
        sequence = cache.open(text, lookup=False)
        compute(cache, sequence, text[:BLOCK])
        batch = cache.batch([sequence], [BLOCK])
        write(batch, text[BLOCK:])
        layer, field = fields_of(batch)[number]
        poisoned(batch, layer, field, slice(BLOCK - 1, BLOCK))
        sequence.commit(text[BLOCK:])
        with pytest.raises(CheckFailed, match=r"row of position 31 in .* \(wrong are \[31\]\) is of nobody: no step"):
            step(cache, sequence)
        sequence.close()
        cache.reset()


def test_a_step_that_nobody_computed_is_named_with_its_group_and_positions() -> None:
    cache, text = cache_of(WINDOW), tokens(1, 40)
    sequence = cache.open(text)
    compute(cache, sequence, text[:20])
    batch = cache.batch([sequence], [20])
    write(batch, text[20:])
    for name in ("k", "v"):
        poisoned(batch, WINDOW.layers[1], name, slice(3, 5))
    sequence.commit(text[20:])
    with pytest.raises(CheckFailed, match=r"wrong are \[23, 24\]") as raised:
        cache.batch([sequence], [1])
    assert raised.value.group == "full"
    sequence.close()  # and whoever finds these rows gets the same answer
    with pytest.raises(CheckFailed, match=r"wrong are \[23, 24\]"):
        step(cache, cache.open(np.append(text, 1)))


def _rewound(cache: Any) -> Any:
    """The rows of tokens that were taken back have their old bytes."""
    sequence = cache.open(tokens(1, 40))
    compute(cache, sequence, tokens(1, 40))
    sequence.rewind(10)
    return sequence


def _hit(cache: Any) -> Any:
    """A block that was copied has rows of another text behind those of the hit."""
    with cache.open(tokens(1, 40)) as sequence:
        compute(cache, sequence, tokens(1, 40))
    sequence = cache.open(np.concatenate((tokens(1, 40)[:30], tokens(2, 9))))
    assert sequence.length == 30
    return sequence


@pytest.mark.parametrize("begin", [_rewound, _hit])
def test_old_bytes_do_not_pass_for_new_rows(begin: Callable[[Any], Any]) -> None:
    for is_computed in (True, False):
        cache = cache_of(LLAMA)
        sequence = begin(cache)
        sequence.extend(5)
        batch = cache.batch([sequence], [5])
        if is_computed:
            write(batch, np.arange(5))
        sequence.commit(tokens(2, 9)[:5] if begin is _hit else [1] * 5)
        if is_computed:
            step(cache, sequence)
        else:
            with pytest.raises(CheckFailed, match=r"wrong are \[30, 31, 32, 33, 34\]"):
                step(cache, sequence)
        sequence.close()


def test_a_batch_that_is_made_again_keeps_what_was_written() -> None:
    cache, text = cache_of(LLAMA), tokens(1, 40)
    sequence = cache.open(text)
    write(cache.batch([sequence], [40]), text)
    cache.batch([sequence], [40])
    sequence.commit(text[:30])
    cache.batch([sequence], [10])
    sequence.commit(text[30:])
    step(cache, sequence)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("-inf")])
def test_rows_of_any_numbers_count_as_written(value: float) -> None:
    cache, text = cache_of(HYBRID), tokens(1, 40)
    sequence = cache.open(text)
    write(cache.batch([sequence], [40]), [value] * 40)
    sequence.commit(text)
    step(cache, sequence)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8"])
def test_integers_with_all_bits_set_count_as_written(dtype: str) -> None:
    """-1, or 255: but a layer with floats shows that nobody wrote."""
    layers = (Layer(0, "integers", (Attention(1, 4, 4, dtype),)), Layer(1, "floats", (Attention(1, 4, 4, "float32"),)))
    for is_written in (True, False):
        cache, text = cache_of(Schema(layers, "integers")), tokens(1, 40)
        sequence = cache.open(text)
        batch = cache.batch([sequence], [40])
        write(batch, [1] * 40)
        for name in ("k", "v"):
            batch.layer(0)[name].view(torch.uint8)[:] = 0xFF
        if not is_written:
            batch.layer(1)["v"].view(torch.uint8)[:] = 0xFF
        sequence.commit(text)
        if is_written:
            step(cache, sequence)
        else:
            with pytest.raises(CheckFailed, match="nobody: no step wrote it"):
                step(cache, sequence)


@pytest.mark.parametrize("is_left", [True, False])
def test_states_that_no_step_left_inside_of_it_are_found(is_left: bool) -> None:
    """An engine says that its step left the states at the positions that were named, and its model cannot do that."""
    cache, text = cache_of(HYBRID, limits=Limits(step_checkpoints=4)), tokens(1, 60)
    sequence = cache.open(text, checkpoints=[32])
    assert cache.step_limit(sequence) >= 60
    write(cache.batch([sequence], [60]), text, left=is_left)
    assert 32 in sequence.step_checkpoints
    sequence.commit(text, sequence.step_checkpoints)
    sequence.close()
    again = cache.open(np.append(text[:40], 901))
    assert again.length == 32
    if is_left:
        step(cache, again)
    else:
        with pytest.raises(CheckFailed, match=r"state after 32 tokens in block \d+ is of nobody: no step wrote it"):
            step(cache, again)


@pytest.mark.parametrize("is_left", [True, False])
def test_states_of_drafts_that_nobody_left_are_found(is_left: bool) -> None:
    cache, text = cache_of(HYBRID.rewindable(3)), tokens(1, 60)
    sequence = cache.open(text)
    compute(cache, sequence, text[:40])  # all places have been written
    batch = cache.batch([sequence], [3])
    before = {name: batch.layer(0)[name].clone() for name in batch.layer(0).state.fields}
    write(batch, text[40:43])
    if not is_left:
        for name, values in before.items():
            batch.layer(0)[name][:] = values
    sequence.commit(text[40:42])
    if is_left:
        step(cache, sequence)
    else:
        with pytest.raises(CheckFailed, match="state after 42 tokens"):
            step(cache, sequence)


# -- a worker ----------------------------------------------------------------------------------------------------------


class Split:
    """A scheduler and its worker. ``without``: the kind of copies that the worker is not sent."""

    def __init__(self, schema: Schema, without: str = "", of_worker: bool = True, **more: Any) -> None:
        sizes: dict[str, Any] = {"num_blocks": 40, "block_size": BLOCK, "max_requests": 4, **more}
        self.scheduler = KVCache(schema, device="none", sanitize=True, **sizes)
        self.worker = Worker(KVCache(schema, device="cpu", sanitize=of_worker, **sizes))
        self.without, self.sent = without, set[str]()

    def step(self, sequence: Any, text: Any, is_computed: bool = True) -> None:
        sequence.extend(len(text))
        batch = self.scheduler.batch([sequence], [len(text)])
        copies = Copies.from_json(batch.copies.to_json())
        self.sent |= {one.kind for one in copies}
        left = tuple(one for one in copies if one.kind != self.without)
        self.worker.apply(replace(copies, operations=left))
        if is_computed:
            write(batch, text, self.worker)
        sequence.commit(text)


def _forked(split: Split) -> None:
    text = tokens(1, 40)
    with split.scheduler.open(text, reserve=80) as first:
        split.step(first, text)
        with first.fork(reserve=80) as second:
            split.step(second, [1, 2, 3])


def _opened(split: Split) -> None:
    text = tokens(1, 40)
    with split.scheduler.open(text, reserve=80) as first:
        split.step(first, text[:32])
        split.step(first, text[32:])
    text = np.append(text[:37], [1, 2, 3]).astype(np.int32)
    with split.scheduler.open(text, reserve=80) as second:
        assert second.length in (32, 37)
        split.step(second, text[second.length :])


def _suspended(split: Split) -> None:
    text = tokens(1, 40)
    first = split.scheduler.open(text, reserve=80)
    split.step(first, text)
    first.suspend()
    with split.scheduler.open(tokens(2, 40)) as other:
        split.step(other, tokens(2, 40))
    first.resume(reserve=80)
    split.step(first, [1])


@pytest.mark.parametrize(
    ("run", "schema", "kind"),
    [
        (_forked, LLAMA, "block"), (_opened, LLAMA, "block"), (_forked, WINDOW, "block"), (_forked, HYBRID, "state"),
        (_opened, HYBRID, "state"), (_opened, HYBRID, "reset"), (_suspended, LLAMA, "swap_out"),
        (_suspended, HYBRID, "swap_in"), (_suspended, LLAMA, "wrote"),
    ],
)  # fmt: skip
def test_a_worker_finds_copies_that_it_was_not_sent(run: Callable[[Split], None], schema: Schema, kind: str) -> None:
    run(clean := Split(schema))
    assert {kind, "wrote", "reads"} <= clean.sent
    with pytest.raises(CheckFailed, match=r"block \d+ of .* has not what the step would read of it"):
        run(Split(schema, without=kind))
    run(Split(schema, without=kind, of_worker=False))  # it passes over what the scheduler says of provenance


def test_many_requests_that_read_one_beginning_are_one_read() -> None:
    """A scheduler keeps no more notes than its memory has blocks, some times: each block is noted once for all requests."""
    split = Split(LLAMA, num_blocks=400, max_requests=64)
    text = np.arange(300 * BLOCK, dtype=np.int32) % 900
    sequences = [split.scheduler.open(text, reserve=len(text) + 1)]
    for begin in range(0, len(text), 512):
        split.step(sequences[0], text[begin : begin + 512])
    sequences[0].extend(1)
    sequences += [split.scheduler.open(np.append(text, number)) for number in range(63)]
    batch = split.scheduler.batch(sequences, [1] * 64)
    split.worker.apply(batch.copies)
    assert [len(one.target) for one in batch.copies if one.kind == "reads"] == [300]


def test_a_worker_finds_rows_that_it_did_not_write() -> None:
    split, text = Split(LLAMA), tokens(1, 45)
    sequence = split.scheduler.open(text)
    split.step(sequence, text[:40])
    split.step(sequence, text[40:43], is_computed=False)
    with pytest.raises(CheckFailed, match=r"nobody wrote rows \[8, 9, 10\] of it") as raised:
        split.step(sequence, text[43:])
    assert raised.value.needed != raised.value.available


def test_a_worker_begins_anew_after_a_reset() -> None:
    split = Split(HYBRID)
    _forked(split)
    split.scheduler.reset()
    _opened(split)


def test_copies_are_as_before_if_nobody_sanitizes() -> None:
    cache = KVCache(LLAMA, device="none", num_blocks=40)
    sequence = cache.open(tokens(1, 40))
    assert len(cache.batch([sequence], [40]).copies) == 0
    sequence.commit(tokens(1, 40))
    sequence.extend(1)
    assert len(cache.batch([sequence], [1]).copies) == 0


def test_draft_rows_outlive_a_sleep() -> None:
    """What wakes is of unknown provenance, so that rows behind the committed ones may be those of a draft."""
    cache, text = cache_of(LLAMA), tokens(1, 40)
    sequence = cache.open(text)
    write(cache.batch([sequence], [40]), text)
    sequence.commit(text[:30])
    cache.sleep()
    cache.wake()
    cache.batch([sequence], [1])
    sequence.commit(text[30:])
    step(cache, sequence)
