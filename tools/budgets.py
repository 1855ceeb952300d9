"""Measure what the core costs those who read it and those who call it, beside the budgets in ``budgets.json``.

    python tools/budgets.py [--json]

``lines``: lines of code of the core. ``files of an open``: files of the package that one ``open`` enters under pressure:
of a full-attention model, of a hybrid, of a full-attention model that finds its prompt in a host tier. ``calls``: Python
calls inside the package for one request (open, commits in one piece or in chunks of 2,048 tokens, close) and for a decoded
token (extend, commit), in the mean of the first 500 requests of Mooncake's conversation trace. They are counts, not times:
the same on every machine. Exits with 1 if a figure is above its budget. A budget is raised by a commit that says what for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvpagoda
from kvpagoda import KVCache, Schema

sys.path.insert(0, str(Path(__file__).parent))
import code_size

HOME = str(Path(kvpagoda.__file__).parent)
BUDGETS = Path(__file__).with_suffix(".json")
TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
_BASE = dict(
    vocab_size=32_000, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=262_144, num_hidden_layers=12,
)  # fmt: skip
FULL = dict(_BASE, model_type="llama")
HYBRID = dict(
    _BASE, model_type="gemma3_text", sliding_window=1024, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
)  # fmt: skip
CHUNK = 2_048


class Entered:
    """Counts the Python calls inside the package, and the files that they enter, while it is open."""

    def __init__(self) -> None:
        self.calls, self.files = 0, set[str]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and not code.co_name.startswith("<"):
            self.calls += 1
            self.files.add(code.co_filename)

    def __enter__(self) -> Entered:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def requests(count: int = 500) -> Iterator[tuple[npt.NDArray[np.int32], int]]:
    """Yield (prompt, number of answered tokens) of the first requests of the trace."""
    known: dict[int, npt.NDArray[np.int32]] = {}
    with gzip.open(TRACE, "rt") as lines:
        for line, _ in zip(lines, range(count)):
            record = json.loads(line)
            for name in record["hash_ids"]:
                if name not in known:
                    known[name] = np.random.default_rng(name).integers(1, 31_999, 512, dtype=np.int32)
            prompt = np.concatenate([known[name] for name in record["hash_ids"]])[: max(1, record["input_length"])]
            yield prompt, max(1, min(64, record["output_length"]))


class Run(NamedTuple):
    """Calls of a request without its decoded tokens, calls of a decoded token, and files of an ``open``."""

    calls: int
    decode: float
    files: int


def run(config: dict[str, Any], chunk: int | None, capacity: int = 1_500_000, **settings: Any) -> Run:
    """Serve the requests one at a time, without memory unless ``settings`` say so; ``capacity`` in tokens."""
    settings = {"device": "none", **settings}
    cache = KVCache(
        Schema.from_hf_config(config, dtype="bfloat16"),
        num_blocks=capacity // 16,
        max_requests=4,
        block_size=16,
        **settings,
    )
    whole, decoded, opens, steps = Entered(), Entered(), list[Entered](), 0
    for prompt, num_answered in requests():
        with (opened := Entered()):
            sequence = cache.open(prompt, reserve=len(prompt) + num_answered, capacity=0 if chunk else len(prompt))
        opens.append(opened)
        with whole:
            for at in range(sequence.cached_tokens, len(prompt), chunk or len(prompt)):
                new = prompt[at : at + chunk if chunk else None]
                if chunk:
                    sequence.extend(len(new))
                sequence.commit(new)
        for token in range(num_answered):
            with decoded:
                sequence.extend(1)
                sequence.commit([token + 1])
        with whole:
            sequence.close()
        whole.calls += opened.calls
        steps += num_answered
    cache.check()
    late = opens[len(opens) // 2 :]  # when blocks are evicted
    return Run(round(whole.calls / len(opens)), round(decoded.calls / steps, 1), max(len(one.files) for one in late))


def files_from_a_tier() -> int:
    """Return how many files an ``open`` enters that loads its prompt from a host tier, where others had evicted it."""
    from kvpagoda.tiers import host_tier

    schema = Schema.from_hf_config({**FULL, "num_hidden_layers": 2}, dtype="bfloat16")
    cache = KVCache(schema, num_blocks=80, max_requests=4, block_size=16, device="cpu", tiers=[host_tier("64MiB")])
    prompts = [np.random.default_rng(i).integers(1, 31_999, 1_000, dtype=np.int32) for i in (0, 1, 2, 0)]
    for prompt in prompts:
        with (opened := Entered()):
            sequence = cache.open(prompt)
        num_cached = sequence.cached_tokens
        sequence.commit(prompt[num_cached:])
        sequence.close()
        cache.flush()
    cache.close()
    assert num_cached == 992, f"{num_cached} tokens came from the tier"
    return len(opened.files)


def measure() -> dict[str, float]:
    """Return each figure by its name in ``budgets.json``: of requests where the trace is there, of a tier where torch is."""
    figures: dict[str, float] = {"lines": code_size.measure().core}
    if TRACE.exists():
        runs = {"full": run(FULL, None), "chunked": run(FULL, CHUNK), "hybrid": run(HYBRID, CHUNK)}
        figures |= {f"calls of a request, {name}": one.calls for name, one in runs.items()}
        figures |= {f"calls of a decoded token, {name}": runs[name].decode for name in ("full", "hybrid")}
        figures |= {f"files of an open, {name}": runs[name].files for name in ("full", "hybrid")}
    if find_spec("torch"):
        figures["files of an open, from a tier"] = files_from_a_tier()
    return figures


def table(figures: dict[str, float], budgets: dict[str, float]) -> str:
    """Return each figure beside its budget, and how far it is below (-) or above (+)."""
    rows = [f"{'core':<34}{'now':>8}{'budget':>8}{'':>9}"]
    for name, budget in budgets.items():
        if name in figures:
            more = round(figures[name] - budget, 1)
            rows.append(f"{name:<34}{figures[name]:>8,}{budget:>8,}{f'{more:+,}' if more else '':>9}")
        else:
            rows.append(f"{name:<34}{'-':>8}{budget:>8,}{'not here':>9}")
    return "\n".join(rows)


def over(figures: dict[str, float], budgets: dict[str, float]) -> dict[str, float]:
    """Return the figures that are above their budgets."""
    return {name: figure for name, figure in figures.items() if figure > budgets[name]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the core beside its budgets.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    figures, budgets = measure(), json.loads(BUDGETS.read_text())
    print(json.dumps({"now": figures, "budgets": budgets}) if as_json else table(figures, budgets))
    return int(bool(over(figures, budgets)))


if __name__ == "__main__":
    sys.exit(main())
