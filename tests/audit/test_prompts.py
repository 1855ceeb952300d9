"""Prompts and cases: plain data that is made anew without a change of what prompts have in common."""

from __future__ import annotations

import json

import pytest

from kvpagoda.audit.probes import KINDS, Probe, ProbeTexts, probes
from kvpagoda.audit.prompts import Ask, Case, Draw, PromptPart, one
from kvpagoda.audit.server import ServerProfile
from kvpagoda.errors import BadInput
from raises import raises

PROFILE = ServerProfile(
    "m", as_ids=True, longest=1000, adapters=["a"], completions={}, chats={}, has_images=True, unit=16, churn=3,
    preemptions=True, per={"completion": 1, "chat": 1},
)  # fmt: skip
PROBES = {name: probe for name, probe, _ in probes(PROFILE, "restart", True) if probe is not None}


def common(one: Ask, other: Ask) -> int:
    """Return how many symbols two first parts begin with."""
    pairs = [a == b for a, b in zip(one.parts[0].symbols, other.parts[0].symbols)]
    return pairs.index(False) if False in pairs else len(pairs)


def test_the_server_that_has_everything_is_asked_everything() -> None:
    assert len(PROBES) == 17
    bare = {name: why for name, probe, why in probes(ServerProfile("m", completions={}), None, False) if probe is None}
    assert bare.keys() == {
        "churn", "salts", "adapters", "pictures", "two pictures", "chat", "roles", "tools", "load", "wait",
    }  # fmt: skip
    assert all(bare.values())


@pytest.mark.parametrize("name", PROBES)
def test_a_fresh_case_has_other_prompts_with_the_same_beginnings(name: str) -> None:
    probe: Probe = PROBES[name]
    texts = ProbeTexts(Draw(5), PROFILE)
    case = probe(texts, 49)
    fresh = case.fresh(texts.draw)
    asks, others = [*case.asks()], [*fresh.asks()]
    assert [ask.kind for ask in asks] == [ask.kind for ask in others] and {ask.kind for ask in asks} <= {"", *KINDS}
    for i, (ask, other) in enumerate(zip(asks, others)):
        assert [len(part.symbols) for part in ask.parts] == [len(part.symbols) for part in other.parts]
        images = [part.image for part in ask.parts]
        assert all(image is None or image != part.image for image, part in zip(images, other.parts))
        assert (ask.salt is None) == (other.salt is None) and (ask.salt is None or ask.salt != other.salt)
        if name != "pictures":
            assert ask.parts[0].symbols[0] != other.parts[0].symbols[0]
        for j in range(i):
            assert common(asks[i], asks[j]) == common(others[i], others[j])
            assert (asks[i].salt == asks[j].salt) == (others[i].salt == others[j].salt)


@pytest.mark.parametrize("name", PROBES)
def test_a_case_is_kept_in_a_file(name: str) -> None:
    probe: Probe = PROBES[name]
    case = probe(ProbeTexts(Draw(5), PROFILE), 49)
    assert Case.of(json.loads(json.dumps(case.to_dict()))) == case


def test_the_first_symbols_of_prompts_differ_as_long_as_they_can() -> None:
    draw = Draw(1)
    firsts = [draw.text(9, head=True)[0] for _ in draw.symbols]
    assert len({*firsts}) == len(draw.symbols)


@pytest.mark.parametrize("data", [{}, {"name": "x"}, {"name": "x", "steps": [{"do": "ask"}]}, 3])
def test_what_is_no_case_is_refused(data: object) -> None:
    with raises(BadInput, field="case"):
        Case.of(data)


def test_a_key_says_what_the_right_answer_depends_on() -> None:
    part = PromptPart((1, 2))
    assert Ask((part,), "repeat", salt="a").key == Ask((part,), "extend", cold=True).key
    assert Ask((part,), model="m").key != Ask((part,)).key and Ask((part,), most=3).key != Ask((part,)).key
    assert [ask.kind for ask in Case("x", one(Ask((part,), "a"), Ask((part,), "b"))).asks()] == ["a", "b"]


@pytest.mark.parametrize(("unit", "longest"), [(16, 1984), (128, 1984), (528, 4032), (1152, 4032)])
def test_half_of_the_lengths_have_a_unit_that_is_found(unit: int, longest: int) -> None:
    lengths = ProbeTexts(Draw(0), ServerProfile("", unit=unit, longest=longest)).lengths()
    assert len(lengths) > 4 and max(lengths) + 2 * unit + 8 <= longest
    assert sum(n > unit for n in lengths) * 2 > len(lengths)
