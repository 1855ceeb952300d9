"""Requests and answers of an audit, in the forms of several servers."""

from __future__ import annotations

import json
import shlex
from threading import Thread
from time import sleep
from typing import Any

import pytest

pytest.importorskip("httpx", reason="no httpx: the extra audit")
from fake_engine import Engine, Fault, Job
from fake_server import FakeServer

from kvpagoda.audit.prompts import Ask, PromptPart
from kvpagoda.audit.server import OutOfRequests, Server, ServerAnswer, ServerProfile, Unanswered, answer_of, counter_of
from kvpagoda.errors import BadInput
from raises import raises

CHOICE = {
    "text": "ab",
    "logprobs": {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"a": -0.5, "c": -2.0}, {"c": -0.7}],
    },
}
ENTRY = {"id": 7, "token": "a", "logprob": -0.5, "top_logprobs": [{"id": 7, "token": "a", "logprob": -0.5}]}


def test_answers_are_read_in_both_forms() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = answer_of({"choices": [CHOICE], "usage": usage})
    assert (answer.text, answer.tokens, answer.cached, answer.num_prompt) == ("ab", ("a", "b"), 4, 9)
    assert answer.tops == ({"a": -0.5, "c": -2.0}, {"c": -0.7, "b": -1.0}) and answer.ids is None
    listed = {"message": {"content": "a"}, "logprobs": {"content": [ENTRY]}}
    answer = answer_of({"choices": [listed], "usage": {"prompt_tokens": 9}, "timings": {"cache_n": 3}})
    assert (answer.tokens, answer.tops, answer.ids) == (("7",), ({"7": -0.5},), (7,))
    assert answer.cached == 3
    named = {"text": "a", "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": None}}
    assert answer_of({"choices": [named]}).ids == (5,)


@pytest.mark.parametrize(
    ("reply", "name"),
    [
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}, "usage.prompt_tokens_details.cached_tokens"),
        ({"usage": {"prompt_tokens_details": None}}, ""),
        ({"timings": {"cache_n": 2}}, "timings.cache_n"),
        ({"usage": {"prompt_cache_hit_tokens": 2}}, "usage.prompt_cache_hit_tokens"),
        ({"cached_tokens": 1}, "cached_tokens"),
        ({}, ""),
    ],
)
def test_counters_have_several_names(reply: Any, name: str) -> None:
    assert counter_of(reply) == name


@pytest.mark.parametrize("reply", [None, {}, {"choices": []}, {"choices": [{"text": "a", "logprobs": 3}]}, "error"])
def test_what_is_no_answer_is_refused(reply: Any) -> None:
    with pytest.raises(Unanswered):
        answer_of(reply)


@pytest.mark.parametrize("url", ["http://10.0.0.3:8000", "example.org", "https://example.org/v1", "http://0.0.0.0:1"])
def test_other_machines_are_asked_only_if_they_may(url: str) -> None:
    with raises(BadInput, needed=url, field="url"):
        Server(url)
    assert not Server(url, is_remote=True).url.endswith("/v1")


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:8000/v1/", "http://[::1]:8000", "127.8.8.8"])
def test_this_machine_may_be_asked(url: str) -> None:
    assert not Server(url).url.endswith("/")


