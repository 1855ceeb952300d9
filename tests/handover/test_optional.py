"""Groups that are optional go along in a hand-over where both sides have them; no request stays behind for lack of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.handover.test_by_layer import Prefill, parts_there, watched
from tests.handover.test_receive import KEY, TEXT, Side, sides
from tests.sweep.kinds import HEAD, STATE, WINDOW, schema_of

from kvpagoda import KVCache, Schema, TicketRefused
from kvpagoda.handover import Ticket
from kvpagoda.schema import Attention, Growth
from raises import raises

NARROW = Attention(1, 4, 4, "float32", Growth(window=6))
OWN = {
    "full": schema_of(HEAD, HEAD),
    "windows": schema_of(HEAD, WINDOW),
    "windows alone": schema_of(WINDOW, WINDOW),
    "states": schema_of(HEAD, STATE),
    "states and windows": schema_of((HEAD, STATE), WINDOW),
}
DRAFTS = {
    "window": schema_of(NARROW),
    "full": schema_of(Attention(2, 4, 4, "float32")),
    "both": schema_of(NARROW, HEAD),
}


def drafted(own: str, draft: str) -> Schema:
    return OWN[own].drafted_by(DRAFTS[draft])


CASES = [(x, y) for x in OWN for y in DRAFTS if any(one.growth.is_optional for one in drafted(x, y).groups)]
"""Layers of a model, and of a draft, of which some have a group of their own."""


@contextmanager
def drafted_sides(one: Schema, other: Schema | None = None, **given: Any) -> Iterator[tuple[Side, Side]]:
    with sides(one, other=other, **{"num_blocks": None, "budget": "64KiB", **given}) as made:
        yield made


def optional(cache: KVCache) -> list[str]:
    return [group.plan.name for group in cache.core.groups if group.growth.is_optional]


def forget_optional(cache: KVCache) -> None:
    """Evict every block of optional groups that no request reads."""
    core = cache.core
    for group in core.prefix.optional:
        while group.num_cold:
            core.capacity.forget(group.evict, group.num_cold)


def goes_on(side: Side, received: Any, text: Any) -> None:
    """Compute the rest of ``text``, 12 tokens at least, with what optional groups lack before; prove all of it, also for the
    next request."""
    assert received.length + 12 <= len(text)
    side.rows[0].compute(received, text, len(text), 3)
    side.rows[0].compare(received)
    received.close()
    again = side.caches[0].open(np.append(text, text[-1:]), capacity=0)
    if side.caches[0].core.states is None:
        assert again.length >= len(text) - len(text) % side.caches[0].block_size
    side.rows[0].compare(again)
    again.close()
    side.caches[0].check()


@pytest.mark.parametrize("blocks", [(4, 4), (4, 8), (8, 4)])
@pytest.mark.parametrize(("own", "draft"), CASES)
def test_optional_groups_go_along(own: str, draft: str, blocks: tuple[int, int]) -> None:
    with drafted_sides(drafted(own, draft), blocks=blocks) as (one, two):
        assert optional(one.caches[0])
        for length in (1, 8, 33, 60):
            text = TEXT[100 - length : 116]
            received = two.receive(one.hand_over(one.compute(text, length)))[0]
            assert received.length == length and received.match.lacking_from is None
            one.check_idle()
            goes_on(two, received, text)


@pytest.mark.parametrize("blocks", [(4, 4), (8, 4)])
@pytest.mark.parametrize(("own", "draft"), CASES)
def test_optional_groups_arrive_layer_by_layer(own: str, draft: str, blocks: tuple[int, int]) -> None:
    with drafted_sides(drafted(own, draft), blocks=blocks) as (one, two):
        text = TEXT[:76]
        prefill = Prefill(one, text, 60)
        arrived = [parts_there(two, prefill.json) for _ in prefill.chunks(7)]
        assert arrived == sorted(arrived) and arrived[-1] > 0
        prefill.complete()
        received = two.receive(prefill.json)[0]
        assert received.length == 60 and received.match.lacking_from is None
        one.check_idle()
        goes_on(two, received, text)


@pytest.mark.parametrize(("own", "draft"), CASES)
def test_optional_groups_arrive_in_committed_chunks(own: str, draft: str) -> None:
    """What the receiver has of them stays there; where it evicted that meanwhile, they are lacking from there on."""
    for forgets in (False, True):
        with drafted_sides(drafted(own, draft), blocks=(8, 4)) as (one, two):
            text = TEXT[:100]
            sequence = one.compute(text, 40)[0]
            two.receive(one.hand_over([sequence], goes_on=True))[0].close()
            if forgets:
                forget_optional(two.caches[0])
            one.rows[0].compute(sequence, text, 80, 8)
            received = two.receive(one.hand_over([sequence], after=40))[0]
            is_short = forgets and "optional full" in optional(two.caches[0])
            assert received.length == 80 and received.match.lacking_from == (0 if is_short else None)
            one.check_idle()
            goes_on(two, received, text)


WIDER, SHORTER = schema_of(Attention(2, 4, 4, "float32", Growth(window=6))), schema_of(Attention(1, 2, 8, "bfloat16"))
OTHERS: list[tuple[Schema, Schema, int | None]] = [
    (drafted("full", "window"), OWN["full"], None),
    (drafted("states and windows", "window"), OWN["states and windows"], None),
    (OWN["states"], drafted("states", "window"), 36),
    (OWN["windows alone"], drafted("windows alone", "full"), 0),
    (drafted("windows", "window"), OWN["windows"].drafted_by(WIDER), 36),
    (drafted("windows alone", "full"), OWN["windows alone"].drafted_by(SHORTER), 0),
    (drafted("windows alone", "both"), drafted("windows alone", "window"), None),
    (drafted("windows alone", "window"), drafted("windows alone", "both"), 0),
]
"""Sender and receiver with different drafts; which rows lack at the receiver after 41 tokens."""


@pytest.mark.parametrize("number", range(len(OTHERS)))
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_request_is_received_whole_whatever_the_drafts(number: int, by_layer: bool) -> None:
    here, there, lacking = OTHERS[number]
    with drafted_sides(here, there) as (one, two):
        text = TEXT[:56]
        if by_layer:
            prefill = Prefill(one, text, 41)
            assert [parts_there(two, prefill.json) for _ in prefill.chunks(16)][-1] > 0
            prefill.complete()
            ticket = prefill.json
        else:
            ticket = one.hand_over(one.compute(text, 41))
        read = watched(two)
        received = two.receive(ticket)[0]
        assert (received.length, received.match.lacking_from) == (41, lacking)
        if not optional(two.caches[0]):
            assert sum(read) < Ticket.from_json(ticket, KEY).ranks[0].nbytes, "what nobody keeps here is not read"
        one.check_idle()
        goes_on(two, received, text)


@pytest.mark.parametrize(("own", "draft"), CASES)
def test_what_the_sender_lacks_is_lacking_there(own: str, draft: str) -> None:
    """It began with a hit without the rows of its draft, and hands the request over before it has computed them."""
    with drafted_sides(drafted(own, draft)) as (one, two):
        text = TEXT[:61]
        for sequence in one.compute(text, 61):
            sequence.close()
        longer = np.append(text, text[:20])
        forget_optional(one.caches[0])
        sequence = one.caches[0].open(longer, capacity=0)
        begin, first = sequence.length, sequence.match.lacking_from
        assert begin >= 60 and first is not None
        child = sequence.fork()
        assert child.match.lacking_from == first
        for handed in (sequence, child):
            if handed is child:  # what it computed since then goes along
                one.rows[0].compute(child, longer, begin + 2, 2)
            received = two.receive(one.hand_over([handed]))[0]
            assert received.match.lacking_from == (first if handed is sequence else None)
            goes_on(two, received, longer)
        one.check_idle()


@pytest.mark.parametrize(("own", "draft"), [("full", "window"), ("windows alone", "full"), ("states", "window")])
def test_a_layer_is_not_done_while_rows_of_its_group_lack(own: str, draft: str) -> None:
    """``layer_done`` as soon as the request began: of what it began with, the draft's rows are computed later."""
    with drafted_sides(drafted(own, draft)) as (one, two):
        text = TEXT[:76]
        for sequence in one.compute(text[:50], 50):
            sequence.close()
        forget_optional(one.caches[0])
        sequence, (sender,) = one.caches[0].open(text, capacity=0), one.senders
        assert sequence.length >= 48 and sequence.match.lacking_from is not None
        ticket = sequence.hand_over(30.0, upto=60)
        sender.layer_done(ticket)
        assert parts_there(two, ticket.to_json()) > 0 or own == "windows alone"
        one.rows[0].compute(sequence, text, 60, 4)
        sender.complete(ticket)
        received = two.receive(ticket.to_json())[0]
        assert received.match.lacking_from is None
        goes_on(two, received, text)
        one.check_idle()


