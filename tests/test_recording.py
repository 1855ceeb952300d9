"""The recording of a cache: its file is valid trace events, they tell what happened, and it takes bounded memory."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvpagoda import (
    BadInput,
    Exhausted,
    HandoverMiss,
    KVCache,
    Limits,
    NeverFits,
    RetryLater,
    Schema,
    Sequence,
    recording,
)
from kvpagoda.handover import SharedMemory
from kvpagoda.metrics import trace
from kvpagoda.recording import CACHE, MOST_BUFFERED, MOST_WAITING, REQUESTS, Recording, TraceFile
from kvpagoda.schema import Attention, Growth, Layer
from kvpagoda.tiers import host_tier
from raises import raises

FULL = Layer(0, "full", (Attention(1, 1, 1, "float16"),))
MIXED = Schema((FULL, Layer(1, "window", (Attention(1, 1, 1, "float16", Growth(window=8)),))), "mixed")
ONE = Schema((FULL,), "one")
PHASES = {"B": set(), "E": set(), "X": {"dur"}, "i": {"s"}, "C": set(), "M": set()}
"""Phases that are used -> the fields that the format demands beside those of all."""


def cache_of(path: Path | Recording, schema: Schema = ONE, num_blocks: int = 16, **settings: Any) -> KVCache:
    return KVCache(schema, num_blocks=num_blocks, block_size=4, max_requests=2, device="none", record=path, **settings)


def proven(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, proven to have the documented form: https://ui.perfetto.dev opens them."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    stacks: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    latest: defaultdict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        assert event.keys() - {"args"} == {"ph", "name", "pid", "tid", "ts"} | PHASES[event["ph"]], event
        assert isinstance(event["ts"], float) and isinstance(event["name"], str)
        track = event["pid"], event["tid"]
        if event["ph"] != "M":
            assert event["ts"] >= latest[track], event
            latest[track] = event["ts"] + event.get("dur", 0)
        if event["ph"] == "B":
            stacks[track].append(event["name"])
        elif event["ph"] == "E":
            stacks[track].pop()
        elif event["ph"] == "C":
            assert event["args"] and all(type(value) is int and value >= 0 for value in event["args"].values()), event
    assert not any(stacks.values()), stacks
    return events


def slices(events: list[dict[str, Any]]) -> dict[str, list[tuple[str, float, float, dict[str, Any]]]]:
    """Return request -> (name, begin, end, arguments) of the slices inside of its own, in their order."""
    open_on: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    found: defaultdict[str, list[tuple[str, float, float, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event["pid"] == REQUESTS and event["ph"] == "B":
            open_on[event["tid"]].append(event)
        elif event["pid"] == REQUESTS and event["ph"] == "E":
            begun = open_on[event["tid"]].pop()
            told = {**begun.get("args", {}), **event.get("args", {})}
            if open_on[event["tid"]]:
                found[open_on[event["tid"]][-1]["name"]].append((begun["name"], begun["ts"], event["ts"], told))
    return found


def ticking() -> Iterator[float]:
    at = 0.0
    while True:
        yield (at := at + 1.0)


def test_the_life_of_requests(tmp_path: Path) -> None:
    """Two run, a third waits until one is suspended; the suspended one is resumed and forked."""
    path = tmp_path / "life.json"
    cache = cache_of(Recording(path, ticking().__next__), num_blocks=32)
    first = cache.open(range(20))
    first.commit(range(20))
    second = cache.open([*range(16), 99])
    second.commit([99])
    for _ in range(2):  # one wait, not two
        with pytest.raises(RetryLater):
            cache.open(range(50, 60))
    first.suspend()
    third = cache.open(range(50, 60))
    second.close()
    assert first.resume() == 0
    third.close()
    fork = first.fork()
    first.close()
    fork.close()
    cache.close()
    cache.close()
    told = slices(proven(path))
    assert [name for name, *_ in told["request 0"]] == ["cached", "computed", "suspended", "resumed", "computed"]
    assert [name for name, *_ in told["request 1"]] == ["cached", "computed"]
    assert [name for name, *_ in told["request 2"]] == ["waiting", "cached", "computed"]
    assert [name for name, *_ in told["request 3"]] == ["cached", "computed"]
    hit = told["request 1"][0][3]
    assert hit == {
        "prompt tokens": 17, "in the tree": 16, "cached": 16, "of these from tiers": 0, "limited by": "nothing",
        "each group alone": {"full": 16},
    }  # fmt: skip
    assert told["request 1"][1][3] == {"tokens computed": 1}
    waiting, cached = told["request 2"][:2]
    assert waiting[1] < told["request 0"][2][1] < waiting[2] == cached[1], "it waited until the suspension"
    assert told["request 0"][2][2] == told["request 0"][3][1], "suspended until it was resumed"


def test_a_request_of_another_cache(tmp_path: Path) -> None:
    """It waits for a slot, is received, and ends; one that is a miss leaves no track."""
    pytest.importorskip("torch")
    path, given = tmp_path / "received.json", dict(num_blocks=32, block_size=4, max_requests=2, device="cpu")
    one = KVCache(ONE, **given)  # type: ignore[arg-type]
    cache = KVCache(ONE, **given, record=path)  # type: ignore[arg-type]
    sender, transfer = one.sender(SharedMemory("1MiB")), SharedMemory()
    sequence = one.open(range(20))
    sequence.commit(range(18))
    tickets = [sequence.hand_over(9.0, goes_on=True) for _ in range(2)]
    held = [cache.open(range(9)), cache.open([70])]
    held[0].commit(range(9))
    with pytest.raises(RetryLater):
        cache.receive(tickets[0], transfer)
    held[0].close()
    received = cache.receive(tickets[0], transfer)
    sender.give_up(tickets[1])
    held[1].close()
    with pytest.raises(HandoverMiss):
        cache.receive(tickets[1], transfer)
    received.close()
    for ended in (cache, one):
        ended.close()
    told = slices(proven(path))
    assert [name for name, *_ in told["request 2"]] == ["waiting", "received", "computed"]
    assert told["request 2"][1][3] == {"prompt tokens": 20, "tokens": 18, "of these read": 10}
    assert told["request 2"][2][3] == {"tokens computed": 0} and len(told) == 3


def test_blocks_of_every_group_evictions_and_moves(tmp_path: Path) -> None:
    path = tmp_path / "blocks.json"
    cache = KVCache(MIXED, "1KiB", block_size=4, max_requests=2, device="none", record=path)
    for first in range(12):
        with cache.open([first] * 40) as sequence:
            sequence.commit([first] * 40)
    stats = cache.stats()
    cache.close()
    events = proven(path)
    latest = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    for group in stats.groups:
        counted = {"free": group.free, "cold": group.cold, "evictable": group.evictable - group.cold}
        assert latest[f"blocks: {group.name}"] == {**counted, "held": group.private + group.shared}
    sectors = cache.core.sectors
    assert sectors is not None and sum(latest["sectors by owner"].values()) == len(sectors.owner) - 1
    evicted = Counter[str]()
    for event in events:
        if event["name"] == "evict":
            evicted.update(event["args"])
    assert {group.name: group.evicted for group in stats.groups if group.evicted} | (
        {"checkpoints": stats.evicted_checkpoints} if stats.evicted_checkpoints else {}
    ) == evicted
    moves = [event["args"] for event in events if event["name"] == "move"]
    assert sum(one["blocks moved"] > 0 for one in moves) == cache.core.capacity.num_moves


def test_traffic_with_tiers(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    path = tmp_path / "tiers.json"
    cache = cache_of(path, tiers=[host_tier("1MiB")])
    for first in (*range(8), 0):
        with cache.open([first] * 40) as sequence:
            sequence.commit([first] * (40 - sequence.length))
            cache.flush()
    tier = cache.stats().tiers[0]
    cache.close()
    events = [event for event in proven(path) if event["ph"] == "X"]
    assert {event["name"] for event in events} == {"find", "load", "store"}
    stored = [event["args"] for event in events if event["name"] == "store"]
    assert sum(one["records"] for one in stored) >= tier.stored > 0 and stored[0]["tier"] == tier.name
    assert sum(event["args"]["blocks"] for event in events if event["name"] == "load") * 4 == tier.loaded_tokens > 0


def test_a_reset_after_an_interrupt_ends_what_ran(tmp_path: Path) -> None:
    path = tmp_path / "reset.json"
    cache = cache_of(path)
    cache.open([1])
    cache.core.guard.is_torn = True  # as an interrupt leaves it
    cache.reset()
    cache.open([2]).close()
    cache.close()
    told = slices(proven(path))
    assert told.keys() == {"request 0", "request 1"} and told["request 0"][-1][2] <= told["request 1"][-1][2]


def test_an_open_that_raises_leaves_no_track(tmp_path: Path) -> None:
    path = tmp_path / "raised.json"
    cache = cache_of(path)
    with pytest.raises(NeverFits):
        cache.open(range(1000))
    cache.open([1]).close()
    cache.close()
    assert slices(proven(path)).keys() == {"request 0"}


def test_more_refused_requests_than_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "refused.json"
    cache = cache_of(path)
    running = [cache.open([1]), cache.open([2])]
    for first in range(MOST_WAITING + 3):
        with pytest.raises(RetryLater):
            cache.open([100 + first])
    running.pop().close()
    cache.open([100]).close()  # it was forgotten: another track
    cache.close()
    told = slices(proven(path))
    assert sum(one[0][0] == "waiting" for one in told.values()) == MOST_WAITING + 3
    assert len(told) == 2 + MOST_WAITING + 3 + 1
    tracks = {event["tid"] for event in proven(path) if event["pid"] == REQUESTS and event["ph"] == "B"}
    assert len(tracks) == 2 + MOST_WAITING, "the lowest free track is taken"


def test_spans_and_a_recording_together(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry")
    path = tmp_path / "both.json"
    cache = cache_of(path)
    with trace(cache):
        cache.open([1]).close()
    cache.open([1]).close()
    cache.close()
    assert slices(proven(path)).keys() == {"request 0", "request 1"}
    assert not any("open" in vars(part) for part in cache.core.parts)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed: int, tmp_path: Path) -> None:
    """Whatever requests do, every slice ends on its track, and the events add up to the counters of the cache."""
    path, rng, texts = tmp_path / "random.json", random.Random(seed), [*range(6)]
    cache = KVCache(
        MIXED, "2KiB", block_size=4, max_requests=3, device="none", limits=Limits(step_tokens=8), record=path
    )
    running, aside, opened, waited = list[Sequence](), list[Sequence](), 0, 0
    for _ in range(400):
        with suppress(Exhausted):
            act = rng.choice(["open", "open", "step", "step", "step", "suspend", "resume", "fork", "fenced", "close"])
            one = rng.choice(running) if running else None
            if act == "open":
                waited += 1
                running.append(cache.open([rng.choice(texts)] * rng.randrange(1, 30), capacity=0))
                opened, waited = opened + 1, waited - 1
            elif act == "resume" and aside:
                aside[0].resume()
                running.append(aside.pop(0))
            elif one is None:
                continue
            elif act == "step":
                count = min(8, max(1, one.prompt_length - one.length))
                one.extend(count)
                left = one._request.tokens[one.length : one.prompt_length][:count].tolist()
                one.commit(left or [7])
            elif act == "fork":
                running.append(one.fork())
                opened += 1
            elif act == "suspend":
                one.suspend()
                running.remove(one)
                aside.append(one)
            else:
                with cache.fence([one] if act == "fenced" else []):
                    one.close()
                running.remove(one)
    stats = cache.stats()
    cache.close()
    told = slices(proven(path))
    names = Counter(name for parts in told.values() for name, *_ in parts)
    assert names["cached"] == opened and names["resumed"] and names["suspended"] >= names["resumed"]
    assert names["computed"] == opened + names["resumed"] and names["waiting"] <= waited
    assert len(told) == opened + sum(len(parts) == 1 for parts in told.values())
    hits = [told for parts in told.values() for name, _, _, told in parts if "prompt tokens" in told]
    assert sum(one["limited by"] != "nothing" for one in hits) <= sum(one.requests for one in stats.short_hits)
    cache.check()


# ---- the file ----


@pytest.mark.parametrize("path", ["", "missing/folder/a.json", ".", "\0", 7, b"a.json", None, 1.5], ids=repr)
def test_a_path_that_cannot_be_written(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if path is None:
        cache_of(path).close()  # nothing is recorded
    else:
        with raises(BadInput, needed=path):
            KVCache(ONE, num_blocks=2**40, device="cpu", record=path)  # it would be too large, but is not made
    assert not [*tmp_path.iterdir()]


def test_a_cache_that_cannot_be_made_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("[]\n")
    with pytest.raises(BadInput):
        KVCache(ONE, "1B", device="none", record=path)
    gc.collect()
    assert path.read_text() == "[]\n"
    cache_of(path).close()
    assert proven(path)
    for given in (str(path), Recording(path)):
        cache_of(given).close()  # type: ignore[arg-type]
        assert proven(path)
    recorded = Recording(path)
    cache_of(recorded)
    with raises(BadInput, needed="recording"):
        cache_of(recorded)


@pytest.mark.parametrize("end", ["", "del cache", "os._exit(0)"])
def test_a_cache_that_is_not_closed(end: str, tmp_path: Path) -> None:
    """At the end of a process, and of a cache, the file is whole; where a process dies, all but the last second is there."""
    path = tmp_path / "open.json"
    program = f"""
