"""``tools/try_versions.py`` tests every extra, and takes its versions from ``pyproject.toml``."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("tomllib", reason="reads pyproject.toml: Python 3.11")
ROOT = Path(__file__).parents[1]
ELSEWHERE = {"mooncake", "nixl", "cuda", "vllm"}
"""They need a library of the system, CUDA's libraries, a driver, an engine: docstring of the tool."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_versions", ROOT / "tools" / "try_versions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_extra_has_tests(tool: ModuleType) -> None:
    extras = tool.project().keys() - {"", "all", "dev", "docs"}
    assert extras == tool.TESTS.keys() | ELSEWHERE
    files = [
        name.partition("::")[0] for names in tool.TESTS.values() for name in names.split() if name.startswith("tests/")
    ]
    assert not [name for name in files if not (ROOT / name).exists()]
    assert all(name in tool.__doc__ for name in ELSEWHERE)


def test_the_oldest_versions_are_those_that_are_allowed(tool: ModuleType) -> None:
    pins = tool.oldest(tool.TESTS)
    text = (ROOT / "pyproject.toml").read_text()
    for pin in pins:
        name, version = pin.split("==")
        assert re.search(rf'"{re.escape(name)}(\[\w+\])?>={re.escape(version)}[,;" ]', text), pin
    assert {"numpy", "transformers", "redis", "msgspec"} <= {pin.partition("==")[0] for pin in pins}
    assert not [pin for pin in pins if pin.startswith(("torch=", "kvpagoda"))]
    assert tool.torch_pin() in (ROOT / "constraints.txt").read_text()


def test_an_environment_has_the_oldest_of_its_own_extras(tool: ModuleType) -> None:
    shared, apart = tool.together([*tool.TESTS], "oldest")
    assert apart == ["hf"] and {*shared, *apart} == {*tool.TESTS}
    assert tool.together([*tool.TESTS], "newest") == [[*tool.TESTS]] and tool.together(["hf"], "oldest") == [["hf"]]
    assert [pin.partition("==")[0] for pin in tool.oldest(["hf"])] == ["numpy", "transformers"]


def test_each_line_names_the_packages_of_its_extra(tool: ModuleType) -> None:
    assert tool.packages_of("events") == ["numpy", "msgspec", "pyzmq"]
    assert tool.packages_of("hf") == ["numpy", "transformers"]