def test_cached_rows_of_a_draft_are_shared() -> None:
    """What the receiver has of the draft's rows is read from its own blocks, and not from the ticket."""
    with drafted_sides(drafted("windows alone", "full"), blocks=(4, 4)) as (one, two):
        text = TEXT[:76]
        for sequence in two.compute(text[:44], 44):
            sequence.close()
        read = watched(two)
        received = two.receive(one.hand_over(one.compute(text, 60)))[0]
        assert received.match.lacking_from is None and max(read) <= 4 * max(
            group.row_nbytes for group in groups_of(two)
        )
        group = next(group for group in two.caches[0].core.groups if group.growth.is_optional)
        assert group.shared[received.slot] >= 11
        goes_on(two, received, text)


def groups_of(side: Side) -> list[Any]:
    return [group.plan for group in side.caches[0].core.groups]


def test_wrong_columns_of_a_draft_in_a_trusted_ticket_are_none() -> None:
    with drafted_sides(drafted("full", "window")) as (one, two):
        data = json.loads(one.hand_over(one.compute(TEXT[:62], 41)))
        for first in (10, 40, 2**40):
            data["firsts"][1] = first
            received = two.caches[0].receive(json.dumps(data), two.transfers[0], clock=one.clock)
            assert (received.length, received.match.lacking_from) == (41, 36)
            two.rows[0].compare(received)
            received.close()
            two.caches[0]._receiver = None  # forgets what it took
        data["counts"][1] += 1
        with raises(TicketRefused, needed=3584, available=3456):
            two.caches[0].receive(json.dumps(data), two.transfers[0], clock=one.clock)
        two.caches[0].check()
