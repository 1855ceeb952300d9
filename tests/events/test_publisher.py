"""Over sockets: what a subscriber hears, what it asks for again, and what it does when the publisher's process is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kvpagoda.errors import BadInput

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

import msgspec
import zmq
from traffic import Traffic

from kvpagoda.events import EventLog, Publisher, Subscriber

LOCAL = "tcp://127.0.0.1:*"
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
            again = [f"tcp://*:{endpoint.rpartition(':')[2]}" for endpoint in endpoints]
            with process(*again, schema, "2") as other:
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


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def test_a_decoder_with_the_fields_of_vllm_reads_every_message() -> None:
    """The structs above are its fields, in its order, with what it must have; its subscriber asks for 8 bytes."""
    traffic, decoder = Traffic("mixed", 4), msgspec.msgpack.Decoder(KVEventBatch)
    with Publisher(traffic.log, LOCAL, LOCAL, topic="kv-events", rank=3) as publisher, zmq.Context() as context:
        for _ in range(120):
            traffic.step()
        assert publisher.flush()
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.replay_endpoint)
            dealer.send_multipart([b"", b"no number"])
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            batches = []
            while (frames := dealer.recv_multipart())[2]:
                assert int.from_bytes(frames[1], "big") == len(batches)
                batches.append(decoder.decode(frames[2]))
            assert frames[1] == b"\xff" * 8
    kinds = set()
    for batch in batches:
        assert batch.data_parallel_rank == 3
        for event in batch.events:
            kinds.add((type(event).__name__, getattr(event, "kv_cache_spec_kind", None)))
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes) and event.medium == "GPU"
                window = event.kv_cache_spec_sliding_window
                assert (window is not None) == (event.kv_cache_spec_kind == "sliding_window")
    assert kinds == {
        ("AllBlocksCleared", None), ("BlockRemoved", None), ("BlockStored", "full_attention"), ("BlockStored", "mamba"),
        ("BlockStored", "sliding_window"), ("BlockStored", "chunked_local_attention"),
    }  # fmt: skip


def test_bad_endpoints_are_told() -> None:
    traffic = Traffic("full", 1)
    with pytest.raises(BadInput, match=r"cannot connect to 'nowhere'"):
        Publisher(traffic.log, "nowhere", None)
    with pytest.raises(BadInput, match=r"cannot bind 'tcp://\*:x'"):
        Publisher(traffic.log, LOCAL, "tcp://*:x")
    with pytest.raises(BadInput, match="cannot connect to 'nowhere'"):
        Subscriber("nowhere", "tcp://127.0.0.1:1")
    with pytest.raises(BadInput, match="this log has no cache yet"):
        Publisher(EventLog(), LOCAL)
    with Publisher(traffic.log, LOCAL, None) as publisher:
        assert publisher.flush() and publisher.replay_endpoint == ""
    publisher.close()
