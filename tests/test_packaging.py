"""What is built and installed: data files, extras, and that importing the library stays light."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
    assert extras.keys() - brought == {"all", "cuda", "dev", "docs", "mooncake", "nixl"}


def test_what_a_command_needs_comes_with_its_extra() -> None:
    """``kvpagoda generate`` restarts from a disk, which needs xxhash."""
    assert project()["project"]["optional-dependencies"]["hf"][0] == "kvpagoda[cli,disk,torch]"
    known = json.loads((PACKAGE / "extras.json").read_text())["extras"]
    extras = project()["project"]["optional-dependencies"]
    for package, (extra, _) in known.items():
        names = {requirement.partition(">")[0].replace("-", "_") for requirement in extras[extra]}
        name = {
            "zmq": "pyzmq", "opentelemetry": "opentelemetry_api", "mooncake": "mooncake_transfer_engine_non_cuda",
            "cuda": "cuda_bindings",
        }  # fmt: skip
        top = package.partition(".")[0]
        assert name.get(top, top) in names, f"{package} is not brought by [{extra}]"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution of a copy of the tree, and the wheel that is built from it. The copy is a git
    checkout with one commit, ``COMMIT`` beside them says which."""
    pytest.importorskip("build", reason="builds the package; pip install 'kvpagoda[dev]'")
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("the package is built with setuptools 77 or newer")
    if shutil.which("git") is None:
        pytest.skip("the copy of the tree is a git checkout")
    folder = tmp_path_factory.mktemp("package")
    tree, out = folder / "tree", folder / "dist"
    left = shutil.ignore_patterns("__pycache__", "*.egg-info", "commit.txt")
    for name in ("src", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=left)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "--no-verify", "-m", "all"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True, capture_output=True)
    said = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    command = [
        sys.executable,
        "-m",
        "build",
        "-q",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(out),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (out / "COMMIT").write_text(said.stdout[:12])
    return out


def test_the_wheel_is_small_and_whole(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("kvpagoda/")}
    files = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name} | {"kvpagoda/commit.txt"}
    assert names == files
    assert wheel.stat().st_size < 2_000_000


def test_what_is_built_says_its_commit(built: Path, tmp_path: Path) -> None:
    """The wheel is built from the source distribution, which is no checkout any more. ``--version`` needs no extra."""
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    commit = (built / "COMMIT").read_text()
    with tarfile.open(source) as archive:
        member = next(name for name in archive.getnames() if name.endswith("src/kvpagoda/commit.txt"))
        assert archive.extractfile(member).read().decode().strip() == commit
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv.pop()); sys.modules['typer'] = None; import kvpagoda.cli"
    command = [sys.executable, "-c", code, "--version", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["version"] == kvpagoda.__version__ and said["commit"] == commit


PLAN = {"errors", "loading", "text", "units", "formats", "layouts", "schema"}
LIGHT = {
    "import kvpagoda": {"errors", "loading"},
    "from kvpagoda import Schema": PLAN,
    "import kvpagoda.schema.presets": PLAN,
    "from kvpagoda.replay import Trace, hit_rate_curve, replay, working_set": {
        "errors", "loading", "text", "units", "blocks", "policies", "prefix", "replay",
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
