"""When does ``PagedCache`` pay: the time of ``model.generate`` with it, beside ``model.generate`` alone.

Models are random and of two sizes, in float32 on one thread. Times are CPU time, which other load changes little. A
batch has 4 prompts of the same length, of which the first ``common`` tokens are the same. Every answer has its full
length. A round runs in turn:

    alone      generate with the cache that transformers makes
    first      generate with a PagedCache that is empty: the rows of the batch share what they have in common
    again      the same prompts with the same PagedCache
    others     four other prompts with the same beginning

``over_alone``: ``seconds`` divided by those of ``alone``. ``equal``: rows with the tokens of ``alone``.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Options, Row, tell
from kvpagoda.hf import PagedCache

QUESTION = "How long does model.generate take with a PagedCache, beside its own cache?"
ROWS = 4


class Case(NamedTuple):
    """``ROWS`` prompts of ``length`` tokens, of which the first ``common`` are the same, and ``answer`` new tokens."""

    model_type: str
    hidden: int
    layers: int
    common: int
    length: int
    answer: int

    @property
    def name(self) -> str:
        return (
            f"{self.model_type}, hidden {self.hidden}, {self.layers} layers: "
            f"{self.common:,} of {self.length:,} common, {self.answer} new"
        )


CASES = (
    Case("llama", 64, 4, 400, 420, 40),
    Case("gemma3_text", 64, 4, 400, 420, 40),
    Case("qwen3_next", 64, 4, 400, 420, 40),
    Case("llama", 512, 8, 0, 1520, 16),
    Case("llama", 512, 8, 1500, 1520, 16),
    Case("llama", 512, 8, 1500, 1520, 128),
)
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": dict(sliding_window=64, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "qwen3_next": dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, layer_types=["linear_attention"] * 3 + ["full_attention"],
    ),
}  # fmt: skip


def measure(options: Options) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [case for case in CASES[:1] if options.quick] or [case for case in CASES if options.only in case.name]
        return [row for case in cases for row in _rows(case, options.runs)]
    finally:
        torch.set_num_threads(threads)


def _rows(case: Case, runs: int) -> list[Row]:
    """Return a row for each of the four ways, with the median seconds of ``runs`` rounds."""
    model = _model(case)
    prompts, others = (_prompts(case, seed) for seed in (1, 2))
    _generate(model, prompts, case.answer, None)  # what torch and transformers do only once
    taken: dict[str, list[float]] = {who: [] for who in ("alone", "first", "again", "others")}
    equal: dict[str, int] = {}
    for _ in range(runs):
        cache = PagedCache(model, "1GiB" if case.hidden > 64 else "64MiB", max_requests=ROWS)
        own, own_others = None, _generate(model, others, case.answer, None)[0]
        for who in taken:
            asked = others if who == "others" else prompts
            tokens, seconds = _generate(model, asked, case.answer, None if who == "alone" else cache)
            own = tokens if own is None else own
            taken[who].append(seconds)
            equal[who] = int((tokens == (own_others if who == "others" else own)).all(dim=1).sum())
    alone = median(taken["alone"])
    return [
        {
            "case": case.name,
            "who": who,
            "seconds": median(times),
            "over_alone": median(times) / alone,
            "equal": equal[who],
        }
        for who, times in taken.items()
    ]


def _model(case: Case) -> Any:
    """Return a random model of ``case``, in eval mode."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    heads = case.hidden // 16 if case.hidden < 512 else 8
    config = CONFIG_MAPPING[case.model_type](
        vocab_size=512, hidden_size=case.hidden, intermediate_size=3 * case.hidden, num_hidden_layers=case.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=case.hidden // heads,
        max_position_embeddings=4096, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False, **FIELDS[case.model_type],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def _prompts(case: Case, seed: int) -> torch.Tensor:
    """Return the prompts of a batch: int64 ``[ROWS, length]``. The common part is the same for every ``seed``."""
    prompts = torch.randint(0, 512, (ROWS, case.length), generator=torch.Generator().manual_seed(seed))
    prompts[:, : case.common] = torch.randint(0, 512, (case.common,), generator=torch.Generator().manual_seed(0))
    return prompts


def _generate(model: Any, prompts: torch.Tensor, answer: int, cache: PagedCache | None) -> tuple[torch.Tensor, float]:
    """Return the new tokens, ``[ROWS, answer]``, and the seconds of CPU time. ``cache``: None for the model's own."""
    own = {} if cache is None else {"cache": cache}
    start = time.process_time()
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=answer, min_new_tokens=answer, do_sample=False,
        pad_token_id=0, **own,
    )  # fmt: skip
    return out[:, prompts.shape[1] :], time.process_time() - start


if __name__ == "__main__":
    tell("paged_cache", QUESTION, measure)
