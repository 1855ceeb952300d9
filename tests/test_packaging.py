"""What is built and installed: data files, extras, and that importing the library stays light."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import kvpagoda
from kvpagoda.upstream import FOLLOWED

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.release import hindrances, version_of

from test_layering import room

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


@pytest.mark.parametrize("package", FOLLOWED)
def test_extras_stay_below_what_we_follow(package: str) -> None:
    extras = project()["project"]["optional-dependencies"].values()
    bounds = [one.partition(";")[0] for extra in extras for one in extra if re.match(rf"{package}[<>]", one)]
    assert bounds and all(one.endswith(f",<{FOLLOWED[package]['below']}") for one in bounds)


def test_the_readme_lists_every_extra() -> None:
    section = (ROOT / "README.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    extras = project()["project"]["optional-dependencies"]
    assert {*re.findall(r"`\[(\w+)\]`", section)} == {*extras}


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
    assert wheel.stat().st_size < 2_250_000


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


USER = """
import numpy as np
import kvpagoda
from kvpagoda import Batch, EvictionPolicy, KVCache, KVPool, LayerView, Namespace, PreemptionPolicy, Schema, Sequence, simulate
from kvpagoda import KVCahce  # E: has no attribute "KVCahce"
from kvpagoda.adapters.vllm import KVCacheManager, Options
from kvpagoda.compat import BlockAllocator, build_schema
from kvpagoda.events import EventLog, Router
from kvpagoda.formats import encode
from kvpagoda.handover import SharedMemory
from kvpagoda.hf import Generator
from kvpagoda.layouts import pack, pak  # E: has no attribute "pak"
from kvpagoda.metrics import CacheCollector, dashboard
from kvpagoda.replay import Trace, hit_bound, replay
from kvpagoda.tiers import disk_driver, host_tier


class NoMethods(EvictionPolicy): ...


class NoVictim(PreemptionPolicy): ...


NoMethods()  # E: Cannot instantiate abstract class "NoMethods"
NoVictim()  # E: Cannot instantiate abstract class "NoVictim"


def step(cache: KVCache, sequence: Sequence, batch: Batch, view: LayerView) -> int:
    cache.free_bloks  # E: "KVCache" has no attribute "free_bloks"
    sequence.lenght  # E: "Sequence" has no attribute "lenght"
    batch.layer(0).blok_table  # E: "LayerView" has no attribute "blok_table"
    cache.open("a text")  # E: Argument 1 to "open" of "KVCache" has incompatible type "str"
    cache.open([1, 2], reserv=9)  # E: Unexpected keyword argument "reserv"
    sequence.commit(7)  # E: Argument 1 to "commit" of "Sequence" has incompatible type "int"
    host_tier(b"1GiB")  # E: Argument 1 to "host_tier" has incompatible type "bytes"
    host_tier("1GiB", tiemout=3.0)  # E: Unexpected keyword argument "tiemout" for "host_tier"
    reveal_type(host_tier("1GiB", write="commit", workers=1))  # N: kvpagoda.tiers.spec.TierSpec
    reveal_type(cache.open(np.arange(3), Namespace("a")))  # N: kvpagoda.core.cache.sequence.Sequence
    reveal_type(cache.lookup([1, 2, 3]))  # N: kvpagoda.core.cache.lookup.Lookup
    reveal_type(cache.lookup(range(3)))  # N: kvpagoda.core.cache.lookup.Lookup
    reveal_type(cache.lookup(np.arange(3)))  # N: kvpagoda.core.cache.lookup.Lookup
    reveal_type(cache.lookup([[1, 2], [3]], ["a", None]))  # N: list[kvpagoda.core.cache.lookup.Lookup]
    reveal_type(cache.lookup((np.arange(3),)))  # N: list[kvpagoda.core.cache.lookup.Lookup]
    reveal_type(cache.step_limit(sequence))  # N: int
    reveal_type(cache.step_limit([sequence, sequence]))  # N: numpy.ndarray[
    reveal_type(sequence.hints)  # N: list[kvpagoda.core.cache.outcome.Outcome]
    reveal_type(cache.stats().running)  # N: int
    reveal_type(replay([], 8))  # N: kvpagoda.replay.run.ReplayResult
    return sequence.length


