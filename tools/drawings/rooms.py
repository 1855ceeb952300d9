"""The rooms of the source tree, drawn from the imports in its files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tools.drawings.svg import MARGIN, WIDTH, Picture

import kvpagoda

SRC = Path(kvpagoda.__file__).parent
GAP, SIZE = 6, 10
_HOME = {name: module for module, names in kvpagoda._PUBLIC.items() for name in names}


def imports() -> dict[str, set[str]]:
    """Return for each room what its files import, inside of functions too: names of other rooms, and ``torch``."""
    found: dict[str, set[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        room = _room(".".join(path.relative_to(SRC).with_suffix("").parts))
        if room in ("__init__", "__main__", "core.__init__"):
            continue
        if path == SRC / "handover" / "__init__.py":  # it loads a name from above, when that is first used
            continue
        names = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                home = _HOME if node.module == "kvpagoda" else {}
                names |= {f"{home.get(alias.name, node.module)}.{alias.name}" for alias in node.names} | {
                    str(node.module)
                }
    rooms = set(found)
    return {
        room: {_room(name.removeprefix("kvpagoda.")) for name in names if name.startswith("kvpagoda.")} & rooms - {room}
        | ({"torch"} if any(name.split(".")[0] == "torch" for name in names) else set())
        for room, names in found.items()
    }


def _room(name: str) -> str:
    """Return the room of a module without ``kvpagoda.``: its first name, in the core its first two."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "core" else parts[:1])


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the level of each room: one above the highest that it imports; 0 if it imports none."""
    level: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in level:
            level[room] = max((of(below) + 1 for below in graph[room] if below in graph), default=0)
        return level[room]

    for room in graph:
        of(room)
    return level


def _lines(row: list[str]) -> list[dict[str, int]]:
    """Return the widths of the rooms of a row, in as few lines as fit into the picture."""
    widths = {room: 7 * len(room) + 12 for room in row}
    for count in range(1, len(row) + 1):
        size = -(-len(row) // count)
        lines = [{room: widths[room] for room in row[at : at + size]} for at in range(0, len(row), size)]
        if all(sum(line.values()) + GAP * (len(line) - 1) <= WIDTH - 2 * MARGIN for line in lines):
            return lines
    raise AssertionError(f"a room of {row} is wider than the picture")


def rooms() -> Picture:
    """Draw the rooms in rows: each one in the lowest row that is above all that it imports."""
    picture = Picture("The rooms of the library in rows: a room imports only rooms in rows below its own")
    graph = imports()
    rows: defaultdict[int, list[str]] = defaultdict(list)
    for room, level in levels(graph).items():
        rows[level].append(room)
    for level in sorted(rows, reverse=True):
        for line in _lines(sorted(rows[level])):
            x = (WIDTH - sum(line.values()) - GAP * (len(line) - 1)) / 2
            for room, width in line.items():
                has_torch = "torch" in graph[room]
                picture.box(x, picture.y, width, 20, "pale" if has_torch else "main")
                picture.text(x + width / 2, picture.y + 14, room, "ink" if has_torch else "on", SIZE, "middle")
                x += width + GAP
            picture.y += 22
        picture.y += 4
    picture.y += 4
    for fill, text in (("main", "without torch"), ("pale", "some files import torch")):
        x = MARGIN if fill == "main" else 150
        picture.box(x, picture.y + 1, 12, 12, fill)
        picture.text(x + 18, picture.y + 11, text, "faint", 10)
    picture.y += 16
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {"rooms": rooms}
