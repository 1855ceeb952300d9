"""``kvpagoda top`` on a terminal: tables that fit it, made anew every so many seconds, or once. Needs rich."""

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
_BARS = ((60, 8), (100, 16), (inf, 40))  # up to so many columns, so many marks


def run(source: str, every: float, *, once: bool, as_json: bool, vllm: str = VLLM) -> None:
    """Show the figures at ``source`` until Ctrl-C, or ``once``; or print them as a line of JSON each time. Raises BadInput,
    OSError."""
    if not 0.1 <= every < 3600:
        raise BadInput(f"--every is a number of seconds from 0.1 on, got {every}")
    look = partial(read, source, vllm)
    if as_json:
        for figures, _ in _moments(look, every, once=once):
            print(json.dumps(figures.to_dict()), flush=True)
        return
    out = console.output()
    if once:
        out.print(view(look(), None, out.width))
        return
    first = look()  # what is wrong with it is said in one line, and not on a screen that goes away
    with Live(view(first, None, out.width), console=out, screen=out.is_terminal, auto_refresh=False) as live:
        sleep(every)
        for figures, rates in _moments(look, every, before=first):
            live.update(view(figures, rates, out.width), refresh=True)


def _moments(
    look: Callable[[], Figures], every: float, *, once: bool = False, before: Figures | None = None
) -> Iterator[tuple[Figures, tuple[float, float] | None]]:
    """The figures, again and again, with tokens saved and computed a second since the time before. A source that cannot be
    read for a while is asked again; at first it raises."""
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
    """All tables, in lines of at most ``width`` characters."""
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
            f"{one.level} {one.name}{'' if one.is_available else ' (down)'}", one.call,
            f"{one.ok:,}", f"{one.records - one.ok:,}",
            format_bytes(one.nbytes), _seconds(one.median), _seconds(one.slowest),
        ]
        for one in figures.tiers
    ]  # fmt: skip
    names = ["tier", "call", "ok", "else", "bytes", "median", "99 %"]
    parts += _table(names, tiers, ("tier", "call"), width, drop=("bytes", "else", "99 %"))
    by_size = sorted(figures.namespaces.items(), key=lambda one: -one[1][1])[:8]
    spaces = [
        [name, f"{n:,}", f"{prompt:,}", f"{cached / max(1, prompt):.1%}"] for name, (n, prompt, cached) in by_size
    ]
    parts += _table(
        ["namespace", "requests", "prompt tokens", "saved"], spaces, ("namespace",), width, drop=("requests",)
    )
    return Group(*parts)


def _head(figures: Figures, rates: tuple[float, float] | None) -> Iterator[str]:
    """The first lines: requests, memory, tokens."""
    waiting = "" if figures.waiting is None else f", {figures.waiting} waiting"
    yield f"{figures.running} of {figures.requests_max} running{waiting}"
    aside = [(figures.suspended, "suspended"), (figures.preempted or 0, "preempted")]
    aside += [(figures.checkpoints, "checkpoints"), (figures.pins, "pins")]
    if any(n for n, _ in aside):
        yield ", ".join(f"{n} {what}" for n, what in aside if n)
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
    """A table below an empty line, without as many columns of ``drop`` as make it fit; nothing where there are no rows."""
    if not rows:
        return []
    kept, left_out, cells = [*names], [*drop], [[*row] for row in rows]
    while (wide := max(map(len, lines := table(kept, cells, left))) - width) > 0 and left_out:
        at = kept.index(left_out.pop(0))
        kept, *cells = ([*row[:at], *row[at + 1 :]] for row in (kept, *cells))
    if wide > 0:  # the names on the left are cut, the numbers on the right never
        room = max(1, max(len(row[0]) for row in (kept, *cells)) - wide)
        kept, *cells = ([one if len(one) <= room else one[: room - 1] + "…", *row] for one, *row in (kept, *cells))
        lines = table(kept, cells, [*left, kept[0]])
    return [Text("\n".join(["", *lines]))]


def _bar(blocks: dict[str, int], width: int) -> str:
    """``width`` marks, shared out over the states."""
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
