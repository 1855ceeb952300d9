"""A follower of vLLM's own events, in the form in which vLLM 0.33 sends them; ``make vllm`` compares it with the engine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

import msgspec

from kvpagoda import KVCache, Namespace, Schema
from kvpagoda.errors import BadInput
from kvpagoda.events import EventLog, EventStream, Follower, NextHit, VllmFollower
from raises import raises

SIZE = 4
TEXT = [*range(100, 140)]
NAMES = [*range(2**63, 2**63 + 10)]
"""The names of the ten blocks of ``TEXT``: vLLM's have 64 bits."""


class Engine:
    """Sends what vLLM would; ``kinds``: of the groups, each with its window."""

    def __init__(self, *kinds: str, follower: VllmFollower | None = None) -> None:
        self.kinds, self.follower, self.sent = [*kinds], follower or VllmFollower(), list[bytes]()

    def send(self, *events: dict[str, Any], ts: float | None = None) -> None:
        self.sent.append(msgspec.msgpack.encode([ts or len(self.sent) + 1.0, [*events], 0]))
        self.follower.feed(len(self.sent) - 1, self.sent[-1])

    def stored(self, group: int, first: int, end: int, names: list[int] | None = None, **more: Any) -> dict[str, Any]:
        """Blocks ``first .. end - 1`` of ``TEXT``; ``names``: those that are told."""
        kind, _, window = self.kinds[group].partition(" ")
        size = more.pop("size", SIZE)
        event = {
            "type": "BlockStored", "block_hashes": NAMES[first:end] if names is None else names,
            "parent_block_hash": NAMES[first - 1] if first else None, "token_ids": TEXT[first * SIZE : end * SIZE],
            "block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": group,
            "kv_cache_spec_kind": kind,
        }  # fmt: skip
        if window:
            event["kv_cache_spec_sliding_window"] = int(window)
        return event | more

    def removed(self, group: int, *blocks: int, **more: Any) -> dict[str, Any]:
        names = [NAMES[block] for block in blocks]
        return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": group} | more

    def hit(self, tokens: list[int] = TEXT, *args: Any, **more: Any) -> tuple[int, int, bool]:
        return tuple(self.follower.resumable(tokens, *args, **more))


def test_full_attention_is_found_up_to_the_first_block_that_is_missing() -> None:
    engine = Engine("full_attention")
    assert engine.hit() == NextHit(0, 0, at_most=False)
    engine.send(engine.stored(0, 0, 4))
    engine.send(engine.stored(0, 4, 8))
    assert engine.hit() == (32, 32, False) and engine.hit(TEXT[:32]) == (28, 28, False)
    assert engine.hit([*TEXT[:9], 7, *TEXT[10:]]) == (8, 8, False) and engine.hit([1]) == (0, 0, False)
    engine.send(engine.removed(0, 5))
    assert engine.hit() == (20, 20, False)
    engine.send(engine.stored(0, 5, 6))  # those after it were kept
    assert engine.hit() == (32, 32, False)


def test_a_block_that_two_hold_is_there_until_both_are_gone() -> None:
    engine = Engine("full_attention")
    engine.send(engine.stored(0, 0, 2), engine.stored(0, 0, 2))
    engine.send(engine.removed(0, 1))
    assert engine.hit() == (8, 8, False)
    engine.send(engine.removed(0, 1), engine.removed(0, 0), engine.removed(0, 0))
    assert engine.hit() == (0, 0, False) and engine.follower.num_blocks == 0
    index = engine.follower._index
    assert not index._blocks and not index._after and not index._loose


def test_a_window_needs_its_last_blocks_and_a_state_the_last_one() -> None:
    engine = Engine("sliding_window 9", "full_attention", "mamba")
    engine.send(engine.stored(1, 0, 10), engine.stored(0, 0, 10, NAMES[2:5]), engine.stored(2, 0, 10, NAMES[3:6:2]))
    assert engine.hit() == (36, 16, False)  # the window has 2..4, states lie after 3 and 5
    engine.send(engine.stored(0, 5, 6))
    assert engine.hit() == (36, 24, False)
    engine.send(engine.removed(2, 5))
    assert engine.hit() == (36, 16, False)
    engine.send(engine.removed(1, 3))
    assert engine.hit() == (12, 0, False)


def test_a_window_at_the_begin_of_a_text_needs_no_more_blocks_than_there_are() -> None:
    engine = Engine("full_attention", "sliding_window 100")
    engine.send(engine.stored(0, 0, 4), engine.stored(1, 0, 4))
    assert engine.hit() == (16, 16, False)


