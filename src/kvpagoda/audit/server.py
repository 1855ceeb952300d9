"""A server with the OpenAI interface, seen from outside: requests, answers, and what it says is cached. Needs httpx."""

from __future__ import annotations

import json
import shlex
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address
from threading import Lock
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvpagoda.audit.prompts import LETTERS, Ask, Symbols
from kvpagoda.errors import BadInput, Exhausted, MissingExtra, shown

Tokens = tuple[int, ...]
_EVERYTHING = 1 << 30
_PATHS = (False, "/v1/completions"), (True, "/v1/chat/completions")
_BUSY = (429, 503)
"""What a server answers that is busy, or still loads its model."""
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class OutOfRequests(Exhausted):
    """The audit has sent as many requests as it may."""


class Unanswered(Exception):
    """A request got no answer that can be read; the text says why."""

    is_refused = False
    """Whether the server read the request, and does not want to answer it."""


@dataclass(frozen=True)
class ServerAnswer:
    """An answer.

    Args:
        text: what it says.
        tokens: its tokens, by id or text; without log-probabilities its text as one.
        tops: for each token the log-probabilities of the likeliest ones.
        ids: its token ids, if the server says them.
        cached: the prompt tokens that were cached, as the server says; None: it does not.
        num_prompt: tokens of the prompt.
        common: the most of them that can be cached, by what was sent before; None: not known.
        counter: the field that says how many were cached; empty: none does.
    """

    text: str
    tokens: tuple[str, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()
    ids: Tokens | None = None
    cached: int | None = None
    num_prompt: int = 0
    common: int | None = None
    counter: str = ""


Answers = Sequence[ServerAnswer | None]
"""The answers to the requests of a case so far; None for one without."""


@dataclass(frozen=True)
class ServerProfile:
    """What a server has, as far as an audit asks for it.

    Args:
        model: the name of the model; empty: the server has one alone.
        owner: who owns it, as ``/v1/models`` says.
        as_ids: whether prompts may be token ids.
        longest: the most tokens of a prompt that is asked.
        adapters: other models that are adapters of this one.
        completions: the fields with which completions give log-probabilities; None: there are no completions.
        chats: the same for chats.
        extras: further fields that are taken.
        top: of how many tokens log-probabilities are given, 0: none.
        counter: the field that says how many tokens were cached, empty: none.
        per: for completions and chats, tokens of a symbol.
        shared: for completions and chats, the tokens that every prompt begins with.
        takes_salts: whether it looks at ``cache_salt``.
        has_salts: whether a ``cache_salt`` makes a prompt cold; None: not known.
        has_images: whether chats take pictures; None: not known.
        unit: hits are whole multiples of it; 0: not known.
        least: tokens of the shortest prompt that was found; 0: not known.
        cold: how a cold twin is made: "salt", "off" or "churn".
        churn: how many other prompts are asked to fill the cache.
        churn_length: tokens of each.
        evicts: whether a prompt was found no more after these; it is found where there are tiers.
        num_blocks_tokens: tokens that the cache holds, as the server says; 0: it does not.
        preemptions: whether the server says how many requests were preempted.
    """

    model: str
    owner: str = ""
    as_ids: bool = False
    longest: int = 2048
    adapters: list[str] = field(default_factory=list)
    completions: dict[str, Any] | None = None
    chats: dict[str, Any] | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    top: int = 0
    counter: str = ""
    per: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    takes_salts: bool = True
    has_salts: bool | None = None
    has_images: bool | None = None
    unit: int = 0
    least: int = 0
    cold: str = ""
    churn: int = 0
    churn_length: int = 0
    evicts: bool = False
    num_blocks_tokens: int = 0
    preemptions: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)

    @property
    def is_chat(self) -> bool:
        """Whether there are only chats."""
        return self.completions is None

    @property
    def per_symbol(self) -> int:
        """Tokens of a symbol in most requests."""
        return self.per.get("chat" if self.is_chat else "completion", 1)

    def shared_by(self, ask: Ask) -> int:
        """Return how many tokens ``ask`` begins with that every prompt begins with."""
        return self.shared.get("chat" if ask.chat else "completion", 0)


