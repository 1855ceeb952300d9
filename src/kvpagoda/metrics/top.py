"""``kvpagoda top``: figures read from metrics addresses, or files with the same text, and their tables on a terminal.

The tables fit its width, and are printed once or updated every few seconds. Needs prometheus_client and rich.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.client import HTTPException
from itertools import pairwise
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.request import urlopen

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvpagoda import console
from kvpagoda.errors import BadInput, KVPagodaError, MissingExtra
from kvpagoda.metrics.names import METRICS, STATES, VLLM
from kvpagoda.text import table, text_in
from kvpagoda.tiers.health import Histogram
from kvpagoda.units import format_bytes

with MissingExtra.unless("prometheus_client", "'top' needs prometheus_client; pip install 'kvpagoda[metrics]'"):
    from prometheus_client.parser import text_string_to_metric_families

_MARKS = {"private": "█", "shared": "▓", "evictable": "░", "free": "·"}
_BARS = ((60, 8), (100, 16), (inf, 40))  # (the most columns of the terminal, marks of a bar)
_MARKS_LEGEND = Text("  ".join(f"{mark} {state}" for state, mark in _MARKS.items()))
GROUP_COLUMNS = ("group", "in use", "blocks", *STATES, "evicted")
DROPPED = ("evicted", "free", "evictable", "shared", "private")
"""Columns of groups that are left out, in this order, where the terminal is narrow."""
_TIMEOUT = 5.0  # seconds
_SERIES = frozenset(name for metric in METRICS for name in metric.series)


@dataclass(frozen=True)
class GroupFigures:
    """One group: its blocks by state (``STATES``), bytes of a block, blocks evicted so far, prompt tokens that it had
    cached."""

    name: str
    blocks: dict[str, int]
    block_nbytes: int
    evicted: int
    found_tokens: int


@dataclass(frozen=True)
class TierFigures:
    """One kind of call to a tier: records asked for, records that succeeded, bytes, and the median and the 99 %
    quantile of the seconds of a call (None without any call)."""

    level: int
    name: str
    call: str
    is_available: bool
    records: int
    ok: int
    nbytes: int
    median: float | None
    slowest: float | None


@dataclass(frozen=True)
class Figures:
    """The figures of all caches of a source at one moment; tokens and requests are counted since the caches were made.
    ``waiting`` and ``preempted`` are None if no queue is known."""

    engines: int
    running: int
    requests_max: int
    suspended: int
    waiting: int | None
    preempted: int | None
    nbytes: int
    usage: float
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    checkpoints: int
    pins: int
    groups: tuple[GroupFigures, ...]
    short_hits: dict[str, tuple[int, int]]
    """Reason -> requests, tokens."""
    namespaces: dict[str, tuple[int, int, int]]
    """Namespace -> requests, prompt tokens, saved ones."""
    tiers: tuple[TierFigures, ...]

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were cached, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the hit rate as plain data."""
        short = {reason: {"requests": n, "tokens": tokens} for reason, (n, tokens) in self.short_hits.items()}
        names = {
            name: {"requests": n, "prompt_tokens": prompt, "cached_tokens": cached}
            for name, (n, prompt, cached) in self.namespaces.items()
        }
        return {**asdict(self), "short_hits": short, "namespaces": names, "hit_rate": self.hit_rate}


