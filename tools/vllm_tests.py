"""Run vLLM's own tests with its own cache manager, and with ours: every test that passed must pass again.

    .venv-vllm/bin/python tools/vllm_tests.py [--memory] [--python PACKAGE] FOLDER [TEST FILE..]

``--memory``: with smaller groups of layers (``vllm_memory_plugin``) instead of our manager. ``--python``: the folder ``vllm``
of another version, whose Python code runs over the extension of the installed one. ``FOLDER``: what vLLM's source distribution
has, at least its ``tests``. Tests that fail with vLLM's own manager need a GPU or a model from the network. Those that look
into what ours replaces stay out by name (``vllm_plugin.STAY_OUT``).
Exits with 1 if a test passed with vLLM's manager alone, or if none passed. Needs pytest and vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 2048, "vocab_size": 50272,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True, "activation_function": "relu", "torch_dtype": "float16",
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
"""The config that the tests load under the name facebook/opt-125m; they use no weights."""


def overlay(place: Path, python: Path) -> Path:
    """Make a folder in ``place`` in which ``vllm`` has the code of ``python``, the package of a version, over the extension of
    the installed one, and return it. VLLM_TARGET_DEVICE must be "cpu" where it is imported: its version does not say so."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    over = place / "over" / "vllm"
    if not over.exists():
        over.mkdir(parents=True)
        parts = [one for one in python.iterdir() if one.suffix != ".so"]
        for part in (*parts, *Path(found.origin).parent.glob("*.so")):
            (over / part.name).symlink_to(part.resolve())
    return over.parent


def outcomes(folder: Path, files: list[str], *more: str, first: Sequence[Path] = ()) -> dict[str, str]:
    """Return for each test in ``files`` "passed", "skipped" or "failed". ``first``: where modules are looked for first."""
    with TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        paths = os.pathsep.join(str(path) for path in (*first, ROOT / "src", ROOT / "tests" / "adapters", folder))
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
        subprocess.run(
            [*command, *more, *files, f"--junitxml={report}", "--tb=no"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        cases = ET.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def main(*said: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--python", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*")
    asked = parser.parse_args(said)
    files, place = asked.files, asked.folder.resolve()
    plugin = "vllm_memory_plugin" if asked.memory else "vllm_plugin"
    model = place / "facebook" / "opt-125m"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(OPT))
    with TemporaryDirectory() as over, ThreadPoolExecutor() as pool:  # of processes that know nothing of each other
        first = () if asked.python is None else (overlay(Path(over), asked.python),)
        before, after = pool.map(lambda more: outcomes(place, files, *more, first=first), [(), ("-p", plugin)])
    passed = {name for name, outcome in before.items() if outcome == "passed"}
    out = sorted(name for name in passed if after.get(name) == "skipped")
    lost = sorted(name for name in passed if after.get(name) not in ("passed", "skipped"))
    print(
        f"{len(passed)} of vLLM's tests pass with its own cache manager, {len(passed) - len(out) - len(lost)} of these "
        f"with ours; {len(out)} stay out"
    )
    for name in out:
        print(f"  stays out: {name}")
    for name in lost:
        print(f"  FAILS: {name}")
    return 1 if lost or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
