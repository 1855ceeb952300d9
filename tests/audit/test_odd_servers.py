"""Servers that are right, and answer in ways that are odd but allowed: clean, or not to be judged, but never a finding."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

pytest.importorskip("httpx", reason="no httpx: the extra audit")
from fake_engine import Engine
from fake_server import DIALECTS, Dialect, FakeServer, Refused

from kvpagoda.audit import audit
from kvpagoda.audit.server import Server, Unanswered, answer_of
from kvpagoda.errors import BadInput

TEXT = DIALECTS["vllm, text alone"]
PLAIN = replace(TEXT, salts=False)  # it does not look at cache_salt
PLAIN_FIELDS = {"model", "prompt", "messages", "temperature", "seed", "max_tokens", "logprobs", "top_logprobs", "tools"}


class OddServer(FakeServer):
    """Calls ``refuse`` with each request, which may raise Refused, and ``change`` with each answer."""

    def __init__(
        self, dialect: Dialect | str, refuse: Callable[[dict[str, Any]], None] | None = None,
        change: Callable[[dict[str, Any]], None] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.refuse, self.change = refuse, change
        super().__init__(None, dialect, seed=1, **options)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if self.refuse is not None:
            self.refuse(body)
        reply, is_stream = super().post(path, body)
        whole = reply.whole

        def changed(samples: Any) -> dict[str, Any]:
            answer = whole(samples)
            if self.change is not None:
                self.change(answer)
            return answer

        reply.whole = changed
        return reply, is_stream


def busy(every: int, status: int, after: float | None) -> Callable[[dict[str, Any]], None]:
    numbers = count(1)

    def refuse(_: dict[str, Any]) -> None:
        if next(numbers) % every == 0:
            raise Refused("try again", status, after)

    return refuse


def strict(body: dict[str, Any]) -> None:
    if more := set(body) - PLAIN_FIELDS - {"stream"}:
        raise Refused(f"extra fields not permitted: {sorted(more)}", 422)


def zero_left_out(answer: dict[str, Any]) -> None:
    usage = answer["usage"]
    if not usage["prompt_tokens_details"]["cached_tokens"]:
        usage["prompt_tokens_details"] = None


def rounded(answer: dict[str, Any]) -> None:
    details = answer["usage"]["prompt_tokens_details"]
    details["cached_tokens"] -= details["cached_tokens"] % 48


def without_usage(answer: dict[str, Any]) -> None:
    del answer["usage"]


@pytest.mark.parametrize(("dialect", "status"), [(TEXT, 429), (PLAIN, 503)])
def test_a_server_that_is_busy_is_asked_again(dialect: Dialect, status: int) -> None:
    with OddServer(dialect, busy(3, status, 0.05)) as fake:
        report = audit(fake.url, max_requests=200, seed=5)
        assert report.verdict == "clean" and report.audit.server.profile.has_salts is dialect.salts
        assert not report.audit.results.skipped.keys() & {"hits", "turns"}
        assert fake.num_requests <= 200, "a request counts once, however often it was sent"


def test_a_server_that_stays_busy_is_asked_for_as_long_as_an_answer_may_take() -> None:
    with OddServer(TEXT, busy(1, 503, None)) as fake, pytest.raises(BadInput, match="answers neither"):
        audit(fake.url, max_requests=50, timeout=0.2)
    with OddServer(TEXT, busy(1, 503, 60.0)) as fake, Server(fake.url, timeout=0.2) as server:
        with pytest.raises(Unanswered, match="503") as raised:
            server.post("/v1/completions", {"prompt": "a"})
        assert not raised.value.is_refused and server.num_requests == 1


@pytest.mark.parametrize("has_counter", [True, False])
def test_a_server_that_refuses_fields_that_it_does_not_know_is_judged(has_counter: bool) -> None:
    with OddServer(replace(PLAIN, counter=has_counter), strict) as fake:
        with pytest.raises(BadInput, match="--cold salt does not make prompts cold here") as raised:
            audit(fake.url, max_requests=200, cold="salt")
        assert raised.value.needed == "salt"
        report = audit(fake.url, max_requests=200, seed=5)
    profile = report.audit.server.profile
    assert report.verdict == "clean" and profile.cold == "churn" and not profile.takes_salts and not profile.extras


@pytest.mark.parametrize("dialect", [TEXT, PLAIN, DIALECTS["chat alone"]], ids=["salts", "churn", "chat"])
def test_a_counter_that_is_left_out_where_nothing_is_cached_is_found(dialect: Dialect) -> None:
    with OddServer(dialect, change=zero_left_out) as fake:
        report = audit(fake.url, max_requests=120, seed=5)
    assert not report.findings and report.audit.server.profile.unit == 16
    assert report.audit.server.profile.counter and not any(
        "does not say" in note for note in report.audit.results.notes
    )
    assert report.verdict == "clean" or dialect is not TEXT, "where twins cost churn, 120 requests are too few"


@pytest.mark.parametrize("change", [rounded, without_usage])
def test_counters_that_say_little_are_no_finding(change: Callable[[dict[str, Any]], None]) -> None:
    with OddServer(TEXT, change=change) as fake:
        report = audit(fake.url, max_requests=150, seed=5)
    assert report.verdict == "clean" and report.audit.server.profile.unit == (48 if change is rounded else 0)


def test_a_server_that_cuts_long_prompts_is_asked_shorter_ones() -> None:
    """It leaves out their beginning and answers, so that prompts with one end are one."""

    def cut(body: dict[str, Any]) -> None:
        if "prompt" in body:
            body["prompt"] = body["prompt"][-120:]

    with OddServer(TEXT, cut) as fake:
        report = audit(fake.url, max_requests=200, seed=5)
    assert report.verdict == "clean" and report.audit.server.profile.longest == 84


class Router(OddServer):
    """Leads every other request to another engine, which has a cache of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(TEXT, **options)
        self.engines = [self.engine, Engine(self.model, seed=2, **options)]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.engine = self.engines[self.num_requests % 2]
        return super().post(path, body)

    def close(self) -> None:
        super().close()
        self.engines[self.engine is self.engines[0]].close()


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_engines_behind_a_router_are_one_server(noise: float) -> None:
    """Each rounds in its own way, and finds what it was asked itself."""
    with Router(shape_noise=noise) as fake:
        report = audit(fake.url, max_requests=200, seed=5)
    assert report.verdict == "clean" and report.audit.server.profile.unit == 16


