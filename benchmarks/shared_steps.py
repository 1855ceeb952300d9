"""What do hybrid models find of the prompts of coding agents, and of chats, in the steps of an engine?

An engine's step computes at most so many tokens of *all* requests (vLLM's ``max_num_batched_tokens``, 8,192 for its server on
an H100), those that run longest first, and one token of each output. A request waits for the next step while a running one
computes a part of its prompt (``KVCache.should_wait``), as vLLM's manager of states has it. In ``hybrid_peers`` a step
computes 2,048 tokens of *every* request, so that 64 prompts grow at the same time; requests of one conversation that follow
each other then start together, and none finds what another is about to compute. Here both sides are served in an engine's
steps ("of all"), and a few cases in those of ``hybrid_peers`` ("of each"), to tell what the cache finds from what admission
lets it find.

The agents are the first 1,500 requests of the weka trace (13 conversations, 151.6 million prompt tokens), the chats the first
3,000 of the conversation trace. Requests are admitted in their order, as soon as there is room: their times are not used, so
a request does not wait for the answer to the one before it. "agent cut": prompts end with a whole id of the trace, 64 tokens;
what follows it in a prompt is in no later one of the trace, though in the conversation it is.

vLLM is its own ``KVCacheManager`` (``peers/vllm_hybrid.py``). ``again_percent`` is what it computes again after preemptions,
in percent of the prompt tokens; ours reserves room for outputs and preempts nothing. "bound": no cache finds more in the
steps of ours (``kvpagoda.replay.hit_bound``): it is one of caches that admit and end each request when ours does, which
vLLM does not. In any steps nobody finds more than all that earlier requests have in common with a prompt
(``any_steps_percent``), since every request is admitted in its order.
"""

from __future__ import annotations

from typing import Any

from benchmarks import hits
from benchmarks.one_budget import schema_of
from benchmarks.peers import Absent, Process
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import SOURCES, TRACES, cut_to_ids
from kvpagoda.replay import Trace, hit_bound, serve, synthetic
from kvpagoda.units import parse_bytes

QUESTION = "What do hybrid models find of the prompts of coding agents, and of chats, in the steps of an engine?"
LIMITS = {"agent": 1500, "agent cut": 1500, "conversation": 3000}
ALL, EACH = "8192 of all", "2048 of each"
UNIT, EVERY = {"prefix_match_unit": 16}, {"prefix_cache_retention_interval": 4096}
FEWER: dict[str, dict[str, Any]] = {
    "4 at once": {"max_num_seqs": 4}, "8 at once": {"max_num_seqs": 8}, "16 at once": {"max_num_seqs": 16},
    "32 at once": {"max_num_seqs": 32},
}  # fmt: skip
ROOM = {"watermark 0.1": {"watermark": 0.1}, "watermark 0.3": {"watermark": 0.3}}
"""What leaves room for those that run, and for texts: fewer requests, or blocks that none may take when it is admitted."""
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {}, "unit 16": UNIT, "every 4096": EVERY, "every 4096 and unit 16": EVERY | UNIT,
    "every 1024": {"prefix_cache_retention_interval": 1024}, "every 8192": {"prefix_cache_retention_interval": 8192},
    "every 8192 and unit 16": {"prefix_cache_retention_interval": 8192} | UNIT, **FEWER, **ROOM,
    **{f"every 4096, {name}": EVERY | options for name, options in (FEWER | ROOM).items()},
}  # fmt: skip
"""vLLM's options, by the names of a row; ``unit``: its ``--prefix-match-unit``, which only models with states can use."""
OURS: dict[str, dict[str, Any]] = {
    "checkpoints every 32768": {"checkpoint_every": 2048}, "checkpoints every 8192": {"checkpoint_every": 512},
}  # fmt: skip
"""Options of ours, by the names of a row, in blocks of 16 tokens."""
NO_BOUNDS = {("bound", name) for name in OURS | ROOM}  # the bound knows neither where checkpoints lie nor a watermark
PLAIN, STATES = ("defaults", "every 4096"), ("defaults", "unit 16", "every 4096", "every 4096 and unit 16")
OFTEN, AT_ONCE, WATERMARKS = tuple(OURS), tuple(FEWER), tuple(ROOM)
EVERY_AT_ONCE, EVERY_WATERMARKS = ([f"every 4096, {name}" for name in names] for names in (FEWER, ROOM))
CHATS = ("defaults", "every 8192", "unit 16", "every 8192 and unit 16")
CASES: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("agent", "Qwen3-Next-80B", "50GiB", ALL, (*STATES, *WATERMARKS, *AT_ONCE[1:], OFTEN[0])),
    ("agent", "Qwen3-Next-80B", "200GiB", ALL, (*STATES[:2], OFTEN[0])),
    ("agent cut", "Qwen3-Next-80B", "200GiB", ALL, STATES[:2]),
    ("agent cut", "Qwen3-Next-80B", "50GiB", ALL, STATES[:2]),
    ("agent", "gpt-oss-120b", "50GiB", ALL, (*PLAIN, *WATERMARKS, *EVERY_WATERMARKS, *AT_ONCE[1:], *EVERY_AT_ONCE[1:])),
    ("agent", "gpt-oss-120b", "200GiB", ALL, PLAIN),
    ("agent", "Nemotron-H-8B", "50GiB", ALL, (*STATES[:2], *WATERMARKS, OFTEN[1])),
    ("agent", "Nemotron-H-8B", "200GiB", ALL, (*STATES[:1], OFTEN[1])),
    ("agent", "Gemma-3-27B", "50GiB", ALL, (*PLAIN, *WATERMARKS, *EVERY_WATERMARKS, *AT_ONCE[:2], *EVERY_AT_ONCE[:2])),
    ("agent", "Gemma-3-27B", "200GiB", ALL, PLAIN),
    ("agent", "Qwen3-Next-80B", "50GiB", EACH, (*STATES, "8 at once", "every 4096, 8 at once", "every 4096, watermark 0.3")),
    ("conversation", "Qwen3-Next-80B", "400GiB", ALL, CHATS),
    ("conversation", "gpt-oss-120b", "400GiB", ALL, ("defaults", "every 1024")),
    ("conversation", "Gemma-3-27B", "400GiB", ALL, CHATS[:2]),
    ("conversation", "Nemotron-H-8B", "400GiB", ALL, CHATS),
]  # fmt: skip
"""The trace, the model, the budget, the steps, and vLLM's settings."""


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    for trace, model, budget, steps, settings in CASES[:: 4 if options.quick else 1]:
        title = f"{trace}, {model}, {budget}, {steps}"
        here = ["", *(name for name in settings if name in OURS | FEWER | ROOM)] if "ours" in options.peers else []
        for setting in here:
            for who, serve_with in (("ours", ours), ("bound", bound)):
                if options.only in f"{title}, {who} {setting}|" and (who, setting) not in NO_BOUNDS:
                    options_here = (SETTINGS | OURS).get(setting, {})
                    figures = serve_with(trace, model, budget, steps, options_here, is_quick=options.quick)
                    case = f"{title}, {who} {setting}".strip()
                    rows.append({"case": case, "who": who, **_of(title, setting or "defaults"), **figures})
        asked = [name for name in settings if name not in OURS and options.only in f"{title}, {name}|"]
        if "vllm" not in options.peers or not asked:
            continue
        try:
            process = Process("vllm_hybrid")
        except Absent as reason:
            return [*rows, {"who": "vllm", "absent": str(reason)}]
        with process:
            for name in asked:
                figures = theirs(process, trace, model, budget, steps, SETTINGS[name], is_quick=options.quick)
                rows.append({"case": f"{title}, {name}", "who": "vllm", **_of(title, name), **figures})
    return rows