class Server:
    """A server at ``url``.

    Args:
        url: its address, with or without ``/v1``.
        key: the API key, if it wants one.
        max_requests: how many requests are sent at most.
        is_remote: whether an address other than loopback is meant.
        timeout: seconds to wait for an answer.

    Raises:
        BadInput: not an address, or not one of this machine and not ``is_remote``.
        MissingExtra: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        max_requests: int = 400,
        is_remote: bool = False,
        timeout: float = 120.0,
    ) -> None:
        with MissingExtra.unless("httpx", "an audit needs httpx; pip install 'kvpagoda[audit]'"):
            import httpx
        self.url = _address(url, is_remote, max_requests)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http, self._errors = httpx.Client(headers=headers, timeout=timeout, trust_env=False), httpx.HTTPError
        self._timeout = timeout
        self._late = httpx.ReadTimeout
        self.max_requests, self.num_requests, self.num_failed = max_requests, 0, 0
        self._counting = Lock()
        self.profile = ServerProfile("")
        self.is_stopped = False
        self.on_request: Any = None
        self._sent = dict[tuple[Any, ...], list[tuple[npt.NDArray[np.int32], int]]]()

    def learn(self, **known: Any) -> ServerProfile:
        """Return the profile, in which fields are now those of ``known``."""
        self.profile = replace(self.profile, **known)
        return self.profile

    def stop(self) -> None:
        """Send no more requests: each raises OutOfRequests."""
        self.is_stopped = True

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_left(self) -> int:
        """How many requests may still be sent."""
        return 0 if self.is_stopped else self.max_requests - self.num_requests

    # -- plain HTTP --------------------------------------------------------------------------------------------------

    def _answered(self, send: Callable[[], Any]) -> Any:
        """Return the reply to ``send``, which is called again while the server says that it is busy, or not yet ready, for as
        long as an answer may take."""
        until = monotonic() + self._timeout
        while True:
            reply = send()
            if reply.status_code not in _BUSY or self.is_stopped or monotonic() >= until:
                return reply
            sleep(min(_wait_of(reply), max(0.0, until - monotonic())))

    def get(self, path: str) -> Any:
        """Return what the server says at ``path``: JSON if it is that, else text; None if it has no such page.

        Raises:
            Unanswered: nobody answers.
        """
        try:
            reply = self._answered(lambda: self._http.get(self.url + path))
        except self._errors as error:
            raise Unanswered(f"{self.url}{path}: {error or type(error).__name__}") from None
        if reply.status_code != 200:
            return None
        try:
            return reply.json()
        except ValueError:
            return reply.text

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to ``body``; it counts as a request, however often it was sent to a server that was busy.

        Raises:
            OutOfRequests: no more may be sent.
            Unanswered: nobody answers, or with an error.
        """
        self._count()
        try:
            reply = self._answered(lambda: self._http.post(self.url + path, json=body))
            if reply.status_code == 200:
                return reply.json()
        except (self._errors, ValueError) as error:
            self.num_failed += 1
            raise Unanswered(f"{path}: {error or type(error).__name__}") from None
        self.num_failed += reply.status_code >= 500
        refusal = Unanswered(f"{path}: {reply.status_code} {' '.join(reply.text.split())[:200]}")
        refusal.is_refused = reply.status_code not in _BUSY
        raise refusal

    def _count(self) -> None:
        with self._counting:
            if self.num_left <= 0:
                raise OutOfRequests.with_hint(
                    f"all {self.max_requests} requests are sent", "raise --max-requests", needed=1, available=0
                )
            self.num_requests += 1
        if self.on_request is not None:
            self.on_request(self.num_requests)

    # -- requests of an audit ----------------------------------------------------------------------------------------

    def ask(self, ask: Ask, answers: Answers = ()) -> ServerAnswer:
        """Return the answer to ``ask``.

        Args:
            ask: the request.
            answers: those of the steps before, which it may repeat.

        Raises:
            OutOfRequests: no more may be sent.
            Unanswered: there is no answer.
        """
        common = self._common(ask, answers)
        answer = answer_of(self.post(*self.body(ask, answers)))
        self._remember(ask, answers, answer)
        return replace(answer, common=common)

    def together(self, asks: Sequence[Ask], answers: Answers = ()) -> list[ServerAnswer | None]:
        """Return the answers to requests that are sent at the same moment; None for one without. Raises OutOfRequests."""
        if len(asks) > self.num_left:
            raise OutOfRequests("too few requests are left", needed=len(asks), available=self.num_left)

        def answer(ask: Ask) -> ServerAnswer | None:
            try:
                return answer_of(self.post(*self.body(ask, answers)))
            except Unanswered:
                return None

        with ThreadPoolExecutor(max(1, len(asks))) as pool:
            found = [*pool.map(answer, asks)]
        sent = [self._sent_with(ask, answers, one) for ask, one in zip(asks, found)]
        for number, (ask, one) in enumerate(zip(asks, found)):
            if one is not None:
                common = self._common(ask, answers, sent[:number] + sent[number + 1 :])
                found[number] = replace(one, common=common)
        for who, text, more in sent:
            self._sent.setdefault(who, []).append((text, more))
        return found

    def abort(self, ask: Ask, answers: Answers = (), after: float | None = None) -> None:
        """Ask, and close the connection ``after`` so many seconds; None: at the first token. Raises OutOfRequests,
        Unanswered."""
        path, body = self.body(ask, answers)
        self._count()
        self._remember(ask, answers, None)
        usual = self._http.timeout.connect
        more: dict[str, Any] = {} if after is None else {"timeout": (usual, max(after, 1e-3), usual, usual)}
        until = monotonic() + (after or 0.0)
        try:
            with self._http.stream("POST", self.url + path, json={**body, "stream": True}, **more) as reply:
                if after is not None:
                    return sleep(max(0.0, until - monotonic()))
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        break
        except self._errors as error:
            if after is not None and isinstance(error, self._late):
                return None
            raise Unanswered(f"{path}: {error or type(error).__name__}") from None

    def body(self, ask: Ask, answers: Answers = ()) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of ``ask``."""
        profile = self.profile
        body: dict[str, Any] = {**self.plain(ask.model), "max_tokens": ask.most, **profile.extras}
        body |= (profile.chats if ask.chat else profile.completions) or {}
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        if ask.cold:
            body["cache_prompt"] = False
        if ask.chat:
            body["messages"] = [*self._messages(ask, answers)]
            if any(part.role == "tool" for part in ask.parts):
                body["tools"] = [TOOL]
            return _PATHS[1][1], body
        body["prompt"] = self.prompt(ask, answers)
        return _PATHS[0][1], body

    def plain(self, model: str | None = None) -> dict[str, Any]:
        """Return the fields of all requests: the likeliest tokens of ``model``, or of the model of the audit."""
        name = model or self.profile.model
        return {**({"model": name} if name else {}), "temperature": 0, "seed": 0}

    def prompt(self, ask: Ask, answers: Answers = ()) -> list[int] | str:
        """Return the prompt of a completion: token ids, or text where the server takes no ids."""
        if self.profile.as_ids:
            ids = list[int]()
            for part in ask.parts:
                found = None if part.answer is None else answers[part.answer]
                ids += part.symbols if part.answer is None else (found and found.ids) or ()
            return ids
        text = "".join(self._text(part.symbols, part.answer, answers) for part in ask.parts)
        return text.removeprefix(" ")  # which may be a token of its own, with which all prompts would begin

    @staticmethod
    def _text(symbols: Symbols, answer: int | None, answers: Answers) -> str:
        if answer is not None:
            found = answers[answer]
            return "" if found is None else found.text
        return "".join(f" {LETTERS[symbol % len(LETTERS)]}" for symbol in symbols)

    def _messages(self, ask: Ask, answers: Answers) -> Any:
        for number, part in enumerate(ask.parts):
            text = self._text(part.symbols, part.answer, answers).strip()
            if part.image is not None:
                picture = {"type": "image_url", "image_url": {"url": picture_of(part.image)}}
                yield {"role": part.role, "content": [picture, {"type": "text", "text": text}]}
            elif part.role == "tool":
                call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
                yield {"role": "tool", "tool_call_id": f"call_{number}", "content": text}
            else:
                yield {"role": part.role, "content": text}

    def curl(self, ask: Ask, answers: Answers = ()) -> str:
        """Return a line for a shell that sends ``ask``."""
        path, body = self.body(ask, answers)
        key = """ -H "Authorization: Bearer $KEY" """.rstrip() if "authorization" in self._http.headers else ""
        text = json.dumps(body, separators=(",", ":"))
        return f"curl -s {self.url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(text)}"

    # -- what was sent before ----------------------------------------------------------------------------------------

    def _written(self, ask: Ask, answers: Answers) -> tuple[tuple[Any, ...], npt.NDArray[np.int32]]:
        """Return who may share what is cached with ``ask``, and its text as numbers, one for a token or more."""
        adapter = ask.model if ask.model in self.profile.adapters else None
        if not ask.chat:
            prompt = self.prompt(ask, answers)
            numbers = prompt if isinstance(prompt, list) else [*_bytes(prompt)]
        else:
            numbers = [-1] * any(part.role == "tool" for part in ask.parts)
            for part in ask.parts:
                numbers += [-2, *_bytes(part.role), -2]
                numbers += [] if part.image is None else [-3, part.image, -4]
                numbers += _bytes(self._text(part.symbols, part.answer, answers).strip())
        salt = ask.salt if self.profile.takes_salts else None
        return (ask.chat, adapter, salt), np.array(numbers, np.int32)

    def _sent_with(
        self, ask: Ask, answers: Answers, answer: ServerAnswer | None
    ) -> tuple[tuple[Any, ...], npt.NDArray[np.int32], int]:
        """Return who may share what ``ask`` and its ``answer`` leave in the cache, its text, and how many tokens behind that
        may be cached, too: what is not known of an answer may begin as another prompt goes on, by chance."""
        who, numbers = self._written(ask, answers)
        more: Sequence[int] = ()
        if answer is not None and not ask.chat:
            more = (answer.ids or ()) if self.profile.as_ids else [*_bytes(answer.text)]
        elif answer is not None:
            more = [-2, *_bytes("assistant"), -2, *_bytes(answer.text.strip())]
        is_known = self.profile.as_ids and answer is not None and answer.ids is not None
        return who, np.append(numbers, np.array(more, np.int32)), 8 if ask.chat else 0 if is_known else 2

    def _remember(self, ask: Ask, answers: Answers, answer: ServerAnswer | None) -> None:
        who, text, more = self._sent_with(ask, answers, answer)
        self._sent.setdefault(who, []).append((text, more))

    def _common(
        self, ask: Ask, answers: Answers,
        beside: Sequence[tuple[tuple[Any, ...], npt.NDArray[np.int32], int]] = (),
    ) -> int | None:  # fmt: skip
        """Return the most tokens of ``ask`` that can be cached: what it begins with that was sent before, or ``beside`` it, by
        those who may share it. None: not known."""
        who, numbers = self._written(ask, answers)
        most, more = 0, 8 if ask.chat else 0 if self.profile.as_ids else 2
        for other, beyond in [*self._sent.get(who, ()), *((text, n) for whose, text, n in beside if whose == who)]:
            n = min(len(numbers), len(other))
            differs = numbers[:n] != other[:n]
            same = int(differs.argmax()) if differs.any() else n
            most = max(most, same)
            if not self.profile.as_ids or ask.chat or same == len(other):
                more = max(more, same + beyond)
        if (numbers[:most] == -4).any() or (numbers[:1] == -1).any():
            return None
        messages = max(1, int((numbers[:most] == -2).sum()) // 2)  # what a template has before each
        return max(most, more) + self.profile.shared_by(ask) * messages


def _wait_of(reply: Any) -> float:
    """Return after how many seconds a server that is busy wants to be asked again."""
    with suppress(ValueError):  # it may be a date
        return max(0.05, float(reply.headers.get("Retry-After", "1")))
    return 1.0


def _bytes(text: str) -> bytes:
    """Return ``text`` as bytes: a token has one of them at least, where a letter may have several tokens."""
    return text.encode("utf-8", "surrogatepass")


def answer_of(reply: Any) -> ServerAnswer:
    """Return what a server's ``reply`` to a completion or a chat says. Raises Unanswered."""
    try:
        choice = reply["choices"][0]
        text = _text_of(choice)
        tokens, tops = _logprobs(choice.get("logprobs"))
        usage = reply.get("usage") or {}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise Unanswered(f"an answer that cannot be read: {shown(reply)}") from None
    ids = choice.get("token_ids")
    if ids is None and tokens and all(token.startswith("token_id:") for token in tokens):
        ids = [int(token[9:]) for token in tokens]
    content = (choice.get("logprobs") or {}).get("content")
    if ids is None and content and all(isinstance(entry.get("id"), int) for entry in content):
        ids = [entry["id"] for entry in content]
    field_of_count = counter_of(reply)
    cached = _at(reply, field_of_count) if field_of_count else None
    return ServerAnswer(
        text,
        tokens or (text,),
        tops,
        None if ids is None else tuple(ids),
        cached,
        int(usage.get("prompt_tokens") or 0),
        counter=field_of_count,
    )


