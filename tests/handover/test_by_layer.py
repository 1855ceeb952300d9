"""A request goes to another cache layer by layer while it is computed: right rows of every layer kind, or a typed miss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.handover.test_receive import LLAMA, TEXT, Side, held, miss, sides
from tests.sweep.kinds import KINDS, schemas

from kvpagoda import BadInput, HandoverMiss, Identity, KVCache, RetryLater, Schema, StaleHandle, TicketRefused
from kvpagoda.handover import SharedMemory, Ticket
from kvpagoda.handover.content import places_of
from kvpagoda.handover.lease import lease_layout
from raises import raises


class Prefill:
    """A prompt that all ranks of ``side`` compute, chunk by chunk and layer by layer; all but its last token."""

    def __init__(self, side: Side, text: np.ndarray[Any, Any], length: int, begin: int = 0, **given: Any) -> None:
        self.side, self.text, self.length, self.at = side, text, length, begin
        self.sequences = [cache.open(text, capacity=0) for cache in side.caches]
        for sequence, rows in zip(self.sequences, side.rows):
            rows.compute(sequence, text, begin, 3)
        self.tickets = [one.hand_over(30.0, upto=length, **given) for one in self.sequences]
        self.json = Ticket.joined(self.tickets).to_json()

    def chunks(self, size: int) -> Iterator[int]:
        """Compute chunks of ``size`` tokens; yield after each layer of each."""
        num_layers = len(self.side.caches[0].schema.layers)
        while self.at < self.length:
            caches = zip(self.side.caches, self.sequences)
            count = min(size, self.length - self.at, *(cache.step_limit(one) for cache, one in caches))
            end = self.at + count
            for sequence in self.sequences:
                sequence.extend(count)
            for layer in range(num_layers):
                for sequence, rows, sender, ticket in self._ranks():
                    rows.compute_layer(sequence, self.text, self.at, end, layer)
                    sender.layer_done(ticket, layer, end)
                yield layer
            for sequence in self.sequences:
                sequence.commit(self.text[self.at : end])
            self.at = end

    def _ranks(self) -> Iterator[Any]:
        return zip(self.sequences, self.side.rows, self.side.senders, self.tickets)

    def complete(self) -> None:
        for sender, ticket in zip(self.side.senders, self.tickets):
            sender.complete(ticket)


def parts_there(side: Side, ticket: str) -> int:
    """Prove that ``ticket`` cannot be taken yet, and changes nothing; return how many parts of it have arrived."""
    before = held(side.caches[0])
    with raises(RetryLater, needed=ANY, available=ANY) as caught:
        side.receive(ticket)
    assert held(side.caches[0]) == before
    assert isinstance(caught.value.available, int)
    return caught.value.available


@pytest.mark.parametrize("chunk", [5, 8, 64])
@pytest.mark.parametrize("length", [1, 33, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind_arrives_layer_by_layer(kind: str, length: int, chunk: int) -> None:
    size, given = KINDS[kind].block_size, {"num_blocks": None, **KINDS[kind].size}
    with sides(schemas(kind), blocks=(size, size), **given) as (one, two):
        text, arrived = TEXT[:62], [0]
        prefill = Prefill(one, text, length)
        for _ in prefill.chunks(chunk):
            arrived.append(parts_there(two, prefill.json))
        assert arrived == sorted(arrived) and arrived[-1] > 0
        parts_there(two, prefill.json)
        prefill.complete()
        received = two.receive(prefill.json)[0]
        assert received.length == length and received.tokens.tolist() == text[:length].tolist()
        assert not prefill.sequences[0].is_open
        one.check_idle()
        two.rows[0].compute(received, text, 62, 3)  # the rest of the prompt
        two.rows[0].compare(received)
        two.caches[0].check()


@pytest.mark.parametrize(
    ("ranks", "blocks"), [((1, 2), (4, 16)), ((2, 1), (16, 4)), ((2, 4), (4, 4)), ((2, 2), (8, 8))]
)
@pytest.mark.parametrize("layouts", [(None, None), ("trtllm", "vllm-flashinfer"), ("vllm-cross-layer", None)])
def test_widths_pages_and_layouts_differ(ranks: tuple[int, int], blocks: tuple[int, int], layouts: Any) -> None:
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16")
    laid = [schema if layout is None else schema.laid_out(layout) for layout in layouts]
    with sides(laid[0], ranks, laid[1], blocks) as (one, two):
        prefill = Prefill(one, TEXT[:50], 41, begin=7)
        for _ in prefill.chunks(11):
            parts_there(two, prefill.json)
        prefill.complete()
        two.receive(prefill.json)
        one.check_idle()


def test_layers_arrive_before_the_last_one_is_computed() -> None:
    schema = Schema.from_hf_config(dict(LLAMA, num_hidden_layers=6))
    with sides(schema, blocks=(4, 4)) as (one, two):
        prefill = Prefill(one, TEXT[:50], 40)
        arrived = [parts_there(two, prefill.json) for _ in prefill.chunks(8)]
        parts = [2 * layer for layer in range(1, 61 // 2 + 1)]  # two blocks a chunk and layer, of 6 layers and 5 chunks
        assert arrived == parts
        read = watched(two)
        prefill.complete()
        received = two.receive(prefill.json)[0]
        assert received.length == 40 and max(read) < 2000, "nothing but checksums is read again"


def watched(side: Side) -> list[int]:
    """Return a list to which the sizes of all further reads of ``side`` are appended."""
    sizes, read = list[int](), side.transfers[0].read

    def reading(address: dict[str, Any], offset: int, into: Any) -> None:
        sizes.append(len(into))
        read(address, offset, into)

    side.transfers[0].read = reading  # type: ignore[method-assign]
    return sizes


def test_layers_whose_bytes_are_interleaved_arrive_together() -> None:
    """Heads outside of layers: no byte range of a record is of one layer."""
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16").laid_out("vllm-cross-layer")
    cache = KVCache(schema, num_blocks=4, device="cpu", block_size=4)
    groups = places_of(cache.schema, cache.plan)
    sections, nbytes = lease_layout(groups, [3], by_layer=True)
    taken = np.zeros(nbytes, int)
    for section in sections:
        taken[section.offset : section.offset + section.num_records * section.nbytes] += 1
    assert taken.max() == 1 and sorted(layer for one in sections for layer in one.layers) == [0, 1]


def test_a_sender_that_calls_nothing_but_complete() -> None:
    with sides(schemas("mixed")) as (one, two):
        sequence = one.caches[0].open(TEXT[:50], capacity=0)
        ticket = sequence.hand_over(30.0, upto=50, goes_on=True)
        assert parts_there(two, ticket.to_json()) == 0
        one.rows[0].compute(sequence, TEXT[:50], 50, 7)
        one.senders[0].complete(ticket)
        one.senders[0].complete(ticket)  # once more does no harm
        two.receive(ticket.to_json())
        one.senders[0].expire()
        assert sequence.is_open and one.senders[0].fetched == 1, "it goes on here too"
        sequence.extend(3)


def test_a_request_that_stops_before_it_is_complete_is_a_miss() -> None:
    """Given up, closed, suspended, or too late: what was read of it is not taken, and no lease is left."""
    ends: dict[str, Any] = {
        "given up": lambda side, prefill: side.senders[0].give_up(prefill.tickets[0]),
        "taken back": lambda side, prefill: side.senders[0].take_back(prefill.tickets[0]),
        "aborted": lambda side, prefill: prefill.sequences[0].close(),
        "preempted": lambda side, prefill: prefill.sequences[0].suspend(),
        "expired": lambda side, _: (setattr(side.clock, "now", side.clock.now + 33.0), side.senders[0].expire()),
    }
    for name, end in ends.items():
        with sides(schemas("mixed")) as (one, two):
            prefill = Prefill(one, TEXT[:50], 40)
            steps = prefill.chunks(8)
            for _ in range(7):
                next(steps)
            parts_there(two, prefill.json)
            end(one, prefill)
            now, one.clock.now = one.clock.now, one.clock.now - (33.0 if name == "expired" else 0.0)
            miss(two, prefill.json, HandoverMiss, 0)
            one.clock.now = now
            assert two.caches[0]._receiver is not None and not two.caches[0]._receiver._fetched
            for call in (one.senders[0].complete, lambda ticket, side=one: side.senders[0].layer_done(ticket, 0, 8)):
                with raises(StaleHandle, needed="lease"):
                    call(prefill.tickets[0])
            assert one.senders[0].num_leases == 0
            assert one.senders[0]._exported.free_nbytes == len(one.transfers[0].memory) - (1 << 18)
            one.caches[0].check()
            if name in ("given up", "taken back"):
                assert prefill.sequences[0].is_open, "the request is its engine's"


def test_the_clock_ends_it_at_the_receiver_too() -> None:
    with sides(schemas("full")) as (one, two):
        prefill = Prefill(one, TEXT[:50], 40)
        for _ in prefill.chunks(16):
            parts_there(two, prefill.json)
        one.clock.now += 30.5
        miss(two, prefill.json, HandoverMiss, one.clock.now, one.clock.now - 0.5)


def test_tokens_that_are_computed_again_are_copied_again() -> None:
    """A step that failed after it reported layers, and a rewind: the rows at ``complete`` count."""
    with sides(schemas("gemma")) as (one, two):
        text = TEXT[:40]
        prefill = Prefill(one, text, 40)
        sequence, rows, sender = prefill.sequences[0], one.rows[0], one.senders[0]
        sequence.extend(8)
        other = np.concatenate((text[:3], TEXT[100:105]))
        for layer in range(3):
            rows.compute_layer(sequence, other, 0, 8, layer)  # wrong rows, which are not committed
            sender.layer_done(prefill.tickets[0], layer, 8)
        parts_there(two, prefill.json)
        for _ in prefill.chunks(8):
            parts_there(two, prefill.json)
        sequence.rewind(3)
        rows.compute(sequence, text, 40, 3)
        prefill.complete()
        two.receive(prefill.json)


def test_what_was_not_promised_is_not_completed() -> None:
    with sides(schemas("full")) as (one, two):
        prefill = Prefill(one, TEXT[:50], 40)
        sequence, sender, ticket = prefill.sequences[0], one.senders[0], prefill.tickets[0]
        with raises(BadInput, needed=40, available=0):
            sender.complete(ticket)
        for layer, upto in (
            (2, 4),
            (-1, 4),
            (0, 41),
            (0, -1),
            ("a", 4),
            (0, 5),
        ):  # no such layer, or no room for tokens
            with pytest.raises(BadInput):
                sender.layer_done(ticket, layer, upto)  # type: ignore[arg-type]
        one.rows[0].compute(sequence, TEXT[:50], 40, 8)
        with one.caches[0].fence([sequence]):
            sender.layer_done(ticket)
            with raises(RetryLater, available=1):
                sender.complete(ticket)
        sequence.rewind(8)
        sequence.extend(8)
        sequence.commit(TEXT[100:108])
        with raises(BadInput, needed=40, available=40):
            sender.complete(ticket)
        parts_there(two, prefill.json)
        for upto in (51, 39, 0):
            with pytest.raises(BadInput):
                sequence.hand_over(1.0, upto=upto)
        sender.give_up(ticket)
        again = sequence.hand_over(30.0, upto=40, goes_on=True)
        sender.complete(again)
        with raises(BadInput, needed="layer"):
            sender.layer_done(again, 0, 8)
        two.caches[0].receive(again, two.transfers[0], clock=one.clock)


def test_new_weights_in_the_middle_are_not_completed() -> None:
    for at in (0, 8):
        with sides(schemas("full")) as (one, _):
            prefill = Prefill(one, TEXT[:50], 40, begin=at)
            one.caches[0].invalidate(weights="w2")
            one.rows[0].compute(prefill.sequences[0], TEXT[:50], 40, 8)
            with raises(BadInput, needed=ANY):
                prefill.complete()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_damaged_or_forged_lease_is_a_miss(when: str) -> None:
    """A flipped bit of a part that was not read yet; and a whole lease whose seal another key made."""
    with sides(schemas("mixed")) as (one, two):
        prefill = Prefill(one, TEXT[:50], 40)
        for _ in prefill.chunks(16):
            pass
        lease = json.loads(prefill.json)["ranks"][0]
        if when == "after":
            prefill.complete()
        one.transfers[0].memory[lease["offset"] + lease["nbytes"] - 64] ^= 4
        if when == "before":
            parts_there(two, prefill.json)  # it may still be written
            prefill.complete()
        miss(two, prefill.json, HandoverMiss, 25, ANY)
        one.transfers[0].memory[lease["offset"] + lease["nbytes"] - 64] ^= 4
        one.transfers[0].memory[lease["offset"] + 64 + 40] ^= 4  # the signature in the seal
        miss(two, prefill.json, HandoverMiss, 25, ANY)
        two.caches[0].receive(prefill.tickets[0].to_json(), two.transfers[0], clock=one.clock).close()  # trusts anyone
        with raises(TicketRefused, available=[ANY]):
            two.receive(prefill.json)


def test_no_room_keeps_what_arrived() -> None:
    with sides(schemas("full"), max_requests=1) as (one, two):
        prefill = Prefill(one, TEXT[:50], 40)
        for _ in prefill.chunks(16):
            parts_there(two, prefill.json)
        prefill.complete()
        other = two.caches[0].open(TEXT[:4])
        miss(two, prefill.json, RetryLater, 1, 0)
        read = watched(two)
        other.close()
        two.receive(prefill.json)
        assert max(read) < 1000


def test_of_a_long_prompt_the_window_alone_is_sent() -> None:
    """The window slides while chunks are computed; a cached beginning is left out."""
    with sides(schemas("gemma"), num_blocks=60) as (one, two):
        for sequence in two.compute(TEXT[:64], 64):
            sequence.close()
        prefill = Prefill(one, TEXT[:150], 150, after=60)
        data = json.loads(prefill.json)
        assert data["firsts"] == [15, 35] and data["counts"] == [23, 3]
        for _ in prefill.chunks(8):
            parts_there(two, prefill.json)
        prefill.complete()
        assert two.receive(prefill.json)[0].length == 150
        one.check_idle()


def test_a_ticket_of_another_receiver_is_none_of_ours() -> None:
    cache = KVCache(schemas("full"), num_blocks=24, device="cpu", block_size=4, identity=Identity("w"))
    with sides(schemas("full")) as (one, two):
        prefill = Prefill(one, TEXT[:50], 40)
        for _ in prefill.chunks(16):
            parts_there(two, prefill.json)
        prefill.complete()
        two.receive(prefill.json)
        one.check_idle()
        with raises(HandoverMiss, needed=0):
            cache.receive(prefill.json, SharedMemory(), key=b"shared", clock=one.clock)


@pytest.mark.parametrize("layers", [[0, 1, 2], [None]])
def test_layers_of_a_failed_step_are_taken_back(layers: list[int | None]) -> None:
    """Its rows were reported, and copied; then computed again in a longer chunk, which is reported after it is committed."""
    with sides(schemas("gemma")) as (one, two):
        text = TEXT[:40]
        prefill = Prefill(one, text, 40)
        sequence, rows, sender, ticket = prefill.sequences[0], one.rows[0], one.senders[0], prefill.tickets[0]
        sequence.extend(8)
        for layer in range(3):
            rows.compute_layer(sequence, TEXT[100:106], 0, 6, layer)
            sender.layer_done(ticket, layer, 6)
        parts_there(two, prefill.json)
        for layer in layers:
            sender.layer_done(ticket, layer)
        rows.compute(sequence, text, 8, 8)
        sender.layer_done(ticket)
        prefill.at = 8
        for _ in prefill.chunks(8):
            parts_there(two, prefill.json)
        prefill.complete()
        two.receive(prefill.json)


def test_other_tokens_than_those_of_the_ticket_are_not_copied() -> None:
    """Taken back and committed again with other tokens, or without their image: BadInput until they are right again."""
    with sides(schemas("full")) as (one, two):
        text, media = TEXT[:50], {5: b"a" * 16}
        sequence, sender = one.caches[0].open(text, capacity=0, media=media), one.senders[0]
        ticket = sequence.hand_over(30.0, upto=40)
        one.rows[0].compute(sequence, text, 12, 4)
        sender.layer_done(ticket)
        sequence.rewind(4)
        one.rows[0].compute(sequence, np.concatenate((text[:8], TEXT[100:140])), 16, 4)
        with raises(BadInput, needed=40, available=16):
            sender.layer_done(ticket)
        sequence.rewind(8)
        sender.layer_done(ticket)
        one.rows[0].compute(sequence, text, 40, 4)
        sender.complete(ticket)
        two.receive(ticket.to_json())
        sequence = one.caches[0].open(TEXT[50:100], capacity=0, media=media)
        ticket = sequence.hand_over(30.0, upto=40)
        one.rows[0].compute(sequence, TEXT[50:100], 8, 4)
        sequence.rewind(4)
        one.rows[0].compute(sequence, TEXT[50:100], 40, 4)  # without the image
        for call in (sender.layer_done, sender.complete):
            with raises(BadInput, needed=40, available=40):
                call(ticket)