def test_blocks_of_several_sizes_hit_at_their_common_multiples() -> None:
    engine = Engine("full_attention", "sliding_window 9")
    engine.send(engine.stored(0, 0, 8, NAMES[1:8:2], size=8), engine.stored(1, 0, 8))
    assert engine.hit() == (32, 32, False)
    engine.send(engine.removed(1, 7))
    assert engine.hit() == (32, 24, False)


def test_blocks_whose_place_is_not_told_may_be_there() -> None:
    """Of the window's blocks only some were stored, and the full group, whose blocks are larger, does not name these."""
    engine = Engine("full_attention", "sliding_window 9")
    engine.send(engine.stored(0, 0, 8, NAMES[1:8:2], size=8), engine.stored(1, 0, 8, [NAMES[6], NAMES[7]]))
    assert engine.hit() == (32, 32, True)
    engine.send(engine.removed(1, 6))
    assert engine.hit() == (32, 0, False)
    engine.send(engine.removed(1, 7), engine.removed(0, 1, 3, 5, 7))
    index = engine.follower._index
    assert not index._blocks and not index._after and not index._loose


def test_a_state_inside_a_block_may_be_there() -> None:
    """``--prefix-match-unit``: the block before the part is not told, so that it may be another text's."""
    engine = Engine("full_attention", "mamba")
    whole, part = {"size": 16}, {"parent_block_hash": 5, "token_ids": TEXT[24:28]}
    for group in (0, 1):
        engine.send(engine.stored(group, 0, 4, [NAMES[3]], **whole), engine.stored(group, 6, 7, **part))
    assert engine.hit() == (28, 28, True) and engine.hit(TEXT[:28]) == (16, 16, False)
    assert engine.hit([*TEXT[:24], 1, *TEXT[25:]]) == (16, 16, False)
    engine.send(engine.removed(1, 6))
    assert engine.hit() == (28, 16, False)


def test_what_a_chunk_needs_is_not_told() -> None:
    engine = Engine("full_attention", "chunked_local_attention")
    engine.send(engine.stored(0, 0, 4), engine.stored(1, 0, 2))
    assert engine.hit() == (16, 16, True) and engine.hit(TEXT[:9]) == (8, 8, False)


def test_a_group_that_has_told_nothing_may_end_a_hit() -> None:
    engine = Engine("full_attention", "mamba", "full_attention")
    engine.send(engine.stored(0, 0, 4), engine.stored(2, 0, 4))
    assert engine.hit() == (16, 16, True)
    engine.send(engine.stored(1, 0, 4, []))
    assert engine.hit() == (16, 0, False)


def test_an_engine_that_speculates_has_at_most_so_much() -> None:
    engine = Engine("full_attention", follower=VllmFollower(drafts=True))
    engine.send(engine.stored(0, 0, 4))
    assert engine.hit() == (16, 16, True) and engine.hit([1, 2]) == (0, 0, False)


def test_tenants_adapters_and_media_are_texts_of_their_own() -> None:
    engine, digest, other = Engine("full_attention"), b"picture" * 5, b"another" * 5
    picture = [digest.hex(), 2], [digest.hex(), -2]
    engine.send(engine.stored(0, 0, 2, [1, 2], extra_keys=[["salt"], None]))
    engine.send(engine.stored(0, 0, 3, [3, 4, 5], extra_keys=[["lora"]] * 3, lora_name="lora"))
    engine.send(engine.stored(0, 0, 4, [6, 7, 8, 9], extra_keys=[[picture[0]], [picture[1]], None, None]))
    assert engine.hit() == (0, 0, False)
    assert engine.hit(TEXT, "salt") == engine.hit(TEXT, Namespace("salt")) == (8, 8, False)
    assert engine.hit(TEXT, Namespace(adapter="lora")) == (12, 12, False)
    assert engine.hit(TEXT, Namespace("salt", adapter="lora")) == (0, 0, False)
    assert engine.hit(TEXT, media={2: digest}) == (16, 16, False)
    assert engine.hit(TEXT, media={2: other}) == engine.hit(TEXT, media={3: digest}) == (0, 0, False)


