"""Cold twins where they cost churn, and which of them are noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("httpx", reason="no httpx: the extra audit")

from kvpagoda.audit.findings import _answers_of
from kvpagoda.audit.judge import Audit
from kvpagoda.audit.prompts import Ask, Case, Draw, PromptPart, PromptStep
from kvpagoda.audit.results import Miscount, Results
from kvpagoda.audit.runner import CaseRunner
from kvpagoda.audit.server import Answers, OutOfRequests, Server, ServerAnswer
from kvpagoda.audit.verdict import MOST_ROUNDING, Noise


class Churned(CaseRunner):
    """Cold twins of which two can be asked, the first at its second try."""

    num_churns, num_asked = 0.0, 0

    def churn(self, share: float = 1.0) -> None:
        self.num_churns += share

    def _cold(self, ask: Ask, answers: Answers) -> ServerAnswer | None:
        self.num_asked += 1
        if self.num_asked > 3:
            raise OutOfRequests("all are sent")
        return None if self.num_asked == 1 else ServerAnswer(str(ask.parts[0].symbols[1]))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("http://127.0.0.1:1") as server:
        server.learn(cold="churn", completions={})
        yield server


def test_twins_of_one_beginning_are_asked_one_after_the_other_and_kept_when_no_more_can_be(server: Server) -> None:
    runner = Churned(server, Draw(0), Results())
    wanted = [(Ask((PromptPart((1, number)),)), ()) for number in range(3)]
    found = runner.cold(wanted)
    assert [answer and answer.text for answer in found] == ["0", "1", None]
    assert runner.num_churns == 1 + 2 + 1 + 1


def test_what_chats_begin_with_is_no_noise_where_there_are_completions(server: Server) -> None:
    audit, cold, warm = Audit(server, 0), ServerAnswer("a", cached=0), ServerAnswer("b", cached=22)
    assert audit._is_noise(cold, cold) and not audit._is_noise(cold, warm)
    server.learn(completions=None)
    assert audit._is_noise(cold, warm)


def test_answers_beside_others_count_from_what_rounding_makes_of_them() -> None:
    results = Results()
    results.noise = Noise([0.0], [1e-5])
    assert results.noise_of("at once").limit == results.noise_of("under load", "at once").limit == MOST_ROUNDING
    assert results.noise_of("at once", "repeat").limit == results.noise_of("after at once").limit < MOST_ROUNDING


def test_twins_of_before_a_wait_are_forgotten(server: Server) -> None:
    """Rows of weights that were replaced agree with answers of before, and not with cold runs."""
    waited = list[str]()
    runner = Audit(server, 0, after="restart", wait=waited.append).runner
    runner.twins["a prompt"] = ServerAnswer("of the weights before")
    runner.run(Case("wait", (PromptStep("wait"),)))
    assert not runner.twins and waited == ["restart"]


def test_counters_are_judged_when_it_is_known_what_all_prompts_begin_with(server: Server) -> None:
    """As with a chat's template of twenty tokens, which the first requests of an audit have in common."""
    results = Results()
    runner = CaseRunner(server, Draw(0), results)
    ask, answer = Ask((PromptPart((1, 2)),), chat=True), ServerAnswer("a", cached=20, num_prompt=30, common=8)
    runner.count(ask, [], 0, answer)
    assert not results.miscounts
    server.learn(shared={"chat": 0})
    runner.count(ask, [], 0, answer)
    assert len(results.miscounts) == 1


@pytest.mark.parametrize(
    ("way", "salted", "cold"), [("salt", True, False), ("off", False, True), ("churn", False, False)]
)
def test_a_twin_is_asked_so_that_nothing_cached_is_used(server: Server, way: str, salted: bool, cold: bool) -> None:
    server.learn(cold=way)
    ask = Ask((PromptPart((1, 2)),), "repeat", salt="its own")
    runner = CaseRunner(server, Draw(0), Results())
    twin = runner.twin(ask)
    assert twin.key == ask.key and twin.kind == "" and twin.cold is cold
    assert (twin.salt is not None) is salted and twin.salt != "its own"
    assert not salted or twin.salt != runner.twin(ask).salt  # of two none makes the other one warm


@pytest.mark.parametrize(
    ("cold", "by_tokens", "cached", "said"),
    [
        ("salt", False, 0, "right in 1 of 1"),
        ("salt", False, None, "right in 1 of 1"),
        ("off", False, 0, "right in 1 of 1"),
        ("salt", False, 16, ""),  # the twin is warm
        ("salt", True, 0, ""),
        ("churn", False, 0, ""),
    ],
)
@pytest.mark.parametrize("repeats", [False, True])
def test_an_answer_is_said_to_be_right_if_its_twin_is_cold_and_more_than_tokens_are_compared(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    cold: str,
    by_tokens: bool,
    cached: int | None,
    said: str,
    repeats: bool,
) -> None:
    asked = list[tuple[Ask, Answers]]()
    parts = (PromptPart((1, 2)), PromptPart(answer=0)) if repeats else (PromptPart((1, 2)),)
    answer = ServerAnswer("a", tokens=("a",), tops=() if by_tokens else ({"a": -0.1},))

    def reply(ask: Ask, answers: Answers = ()) -> ServerAnswer:
        asked.append((ask, answers))
        return replace(answer, cached=cached)

    monkeypatch.setattr(server, "ask", reply)
    server.learn(cold=cold)
    audit, before = Audit(server, 0), [ServerAnswer("of the step before")]
    audit.results.noise.by_tokens = by_tokens
    text = _answers_of(audit, [Miscount("prompt", Case("hits"), 1, Ask(parts, "repeat"), before, answer)])
    assert said in text and bool(text) is bool(said)
    assert all((twin.cold or twin.salt) and answers is before for twin, answers in asked)
