"""A follower rebuilds from events what ``lookup`` says, with messages lost and processes restarted."""

from __future__ import annotations

from typing import Any

import pytest

from random_driver.schemas import SCHEMA_NAMES

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

import msgspec
from following import ENCODINGS, Line
from traffic import Traffic

from kvpagoda import KVCache, Schema
from kvpagoda.errors import BadInput
from kvpagoda.events import Encoding, EventLog, EventStream, Follower, wire
from kvpagoda.events.wire import Name
from raises import raises

STEPS, MANY_EVENTS = 120, 1_000_000


def follow(schema: str, seed: int, num_steps: int, *, loss: float, log_capacity: int = 65_536) -> Line:
    """So many operations; the follower is compared with the cache after each of them, or, where messages are lost, each time
    that it has asked for them."""
    traffic = Traffic(schema, seed, log_capacity)
    line = Line(traffic.cache, traffic.log, traffic.random, loss, keep=40, encoding=seed)
    line.follower._secret = b"s"
    texts, num_restarts = [(traffic.text(), None)], 0
    for step in range(num_steps):
        traffic.step()
        texts = [*texts[-5:], (traffic.text(), traffic.namespace())]
        if loss and traffic.random.random() < 0.01:
            line.restart_follower()
            line.follower._secret = b"s"
        if loss and traffic.random.random() < 0.01:
            line.restart_publisher()
        if loss and traffic.random.random() < 0.005:
            line.num_events += line.stream.num_events
            num_restarts += traffic.log.num_restarts
            traffic.start()
            line.follow(traffic.cache, traffic.log)
        if traffic.random.random() < 0.7:
            line.send()
        if not loss:
            line.send()
        if not loss or traffic.random.random() < 0.3:
            line.catch_up()
            texts += [
                ((one._request.tokens[: one.length].copy(), dict(one_media(traffic, one))), None)
                for one in traffic.running
            ]
            for (tokens, media), namespace in texts:
                line.compare(tokens, namespace, media)
            texts = texts[:6]
        if step % 50 == 0:
            line.catch_up()
            line.check()
    line.num_events += line.stream.num_events
    line.num_restarts = num_restarts + traffic.log.num_restarts
    traffic.cache.check()
    return line


def one_media(traffic: Traffic, sequence: object) -> dict[int, bytes]:
    """The media of a running request."""
    request = sequence._request  # type: ignore[attr-defined]
    return {
        at: traffic.cache.core.media.digest(one) for at, one in request.media_ids.items() if at < request.own_length
    }


@pytest.mark.parametrize(
    "media",
    [
        {-1: b"z" * 16}, {-3: b"m" * 16}, {41: b"m" * 16}, {1: b"z"}, {1: "z" * 16}, {1.0: b"m" * 16}, {True: b"m" * 16},
        {"1": b"m" * 16}, {2**70: b"m" * 16}, [b"m" * 16], {1: None}, b"m" * 16,
    ],
    ids=repr,
)  # fmt: skip
def test_media_are_refused_as_lookup_refuses_them(media: Any) -> None:
    traffic = Traffic("gemma", 1)
    with traffic.cache.open(range(40), media={38: b"m" * 16}) as sequence:
        for _ in range(5):
            sequence.extend(8)
            sequence.commit(range(sequence.length, sequence.length + 8))
    line = Line(traffic.cache, traffic.log, traffic.random)
    line.follower._secret = b"s"
    line.catch_up()
    for other in (None, {}, {38: b"m" * 16}, {38: b"z" * 16}):
        line.compare(range(41), media=other)
    with pytest.raises(BadInput) as refused:
        traffic.cache.lookup(range(41), media=[media] if isinstance(media, list) else media)
    for follower in (line.follower, Follower()):
        with pytest.raises(BadInput) as told:
            follower.resumable(range(41), media=media)
        assert isinstance(media, list) or str(told.value) == str(refused.value)


SEEDS = {"fp8_heads": 2, "gemma": 2}
"""Where the first seed has memory for all windows."""
NEVER_CUT = ("full", "mla", "drafted", "drafted_full")
"""Schemas whose hits are not cut short here: without windows, or with a draft whose blocks are evicted before these."""


