"""vLLM 0.33's own scheduler, without what is compiled, and a follower of its events, over random texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from consumers import package

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("torch", reason="vLLM's specs have dtypes of torch")

EXACT, BOUNDED = ("qwen3-next", "gpt-oss", "gemma-3"), ("qwen3-next, match unit", "gemma-4")
TESTS = Path(__file__).parents[1]
RUN = """
import runpy, sys
from benchmarks.peers import vllm_here
vllm_here.prepare()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_next_hit_is_that_of_the_engine() -> None:
    package("vllm/v1/core/sched/scheduler.py")  # or this is skipped
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "adapters"), *sys.path])
    command = [sys.executable, "-c", RUN, str(TESTS / "adapters" / "vllm_events.py"), "80", *EXACT, *BOUNDED]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["model"] for one in told[::2]] == [*EXACT, *BOUNDED]
    for answers in told:
        assert answers["version"] == "0.33.0" and answers["exact"] > 50 and answers["hits"] > 10
        assert answers["model"] in BOUNDED or not answers["unsure"] + answers["bound"]