def _text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice: of a chat with what a model thinks, which is all that there is of a short answer."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice["message"]
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    thoughts: str = message.get("reasoning_content") or message.get("reasoning") or ""
    return thoughts + content


COUNTERS = (
    "usage.prompt_tokens_details.cached_tokens", "timings.cache_n", "usage.cached_tokens", "usage.prompt_cache_hit_tokens",
    "cached_tokens",
)  # fmt: skip
"""Fields in which servers say how many prompt tokens were cached."""


def counter_of(reply: Any) -> str:
    """Return the name of the field that says how many tokens were cached; empty if there is none."""
    return next((name for name in COUNTERS if isinstance(_at(reply, name), int)), "")


def _at(reply: Any, name: str) -> Any:
    for key in name.split("."):
        reply = reply.get(key) if isinstance(reply, dict) else None
    return reply


def _logprobs(data: Any) -> tuple[tuple[str, ...], tuple[Mapping[str, float], ...]]:
    """Return the tokens and the log-probabilities at each, from either of the two forms that servers use."""
    if not data:
        return (), ()
    if isinstance(data.get("content"), list):
        entries = [entry for entry in data["content"] if entry]
        name = _name_of
        tops = [
            {name(top): float(top["logprob"]) for top in [*reversed(entry.get("top_logprobs") or ()), entry]}
            for entry in entries
        ]
        # what was chosen at temperature 0; mlx-lm 0.32.2 puts any of the likeliest tokens in its place
        return tuple(max(top, key=top.__getitem__) for top in tops), tuple(tops)
    tokens = [str(token) for token in data.get("tokens") or ()]
    own = data.get("token_logprobs") or [None] * len(tokens)
    best = data.get("top_logprobs") or [{}] * len(tokens)
    tops = [
        {**{str(name): float(value) for name, value in (top or {}).items()}, **({} if mine is None else {token: mine})}
        for token, mine, top in zip(tokens, own, best)
    ]
    return tuple(tokens), tuple(tops)


def _name_of(entry: Mapping[str, Any]) -> str:
    for key in ("id", "token"):
        if isinstance(entry.get(key), str | int) and not isinstance(entry.get(key), bool):
            return str(entry[key])
    return str(entry.get("bytes"))


def picture_of(number: int) -> str:
    """Return a picture of 32 x 32 pixels, another one for each ``number``, as a ``data:`` address."""
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _address(url: str, is_remote: bool, max_requests: int) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is no number
        is_address = False
    if not is_address or parts.hostname is None:
        raise BadInput(
            f"an audit needs an address such as http://127.0.0.1:8000, got {shown(url)}", field="url", needed=url
        )
    if not is_remote and not _is_loopback(parts.hostname):
        raise BadInput.with_hint(
            f"{parts.hostname} is not this machine, and an audit sends up to {max_requests:,} requests that fill its cache",
            "give --remote if it may",
            field="url",
            needed=url,
        )
    path = parts.path.rstrip("/")
    for _, end in reversed(_PATHS):
        path = path.removesuffix(end)
    return parts._replace(path=path.removesuffix("/v1"), query="", fragment="").geturl()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
