"""The documents: programs print the output that is shown, figures match benchmark results, and links lead to files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpagoda
from kvpagoda import compat

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
PROGRAMS = [
    pytest.param(code, expected, id=f"{Path(name).name}-{number}")
    for name in ("README.md", *PAGES)
    for number, (code, expected) in enumerate(BLOCK.findall((ROOT / name).read_text()))
]


@pytest.mark.parametrize(("code", "expected"), PROGRAMS)
def test_documented_programs_run(code: str, expected: str) -> None:
    if "kvpagoda.hf" in code:
        pytest.importorskip("transformers")
    if "kvpagoda.events" in code:
        pytest.importorskip("msgspec")
        pytest.importorskip("zmq")
    if "kvpagoda.metrics" in code:
        pytest.importorskip("prometheus_client")
    if 'device="cpu"' in code or "import torch" in code:
        pytest.importorskip("torch")
    if "disk_tier" in code or "TierSpec" in code:
        pytest.importorskip("xxhash")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "document", "exec"), {"__name__": "__main__"})
    assert out.getvalue() == expected


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 30


# ---- figures ----

FIGURES = re.compile(r"<!-- figures (\S+)\n(.*?)-->", re.DOTALL)
FIGURE_LINES = [
    pytest.param(name, found.start(), found[1], line, id=f"{Path(name).name}-{line}")
    for name in ("README.md", *PAGES)
    for found in FIGURES.finditer((ROOT / name).read_text())
    for line in found[2].strip().splitlines()
]


def value_of(file: str, path: str) -> float:
    """Return the value at ``path`` in the JSON file: ``rows[a=b;c=d].field``, or ``min .field`` or ``max .field`` of
    all rows. A factor may follow, such as in ``rows[a=b].field * 0.001``."""
    path, _, factor = path.partition(" * ")
    rows: list[dict[str, Any]] = json.loads((ROOT / file).read_text())["rows"]
    if path[:4] in ("min ", "max "):
        pick = min if path.startswith("min") else max
        return pick(float(row[path[5:]]) for row in rows) * float(factor or 1)
    conditions, field = re.fullmatch(r"rows\[(.*)\]\.(\w+)", path).groups()  # type: ignore[union-attr]
    wanted = dict(condition.split("=") for condition in conditions.split(";"))
    (row,) = [row for row in rows if all(str(row[key]) == value for key, value in wanted.items())]
    return float(row[field]) * float(factor or 1)


@pytest.mark.parametrize(("name", "at", "file", "line"), FIGURE_LINES)
def test_figures_are_those_of_the_benchmarks(name: str, at: int, file: str, line: str) -> None:
    """A comment ``<!-- figures FILE`` with lines ``FIGURE PATH`` follows the table or paragraph with these figures."""
    figure, path = line.split(" ", 1)
    block = FIGURES.sub("", (ROOT / name).read_text()[:at]).rstrip().split("\n\n")[-1]
    assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", block), f"{figure} is not in: {block}"
    digits = len(figure.partition(".")[2])
    value = value_of(file, path)
    assert abs(abs(value) - float(figure)) <= 0.5000001 * 10.0**-digits, f"{file} has {value}"


def test_there_are_figures() -> None:
    assert len(FIGURE_LINES) >= 30


# ---- pages ----


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {Path(name).name for name in PAGES} <= set(listed)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_lead_to_files(name: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / name).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://", "#")):
            assert ((ROOT / name).parent / target.partition("#")[0]).exists(), f"{name} links to {target}"


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [
        name
        for name in (*kvpagoda.__all__, *compat.__all__)
        if not re.search(rf"(^::: [\w.]+\.|`){name}(`|$)", page, re.MULTILINE)
    ]
    assert not missing


def test_the_documents_build_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the documents are built by mkdocs; pip install 'kvpagoda[docs]'")
    pytest.importorskip("material", reason="the theme of the documents; pip install 'kvpagoda[docs]'")
    pytest.importorskip("mkdocstrings", reason="the API page is made by mkdocstrings; pip install 'kvpagoda[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text()
    assert all(f"{name}" in page for name in ("KVCache", "step_limit", "EvictionPolicy", "RetryLater"))


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order, in an empty folder. There is no user's trace, so it uses the synthetic workload."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "own_trace.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "no outputs are kept"
            exec(compile("".join(cell["source"]), "own_trace.ipynb", "exec"), names)
    assert names["rates"]["lru"][-1] >= names["rates"]["lru"][0] > 0
