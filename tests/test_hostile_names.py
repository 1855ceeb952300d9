"""Names of folders, hosts and sockets that no system takes are refused before anything is made: a zero byte ends a name in C,
half a surrogate pair has no bytes, and what is no text is no name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvpagoda import BadInput, Identity, KVCache, Schema
from kvpagoda.handover import MooncakeEngine, NixlAgent
from kvpagoda.tiers import RecordBuffer, disk_tier, mooncake_tier, redis_tier, tier_from_text
from kvpagoda.tiers.disk import delete_tier_files, disk_driver, tier_files
from kvpagoda.tiers.mooncake import mooncake_driver
from kvpagoda.tiers.redis import redis_driver

SCHEMA = Schema.from_hf_config(dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
TEXTS = ("a\0b", "\0", "\ud800")
WRONG = (*TEXTS, 5, b"a", [], object())
MASTER = "127.0.0.1:1"


def recorded(path: Any) -> KVCache:
    return KVCache(SCHEMA, "64KiB", device="none", identity=Identity("w"), record=path)


def scales(folder: Any) -> Any:
    pytest.importorskip("safetensors")
    from kvpagoda.hf.scales import checkpoint_scales

    return checkpoint_scales(folder, SCHEMA)


def publisher(endpoint: Any) -> Any:
    from kvpagoda.events import EventLog, Publisher

    return Publisher(EventLog(), endpoint, None)


def subscriber(endpoint: Any) -> Any:
    from kvpagoda.events import Subscriber

    return Subscriber("tcp://127.0.0.1:1", endpoint)


def router(endpoint: Any) -> Any:
    from kvpagoda.events import Router

    return Router({"one": (endpoint, "tcp://127.0.0.1:1")})


def buffer() -> RecordBuffer:
    return RecordBuffer(1, 4096)


CALLS: dict[str, Callable[[Any], Any]] = {
    "a disk tier": lambda name: disk_tier(name, "1MiB"),
    "a disk driver": lambda name: disk_driver(buffer(), name, "1MiB"),
    "a tier in text": tier_from_text,
    "files of tiers": tier_files,
    "files to delete": delete_tier_files,
    "a redis tier": redis_tier,
    "a redis driver": lambda name: redis_driver(buffer(), name),
    "a mooncake tier": mooncake_tier,
    "a host of the store": lambda name: mooncake_driver(buffer(), MASTER, host=name),
    "a protocol of the store": lambda name: mooncake_driver(buffer(), MASTER, protocol=name),
    "a host of an engine": lambda name: MooncakeEngine(host=name),
    "a device of an engine": lambda name: MooncakeEngine(devices=name),
    "a backend of an agent": lambda name: NixlAgent(backend=name),
    "a recording": recorded,
    "a checkpoint": scales,
    "a publisher": publisher,
    "a subscriber": subscriber,
    "a router": router,
}
PATHS = ("a disk tier", "a disk driver", "files of tiers", "files to delete", "a recording", "a checkpoint")
IN_TEXT = {
    "a disk tier": "folder/{}", "a tier in text": "disk:{}:1MiB", "a redis tier": "unix:///{}",
    "a mooncake tier": "{}:1234", "a publisher": "ipc:///tmp/{}", "a subscriber": "ipc:///tmp/{}", "a router": "ipc:///tmp/{}",
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_what_no_system_takes_as_a_name_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what in ("a publisher", "a subscriber", "a router") and find_spec("zmq") is None:
        pytest.skip("pyzmq is not installed")
    monkeypatch.chdir(tmp_path)
    of_text = [IN_TEXT[what].format(name) for name in TEXTS] if what in IN_TEXT else []
    of_path = [Path(name) for name in TEXTS] if what in PATHS else []
    for name in (*WRONG, *of_text, *of_path):
        with pytest.raises(BadInput):
            CALLS[what](name)
    assert not os.listdir(tmp_path)
