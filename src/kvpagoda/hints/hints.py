"""The ear of a cache: it takes envelopes of hints, answers every action, and tells later how promises ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpagoda.abc import CacheObserver, RequestView
from kvpagoda.arrays import NO_TOKEN, Ids, as_tokens
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.lookup import AnyNamespace, PrefixReuse, read_ahead
from kvpagoda.core.cache.outcome import Outcome
from kvpagoda.core.cache.request import Breakpoints, RequestState, breakpoints_of
from kvpagoda.core.prefix import Match
from kvpagoda.errors import BadInput, KVPagodaError
from kvpagoda.hints.envelope import Action, Payload, is_known, read_envelope
from kvpagoda.hints.keep import Keep
from kvpagoda.hints.options import HintLimits
from kvpagoda.hints.promises import Promise, Promises
from kvpagoda.hints.sessions import Session, Sessions

if TYPE_CHECKING:
    from kvpagoda.core.offload.reader import Prefetch


_GRANTED = ("due", "kept", "cached", "always")
"""States of positions of checkpoints at which others will be able to resume."""
_READ_AHEAD = 60.0
"""Seconds for which a prompt that was read ahead waits for its request, if the hint does not say."""


class HintedText(NamedTuple):
    """A text that an action is about. ``keys``: its tokens as texts are compared, int32. ``num_prompt``: tokens before the
    answer; None: it has no answer."""

    namespace: bytes
    keys: Ids
    session: str | None = None
    num_prompt: int | None = None


class Hints(CacheObserver):
    """The hints of one cache: ``KVCache(hints=Hints(..))``; without it the cache makes one when the first hint comes.

    No hint makes a call of the cache wait or fail. Hints are no state that can be lost: after ``reset`` and after a
    restart there are none.

    Args:
        clock: returns seconds, by which promises expire: real ones (default), or those of a trace.
        limits: see ``HintLimits``.

    Examples:
        >>> from kvpagoda import KVCache, Schema
        >>> config = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
        >>> cache = KVCache(Schema.from_hf_config(config), "64KiB", device="none", hints=Hints(clock=lambda: 0.0))
        >>> with cache.open(range(40)) as sequence:
        ...     sequence.commit(range(40))
        >>> retain = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0",
        ...           "payload": {"token_ids": [*range(40)], "seconds": 30}}
        >>> (outcome,) = cache.apply({"protocol_version": "0.1", "message_id": "m", "actions": [retain]})
        >>> outcome.status, outcome.tokens, outcome.until
        ('accepted', 32, 30.0)
    """

    def __init__(self, clock: Callable[[], float] = monotonic, limits: HintLimits | None = None) -> None:
        self.clock, self.limits = clock, HintLimits() if limits is None else limits
        self.num_dropped = 0  #: outcomes that nobody fetched in time
        self._news: deque[Outcome] = deque()
        self._core: Core
        self._promises: Promises
        self._sessions = Sessions(self.limits)
        self._waiting: dict[Any, list[Keep]] = {}  # promises for the ends of requests
        self._session_of: dict[Any, Session] = {}
        self._prefetched: dict[bytes, tuple[Prefetch, float]] = {}  # by namespace and text: the reading, its end

    def attach(self, core: Core, reuse: PrefixReuse) -> None:
        """Called by the cache that these hints are for.

        Args:
            core: of the cache.
            reuse: its pins.

        Raises:
            BadInput: there was one before.
        """
        if hasattr(self, "_core"):
            raise BadInput("these hints are those of another cache; make new ones", needed="hints")
        self._core, self._promises = core, Promises(core, reuse, self.limits, self.clock, self._tell)
        core.texts_elsewhere.append(self._sessions.texts)
        core.observers.add(self)

    # -- for users ---------------------------------------------------------------------------------------------------

    @property
    def num_promises(self) -> int:
        """The number of promises that are held."""
        return len(self._promises)

    @property
    def num_sessions(self) -> int:
        """The number of sessions that are known."""
        return len(self._sessions)

    def ended(self) -> list[Outcome]:
        """Return what became of deferred actions and of promises since the last call, in order."""
        self._promises.expire()
        self._promises.collect()
        news = list(self._news)
        self._news.clear()
        return news

    # -- for the cache -----------------------------------------------------------------------------------------------

    def apply(self, envelope: object, namespace: AnyNamespace = None) -> list[Outcome]:
        """Do what the actions of an envelope ask for; see ``KVCache.apply``.

        Args:
            envelope: see there.
            namespace: see there.

        Returns:
            One outcome for each action.
        """
        return self._each(envelope, namespace, None)

    def opened(self, request: RequestState, envelope: object, namespace: AnyNamespace) -> list[Outcome]:
        """Do what an envelope asks for of a request.

        Args:
            request: that was just opened.
            envelope: see ``KVCache.open``.
            namespace: of the request.

        Returns:
            One outcome for each action.
        """
        return self._each(envelope, namespace, request)

    def ask_checkpoints(self, request: RequestState, envelope: object) -> None:
        """Let a request keep the checkpoints that an envelope asks for, beside its own.

        What is wrong with them is said by ``opened``.

        Args:
            request: that is about to be opened.
            envelope: see ``KVCache.open``.
        """
        with suppress(KVPagodaError):
            _, actions = read_envelope(envelope, self.limits.actions, self.limits.nbytes)
            for action in actions:
                if action.action_type == "kv.checkpoint" and is_known(action) is None:
                    with suppress(KVPagodaError):
                        asked = self._positions(Payload(action.payload))
                        own = request.checkpoints
                        known = () if own.asked is None else own.asked.asked
                        own.asked = Breakpoints((*known, *asked))

    def before_open(self) -> None:
        """End what is over: called before each request is opened. O(1) if nothing is."""
        self._promises.expire()
        self._promises.collect()
        if self._prefetched:
            now = self.clock()
            for key in [key for key, (_, end) in self._prefetched.items() if end <= now]:
                self._prefetched.pop(key)[0].close()

    def prefetched(self, keys: Ids, namespace: bytes) -> Prefetch | None:
        """Return what a hint had read for a prompt, if anything.

        Args:
            keys: its tokens as texts are compared.
            namespace: its key.
        """
        if not self._prefetched:
            return None
        return self._prefetched.pop(_name(keys, namespace), (None, 0.0))[0]

    def invalidated(self) -> None:
        """Called when the cache ended the promises of what cannot be found any more."""
        self._promises.collect("released")

    def forget(self) -> None:
        """Forget everything: called when the cache was reset or closed."""
        self._promises.collect("released")
        while self._prefetched:
            self._prefetched.popitem()[1][0].close()
        self._sessions.clear()
        self._waiting.clear()
        self._session_of.clear()

    # -- one envelope ------------------------------------------------------------------------------------------------

    def _each(self, envelope: object, namespace: AnyNamespace, request: RequestState | None) -> list[Outcome]:
        self._promises.expire()
        try:
            message, actions = read_envelope(envelope, self.limits.actions, self.limits.nbytes)
            key = self._core.namespaces.key(namespace) if request is None else request.namespace
        except KVPagodaError as error:
            return [Outcome("", "", "", "rejected", str(error))]
        return [self._one(Outcome(message, a.action_id, a.action_type, "accepted"), a, key, request) for a in actions]

    def _one(self, asked: Outcome, action: Action, namespace: bytes, request: RequestState | None) -> Outcome:
        if (wrong := is_known(action)) is not None:
            return asked.now("unknown", wrong)
        try:
            payload = Payload(action.payload)
            outcome: Outcome = getattr(self, f"_{action.action_type[3:]}")(asked, payload, namespace, request)
        except (KVPagodaError, MemoryError) as error:
            outcome = asked.now("rejected", str(error) or "out of host memory")
        return outcome

    def _retain(self, asked: Outcome, payload: Payload, namespace: bytes, request: RequestState | None) -> Outcome:
        """``kv.retain``: keep a text, or its first tokens, for a time; ``kv.pin``: until it is released."""
        return self._keep(Keep.of(asked, payload, self.limits.seconds), self._text(payload, namespace, request))

    _pin = _retain

    def _release(self, asked: Outcome, payload: Payload, namespace: bytes, request: RequestState | None) -> Outcome:
        """``kv.release``: end the promises of an action, a session, or of all texts of the namespace that begin so."""
        name, session = payload.text("promise"), payload.text("session_id")
        if name is None and session is None:
            raise BadInput("kv.release names a promise (the action_id that asked for it) or a session_id")

        def is_meant(promise: Promise) -> bool:
            is_named = promise.outcome.action_id == name if name is not None else promise.session == session
            return is_named and promise.tenant == namespace

        released = self._promises.release(is_meant)
        if not released:
            return asked.now("missing", "no such promise")
        tokens, nbytes = (sum(getattr(one.outcome, of) for one in released) for of in ("tokens", "nbytes"))
        return asked.now("accepted", f"{len(released)} promises", tokens=tokens, nbytes=nbytes)

    def _demote(self, asked: Outcome, payload: Payload, namespace: bytes, request: RequestState | None) -> Outcome:
        """``kv.demote``: remove what only this text uses from the device; tiers store it first, as when it is evicted."""
        core, tier = self._core, payload.text("tier")
        names = [level.spec.name for level in core.tiers.levels]
        if tier is not None and tier != "none" and tier not in names:
            return asked.now("rejected", f"no tier {tier!r}; this cache has {', '.join(names) or 'none'}")
        text = self._text(payload, namespace, request)
        if not isinstance(text, HintedText):
            return (
                asked.now("missing", "no such session") if text is None else asked.now("rejected", "the request runs")
            )
        keys = text.keys[: payload.span()[1]]
        match = self._all_of(keys, namespace)
        before = core.prefix.tree.num_cached
        core.capacity.forget(core.prefix.evict_end, match, is_evicted=tier != "none")
        num_evicted = before - core.prefix.tree.num_cached
        nbytes = 0 if core.full is None else num_evicted * core.full.plan.row_nbytes
        if not match.num_blocks:
            return asked.now("missing", "nothing of this text is cached", wanted=len(keys))
        first, wanted = (match.num_blocks - num_evicted) * core.block_size, len(keys)
        cached = min(wanted, match.num_blocks * core.block_size)  # the last block may be a part of one
        done, reason = max(0, cached - first), ""
        if first:
            reason = f"other texts, requests or promises use the first {first} tokens"
        elif cached // core.block_size < wanted // core.block_size:
            reason = f"{cached} of {wanted} tokens were cached"
        status = "accepted" if not reason else "clipped" if done else "rejected"
        return asked.now(status, reason, wanted=wanted, tokens=done, nbytes=nbytes)

    def _prefetch(self, asked: Outcome, payload: Payload, namespace: bytes, request: RequestState | None) -> Outcome:
        """``kv.prefetch``: begin to read a text from tiers; the next request with exactly this prompt takes it."""
        core = self._core
        if not core.tiers.levels:
            return asked.now("rejected", "this cache has no tiers")
        if request is not None:
            return asked.now("rejected", "the request runs; give token_ids, or a session_id, before it is opened")
        if len(self._prefetched) >= self.limits.actions:
            return asked.now("rejected", f"{len(self._prefetched)} texts are being read ahead already")
        seconds = min(payload.seconds(None) or _READ_AHEAD, self.limits.seconds)
        tokens = as_tokens(payload.get("token_ids"), core.vocab_size)
        key = _name(tokens, namespace)
        if key in self._prefetched:
            return asked.now("accepted", "it is being read already", wanted=len(tokens))
        until = self.clock() + seconds
        self._prefetched[key] = read_ahead(core, tokens, namespace, {}), until
        return asked.now("accepted", "until a request with this prompt takes it", wanted=len(tokens), until=until)

    def _session(self, asked: Outcome, payload: Payload, namespace: bytes, request: RequestState | None) -> Outcome:
        """``kv.session``: this request belongs to a session, or a session has ended."""
        name, event = payload.text("session_id"), payload.one_of("event", ("begin", "continue", "end"))
        if name is None:
            raise BadInput("kv.session names a session_id")
        if event != "end":
            known = self._sessions.find(namespace, name)
            session = self._sessions.begin(namespace, name)
            if request is not None:
                session.running.add(request)
                self._session_of[request] = session
            is_lost = event == "continue" and known is None
            return asked.now("missing" if is_lost else "accepted", "not known before; it begins now" if is_lost else "")
        session_ended = self._sessions.end(namespace, name)
        if session_ended is None:
            return asked.now("missing", "no such session")
        released = self._promises.release(lambda one: one.session == name and one.tenant == namespace)
        tokens = sum(one.outcome.tokens for one in released)
        if payload.get("discard") is True and session_ended.keys is not None and not session_ended.running:
            core = self._core
            match = self._all_of(session_ended.keys, namespace)
            core.capacity.forget(core.prefix.evict_end, match, is_evicted=True)
        return asked.now("accepted", f"{len(released)} promises released", tokens=tokens)

    def _checkpoint(self, asked: Outcome, payload: Payload, namespace: bytes, request: RequestState | None) -> Outcome:
        """``kv.checkpoint``: keep checkpoints of a request's prompt after these tokens."""
        if request is None or (own := request.checkpoints).asked is None:
            return asked.now("rejected", "checkpoints are of a request: send the hint with it, in open(hints=..)")
        positions = {*self._positions(payload)}
        core = self._core
        told = [one for one in own.asked.told(own.due, core.block_size) if one.asked in positions]
        granted = [one for one in told if one.state in _GRANTED]
        reason = ", ".join(f"{one.asked}: {one.state} at {one.position}" for one in told)
        status = "rejected" if not granted else "accepted" if len(granted) == len(told) else "clipped"
        most = max((one.position for one in granted), default=0)
        return asked.now(status, reason, wanted=max(positions, default=0), tokens=most)

    def _positions(self, payload: Payload) -> tuple[int, ...]:
        """Return the ``positions`` of a ``kv.checkpoint``. Raises BadInput."""
        return breakpoints_of(payload.get("positions"), self._core.max_context).asked

    # -- texts and promises ------------------------------------------------------------------------------------------

    def _text(
        self, payload: Payload, namespace: bytes, request: RequestState | None
    ) -> HintedText | RequestState | None:
        """Return the text that ``payload`` names; or the running request whose text it will be; or None: its session is
        not known. Raises BadInput."""
        name = payload.text("session_id")
        if "token_ids" in payload:
            return HintedText(namespace, as_tokens(payload.get("token_ids"), self._core.vocab_size), name)
        if request is not None:
            return request
        if name is None:
            raise BadInput("name a text: token_ids or a session_id, or send the hint with a request")
        session = self._sessions.find(namespace, name)
        if session is not None and session.running:
            running: RequestState = next(iter(session.running))
            return running
        return None if session is None or session.keys is None else HintedText(namespace, session.keys, name)

    def _keep(self, keep: Keep, text: HintedText | RequestState | None) -> Outcome:
        """Promise what ``keep`` asks for, now or at the end of a request."""
        if text is None:
            return keep.asked.now("missing", "no such session, or none of its requests has ended")
        if isinstance(text, HintedText):
            return self._grant(keep, text)
        waiting = self._waiting.setdefault(text, [])
        if len(waiting) >= self.limits.actions:
            return keep.asked.now("rejected", f"{len(waiting)} promises wait for the end of this request already")
        waiting.append(keep)
        return keep.asked.now("deferred", "to the end of the request")

    def _grant(self, keep: Keep, text: HintedText) -> Outcome:
        """Promise what ``keep`` asks for of ``text``; what it asks for the answer separately is told later."""
        *first, last = (self._part(part, text) for part in keep.parts(text.num_prompt))
        for outcome in first:
            self._tell(outcome)
        return last

    def _part(self, keep: Keep, text: HintedText) -> Outcome:
        if not keep.priority:
            return keep.asked.now("accepted", "priority 0: no promise")
        keys = text.keys[: keep.end]
        return self._promises.grant(keep.asked, keys, text.namespace, keep.priority, keep.seconds, text.session)

    def on_end(self, request: RequestView) -> None:
        """Give the promises that were asked for the end of a request; those of its session before end now.

        Args:
            request: that ended.
        """
        session = self._session_of.pop(request, None)
        if session is None and request not in self._waiting:
            return
        if session is not None:
            self._sessions.ended(session, request)
            self._promises.release(
                lambda one: one.session == session.name and one.tenant == session.namespace, "replaced"
            )
        keys, name = request.keys(0, request.length), None if session is None else session.name
        text = HintedText(request.namespace, keys, name, request.prompt_length)
        for keep in self._waiting.pop(request, ()):
            try:
                self._tell(self._grant(keep, text))
            except (KVPagodaError, MemoryError) as error:
                self._tell(keep.asked.now("rejected", str(error)))

    def _all_of(self, keys: Ids, namespace: bytes) -> Match:
        """Return what is cached of ``keys``, with the block that only they begin."""
        end = np.full(-len(keys) % self._core.block_size, NO_TOKEN, np.int32)
        return self._core.prefix.tree.match(np.concatenate([keys, end]), namespace)

    def _tell(self, outcome: Outcome) -> None:
        self._news.append(outcome)
        if len(self._news) > self.limits.news:
            self._news.popleft()
            self.num_dropped += 1


def _name(keys: Ids, namespace: bytes) -> bytes:
    return blake2b(keys.tobytes(), key=blake2b(namespace).digest()).digest()
