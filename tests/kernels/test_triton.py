"""Triton kernels without a GPU. Interpreting and compiling exclude each other, so each has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent


def run_pytest(begin, marked, tmp_path, **environment):
    """Run the files whose names begin so in one process: starting one takes seconds."""
    names = sorted(map(str, HERE.glob(f"{begin}_*.py")))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TRITON", "KVPAGODA"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *names],
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path), **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


QUICK = "not slow and not long"
LONG = pytest.param("long and not slow", marks=pytest.mark.long)


@pytest.mark.parametrize("marked", [QUICK, LONG])
def test_interpreted_kernels_equal_the_reference(tmp_path, marked):
    run_pytest("interpreted", marked, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.parametrize("marked", [QUICK, LONG, pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_compile_for_ampere_hopper_and_blackwell(tmp_path, marked):
    run_pytest("compiled", marked, tmp_path)
