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


LIGHT = ("kvpagoda", "kvpagoda.schema", "kvpagoda.replay", "kvpagoda.kv_cache", "kvpagoda.schema.presets")


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {
        "torch",
        "transformers",
        "multiprocessing",
        "matplotlib",
        "rich",
        "typer",
        "asyncio",
    }
