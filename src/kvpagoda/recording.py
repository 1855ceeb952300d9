"""Records the life of a cache as trace events, the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

    process "requests"   one track for each request that waits, runs or is suspended at the same time; a request stays on its
                         track, and the next one follows there. Its slice holds others: waiting, cached or received,
                         computed, suspended, resumed
    process "cache"      counters of the blocks of each group; evictions, moves of blocks, traffic with tiers, sleep

``Recording`` wraps the calls that ``kvpagoda.abc.wrap_calls`` lists; a cache without one runs none of this code. It keeps
no tokens, salts or media: sizes and reasons alone. The format is that of "Trace Event Format", Google, 2016, in its array
form: there the closing bracket may be missing, so what a process wrote before it died can be opened.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

from kvpagoda.abc import Call, wrap_calls
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import RequestState, State
from kvpagoda.core.cache.stats import group_stats
from kvpagoda.errors import BadInput, RetryLater, shown

_log = logging.getLogger(__name__)
MOST_BUFFERED = 64 * 1024
"""Bytes of whole events that wait to be written, at most."""
MOST_WAITING = 64
"""Refused requests that are remembered, so that their waiting is shown; of more, the oldest are forgotten."""
_SECONDS = 1.0  # after which the next event writes what waits, so that the file of a running cache can be looked at
REQUESTS, CACHE = 1, 2  # processes
FIRST_THREAD = 101  # above all processes: a thread with the number of its process is its main thread to viewers
EVICTIONS, MOVES, TIERS, SLEEP = range(FIRST_THREAD, FIRST_THREAD + 4)  # threads of the process "cache"
_MICRO = 1e6
_encode = json.JSONEncoder(separators=(",", ":"), default=int).encode  # numpy has integers of its own
Told = dict[str, Any]
"""The arguments of an event, by the names that a viewer shows."""


class TraceFile:
    """A file of trace events, written in pieces of at most ``MOST_BUFFERED`` bytes, or one event if that is more.

    ``path`` is opened, and keeps its content until ``begin``. ``close`` writes the rest and the closing bracket; so does the
    end of the process, and the collection of this object. Raises BadInput if the file cannot be opened. A write that fails
    later is logged, and nothing more is written: nothing is raised into a cache."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._out = _Pieces(Path(path).open("ab", buffering=0))  # noqa: SIM115  closed by finish
        except (OSError, TypeError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            text, hint = (
                f"cannot record into {shown(path)}: {reason}",
                "give the path of a file in a folder that exists",
            )
            raise BadInput.with_hint(text, hint, needed=path) from None
        self.close: Callable[[], object] = finalize(self, self._out.finish)

    @property
    def num_buffered(self) -> int:
        """Bytes that wait to be written."""
        return self._out.num_waiting

    def begin(self, **names: list[str]) -> None:
        """Empty the file, and name its tracks: the threads of each process. A process without names has numbered tracks."""
        self._out.begin()
        for process, (name, threads) in enumerate(names.items(), 1):
            self.put("M", "process_name", process, 0, 0.0, {"name": name})
            for thread, text in enumerate(threads, FIRST_THREAD):
                self.put("M", "thread_name", process, thread, 0.0, {"name": text})

    def put(
        self, phase: str, name: str, process: int, thread: int, at: float, told: Told | None = None, **more: Any
    ) -> None:
        """Append an event. ``phase``: its kind, a letter of the format. ``at``: microseconds. ``told``: its arguments.
        ``more``: further fields."""
        event: Told = {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": round(at, 3), **more}
        if told is not None:
            event["args"] = told
        self._out.append(_encode(event).encode())


class _Pieces:
    """The bytes of a ``TraceFile``. It knows nothing of that object, so that it can outlive it by one call."""

    def __init__(self, file: Any) -> None:
        self._file, self._waiting, self.num_waiting = file, list[bytes](), 0
        self._between, self._written_at, self._process = b"", 0.0, os.getpid()

    def begin(self) -> None:
        with suppress(OSError):  # a pipe has nothing to remove
            self._file.truncate(0)
        self._between = b"[\n"

    def append(self, event: bytes) -> None:
        """Append ``event``, after writing what waits if both are too much for a piece, or if it waited too long."""
        now = perf_counter()
        if self.num_waiting + len(event) + 2 > MOST_BUFFERED or now - self._written_at > _SECONDS:
            self._written_at = now
            self._write()
        self._waiting += (self._between, event)
        self.num_waiting += len(self._between) + len(event)
        self._between = b",\n"

    def _write(self) -> None:
        """Write what waits, unless the file is closed, or this process is a fork: its parent has the same bytes."""
        piece = b"".join(self._waiting)
        self._waiting.clear()
        self.num_waiting = 0
        if not self._file.closed and os.getpid() == self._process:
            try:
                while piece:
                    piece = piece[self._file.write(piece) :]
            except OSError as error:
                _log.warning("a recording ends early: %s", error)
                self._file.close()

    def finish(self) -> None:
        if self._between:
            self._waiting.append(b"\n]\n" if self._between == b",\n" else b"[\n]\n")
        self._write()
        self._file.close()


@dataclass(eq=False, slots=True)
class Track:
    """A track of the process "requests": its ``thread``, the number of the request on it, and its latest time."""

    thread: int
    number: int = 0
    at: float = 0.0


class Tracks:
    """The tracks of requests in ``file``. The lowest free track is used, so there are as many as requests at once."""

    def __init__(self, file: TraceFile) -> None:
        self._file, self._free, self._num_tracks, self._num_requests = file, list[int](), 0, 0
        self._ended: dict[int, float] = {}  # free track -> when its last request ended

    def take(self, at: float, told: Told) -> Track:
        """Begin the slice of another request on a free track."""
        if not self._free:
            self._free.append(FIRST_THREAD + self._num_tracks)
            self._num_tracks += 1
            self._file.put("M", "thread_name", REQUESTS, self._free[0], 0.0, {"name": f"track {self._num_tracks}"})
        thread = heappop(self._free)
        track = Track(thread, self._num_requests, self._ended.pop(thread, 0.0))
        self._num_requests += 1
        self.begin(track, f"request {track.number}", at, told)
        return track

    def begin(self, track: Track, name: str, at: float, told: Told | None = None) -> None:
        """Begin a slice inside of the one that began last, at ``at`` or where the track's latest event is."""
        self._put(track, "B", name, at, told)

    def end(self, track: Track, at: float, told: Told | None = None) -> None:
        """End the slice that began last. ``told`` is added to its arguments."""
        self._put(track, "E", "", at, told)

    def leave(self, track: Track, at: float, told: Told | None = None) -> None:
        """End the slice of the request, in which no other is open, and free the track."""
        self.end(track, at, told)
        self._ended[track.thread] = track.at
        heappush(self._free, track.thread)

    def _put(self, track: Track, phase: str, name: str, at: float, told: Told | None) -> None:
        track.at = max(track.at, at)
        self._file.put(phase, name, REQUESTS, track.thread, track.at, told)


class Recording:
    """The recording of one cache in a file, until ``close``.

    Bounded memory: ``MOST_BUFFERED`` bytes, and a track for each request at once.

    Args:
        path: of the file.
        clock: returns the time in microseconds; default: that of ``perf_counter``.
        least: microseconds that finding the cached part of a request is shown to take at least, for clocks that stand
            still in a call.

    Raises:
        BadInput: as ``TraceFile`` does.
    """

    def __init__(
        self, path: str | os.PathLike[str], clock: Callable[[], float] | None = None, least: float = 0.0
    ) -> None:
        self._file, self._least = TraceFile(path), least
        self._clock: Callable[[], float] = _now if clock is None else clock
        self._tracks = Tracks(self._file)
        self._end: Callable[[], None] | None = None
        self._running: dict[RequestState, Track] = {}  # with a slice that is open: computed, or suspended
        self._waiting: dict[
            tuple[bytes, int, int], Track
        ] = {}  # namespace, length and hash of a prompt that was refused
        self._counted: dict[str, Told] = {}  # counter -> its latest values

    def follow(self, core: Core) -> None:
        """Begin to record a cache in which no request is yet.

        Args:
            core: of the cache.

        Raises:
            BadInput: this records a cache already.
        """
        if self._end is not None:
            text = "this recording belongs to a cache already; make a new one for each cache"
            raise BadInput(text, needed="recording")
        self._core, self._end = core, wrap_calls(core.parts, self._around, "a recording")
        self._file.begin(requests=[], cache=["evictions", "moves", "tiers"])
        self._count(self._clock())

    def close(self) -> None:
        """End all slices and the file. The cache is no longer observed. A second call does nothing."""
        if self._end is not None:
            self._end()
        at = self._clock()
        for track in (*self._running.values(), *self._waiting.values()):
            self._tracks.end(track, at)
            self._tracks.leave(track, at)
        self._running.clear()
        self._waiting.clear()
        self._file.close()

    def _around(self, method: str, call: Call) -> Call:
        recorded: dict[str, Call] = {
            "open": self._open, "fork": self._fork, "resume": self._resume, "suspend": self._suspend, "close": self._close,
            "receive": self._receive,
            "forget": self._forget, "vacate": self._vacate, "find": self._find, "load": self._load, "store": self._store,
        }  # fmt: skip
        return partial(recorded[method], call)

    # -- the life of a request ---------------------------------------------------------------------------------------

    def _open(self, call: Call, request: RequestState, *given: Any, **named: Any) -> None:
        track, began = self._admitted(call, request, *given, **named)
        match = request.match
        self._starts(request, track, "cached", began, {
            "prompt tokens": request.prompt_length, "in the tree": match.num_tokens, "cached": match.resumable,
            "of these from tiers": match.loaded, "limited by": match.limited_by, "each group alone": dict(match.groups),
        })  # fmt: skip

    def _receive(self, call: Call, request: RequestState, *given: Any) -> None:
        track, began = self._admitted(call, request, *given)
        told = {
            "prompt tokens": request.prompt_length,
            "tokens": request.own_length,
            "of these read": request.match.loaded,
        }
        self._starts(request, track, "received", began, told)

    def _admitted(self, call: Call, request: RequestState, *given: Any, **named: Any) -> tuple[Track, float]:
        """Start ``request`` by ``call``. Return its track, on which it may have waited, and when the call began."""
        began = self._clock()
        try:
            call(request, *given, **named)
        except RetryLater:
            self._refused(request, began)
            raise
        track = self._waiting.pop(_prompt(request), None) if self._waiting else None
        if track is None:
            track = self._tracks.take(began, {"prompt": request.prompt_length})
        else:
            self._tracks.end(track, began)
        return track, began

    def _starts(self, request: RequestState, track: Track, name: str, began: float, told: Told) -> None:
        """Show that ``request`` found what it starts from, in a slice ``name``, and begins to compute."""
        ended = max(self._clock(), began + self._least)
        self._tracks.begin(track, name, began, told)
        self._tracks.end(track, ended)
        self._tracks.begin(track, "computed", ended)
        self._running[request] = track
        if len(self._running) > len(self._core.running) + len(self._core.suspended):  # a reset ended some
            for closed in [one for one in self._running if one.state is State.CLOSED]:
                self._ends(closed, ended)
        self._count(ended)

    def _refused(self, request: RequestState, at: float) -> None:
        """Show that ``request`` waits, from its first refusal on. A caller tries again with a new ``RequestState``."""
        prompt = _prompt(request)
        if prompt in self._waiting:
            return
        if len(self._waiting) == MOST_WAITING:
            oldest = self._waiting.pop(next(iter(self._waiting)))
            self._tracks.end(oldest, at)
            self._tracks.leave(oldest, at, {"opened": False})
        track = self._waiting[prompt] = self._tracks.take(at, {"prompt": request.prompt_length})
        self._tracks.begin(track, "waiting", at)

    def _fork(self, call: Call, parent: RequestState, child: RequestState, reserve: int) -> None:
        began = self._clock()
        call(parent, child, reserve)
        told = {"prompt": child.prompt_length, "forked from": f"request {self._running[parent].number}"}
        self._starts(child, self._tracks.take(began, told), "cached", began, {"cached": child.own_length})

    def _suspend(self, call: Call, request: RequestState, whole: bool) -> None:
        began = self._clock()
        call(request, whole)
        track = self._running[request]
        self._tracks.end(track, began, _computed(request))
        self._tracks.begin(track, "suspended", began, {"tokens": request.own_length, "all copied": whole})
        self._count(self._clock())

    def _resume(self, call: Call, request: RequestState, *given: Any) -> None:
        began, had = self._clock(), request.own_length
        call(request, *given)
        track = self._running[request]
        self._tracks.end(track, began)
        self._starts(request, track, "resumed", began, {"tokens": had, "to compute again": had - request.own_length})

    def _close(self, call: Call, request: RequestState) -> None:
        call(request)
        if request.state is State.CLOSED:
            at = self._clock()
            self._ends(request, at)
            self._count(at)

    def _ends(self, request: RequestState, at: float) -> None:
        track = self._running.pop(request)
        self._tracks.end(track, at, _computed(request))
        self._tracks.leave(track, at, {"tokens": request.own_length})

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _count(self, at: float) -> None:
        """Write the blocks of each group by state, and the owners of sectors, where they changed. O(groups)."""
        core, counters = self._core, dict[str, Told]()
        for group in core.groups:
            one = group_stats(core, group)
            states = {"free": one.free, "cold": one.cold, "evictable": one.evictable - one.cold}
            counters[f"blocks: {one.name}"] = {**states, "held": one.private + one.shared}
        if core.sectors is not None:
            owned = {group.plan.name: n for group, n in zip(core.groups, core.sectors.num_owned)}
            counters["sectors by owner"] = {"free": core.sectors.num_free, **owned}
        for name, values in counters.items():
            if values != self._counted.get(name):
                self._counted[name] = values
                self._file.put("C", name, CACHE, 0, at, values)

    def _forget(self, call: Call, *given: Any, **named: Any) -> bool:
        prefix = self._core.prefix
        before = [*prefix.num_evicted, prefix.num_evicted_checkpoints]
        has_freed: bool = call(*given, **named)
        now = [*prefix.num_evicted, prefix.num_evicted_checkpoints]
        names = [*(group.plan.name for group in self._core.groups), "checkpoints"]
        told = {name: n - then for name, n, then in zip(names, now, before) if n > then}
        if told:
            at = self._clock()
            self._file.put("i", "evict", CACHE, EVICTIONS, at, told, s="t")
            self._count(at)
        return has_freed

    def _vacate(self, call: Call, vacating: Any) -> bool:
        is_vacated: bool = call(vacating)
        if is_vacated:
            at = self._clock()
            told = {
                "from": vacating.group.plan.name, "sectors": len(vacating.sectors), "blocks moved": len(vacating.sources)
            }  # fmt: skip
            self._file.put("i", "move", CACHE, MOVES, at, told, s="t")
            self._count(at)
        return is_vacated

    # -- sleep -------------------------------------------------------------------------------------------------------

    def slept(self, told: Any) -> None:
        """Show that the cache sleeps from now on, until ``woke``.

        Args:
            told: a ``Slept``.
        """
        at = self._clock()
        self._file.put("M", "thread_name", CACHE, SLEEP, 0.0, {"name": "sleep"})
        self._file.put("B", "asleep", CACHE, SLEEP, at, vars(told))
        self._count(at)

    def woke(self) -> None:
        """Show that the cache is awake again."""
        self._file.put("E", "", CACHE, SLEEP, self._clock())

    # -- tiers -------------------------------------------------------------------------------------------------------

    def _find(self, call: Call, block_hashes: Any, num_cached: int, *given: Any) -> Any:
        began = self._clock()
        hit = call(block_hashes, num_cached, *given)
        found = 0 if hit is None else max(0, hit.end - num_cached)
        self._moved("find", began, {"blocks asked for": len(block_hashes) - 1 - num_cached, "blocks found": found})
        return hit

    def _load(self, call: Call, hit: Any, ids: Any, first: int) -> int:
        began = self._clock()
        loaded: int = call(hit, ids, first)
        self._moved("load", began, {"blocks wanted": len(ids), "blocks": loaded})
        return loaded

    def _store(self, call: Call, level: Any, keys: Any, *given: Any, **named: Any) -> None:
        began = self._clock()
        call(level, keys, *given, **named)
        self._moved("store", began, {"tier": level.spec.name, "records": len(keys)})

    def _moved(self, name: str, began: float, told: Told) -> None:
        self._file.put("X", name, CACHE, TIERS, began, told, dur=round(self._clock() - began, 3))


def _now() -> float:
    return perf_counter() * _MICRO


def _prompt(request: RequestState) -> tuple[bytes, int, int]:
    """Return what two attempts to open the same prompt have in common. O(tokens)."""
    return request.namespace, request.prompt_length, hash(request.tokens[: request.prompt_length].tobytes())


def _computed(request: RequestState) -> Told:
    return {"tokens computed": request.own_length - request.match.resumable}
