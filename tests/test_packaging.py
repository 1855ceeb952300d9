"""What is built and installed: data files, extras, and that importing the library stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import kvpagoda

ROOT, PACKAGE = Path(__file__).parents[1], Path(kvpagoda.__file__).parent
tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml: Python 3.11")


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_data_file_is_shipped() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["kvpagoda"]
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith(".py") and "__pycache__" not in name]
    assert "py.typed" in data
    assert not [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)]


def test_all_brings_every_extra_that_needs_nothing_of_the_system() -> None:
    extras = project()["project"]["optional-dependencies"]
    brought, left = set(), ["all"]
    while left:
        for requirement in extras[left.pop()]:
            if requirement.startswith("kvpagoda["):
                names = requirement.removeprefix("kvpagoda[").partition("]")[0].split(",")
                left += [name for name in names if name not in brought]
                brought |= set(names)
    assert extras.keys() - brought == {"all", "dev", "docs", "mooncake"}


PLAN = {"errors", "loading", "text", "units", "formats", "layouts", "schema"}
LIGHT = {
    "import kvpagoda": {"errors", "loading"},
    "from kvpagoda import Schema": PLAN,
    "import kvpagoda.schema.presets": PLAN,
    "from kvpagoda.replay import Trace, hit_rate_curve, replay, working_set": {
        "errors", "loading", "units", "blocks", "policies", "prefix", "replay",
    },
    "from kvpagoda import KVCache": {*PLAN, "blocks", "policies", "prefix", "memory", "tiers", "cache", "batch", "kv_cache"},
}  # fmt: skip
"""First line of a user's program -> the rooms that it may load."""
HEAVY = {
    "torch", "transformers", "matplotlib", "rich", "typer", "redis", "zmq", "msgspec", "asyncio", "multiprocessing",
    "socket", "ssl", "tempfile", "shutil", "importlib.resources", "numpy.random",
}  # fmt: skip
DRIVERS = {"disk", "host", "mooncake", "redis"}


@pytest.mark.parametrize("program", list(LIGHT))
def test_importing_loads_nothing_heavy(program: str) -> None:
    """Modules are counted, not milliseconds: a start is slow because of the modules that an import loads."""
    code = "import sys, json, numpy; before = {*sys.modules}; " + program
    code += "; print(json.dumps(sorted({*sys.modules} - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    ours = {name for name in loaded if name.startswith("kvpagoda.")}
    assert {name.split(".")[1] for name in ours} == LIGHT[program]
    assert not loaded & HEAVY
    assert not ours & {f"kvpagoda.tiers.{name}" for name in DRIVERS} | ours & {"kvpagoda.replay.serving"}
    assert len(loaded - ours) <= 65  # of the standard library, beside what numpy loads
