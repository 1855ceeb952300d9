"""The logo: a pagoda of stacked blocks, in white for the head of the site and in blue for a tab of a browser."""

from __future__ import annotations

BLUE = "#2866a8"
TIERS = ((1, 2, 14), (2, 3, 20), (3, 4, 26))
"""From the top: number of the tier, blocks in it, width of its roof."""


def logo(colour: str) -> str:
    """Return the logo in ``colour`` as an SVG file."""
    shapes = ["M15 1h2v5h-2z"]
    for number, blocks, roof in TIERS:
        y = 6 + (number - 1) * 8.5
        shapes.append(f"M{16 - roof / 2 + 2:g} {y:g}h{roof - 4}l2 3h{-roof}z")
        shapes += [f"M{16 - blocks * 2.25 + at * 4.5 + 0.25:g} {y + 4:g}h4v3.5h-4z" for at in range(blocks)]
    path = "".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><title>kvpagoda</title>'
        f'<path fill="{colour}" d="{path}"/></svg>\n'
    )
