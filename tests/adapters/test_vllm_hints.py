"""Hints that vLLM carries on requests, answered by our manager inside the installed vLLM. ``make vllm`` runs this."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from test_vllm_manager import PROJECT, SIZE, manager_of, text
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvpagoda.adapters.vllm import KVCacheManager, Options


def act(kind: str, name: str = "a", **payload: Any) -> KvHintAction:
    return KvHintAction(action_id=name, action_type=kind, action_version="1.0", payload=payload)


def ask(manager: KVCacheManager, tokens: list[int], name: str, *actions: KvHintAction, salt: str | None = None) -> int:
    """Run a request with these hints to its end; return how many tokens were found."""
    hints = KvHintsEnvelope(protocol_version="0.1", message_id=name, actions=[*actions]) if actions else None
    sampling = PROJECT.sampling_params.SamplingParams(max_tokens=1, ignore_eos=True)
    hasher = get_request_block_hasher(SIZE, sha256)
    request = PROJECT.request.Request(
        name, tokens, sampling, None, block_hasher=hasher, kv_hints=hints, cache_salt=salt
    )
    blocks, found, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    begin: Any = (found, blocks)
    while request.num_computed_tokens + begin[0] < len(tokens):
        n = len(tokens) - request.num_computed_tokens - begin[0]
        n = n // SIZE * SIZE or n  # states are left at ends of blocks
        manager.new_step_starts()
        assert manager.allocate_slots(request, n, *begin) is not None
        request.status = PROJECT.request.RequestStatus.RUNNING
        request.num_computed_tokens, begin = request.num_computed_tokens + n + begin[0], (0, None)
    request.status = PROJECT.request.RequestStatus.FINISHED_LENGTH_CAPPED
    manager.free(request)
    manager.check()
    return found


@pytest.mark.parametrize("kinds", [("full",), ("full", "window"), ("full", "state")], ids="+".join)
def test_what_a_request_asked_to_retain_stays_when_it_is_the_oldest(kinds: tuple[str, ...]) -> None:
    found = []
    for actions in ((), (act("kv.retain", seconds=60),)):
        manager = manager_of(*kinds, blocks=1 + 16 * len(kinds))
        ask(manager, text(1, 17), "a", *actions)
        for number in range(2, 9):
            ask(manager, text(number, 16), f"b{number}")
        found.append(ask(manager, text(1, 17), "c"))
    assert found == [0, 16]


def test_promises_end_by_time_by_release_and_for_a_request_that_lacks_blocks() -> None:
    manager = manager_of("full", blocks=1 + 12)
    clock = [0.0]
    manager.promises._clock = lambda: clock[0]
    ask(manager, text(1, 16), "a", act("kv.retain", seconds=5))
    clock[0] = 6.0
    ask(manager, text(2, 16), "b", act("kv.pin", "pinned"))
    assert [one.status for one in manager.promises.ended()] == ["accepted", "expired", "accepted"]
    ask(manager, text(3, 8), "c", act("kv.release", promise="pinned"))
    assert [one.status for one in manager.promises.ended()] == ["released"]
    ask(manager, text(4, 16), "d", act("kv.pin"))
    assert ask(manager, text(5, 40), "e") == 0, "a request that needs the promised blocks gets them"
    assert [one.status for one in manager.promises.ended()] == ["accepted", "taken"]
    assert manager.promises.num_blocks == 0


def test_one_tenant_does_not_release_the_promise_of_another_and_what_is_not_done_is_told() -> None:
    manager = manager_of("full", blocks=1 + 12)
    ask(manager, text(1, 16), "a", act("kv.pin", "pinned"))
    ask(manager, text(2, 8), "b", act("kv.release", promise="pinned"), act("kv.demote", "d"), salt="other")
    assert [one.status for one in manager.promises.ended()] == ["accepted", "missing", "rejected"]
    assert manager.promises.num_blocks == 4


def test_the_next_request_of_a_session_replaces_what_was_promised_before() -> None:
    manager = manager_of("full", blocks=1 + 24)
    session = act("kv.session", session_id="s", event="continue")
    for length in (16, 24):
        ask(manager, text(1, length), f"r{length}", session, act("kv.retain", seconds=60))
    assert [one.status for one in manager.promises.ended()] == ["accepted", "replaced", "accepted"]
    assert manager.promises.num_blocks == 6
    ask(manager, text(2, 8), "end", act("kv.session", session_id="s", event="end"))
    assert manager.promises.num_blocks == 0
    assert manager.reset_prefix_cache()


def test_hostile_hints_stop_no_request() -> None:
    manager = manager_of("full", "window", blocks=1 + 24)
    odd = [
        {},
        {"seconds": -1},
        {"priority": "x"},
        {"range": [9, 1]},
        {"answer": 3},
        {"session_id": "", "event": "begin"},
    ]
    for number in range(200):
        actions = [
            act(kind, **odd[number % len(odd)]) for kind in ("kv.pin", "kv.retain", "kv.session", "kv.demote", "x")
        ]
        ask(manager, text(number % 7, 8 + number % 30), f"r{number}", *actions, act("kv.pin"))
    manager.promises.clear()
    assert manager.usage == 0 and len(manager.promises.ended()) > 200


def test_a_share_of_the_blocks_may_be_promised() -> None:
    manager = manager_of("full", blocks=1 + 20, options=Options(promised=0.25))
    for number in (1, 2):
        ask(manager, text(number, 16), f"r{number}", act("kv.pin"))
    assert [one.status for one in manager.promises.ended()] == ["accepted", "rejected"]


def test_promises_that_ended_before_their_time_are_forgotten() -> None:
    manager = manager_of("full", blocks=1 + 12)
    for number in range(300):
        session = act("kv.session", session_id="s", event="continue")
        ask(manager, text(number % 2, 16), f"r{number}", session, act("kv.retain", seconds=3000))
    assert len(manager.promises._held) == 1 and len(manager.promises._by_end) <= 67
