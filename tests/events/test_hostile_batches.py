"""Whatever comes in place of a batch is refused as BadInput with nothing changed, or believed; what is missing is asked for,
and then a follower says what ``lookup`` says."""

from __future__ import annotations

import random
import secrets

import pytest

from random_driver.schemas import SCHEMA_NAMES

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from unittest.mock import ANY

from hostile import Siege
from traffic import Traffic

from kvpagoda.errors import BadInput
from kvpagoda.events import Follower
from raises import raises


def besiege(schema: str, seed: int, num_rounds: int) -> Siege:
    """So many rounds of some operations, damaged messages and a comparison."""
    traffic = Traffic(schema, seed)
    siege = Siege(traffic.cache, traffic.log, random.Random(seed), b"s")
    for _ in range(num_rounds):
        for _ in range(siege.random.randrange(1, 5)):
            for _ in range(siege.random.randrange(1, 9)):
                traffic.step()
            siege.send()
        texts = [(text, traffic.namespace(), media) for text, media in (traffic.text() for _ in range(4))]
        siege.compare([*texts, *((one.tokens, None, {}) for one in traffic.running if not one._request.media_ids)])
    return siege


@pytest.mark.parametrize("schema", ["gemma", "mamba", "mixed", "sliding"])
def test_a_follower_is_never_wrong_for_long(schema: str) -> None:
    siege = besiege(schema, 1, 60)
    assert siege.num_refused > 50 and siege.num_accepted > 10 and siege.num_hits > 30, vars(siege)


@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_thousands_of_damaged_batches(schema: str) -> None:
    """Of other seeds each time; a failure names them."""
    num_refused = 0
    while num_refused < 500:
        seed = secrets.randbits(32)
        try:
            num_refused += besiege(schema, seed, 100).num_refused
        except Exception as error:
            raise AssertionError(f"besiege({schema!r}, {seed}, 100)") from error


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\x93\x00" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff",
        b"\x93\x00\xdd\xff\xff\xff\xff", b"\x93\x00\x91\x81\xa4type\xa2\xff\xff", b"\x93\x00\x91\x91\xa2\xff\xff",
        b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x93\x00\x90\x00", b"\x93\x00\x91\xc0\x00",
        b"\x93\x00\x91\x90\x00",
    ],
    ids=range(14),
)  # fmt: skip
def test_bytes_that_are_no_batch(payload: bytes) -> None:
    follower = Follower()
    with pytest.raises(BadInput):
        follower.feed(3, payload)
    assert follower.wanted == 0 and follower.num_blocks == 0
    for number in (-1, 2**63, "1", None, 0.5):
        with raises(BadInput, field="the number of a batch", needed=number, available=ANY):
            follower.feed(number, payload)  # type: ignore[arg-type]