def test_more_than_the_whole_prompt_is_named_as_such() -> None:
    """Said of prompts without what was cached, as some other interfaces count them."""

    def without_cached(answer: dict[str, Any]) -> None:
        usage = answer["usage"]
        usage["prompt_tokens"] -= usage["prompt_tokens_details"]["cached_tokens"]

    with OddServer(TEXT, change=without_cached) as fake:
        (finding,) = audit(fake.url, max_requests=120, seed=5).findings
    most = re.match(
        r"A prompt with fewer tokens reports .* requests: ([\d,]+) of ([\d,]+), where at most ([\d,]+)", finding.text
    )
    assert most is not None and most[2] == most[3] and int(most[1]) > int(most[2])


@pytest.mark.parametrize("text", ["", None])
@pytest.mark.parametrize("dialect", [TEXT, DIALECTS["chat alone"]], ids=["completions", "chat"])
def test_answers_that_say_nothing_cannot_be_judged(dialect: Dialect, text: str | None) -> None:
    def emptied(answer: dict[str, Any]) -> None:
        (choice,) = answer["choices"]
        choice.pop("token_ids", None)
        choice["logprobs"] = None
        where, name = (choice["message"], "content") if "message" in choice else (choice, "text")
        where[name] = text

    with OddServer(dialect, change=emptied) as fake:
        report = audit(fake.url, max_requests=150, seed=5)
    assert report.code == 2 and report.audit.results.why_not() == "its answers have neither text nor log-probabilities"


def test_what_a_model_thinks_and_texts_in_parts_are_read() -> None:
    for message, text in (
        ({"content": None, "reasoning_content": "ab"}, "ab"), ({"content": "c", "reasoning": "ab"}, "abc"),
        ({"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}, "abc"), ({"content": []}, ""),
    ):  # fmt: skip
        assert answer_of({"choices": [{"message": message}]}).text == text
    assert answer_of({"choices": [{"text": None}]}).text == ""