class _Samples:
    """Samples by metric name. Reading them adds up over the engines and over all labels that the reader does not
    name."""

    def __init__(self, text: str, vllm: str) -> None:
        self._of: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name
                if name.startswith(vllm):
                    name = VLLM + name.removeprefix(vllm)
                elif name.startswith(VLLM):  # a metric of vLLM itself
                    continue
                if name in _SERIES:
                    self._of[name].append((sample.labels, sample.value))

    def by(self, name: str, *labels: str, of: Callable[[Iterable[float]], float] = sum) -> dict[tuple[str, ...], float]:
        """Return the values of ``name`` by the values of ``labels``; ``of`` combines samples with the same label
        values."""
        found: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for own, value in self._of[name]:
            found[tuple(own.get(label, "") for label in labels)].append(value)
        return {key: of(values) for key, values in found.items()}

    def total(self, name: str) -> int:
        """Return the sum of all samples of ``name``; 0 if there are none."""
        return int(self.by(name).get((), 0))

    def some(self, name: str) -> int | None:
        """Return ``total(name)``, or None if there are no samples."""
        return self.total(name) if self._of[name] else None

    def histogram(self, name: str, labels: Mapping[str, str]) -> Histogram:
        """Return the sum of the histograms ``name`` that have ``labels``."""
        below: dict[float, float] = defaultdict(float)
        for own, value in self._of[f"{name}_bucket"]:
            if labels.items() <= own.items():
                below[float(own["le"])] += value
        ends = sorted(below)
        counts = (int(after - before) for before, after in pairwise([0.0, *(below[end] for end in ends)]))
        return Histogram(tuple(end for end in ends if end < inf), tuple(counts), 0.0)


def read(source: str, vllm: str = VLLM) -> Figures:
    """Return the figures at ``source``: an http address (``host:port`` is enough), or a file. ``vllm``: see
    ``CacheCollector``. Raises BadInput, and OSError for a file that cannot be read."""
    address = source
    if "://" not in source and not Path(source).exists() and ":" in source:
        address = f"http://{source}"
    if "://" not in address:
        return figures(text_in(Path(source)), source, vllm)
    if not address.startswith(("http://", "https://")):
        raise BadInput(
            f"{source!r} is neither an http address of metrics, such as localhost:9100, nor a file", needed=source
        )
    if address.count("/") < 3:
        address += "/metrics"
    try:
        with urlopen(address, timeout=_TIMEOUT) as answer:
            text = answer.read().decode()
    except (HTTPException, OSError, OverflowError, ValueError) as error:
        raise BadInput(f"{address} gives no metrics: {getattr(error, 'reason', error)}", needed=address) from None
    return figures(text, source, vllm)


def figures(text: str, source: str = "the text", vllm: str = VLLM) -> Figures:
    """Parse ``text``, metrics in the text form of Prometheus. ``source`` names it in errors. Raises BadInput for other
    text."""
    try:
        samples = _Samples(text, vllm)
    except (ValueError, KeyError, IndexError):
        raise BadInput(
            f"{source} does not hold metrics in the text form of Prometheus", needed="metrics", available=source
        ) from None
    if not samples.by("kvpagoda_cache_bytes"):
        raise BadInput(
            f"{source} has no metrics of kvpagoda: register a kvpagoda.metrics.CacheCollector where it is served",
            needed="kvpagoda_cache_bytes", available=source,
        )  # fmt: skip
    blocks = samples.by("kvpagoda_blocks", "group", "state")
    nbytes = samples.by("kvpagoda_cache_bytes", "model_name", "engine")
    sizes = samples.by("kvpagoda_block_bytes", "group", of=max)
    evicted, found = (samples.by(f"kvpagoda_{name}_total", "group") for name in ("blocks_evicted", "found_tokens"))
    groups = tuple(
        GroupFigures(
            name, {state: int(blocks.get((name, state), 0)) for state in STATES}, int(sizes.get((name,), 0)),
            int(evicted.get((name,), 0)), int(found.get((name,), 0)),
        )
        for name in dict.fromkeys(name for name, _ in blocks)
    )  # fmt: skip
    usage = samples.by("vllm:kv_cache_usage_perc", "model_name", "engine")
    return Figures(
        engines=len(nbytes),
        running=samples.total("vllm:num_requests_running"),
        requests_max=samples.total("kvpagoda_requests_max"),
        suspended=samples.total("kvpagoda_requests_suspended"),
        waiting=samples.some("vllm:num_requests_waiting"),
        preempted=samples.some("vllm:num_preemptions_total"),
        nbytes=int(sum(nbytes.values())),
        usage=sum(usage.get(engine, 0.0) * size for engine, size in nbytes.items()) / max(1.0, sum(nbytes.values())),
        prompt_tokens=samples.total("vllm:prefix_cache_queries_total"),
        cached_tokens=samples.total("kvpagoda_cached_tokens_total"),
        loaded_tokens=samples.total("kvpagoda_loaded_tokens_total"),
        computed_tokens=samples.total("kvpagoda_computed_tokens_total"),
        checkpoints=samples.total("kvpagoda_checkpoints"),
        pins=samples.total("kvpagoda_pins"),
        groups=groups,
        short_hits=_columns(samples, "reason", "short_hits", "short_hit_tokens"),
        namespaces=_columns(samples, "namespace", "requests", "prompt_tokens", "cached_tokens"),
        tiers=_tiers(samples),
    )


