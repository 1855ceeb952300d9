"""vllm-router reads the messages: its own wire structs, compiled from its source distribution, and the fields it admits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

import msgspec
from consumers import installed
from test_engines_read import messages

from kvpagoda.events import Encoding

CRATES = Path("/usr/share/cargo/registry")
SOURCE = "sdist/vllm_router-*/src/kv_index"
FILES = {
    ".cargo/config.toml": f"""
[source.crates-io]
replace-with = "debian"
[source.debian]
directory = "{CRATES}"
""",
    "Cargo.toml": """
[package]
name = "reader"
version = "0.1.0"
edition = "2021"
[dependencies]
serde = { version = "1", features = ["derive"] }
rmp-serde = "1"
rmpv = { path = "rmpv" }
""",
    "rmpv/Cargo.toml": """
[package]
name = "rmpv"
version = "1.3.0"
edition = "2021"
[dependencies]
serde = "1"
""",
    # Debian has no crate rmpv; the structs name one type of it, for values that are kept as they are
    "rmpv/src/lib.rs": """
use serde::{de::IgnoredAny, Deserialize, Deserializer, Serialize, Serializer};
#[derive(Debug, Clone)]
pub struct Value;
impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(from).map(|_| Value)
    }
}
impl Serialize for Value {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_unit()
    }
}
""",
    "src/main.rs": """
#[allow(dead_code)]
mod wire;
use std::io::Read;
fn main() {
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input).unwrap();
    let mut rest = &input[..];
    while !rest.is_empty() {
        let size = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize;
        match rmp_serde::from_slice::<wire::KVEventBatch>(&rest[4..4 + size]) {
            Ok(batch) => println!("{} {}", batch.events.len(), batch.data_parallel_rank.unwrap()),
            Err(error) => println!("{error}"),
        }
        rest = &rest[4 + size..];
    }
}
""",
}
"""A program that reads batches from its standard input, each after its size, and prints the number of events and the rank."""


def test_its_structs_read_every_message(tmp_path: Path) -> None:
    source = installed(SOURCE) / "wire.rs"
    if shutil.which("cargo") is None or not [*CRATES.glob("rmp-serde-*")]:
        pytest.skip("no Rust compiler, or not Debian's crates: make consumers")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(source, tmp_path / "src" / "wire.rs")
    built = subprocess.run(["cargo", "build", "--offline", "--quiet"], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]

    def read(payloads: list[bytes]) -> list[str]:
        framed = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
        done = subprocess.run([str(tmp_path / "target/debug/reader")], input=framed, capture_output=True, check=True)
        return done.stdout.decode().splitlines()

    for schema in ("full", "sliding", "gemma", "mixed"):
        for encoding in (Encoding(), Encoding(names="bytes"), Encoding(own_fields=False)):
            payloads = messages(schema, encoding)
            assert read(payloads) == [f"{len(msgspec.msgpack.decode(one)[1])} 3" for one in payloads]
    assert not any(answer[0].isdigit() for answer in read(messages("full", "array")))


@pytest.mark.parametrize("schema", ["full", "mla", "mixed"])
def test_without_our_fields_it_admits_every_event(schema: str) -> None:
    """Its decoder refuses a batch that has a field which it does not know, as its source lists them for each event."""
    text = (installed(SOURCE) / "decode.rs").read_text()
    allowed = {}
    for event in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        (fields,) = re.findall(rf'"{event}" => \(\s*&\[(.*?)\]', text, re.DOTALL)
        allowed[event] = {*re.findall(r'"(\w+)"', fields)}
    assert {"type", "block_hashes", "token_ids"} < allowed["BlockStored"] and allowed["AllBlocksCleared"] == {"type"}
    (most,) = map(int, re.findall(r"events.len\(\) > (\d+)", text))

    def events(own_fields: bool) -> list[dict[str, object]]:
        batches = [msgspec.msgpack.decode(one)[1] for one in messages(schema, Encoding(own_fields=own_fields))]
        assert all(len(batch) <= most for batch in batches)
        return [event for batch in batches for event in batch]

    plain = events(own_fields=False)
    assert len(plain) > 20 and all({*event} <= allowed[str(event["type"])] for event in plain)
    for event in plain:
        if event["type"] != "AllBlocksCleared":
            assert event["block_hashes"]
        if event["type"] == "BlockStored":
            assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])  # type: ignore[operator, arg-type]
    assert not all({*event} <= allowed[str(event["type"])] for event in events(own_fields=True))