import os, time
from kvpagoda import KVCache, Schema
from kvpagoda.schema import Attention, Layer
schema = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "one")
cache = KVCache(schema, num_blocks=16, block_size=4, max_requests=2, device="none", record={str(path)!r})
cache.open([1]).close()
running = cache.open([1, 2])
time.sleep(1.1)
cache.open([3]).close()
if os.fork() == 0:
    raise SystemExit  # the child writes nothing
os.wait()
{end}
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    text = path.read_text()
    assert text.startswith("[\n") and text.endswith("\n]\n") == (end != "os._exit(0)")
    events = json.loads(text if text.endswith("]\n") else text + "]")
    assert [event["name"] for event in events if event["name"].startswith("request ")][:2] == ["request 0", "request 1"]


def test_memory_does_not_grow_with_the_number_of_requests(tmp_path: Path) -> None:
    """A hundred requests or fifteen times as many: what this module allocates and keeps differs by less than a buffer."""

    def kept(num_requests: int) -> int:
        path = tmp_path / f"{num_requests}.json"
        recorded = Recording(path)
        cache, most = cache_of(recorded), 0
        tracemalloc.start()
        for first in range(num_requests):
            cache.open([first] * 9).close()
            most = max(most, recorded._file.num_buffered)
        gc.collect()
        mine = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, recording.__file__)])
        tracemalloc.stop()
        cache.close()
        assert most <= MOST_BUFFERED < path.stat().st_size or num_requests < 1000
        return sum(statistic.size for statistic in mine.statistics("filename"))

    few, many = kept(100), kept(1500)
    assert many < few + 3 * MOST_BUFFERED, f"{few} bytes after 100 requests, {many} after 1,500"


