"""How much do vLLM's requests find cached, and what does a step cost its scheduler, with our cache manager in it?

    make vllm                                   # makes the environment, then runs this too
    .venv-vllm/bin/python -m benchmarks.vllm_engine [--quick] [--only TEXT] [--save]

vLLM's own engine runs, on a CPU, with small random models; nothing is downloaded. For each cell of the table its cache
manager is exchanged while it is idle: for another one of its own with another ``--prefix-cache-retention-interval``, or
for ours. Models with states run in a second engine with ``--prefix-match-unit 16`` too. Weights are random but not small,
so a token depends on everything before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.timing import RESULTS, Row, machine, save

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)  # fmt: skip
QUESTION = "How much do vLLM's requests find cached, and what does a step cost, with our cache manager in it?"
BLOCK = 32
BLOCKS = (80, 200)
"""Blocks of memory for each group of layers."""
AT_ONCE = (1, 4, 16)
UNIT = 16
"""vLLM's ``--prefix-match-unit``, for models with states."""
_SMALL = dict(
    hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=512,
    max_position_embeddings=4096, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_QWEN3_NEXT: dict[str, Any] = dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=2,
    num_experts_per_tok=1, moe_intermediate_size=64, shared_expert_intermediate_size=64, partial_rotary_factor=0.25,
    tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    full_attention_interval=4,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "full attention": dict(_SMALL, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=2),
    "windows alone": dict(
        _SMALL, architectures=["MistralForCausalLM"], model_type="mistral", num_hidden_layers=2, sliding_window=96
    ),
    "Gemma-3-like": dict(
        _SMALL, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_hidden_layers=6, sliding_window=96,
        query_pre_attn_scalar=32, layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "gpt-oss-like": dict(
        _SMALL, architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_hidden_layers=4, sliding_window=128,
        num_local_experts=2, num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Qwen3-Next-like": _SMALL | _QWEN3_NEXT | dict(num_attention_heads=8, num_key_value_heads=8, head_dim=256),
    "Qwen3-Next, real ratio": _SMALL | _QWEN3_NEXT | dict(max_position_embeddings=16384),
    "LFM2-like": dict(
        _SMALL, architectures=["Lfm2ForCausalLM"], model_type="lfm2", num_hidden_layers=4, conv_L_cache=3,
        layer_types=["conv", "full_attention"] * 2, conv_bias=False, block_dim=64, block_ff_dim=64, conv_dim=64,
        conv_dim_out=64, norm_eps=1e-5, block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip
"""Configs of models. A state of "real ratio" has the bytes of 1,056 rows of a layer of attention, as in Qwen3-Next-80B."""
TIMED = ("full attention", "Gemma-3-like")
BFLOAT16 = ("Qwen3-Next-like", "Qwen3-Next, real ratio")
STATES = (*BFLOAT16, "LFM2-like")
"""Models with states, in vLLM's "align" mode."""


class Chats(NamedTuple):
    """A workload: conversations of ``turns`` turns, each with one of ``heads`` system prompts of ``head`` tokens; ``active``
    of them take turns at any time. A turn adds the user's ``added`` tokens and the answer to the text before it."""

    conversations: int = 30
    turns: int = 4
    heads: int = 4
    active: int = 10
    answer: int = 32
    head: tuple[int, int] = (90, 260)
    added: tuple[int, int] = (20, 90)

    def prompts(self, seed: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of the conversation, tokens that its user adds), in the order in which they are asked."""
        random = np.random.default_rng(seed)

        def tokens(low: int, high: int) -> list[int]:
            return [*map(int, random.integers(3, 500, int(random.integers(low, high))))]

        heads = [tokens(*self.head) for _ in range(self.heads)]
        left = dict.fromkeys(range(self.conversations), self.turns)
        begun = set[int]()
        while left:
            number = int(random.choice(list(left)[: self.active]))
            added = tokens(*self.added)
            yield number, added if number in begun else [*heads[number % self.heads], *added]
            begun.add(number)
            left[number] -= 1
            if not left[number]:
                del left[number]


LONG = {"Qwen3-Next, real ratio": (Chats(12, 3, 3, 6, 16, (1100, 2600), (200, 600)), (20, 40), (4,))}
"""Workloads of the models that have others, of texts of several of their blocks; blocks; requests at once."""


class Engine:
    """vLLM's engine with a model of ``MODELS``, or the one that ``config`` says. ``options``: of vLLM's, over those here."""

    def __init__(self, model: str, config: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM
        from vllm.v1.core.sched import scheduler

        from kvpagoda.adapters.vllm import scheduler as ours

        own, ours_own, self._said = scheduler.KVCacheManager, ours.KVCacheManager, dict[str, Any]()

        def record(options: Any = None, **arguments: Any) -> Any:
            self._said = arguments
            return own(**arguments) if options is None else ours_own(**arguments, options=options)

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config or MODELS[model]))
            said = dict(
                load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
                max_model_len=16384 if model in LONG else 2048, max_num_seqs=96, max_num_batched_tokens=16384,
                dtype="bfloat16" if model in BFLOAT16 else "float32", block_size=BLOCK,
                num_gpu_blocks_override=1000 if model in LONG else 9000 if model in STATES else 20000,
                enable_prefix_caching=True, async_scheduling=False, seed=0,
                mamba_ssm_cache_dtype="float32",  # vLLM's own choice on a CPU with AVX-512's bf16 alone
                **({"mamba_cache_mode": "align"} if model in STATES else {}),
            )  # fmt: skip
            scheduler.KVCacheManager = ours.KVCacheManager = record
            try:
                self.llm = LLM(folder, **{**said, **options})
            finally:
                scheduler.KVCacheManager, ours.KVCacheManager = own, ours_own
        self.llm.apply_model(_fill)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.num_groups = len(self._said["kv_cache_config"].kv_cache_groups)
        self.block_size = self.scheduler.block_size

    def exchange(self, who: str, blocks: int | None, caching: bool = True) -> None:
        """Give the idle engine the manager of ``who`` with ``blocks`` blocks for each group; None: all."""
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        from kvpagoda.adapters.vllm.manager import KVCacheManager as Ours

        config = self._said["kv_cache_config"]
        most = config.num_blocks if blocks is None else min(config.num_blocks, int(blocks * self.num_groups) + 1)
        bounded = any(type(group.kv_cache_spec).__name__ != "FullAttentionSpec" for group in config.kv_cache_groups)
        interval = {"vLLM, all": None}.get(who, int(who.split()[-1]) if who[-1].isdigit() else 0)
        config = dataclasses.replace(
            config, num_blocks=most, prefix_cache_retention_interval=interval if bounded else None
        )
        make = Ours if who == "ours" else KVCacheManager
        said = {**self._said, "kv_cache_config": config, "enable_caching": caching}
        self.scheduler.kv_cache_manager = make(**said)

    def run(self, chats: Chats, at_once: int) -> tuple[int, list[list[int]], list[int]]:
        """Run a workload. Return the tokens found, each request's tokens, and each request's found tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=chats.answer, temperature=0, ignore_eos=True, detokenize=False)
        engine, texts = self.llm.llm_engine, dict[int, list[int]]()
        asked, running = [*chats.prompts()], dict[str, int]()
        said, found, turn = [list[int]() for _ in asked], [0] * len(asked), 0
        while turn < len(asked) or running:
            busy = {asked[number][0] for number in running.values()}
            while turn < len(asked) and len(running) < at_once and asked[turn][0] not in busy:
                number, added = asked[turn]
                texts[number] = [*texts.get(number, []), *added]
                engine.add_request(f"{turn}", {"prompt_token_ids": texts[number]}, sampling)
                running[f"{turn}"] = turn
                busy.add(number)
                turn += 1
            for output in engine.step():
                if output.finished:
                    at = running.pop(output.request_id.split("-")[0])
                    said[at] = [*output.outputs[0].token_ids]
                    found[at] = output.num_cached_tokens or 0
                    texts[asked[at][0]] += said[at]
        return sum(found), said, found

    def step_times(self, seed: int) -> dict[str, list[float]]:
        """Let 64 requests decode, to which 16 are added five times, and then 16 begin alone, five times. Return the seconds
        that the scheduler took for steps of each kind."""
        from vllm import SamplingParams

        random, engine = np.random.default_rng(seed), self.llm.llm_engine
        head = [*map(int, random.integers(3, 500, 256))]
        taken: dict[str, list[float]] = {"64 decoding": [], "64 decoding, 16 beginning": [], "16 beginning": []}
        schedule, update, step = self.scheduler.schedule, self.scheduler.update_from_output, list[Any]()

        def timed(*arguments: Any, **more: Any) -> Any:
            start = time.perf_counter()
            out = schedule(*arguments, **more)
            new, running = len(out.scheduled_new_reqs), len(self.scheduler.running)
            step[:] = _STEPS.get((new, running)), time.perf_counter() - start
            return out

        def told(*arguments: Any) -> Any:
            start = time.perf_counter()
            out = update(*arguments)
            step[1] += time.perf_counter() - start
            if step[0] is not None:
                taken[step[0]].append(step[1])
            return out

        def add(number: int, prompt: list[int], answer: int) -> None:
            sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
            own = [*map(int, random.integers(3, 500, 256 - len(prompt) // 2))]
            engine.add_request(f"{seed}.{number}", {"prompt_token_ids": [*prompt, *own]}, sampling)

        for number in range(64):
            add(number, head[:64], 60)
        engine.step()
        engine.step()
        self.scheduler.schedule, self.scheduler.update_from_output = timed, told
        try:
            for turn in range(5):
                for number in range(16):
                    add(100 * (turn + 1) + number, head, 1)
                for _ in range(8):
                    engine.step()
            while engine.has_unfinished_requests():
                engine.step()
            for turn in range(5, 10):
                for number in range(16):
                    add(100 * (turn + 1) + number, head, 1)
                engine.step()
        finally:
            self.scheduler.schedule, self.scheduler.update_from_output = schedule, update
        return taken


_STEPS = {(0, 64): "64 decoding", (16, 80): "64 decoding, 16 beginning", (16, 16): "16 beginning"}
"""(Requests that begin, requests that run) -> kind of a step."""


def _fill(model: Any) -> None:
    """Give ``model`` random weights with which every token depends on all before it."""
    import torch

    torch.manual_seed(0)
    for name, values in model.named_parameters():
        if values.dim() > 1:
            values.data.normal_(0, values.shape[-1] ** -0.5)
        elif "norm" in name and "weight" in name:
            values.data.fill_(0.0 if "gemma" in type(model).__name__.lower() else 1.0)
        else:
            values.data.normal_(0, 0.1)


def found(model: str, quick: bool, unit: int | None = None) -> list[Row]:
    """Return a row for each cell: tokens found by each manager, and how many requests have the tokens of one without a cache.
    ``unit``: vLLM's ``--prefix-match-unit``, which stands in the names of the managers."""
    rows: list[Row] = []
    chats, sizes, rates = LONG.get(model, (Chats(), BLOCKS, AT_ONCE))
    if quick:
        chats, sizes, rates = chats._replace(conversations=8, turns=3), sizes[:1], rates[1:2] or rates
    engine = Engine(model, **({} if unit is None else {"prefix_match_unit": unit}))
    size = engine.block_size
    managers, of_unit = ["vLLM", "vLLM, all", f"vLLM, {(2 if model in LONG else 8) * size}", "ours"], ""
    if unit is not None:
        of_unit = f", unit {unit}"
    if model == "full attention":
        managers = ["vLLM", "ours"]
    for at_once in rates:
        engine.exchange("vLLM, all", None, caching=False)
        _, cold, _ = engine.run(chats, at_once)
        engine.exchange("vLLM, all", None)
        unlimited, _, _ = engine.run(chats, at_once)
        for blocks in sizes:
            row: Row = {"case": model, "blocks": blocks, "at once": at_once, f"unlimited{of_unit}": unlimited}
            for who in managers:
                engine.exchange(who, blocks)
                row[f"{who}{of_unit}"], said, _ = engine.run(chats, at_once)
                row[f"{who}{of_unit}: equal"] = sum(one == other for one, other in zip(said, cold))
            rows.append(row)
    return rows


def step_time(model: str, quick: bool) -> list[Row]:
    """Return the microseconds that a step of vLLM's scheduler takes: while 64 requests decode, and when 16 begin."""
    engine = Engine(model)
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(2 if quick else 8):
        for who in ("vLLM", "vLLM, all", "ours"):
            engine.exchange(who, 2000)
            for kind, seconds in engine.step_times(turn).items():
                taken.setdefault((who, kind), []).extend(seconds)
    return [
        {"case": f"{model}: host time of a step", "who": who, "step": step, "us": round(1e6 * median(seconds), 1)}
        for (who, step), seconds in taken.items()
    ]


def options_of(question: str, name: str) -> argparse.Namespace:
    """Return the options of the benchmark ``name``. ``one``: the case to measure in this process, see ``measured_apart``."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/{name}.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured_apart(name: str, case: str, quick: bool) -> list[Row]:
    """Return the rows of a case of the benchmark ``name``, from a process of its own: vLLM's engine cannot be made twice."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--one", case, *["--quick"] * quick]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    said = options_of(QUESTION, "vllm_engine")
    if said.one:
        what, model, *unit = said.one.split(":")
        rows = step_time(model, said.quick) if what == "time" else found(model, said.quick, *map(int, unit))
        print(json.dumps(rows))
        return
    cases = [f"found:{model}" for model in MODELS] + [f"time:{model}" for model in TIMED]
    rows = []
    for case in cases:
        if said.only in case:
            measured = measured_apart("vllm_engine", case, said.quick)
            if case in [f"found:{model}" for model in STATES]:
                with_unit = measured_apart("vllm_engine", f"{case}:{UNIT}", said.quick)
                for row, more in zip(measured, with_unit, strict=True):
                    row |= {name: value for name, value in more.items() if "unit" in name}
            for row in measured:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows += measured
    if said.save:
        save(
            "vllm_engine",
            {"question": QUESTION, "machine": machine(), "versions": {"vllm-cpu": version("vllm-cpu")}, "rows": rows},
            is_part=bool(said.only),
        )


if __name__ == "__main__":
    main()
