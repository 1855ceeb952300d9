"""CONTRIBUTING.md is up to date: it lists the rooms of the source tree, and its drawing is made from the code."""

import importlib.util
import re
from pathlib import Path

import pytest

from sources import SRC
from test_layering import LEVELS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_drawing_is_the_path_of_a_run() -> None:
    spec = importlib.util.spec_from_file_location("request_path", ROOT / "tools" / "request_path.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = re.search(r"```text drawing\n(.*?)\n```", TEXT, re.S)
    assert drawn is not None and drawn.group(1) == module.drawing(), "run python tools/request_path.py"


def test_the_rooms_are_those_of_the_tree_in_their_order() -> None:
    named = [name.rstrip("/").replace("/", ".") for name in re.findall(r"^\| `([\w/]+)", TEXT, re.M)]
    assert named == LEVELS
    there = {path.stem for path in SRC.iterdir() if path.is_dir() or path.suffix == ".py"}
    there |= {f"core.{path.stem}" for path in (SRC / "core").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert {*LEVELS} == there - {"__init__", "core.__init__", "__pycache__", "core.__pycache__", "core"}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+\.(?:py|json))`", TEXT))))
def test_files_that_are_named_exist(path: str) -> None:
    assert (SRC / path).exists() or (ROOT / path).exists(), path
