"""The page of ``kvpagoda replay --report``: its figures are those of the replays, and a browser shows them without network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly", reason="no plotly: the extra report")
pytest.importorskip("typer")
from browser import chromium
from kvpagoda import MissingExtra
from kvpagoda.replay import Trace, hit_bound, hit_rate_curve, synthetic
from kvpagoda.replay.page import ReportPage, schema_sections, tree_sections
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.serving import serve
from kvpagoda.schema import Attention, Growth, Layer, Schema

Command = Callable[..., "subprocess.CompletedProcess[str]"]
CHAINS = [[1, 2, 3], [1, 2], [4], [1, 2, 3]]
RECORDS = [
    {"timestamp": 60_000 * i, "input_length": 4 * len(chain), "output_length": 1, "hash_ids": chain, "block_size": 4}
    for i, chain in enumerate(CHAINS)
]


def told(path: Path) -> dict[str, Any]:
    """Return what a page shows."""
    found = re.search(r"^const page = (.*);$", path.read_text(), re.MULTILINE)
    assert found is not None
    page: dict[str, Any] = json.loads(found[1])
    return page


def test_tokens_lost_by_cause_and_hits_over_time_by_hand() -> None:
    """Three blocks hold [1, 2, 3]; block 4 evicts one of them, and the last request lacks it."""
    trace = Trace.read(RECORDS)
    reuse = Reuse.of(trace)
    sections = tree_sections(trace, reuse, hit_rate_curve(trace, [3, 4], ["lru", "opt"]))
    over, time, _, lost = sections
    series, _ = lost.figures["3 blocks"]
    assert [(one["name"], one["customdata"]) for one in series] == [
        ("hit", [16, 20]), ("evicted before", [4, 0]), ("first seen", [16, 16])
    ]  # fmt: skip
    assert [one["customdata"] for one in lost.figures["4 blocks"][0]] == [[20, 20], [0, 0], [16, 16]]
    lru = time.figures["3 blocks"][0][0]
    rates = [rate for rate in lru["y"] if rate is not None]
    assert rates == [0.0, 100.0, 0.0, pytest.approx(200 / 3, abs=1e-3)] and lru["x"][-1] == pytest.approx(3, abs=0.1)
    policies = {one["name"]: one["y"] for one in over.figures[""][0]}
    assert policies["lru"] == [pytest.approx(400 / 9, abs=1e-3), pytest.approx(500 / 9, abs=1e-3)]
    assert policies["lru, every capacity"][-1] == policies["lru"][-1]


def test_tokens_lost_with_a_model_by_cause_and_group() -> None:
    """All tokens of a prompt are lost to one cause or hit; what a window lost is the difference between the groups."""
    window = Attention(1, 8, 8, "float16", Growth(window=64))
    layers = Layer(0, "full", (Attention(1, 8, 8, "float16"),)), Layer(1, "window", (window,))
    rng = np.random.default_rng(0)
    chains = [[int(rng.zipf(1.5)) % 20, *range(100, 108), 1000 + i] for i in range(240)]
    records = [{"timestamp": 0, "input_length": 640, "output_length": 1, "hash_ids": chain} for chain in chains]
    trace = Trace.read(records, block_size=64)
    jobs = [(budget, policy, 0) for budget in ("256KiB", "1MiB") for policy in ("lru", "s3fifo")]
    results = [
        serve(trace, Schema(layers), budget, tokens_per_id=64, max_requests=2, policy=policy)
        for budget, policy, _ in jobs
    ]
    _, time, _, lost, groups = schema_sections(trace, Reuse.of(trace), jobs, results)
    for budget in ("256KiB", "1MiB"):
        mine = [result for job, result in zip(jobs, results) if job[0] == budget]
        series, _ = lost.figures[budget]
        assert [sum(tokens) for tokens in zip(*(one["customdata"] for one in series))] == [240 * 640] * 2
        causes = {one["name"]: one["customdata"] for one in series}
        assert causes["hit"] == [result.cached_tokens for result in mine]
        matched = [sum(v[i] for name, v in causes.items() if name.startswith(("hit", "limited"))) for i in range(2)]
        assert matched == [result.matched_tokens for result in mine]
        for one, result in zip(groups.figures[budget][0], mine):
            assert one["y"] == [100 * group["tokens"] / result.prompt_tokens for group in result.groups.values()]
            assert sum(one["customdata"]) == result.evicted_blocks > 0
        counted = time.figures[budget][0][0]["y"]
        assert np.mean(counted) == pytest.approx(100 * mine[0].hit_rate, abs=1e-3)
    assert {name for budget in lost.figures for name in (one["name"] for one in lost.figures[budget][0])} >= {
        "limited by window", "evicted before, or not yet cached", "first seen"
    }  # fmt: skip


def test_a_bound_is_shown_over_memory_alone() -> None:
    """It serves no requests, so that no other section has it."""
    trace, schema, policies = synthetic(60), Schema.from_hf_config("gpt-oss-120b"), ("lru", "opt")
    jobs = [(budget, policy, 0) for budget in ("512MiB", "1GiB") for policy in policies]
    results = [
        (hit_bound if policy == "opt" else serve)(trace, schema, budget, tokens_per_id=64) for budget, policy, _ in jobs
    ]
    over, *others = schema_sections(trace, Reuse.of(trace), jobs, results)
    lru, opt = over.figures[""][0]
    assert opt["name"] == "opt (bound)" and opt["line"] == {"dash": "dash"} and "line" not in lru
    assert opt["x"] == [0.5, 1.0] and opt["y"] == [round(100 * r.hit_rate, 4) for r in results[1::2]]
    alone = schema_sections(trace, Reuse.of(trace), jobs[::2], results[::2])[1:]
    assert others == alone and len(others) == 4
    assert len(schema_sections(trace, Reuse.of(trace), jobs[1::2], results[1::2])) == 2  # after an interrupt


def test_a_name_cannot_end_the_script(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    ReportPage(path).write("</script><script>alert(1)</script>", ["<b>"], [])
    assert told(path)["title"].startswith("</script>") and "<script>alert" not in path.read_text()


def test_what_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = here("replay", "--report", str(tmp_path / "none" / "out.html"))
    assert done.returncode == 2 and "cannot write a report to" in done.stderr
    done = here("replay", "--trace", str(tmp_path / "none" / "out.json"), "--capacity", "5", "--policy", "lru")
    assert done.returncode == 2 and "cannot record into" in done.stderr
    done = here("replay", "--trace", str(tmp_path / "out.json"))
    assert done.returncode == 2 and "give it one --capacity and one --policy" in done.stderr
    done = here("replay", "--schema", "qwen3-8b", "--trace", str(tmp_path / "out.json"))
    assert done.returncode == 2 and "give it one --budget, --policy and --checkpoint-every" in done.stderr
    done = here("replay", "--schema", "qwen3-8b", "--workers", "1", "--report", str(tmp_path / "out.html"))
    assert done.returncode == 2 and "leave out --workers" in done.stderr
    assert not [*tmp_path.iterdir()]
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = here("replay", "--report", str(tmp_path / "out.html"))
    assert done.returncode == 2 and "pip install 'kvpagoda[report]'" in done.stderr
    with pytest.raises(MissingExtra):
        ReportPage(tmp_path / "out.html")


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Shown:
    """A page in a browser, and everything that went wrong in it."""

    def __init__(self, browser: Any, path: Path, width: int, **settings: Any) -> None:
        self.page = browser.new_context(viewport={"width": width, "height": 800}, **settings).new_page()
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("section:last-of-type .xtick")

    def text(self, selector: str, section: int) -> str:
        found: list[str] = self.page.locator("section").nth(section).locator(selector).all_text_contents()
        return " ".join(found)

    def check(self, path: Path) -> None:
        assert not self.wrong and self.asked == [path.as_uri()], "nothing is loaded, nothing is logged"
        wide = self.page.evaluate("[...document.querySelectorAll('body *')].filter(e => !e.closest('svg')).map("
                                  "e => e.getBoundingClientRect().right).reduce((a, b) => Math.max(a, b))")  # fmt: skip
        assert wide <= self.page.viewport_size["width"] >= self.page.evaluate("document.documentElement.scrollWidth")


@pytest.mark.parametrize(
    "arguments",
    [("--limit", "300"), ("--limit", "80", "--schema", "gpt-oss-120b", "--budget", "512MiB,1GiB")],
    ids=["tree", "model"],
)
def test_a_page_in_a_browser(arguments: tuple[str, ...], tmp_path: Path, here: Command, browser: Any) -> None:
    """It is clicked through: another choice, a point under the mouse, a zoom and back; wide, narrow, dark."""
    path = tmp_path / "out.html"
    assert here("replay", *arguments, "--report", str(path)).returncode == 0
    sections = told(path)["sections"]
    lost = [section["name"] for section in sections].index("Where tokens were lost")
    shown = Shown(browser, path, 1200)
    page = shown.page
    assert page.locator("h2").all_text_contents() == [section["name"] for section in sections]
    assert "hit rate, %" in shown.text(".ytitle", 0) and "first seen" in shown.text(".legendtext", lost)

    series = page.evaluate(f"document.querySelectorAll('.figure')[{lost}].data.map(one => one.x)")
    first = next(iter(sections[lost]["figures"].values()))
    assert series != [one["x"] for one in first[0]]
    page.locator("section").nth(lost).locator("select").select_option(index=0)
    assert page.evaluate(f"document.querySelectorAll('.figure')[{lost}].data.map(one => one.x)") == [
        one["x"] for one in first[0]
    ]

    bar = page.locator("section").nth(lost).locator(".bars .point").first
    bar.scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(f"section:nth-of-type({lost + 1}) .hovertext")
    assert re.search(r"hit: \d+\.\d\d %\s*[\d,]+ tokens", shown.text(".hovertext", lost))

    plot, reach = (
        page.locator("section").nth(1).locator(".nsewdrag").first,
        "document.querySelectorAll('.figure')[1]._fullLayout.xaxis.range",
    )
    plot.scroll_into_view_if_needed()
    box, before = plot.bounding_box(), page.evaluate(reach)
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    page.wait_for_function(f"{reach}[0] > {before[0]}")
    zoomed = page.evaluate(reach)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.2 * (before[1] - before[0]), rel=0.05)
    plot.dblclick()
    page.wait_for_function(f"Math.abs({reach}[0] - {before[0]}) < 1e-6")

    ticks = shown.text(".ytick text", 0)
    for width, height in ((375, 800), (900, 800), (1200, 800), (1200, 2400)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function("Math.abs(document.querySelector('.figure')._fullLayout.width - "
                               "document.querySelector('.figure').clientWidth) <= 1")  # fmt: skip
        page.wait_for_timeout(250)
        shown.check(path)
        assert shown.text(".ytick text", 0) == ticks


def test_a_page_on_a_phone_and_in_the_dark(tmp_path: Path, here: Command, browser: Any) -> None:
    path = tmp_path / "out.html"
    assert here("replay", "--limit", "200", "--report", str(path)).returncode == 0
    colours = {}
    for scheme in ("light", "dark"):
        shown = Shown(browser, path, 375, color_scheme=scheme, is_mobile=True, has_touch=True)
        shown.check(path)
        assert shown.page.evaluate("document.querySelector('.figure')._fullLayout.dragmode") is False, (
            "a finger scrolls"
        )
        colours[scheme] = shown.page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, document.querySelector('.figure')._fullLayout.font.color]"
        )
    assert colours["light"][0] != colours["dark"][0] and colours["light"][1] != colours["dark"][1]
    shown.page.emulate_media(color_scheme="light")
    shown.page.wait_for_function(
        f"document.querySelector('.figure')._fullLayout.font.color === {colours['light'][1]!r}"
    )
    shown.check(path)
