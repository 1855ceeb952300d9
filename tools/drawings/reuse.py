"""A plot of the memory that a trace's reuse needs, from ``benchmarks/results/memory_for_reuse.json``."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

from tools.drawings.plots import note, result
from tools.drawings.svg import MARGIN, WIDTH, Picture

LINES = (
    ("Llama-3-8B", "main", False),
    ("Gemma-3-27B", "warm", False),
    ("gpt-oss-120b", "ink", False),
    ("Qwen3-Next-80B", "main", True),
    ("DeepSeek-V4 Flash", "warm", True),
)
"""Model, colour of its line, whether the line is dashed."""
LEFT, TOP, HEIGHT = 40, 12, 190


def memory_for_reuse() -> Picture:
    """Draw which share of the agentic trace's reuse is found in how much memory, with the layers of five models."""
    picture = Picture("The share of the agentic trace's reuse that is found, by memory, with the layers of five models")
    rows = [row for row in result("memory_for_reuse")["rows"] if "share_percent" in row]
    least, most = (choose(log2(row["gib"]) for row in rows) for choose in (min, max))
    for number, (model, colour, dashed) in enumerate(LINES):
        x, y = MARGIN + 130 * (number % 3), picture.y + 14 * (number // 3) + 9
        picture.line(((x, y - 4), (x + 18, y - 4)), colour, dashed=dashed)
        picture.text(x + 22, y, model, size=10)
    top = picture.y + 28 + TOP

    def at(gib: float, share: float) -> tuple[float, float]:
        wide = WIDTH - LEFT - 3 * MARGIN
        return LEFT + wide * (log2(gib) - least) / (most - least), top + HEIGHT * (1 - share / 100)

    for share in (0, 50, 90, 100):
        (left, y), right = at(2**least, share), at(2**most, share)[0]
        picture.line(((left, y), (right, y)), "line", dashed=share == 90)
        picture.text(LEFT - 4, y + 3.5, f"{share} %", "faint", 9.5, "end")
    for power in range(int(least) + 1, int(most) + 1, 2):
        x, y = at(2**power, 0)
        picture.line(((x, y), (x, y + 3)), "line")
        name = f"{2**power} GiB" if power < 10 else f"{2 ** (power - 10)} TiB"
        picture.text(x, y + 13, name, "faint", 9.5, "middle")
    for model, colour, dashed in LINES:
        points = sorted((row["gib"], row["share_percent"]) for row in rows if row["model"] == model)
        picture.line((at(*point) for point in points), colour, dashed=dashed)
    picture.y = top + HEIGHT + 22
    text = (
        "Share of what unlimited memory finds cached, in 710 conversations of coding agents. "
        "Measured with a 20th of the conversations in a 20th of the memory, one request at a time."
    )
    note(picture, "memory_for_reuse", text)
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {"memory_for_reuse": memory_for_reuse}
