"""The pictures of the documents: they are those of the present code and results, well-formed, legible and in use."""

from __future__ import annotations

import functools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.drawings import plots, rooms  # noqa: E402
from tools.drawings.every import DRAWINGS, files  # noqa: E402
from tools.drawings.svg import COLOURS, Picture  # noqa: E402

from test_layering import LEVELS  # noqa: E402

ASSETS = ROOT / "docs" / "assets"
drawn = functools.cache(files)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", [*(f"{name}.svg" for name in DRAWINGS), "logo.svg", "favicon.svg"])
def test_the_file_is_what_is_drawn_now(name: str) -> None:
    assert (ASSETS / name).read_text() == drawn()[name], "run python -m tools.drawings"


def test_no_other_picture_lies_there() -> None:
    assert {path.name for path in ASSETS.glob("*.svg")} == set(drawn())


@pytest.mark.parametrize("name", list(DRAWINGS))
def test_a_picture_is_one_file_that_any_viewer_shows(name: str) -> None:
    """Well-formed, with a title; no scripts, foreign objects, or files of others; both colour schemes."""
    root = ET.fromstring(drawn()[f"{name}.svg"])
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "style", "rect", "text", "polyline", "circle"}
    assert root.find("{*}title").text and root.get("viewBox")  # type: ignore[union-attr]
    assert not re.search(r"href|url\(|@import|<script", drawn()[f"{name}.svg"])
    assert "prefers-color-scheme: dark" in drawn()[f"{name}.svg"]


@pytest.mark.parametrize("name", list(DRAWINGS))
def test_a_page_shows_it_and_says_what_it_shows(name: str) -> None:
    shown = [
        alt for page in PAGES for alt in re.findall(rf"!\[([^\]]*)\]\([\w/]*assets/{name}\.svg\)", page.read_text())
    ]
    assert shown and all(len(alt) > 20 for alt in shown)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_what_is_below_it(scheme: int) -> None:
    """A contrast of 4.5, as WCAG asks of small text."""
    for ink, below in (
        ("ink", "paper"), ("faint", "paper"), ("warm", "paper"), ("ink", "pale"), ("on", "main"), ("on", "warm"),
    ):  # fmt: skip
        light, dark = sorted((luminance(COLOURS[name][scheme]) for name in (ink, below)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{ink} on {below}"


def test_text_that_leaves_the_picture_is_an_error() -> None:
    picture = Picture("a test")
    picture.text(300, 20, "short")
    with pytest.raises(AssertionError, match="leaves the picture"):
        picture.text(300, 20, "a text that is much too long")


def test_rooms_are_drawn_above_what_they_import() -> None:
    graph = rooms.imports()
    level = rooms.levels(graph)
    assert {*level} == {*LEVELS} - {"__main__"}
    assert all(level[room] > level[below] for room in graph for below in graph[room] if below in graph)
    assert level["cli"] == max(level.values()) and level["errors"] == 0


def test_bars_are_as_long_as_the_figures() -> None:
    picture = Picture("a test")
    plots.bars(picture, "two", [plots.Bar("one", 1, "1", True), plots.Bar("four", 4, "4")])
    widths = [
        float(width) for width in re.findall(r'<rect class="(?:main|rest)".*? width="([\d.]+)"', picture.render())
    ]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)
    with pytest.raises(AssertionError, match="0 rows"):
        plots.value("step", "us", case="none")