def _columns(samples: _Samples, label: str, *names: str) -> dict[str, Any]:
    """Return the value of ``label`` -> the totals of the counters ``names``."""
    columns = [samples.by(f"kvpagoda_{name}_total", label) for name in names]
    return {key: tuple(int(column.get((key,), 0)) for column in columns) for (key,) in sorted(columns[0])}


def _tiers(samples: _Samples) -> tuple[TierFigures, ...]:
    keys = ("level", "tier", "call")
    records = samples.by("kvpagoda_tier_outcomes_total", *keys, "outcome")
    moved = samples.by("kvpagoda_tier_moved_bytes_total", *keys)
    available, made = samples.by("kvpagoda_tier_available", "level", "tier", of=min), list[TierFigures]()
    for level, tier, call in sorted(moved):
        mine = {outcome: int(n) for (*key, outcome), n in records.items() if key == [level, tier, call]}
        seconds = samples.histogram("kvpagoda_tier_call_seconds", dict(zip(keys, (level, tier, call))))
        made.append(
            TierFigures(
                int(level), tier, call, bool(available.get((level, tier), 0)), sum(mine.values()), mine.get("ok", 0),
                int(moved[level, tier, call]), seconds.quantile(0.5), seconds.quantile(0.99),
            )
        )  # fmt: skip
    return tuple(made)


class TopWatch:
    """The figures at one source, look by look. ``figures``: the last ones that could be read; ``rates``: the tokens per second
    that were saved and computed between the last two; ``error``: why the last look failed; each None if there is none."""

    def __init__(self, source: str, vllm: str) -> None:
        self.source, self._vllm = source, vllm
        self.figures: Figures | None = None
        self.rates: tuple[float, float] | None = None
        self.error: Exception | None = None
        self._then = 0.0

    def look(self) -> None:
        """Read the source again."""
        try:
            figures, now = read(self.source, self._vllm), monotonic()
        except (KVPagodaError, OSError) as error:
            self.error = error
            return
        before, self.rates = self.figures, None
        if before is not None and figures.computed_tokens >= before.computed_tokens:
            seconds = max(1e-3, now - self._then)
            saved = figures.cached_tokens - before.cached_tokens
            self.rates = saved / seconds, (figures.computed_tokens - before.computed_tokens) / seconds
        self.figures, self._then, self.error = figures, now, None

    def to_dict(self) -> dict[str, Any]:
        """Return the source, its figures, and why they could not be read now, as plain data."""
        figures = None if self.figures is None else self.figures.to_dict()
        return {"source": self.source, "error": None if self.error is None else str(self.error), "figures": figures}


def run(sources: Sequence[str], every: float, *, once: bool, as_json: bool, vllm: str = VLLM) -> None:
    """Show the figures at ``sources`` every ``every`` seconds until Ctrl-C, or ``once``. With ``as_json`` print a line
    of JSON each time instead. A source that cannot be read is tried again. Raises BadInput, OSError if at first none can be
    read."""
    if not 0.1 <= every < 3600:
        text = f"--every must be at least 0.1 and less than 3600 seconds, got {every}"
        raise BadInput(text, needed=every, available=0.1)
    watches = [TopWatch(source, vllm) for source in dict.fromkeys(sources)]
    _look(watches)
    if (error := watches[0].error) is not None and all(watch.figures is None for watch in watches):
        raise error
    if as_json:
        while True:
            if len(watches) > 1:
                print(json.dumps({"sources": [watch.to_dict() for watch in watches]}), flush=True)
            elif watches[0].error is None and watches[0].figures is not None:
                print(json.dumps(watches[0].figures.to_dict()), flush=True)
            if once:
                return
            sleep(every)
            _look(watches)
    out = console.output()
    if once:
        out.print(_screen(watches, out.width))
        return
    with Live(_screen(watches, out.width), console=out, screen=out.is_terminal, auto_refresh=False) as live:
        while True:
            sleep(every)
            _look(watches)
            live.update(_screen(watches, out.width), refresh=True)


