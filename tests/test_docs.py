"""The documents: programs print the output that is shown, figures match benchmark results, and links lead to files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kvpagoda

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
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
    if "from vllm import" in code:
        pytest.skip("tests/adapters/test_vllm_page.py runs it, where vLLM and a model are")
    if "disk_tier" in code or "TierSpec" in code:
        pytest.importorskip("xxhash")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "document", "exec"), {"__name__": "__main__"})
    assert out.getvalue() == expected


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 30


# ---- figures ----

FIGURES: list[dict[str, str]] = json.loads((ROOT / "docs" / "figures.json").read_text())
"""Each ``figure`` stands on a ``page``, in the paragraph or table that begins with ``text``, and is the value at ``path``: a
file of ``benchmarks/results`` and a place in it."""

RESULTS = "docs/speed.md"


def value_of(file: str, path: str) -> float:
    """Return the value at ``path`` in the file of results: ``rows[a=b;c=d].field``, or ``min .field`` or ``max .field`` of
    all rows, or ``sum rows[a=b].field`` of those whose a begins with b. A factor may follow, such as in ``rows[a=b].field *
    0.001``."""
    path, _, factor = path.partition(" * ")
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / file).read_text())["rows"]
    if path[:4] in ("min ", "max "):
        pick = min if path.startswith("min") else max
        return pick(float(row[path[5:]]) for row in rows) * float(factor or 1)
    conditions, field = re.fullmatch(r"(?:sum )?rows\[(.*)\]\.(.+)", path).groups()  # type: ignore[union-attr]
    wanted = dict(condition.split("=") for condition in conditions.split(";"))
    if path.startswith("sum "):
        some = [row for row in rows if all(str(row[key]).startswith(value) for key, value in wanted.items())]
        assert some, f"no row has {conditions}"
        return sum(float(row[field]) for row in some)
    (row,) = [row for row in rows if all(str(row[key]) == value for key, value in wanted.items())]
    return float(row[field]) * float(factor or 1)


@pytest.mark.parametrize("pin", [pytest.param(pin, id=f"{pin['page']}-{pin['path']}") for pin in FIGURES])
def test_figures_are_those_of_the_benchmarks(pin: dict[str, str]) -> None:
    figure = pin["figure"]
    blocks = [block.strip() for block in (ROOT / pin["page"]).read_text().split("\n\n")]
    named = [block for block in blocks if block.startswith(pin["text"])]
    assert any(re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", block) for block in named), named
    value = value_of(*pin["path"].split(" ", 1))
    shown = float(figure.replace(",", ""))
    digits = len(figure.partition(".")[2])
    assert abs(abs(value) - shown) <= 0.5000001 * 10.0**-digits, f"{pin['path']} is {value}"


def test_results_stand_in_the_readme_and_on_one_page() -> None:
    """Other pages say what a result means, and link to it."""
    assert len(FIGURES) >= 180 and all(pin["text"] for pin in FIGURES)
    assert {pin["page"] for pin in FIGURES} == {"README.md", RESULTS}
    assert {name for name in PAGES if "benchmarks/results" in (ROOT / name).read_text()} == {RESULTS}


# ---- pages ----


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w/-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {name.removeprefix("docs/") for name in PAGES} <= set(listed)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_lead_to_files(name: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / name).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://", "#")):
            assert ((ROOT / name).parent / target.partition("#")[0]).exists(), f"{name} links to {target}"


REFERENCE = "\n".join((ROOT / name).read_text() for name in PAGES if name.startswith("docs/api/"))
SRC = Path(kvpagoda.__file__).parent
MODULES = (
    "abc", "arrays", "free_list", "id_tensors", "kernels", "memory.virtual", "namespace", "pages", "pools", "prefix", "probe",
    "scheduling",
)  # fmt: skip
ROOMS = sorted((*(path.parent.name for path in SRC.glob("*/__init__.py")), *MODULES))


IN_VLLM = "kvpagoda.adapters.vllm."


def object_at(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("room", ["", *ROOMS, "adapters.vllm"])
def test_every_public_name_is_in_the_reference(room: str) -> None:
    """The names of each ``__all__``: classes and functions have an entry, which names the object itself; of values the page
    says what they are."""
    module = import_module(f"kvpagoda.{room}" if room else "kvpagoda")
    entries = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)
    assert len(entries) == len({*entries})
    missing = []
    for name in getattr(module, "__all__", ()):
        is_vllms = room == "adapters.vllm"  # its names derive from vLLM's classes, which need not be installed
        paths = [path for path in entries if path.endswith(f".{name}") and path.startswith(IN_VLLM) == is_vllms]
        if not is_vllms:
            value = getattr(module, name)
            paths = [path for path in paths if object_at(path) is value]
        if not paths and f"`{name}`" not in REFERENCE:
            missing.append(name)
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
    page = (tmp_path / "site" / "api" / "cache" / "index.html").read_text()
    sidebar = page[page.index("md-sidebar--primary") : page.index("md-content")]
    assert all(f'href="#kvpagoda.core.kv_cache.KVCache.{name}"' in sidebar for name in ("open", "lookup", "step_limit"))
    assert 'href="../../ownership/"' in page[page.index("md-content") :]
    tour = (tmp_path / "site" / "tour" / "index.html").read_text()
    assert tour.count('<svg aria-label="') >= 2 and '[data-md-color-scheme="slate"] .drawing{' in tour
    notebook = (tmp_path / "site" / "own_trace" / "index.html").read_text()
    assert "data:image/png;base64," in notebook and "of the blocks can hit" in notebook


def test_the_notebook_prints_what_it_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order, in an empty folder. There is no user's trace, so it uses the synthetic workload."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "own_trace.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), "own_trace.ipynb", "exec"), names)
        stored = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        assert out.getvalue() == stored and cell["execution_count"] == number, "store its outputs: CONTRIBUTING"
    assert names["rates"]["lru"][-1] >= names["rates"]["lru"][0] > 0
    plots = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(plots) == 1


def test_the_notebook_is_a_page_with_its_outputs() -> None:
    sys.path.insert(0, str(ROOT))
    from tools.site_pages import page_of

    cells = [
        dict(cell_type="markdown", source=["# A title\n", "text"]),
        dict(cell_type="code", source=["print(1)\n", "print(2)"], outputs=[dict(text=["1\n"]), dict(text=["2\n"])]),
        dict(
            cell_type="code",
            source=["plot()"],
            outputs=[dict(data={"image/png": "aGE=\n", "text/plain": ["<Figure>"]})],
        ),
    ]
    page = page_of(dict(cells=cells), "one.ipynb")
    assert page.startswith("# A title\ntext\n\n") and "[one.ipynb](one.ipynb)" in page
    assert page.endswith(
        "```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n2\n```\n\n```python\nplot()\n```\n\n"
        "![The plot that this program draws](data:image/png;base64,aGE=)\n"
    )
