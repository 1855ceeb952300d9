"""What many engines have of a prompt: a ``Subscriber`` for each, asked together, in this process or over HTTP.

publishers ──► Subscriber, one for each worker ──► Follower ◄── scores(tokens) ◄── POST /score     any thread
               all polled by the router's thread
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple

from kvpagoda.arrays import TokenIds, as_tokens
from kvpagoda.errors import BadInput, KVPagodaError, MissingExtra, did_you_mean
from kvpagoda.events.follower import Follower
from kvpagoda.events.index import Resumable
from kvpagoda.events.publisher import HEARTBEAT, Subscriber
from kvpagoda.events.vllm import VllmFollower
from kvpagoda.events.vllm_index import NextHit
from kvpagoda.namespace import Namespace

with MissingExtra.unless("zmq", "kvpagoda.events needs pyzmq; pip install 'kvpagoda[events]'"):
    import msgspec
    import zmq

MOST_NBYTES = 16 << 20
"""Bytes of the largest body that is read."""
_SILENT = 3 * HEARTBEAT  # seconds without a message after which a worker counts as stale


class RouterAnswer(NamedTuple):
    """An answer to an HTTP request: a status code, and an object to send as JSON."""

    status: int
    body: dict[str, Any]


class _Space(msgspec.Struct, forbid_unknown_fields=True):
    salt: str | None = None
    adapter: str | None = None
    weights: str | None = None


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /score``. ``namespace``: text is a salt. ``media``: offset -> digest in hexadecimal."""

    tokens: list[int]
    namespace: str | _Space | None = None
    media: dict[int, str] = {}


_decoder = msgspec.json.Decoder(_Question)


class RouterWorker:
    """One engine as its messages describe it. ``lock``: held while ``subscriber`` is used. ``fault``: why its last message
    could not be read; "" if it could."""

    def __init__(self, subscriber: Subscriber, make: Callable[[], Follower | VllmFollower]) -> None:
        self.subscriber, self._make, self.lock, self.fault = subscriber, make, Lock(), ""

    @property
    def is_stale(self) -> bool:
        """Whether the engine may have other blocks than is known: messages are missing, or none came for three
        heartbeats, where there are any."""
        heard, follower = self.subscriber.heard_at, self.subscriber.follower
        is_silent = heard is None or (follower.has_heartbeat and monotonic() - heard > _SILENT)
        return is_silent or bool(self.fault) or not follower.is_complete

    def poll(self) -> None:
        """Receive what has come. A message that is refused is told in ``fault``, and asked for again."""
        with self.lock:
            heard = self.subscriber.heard_at
            try:
                self.subscriber.poll()
                if self.subscriber.heard_at != heard:
                    self.fault = ""
            except KVPagodaError as error:
                self.fault = str(error)
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"
                self.subscriber.follower = self._make()


