"""An OpenAI-like server on the loopback, in this process, over ``fake_engine``: what ``kvpagoda audit`` asks in tests.

``Dialect`` says what a server of a kind has and how it spells it; ``DIALECTS`` those of vLLM, SGLang, mlx-lm and llama.cpp,
as far as an audit asks for it. Tokens are characters: token 65 is "A".
"""

from __future__ import annotations

import hashlib
import json
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from fake_engine import Engine, Fault, Job, Sampled
from hybrid_model import IMAGE, IMAGE_LENGTH, HybridModel

MODEL, ADAPTER = "fake-hybrid", "fake-adapter"
ROLES = {"system": 259, "user": 260, "assistant": 261, "tool": 262}
STOP = 263


@dataclass(frozen=True)
class Dialect:
    """What a server has. ``owner``: of its models. ``logprobs``: how many of the best tokens it shows at most, 0: none.
    ``counter``: whether it says how many tokens were cached, ``timings``: as ``timings.cache_n``."""

    name: str
    owner: str
    logprobs: int = 20
    counter: bool = True
    timings: bool = False
    salts: bool = False
    cache_prompt: bool = False
    token_ids: bool = True
    tokenize: bool = True
    listed: bool = False
    """Whether completions show log-probabilities as chats do, in a list ``content``."""
    adapters: bool = False
    images: bool = False
    metrics: bool = False
    chat: bool = True
    completions: bool = True
    names: bool = True
    """Whether it lists its models; mlx-lm without a folder of downloads answers with nothing at all."""
    sorted: bool = True
    """Whether the best tokens come best first, under the one that was chosen; in mlx-lm the first of them stands there."""


VLLM = Dialect("vllm", "vllm", salts=True, adapters=True, images=True, metrics=True)
DIALECTS = {
    "vllm": VLLM,
    "vllm, text alone": replace(VLLM, adapters=False, images=False, metrics=False),
    "vllm, no counter": replace(VLLM, counter=False),
    "vllm, no logprobs": replace(VLLM, logprobs=0),
    "sglang": Dialect("sglang", "sglang", salts=True, tokenize=False),
    "mlx": Dialect(
        "mlx", "mlx-lm", logprobs=10, token_ids=False, tokenize=False, listed=True, names=False, sorted=False
    ),
    "llama": Dialect("llama", "llamacpp", timings=True, cache_prompt=True, listed=True),
    "chat alone": Dialect("chat alone", "somebody", completions=False, tokenize=False, token_ids=False),
}


