"""Writes the results of replays as one page of HTML that needs no network: plotly's script is in it. Needs plotly (extra
``report``).

A section of the page has a figure for each choice, such as each capacity. A figure is data and a layout as plotly takes
them; ``page.html`` draws them, with colours for light and dark, as wide as the window.

``new_figure`` and ``draw`` are for the plot of --plot, which needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.replay.offline.bound import HitBound
from kvpagoda.replay.reuse import Reuse, lru_hits, reuse_histogram
from kvpagoda.replay.run import BOUND, ReplayResult
from kvpagoda.replay.serving import ServeResult
from kvpagoda.replay.timeline import lost_tokens
from kvpagoda.replay.trace import Floats, Ints, Trace
from kvpagoda.text import short_number

Lines = dict[str, Any]
"""Data of a figure for plotly: one series."""
Served = ServeResult | HitBound
"""A result of a replay with a model's layers."""
BINS = 60
"""Points of a line over time."""
_CAPACITIES = 200  # of the line of lru


@dataclass(frozen=True)
class PageSection:
    """A part of the page. ``figures``: choice -> (series, layout). ``choices``: what is chosen, if there are several; the
    one in the middle is shown first."""

    name: str
    text: str
    choices: str = ""
    figures: dict[str, tuple[list[Lines], dict[str, Any]]] = field(default_factory=dict)