KVCache(1, 2, 3, nonsense=True)  # E: Unexpected keyword argument "nonsense" for "KVCache"
reveal_type(simulate)  # N: -> kvpagoda.replay.fleet.simulation.SimulateResult
reveal_type(kvpagoda.__version__)  # N: str
reveal_type(CacheCollector)  # N: -> kvpagoda.metrics.prometheus.CacheCollector
reveal_type(BlockAllocator)  # N: -> kvpagoda.compat.block_allocator.BlockAllocator
reveal_type(KVPool)  # N: -> kvpagoda.compat.kv_pool.KVPool
reveal_type(KVCacheManager)  # N: -> kvpagoda.adapters.vllm.manager.KVCacheManager
reveal_type(Generator)  # N: -> kvpagoda.hf.generator.Generator
reveal_type(hit_bound)  # N: -> kvpagoda.replay.offline.bound.HitBound
reveal_type(SharedMemory)  # N: -> kvpagoda.handover.shared_memory.SharedMemory
reveal_type(disk_driver)  # N: -> kvpagoda.tiers.
reveal_type(EventLog)  # N: -> kvpagoda.events.event_log.EventLog
"""
"""A user's program for mypy: a line ends with ``# E:`` and the error there, or with ``# N:`` and a part of its type."""
ARRAYS = """
import torch
from kvpagoda import KVCache
from kvpagoda.layouts import pack


def bind(cache: KVCache) -> None:
    batch = cache.batch([cache.open([1])], [1])
    view = batch.layer(0)
    reveal_type(cache.lookup(torch.arange(3)))  # N: kvpagoda.core.cache.lookup.Lookup
    reveal_type(cache.lookup([torch.arange(3)]))  # N: list[kvpagoda.core.cache.lookup.Lookup]
    reveal_type(cache.device)  # N: torch._C.device | None
    reveal_type(view["k"])  # N: torch._tensor.Tensor
    reveal_type(view.block_table)  # N: torch._tensor.Tensor
    reveal_type(view.state_indices)  # N: torch._tensor.Tensor | None
    reveal_type(batch.state_indices)  # N: torch._tensor.Tensor
    reveal_type(batch.state_writes)  # N: torch._tensor.Tensor
    reveal_type(batch.positions)  # N: torch._tensor.Tensor
    reveal_type(view.kernel_tensor("fa2"))  # N: torch._tensor.Tensor
    reveal_type(pack)  # N: -> torch._tensor.Tensor


KVCache(1, device=0)  # E: incompatible type "int"; expected "str | device | None"
"""


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A folder with what the wheel installs, and the installed numpy: no checkout, and no torch."""
    import numpy

    (wheel,), folder = built.glob("*.whl"), built / "installed"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "numpy").symlink_to(Path(numpy.__file__).parent)
    return folder


def judged(program: str, installed: Path, folder: Path) -> None:
    """Run ``mypy --strict`` on ``program`` as a user of the installed package does, and compare what it says of each line."""
    pytest.importorskip("mypy", reason="reads the types; pip install 'kvpagoda[dev]'")
    (folder / "program.py").write_text(program)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-pretty", "--hide-error-context",
        f"--python-executable={installed / 'bin' / 'python'}", f"--cache-dir={folder / 'cache'}", "program.py",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)
    assert not done.stderr and done.returncode == 1, done.stderr + done.stdout
    said: dict[int, str] = {}
    for line in done.stdout.splitlines()[:-1]:
        file, number, kind, text = line.split(":", 3)
        assert file == "program.py", line
        said[int(number)] = said.get(int(number), "") + f"{kind.strip()[0].upper()}:{text}\n"
    for number, line in enumerate(program.splitlines(), start=1):
        kind, _, wanted = line.rpartition("# ")[2].partition(": ")
        if kind not in ("E", "N"):
            assert number not in said, f"{line.strip()}: mypy says {said[number]}"
            continue
        heard = said.get(number, "nothing")
        assert f"{kind}:" in heard and wanted in heard, f"{line.strip()}: mypy says {heard}"
        assert kind == "E" or f'Revealed type is "{wanted}' in heard or wanted.startswith("->") or "def (" in heard, (
            heard
        )


def test_a_type_checker_reports_the_mistakes_of_a_user(installed: Path, tmp_path: Path) -> None:
    judged(USER, installed, tmp_path)


@pytest.mark.long
def test_a_type_checker_knows_the_arrays_as_tensors(installed: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="has the type of tensors; pip install 'kvpagoda[torch]'")
    (packages,) = installed.glob("lib/python*/site-packages")
    (packages / "torch").symlink_to(Path(torch.__file__).parent)
    try:
        judged(ARRAYS, installed, tmp_path)
    finally:
        (packages / "torch").unlink()


def test_the_version_has_one_home(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert "version" not in project()["project"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    assert f"Version: {kvpagoda.__version__}" in lines and "Classifier: Typing :: Typed" in lines
    assert source.name == f"kvpagoda-{kvpagoda.__version__}.tar.gz"


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """A git checkout that may be released: committed, with the tag of its version and that heading in CHANGELOG."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    (tmp_path / "src" / "kvpagoda").mkdir(parents=True)
    (tmp_path / "src" / "kvpagoda" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-01-31)\n\n- First.\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    commit = [*who, "commit", "-q", "--no-verify", "-m", "all"]
    for command in (["init", "-q"], ["add", "."], commit, ["tag", "v1.2.3"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    return tmp_path


def test_what_is_committed_and_tagged_may_be_released(tagged: Path) -> None:
    assert hindrances(tagged) == []
    assert version_of(ROOT) == kvpagoda.__version__


def test_a_release_needs_its_commit_its_tag_and_its_heading(tagged: Path) -> None:
    (tagged / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- First.\n")
    dirty, heading = hindrances(tagged)
    assert dirty.startswith("1 files are not committed (CHANGELOG.md, ..)") and '"## 1.2.3 (YYYY-MM-DD)"' in heading
    for command in (["checkout", "-q", "."], ["tag", "-d", "v1.2.3"], ["tag", "v1.2.4"]):
        subprocess.run(["git", "-C", str(tagged), *command], check=True, capture_output=True)
    assert hindrances(tagged) == ["the tags of this commit name v1.2.4, kvpagoda.__version__ is 1.2.3; git tag v1.2.3"]


PLAN = {"errors", "loading", "text", "units", "formats", "layouts", "schema"}
LIGHT = {
    "import kvpagoda": {"errors", "loading"},
    "from kvpagoda import Schema": PLAN,
    "import kvpagoda.schema.presets": PLAN,
    "from kvpagoda.replay import Trace, hit_rate_curve, replay, working_set": {
        "errors", "loading", "text", "units", "arrays", "free_list", "pages", "abc", "core", "policies", "retention",
        "core.prefix", "prefix", "replay",
    },
    "from kvpagoda import KVCache": {
        *PLAN, "arrays", "free_list", "pages", "namespace", "abc", "policies", "retention", "tiers", "core",
        "core.blocks",
        "core.prefix", "core.memory", "core.groups", "core.cache", "core.batch", "core.kv_cache",
    },
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
    assert {room(name) for name in ours} == LIGHT[program]
    assert not loaded & HEAVY
    assert not ours & {f"kvpagoda.tiers.{name}" for name in DRIVERS} | ours & {"kvpagoda.replay.serving"}
    assert len(loaded - ours) <= 65  # of the standard library, beside what numpy loads
