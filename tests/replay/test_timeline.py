"""One replay through the tree as trace events: the documented form, and the figures of the replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpagoda.recording import TraceFile
from kvpagoda.replay import Trace, replay, synthetic
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.run import POLICIES
from kvpagoda.replay.timeline import write_timeline
from test_recording import proven, slices

CHAINS = [[1, 2, 3], [1, 2], [4], [1, 2, 3]]


def records(seconds: float) -> list[dict[str, object]]:
    same = {"output_length": 1, "block_size": 4}
    return [
        {"timestamp": 1e3 * seconds * i, "input_length": 4 * len(chain), "hash_ids": chain, **same}
        for i, chain in enumerate(CHAINS)
    ]


@pytest.mark.parametrize("seconds", [0.0, 1.0, 4e-6])
def test_by_hand(seconds: float, tmp_path: Path) -> None:
    """Of the last request's 12 tokens 8 hit: block 3 went for block 4. Requests follow one another if all arrive at once,
    and overlap, on tracks of their own, if they arrive faster than they run."""
    trace = Trace.read(records(seconds))
    path = tmp_path / "tree.json"
    write_timeline(TraceFile(path), trace, Reuse.of(trace), replay(trace, 3))
    events = proven(path)
    told = slices(events)
    tokens = [[told["tokens"] for *_, told in parts] for parts in told.values()]
    assert tokens == [[0, 12], [8, 0], [0, 4], [8, 4]]
    whole = [event for event in events if event["name"].startswith("request ")]
    assert [event["ts"] for event in whole] == (
        [0, 12, 20, 24] if not seconds else [1e6 * seconds * i for i in range(4)]
    )
    assert len({event["tid"] for event in whole}) == (3 if 0 < seconds < 1 else 1)
    assert [event["args"]["evicted before"] for event in whole] == [0, 0, 0, 4]
    counts = [event["args"] for event in events if event["ph"] == "C"]
    assert counts == [{"free": 0, "cached": 3}] * 4
    assert [event["args"] for event in events if event["name"] == "evict"] == [{"blocks": 1}] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sums_are_those_of_the_replay(policy: str, tmp_path: Path) -> None:
    trace, path = synthetic(120), tmp_path / "tree.json"
    result = replay(trace, 1_500, policy)
    write_timeline(TraceFile(path), trace, Reuse.of(trace), result)
    events = proven(path)
    told = slices(events)
    assert sum(parts[0][3]["tokens"] for parts in told.values()) == result.token_hits
    assert sum(part[3]["tokens"] for parts in told.values() for part in parts) == result.token_refs
    assert sum(event["args"]["blocks"] for event in events if event["name"] == "evict") == result.evictions > 0