def test_two_adapters_of_one_name_are_not_told_apart() -> None:
    engine = Engine("full_attention")
    for names in ([1, 2], [3, 4]):  # the path of an adapter is in vLLM's hash, and not in its event
        engine.send(engine.stored(0, 0, 2, names, extra_keys=[["lora"]] * 2))
    assert engine.hit(TEXT, Namespace(adapter="lora")) == (8, 8, True)
    engine.send({**engine.removed(0), "block_hashes": [1]})
    assert engine.hit(TEXT, Namespace(adapter="lora")) == (8, 8, True)
    engine.send({**engine.removed(0), "block_hashes": [2]})
    assert engine.hit(TEXT, Namespace(adapter="lora")) == (8, 8, False)


def test_tokens_after_a_block_are_in_its_hash_where_vllm_says_so() -> None:
    engine = Engine("full_attention")
    ahead = [[TEXT[end], TEXT[end + 1]] for end in (4, 8)]
    engine.send(engine.stored(0, 0, 2, lookahead_token_ids=ahead))
    assert engine.hit() == engine.hit(TEXT[:10]) == (8, 8, False)
    assert engine.hit(TEXT[:9]) == engine.hit([*TEXT[:8], 1, 2, 3]) == (4, 4, False)


def test_what_is_not_on_the_device_does_not_count() -> None:
    engine = Engine("full_attention")
    engine.send(engine.stored(0, 0, 4), engine.stored(0, 4, 6, medium="CPU"), engine.removed(0, 1, medium="CPU"))
    assert engine.hit() == (16, 16, False)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_gap_is_asked_for_and_what_cannot_be_had_is_lost() -> None:
    told, follower = Engine("full_attention"), VllmFollower()
    for first in range(6):
        told.send(told.stored(0, first, first + 1))
    for number in (0, 1, 4, 3, 1):
        follower.feed(number, told.sent[number])
    assert (follower.wanted, follower.is_complete) == (2, False) and follower.resumable(TEXT).resumable == 8
    follower.replay_ended(0)  # an earlier question
    follower.replay_ended(2)
    assert follower.wanted == 2
    follower.feed(2, told.sent[2])
    assert follower.wanted is None and follower.is_complete and follower.resumable(TEXT).resumable == 20
    late = VllmFollower()
    late.feed(5, told.sent[5])
    for _ in range(2):
        late.replay_ended(0)
    assert (late.wanted, late.num_lost, late.is_complete) == (None, 5, False) and late.num_blocks == 1
    late.feed(6, msgspec.msgpack.encode([9.0, [{"type": "AllBlocksCleared"}]]))
    assert late.is_complete and late.num_blocks == 0
    late.feed(7, msgspec.msgpack.encode([10.0, [told.removed(0, 3)]]))
    assert not late.is_complete  # a block that was never told: something is missing here


def test_an_engine_that_starts_again_has_nothing() -> None:
    engine = Engine("full_attention")
    for first in range(3):
        engine.send(engine.stored(0, first, first + 1))
    engine.follower.feed(1, engine.sent[1])
    assert engine.follower.num_blocks == 3
    engine.sent.clear()
    engine.send(engine.stored(0, 0, 1), ts=100.0)
    assert engine.hit() == (4, 4, False) and engine.follower.is_complete


def test_what_is_no_batch_of_vllm_is_refused_and_lost() -> None:
    engine = Engine("full_attention")
    engine.send(engine.stored(0, 0, 2))
    log = EventLog()
    config = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    KVCache(Schema.from_hf_config(config), "4KiB", device="none", block_size=4, events=log)
    ours = EventStream(log).replay(0)[0][1]
    for number, (payload, needed) in enumerate(((b"nothing", 7), (ours, "vLLM")), 1):
        with raises(BadInput, needed=needed):
            engine.follower.feed(number, payload)
    assert not engine.follower.is_complete and engine.follower.wanted is None and engine.hit()[0] == 8
    with raises(BadInput, needed="publisher"):
        Follower().feed(0, engine.sent[0])
    for namespace in (Namespace(weights="w"), Namespace(epoch=1), Namespace(b"salt"), Namespace(adapter=b"lora")):
        (needed,) = (part for part in vars(namespace).values() if part is not None)
        with raises(BadInput, needed=needed):
            engine.hit(TEXT, namespace)
    with raises(BadInput, needed=b"short", available=16):
        engine.hit(TEXT, media={1: b"short"})


def test_the_command_line_names_the_engine() -> None:
    from typer.testing import CliRunner

    from kvpagoda.cli import app

    done = CliRunner().invoke(
        app, ["router", "a=tcp://127.0.0.1:1,tcp://127.0.0.1:1", "--engine", "vlm", "--port", "0"]
    )
    assert done.exit_code and "did you mean" in str(done.exception or done.output).lower()
