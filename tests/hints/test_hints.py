"""Every hint is answered with numbers, promises are kept as long as memory allows, and none harms a running request."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache, Retention, RetryLater, Schema
from kvpagoda.core.cache.outcome import ANSWERS, ENDS
from kvpagoda.hints import HintLimits, Hints, Outcome
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from kvpagoda.tiers import host_tier

sys.path.append(str(Path(__file__).parents[1] / "events"))
from consumers import classes, package

from kvpagoda.errors import BadInput
from raises import raises

FULL = Layer(0, "full", (Attention(1, 1, 1, "float16"),))
WINDOW = Layer(1, "window", (Attention(1, 1, 1, "float16", Growth(window=8)),))
STATE = Layer(2, "state", (Recurrent((Rows("recurrent", (2,), "float32"),)),))
SCHEMAS = {
    "full": Schema((FULL,), "full"),
    "window": Schema((FULL, WINDOW), "window"),
    "state": Schema((FULL, STATE), "state"),
    "all": Schema((FULL, WINDOW, STATE), "all"),
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def act(kind: str, payload: Any = None, name: str = "a", version: str = "1.0") -> dict[str, Any]:
    return {"action_id": name, "action_type": kind, "action_version": version, "payload": payload or {}}


def envelope(*actions: Any, message: str = "m") -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": message, "actions": [*actions]}


def cache_of(schema: str = "full", num_blocks: int = 32, clock: Clock | None = None, **settings: Any) -> KVCache:
    hints = Hints(clock or Clock(), settings.pop("limits", None))
    settings.setdefault("retention", Retention(pin_share=settings.pop("pin_share", 1.0)))
    return KVCache(
        SCHEMAS[schema], num_blocks=num_blocks, block_size=4, max_requests=4, device="none", hints=hints, **settings
    )


def serve(cache: KVCache, text: Any, **settings: Any) -> int:
    """Compute ``text`` as one request, and return how much of it was cached."""
    with cache.open(text, capacity=0, reserve=len(text), **settings) as sequence:
        found = sequence.cached_tokens
        while sequence.length < len(text):
            n = min(4, len(text) - sequence.length, cache.step_limit(sequence))
            sequence.extend(n)
            sequence.commit(np.asarray(text[sequence.length : sequence.length + n], np.int32))
    cache.check()
    return found


def text(number: int, length: int = 16) -> list[int]:
    return [*range(1000 * number, 1000 * number + length)]


def only(outcomes: list[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_promise_keeps_a_text_that_is_older_than_others(schema: str) -> None:
    cache = cache_of(schema, num_blocks=24)
    serve(cache, text(1, 17))
    outcome = only(cache.apply(envelope(act("kv.retain", {"token_ids": text(1, 17), "seconds": 60}))))
    assert (outcome.status, outcome.tokens, outcome.wanted) == ("accepted", 16, 17) and outcome.nbytes > 0
    for number in range(2, 12):
        serve(cache, text(number))
    assert serve(cache, text(1, 17)) == 16, "the windows and states at its end are kept too"
    assert cache.lookup(text(2)).cached == 0


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_promise_ends_with_its_time_or_for_a_running_request(schema: str) -> None:
    clock = Clock()
    cache = cache_of(schema, num_blocks=16, clock=clock)
    serve(cache, text(1))
    assert only(cache.apply(envelope(act("kv.retain", {"token_ids": text(1), "seconds": 10})))).until == 10.0
    clock.now = 10.0
    assert [one.status for one in cache.hints.ended()] == ["expired"]
    assert cache.stats().pinned_blocks == 0
    cache.apply(envelope(act("kv.pin", {"token_ids": text(1)}, "p")))
    serve(cache, text(2, 60))  # does not fit beside it
    ended = only(cache.hints.ended())
    assert (ended.status, ended.action_id, ended.tokens) == ("taken", "p", 16)


def test_promises_of_low_priority_are_taken_first() -> None:
    cache = cache_of(num_blocks=16)
    for number, priority in ((1, 60), (2, 20), (3, 80)):
        serve(cache, text(number))
        cache.apply(envelope(act("kv.retain", {"token_ids": text(number), "priority": priority}, str(priority))))
    serve(cache, text(4, 24))
    assert [one.action_id for one in cache.hints.ended()] == ["20"]
    serve(cache, text(5, 40))
    assert [one.action_id for one in cache.hints.ended()] == ["60"]


def test_where_no_more_may_be_promised_low_priority_gives_way_and_equal_priority_does_not() -> None:
    cache = cache_of(num_blocks=16, pin_share=0.5)
    for number in (1, 2, 3):
        serve(cache, text(number))
    status = [
        only(cache.apply(envelope(act("kv.retain", {"token_ids": text(number), "priority": priority}))))
        for number, priority in ((1, 35), (2, 35), (3, 35), (3, 36))
    ]
    assert [one.status for one in status] == ["accepted", "accepted", "rejected", "accepted"]
    assert "8 blocks of 8" in status[2].reason
    assert [one.status for one in cache.hints.ended()] == ["taken"]


def test_a_promise_is_clipped_to_what_there_is_room_for() -> None:
    cache = cache_of(num_blocks=16, pin_share=0.5, limits=HintLimits(seconds=100))
    serve(cache, text(1, 48))
    outcome = only(cache.apply(envelope(act("kv.retain", {"token_ids": text(1, 48), "seconds": 1000}))))
    assert (outcome.status, outcome.tokens, outcome.until) == ("clipped", 32, 100.0)
    assert cache.stats().pinned_blocks == 8


def test_a_tenant_has_its_share() -> None:
    cache = cache_of(num_blocks=32, limits=HintLimits(tenant_share=0.25))
    for tenant in ("one", "two"):
        serve(cache, text(1, 48), namespace=tenant)
        outcome = only(cache.apply(envelope(act("kv.pin", {"token_ids": text(1, 48)})), tenant))
        assert (outcome.status, outcome.tokens) == ("clipped", 32)
    again = only(cache.apply(envelope(act("kv.pin", {"token_ids": text(1, 8)})), "one"))
    assert again.status == "rejected" and "8 for this namespace" in again.reason


def test_a_tenant_has_its_share_of_promises_and_sessions_too() -> None:
    """With many small promises and sessions nobody takes those of others."""
    cache = cache_of(
        num_blocks=32, limits=HintLimits(tenant_share=0.5, tenant_tokens=12, promises=4, sessions=4, session_tokens=64)
    )

    def begin(name: str, tenant: str, at: int) -> None:
        begun = envelope(act("kv.session", {"session_id": name, "event": "begin"}))
        serve(cache, text(at, 8), namespace=tenant, hints=begun)

    begin("mine", "one", 1)
    for number in range(10):
        begin(str(number), "two", 2 + number)
    assert cache.hints.num_sessions == 3, "two of two, and that of one"
    kept = only(cache.apply(envelope(act("kv.pin", {"session_id": "mine"})), "one"))
    assert (kept.status, kept.tokens) == ("accepted", 8)
    answers = [only(cache.apply(envelope(act("kv.pin", {"token_ids": text(9 + n, 4)})), "two")) for n in range(3)]
    assert [one.status for one in answers] == [
        "accepted",
        "accepted",
        "rejected",
    ] and "2 for this namespace" in answers[2].reason
    more = only(cache.apply(envelope(act("kv.pin", {"token_ids": text(1, 8)})), "one"))
    assert (more.status, more.tokens) == ("clipped", 4), "12 tokens in all"
    long = text(20, 40)
    serve(cache, long, namespace="two", hints=envelope(act("kv.session", {"session_id": "long", "event": "begin"})))
    assert cache.hints.num_sessions == 1, "its text has more tokens than the share of two"
    assert only(cache.apply(envelope(act("kv.retain", {"session_id": "mine"})), "one")).status != "missing"
    cache.check()


def test_a_request_with_hints_is_kept_when_it_ends_and_its_answer_separately() -> None:
    clock = Clock()
    cache = cache_of(clock=clock)
    hints = envelope(
        act("kv.session", {"session_id": "s", "event": "begin"}, "s"),
        act("kv.retain", {"seconds": 60, "answer": {"seconds": 5, "priority": 10}}, "r"),
    )
    sequence = cache.open(text(1, 12), hints=json.dumps(hints), reserve=24)
    assert [one.status for one in sequence.hints] == ["accepted", "deferred"]
    sequence.commit(text(1, 12))
    sequence.extend(12)
    sequence.commit(text(2, 12))
    clock.now = 1.0
    sequence.close()
    answer, prompt = cache.hints.ended()
    assert (answer.tokens, answer.until) == (24, 6.0) and (prompt.tokens, prompt.until) == (12, 61.0)
    clock.now = 7.0
    assert only(cache.hints.ended()).tokens == 24
    assert cache.stats().pinned_blocks == 3

    again = cache.open(text(1, 12), hints=envelope(act("kv.session", {"session_id": "s", "event": "continue"})))
    again.commit(text(1, 12)[again.length :])
    again.close()
    assert [one.status for one in cache.hints.ended()] == ["replaced"], (
        "the next request of a session ends its promises"
    )


def test_the_answer_is_left_out_where_its_priority_is_0() -> None:
    cache = cache_of()
    sequence = cache.open(text(1, 12), reserve=24, hints=envelope(act("kv.retain", {"answer": {"priority": 0}})))
    sequence.commit(text(1, 12))
    sequence.extend(12)
    sequence.commit(text(2, 12))
    sequence.close()
    assert only(cache.hints.ended()).tokens == 12


def test_a_session_is_named_after_its_request_ended() -> None:
    cache = cache_of()
    begin = envelope(act("kv.session", {"session_id": "s", "event": "begin"}))
    retain = envelope(act("kv.retain", {"session_id": "s"}))
    assert only(cache.apply(retain)).status == "missing"
    sequence = cache.open(text(1), hints=begin)
    assert only(cache.apply(retain)).status == "deferred"
    sequence.commit(text(1))
    sequence.close()
    assert only(cache.hints.ended()).tokens == 16
    end = envelope(act("kv.session", {"session_id": "s", "event": "end", "discard": True}))
    assert only(cache.apply(end)).tokens == 16
    assert [one.status for one in cache.hints.ended()] == ["released"] and cache.lookup(text(1)).cached == 0
    assert only(cache.apply(end)).status == "missing"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_demoted_text_leaves_the_device_and_is_found_in_its_tier(schema: str) -> None:
    cache = cache_of(schema, tiers=[host_tier("64KiB")])
    serve(cache, text(1, 17))
    serve(cache, [*text(1, 8), *text(2, 9)])
    name = cache.core.tiers.levels[0].spec.name
    assert only(cache.apply(envelope(act("kv.demote", {"token_ids": text(1, 17), "tier": "no"})))).status == "rejected"
    outcome = only(cache.apply(envelope(act("kv.demote", {"token_ids": text(1, 17), "tier": name}))))
    moved = 9 if schema == "full" else 8  # 8 tokens are shared; a partial block goes too
    assert (outcome.status, outcome.tokens, outcome.wanted) == ("clipped", moved, 17)
    cache.check()
    assert cache.flush()
    assert cache.lookup(text(1, 17)).cached == 8
    assert cache.lookup([*text(1, 8), *text(2, 9)]).cached == 16
    serve(cache, text(3))
    short = only(cache.apply(envelope(act("kv.demote", {"token_ids": text(3, 24), "tier": "none"}))))
    assert (short.status, short.tokens, short.reason) == ("clipped", 16, "16 of 24 tokens were cached")
    cache.close()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_checkpoints_are_kept_where_a_hint_asks_for_them(schema: str) -> None:
    cache = cache_of(schema, num_blocks=40)
    asked = envelope(act("kv.checkpoint", {"positions": [8, 13]}), act("kv.checkpoint", {"positions": ["x"]}))
    sequence = cache.open(text(1, 21), capacity=0, reserve=21, hints=asked)
    assert [one.status for one in sequence.hints] == ["accepted", "rejected"]
    assert (sequence.hints[0].tokens, sequence.hints[0].wanted) == (13 if schema == "full" else 12, 13)
    while sequence.length < 21:
        n = min(4, 21 - sequence.length, cache.step_limit(sequence))
        sequence.extend(n)
        sequence.commit(text(1, 21)[sequence.length : sequence.length + n])
    sequence.close()
    assert serve(cache, [*text(1, 8), *text(2, 9)]) == 8
    assert only(cache.apply(asked)[:1]).status == "rejected"


def test_a_prefetched_text_is_taken_by_the_request_with_that_prompt() -> None:
    clock = Clock()
    cache = cache_of(clock=clock, tiers=[host_tier("64KiB")])
    serve(cache, text(1, 17))
    assert only(cache.apply(envelope(act("kv.demote", {"token_ids": text(1, 17)})))).tokens >= 16
    assert cache.flush()
    reading = envelope(act("kv.prefetch", {"token_ids": text(1, 17)}))
    assert only(cache.apply(reading)).status == "accepted"
    (begun,) = (held for held, _ in cache.hints._prefetched.values())
    serve(cache, text(2))
    assert not begun.is_used
    serve(cache, text(1, 17))
    assert begun.is_used
    cache.apply(reading)
    (begun,) = (held for held, _ in cache.hints._prefetched.values())
    clock.now = 61.0
    serve(cache, text(2))
    assert begun.is_used, "given back when its time was over"
    cache.close()


@pytest.mark.parametrize("where", ["vllm/v1/kv_hints/protocol.py", "sglang/srt/managers/kv_hints.py"])
def test_the_envelopes_of_engines_are_read_as_they_are(where: str) -> None:
    import msgspec

    made = classes(package(where), "Struct")
    action = made["KvHintAction"](
        action_id="a", action_type="kv.retain", action_version="1.0", payload={"token_ids": text(1)}
    )
    whole = made["KvHintsEnvelope"](protocol_version="0.1", message_id="m", actions=[action])
    cache = cache_of()
    serve(cache, text(1))
    for form in (whole, msgspec.json.encode(whole), msgspec.to_builtins(whole)):
        outcome = only(cache.apply(form))
        assert (outcome.status, outcome.message_id, outcome.tokens) == ("accepted", "m", 16)


NESTED: Any = {}
for _ in range(20_000):
    NESTED = {"answer": NESTED}
"""An answer within answers: only the first is read."""


@pytest.mark.parametrize(
    ("action", "status"),
    [
        (act("kv.nothing"), "unknown"),
        (act("kv.retain", {"token_ids": text(1)}, version="2.0"), "unknown"),
        (act("kv.retain", {"token_ids": text(1)}, version="1.7"), "accepted"),
        (act("kv.retain", {"token_ids": text(9)}), "missing"),
        (act("kv.retain", {"token_ids": "text"}), "rejected"),
        (act("kv.retain", {"token_ids": [-1]}), "rejected"),
        (act("kv.retain", {"token_ids": text(1), "seconds": -1}), "rejected"),
        (act("kv.retain", {"token_ids": text(1), "seconds": float("nan")}), "rejected"),
        (act("kv.retain", {"token_ids": text(1), "priority": True}), "rejected"),
        (act("kv.retain", {"token_ids": text(1), "range": [8, 4]}), "rejected"),
        (act("kv.retain", {"token_ids": text(1), "range": [0, 10**9]}), "accepted"),
        (act("kv.retain", {"token_ids": text(1), "answer": 3}), "rejected"),
        (act("kv.retain"), "rejected"),
        (act("kv.retain", {"token_ids": text(1), **NESTED}), "accepted"),
        (act("kv.release", {"promise": "x"}), "missing"),
        (act("kv.release"), "rejected"),
        (act("kv.prefetch", {"token_ids": text(1)}), "rejected"),
        (act("kv.session", {"session_id": "s", "event": "middle"}), "rejected"),
        (act("kv.session", {"session_id": "s" * 257, "event": "begin"}), "rejected"),
        (act("kv.session", {"session_id": "s", "event": "continue"}), "missing"),
        ({"action_type": "kv.retain"}, "unknown"),
        ("kv.retain", "unknown"),
        (None, "unknown"),
    ],
)
def test_what_is_wrong_is_answered(action: Any, status: str) -> None:
    cache = cache_of()
    serve(cache, text(1))
    outcome = only(cache.apply(envelope(action)))
    assert outcome.status == status and (outcome.reason or status == "accepted")
    cache.check()


HOSTILE = (
    2**63, 2**64, 10**400, -1, -(10**400), float("nan"), float("inf"), 0.5, True, "", "9", b"9", [], [None], {},
    np.array([1, 2]),
)  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize(
    "field", ["seconds", "priority", "begin", "end", "answer", "positions", "token_ids", "tier", "event"]
)
def test_no_number_of_a_hint_harms(schema: str, field: str) -> None:
    """Whatever a number, a text or a list is in its place, the action is answered."""
    cache = cache_of(schema, tiers=[host_tier("1MiB")])
    serve(cache, text(1))
    for kind in ("kv.retain", "kv.pin", "kv.release", "kv.demote", "kv.prefetch", "kv.checkpoint", "kv.session"):
        for value in HOSTILE:
            changed = {"begin": {"range": [value, None]}, "end": {"range": [0, value]}}.get(field, {field: value})
            payload = {"token_ids": text(1), "session_id": "s", "event": "begin", "positions": [4], **changed}
            assert only(cache.apply(envelope(act(kind, payload)))).status in ANSWERS
            with cache.open(text(1), hints=envelope(act(kind, payload))) as sequence:
                assert only(sequence.hints).status in ANSWERS
    cache.check()
    cache.reset()


@pytest.mark.parametrize(
    "wrong", ["", "{", "[" * 100_000, b"\xff", 3, {"actions": {}}, envelope(*[act("kv.pin")] * 65), "x" * 2**21]
)
def test_an_envelope_that_cannot_be_read_is_answered_once(wrong: Any) -> None:
    cache = cache_of()
    outcome = only(cache.apply(wrong))
    assert (outcome.status, outcome.action_id) == ("rejected", "") and outcome.reason
    with cache.open(text(1), hints=wrong) as sequence:
        assert only(sequence.hints).status == "rejected"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_hostile_hints_stop_no_request(schema: str) -> None:
    """10,000 hints in four schemas: everything pinned for ever, ranges past the end, wrong types, sessions without end."""
    chance, clock = random.Random(schema), Clock()
    cache = cache_of(schema, num_blocks=24, clock=clock, limits=HintLimits(sessions=50, promises=100, news=200))
    odd = [None, -1, 2**63, "x", "", [], {}, float("inf"), True, [0, None], [5, 1], text(1), "s1"]
    fields = [
        "token_ids",
        "session_id",
        "priority",
        "seconds",
        "range",
        "answer",
        "event",
        "tier",
        "promise",
        "discard",
    ]
    kinds = ["retain", "pin", "release", "demote", "prefetch", "checkpoint", "session", "x"]
    told, ended, asked = 0, 0, 0
    for number in range(2500 // 5):
        hints = []
        for _ in range(5):
            payload: Any = {field: chance.choice(odd) for field in chance.sample(fields, chance.randint(0, 3))}
            if chance.random() < 0.5:
                payload["token_ids"] = text(chance.randint(1, 9), chance.choice([3, 16, 40, 400]))
            if chance.random() < 0.5:
                payload = {"session_id": f"s{chance.randint(0, 99)}", "event": "begin"}
            hints.append(act(f"kv.{chance.choice(kinds)}", payload, f"{number}"))
        asked += len(hints)
        sequence = cache.open(text(chance.randint(1, 9), chance.randint(1, 24)), hints=envelope(*hints[:2]))
        answers = [*sequence.hints, *cache.apply(envelope(*hints[2:]))]
        told += len(answers)
        assert {one.status for one in answers} <= {*ANSWERS}
        sequence.close()
        clock.now += chance.choice([0.0, 1.0, 500.0])
        if number % 25 == 0:
            cache.check()
            news = cache.hints.ended()
            ended += len(news)
            assert {one.status for one in news} <= {*ANSWERS, *ENDS}
    assert told == asked
    assert cache.hints.num_sessions <= 50 and cache.hints.num_promises <= 100
    serve(cache, text(50, 80))  # as large as the cache allows: promises give way
    cache.check()


def test_a_full_cache_of_promises_waits_for_nothing() -> None:
    cache = cache_of(num_blocks=16)
    for number in range(1, 5):
        serve(cache, text(number))
        cache.apply(envelope(act("kv.pin", {"token_ids": text(number)})))
    running = cache.open(text(9, 60))
    with pytest.raises(RetryLater):
        cache.open(text(8, 16))  # running requests have the memory, not promises
    assert len(cache.hints.ended()) == 4
    running.close()


def test_a_reset_or_new_weights_release_everything() -> None:
    cache = cache_of()
    serve(cache, text(1))
    cache.apply(envelope(act("kv.pin", {"token_ids": text(1)})))
    cache.invalidate(weights="new")
    assert [one.status for one in cache.hints.ended()] == ["released"]
    serve(cache, text(1))
    cache.apply(envelope(act("kv.pin", {"token_ids": text(1)})))
    cache.reset()
    assert cache.hints.num_promises == 0
    cache.check()


def test_outcomes_that_nobody_fetches_are_dropped_and_counted() -> None:
    cache = cache_of(limits=HintLimits(news=2))
    serve(cache, text(1))
    for _ in range(5):
        cache.apply(envelope(act("kv.pin", {"token_ids": text(1)}, "p"), act("kv.release", {"promise": "p"})))
    assert len(cache.hints.ended()) == 2 and cache.hints.num_dropped == 3


def test_hints_belong_to_one_cache() -> None:
    hints = Hints()
    KVCache(SCHEMAS["full"], num_blocks=4, device="none", hints=hints)
    with raises(BadInput, needed="hints"):
        KVCache(SCHEMAS["full"], num_blocks=4, device="none", hints=hints)