def test_a_disk_that_is_full_ends_the_recording_and_not_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    cache = cache_of(Path("/dev/full"))
    for first in range(2000):
        cache.open([first] * 9).close()
    cache.check()
    cache.close()
    assert "a recording ends early" in caplog.text and len(caplog.records) == 1


def test_an_event_larger_than_the_buffer(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "large.json")
    file.begin(requests=[])
    file.put("i", "large", CACHE, 1, 0.0, {"text": "x" * 2 * MOST_BUFFERED}, s="t")
    file.put("i", "small", CACHE, 1, 0.0, {"n": 1}, s="t")
    assert file.num_buffered < MOST_BUFFERED
    file.close()
    assert [event["name"] for event in proven(tmp_path / "large.json")] == ["process_name", "large", "small"]


def test_limits_of_swap_are_those_of_a_cache_without_a_recording(tmp_path: Path) -> None:
    """An error inside a call passes through unchanged, and the request stays where it was."""
    path = tmp_path / "swap.json"
    cache = cache_of(path, limits=Limits(swap=0))
    sequence = cache.open(range(20))
    sequence.commit(range(20))
    with pytest.raises(RuntimeError):
        sequence.suspend(whole=True)
    sequence.close()
    cache.close()
    assert [name for name, *_ in slices(proven(path))["request 0"]] == ["cached", "computed"]