def ours(
    trace: str, model: str, budget: str, steps: str, setting: dict[str, Any], *, is_quick: bool = False
) -> dict[str, Any]:
    """Serve ``trace`` with the cache of this library."""
    requests, schema, arguments = _given(trace, model, steps, setting, is_quick)
    arguments |= {name: setting[name] for name in ("checkpoint_every", "watermark") if name in setting}
    served = serve(requests, schema, budget, **arguments)
    return {
        "hit_percent": 100 * served.hit_rate, "preempted": 0, "again_percent": 0.0, "mean_running": served.mean_running,
        "steps": served.steps, "never_fit": served.never_fit,
    }  # fmt: skip


def bound(
    trace: str, model: str, budget: str, steps: str, setting: dict[str, Any], *, is_quick: bool = False
) -> dict[str, Any]:
    """Bound what any cache finds in the steps of ours. ``unlimited_percent``: in any memory. ``any_steps_percent``: in any
    memory and in any steps, if requests are admitted in their order."""
    requests, schema, arguments = _given(trace, model, steps, setting, is_quick)
    found = hit_bound(requests, schema, budget, **arguments)
    alone = {**arguments, "max_requests": 1, "batch_tokens": None}
    one_by_one = hit_bound(requests, schema, budget, **alone, rounds=0)
    return {
        "hit_percent": 100 * found.bound, "packed_percent": 100 * found.packed,
        "unlimited_percent": 100 * found.unlimited, "any_steps_percent": 100 * one_by_one.unlimited,
    }  # fmt: skip


def _given(
    trace: str, model: str, steps: str, setting: dict[str, Any], is_quick: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the requests, the schema, and the arguments of ``serve``."""
    source = SOURCES[trace.split()[0]]
    file = TRACES / source.file
    is_there, tokens = file.exists() and not is_quick, int(steps.split()[0])
    requests = Trace.read(file, LIMITS[trace]) if is_there else synthetic(40)
    if trace.endswith("cut"):
        requests = cut_to_ids(requests, source.per_id if is_there else 64)
    arguments: dict[str, Any] = {
        "tokens_per_id": source.per_id if is_there else 64, "max_requests": setting.get("max_num_seqs", 64),
        "step_tokens": tokens, "batch_tokens": tokens if steps == ALL else None,
    }  # fmt: skip
    return requests, schema_of(hits.MODELS[model]), arguments


def theirs(
    process: Process,
    trace: str,
    model: str,
    budget: str,
    steps: str,
    setting: dict[str, Any],
    *,
    is_quick: bool = False,
) -> dict[str, Any]:
    """Serve ``trace`` with vLLM's manager and ``setting``."""
    config = {**hits.MODELS[model], **setting} | ({"max_num_batched_tokens": 8192} if steps == ALL else {})
    limit = 40 if is_quick else LIMITS[trace]
    name, is_cut = trace.split()[0], trace.endswith("cut")
    found = process.ask("serve", config=config, budget=parse_bytes(budget), limit=limit, trace=name, is_cut=is_cut)
    kept = ("hit_percent", "preempted", "again_percent", "mean_running", "steps", "never_fit", "block_size")
    return {"version": process.version, **{key: found[key] for key in kept}}


def _of(title: str, setting: str) -> dict[str, str]:
    trace, model, budget, steps = title.split(", ")
    return {"trace": trace, "model": model, "budget": budget, "step": steps, "setting": setting}


if __name__ == "__main__":
    tell("shared_steps", QUESTION, measure)
