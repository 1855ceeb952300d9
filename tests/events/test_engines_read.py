"""Structs of the installed vLLM and SGLang read what is sent: taken from the files of these packages, never copied here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

import msgspec
from consumers import classes, installed, package
from traffic import Traffic

from kvpagoda import Namespace
from kvpagoda.events import BlockRemoved, BlockStored, Encoding, EventStream
from kvpagoda.events.wire import kind_of
from kvpagoda.schema import Attention, Growth, Latent
from random_driver.schemas import SCHEMA_NAMES

VLLM, SGLANG = "vllm/distributed/kv_events.py", "sglang/srt/disaggregation/kv_events.py"
OLD_VLLM = "vllm-0.23/vllm/distributed/kv_events.py"
STEPS = 100


def messages(schema: str, encoding: str | Encoding) -> list[bytes]:
    """What a stream says of random traffic, from the first message on: batches, a snapshot and signs of life."""
    traffic = Traffic(schema, 4)
    stream = EventStream(traffic.log, keep=2, encoding=encoding, rank=3)
    sent = [stream.replay(0)[0]]
    with traffic.cache.open(range(20), Namespace("salt", adapter="an adapter"), capacity=0) as sequence:
        while sequence.length < sequence.prompt_length:
            traffic.compute(sequence)
    for _ in range(STEPS):
        traffic.step()
        sent += [message] if (message := stream.drain()) is not None else []
    return [payload for _, payload in (*sent, stream.alive(), *stream.replay(0))]


def read(payloads: list[bytes], structs: dict[str, Any]) -> list[Any]:
    """The events that the structs of an engine read."""
    decoder = msgspec.msgpack.Decoder(structs["KVEventBatch"])
    return [event for payload in payloads for event in decoder.decode(payload).events]


@pytest.mark.parametrize("names", ["int", "bytes"])
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_vllm_reads_every_message(schema: str, names: str) -> None:
    structs = classes(package(VLLM), "Struct")
    kinds = {one.value for one in classes(package("vllm/v1/kv_cache_interface.py"), "Enum")["KVCacheSpecKind"]}
    events = read(messages(schema, Encoding(names=names)), structs)
    stored = [event for event in events if isinstance(event, structs["BlockStored"])]
    assert len(stored) > 10 and any(isinstance(event, structs["BlockRemoved"]) for event in events)
    assert {event.kv_cache_spec_kind for event in stored} <= {None, *kinds - {"unknown"}}
    for event in stored:
        assert len(event.token_ids) <= event.block_size * len(event.block_hashes) and event.medium == "GPU"
        assert (event.locality, event.ownership, event.session_id) == (None, None, None)
        assert (event.kv_cache_spec_sliding_window is None) == ("sliding" not in (event.kv_cache_spec_kind or ""))
        assert all(isinstance(name, int if names == "int" else bytes) for name in event.block_hashes)
    assert any(event.lora_name == "an adapter" for event in stored)


def test_our_fields_follow_those_of_vllm() -> None:
    """Each of its fields is one of ours, in its order, and has a default only where its own has one."""
    structs = classes(package(VLLM), "Struct")
    for ours in (BlockStored, BlockRemoved):
        theirs = structs[ours.__name__]
        count = len(theirs.__struct_fields__)
        assert ours.__struct_fields__[:count] == theirs.__struct_fields__
        assert len(ours.__struct_defaults__) == len(ours.__struct_fields__) - count + len(theirs.__struct_defaults__)


@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_sglang_reads_every_message(schema: str) -> None:
    structs = classes(package(SGLANG), "Struct", "Enum")
    events = read(messages(schema, "map"), structs)
    stored = [event for event in events if isinstance(event, structs["BlockStored"])]
    assert len(stored) > 10 and any(event.lora_name == "an adapter" and event.cache_salt for event in stored)


@pytest.mark.parametrize("own_fields", [True, False])
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_older_vllm_reads_arrays(schema: str, own_fields: bool) -> None:
    structs = classes(installed(OLD_VLLM), "Struct")
    payloads = messages(schema, Encoding("array", own_fields=own_fields))
    events = read(payloads, structs)
    stored = [event for event in events if isinstance(event, structs["BlockStored"])]
    assert len(stored) > 10 and any(event.kv_cache_spec_kind for event in stored)
    widths = {(tag, len(fields)) for payload in payloads for tag, *fields in msgspec.msgpack.decode(payload)[1]}
    if not own_fields:  # exactly its fields, in its order
        assert widths <= {
            (of, len(structs[of].__struct_fields__)) for of in ("BlockStored", "BlockRemoved", "AllBlocksCleared")
        }


def test_neither_form_is_read_where_the_other_is_expected() -> None:
    """So these tests would fail if the forms were confused."""
    new, old = classes(package(VLLM), "Struct"), classes(installed(OLD_VLLM), "Struct")
    for structs, encoding in ((new, "array"), (old, "map")):
        with pytest.raises(msgspec.ValidationError):
            read(messages("full", encoding), structs)


def test_kinds_have_the_names_of_vllm() -> None:
    kinds = classes(package("vllm/v1/kv_cache_interface.py"), "Enum")["KVCacheSpecKind"]
    window = Growth(window=8)
    attention = [rows.name for rows in Attention(1, 4, 4, "float32").block_rows()]
    sinks = [rows.name for rows in Attention(1, 4, 4, "float32", window, num_sinks=2).state_rows()]
    latent = [rows.name for rows in Latent(8, 4, "float32").block_rows()]
    assert kind_of(Growth(), attention) == kinds.FULL_ATTENTION.value
    assert kind_of(Growth(), latent) == kinds.MLA_ATTENTION.value
    assert kind_of(Growth(), attention + latent) == kinds.FULL_ATTENTION.value
    assert kind_of(window, attention) == kinds.SLIDING_WINDOW.value
    assert kind_of(window, latent) == kinds.SLIDING_WINDOW_MLA.value
    assert kind_of(Growth(chunk=8), attention) == kinds.CHUNKED_LOCAL_ATTENTION.value
    assert kind_of(Growth(is_state=True), ["conv", *sinks]) == kinds.MAMBA.value
    assert kind_of(Growth(is_state=True), sinks) == kinds.UNKNOWN.value