def text_of(tokens: list[int]) -> str:
    """Return ``tokens`` as text."""
    return "".join(chr(token) if token < 256 else f"<|{token}|>" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Return ``text`` as tokens; each character is one."""
    return [*text.encode("latin-1", "replace")]


class Refused(Exception):
    """The request is not answered; the text says why. ``after``: in how many seconds it may be asked again."""

    def __init__(self, text: str, status: int = 400, after: float | None = None) -> None:
        super().__init__(text)
        self.status, self.after = status, after


class FakeServer:
    """The server, started: ``url``. ``options`` are those of ``Engine``; ``layers`` of its model."""

    def __init__(
        self, fault: Fault | None = None, dialect: str | Dialect = "vllm", *, seed: int = 0,
        layers: tuple[str, ...] = ("full", "window", "state", "full"), window: int = 40, longest: int = 400, **options: Any,
    ) -> None:  # fmt: skip
        self.dialect = DIALECTS[dialect] if isinstance(dialect, str) else dialect
        self.model = HybridModel(seed, layers, window, longest)
        self.engine = Engine(self.model, fault, seed=seed, **options)
        self.num_requests = 0
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.fake = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), name="fake server", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Lose all that is cached but what is on the disk."""
        self.engine.restart()

    def close(self) -> None:
        """Stop. Raises what went wrong inside."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.engine.close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is asked -----------------------------------------------------------------------------------------------

    def get(self, path: str) -> dict[str, Any] | str:
        """Answer a GET."""
        dialect = self.dialect
        if path == "/v1/models" and not dialect.names:
            return ""
        if path == "/v1/models":
            base = {
                "id": MODEL,
                "object": "model",
                "created": 0,
                "owned_by": dialect.owner,
                "root": MODEL,
                "parent": None,
            }
            if dialect.name.startswith(("vllm", "sglang")):
                base["max_model_len"] = self.model.longest
            found = [base]
            if dialect.adapters:
                found.append({**base, "id": ADAPTER, "root": "/adapters/fake", "parent": MODEL, "max_model_len": None})
            return {"object": "list", "data": found}
        if path == "/health":
            return {}
        if path == "/version" and dialect.name.startswith("vllm"):
            return {"version": "0.32.0"}
        if path == "/props" and dialect.name == "llama":
            return {"default_generation_settings": {"n_ctx": self.model.longest}, "total_slots": self.engine.rows}
        if path in ("/get_server_info", "/server_info") and dialect.name == "sglang":
            return {"version": "0.5.23", "enable_cache_report": dialect.counter, "page_size": self.engine.block}
        if path == "/metrics" and dialect.metrics:
            labels = f'{{engine="0",model_name="{MODEL}"}}'
            return (
                f"vllm:num_preemptions_total{labels} {float(self.engine.num_preempted)}\n"
                f'vllm:cache_config_info{{block_size="{self.engine.block}",enable_prefix_caching="True",'
                f'num_gpu_blocks="{self.engine.num_blocks}"}} 1.0\n'
            )
        raise Refused(f"Not Found: {path}", 404)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | tuple[_Reply, bool]:
        """Answer a POST; a completion as its ``_Reply``, and whether it is a stream."""
        if path == "/tokenize" and self.dialect.tokenize:
            ids = self._chat(body)[0] if "messages" in body else tokens_of(str(body.get("prompt", body.get("content"))))
            return {"count": len(ids), "max_model_len": self.model.longest, "tokens": ids}
        if path == "/detokenize" and self.dialect.tokenize:
            return {"prompt": text_of(body["tokens"])}
        is_chat = path == "/v1/chat/completions"
        if not (is_chat and self.dialect.chat) and not (path == "/v1/completions" and self.dialect.completions):
            raise Refused(f"Not Found: {path}", 404)
        self.num_requests += 1
        tokens, images = self._chat(body) if is_chat else (self._prompt(body), ())
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if not tokens or len(tokens) + most > self.model.longest or most < 1:
            raise Refused(f"the context is {self.model.longest} tokens, asked for {len(tokens)} + {most}")
        adapter = self._adapter(body.get("model", MODEL))
        salt = body.get("cache_salt") if self.dialect.salts else None
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise Refused("Parameter 'cache_salt' must be a non-empty string if provided.")
        wanted = body.get("logprobs") or 0
        top = (
            body.get("top_logprobs", wanted if self.dialect.listed else 0) if is_chat or self.dialect.listed else wanted
        )
        if int(top or 0) > max(self.dialect.logprobs, 0) and self.dialect.logprobs:
            raise Refused(
                f"Requested sample logprobs of {top}, which is greater than max allowed: {self.dialect.logprobs}"
            )
        job = Job(
            np.array(tokens, np.int32), most, adapter, salt, images,
            lookup=not (self.dialect.cache_prompt and body.get("cache_prompt") is False),
            seed=None if not body.get("temperature", 1.0) else int(body.get("seed") or 0),
            ends=not body.get("ignore_eos", False) or not self.dialect.sorted,
        )  # fmt: skip
        is_shown = self.dialect.logprobs and body.get("logprobs") not in (None, False)
        return _Reply(self, job, is_chat, int(top or 0) if is_shown else None, body), bool(body.get("stream", False))

    def _adapter(self, name: str) -> str | None:
        if name == ADAPTER and self.dialect.adapters:
            return name
        if name != MODEL and self.dialect.name.startswith(("vllm", "sglang")):
            raise Refused(f"The model `{name}` does not exist.", 404)
        return None

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return tokens_of(prompt)
        if not isinstance(prompt, list) or not self.dialect.token_ids:
            raise Refused("prompt must be a string")
        if not all(isinstance(token, int) and 0 <= token < IMAGE for token in prompt):
            raise Refused("Token id is out of vocabulary")
        return prompt

    def _chat(self, body: dict[str, Any]) -> tuple[list[int], tuple[tuple[int, bytes], ...]]:
        tokens, images = [256], []
        if body.get("tools"):
            tokens += [ROLES["system"], *tokens_of(json.dumps(body["tools"])), STOP]
        for message in body["messages"]:
            if message.get("role") not in ROLES:
                raise Refused(f"Unexpected message role: {message.get('role')}")
            tokens.append(ROLES[message["role"]])
            content = message.get("content") or ""
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "text":
                    tokens += tokens_of(part["text"])
                elif part["type"] == "image_url" and self.dialect.images:
                    images.append((len(tokens), hashlib.sha256(part["image_url"]["url"].encode()).digest()))
                    tokens += [IMAGE] * IMAGE_LENGTH
                else:
                    raise Refused("At most 0 image(s) may be provided in one prompt.")
            if message.get("tool_calls"):
                tokens += tokens_of(json.dumps(message["tool_calls"]))
            tokens.append(STOP)
        if body.get("add_generation_prompt", True):
            tokens.append(ROLES["assistant"])
        return tokens, tuple(images)


class _Reply:
    """How the answer of ``job`` is spelled. ``top``: how many of the best tokens are shown; None: no log-probabilities."""

    def __init__(self, server: FakeServer, job: Job, is_chat: bool, top: int | None, body: dict[str, Any]) -> None:
        self.server, self.job, self.is_chat, self.top, self.body = server, job, is_chat, top, body
        self.as_ids = bool(body.get("return_tokens_as_token_ids"))

    def whole(self, samples: list[Sampled]) -> dict[str, Any]:
        """Return the answer in one piece."""
        return {**self._frame(samples, "message", self._reason()), **self._usage(len(samples))}

    def events(self, samples: Iterator[Sampled]) -> Iterator[dict[str, Any] | str]:
        """Return the events of a stream."""
        count = 0
        for sample in samples:
            count += 1
            yield self._frame([sample], "delta", self._reason() if self.job.is_done else None)
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield {**self._frame([], "delta", None), "choices": [], **self._usage(count)}
        yield "[DONE]"

    def _reason(self) -> str:
        return "stop" if self.job.samples and self.job.samples[-1].token == 257 and self.job.ends else "length"

    def _frame(self, samples: list[Sampled], part: str, reason: str | None) -> dict[str, Any]:
        tokens = [sample.token for sample in samples]
        shown = tokens[:-1] if tokens and reason == "stop" else tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.is_chat:
            choice[part] = {"role": "assistant", "content": text_of(shown)}
        else:
            choice["text"] = text_of(shown)
        choice["logprobs"] = None if self.top is None else self._logprobs(samples, self.top)
        if self.body.get("return_token_ids"):
            choice["token_ids"] = tokens
            if part == "message":
                choice["prompt_token_ids"] = self.job.prompt.tolist()
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"cmpl-{id(self.job):x}", "object": kind if part == "message" else f"{kind}.chunk",
            "created": int(time.time()), "model": self.body.get("model", MODEL), "choices": [choice],
        }  # fmt: skip

    def _logprobs(self, samples: list[Sampled], top: int) -> dict[str, Any]:
        best = [np.argsort(-one.logprobs, kind="stable")[:top].tolist() for one in samples]
        if self.is_chat or self.server.dialect.listed:
            if not self.server.dialect.sorted:
                best = [sorted(tokens, key=lambda token: token % 7) for tokens in best]
            first = [
                tokens[0] if tokens and not self.server.dialect.sorted else one.token
                for one, tokens in zip(samples, best)
            ]
            return {
                "content": [
                    {**self._entry(one, chosen), "top_logprobs": [self._entry(one, token) for token in tokens]}
                    for one, chosen, tokens in zip(samples, first, best)
                ]
            }
        return {
            "tokens": [self._name(one.token) for one in samples],
            "token_logprobs": [float(one.logprobs[one.token]) for one in samples],
            "top_logprobs": [
                {self._name(token): float(one.logprobs[token]) for token in {*tokens, one.token}}
                for one, tokens in zip(samples, best)
            ],
            "text_offset": [*range(len(samples))],
        }

    def _entry(self, sample: Sampled, token: int) -> dict[str, Any]:
        entry = {"token": self._name(token), "logprob": float(sample.logprobs[token])}
        if self.server.dialect.listed:
            entry["id"] = token
        return {**entry, "bytes": [*text_of([token]).encode()]}

    def _name(self, token: int) -> str:
        if self.as_ids:
            return f"token_id:{token}"
        return "\ufffd" if 128 <= token < 256 and not self.server.dialect.listed else text_of([token])

    def _usage(self, count: int) -> dict[str, Any]:
        job, dialect, length = self.job, self.server.dialect, len(self.job.prompt)
        usage: dict[str, Any] = {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}
        if not dialect.timings:
            usage["prompt_tokens_details"] = {"cached_tokens": job.counted} if dialect.counter else None
            return {"usage": usage}
        return {
            "usage": usage, "timings": {"cache_n": job.counted, "prompt_n": length - job.counted, "predicted_n": count}
        }  # fmt: skip


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(lambda: self.server.fake.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        except ValueError:
            return self._send(json.dumps(_error("the body is no JSON", 400)).encode(), 400)
        self._answer(lambda: self._posted(body))

    def _posted(self, body: dict[str, Any]) -> dict[str, Any] | None:
        answer = self.server.fake.post(self.path.partition("?")[0], body)
        if isinstance(answer, dict):
            return answer
        reply, is_stream = answer
        samples = self._samples(self.server.fake.engine.submit(reply.job))
        if not is_stream:
            return reply.whole([*samples])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in reply.events(samples):
                data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.server.fake.engine.abort(reply.job)
            self.close_connection = True
        return None

    def _samples(self, job: Job) -> Iterator[Sampled]:
        """Yield the samples of ``job``; abort it if the client has gone."""
        while True:
            try:
                sample = job.out.get(timeout=0.005)
            except queue.Empty:
                if self._has_gone():
                    self.server.fake.engine.abort(job)
                    raise ConnectionResetError("the client has gone") from None
                continue
            if sample is None:
                return
            yield sample

    def _has_gone(self) -> bool:
        ready = select.poll()  # not select(), which takes no descriptor above 1,023
        ready.register(self.connection, select.POLLIN)
        if not ready.poll(0):
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _answer(self, act: Any) -> None:
        after = None
        try:
            answer, status = act(), 200
        except Refused as error:
            answer, status, after = _error(str(error), error.status), error.status, error.after
        except OSError:
            self.close_connection = True
            return
        except Exception as error:  # as servers do
            answer, status = _error(f"{type(error).__name__}: {error}", 500), 500
        if answer is not None:
            self._send(answer.encode() if isinstance(answer, str) else json.dumps(answer).encode(), status, after)

    def _send(self, data: bytes, status: int, after: float | None = None) -> None:
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
        head += "" if after is None else f"Retry-After: {after}\r\n"
        self.wfile.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def _error(text: str, status: int) -> dict[str, Any]:
    return {"error": {"message": text, "type": "BadRequestError", "param": None, "code": status}}
