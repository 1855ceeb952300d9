"""The publisher and the subscriber that send and receive a cache's events over ZMQ.

engine's thread   cache ──► EventLog            router    Subscriber.poll ──► Follower
                               │                                ▲    │
publisher's thread        EventStream ──► PUB ──────────────► SUB    │
                               └────────► ROUTER ◄─────────────► DEALER   missed batches, or a snapshot
"""

from __future__ import annotations

import logging
from threading import Condition, Thread
from time import monotonic, sleep
from typing import Any

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.events.event_log import EventLog
from kvpagoda.events.follower import Follower
from kvpagoda.events.stream import EventStream, Message
from kvpagoda.events.vllm import VllmFollower
from kvpagoda.events.wire import END, SEQUENCE_NBYTES, Encoding, Name
from kvpagoda.units import name_of

with MissingExtra.unless("zmq", "kvpagoda.events needs pyzmq; pip install 'kvpagoda[events]'"):
    import zmq

HEARTBEAT = 1.0
"""Seconds without events after which a publisher sends a message that it is alive."""
PATIENCE = 1.0
"""Seconds that a subscriber waits for the end of a replay before it asks again; twice as long each time that it asks for the
same batches in vain, up to ``MOST_PATIENCE``."""
MOST_PATIENCE = 32.0
MOST_UNREAD = 100_000
"""The most messages that wait for a slow subscriber; further ones are lost, and the subscriber asks for them again."""
_log = logging.getLogger(__name__)
_LINGER = 200  # milliseconds that a closed socket may still use to send its messages


class Publisher:
    """Sends the events of one cache from a thread of its own, as vLLM's publisher does. Make it between calls of the
    cache.

    Who can connect reads the tokens of all prompts: serve other hosts ("tcp://*:5557") only where nobody else reaches
    the port. A log line says what was bound and connected to.

    Args:
        log: the events of the cache.
        endpoint: None: port 5557 of the loopback, bound. Subscribers connect to endpoints that are bound.
        replay: the endpoint, always bound, where subscribers ask for batches again; None: no replay.
        bind: whether ``endpoint`` is bound or connected to; None: by vLLM's rule, bound if it has ``*``, ``::`` or
            0.0.0.0, or is ``ipc:`` or ``inproc:``, otherwise connected to.
        topic: the first frame of each message, by which subscribers choose.
        interval: the most seconds between two batches.
        keep: how many batches can be replayed.
        rank: that of data parallelism.
        encoding: see ``EventStream``.

    Raises:
        BadInput: an argument out of range, or an endpoint that ZMQ refuses.
    """

    def __init__(
        self,
        log: EventLog,
        endpoint: str | None = None,
        replay: str | None = "tcp://127.0.0.1:5558",
        *,
        bind: bool | None = None,
        topic: str = "",
        interval: float = 0.01,
        keep: int = 10_000,
        rank: int = 0,
        encoding: str | Encoding = "map",
    ) -> None:
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.set_hwm(MOST_UNREAD)
        self._router.set_hwm(keep + 2)
        try:
            if endpoint is None:
                endpoint, bind = "tcp://127.0.0.1:5557", True
            is_bound = _is_bound(endpoint) if bind is None else bind
            _open(self._pub, endpoint, is_bound)
            if replay is not None:
                _open(self._router, replay, is_bound=True)
            self._stream = EventStream(log, keep=keep, rank=rank, encoding=encoding)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)  #: with the actual port in place of ``*``
        self.replay_endpoint = "" if replay is None else self._router.get_string(zmq.LAST_ENDPOINT)
        again = f", replay bound to {self.replay_endpoint}" if replay is not None else ""
        _log.info("events: %s %s%s", "bound to" if is_bound else "connected to", self.endpoint, again)
        self._topic, self._interval = topic.encode(), interval
        self._turn, self._num_flushes, self._num_flushed, self._is_open = Condition(), 0, 0, True
        self._thread = Thread(target=self._run, name="kvpagoda-events", daemon=True)
        self._thread.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all events from before this call are sent; return whether they are. Events that were lost in an error are
        sent with the next change of the cache.

        Args:
            timeout: the most seconds to wait.
        """
        with self._turn:
            self._num_flushes += 1
            wanted = self._num_flushes
            return self._turn.wait_for(lambda: self._num_flushed >= wanted, timeout) and self._stream.is_whole

    def close(self) -> None:
        """Send the remaining events and end the thread. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._thread.join()
            self._context.destroy(linger=_LINGER)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the publisher's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Send batches and heartbeats and answer replay requests, until ``close``."""
        last_sent = 0.0
        while True:
            is_last, asked = not self._is_open, self._num_flushes
            try:
                message = self._stream.drain()
                if message is not None or monotonic() - last_sent > HEARTBEAT:
                    self._send(self._stream.alive() if message is None else message)
                    last_sent = monotonic()
            except Exception:
                _log.exception("events: a batch is lost; the next change of the cache tells everything again")
            with self._turn:
                self._num_flushed = asked
                self._turn.notify_all()
            if is_last:
                return
            try:
                if self._router.poll(int(self._interval * 1000)):
                    self._replay(self._router.recv_multipart())
            except Exception:
                _log.exception("events: a request for a replay is not answered")
                sleep(self._interval)

    def _send(self, message: Message) -> None:
        self._pub.send_multipart([self._topic, message[0].to_bytes(SEQUENCE_NBYTES, "big"), message[1]])

    def _replay(self, frames: list[bytes]) -> None:
        """Answer a request ``[client, b"", number]``, or without the empty frame, for the batches from ``number`` on; ignore
        other requests. A reply has the empty frame if the request had it."""
        client, *envelope, number = frames
        if envelope not in ([], [b""]) or len(number) != SEQUENCE_NBYTES:
            return
        is_old = self._stream.encoding.form == "array"  # the replies of vLLM that writes arrays have no topic
        for sequence, payload in self._stream.replay(int.from_bytes(number, "big")):
            topic = [] if is_old else [self._topic]
            self._router.send_multipart([client, *envelope, *topic, sequence.to_bytes(SEQUENCE_NBYTES, "big"), payload])
        self._router.send_multipart([client, *envelope, *([] if is_old else [b""]), END, b""])


