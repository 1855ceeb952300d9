"""Run the short tests of each extra with the newest, or the oldest, versions of its packages that ``pyproject.toml`` allows.

    python tools/try_versions.py newest
    python tools/try_versions.py oldest --extra hf --extra events

Each run makes a fresh environment in a temporary folder (``--keep FOLDER``: there, and it stays). torch alone is the one of
``constraints.txt`` in both: PyPI has its other versions as builds for CUDA, of gigabytes. Of mooncake, nixl, cuda and vllm,
which need a library of the system, a driver or an engine, see ``make servers``, ``make consumers`` and ``make vllm``.

Prints a line for each extra: the versions, what passed and what failed. Exits with 1 if a test failed or none ran. Needs the
standard library of Python 3.11 or newer, and pip.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "torch": "tests/test_batch.py tests/test_states.py tests/memory/test_arena.py tests/memory/test_pool.py",
    "disk": "tests/tiers/test_disk.py tests/tiers/test_records.py tests/tiers/test_keys.py",
    "audit": "tests/audit/test_server.py tests/audit/test_audit_command.py",
    "redis": "tests/tiers/test_redis.py",
    "events": "tests/events/test_publisher.py tests/events/test_follower.py tests/events/test_own_router.py",
    "cli": "tests/test_console.py tests/test_cli.py -k 'not generate and not exit_code_2'",
    "hf": "tests/hf/test_paged_cache.py tests/hf/test_every_family.py tests/hf/test_own_states.py tests/hf/test_generator.py",
    "plot": "tests/replay/test_replay_command.py -k 'not help'",
    "report": "tests/replay/test_report_page.py",
    "metrics": "tests/metrics",
    "triton": "tests/kernels/test_triton.py::test_interpreted_kernels_equal_the_reference",
    "cpu": "tests/kernels/test_packed_rows_cpu.py tests/kernels/test_scaled_rows.py",
}
"""Extra -> the tests that use its packages. numpy is under all of them."""


class Outcome(NamedTuple):
    """What the tests of one extra gave. ``versions``: package -> version. ``counts``: as pytest counts."""

    extra: str
    versions: dict[str, str]
    counts: dict[str, int]
    is_good: bool
    said: str


def project() -> dict[str, list[str]]:
    """Return the requirements of the package, as extra ``""``, and of each extra."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": read["dependencies"], **read["optional-dependencies"]}


def name_of(requirement: str) -> str:
    """Return the name of the package in ``requirement``."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]


def packages_of(extra: str) -> list[str]:
    """Return the names of the packages that ``extra`` itself brings, and numpy."""
    requirements = project()
    own = [name_of(one) for one in requirements[extra]]
    return [name_of(one) for one in requirements[""]] + [name for name in own if name != "kvpagoda"]


def oldest(extras: Collection[str]) -> list[str]:
    """Return a constraint to the lowest version allowed for each package of ``extras``, and for numpy; not for torch."""
    requirements, lines = project(), set()
    for one in [one for extra in ("", *extras) for one in requirements[extra]]:
        lowest = re.search(r">=([0-9][0-9a-z.]*)", one)
        if lowest is not None and name_of(one) not in ("kvpagoda", "torch"):
            lines.add(f"{name_of(one)}=={lowest[1]}")
    return sorted(lines)


def torch_pin() -> str:
    """Return the line of ``constraints.txt`` that pins torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(folder: Path, extras: list[str], which: str) -> Path:
    """Make an environment in ``folder`` with the package, ``extras`` and what tests need. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python, pins = folder / "bin" / "python", folder / "constraints.txt"
    pins.write_text("\n".join([torch_pin(), *(oldest(extras) if which == "oldest" else [])]) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins]
    tests = [one for one in project()["dev"] if name_of(one) in ("pytest", "hypothesis", "opentelemetry-sdk")]
    subprocess.run([*pip, torch_pin()], check=True, cwd=ROOT)
    subprocess.run([*pip, "-e", f".[{','.join(extras)}]", *tests], check=True, cwd=ROOT)
    return python


def versions_in(python: Path, names: list[str]) -> dict[str, str]:
    """Return the versions of the packages ``names`` that the environment of ``python`` has."""
    code = "import json, sys; from importlib.metadata import version; print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def run(python: Path, extra: str, which: str) -> Outcome:
    """Run the tests of ``extra``, without those that are long or slow. Old packages may warn of what newer ones deprecate."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    warnings = ["-W", "ignore::DeprecationWarning"] if which == "oldest" else []
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *warnings, *shlex.split(TESTS[extra])],
        cwd=ROOT, env={**env, "PATH": f"{python.parent}{os.pathsep}{env.get('PATH', '')}"}, capture_output=True, text=True,
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    is_good = done.returncode == 0 and counts.get("passed", 0) > 0
    return Outcome(extra, versions_in(python, packages_of(extra)), counts, is_good, done.stdout + done.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the short tests of each extra with other versions of its packages."
    )
    parser.add_argument(
        "which", choices=("newest", "oldest"), help="the newest versions that are allowed, or the oldest"
    )
    parser.add_argument("--extra", action="append", choices=[*TESTS], help="this extra alone; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the environment there, and leave it")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each extra")
    asked = parser.parse_args()
    is_good = True
    for extras in together(asked.extra or [*TESTS], asked.which):
        place = TemporaryDirectory() if asked.keep is None else nullcontext(str(asked.keep / extras[0]))
        with place as folder:
            is_good &= report(Path(folder).resolve(), extras, asked.which, as_json=asked.json)
    return 0 if is_good else 1


def together(extras: list[str], which: str) -> list[list[str]]:
    """Return which of ``extras`` share an environment. transformers' own requirements need a newer click than the oldest
    typer takes."""
    apart = [["hf"]] if which == "oldest" and "hf" in extras else []
    return [one for one in [[extra for extra in extras if [extra] not in apart], *apart] if one]


def report(folder: Path, extras: list[str], which: str, *, as_json: bool) -> bool:
    """Install ``extras`` in ``folder``, run their tests, and print a line for each. Return whether all passed."""
    print(f"Installing the {which} versions of {', '.join(extras)}; it takes minutes", file=sys.stderr)
    python, is_good = install(folder, extras, which), True
    for extra in extras:
        outcome = run(python, extra, which)
        is_good &= outcome.is_good
        if as_json:
            print(json.dumps({"which": which, **outcome._asdict()}), flush=True)
            continue
        versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
        counts = ", ".join(f"{n} {what}" for what, n in outcome.counts.items()) or "no tests"
        print(f"{extra}: {counts} with {versions}", flush=True)
        if not outcome.is_good:
            print(outcome.said[-6000:], flush=True)
    return is_good


if __name__ == "__main__":
    sys.exit(main())
