"""Cold twins where they cost churn, and which of them are noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("httpx", reason="no httpx: the extra audit")

from kvpagoda.audit.judge import Audit, Results
from kvpagoda.audit.prompts import Ask, Case, PromptPart, PromptStep
from kvpagoda.audit.server import OutOfRequests, Server, ServerAnswer
from kvpagoda.audit.verdict import MOST_ROUNDING, Noise


class Churned(Audit):
    """Cold twins of which two can be asked, the first at its second try."""

    num_churns, num_asked = 0.0, 0

    def churn(self, share: float = 1.0) -> None:
        self.num_churns += share

    def _cold(self, ask: Ask, answers: list[ServerAnswer | None], way: str) -> ServerAnswer | None:
        self.num_asked += 1
        if self.num_asked > 3:
            raise OutOfRequests("all are sent")
        return None if self.num_asked == 1 else ServerAnswer(str(ask.parts[0].symbols[1]))


@pytest.fixture
def audit() -> Iterator[Churned]:
    with Server("http://127.0.0.1:1") as server:
        server.learn(cold="churn", completions={})
        yield Churned(server, 0)


def test_twins_of_one_beginning_are_asked_one_after_the_other_and_kept_when_no_more_can_be(audit: Churned) -> None:
    wanted = [(Ask((PromptPart((1, number)),)), list[ServerAnswer | None]()) for number in range(3)]
    found = audit.cold(wanted)
    assert [answer and answer.text for answer in found] == ["0", "1", None]
    assert audit.num_churns == 1 + 2 + 1 + 1


def test_what_chats_begin_with_is_no_noise_where_there_are_completions(audit: Churned) -> None:
    cold, warm = ServerAnswer("a", cached=0), ServerAnswer("b", cached=22)
    assert audit._is_noise(cold, cold) and not audit._is_noise(cold, warm)
    audit.server.learn(completions=None)
    assert audit._is_noise(cold, warm)


def test_answers_beside_others_count_from_what_rounding_makes_of_them() -> None:
    results = Results()
    results.noise = Noise([0.0], [1e-5])
    assert results.noise_of("at once").limit == results.noise_of("under load", "at once").limit == MOST_ROUNDING
    assert results.noise_of("at once", "repeat").limit == results.noise_of("after at once").limit < MOST_ROUNDING


def test_twins_of_before_a_wait_are_forgotten(audit: Churned) -> None:
    """Rows of weights that were replaced agree with answers of before, and not with cold runs."""
    audit._twins["a prompt"] = ServerAnswer("of the weights before")
    audit._wait = lambda _: None
    audit.run_case(Case("wait", (PromptStep("wait"),)))
    assert not audit._twins


def test_counters_are_judged_when_it_is_known_what_all_prompts_begin_with(audit: Churned) -> None:
    """As with a chat's template of twenty tokens, which the first requests of an audit have in common."""
    ask, answer = Ask((PromptPart((1, 2)),), chat=True), ServerAnswer("a", cached=20, num_prompt=30, common=8)
    audit._count(ask, [], 0, answer)
    assert not audit.results.miscounts
    audit.server.learn(shared={"chat": 0})
    audit._count(ask, [], 0, answer)
    assert len(audit.results.miscounts) == 1
