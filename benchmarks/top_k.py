"""Where the error of quantised rows comes from in a model that selects tokens: DeepSeek-V3.2 beside DeepSeek-V3.

Models are random, in float32, without experts, and with rows of the real sizes. A text of ``tokens`` tokens is computed
with raw rows and with quantised ones:

    quantised      which rows are quantised: latents, the keys of the indexer, or both
    selection      own: each layer reads the tokens that its indexer selects; held: those that it selects with raw rows
    rms_error      root mean square of the difference of all logits; ``spread``: standard deviation of the raw logits
    other_percent  how many of the selected tokens its indexer would not select with raw rows
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.timing import Options, Row, tell
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.hf.runner import ModelRunner
from kvpagoda.schema import Latent, Schema

QUESTION = "Quantised rows where an indexer selects tokens: what part of the error is other tokens?"
VOCAB = 512
EXPERTS = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, num_experts_per_tok=2)
FIELDS: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64,
    v_head_dim=32, first_k_dense_replace=4, max_position_embeddings=4096, initializer_range=0.1, bos_token_id=None,
    eos_token_id=None, pad_token_id=None, tie_word_embeddings=False, **EXPERTS,
)  # fmt: skip
Selection = list[torch.Tensor]
"""For each layer, the tokens that each query reads: int ``[tokens, index_topk]``."""


class Case(NamedTuple):
    """``index_topk``: how many tokens a query reads; 0: a DeepSeek-V3, which reads all."""

    kv_format: str
    tokens: int
    index_topk: int

    @property
    def name(self) -> str:
        model = f"DeepSeek-V3.2, {self.index_topk} selected" if self.index_topk else "DeepSeek-V3"
        return f"{model} of {self.tokens} tokens, {self.kv_format}"


CASES = (
    *(Case("fp8", 256, top) for top in (0, 16, 64, 256)),
    *(Case("fp8", length, 64) for length in (128, 512)),
    *(Case(name, 256, top) for name in ("int8", "nvfp4") for top in (0, 64)),
)
WAYS = (
    (("latents", "keys"), "own"), (("latents", "keys"), "held"), (("latents",), "own"), (("keys",), "own"),
    (("keys",), "held"),
)  # fmt: skip
"""(rows that are quantised, which selection is read)."""


def measure(options: Options) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [case._replace(tokens=48, index_topk=min(case.index_topk, 8)) for case in CASES[:2] if options.quick]
        cases = cases or [case for case in CASES if options.only in case.name]
        return [row for case in cases for row in rows_of(case)]
    finally:
        torch.set_num_threads(threads)


def rows_of(case: Case) -> list[Row]:
    """Return a row for each of ``WAYS``; for a DeepSeek-V3, one."""
    model = model_of(case.index_topk)
    text = np.random.default_rng(1).integers(0, VOCAB, case.tokens).astype(np.int32)
    raw, own = run(model, schema_of(model, "raw", ()), text)
    rows = []
    for quantised, selection in WAYS if case.index_topk else [(("latents",), "all")]:
        schema = schema_of(model, case.kv_format, quantised)
        logits, selected = run(model, schema, text, own if selection == "held" else None)
        row = {
            "case": case.name,
            "quantised": " and ".join(quantised),
            "selection": selection,
            "rms_error": float((logits - raw).square().mean().sqrt()),
            "spread": float(raw.std()),
        }
        rows.append({**row, "other_percent": 100 * other(selected, own)} if own else row)
    return rows


def model_of(index_topk: int, **changes: Any) -> Any:
    """Return a random DeepSeek-V3.2 in eval mode, or a DeepSeek-V3 if ``index_topk`` is 0. ``changes``: of its
    config."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    indexer = dict(index_topk=index_topk, index_head_dim=128, index_n_heads=32) if index_topk else {}
    config = CONFIG_MAPPING["deepseek_v32" if index_topk else "deepseek_v3"](**{**FIELDS, **indexer, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def schema_of(model: Any, kv_format: str, quantised: tuple[str, ...]) -> Schema:
    """Return the schema of ``model`` in which only the ``quantised`` rows, "latents" or "keys", have ``kv_format``."""
    packed, raw = (Schema.from_hf_config(model.config, dtype="float32", kv_format=name) for name in (kv_format, "raw"))
    layers = []
    for layer, plain in zip(packed.layers, raw.layers):
        (kind,), (plain_kind,) = layer.kinds, plain.kinds
        assert isinstance(kind, Latent) and isinstance(plain_kind, Latent)
        if "latents" not in quantised:
            kind = replace(kind, encoding=plain_kind.encoding)
        if "keys" not in quantised:
            kind = replace(kind, indexer=plain_kind.indexer)
        layers.append(replace(layer, kinds=(kind,)))
    return replace(packed, layers=tuple(layers))


@torch.no_grad()
def run(model: Any, schema: Schema, text: np.ndarray, held: Selection | None = None) -> tuple[torch.Tensor, Selection]:
    """Compute ``text`` in one step over a cache of ``schema``. Return the logits ``[tokens, vocab]`` and what the
    indexers selected. ``held``: what the layers read in place of it."""
    selected: Selection = []
    indexers = [layer.self_attn.indexer for layer in model.model.layers if hasattr(layer.self_attn, "indexer")]

    def replaced(module: Any, given: Any, found: torch.Tensor) -> torch.Tensor:
        selected.append(found[0])
        return found if held is None else held[len(selected) - 1][None]

    hooks = [indexer.register_forward_hook(replaced) for indexer in indexers]
    cache = KVCache(schema, num_blocks=len(text) // schema.block_size() + 2, max_requests=1)
    try:
        with cache.open(text, lookup=False) as sequence:
            logits = ModelRunner(model, cache).step([(sequence, text)], [len(text)])
            sequence.commit(text)
    finally:
        cache.close()
        for hook in hooks:
            hook.remove()
    return logits, selected


def other(selected: Selection, raw: Selection) -> float:
    """Return the share of the selected tokens that are not in ``raw``; a query selects among itself and earlier
    tokens."""
    found = torch.stack([_mask(tokens) for tokens in selected])
    return float((found & ~torch.stack([_mask(tokens) for tokens in raw])).sum() / found.sum())


def _mask(tokens: torch.Tensor) -> torch.Tensor:
    """Return bool ``[queries, tokens]``: which earlier tokens each query of ``tokens`` ``[queries, k]`` selects."""
    count = len(tokens)
    return torch.zeros(count, count).scatter_(1, tokens.long(), 1).tril().bool()


if __name__ == "__main__":
    tell("top_k", QUESTION, measure)