def _look(watches: Sequence[TopWatch]) -> None:
    """Look at all sources at once: one that does not answer delays no other."""
    if len(watches) == 1:
        watches[0].look()
        return
    with ThreadPoolExecutor(len(watches)) as pool:
        list(pool.map(TopWatch.look, watches))


def _screen(watches: Sequence[TopWatch], width: int) -> RenderableType:
    figures = watches[0].figures
    if len(watches) > 1 or figures is None:
        return overview(watches, width)
    return view(figures, watches[0].rates, width)


def overview(watches: Sequence[TopWatch], width: int) -> RenderableType:
    """Return a table with a line for each source, one of their groups, and why sources cannot be read, in lines of at most
    ``width`` characters."""
    engines, groups = list[list[str]](), list[list[str]]()
    bar = _bar_width(width)
    for watch in watches:
        name, figures = f"{watch.source}{' (failing)' if watch.error else ''}", watch.figures
        if figures is None:
            engines.append([name, *["-"] * 7])
            continue
        tokens = [f"{figures.cached_tokens:,}", f"{figures.computed_tokens:,}"]
        if watch.rates is not None:
            tokens = [f"{rate:,.0f}/s" for rate in watch.rates]
        engines.append([
            name, f"{figures.running} of {figures.requests_max}", "-" if figures.waiting is None else f"{figures.waiting:,}",
            format_bytes(figures.nbytes), f"{figures.usage:.1%}", f"{figures.hit_rate:.1%}", *tokens,
        ])  # fmt: skip
        groups += [[watch.source, *_group_cells(group, bar)] for group in figures.groups]
    names = ["engine", "running", "waiting", "memory", "in use", "hits", "saved tokens", "computed tokens"]
    dropped = ("computed tokens", "saved tokens", "memory", "waiting")
    parts = _table(names, engines, ("engine",), width, drop=dropped)
    parts += _table(["engine", *GROUP_COLUMNS], groups, ("engine", "group", "blocks"), width, drop=DROPPED)
    parts.append(_MARKS_LEGEND)
    parts += [Text(f"{watch.source}: {watch.error}") for watch in watches if watch.error is not None]
    return Group(*parts)


def view(figures: Figures, rates: tuple[float, float] | None, width: int) -> RenderableType:
    """Return all tables, in lines of at most ``width`` characters. ``rates``: tokens saved and computed per second."""
    parts: list[RenderableType] = [Text(line) for line in _head(figures, rates)]
    bar = _bar_width(width)
    rows = [_group_cells(group, bar) for group in figures.groups]
    parts += _table(GROUP_COLUMNS, rows, ("group", "blocks"), width, drop=DROPPED)
    parts.append(_MARKS_LEGEND)
    short = [[reason, f"{n:,}", f"{tokens:,}"] for reason, (n, tokens) in figures.short_hits.items()]
    parts += _table(["hits cut short by", "requests", "tokens lost"], short, ("hits cut short by",), width)
    tiers = [
        [
            f"{tier.level} {tier.name}{'' if tier.is_available else ' (failing)'}", tier.call,
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


def _bar_width(width: int) -> int:
    return next(marks for most, marks in _BARS if width <= most)


def _group_cells(group: GroupFigures, bar: int) -> list[str]:
    """Return a row under ``GROUP_COLUMNS``. ``bar``: marks of its bar."""
    total = sum(group.blocks.values())
    held = group.blocks["private"] + group.blocks["shared"]
    counts = [f"{group.blocks[state]:,}" for state in STATES]
    return [group.name, f"{held / max(1, total):.0%}", _bar(group.blocks, bar), *counts, f"{group.evicted:,}"]


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