class ReportPage:
    """A page to be written to ``path``. Raises MissingExtra without plotly, BadInput if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        with MissingExtra.unless("plotly", "a report needs plotly; pip install 'kvpagoda[report]'"):
            from plotly.offline import get_plotlyjs
        try:
            path.open("a").close()
        except OSError as error:
            raise BadInput(f"cannot write a report to {str(path)!r}: {error.strerror}", needed=path) from None
        self._path, self._script = path, get_plotlyjs

    def write(self, title: str, lines: Sequence[str], sections: Sequence[PageSection]) -> None:
        """Write the page. ``lines``: text below the title."""
        told = {"title": title, "lines": list(lines), "sections": [asdict(section) for section in sections]}
        data = json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")  # no text can end the script
        text = (files(__package__) / "page.html").read_text()
        self._path.write_text(text.replace("/*data*/", data).replace("/*plotly*/", self._script()))


# -- replays through the tree -------------------------------------------------------------------------------------------


def tree_sections(trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> list[PageSection]:
    """Return the sections for replays through the tree: ``results`` at every capacity, for every policy."""
    over_time, lost = (
        PageSection("Hit rate over time", OVER_TIME, "capacity"),
        PageSection("Where tokens were lost", LOST_TREE, "capacity"),
    )
    sizes, (x, bins, axis) = np.diff(trace.starts), _times(trace)
    for capacity in dict.fromkeys(result.capacity_blocks for result in results):
        mine = [result for result in results if result.capacity_blocks == capacity]
        choice = f"{capacity:,} blocks"
        rates = {_shown(result.policy): _rates(bins, len(x), result.hits, sizes) for result in mine}
        over_time.figures[choice] = _over(x, axis, rates, "block references")
        parts = [lost_tokens(trace, reuse, result.hits) for result in mine]
        causes = {
            name: [int(part[number].sum()) for part in parts]
            for number, name in enumerate(("hit", "evicted before", "first seen"))
        }
        lost.figures[choice] = _stacked([_shown(result.policy) for result in mine], causes)
    return [_over_capacity(trace, reuse, results), over_time, _distances(trace, reuse), lost]


def _shown(policy: str) -> str:
    return f"{policy} (bound)" if policy == BOUND else policy


def _over_capacity(trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> PageSection:
    capacities = [result.capacity_blocks for result in results]
    every = np.unique(
        np.geomspace(max(1, min(capacities) * 0.7), max(trace.num_distinct, *capacities), _CAPACITIES, dtype=int)
    )
    rates = np.array(lru_hits(reuse, every.tolist())) * 100 / trace.num_refs
    series = []
    for policy in dict.fromkeys(result.policy for result in results):
        mine = sorted((result.capacity_blocks, result.hit_rate * 100) for result in results if result.policy == policy)
        series.append(_line(_shown(policy), *zip(*mine), mode="lines+markers"))
    wide = {"width": 5, "color": "#9aa3b2"}
    series.append(_line("lru, every capacity", every, rates, mode="lines", line=wide, opacity=0.4))
    axis = {"type": "log", "title": "capacity, blocks", "dtick": "D2", "tickformat": ",", "hoverformat": ","}
    layout = {"xaxis": axis, "yaxis": {"title": "hit rate, %", "rangemode": "tozero", "hoverformat": ".2f"}}
    text = f"Of all block references {reuse.num_reuses / trace.num_refs:.1%} can hit. {OVER_CAPACITY}"
    return PageSection("Hit rate over capacity", text, figures={"": (series, layout)})


# -- replays with a model's layers --------------------------------------------------------------------------------------


def schema_sections(
    trace: Trace, reuse: Reuse, jobs: Sequence[tuple[str, str, int]], results: Sequence[Served]
) -> list[PageSection]:
    """Return the sections for replays with a model's layers. ``jobs``: (budget, policy, checkpoint interval) of each of
    ``results``. A bound serves no requests: it is in the first section alone."""
    over_time, lost = (
        PageSection("Hit rate over time", OVER_REQUESTS, "memory"),
        PageSection("Where tokens were lost", LOST_SCHEMA, "memory"),
    )
    groups = PageSection("What each group had", GROUPS, "memory")
    names = [_shown(policy) if not every else f"{_shown(policy)}, every {every}" for _, policy, every in jobs]
    served = [(job[0], name, one) for job, name, one in zip(jobs, names, results) if isinstance(one, ServeResult)]
    over_budget: dict[str, list[tuple[float, float]]] = {}
    for name, result in zip(names, results):
        over_budget.setdefault(name, []).append((result.nbytes / 2**30, result.hit_rate * 100))
    series = [_line(name, *zip(*sorted(mine)), mode="lines+markers") for name, mine in over_budget.items()]
    sizes = sorted({round(result.nbytes / 2**30, 3) for result in results})
    axis = {"type": "log" if len(sizes) > 1 else "-", "title": "memory of the cache, GiB", "tickvals": sizes}
    layout = {"xaxis": axis, "yaxis": {"title": "hit rate, %", "rangemode": "tozero", "hoverformat": ".2f"}}
    sections = [PageSection("Hit rate over memory", OVER_BUDGET, figures={"": (series, layout)})]
    seen = trace.tokens_of(reuse.seen)
    for budget in dict.fromkeys(budget for budget, _, _ in served):
        mine = {name: one for size, name, one in served if size == budget}
        x, bins = _numbered(len(trace))
        rates = {name: _rates(bins, len(x), one.each[:, 2], one.each[:, 0]) for name, one in mine.items()}
        over_time.figures[budget] = _over(x, {"title": "requests", "tickformat": ","}, rates, "prompt tokens")
        lost.figures[budget] = _stacked([*mine], _causes(seen, [*mine.values()]))
        kinds = [*next(iter(mine.values())).groups]
        series = [
            {
                "type": "bar", "name": name, "x": kinds, "y": [_share(one.groups[kind]["tokens"], one) for kind in kinds],
                "customdata": [one.groups[kind]["evicted"] for kind in kinds],
                "hovertemplate": "%{y:.2f} % of prompt tokens<br>%{customdata:,} blocks evicted",
            }
            for name, one in mine.items()
        ]  # fmt: skip
        groups.figures[budget] = (series, {"yaxis": {"title": "% of prompt tokens"}, "barmode": "group"})
    distances = [_distances(trace, reuse)] if trace.num_refs else []
    return [*sections, *(one for one in (over_time, *distances, lost, groups) if one.figures)]


def _share(tokens: int, result: ServeResult) -> float:
    return 100 * tokens / max(1, result.prompt_tokens)


def _causes(seen: Ints, results: Sequence[ServeResult]) -> dict[str, list[int]]:
    """Return, for each cause, the tokens that each result lost by it. ``seen``: tokens of each request that an earlier
    one had."""
    causes: dict[str, list[int]] = {"hit": [result.cached_tokens for result in results]}
    for reason in sorted({reason for result in results for reason in result.short_tokens}):
        causes[f"limited by {reason}"] = [result.short_tokens.get(reason, 0) for result in results]
    known = [np.minimum(np.maximum(seen, one.each[:, 1]), one.each[:, 0]) for one in results]
    causes["evicted before, or not yet cached"] = [int((k - one.each[:, 1]).sum()) for k, one in zip(known, results)]
    causes["first seen"] = [int((one.each[:, 0] - k).sum()) for k, one in zip(known, results)]
    return causes


# -- figures of both ----------------------------------------------------------------------------------------------------


def _line(name: str, x: Any, y: Any, **more: Any) -> Lines:
    """Return a line through the points; NaN is a gap."""
    ys = [None if np.isnan(value) else round(float(value), 4) for value in y]
    dashed = {"line": {"dash": "dash"}} if name.startswith(_shown(BOUND)) else {}
    return {"type": "scatter", "name": name, "x": np.asarray(x).tolist(), "y": ys, **dashed, **more}


def _times(trace: Trace) -> tuple[Floats, Ints, dict[str, Any]]:
    """Return the points of time at which a line has values, the point of each request, and the axis: the time since the
    first arrival, or the number of requests if all arrive together."""
    since = trace.arrivals - trace.arrivals.min(initial=np.inf)
    last = float(since.max(initial=0.0))
    if not last:
        return *_numbered(len(trace)), {"title": "requests", "tickformat": ","}
    unit, name = next(
        unit for unit in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")) if last >= 2 * unit[0] or unit[0] == 1
    )
    bins = np.minimum((since / last * BINS).astype(np.int64), BINS - 1)
    return (
        (np.arange(BINS) + 0.5) * last / BINS / unit,
        bins,
        {"title": f"{name} since the first arrival", "hoverformat": ".2~f"},
    )


def _numbered(count: int) -> tuple[Floats, Ints]:
    num_bins = max(1, min(BINS, count))
    return (np.arange(num_bins) + 0.5) * count / num_bins, np.arange(count) * num_bins // max(1, count)


def _rates(bins: Ints, num_bins: int, hits: Ints, asked: Ints) -> Floats:
    """Return the share that hit of what the requests of each bin asked for, in %; NaN without any."""
    sums = [np.bincount(bins, counts, num_bins) for counts in (hits, asked)]
    rates: Floats = np.divide(100 * sums[0], sums[1], out=np.full(num_bins, np.nan), where=sums[1] > 0)
    return rates


def _over(x: Floats, axis: dict[str, Any], rates: dict[str, Floats], unit: str) -> tuple[list[Lines], dict[str, Any]]:
    series = [_line(name, np.round(x, 4), rate, mode="lines", connectgaps=True) for name, rate in rates.items()]
    return series, {
        "xaxis": axis, "yaxis": {"title": f"hit rate, % of {unit}", "rangemode": "tozero", "hoverformat": ".2f"},
        "hovermode": "x unified",
    }  # fmt: skip


def _stacked(names: list[str], causes: dict[str, list[int]]) -> tuple[list[Lines], dict[str, Any]]:
    """Return one bar for each of ``names``, made of the share of each cause in all tokens."""
    totals = [max(1, sum(tokens)) for tokens in zip(*causes.values())]
    series = [
        {
            "type": "bar", "orientation": "h", "name": cause, "y": names, "customdata": tokens,
            "x": [round(100 * one / total, 4) for one, total in zip(tokens, totals)],
            "hovertemplate": f"{cause}: %{{x:.2f}} %<br>%{{customdata:,}} tokens<extra>%{{y}}</extra>",
        }
        for cause, tokens in causes.items()
    ]  # fmt: skip
    return series, {
        "barmode": "stack", "xaxis": {"title": "% of tokens", "range": [0, 100]}, "yaxis": {"autorange": "reversed"},
        "hovermode": "closest",
    }  # fmt: skip


def _distances(trace: Trace, reuse: Reuse) -> PageSection:
    rows = reuse_histogram(reuse)
    counts = np.array([count for _, _, count in rows], np.int64)
    shares, names = counts * 100 / max(1, trace.num_refs), [short_number(low) for low, _, _ in rows]
    spans = [f"{low:,} to {high - 1:,} blocks" for low, high, _ in rows]
    series: list[Lines] = [
        {
            "type": "bar", "name": "references", "x": names, "y": shares.round(4).tolist(), "customdata": spans,
            "hovertemplate": "%{customdata}: %{y:.2f} %<extra></extra>",
        },
        {
            **_line("up to here", names, np.cumsum(shares), mode="lines+markers"),
            "hovertemplate": "up to here: %{y:.2f} %<extra></extra>",
        },
    ]  # fmt: skip
    layout = {
        "xaxis": {"type": "category", "title": "different blocks used since, at least"},
        "yaxis": {"title": "% of block references"},
    }  # fmt: skip
    return PageSection("Reuse distances", DISTANCES, figures={"": (series, layout)})


OVER_CAPACITY = "opt knows the future: no policy hits more. The wide line is lru at every capacity."
OVER_TIME = (
    "The warm-up included. A rate that still rises at the end belongs to a trace that is too short for this capacity."
)
OVER_REQUESTS = "In the order in which requests are served; the times of the trace are not used."
OVER_BUDGET = "The share of the prompt tokens that were not computed."
DISTANCES = (
    "How many different blocks were used since the last use of a block. A cache of so many blocks with lru keeps it."
)
LOST_TREE = (
    "First seen: no earlier request named the block, so no cache can hit it. Evicted before: an earlier request did, and a "
    "larger cache, or another policy, would hit it. The warm-up included."
)
LOST_SCHEMA = (
    "First seen: no earlier request had these tokens. Limited by: they were in the tree and had to be computed, since blocks "
    "of a window or a checkpoint were gone, a block was not whole (alignment), or there was no room for a copy (memory)."
)
GROUPS = (
    "Prompt tokens after which a group alone has what it needs to go on. The group with the least decides: what the others "
    "had beyond it was of no use."
)


LEAST_FOR_LINE = 5
"""With fewer capacities a plot has markers alone: a straight line between two that are far apart runs above any curve."""


def new_figure(path: Path) -> Any:
    """Return an empty figure that can be saved at ``path``. Raises BadInput if it could not be saved, before any work
    is done."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("a plot needs the plot extra: pip install 'kvpagoda[plot]'") from None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    known = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix.lower().lstrip(".") not in known:
        raise BadInput(f"cannot plot into {str(path)!r}: its suffix must be one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise BadInput(f"cannot plot into {str(path)!r}: there is no folder {str(path.parent)!r}")
    return figure


def draw(figure: Any, path: Path, trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> None:
    """Draw the results on a figure of ``new_figure`` and save it at ``path``. Raises OSError if it cannot be
    written."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(
        f"{Path(trace.name).name}: {len(trace):,} requests, {trace.num_refs:,} block references, "
        f"{trace.num_distinct:,} different blocks",
        fontsize=11,
    )
    _plot_rates(left, trace, reuse, results)
    _plot_distances(right, trace, reuse)
    figure.savefig(path, dpi=150)


def _plot_rates(axes: Any, trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> None:
    capacities = [result.capacity_blocks for result in results]
    low, high = max(1, min(capacities) * 0.7), max(trace.num_distinct, *capacities)
    every = np.unique(np.geomspace(low, high, 300).astype(np.int64))
    rates = np.array(lru_hits(reuse, every.tolist())) * 100 / trace.num_refs
    axes.plot(every, rates, color="0.75", linewidth=5, label="lru, every capacity", zorder=1)
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        mine = sorted((r.capacity_blocks, r.hit_rate * 100) for r in results if r.policy == policy)
        style = dict(color=f"C{number % 10}", marker="osD^vPX*"[number % 8], label=policy)
        if policy == BOUND:
            style |= dict(linestyle="--", color="black", label="opt (bound)")
        if policy == "lru" or len(mine) < LEAST_FOR_LINE:  # the line of lru is drawn already, at every capacity
            style |= dict(linestyle="none")
        axes.plot(*zip(*mine), markersize=6, markerfacecolor="none", linewidth=1.4, **style)
    axes.axhline(rates[-1], color="0.5", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"with unlimited memory {rates[-1]:.1f} %", (low, rates[-1]), (2, 3), textcoords="offset points", color="0.35"
    )
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="hit rate, % of block references", xlim=(low, high * 1.1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if high < 10 * low else "")
    axes.set_ylim(0, max(rates[-1] * 1.12, 1))
    axes.set_title("Hit rate against capacity", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _plot_distances(axes: Any, trace: Trace, reuse: Reuse) -> None:
    rows = reuse_histogram(reuse)
    share = 100 / max(1, trace.num_refs)
    bars = [count * share for _, _, count in rows]
    axes.bar(range(len(rows)), bars, width=0.9, color="C0", zorder=2, label="at this distance")
    total = np.cumsum(bars)
    axes.plot(range(len(rows)), total, color="black", marker=".", linewidth=1, label="up to here", zorder=3)
    step = 1 if len(rows) < 8 else 2
    axes.set_xticks(range(0, len(rows), step), [short_number(low) for low, _, _ in rows[::step]])
    axes.set(xlabel="different blocks used since, at least", ylabel="% of block references")
    first = 100 - (total[-1] if len(total) else 0)
    axes.set_title(f"Reuse distance ({first:.1f} % are first uses)", fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    if rows:
        axes.legend(frameon=False, fontsize=9, loc="upper left")
