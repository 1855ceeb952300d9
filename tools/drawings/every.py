"""All pictures by the names of their files."""

from __future__ import annotations

from tools.drawings import blocks, handover, hints, hit, places, plots, reuse, rooms, sleep
from tools.drawings.logo import BLUE, logo

DRAWINGS = {
    **blocks.DRAWINGS,
    **hit.DRAWINGS,
    **places.DRAWINGS,
    **sleep.DRAWINGS,
    **hints.DRAWINGS,
    **handover.DRAWINGS,
    **rooms.DRAWINGS,
    **plots.DRAWINGS,
    **reuse.DRAWINGS,
}


def files() -> dict[str, str]:
    """Return the text of each file in ``docs/assets`` that is drawn here, by its name."""
    return {
        **{f"{name}.svg": draw().render() for name, draw in DRAWINGS.items()},
        "logo.svg": logo("#ffffff"),
        "favicon.svg": logo(BLUE),
    }