@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_a_follower_says_what_lookup_says(schema: str) -> None:
    line = follow(schema, SEEDS.get(schema, 1), STEPS, loss=0.0)
    assert line.num_compared > STEPS and line.num_events > 50 and line.num_replays == 1
    assert line.num_hits > STEPS // 4 and (schema in NEVER_CUT or line.num_cut > 0), vars(line)


@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_it_finds_again_what_was_lost(schema: str) -> None:
    line = follow(schema, 2, STEPS, loss=0.2)
    assert line.num_compared > STEPS and line.num_replays > 5


@pytest.mark.parametrize("schema", ["full", "gemma", "qwen3_next", "mamba"])
def test_a_log_that_is_always_full_loses_nothing(schema: str) -> None:
    line = follow(schema, 3, 3 * STEPS, loss=0.1, log_capacity=1)
    assert line.num_restarts > 5


@pytest.mark.parametrize("encoding", range(len(ENCODINGS)))
def test_it_reads_every_encoding(encoding: int) -> None:
    for schema in ("gemma", "mixed"):
        line = follow(schema, 4 + encoding, STEPS, loss=0.0)
        assert line.stream.encoding == ENCODINGS[(4 + encoding) % 4] and line.num_hits > STEPS // 4


def test_blocks_of_one_cache_never_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of seven bits, of which many would be the same: the publisher gives each block another."""
    monkeypatch.setattr(wire, "NAME_BITS", 7)
    taken = set[Name]()
    for digest in (bytes([255, 255]) + bytes(30), bytes([254, 200]) + bytes(30)):
        taken.add(Encoding().name(digest, taken))
    assert taken == {127, 0}
    moved = 0
    for schema in ("full", "gemma"):
        line = follow(schema, 8, 3 * STEPS, loss=0.0)  # a block that was moved has another name after a restart
        assert line.num_hits > 20
        blocks = line.stream.index.blocks.values()
        moved += sum(block.name != block.digest[0] >> 1 for block in blocks)
    assert moved > 0


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_a_million_events(schema: str) -> None:
    """An eighth of them for each schema."""
    num_events = num_compared = 0
    seed = 10
    while num_events < MANY_EVENTS // len(SCHEMA_NAMES):
        line = follow(
            schema, seed, 2000, loss=(0.0, 0.1, 0.3)[seed % 3], log_capacity=(65_536, 65_536, 65_536, 3)[seed % 4]
        )
        num_events, num_compared, seed = num_events + line.num_events, num_compared + line.num_compared, seed + 1
    print(f"{schema}: {num_events:,} events, {num_compared:,} look-ups compared, {seed - 10} runs")


def test_a_refused_batch_is_asked_for_though_a_heartbeat_came_before() -> None:
    """It waits for the one before it, and a heartbeat of before says that there is none: it is wanted all the same."""
    log, follower = EventLog(), Follower()
    llama = dict(model_type="llama", num_hidden_layers=1, hidden_size=64, num_attention_heads=8)
    cache = KVCache(Schema.from_hf_config(llama), "64KiB", device="none", block_size=16, events=log)
    stream = EventStream(log)
    for message in stream.replay(0):
        follower.feed(*message)

    def serve(first: int) -> tuple[int, bytes]:
        with cache.open(range(first, first + 40)) as sequence:
            sequence.commit(range(first, first + 40))
        message = stream.drain()
        assert message is not None
        return message

    follower.feed(*serve(0))
    alive = stream.alive()
    second, third = serve(100), serve(200)
    batch = msgspec.msgpack.decode(third[1])
    batch[1][-1]["parent_block_hash"] = 5
    follower.feed(third[0], msgspec.msgpack.encode(batch))
    follower.feed(*alive)
    with raises(BadInput, needed=3, available=3):
        follower.feed(*second)
    assert follower.wanted == third[0]
    follower.feed(*third)
    assert follower.wanted is None and follower.resumable(range(200, 240)).cached == 39