class Router:
    """Follows the publishers of some workers, in a thread of its own. Any thread may ask.

    Args:
        workers: name -> (endpoint, replay endpoint).
        secret: that of their ``Identity``.
        topic: that of their publishers.
        interval: seconds between two polls.
        follower: makes the follower of each worker: ``VllmFollower`` for engines that publish vLLM's own events; None: a
            ``Follower`` with ``secret``.

    Raises:
        BadInput: an endpoint that ZMQ refuses, or no workers.
    """

    def __init__(
        self,
        workers: Mapping[str, tuple[str, str]],
        *,
        secret: bytes = b"",
        topic: str = "",
        interval: float = 0.01,
        follower: Callable[[], Follower | VllmFollower] | None = None,
    ) -> None:
        if not workers:
            raise BadInput("a router follows at least one worker, got none", needed=1, available=0)
        make = follower or partial(Follower, secret)
        self._context = zmq.Context()
        self.workers: dict[str, RouterWorker] = {}  #: by name
        try:
            for name, (endpoint, replay) in workers.items():
                subscriber = Subscriber(endpoint, replay, topic=topic, context=self._context, follower=make())
                self.workers[name] = RouterWorker(subscriber, make)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._interval, self._is_closed = interval, Event()
        self._thread = Thread(target=self._run, name="kvpagoda-router", daemon=True)
        self._thread.start()

    def scores(
        self,
        token_ids: TokenIds,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> dict[str, Resumable | NextHit]:
        """Return by worker how many tokens of this prompt are cached, and how many a new request there need not compute.

        O(n) for each worker.

        Args:
            token_ids: see ``KVCache.open``.
            namespace: see ``KVCache.open``.
            media: see ``KVCache.open``.

        Raises:
            BadInput: ``token_ids`` are no vector of integers, the namespace has an epoch, or ``media`` are outside of
                the text.
        """
        return self._look(token_ids, namespace, media)[0]

    def answer(self, method: str, path: str, body: bytes = b"") -> RouterAnswer:
        """Return the answer to an HTTP request; raises nothing. To mount in a server of your own.

        ``POST /score`` with ``{"tokens": [..], "namespace": .., "media": {..}}``: ``{"resumable": {worker: tokens},
        "cached": {worker: tokens}, "at_most": [workers], "stale": [workers]}``. ``GET /health``: what is known of each
        worker. Errors have a status from 400 on and
        ``{"error": {"type": .., "message": .., "needed": .., "available": ..}}``.

        Args:
            method: "GET" or "POST".
            path: of the request.
            body: JSON.
        """
        try:
            known = {"/score": ("POST", self._score), "/health": ("GET", self._health)}
            if path not in known:
                hint = did_you_mean(path, known)
                text = f"no {path!r} here; known: {', '.join(known)}" + (f"; {hint}" if hint else "")
                return failure(404, "NotFound", text, path, [*known])
            allowed, call = known[path]
            if method != allowed:
                return failure(405, "MethodNotAllowed", f"{path} takes {allowed}, got {method}", method, [allowed])
            if len(body) > MOST_NBYTES:
                return too_large(len(body))
            return RouterAnswer(200, call(body))
        except KVPagodaError as error:
            return failure(400, type(error).__name__, str(error), error.needed, error.available)
        except Exception as error:
            return failure(500, type(error).__name__, str(error))

    def close(self) -> None:
        """End the thread and close the sockets. A second call does nothing."""
        self._is_closed.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval):
            for worker in self.workers.values():
                worker.poll()

    def _look(
        self, token_ids: TokenIds, namespace: Namespace | str | bytes | None, media: Mapping[int, bytes] | None
    ) -> tuple[dict[str, Resumable | NextHit], list[str]]:
        """Return what ``scores`` returns, and the workers that were stale just then."""
        found, stale, tokens = dict[str, Resumable | NextHit](), list[str](), as_tokens(token_ids)
        for name, worker in self.workers.items():
            with worker.lock:
                found[name] = worker.subscriber.follower.resumable(tokens, namespace, media=media)
                stale += [name] * worker.is_stale
        return found, stale

    def _score(self, body: bytes) -> dict[str, Any]:
        try:
            question = _decoder.decode(body)
            media = {at: bytes.fromhex(digest) for at, digest in question.media.items()}
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadInput(f"{len(body)} bytes are no question; {error}") from None
        space = question.namespace
        namespace = Namespace(space.salt, space.adapter, space.weights) if isinstance(space, _Space) else space
        found, stale = self._look(question.tokens, namespace, media)
        return {
            "resumable": {name: one.resumable for name, one in found.items()},
            "cached": {name: one.cached for name, one in found.items()},
            "at_most": [name for name, one in found.items() if isinstance(one, NextHit) and one.at_most],
            "stale": stale,
        }

    def _health(self, _: bytes) -> dict[str, Any]:
        now, told = monotonic(), {}
        for name, worker in self.workers.items():
            follower, heard = worker.subscriber.follower, worker.subscriber.heard_at
            told[name] = {
                "num_blocks": follower.num_blocks,
                "is_stale": worker.is_stale,
                "wanted": follower.wanted,
                "silent_seconds": None if heard is None else round(now - heard, 3),
                "fault": worker.fault,
            }
        return {"status": "stale" if any(one["is_stale"] for one in told.values()) else "ok", "workers": told}


def failure(status: int, kind: str, message: str, needed: Any = None, available: Any = None) -> RouterAnswer:
    """Return an answer that says what is wrong."""
    error = {"type": kind, "message": message, "needed": needed, "available": available}
    return RouterAnswer(status, {"error": json.loads(json.dumps(error, default=str))})


def too_large(nbytes: int | str) -> RouterAnswer:
    """Return the answer to a body of more than ``MOST_NBYTES``."""
    return failure(413, "TooLarge", f"a body is at most {MOST_NBYTES} bytes, got {nbytes}", nbytes, MOST_NBYTES)
