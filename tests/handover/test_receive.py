"""A request that one cache hands over goes on in another, with its bytes: every layer kind, width, page size and layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.handover.rows import Rows as Written
from tests.handover.test_transfers import HOSTILE, NO_NUMBERS
from tests.sweep.kinds import KINDS, schemas

from kvpagoda import (
    BadInput,
    HandoverMiss,
    Identity,
    KVCache,
    KVPagodaError,
    Limits,
    OutOfBlocks,
    Retention,
    RetryLater,
    Schema,
    StaleHandle,
    TicketRefused,
)  # fmt: skip
from kvpagoda.handover import Sender, SharedMemory, Ticket
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.lease import lease_layout
from kvpagoda.schema import Attention, Layer, Recurrent, Rows
from raises import raises

KEY = b"shared"
TEXT = np.random.default_rng(3).integers(0, 1000, 200).astype(np.int32)
LLAMA = dict(
    model_type="llama",
    vocab_size=1000,
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def cache_of(schema: Schema, block_size: int, rank: int = 0, ranks: int = 1, **settings: Any) -> KVCache:
    given: dict[str, Any] = dict(num_blocks=40, max_requests=4, retention=Retention(4, 1)) | settings
    return KVCache(
        schema, device="cpu", block_size=block_size, identity=Identity("w", rank, ranks), poison=True,
        limits=Limits(step_tokens=2 * block_size), **given,
    )  # fmt: skip


class Side:
    """The ranks of one side, over one schema."""

    def __init__(
        self, schema: Schema, ranks: int = 1, block_size: int = 4, exported: str | int = 0, **settings: Any
    ) -> None:
        self.caches = [cache_of(schema.split(tp=ranks), block_size, rank, ranks, **settings) for rank in range(ranks)]
        self.rows = [Written(cache, rank, ranks) for rank, cache in enumerate(self.caches)]
        self.transfers = [SharedMemory(exported) for _ in self.caches]
        self.clock, self.senders = Clock(), list[Sender]()
        if exported:
            self.senders = [
                cache.sender(transfer, key=KEY, clock=self.clock)
                for cache, transfer in zip(self.caches, self.transfers)
            ]

    def compute(self, tokens: np.ndarray[Any, Any], upto: int) -> list[Any]:
        sequences = []
        for cache, rows in zip(self.caches, self.rows):
            sequence = cache.open(tokens, capacity=0)
            rows.compute(sequence, tokens, upto, 3)
            rows.compare(sequence)
            sequences.append(sequence)
        return sequences

    def hand_over(self, sequences: list[Any], **given: Any) -> str:
        return Ticket.joined([one.hand_over(30.0, **given) for one in sequences]).to_json()

    def receive(self, ticket: str, **given: Any) -> list[Any]:
        received = []
        for cache, rows, transfer in zip(self.caches, self.rows, self.transfers):
            sequence = cache.receive(ticket, transfer, key=KEY, clock=self.clock, **given)
            rows.compare(sequence)
            cache.check()
            received.append(sequence)
        return received

    def check_idle(self) -> None:
        """Prove that no lease, slot or exported byte is held."""
        for cache, sender in zip(self.caches, self.senders):
            sender.expire()
            assert (sender.num_leases, cache.stats().running) == (0, 0)
            assert sender._exported.free_nbytes == len(sender._transfer.memory) - (1 << 18)
            cache.check()

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for transfer in self.transfers:
            transfer.close()
        for cache in self.caches:
            cache.close()


@contextmanager
def sides(
    schema: Schema,
    ranks: tuple[int, int] = (1, 1),
    other: Schema | None = None,
    blocks: tuple[int, int] = (4, 4),
    **settings: Any,
) -> Iterator[tuple[Side, Side]]:
    one, two = (
        Side(schema, ranks[0], blocks[0], "8MiB", **settings),
        Side(other or schema, ranks[1], blocks[1], **settings),
    )
    two.clock = one.clock
    try:
        yield one, two
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("length", [1, 7, 8, 33, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind_goes_on_elsewhere(kind: str, length: int) -> None:
    size, given = KINDS[kind].block_size, {"num_blocks": None, **KINDS[kind].size}
    with sides(schemas(kind), blocks=(size, size), **given) as (one, two):
        text = TEXT[:62]
        ticket = one.hand_over(one.compute(text, length))
        received = two.receive(ticket)[0]
        assert received.length == length and received.tokens.tolist() == text[:length].tolist()
        one.check_idle()
        two.rows[0].compute(received, text, 62, 3)  # the rest of the prompt
        two.rows[0].compare(received)
        two.caches[0].check()


@pytest.mark.parametrize("formats", [("int8", "int8"), ("bfloat16", "bfloat16"), ("int8", None), (None, "int8")])
def test_checkpoints_at_rest_stay_and_the_state_goes_along(formats: tuple[str | None, str | None]) -> None:
    state = Recurrent((Rows("conv", (6, 3), "bfloat16"), Rows("recurrent", (2, 4, 128), "float32")))
    schema = Schema((Layer(0, "full", (Attention(1, 4, 4, "float32"),)), Layer(1, "state", (state,))), "wide")
    kept = [Retention(4, 1, checkpoint_format=format) for format in formats]
    with (
        closing(Side(schema, 1, 4, "8MiB", retention=kept[0])) as one,
        closing(Side(schema, retention=kept[1])) as two,
    ):
        two.clock = one.clock
        for length in (21, 40):
            received = two.receive(one.hand_over(one.compute(TEXT[100 - length : 105], length)))[0]
            two.rows[0].compute(received, TEXT[100 - length : 105], length + 5, 3)
            two.rows[0].compare(received)
            received.close()
            assert (
                two.caches[0].lookup(TEXT[100 - length : 106]).resumable > 0
            )  # a checkpoint here, of a state from there
            two.caches[0].check()
            one.check_idle()


WIDTHS = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (8, 2), (2, 8), (1, 1)]


@pytest.mark.parametrize("blocks", [(4, 4), (4, 16), (16, 8)])
@pytest.mark.parametrize("ranks", WIDTHS)
def test_widths_pages_and_layouts_differ(ranks: tuple[int, int], blocks: tuple[int, int]) -> None:
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16")
    for layouts in ((None, None), ("trtllm", "vllm-flashinfer"), ("sglang-mha", "trtllm")):
        laid = [schema if layout is None else schema.laid_out(layout) for layout in layouts]
        Written.of_model = {1: 4}
        with sides(laid[0], ranks, laid[1], blocks) as (one, two):
            ticket = one.hand_over(one.compute(TEXT[:50], 41))
            two.receive(ticket)
            one.check_idle()


@pytest.mark.parametrize("blocks", [(8, 16), (16, 8)])
@pytest.mark.parametrize("kind", ["gemma", "mla", "qwen3_next", "deepseek_v4", "mamba", "mixed", "scaled", "fp8_heads"])
def test_every_layer_kind_with_pages_of_another_size(kind: str, blocks: tuple[int, int]) -> None:
    with sides(schemas(kind), blocks=blocks) as (one, two):
        for length in (21, 48):
            two.receive(one.hand_over(one.compute(TEXT[100 - length :], length)))[0].close()
            one.check_idle()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
@pytest.mark.parametrize("kv_format", ["fp8_e5m2", "fp8", "fp8_per_token_head"])
def test_states_and_encoded_heads_are_divided_over_ranks(ranks: tuple[int, int], kv_format: str) -> None:
    config = dict(
        LLAMA, model_type="qwen3_next", head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=4, linear_value_head_dim=4, linear_conv_kernel_dim=4, num_key_value_heads=4,
        layer_types=["linear_attention", "full_attention"], num_experts=4, shared_expert_intermediate_size=32,
        num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    schema = Schema.from_hf_config(config, dtype="bfloat16", kv_format=kv_format)
    with sides(schema, ranks) as (one, two):
        two.receive(one.hand_over(one.compute(TEXT[:50], 41)))
        one.check_idle()


def test_what_is_cached_is_shared_and_what_arrives_is_cached() -> None:
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16")
    with sides(schema, (2, 1), blocks=(8, 4)) as (one, two):
        for sequence in two.compute(TEXT[:30], 30):
            sequence.close()
        two.receive(one.hand_over(one.compute(TEXT[:60], 57)))[0].close()
        assert two.caches[0].open(TEXT[:60]).cached_tokens == 56
        assert two.caches[0].stats().running == 1


def test_committed_chunks_arrive_while_the_prompt_is_still_computed() -> None:
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16")
    with sides(schema, (1, 2), blocks=(8, 4)) as (one, two):
        sequence = one.compute(TEXT[:100], 40)[0]
        first = one.hand_over([sequence], goes_on=True)
        one.rows[0].compute(sequence, TEXT, 80, 8)  # overwrites nothing that the first ticket names
        for part in two.receive(first):
            assert part.length == 40
            part.close()
        last = one.hand_over([sequence], after=40)
        assert len(json.loads(last)["tokens"]) > 0 and json.loads(last)["firsts"] == [5]
        assert [part.length for part in two.receive(last)] == [80, 80]
        one.check_idle()
        with pytest.raises(StaleHandle):
            sequence.commit([1])


def test_a_part_is_no_request_where_its_beginning_is_not_cached() -> None:
    with sides(schemas("full")) as (one, two):
        ticket = one.hand_over(one.compute(TEXT[:50], 40), after=20)
        miss(two, ticket, HandoverMiss, 20, 0)


def miss(two: Side, ticket: str, error: type[KVPagodaError], needed: Any = None, available: Any = None) -> None:
    """Prove that ``ticket`` raises ``error`` with these figures, and changes nothing."""
    before = held(two.caches[0])
    with raises(error, needed=needed, available=available):
        two.receive(ticket)
    assert held(two.caches[0]) == before
    two.caches[0].check()


def held(cache: KVCache) -> Any:
    return replace(cache.stats(), namespaces=())


def test_an_expired_ticket_is_a_miss_and_its_lease_ends_after_the_skew() -> None:
    with sides(schemas("mixed")) as (one, two):
        ticket = one.hand_over(one.compute(TEXT[:50], 40))
        one.clock.now += 30.5
        miss(two, ticket, HandoverMiss, one.clock.now, one.clock.now - 0.5)
        assert one.senders[0].expire() == 0 and one.caches[0].stats().running == 1
        one.clock.now += 1.5
        one.caches[0].open(TEXT[:8])  # frees what ended
        assert one.senders[0].expired == 1 and one.caches[0].stats().running == 1


def test_what_was_freed_under_a_ticket_is_never_read() -> None:
    with sides(schemas("mixed")) as (one, two):
        slow = Clock()
        ticket = one.hand_over(one.compute(TEXT[:50], 40))
        one.clock.now += 33
        one.senders[0].expire()
        two.clock = slow  # a clock that is behind by more than the skew
        miss(two, ticket, HandoverMiss, 0)
        second = one.hand_over(one.compute(TEXT[50:100], 40))  # at the same place
        assert json.loads(second)["ranks"][0]["offset"] == json.loads(ticket)["ranks"][0]["offset"]
        miss(two, ticket, HandoverMiss, 0)


@pytest.mark.parametrize("at", [70, 140, 330, 1400])
def test_a_damaged_byte_is_a_miss(at: int) -> None:
    with sides(schemas("full")) as (one, two):
        ticket = one.hand_over(one.compute(TEXT[:50], 40))
        offset = json.loads(ticket)["ranks"][0]["offset"]
        one.transfers[0].memory[offset + at] ^= 1
        miss(two, ticket, HandoverMiss, 10, ANY)
        one.transfers[0].memory[offset + at] ^= 1
        two.receive(ticket)


def test_forged_replayed_and_foreign_tickets_are_refused() -> None:
    with sides(schemas("full")) as (one, two):
        ticket = one.hand_over(one.compute(TEXT[:50], 40))
        data = json.loads(ticket)
        for forged in (
            dict(data, length=8),
            dict(data, expires=2e9),
            dict(data, signature=""),
            dict(data, weights="00"),
        ):
            miss(two, json.dumps(forged), TicketRefused, "signature")
        errors = {"": "JSONDecodeError", "{": "JSONDecodeError", "[]": "TypeError", "{}": "KeyError"}
        for broken, error in (errors | {"null": "AttributeError"}).items():
            miss(two, broken, TicketRefused, error)
        miss(two, json.dumps(dict(data, kvpagoda_ticket=99)), TicketRefused, 99, 4)
        two.receive(ticket)
        miss(two, ticket, TicketRefused, None, [ANY])
        with raises(HandoverMiss, needed=0):  # another receiver, after the sender saw the receipts
            one.check_idle()
            Side(schemas("full")).caches[0].receive(ticket, two.transfers[0], key=KEY, clock=one.clock)
    with sides(schemas("full"), other=schemas("mla")) as (one, two):
        miss(two, one.hand_over(one.compute(TEXT[:50], 40)), TicketRefused, ANY, ANY)
    with sides(schemas("full")) as (one, two):
        one.caches[0].invalidate(weights="w2")
        miss(two, one.hand_over(one.compute(TEXT[:50], 40)), TicketRefused, b"w2".hex(), b"w".hex())
        two.caches[0].invalidate(weights="w2")
        two.receive(one.hand_over(one.compute(TEXT[:50], 40)))


@pytest.mark.parametrize("upto", [None, 40])
def test_no_number_of_a_ticket_is_taken_that_cannot_be_one(upto: int | None) -> None:
    """A ticket without a key is read as it is: numbers of any size, NaN, truth values and text for numbers are refused before
    anything changes, and so are records that no memory holds."""
    with sides(schemas("mixed")) as (one, two):
        sequence = one.compute(TEXT[:50], 20 if upto else 40)[0]
        ticket = sequence.hand_over(30.0, **({} if upto is None else {"upto": upto})).to_json()
        data, before = json.loads(ticket), two.caches[0].stats()
        for path in numbers(data):
            is_truth, is_time = isinstance(value_at(data, path), bool), path == ("expires",)
            for value in (0, 1, "true", None) if is_truth else NO_NUMBERS if is_time else HOSTILE:
                with pytest.raises(TicketRefused):
                    two.caches[0].receive(changed(data, path, value), two.transfers[0], clock=one.clock)
        assert two.caches[0].stats() == before
        huge = json.loads(ticket)
        huge["groups"][0][3] += 2**44 * huge["groups"][0][4]
        groups = [GroupPlace.from_json(group) for group in huge["groups"]]
        huge["ranks"][0]["nbytes"] = lease_layout(groups, huge["counts"], by_layer=upto is not None)[1]
        miss(two, Ticket.from_json(json.dumps(huge)), TicketRefused, ANY, 67_213_632)
        two.caches[0].check()


@pytest.mark.parametrize("upto", [None, 40])
def test_tickets_of_ranks_are_joined_in_any_order_and_each_once(upto: int | None) -> None:
    """Workers answer in any order. A ticket says whose heads its lease has, so none is taken for those of another rank."""
    given = {} if upto is None else {"upto": upto}
    whole = Schema.from_hf_config(LLAMA)
    with sides(whole, ranks=(2, 1)) as (one, two):
        tickets = [sequence.hand_over(30.0, **given) for sequence in one.compute(TEXT[:50], 40)]
        for sender, ticket in zip(one.senders, tickets):
            if upto:
                sender.complete(ticket)
        tickets = [Ticket.from_json(ticket.to_json(), KEY) for ticket in tickets]
        for some, ranks in (
            (tickets[:1], [0]), (tickets[1:], [1]), ([tickets[0]] * 2, [0, 0]), ([*tickets, tickets[1]], [0, 1, 1]),
        ):  # fmt: skip
            with raises(TicketRefused, needed=[0, 1], available=ranks) as caught:
                Ticket.joined(some)
            assert (caught.value.needed, caught.value.available) == ([0, 1], ranks)
        other = replace(tickets[1], ranks=(replace(tickets[1].ranks[0], num_ranks=3),))
        with raises(TicketRefused, needed=[0, 1, 2], available=[0, 1]):
            Ticket.joined([tickets[0], other])
        for ranks in (tickets[0].ranks, tickets[1].ranks, (*tickets[1].ranks, *tickets[0].ranks)):
            miss(two, replace(tickets[0], ranks=ranks).to_json(), TicketRefused, [0, 1], [part.rank for part in ranks])
        relabelled = tuple(replace(ticket.ranks[0], rank=1 - ticket.ranks[0].rank) for ticket in reversed(tickets))
        miss(two, replace(tickets[0], ranks=relabelled).to_json(), HandoverMiss, 0)
        two.receive(Ticket.joined(tickets[::-1]).to_json())  # compares the rows of all heads


def test_more_ranks_than_have_receipts_hand_nothing_over() -> None:
    cache = cache_of(schemas("full"), 4, 64, 65)
    with raises(BadInput, field="num_ranks of a hand-over", needed=65, available=1):
        cache.sender(SharedMemory("1MiB"))
    with raises(BadInput, field="num_ranks of a hand-over", needed=65, available=1):
        cache.receive("{}", SharedMemory())


def test_every_number_in_an_unsigned_ticket_may_be_wrong() -> None:
    """Nothing but typed errors, and nothing held: also if a trusted ticket is damaged."""
    rng = np.random.default_rng(0)
    with sides(schemas("mixed")) as (one, two):
        data = json.loads(one.hand_over(one.compute(TEXT[:50], 40)))
        paths = [*numbers(data)]
        for path in [paths[i] for i in rng.permutation(len(paths))[:250]]:
            damaged = changed(data, path, int(rng.choice([-1, 0, 1, 2**40, 7])))
            before = two.caches[0].stats().running
            with suppress(BadInput, HandoverMiss, RetryLater):
                two.caches[0].receive(damaged, two.transfers[0], clock=one.clock).close()
            assert two.caches[0].stats().running == before
            two.caches[0]._receiver = None  # forgets what it took
        two.caches[0].check()


def value_at(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def changed(data: Any, path: tuple[Any, ...], value: Any) -> str:
    """Return ``data`` as JSON, with ``value`` at ``path``."""
    copied = json.loads(json.dumps(data))
    value_at(copied, path[:-1])[path[-1]] = value
    return json.dumps(copied)


def numbers(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every number in ``data``."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(value, int | float):
            yield (*path, key)
        yield from numbers(value, (*path, key))


def test_a_request_that_is_taken_back_runs_on() -> None:
    with sides(schemas("mixed")) as (one, two):
        sequence = one.compute(TEXT[:60], 40)[0]
        ticket = sequence.hand_over(30.0)
        with pytest.raises(StaleHandle):
            sequence.extend(1)
        one.senders[0].take_back(ticket)
        one.rows[0].compute(sequence, TEXT[:60], 60, 3)
        one.rows[0].compare(sequence)
        miss(two, ticket.to_json(), HandoverMiss, 0)
        with raises(StaleHandle, needed="lease"):
            one.senders[0].take_back(ticket)
        again = sequence.hand_over(30.0)
        one.senders[0].give_up(again)
        one.check_idle()


def test_without_room_nothing_is_taken_and_the_ticket_stays_good() -> None:
    with sides(schemas("full"), max_requests=1) as (one, two):
        ticket = one.hand_over(one.compute(TEXT[:50], 40))
        with pytest.raises(RetryLater):
            one.caches[0].open(TEXT[:4])  # the lease has the slot
        other = two.caches[0].open(TEXT[:4])
        miss(two, ticket, RetryLater, 1, 0)
        other.close()
        two.receive(ticket)
    with sides(schemas("full")) as (one, two):
        one.transfers[0].memory[:] = 0
        sequence = one.compute(TEXT[:50], 40)[0]
        one.senders[0]._exported._free = [(1 << 18, (1 << 18) + 64)]
        with raises(OutOfBlocks, needed=1600, available=64):
            sequence.hand_over(1.0)
        sequence.commit([1]) if sequence.capacity > 40 else sequence.extend(1)


def test_calls_without_a_sender_or_with_nothing_to_hand_over_are_refused() -> None:
    cache = cache_of(schemas("full"), 4)
    sequence = cache.open([1, 2, 3])
    with raises(BadInput, needed="sender"):
        sequence.hand_over(1.0)
    sender = cache.sender(SharedMemory("1MiB"))
    with raises(BadInput, available=0):
        sequence.hand_over(1.0)
    with raises(BadInput, needed="a sender"):
        cache.sender(SharedMemory("1MiB"))
    sequence.commit([1, 2, 3])
    with cache.fence([sequence]), pytest.raises(RetryLater):
        sequence.hand_over(1.0)
    sequence.hand_over(1.0)
    sender.close()
    sender.close()
    assert cache.stats().running == 0
    cache.check()


def test_a_reset_or_a_closed_cache_ends_leases() -> None:
    with sides(schemas("mixed")) as (one, _):
        ticket = one.compute(TEXT[:50], 40)[0].hand_over(30.0)
        with pytest.raises(RetryLater):
            one.caches[0].reset()
        one.senders[0].give_up(ticket)
        one.caches[0].reset()
        one.compute(TEXT[:50], 40)[0].hand_over(30.0)
        one.caches[0].close()
        one.senders[0].close()
        assert one.caches[0].stats().running == 0


def test_images_go_along() -> None:
    with sides(schemas("full")) as (one, two):
        media = {5: b"a" * 16, 45: b"b" * 16}
        sequence = one.caches[0].open(TEXT[:50], media=media)
        one.rows[0].compute(sequence, TEXT[:50], 40, 4)
        two.receive(one.hand_over([sequence]))[0].close()
        assert two.caches[0].lookup(TEXT[:50]).cached == 5
        assert two.caches[0].lookup(TEXT[:50], media=media).cached == 40


def test_a_window_needs_room_for_the_window_alone() -> None:
    """Beside its length, which is more than the group has blocks for."""
    with sides(schemas("sliding"), num_blocks=20, max_requests=2) as (one, two):
        text = TEXT[:160]
        assert two.receive(one.hand_over(one.compute(text, 151)))[0].length == 151
        one.check_idle()


def test_a_request_whose_namespace_was_invalidated_ends_where_it_is() -> None:
    """What it has of its text is neither what the namespace meant before nor what it means now."""
    with sides(schemas("full")) as (one, two):
        running, layered = (
            one.caches[0].open(TEXT[:50], "a", capacity=0),
            one.caches[0].open(TEXT[100:150], "a", capacity=0),
        )
        one.rows[0].compute(running, TEXT[:50], 20, 4)
        ticket = layered.hand_over(30.0, upto=40)
        one.caches[0].invalidate("b")
        one.caches[0].invalidate("a")
        for sequence, text in ((running, TEXT[:50]), (layered, TEXT[100:150])):
            one.rows[0].compute(sequence, text, 40, 4)
        with raises(BadInput, needed=40):
            running.hand_over(30.0)
        with raises(BadInput, needed=40):
            one.senders[0].complete(ticket)
        running.close()
        again = one.caches[0].open(TEXT[:50], "a", capacity=0)
        assert again.length == 0
        one.rows[0].compute(again, TEXT[:50], 40, 4)
        two.receive(one.hand_over([again]), namespace="a")


def test_what_publishes_nothing_here_publishes_nothing_there() -> None:
    with sides(schemas("mixed")) as (one, two):
        for publish in (False, True):
            sequence = one.caches[0].open(TEXT[:50], capacity=0, publish=publish)
            one.rows[0].compute(sequence, TEXT[:50], 40, 3)
            received = two.receive(one.hand_over([sequence]))[0]
            two.rows[0].compute(received, TEXT[:50], 50, 3)
            two.rows[0].compare(received)
            received.close()
            assert bool(two.caches[0].lookup(TEXT[:60]).cached) == publish
            one.check_idle()


@pytest.mark.parametrize("order", ["block", "layer"])
def test_records_are_cut_in_place_or_beside(order: str) -> None:
    """Into free blocks that follow each other, where records are whole there; else by way of other memory."""
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16")
    with sides(schema, (2, 1), blocks=(4, 8), order=order) as (one, two):
        memory = two.caches[0].core.memory
        run = memory.run_of(0, np.arange(3, 6))
        assert (run is not None) == (order == "block") and memory.run_of(0, np.array([3, 5])) is None
        apart = [two.caches[0].open(TEXT[100 + i : 108 + i]) for i in range(3)]
        apart[1].close()  # the free blocks do not follow each other
        two.receive(one.hand_over(one.compute(TEXT[:50], 41)))
        if run is not None:
            run[:] = 7
            table = np.zeros((3, memory.record_nbytes(0)), np.uint8)
            memory.to_host(0, np.arange(3, 6), table, range(3))
            assert (table == 7).all()