@pytest.mark.parametrize("url", ["", "http://", "ftp://127.0.0.1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with raises(BadInput, needed=url, field="url"):
        Server(url)


def test_no_more_requests_are_sent_than_may_be() -> None:
    with FakeServer() as fake, Server(fake.url, max_requests=2) as server:
        server.profile = ServerProfile("fake-hybrid", as_ids=True, completions={"logprobs": 5})
        ask = Ask((PromptPart((65, 66, 67)),))
        server.ask(ask)
        server.ask(ask)
        with raises(OutOfRequests, needed=1, available=0):
            server.ask(ask)
        with raises(OutOfRequests, needed=2, available=0):
            server.together([ask, ask])
        assert server.num_requests == fake.num_requests == 2


def test_two_threads_do_not_send_the_last_request_twice() -> None:
    """An abort is sent beside a request, and both have seen that one is left."""

    class Late(Server):
        @property
        def num_left(self) -> int:
            left = super().num_left
            if left == 1 and not others:
                others.append(Thread(target=self.abort, args=(ask,)))
                others[0].start()
                others[0].join(0.1)
            return left

    others, refused = list[Thread](), list[object]()
    ask = Ask((PromptPart((65, 66, 67)),))
    with FakeServer() as fake, Late(fake.url, max_requests=1) as server:
        server.profile = ServerProfile("fake-hybrid", as_ids=True, completions={"logprobs": 5})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("threading.excepthook", lambda told: refused.append(told.exc_type))
            server.ask(ask)
            others[0].join()
        assert refused == [OutOfRequests] and server.num_requests == fake.num_requests == 1


def test_what_can_be_cached_is_what_was_sent_before() -> None:
    with FakeServer() as fake, Server(fake.url) as server:
        server.profile = ServerProfile(
            "fake-hybrid", as_ids=True, completions={"logprobs": 5}, chats={}, adapters=["fake-adapter"]
        )
        p = tuple(range(40, 80))
        assert server.ask(Ask((PromptPart(p),))).common == 0
        again = server.ask(Ask((PromptPart(p),)))
        assert (
            again.common == 42 and (again.cached or 0) <= 40
        )  # two for chance: its answer may begin as another prompt goes on
        assert server.ask(Ask((PromptPart(p[:20] + (99,) * 20),))).common == 20
        assert server.ask(Ask((PromptPart(p),), salt="x")).common == 0
        assert server.ask(Ask((PromptPart(p),), model="fake-adapter")).common == 0
        picture = Ask((PromptPart(p, image=1),), chat=True)
        server.ask(picture)
        assert server.ask(Ask((PromptPart(p, image=2),), chat=True)).common < 20
        assert server.ask(picture).common is None  # how many tokens a picture has is not known
        tool = Ask((PromptPart(p[:4]), PromptPart(p[:4], "tool")), chat=True)
        assert server.ask(tool).common is None or server.ask(tool).common is None


def test_nothing_is_left_to_chance_where_the_ids_of_answers_are_known() -> None:
    with FakeServer() as fake, Server(fake.url) as server:
        server.profile = ServerProfile("fake-hybrid", as_ids=True, extras={"return_token_ids": True}, completions={})
        p = tuple(range(40, 80))
        first = server.ask(Ask((PromptPart(p),), most=3))
        assert first.ids is not None and server.ask(Ask((PromptPart(p),))).common == 40
        assert server.ask(Ask((PromptPart(p), PromptPart(answer=0), PromptPart((66,)))), [first]).common == 43


def test_what_can_be_cached_of_requests_at_the_same_moment_is_what_they_share() -> None:
    with FakeServer() as fake, Server(fake.url) as server:
        server.profile = ServerProfile("fake-hybrid", as_ids=True, extras={"return_token_ids": True}, completions={})
        p, q = tuple(range(40, 80)), tuple(range(80, 120))
        left, right, other = server.together(
            [Ask((PromptPart(p),)), Ask((PromptPart(p[:30] + q),)), Ask((PromptPart(q),))]
        )
        assert (left.common, right.common, other.common) == (30, 30, 0)
        (again,) = server.together([Ask((PromptPart(q),))])
        assert again.common == 40


class Unwritten(Fault):
    """Writes down how far a request was when it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[tuple[int, int]] = []

    def ended(self, engine: Engine, job: Job, how: str) -> None:
        if how == "aborted":
            self.aborted.append((job.sequence.length, len(job.samples)))


def test_a_request_can_be_aborted_while_its_prompt_is_computed() -> None:
    fault = Unwritten()
    with FakeServer(fault, chunk=16, pause=0.02) as fake, Server(fake.url) as server:
        server.profile = ServerProfile("fake-hybrid", as_ids=True, completions={})
        ask = Ask((PromptPart(tuple(range(40, 240))),), most=40)
        server.abort(ask, after=0.1)
        server.abort(ask)
        for _ in range(500):
            if len(fault.aborted) == 2:
                break
            sleep(0.01)
    (early, nothing), (late, some) = fault.aborted
    assert nothing == 0 and early < 200 <= late and some > 0


def test_a_letter_of_an_answer_may_have_several_tokens() -> None:
    """As with mlx-lm 0.32.2, whose answers in random bytes are cut into others when they are part of a prompt."""
    server, answer = Server("http://127.0.0.1:9"), ServerAnswer("\ufffd\u20ac")
    server.profile = ServerProfile("m", completions={})
    first = Ask((PromptPart((0, 1)),))
    server._remember(first, [], answer)
    assert server._common(Ask((*first.parts, PromptPart(answer=0))), [answer]) == len("a b") + 6 + 2


def test_a_line_for_a_shell_sends_the_same() -> None:
    server = Server("http://127.0.0.1:9", key="secret")
    server.profile = ServerProfile("m", completions={"logprobs": 5})
    ask = Ask((PromptPart((0, 1)), PromptPart(answer=0)), salt="it's")
    line = server.curl(ask, [ServerAnswer("x'y")])
    words = shlex.split(line)
    assert words[0] == "curl" and words[2] == "http://127.0.0.1:9/v1/completions" and "secret" not in line
    assert json.loads(words[-1]) == server.body(ask, [ServerAnswer("x'y")])[1]
    assert json.loads(words[-1])["prompt"] == "a bx'y" and json.loads(words[-1])["cache_salt"] == "it's"
