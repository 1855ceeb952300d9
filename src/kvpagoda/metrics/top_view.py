"""``kvpagoda top`` on a terminal: tables that fit its width, printed once or updated every few seconds. Needs rich."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from time import monotonic, sleep

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvpagoda import console
from kvpagoda.errors import BadInput, KVPagodaError
from kvpagoda.metrics.names import STATES, VLLM
from kvpagoda.metrics.top import Figures, read
from kvpagoda.text import table
from kvpagoda.units import format_bytes

_MARKS = {"private": "█", "shared": "▓", "evictable": "░", "free": "·"}
_BARS = ((60, 8), (100, 16), (inf, 40))  # (the most columns of the terminal, marks of a bar)


def run(source: str, every: float, *, once: bool, as_json: bool, vllm: str = VLLM) -> None:
    """Show the figures at ``source`` every ``every`` seconds until Ctrl-C, or ``once``. With ``as_json`` print a line
    of JSON each time instead. Raises BadInput, OSError."""
    if not 0.1 <= every < 3600:
        raise BadInput(f"--every must be at least 0.1 and less than 3600 seconds, got {every}")
    look = partial(read, source, vllm)
    if as_json:
        for figures, _ in _moments(look, every, once=once):
            print(json.dumps(figures.to_dict()), flush=True)
        return
    out = console.output()
    if once:
        out.print(view(look(), None, out.width))
        return
    first = look()  # an error here is printed in one line, and not on the live screen, which is cleared at the end
    with Live(view(first, None, out.width), console=out, screen=out.is_terminal, auto_refresh=False) as live:
        sleep(every)
        for figures, rates in _moments(look, every, before=first):
            live.update(view(figures, rates, out.width), refresh=True)


def _moments(
    look: Callable[[], Figures], every: float, *, once: bool = False, before: Figures | None = None
) -> Iterator[tuple[Figures, tuple[float, float] | None]]:
    """Yield the figures every ``every`` seconds, with the tokens per second that were saved and computed since the last
    time. Raises if the source cannot be read the first time; later it tries again."""
    then = monotonic() - every
    while True:
        try:
            figures, now = look(), monotonic()
        except (KVPagodaError, OSError):
            if before is None:
                raise
            sleep(every)
            continue
        rates = None
        if before is not None and figures.computed_tokens >= before.computed_tokens:
            seconds = max(1e-3, now - then)
            saved = figures.cached_tokens - before.cached_tokens
            rates = saved / seconds, (figures.computed_tokens - before.computed_tokens) / seconds
        yield figures, rates
        if once:
            return
        before, then = figures, now
        sleep(every)


def view(figures: Figures, rates: tuple[float, float] | None, width: int) -> RenderableType:
    """Return all tables, in lines of at most ``width`` characters. ``rates``: tokens saved and computed per second."""
    parts: list[RenderableType] = [Text(line) for line in _head(figures, rates)]
    bar = next(marks for most, marks in _BARS if width <= most)
    names, rows = ["group", "in use", "blocks", *STATES, "evicted"], []
    for group in figures.groups:
        total = sum(group.blocks.values())
        held = group.blocks["private"] + group.blocks["shared"]
        counts = [f"{group.blocks[state]:,}" for state in STATES]
        rows.append([group.name, f"{held / max(1, total):.0%}", _bar(group.blocks, bar), *counts, f"{group.evicted:,}"])
    parts += _table(names, rows, ("group", "blocks"), width, drop=("evicted", "free", "evictable", "shared", "private"))
    parts.append(Text("  ".join(f"{_MARKS[state]} {state}" for state in STATES)))
    short = [[reason, f"{n:,}", f"{tokens:,}"] for reason, (n, tokens) in figures.short_hits.items()]
    parts += _table(["hits cut short by", "requests", "tokens lost"], short, ("hits cut short by",), width)
    tiers = [
        [
            f"{tier.level} {tier.name}{'' if tier.is_available else ' (down)'}", tier.call,
            f"{tier.ok:,}", f"{tier.records - tier.ok:,}",
            format_bytes(tier.nbytes), _seconds(tier.median), _seconds(tier.slowest),
        ]
        for tier in figures.tiers
    ]  # fmt: skip
    names = ["tier", "call", "ok", "else", "bytes", "median", "99 %"]
    parts += _table(names, tiers, ("tier", "call"), width, drop=("bytes", "else", "99 %"))
    by_size = sorted(figures.namespaces.items(), key=lambda item: -item[1][1])[:8]
    spaces = [
        [name, f"{n:,}", f"{prompt:,}", f"{cached / max(1, prompt):.1%}"] for name, (n, prompt, cached) in by_size
    ]
    parts += _table(
        ["namespace", "requests", "prompt tokens", "saved"], spaces, ("namespace",), width, drop=("requests",)
    )
    return Group(*parts)


def _head(figures: Figures, rates: tuple[float, float] | None) -> Iterator[str]:
    """Yield the first lines: requests, memory, tokens."""
    waiting = "" if figures.waiting is None else f", {figures.waiting} waiting"
    yield f"{figures.running} of {figures.requests_max} running{waiting}"
    counts = [(figures.suspended, "suspended"), (figures.preempted or 0, "preempted")]
    counts += [(figures.checkpoints, "checkpoints"), (figures.pins, "pins")]
    if any(n for n, _ in counts):
        yield ", ".join(f"{n} {what}" for n, what in counts if n)
    engines = "" if figures.engines == 1 else f" of {figures.engines} caches"
    yield f"memory  {figures.usage:.1%} of {format_bytes(figures.nbytes)}{engines}"
    loaded = f", {figures.loaded_tokens / max(1, figures.prompt_tokens):.1%} from tiers" if figures.tiers else ""
    yield f"hits    {figures.hit_rate:.1%} of tokens{loaded}"
    if rates is not None:
        yield f"tokens  {rates[0]:,.0f}/s saved, {rates[1]:,.0f}/s computed"
    else:
        yield f"tokens  {figures.cached_tokens:,} saved, {figures.computed_tokens:,} computed"


def _table(
    names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str], width: int, drop: Sequence[str] = ()
) -> list[RenderableType]:
    """Return an empty line and a table. While it is wider than ``width``, columns of ``drop`` are left out, the first
    ones first. Returns nothing if there are no rows. ``left``: columns that are aligned left."""
    if not rows:
        return []
    kept, left_out, cells = [*names], [*drop], [[*row] for row in rows]
    while (excess := max(map(len, lines := table(kept, cells, left))) - width) > 0 and left_out:
        column = kept.index(left_out.pop(0))
        kept, *cells = ([*row[:column], *row[column + 1 :]] for row in (kept, *cells))
    if excess > 0:  # cut the names in the first column, never the numbers
        room = max(1, max(len(row[0]) for row in (kept, *cells)) - excess)
        kept, *cells = ([name if len(name) <= room else name[: room - 1] + "…", *row] for name, *row in (kept, *cells))
        lines = table(kept, cells, [*left, kept[0]])
    return [Text("\n".join(["", *lines]))]


def _bar(blocks: dict[str, int], width: int) -> str:
    """Return a bar of ``width`` marks: each state gets its share of the blocks."""
    total, ends, drawn = sum(blocks.values()), 0, ""
    for state in STATES:
        ends += blocks[state]
        count = round(width * ends / max(1, total)) - len(drawn)
        drawn += _MARKS[state] * count
    return drawn


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.1f} s"
