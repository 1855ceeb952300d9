"""A figure with two plots of a replay: hit rate against capacity, and the distribution of reuse distances."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.replay.reuse import Reuse, lru_hits, reuse_histogram
from kvpagoda.replay.simulate import BOUND, ReplayResult
from kvpagoda.replay.trace import Trace


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
    _hit_rates(left, trace, reuse, results)
    _distances(right, trace, reuse)
    figure.savefig(path, dpi=150)


def _hit_rates(axes: Any, trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> None:
    capacities = [result.capacity_blocks for result in results]
    low, high = max(1, min(capacities) * 0.7), max(trace.num_distinct, *capacities)
    every = np.unique(np.geomspace(low, high, 300).astype(np.int64))
    rates = np.array(lru_hits(reuse, every.tolist())) * 100 / trace.num_refs
    axes.plot(every, rates, color="0.75", linewidth=5, label="lru, every capacity", zorder=1)
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        mine = sorted((r.capacity_blocks, r.hit_rate * 100) for r in results if r.policy == policy)
        style = dict(color=f"C{number % 10}", marker="osD^vPX*"[number % 8], label=policy)
        if policy == "lru":  # its line is drawn already, at every capacity
            style |= dict(linestyle="none")
        if policy == BOUND:
            style |= dict(linestyle="--", color="black", label="opt (bound)")
        axes.plot(*zip(*mine), markersize=6, markerfacecolor="none", linewidth=1.4, **style)
    axes.axhline(rates[-1], color="0.5", linewidth=0.8, linestyle=":")
    axes.annotate(f"all reuse {rates[-1]:.1f} %", (low, rates[-1]), (2, 3), textcoords="offset points", color="0.35")
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="hit rate, % of block references", xlim=(low, high * 1.1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if high < 10 * low else "")
    axes.set_ylim(0, max(rates[-1] * 1.12, 1))
    axes.set_title("Hit rate against capacity", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _distances(axes: Any, trace: Trace, reuse: Reuse) -> None:
    rows = reuse_histogram(reuse)
    share = 100 / max(1, trace.num_refs)
    bars = [count * share for _, _, count in rows]
    axes.bar(range(len(rows)), bars, width=0.9, color="C0", zorder=2)
    total = np.cumsum(bars)
    axes.plot(range(len(rows)), total, color="black", marker=".", linewidth=1, label="cumulative", zorder=3)
    step = 1 if len(rows) < 8 else 2
    axes.set_xticks(range(0, len(rows), step), [_short(low) for low, _, _ in rows[::step]])
    axes.set(xlabel="different blocks used since, at least", ylabel="% of block references")
    first = 100 - (total[-1] if len(total) else 0)
    axes.set_title(f"Reuse distance ({first:.1f} % are first uses)", fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    if rows:
        axes.legend(frameon=False, fontsize=9, loc="upper left")


def _short(n: int) -> str:
    return str(n) if n < 1024 else f"{n // 1024}Ki" if n < 2**20 else f"{n // 2**20}Mi"