class Subscriber:
    """Receives the messages of a ``Publisher``, asks for missing ones, and feeds them to ``follower``, which you query.
    For use from one thread.

    Args:
        endpoint: that of the publisher, which may start later.
        replay_endpoint: the publisher's ``replay``.
        topic: that of the publisher.
        secret: that of the cache's ``Identity``.
        context: whose sockets it uses; None: one of its own.
        follower: who is fed: a ``VllmFollower`` for a publisher of vLLM's own; None: a ``Follower`` with ``secret``.

    Raises:
        BadInput: an endpoint that ZMQ refuses.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = "",
        secret: bytes = b"",
        context: Any = None,
        follower: Follower | VllmFollower | None = None,
    ) -> None:
        self.follower = Follower(secret) if follower is None else follower
        self.heard_at: float | None = None  #: time of ``monotonic`` of the last message; None before the first
        self._context, self._is_shared = context or zmq.Context(), context is not None
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for socket in (self._sub, self._dealer):
            socket.set_hwm(MOST_UNREAD)
        try:
            _open(self._sub, endpoint, is_bound=False)
            _open(self._dealer, replay_endpoint, is_bound=False)
        except BaseException:
            self.close()
            raise
        self._sub.subscribe(topic.encode())
        self._poller = zmq.Poller()
        for socket in (self._dealer, self._sub):
            self._poller.register(socket, zmq.POLLIN)
        self._patience = PATIENCE
        self._ask(0)

    def poll(self, timeout: float = 0.0) -> list[Name]:
        """Receive messages until some come; return what ``Follower.feed`` returns.

        Args:
            timeout: the most seconds to wait.

        Raises:
            BadInput: the first message that is refused, after the others are taken and what is missing is asked for.
        """
        lost, end, refused = list[Name](), monotonic() + timeout, list[BadInput]()
        while ready := self._poller.poll(max(0, round(1000 * (end - monotonic())))):
            end = 0.0
            for socket, _ in ready:
                try:
                    lost += self._take(socket.recv_multipart())
                except BadInput as error:
                    refused.append(error)
        self._ask_again()
        if refused:
            raise refused[0]
        return lost

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        for socket in (self._sub, self._dealer):
            socket.close(linger=0)
        if not self._is_shared:
            self._context.term()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, frames: list[bytes]) -> list[Name]:
        """Take one message; return what ``Follower.feed`` returns. Raises BadInput."""
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_NBYTES:
            sizes = [len(frame) for frame in frames[:8]]
            raise BadInput(
                f"a message ends with a number of {SEQUENCE_NBYTES} bytes and a batch, got frames of {sizes} bytes"
            )
        number, payload = frames[-2:]
        if number == END:
            self._is_waiting = False
            self.follower.replay_ended(self._asked)
            return []
        self.heard_at = monotonic()
        return self.follower.feed(int.from_bytes(number, "big"), payload)

    def _ask_again(self) -> None:
        """Ask for what is missing, unless it was asked for and may still come."""
        wanted = self.follower.wanted
        if wanted is None:
            self._patience = PATIENCE
        elif wanted != self._asked and not self._is_waiting:
            self._patience = PATIENCE
            self._ask(wanted)
        elif monotonic() - self._asked_at > self._patience:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._ask(wanted)

    def _ask(self, start: int) -> None:
        self._dealer.send_multipart([b"", start.to_bytes(SEQUENCE_NBYTES, "big")])
        self._asked, self._asked_at, self._is_waiting = start, monotonic(), True


def _is_bound(endpoint: str) -> bool:
    """Return whether vLLM's publisher binds ``endpoint``, or SGLang's, for which 0.0.0.0 is another ``*``. Raises BadInput."""
    name_of(endpoint, "an endpoint")
    return any(address in endpoint for address in ("*", "::", "0.0.0.0")) or endpoint.startswith(("ipc:", "inproc:"))


def _open(socket: Any, endpoint: str, is_bound: bool) -> None:
    """Bind ``socket`` to ``endpoint``, or connect it. Raises BadInput."""
    name_of(endpoint, "an endpoint")
    try:
        socket.ipv6 = "::" in endpoint  # only then, for ``*`` would become ``[::]`` otherwise
        (socket.bind if is_bound else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        text = f"cannot {'bind' if is_bound else 'connect to'} {endpoint!r}: {error}"
        raise BadInput(text, needed=endpoint) from None
