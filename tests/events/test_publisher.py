"""Over sockets: what a subscriber hears, what it asks for again, and what it does when the publisher's process is killed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kvpagoda import KVCache
from kvpagoda.errors import BadInput
from kvpagoda.schema import Attention, Layer, Schema

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

import zmq
from traffic import Traffic

from kvpagoda.events import BlockStored, Encoding, EventBatch, EventLog, EventStream, Follower, Publisher, Subscriber
from kvpagoda.events.wire import decode
from raises import raises

LOCAL = "tcp://127.0.0.1:*"
FULL = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
PATIENCE = 20.0


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A publisher of its own, killed at the end."""
    folder = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(folder / "publishing.py"), *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def ask(child: subprocess.Popen[str]) -> Any:
    """What the process says of some texts after it has worked on."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def hear(subscriber: Subscriber, expected: Any) -> list[Any]:
    """Poll until the follower says what is ``expected``, or patience ends; what it says otherwise."""
    end = monotonic() + PATIENCE
    while True:
        subscriber.poll(0.02)
        said = [[text, *subscriber.follower.resumable(text)] for text, *_ in expected]
        if said == expected or monotonic() > end:
            return said


@pytest.mark.parametrize("schema", ["gemma", "qwen3_next"])
def test_a_subscriber_survives_the_publisher(schema: str) -> None:
    with process(LOCAL, LOCAL, schema, "1") as child:
        assert child.stdout is not None
        endpoints = json.loads(child.stdout.readline())
        first = ask(child)
        with Subscriber(*endpoints, secret=b"s") as subscriber:  # late: what was said before it asks for
            assert hear(subscriber, first) == first and any(resumable for _, _, resumable in first)
            second = ask(child)
            assert hear(subscriber, second) == second
            child.kill()
            child.wait()
            with process(*endpoints, schema, "2") as other:
                assert other.stdout is not None
                other.stdout.readline()
                third = ask(other)
                assert hear(subscriber, third) == third != second


def test_what_is_missed_is_asked_for() -> None:
    """Of 200 batches, of which ten can be had again, a subscriber that slept hears the rest by a snapshot."""
    traffic = Traffic("gemma", 3)
    with (
        Publisher(traffic.log, LOCAL, LOCAL, keep=10, interval=0.001) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint, secret=b"s") as subscriber,
    ):
        texts = [traffic.text()[0] for _ in range(30)]
        for number in range(200):
            traffic.step()
            if number % 20 == 0:
                assert publisher.flush()
            if number == 50:
                subscriber._sub.unsubscribe(b"")
            if number == 150:
                subscriber._sub.subscribe(b"")
        assert publisher.flush()
        expected = []
        for text in texts:
            found = traffic.cache.lookup(text)
            expected.append([text, found.cached, found.resumable])
        end = monotonic() + PATIENCE
        while (said := [[text, *subscriber.follower.resumable(text)] for text in texts]) and monotonic() < end:
            subscriber.poll(0.02)
            if all(one[1:] == other[1:] for one, other in zip(said, expected)):
                break
        assert [one[1:] for one in said] == [one[1:] for one in expected]


@pytest.mark.parametrize("envelope", [[b""], []], ids=["empty frame", "none"])
@pytest.mark.parametrize(("encoding", "topic"), [("map", [b"kv-events"]), ("array", [])])
def test_a_replay_has_the_frames_of_vllm(encoding: str, topic: list[bytes], envelope: list[bytes]) -> None:
    """Its subscribers ask with an empty frame and 8 bytes. Replies have the topic since events are maps. Who asks without the
    empty frame, whom vLLM does not answer, gets replies without it."""
    traffic = Traffic("mixed", 4)
    settings: dict[str, Any] = dict(topic="kv-events", rank=3, encoding=encoding)
    with Publisher(traffic.log, LOCAL, LOCAL, **settings) as publisher, zmq.Context() as context:
        for _ in range(120):
            traffic.step()
        assert publisher.flush()
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.replay_endpoint)
            for wrong in ([b"no number"], [], [b"", bytes(8)], [bytes(8), bytes(8)]):
                dealer.send_multipart([*envelope, *wrong, b""])
            dealer.send_multipart([*envelope, (0).to_bytes(8, "big")])
            batches = list[EventBatch]()
            while (found := dealer.recv_multipart())[-1]:
                assert found[:-2] == envelope + topic and int.from_bytes(found[-2], "big") == len(batches)
                batches.append(decode(found[-1]))
            assert found == envelope + [b""] * len(topic) + [b"\xff" * 8, b""]
    assert {batch.data_parallel_rank for batch in batches} == {3}
    kinds = {event.kv_cache_spec_kind for batch in batches for event in batch.events if isinstance(event, BlockStored)}
    assert kinds == {"full_attention", "mamba", "sliding_window", "chunked_local_attention"}


def test_messages_that_are_none_are_told_and_the_others_taken() -> None:
    traffic = Traffic("gemma", 1)
    stream = EventStream(traffic.log)
    for _ in range(40):
        traffic.step()
    stream.drain()
    (first, opening), *rest = stream.replay(0)
    good = [[b"", number.to_bytes(8, "big"), payload] for number, payload in [(first, opening), *rest]]
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, context.socket(zmq.ROUTER) as router:
        ends = [f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (pub, router)]
        with Subscriber(ends[0], ends[1], secret=b"s") as subscriber:
            assert router.poll(PATIENCE * 1000) and router.recv_multipart()[1:] == [b"", bytes(8)]
            end = monotonic() + PATIENCE
            while subscriber.heard_at is None and monotonic() < end:  # until it is connected
                pub.send_multipart([b"", bytes(8), stream.alive()[1]])
                subscriber.poll(0.02)
            for wrong in ([b"alone"], [b"", b"123", opening], [b"", b"", b""], [b"", bytes([127] * 8), b"nonsense"]):
                pub.send_multipart(wrong)
                for message in good:
                    pub.send_multipart(message)
                refused = 0
                while not refused and monotonic() < end:
                    try:
                        subscriber.poll(0.02)
                    except BadInput as error:
                        refused += "got frames of" in str(error) or "no batch of KV events" in str(error)
                assert refused
            while subscriber.follower._next <= stream.last and monotonic() < end:
                subscriber.poll(0.02)
            assert subscriber.follower.num_blocks == len(stream.index.blocks) > 0


def test_what_cannot_be_had_is_asked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpagoda.events.publisher.PATIENCE", 0.05)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        with Subscriber("tcp://127.0.0.1:1", replay) as subscriber:
            asked, ends = list[float](), monotonic() + 1.5
            while monotonic() < ends:
                if router.poll(1):
                    client, *_ = router.recv_multipart()
                    asked.append(monotonic())
                    router.send_multipart([client, b"", b"", (1).to_bytes(8, "big"), b"nonsense"])
                    router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
                with suppress(BadInput):
                    subscriber.poll()
            assert 2 <= len(asked) <= 7  # after 0.05, 0.1, 0.2, 0.4 and 0.8 seconds
            assert subscriber.follower.wanted == 0


def test_only_the_loopback_is_bound_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[tuple[str, bool]]()

    def open_another(socket: Any, endpoint: str, is_bound: bool) -> None:
        opened.append((endpoint, is_bound))
        socket.bind(LOCAL)

    monkeypatch.setattr("kvpagoda.events.publisher._open", open_another)
    with Publisher(Traffic("full", 1).log):
        assert opened == [("tcp://127.0.0.1:5557", True), ("tcp://127.0.0.1:5558", True)]
    for endpoint, is_bound in (
        ("tcp://*:1", True), ("tcp://[::]:1", True), ("tcp://[::1]:1", True), ("tcp://0.0.0.0:1", True), ("ipc://a", True),
        ("inproc://a", True), ("tcp://127.0.0.1:1", False), ("tcp://router:1", False),
    ):  # fmt: skip
        with Publisher(Traffic("full", 1).log, endpoint, None):
            assert opened.pop() == (endpoint, is_bound)


def test_addresses_of_ipv6() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.ipv6 = True
        try:
            socket.bind("tcp://[::1]:*")
        except zmq.ZMQError as error:
            pytest.skip(f"no IPv6: {error}")
    traffic = Traffic("gemma", 1)
    with (
        Publisher(traffic.log, "tcp://[::1]:*", "tcp://[::1]:*") as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint, secret=b"s") as subscriber,
    ):
        assert publisher.endpoint.startswith("tcp://[::1]:")
        end = monotonic() + PATIENCE
        while not subscriber.follower.num_blocks and monotonic() < end:
            traffic.step()
            subscriber.poll(0.02)
        assert subscriber.follower.num_blocks


def test_a_follower_needs_our_fields() -> None:
    traffic = Traffic("full", 1)
    stream = EventStream(traffic.log, encoding=Encoding(own_fields=False))
    for _ in range(30):
        traffic.step()
    stream.drain()
    for number, payload in (*stream.replay(0), stream.alive()):
        with raises(BadInput, needed="publisher"):
            Follower().feed(number, payload)
    with raises(BadInput, needed="maps", available=("map", "array")):
        EventStream(traffic.log, encoding="maps")
    with raises(BadInput, needed="text", available=("int", "bytes")):
        Encoding(names="text")
    with raises(BadInput, field="the rank", needed=-1, available=0):
        EventStream(traffic.log, rank=-1)


def test_bad_endpoints_are_told() -> None:
    traffic = Traffic("full", 1)
    with raises(BadInput, needed="nowhere"):
        Publisher(traffic.log, "nowhere", None)
    with raises(BadInput, needed="tcp://*:x"):
        Publisher(traffic.log, LOCAL, "tcp://*:x")
    with raises(BadInput, needed="nowhere"):
        Subscriber("nowhere", "tcp://127.0.0.1:1")
    with raises(BadInput, needed="cache"):
        Publisher(EventLog(), LOCAL)
    with Publisher(traffic.log, LOCAL, None) as publisher:
        assert publisher.flush() and publisher.replay_endpoint == ""
    publisher.close()


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def test_an_address_without_a_star_is_bound_if_asked_and_the_log_says_which(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic("gemma", 1)
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with caplog.at_level(logging.INFO, "kvpagoda.events"):
        with (
            Publisher(traffic.log, endpoint, replay, bind=True) as publisher,
            Subscriber(endpoint, replay) as subscriber,
        ):
            for _ in range(40):
                traffic.step()
            publisher.flush()
            end = monotonic() + PATIENCE
            while not subscriber.follower.num_blocks and monotonic() < end:
                subscriber.poll(0.02)
            assert subscriber.follower.num_blocks
        with Publisher(Traffic("gemma", 1).log, endpoint, None):
            pass
    told = [record.getMessage() for record in caplog.records if record.name == "kvpagoda.events.publisher"]
    assert told == [f"events: bound to {endpoint}, replay bound to {replay}", f"events: connected to {endpoint}"]


@pytest.mark.parametrize("place", ["kvpagoda.events.stream.EventStream._add", "kvpagoda.events.wire.Encoding.encode"])
def test_what_memory_lacked_for_in_the_publishers_thread_is_told_with_the_next_change(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after more changes than one: what comes between has its parents among what was lost."""
    log = EventLog()
    cache = KVCache(FULL, num_blocks=400, block_size=4, device="none", events=log)
    with (
        Publisher(log, LOCAL, LOCAL) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):

        def leave(text: list[int]) -> None:
            with cache.open(text) as sequence:
                sequence.commit(text[sequence.length :])

        def told(text: list[int]) -> bool:
            wanted = [[[*text, 99], len(text), len(text)]]
            return publisher.flush() and hear(subscriber, wanted) == wanted

        leave([*range(8)])
        assert told([*range(8)])
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *_: (_ for _ in ()).throw(MemoryError))
            leave([*range(16)])
            assert not publisher.flush() and publisher._thread.is_alive()
        assert "a batch is lost" in caplog.text
        leave([*range(24)])
        assert told([*range(24)])
        leave([*range(50, 58)])
        assert told([*range(50, 58)]) and log.num_restarts
    cache.close()
