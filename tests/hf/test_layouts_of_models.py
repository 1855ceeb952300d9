"""Greedy tokens do not depend on the layout; with packed rows they are those of a model whose rows are packed and unpacked."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvpagoda.core.memory.pool import Pool  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.cache_name import cache_name_of  # noqa: E402
from kvpagoda.layouts import pack, unpack  # noqa: E402
from kvpagoda.schema import Schema  # noqa: E402
from models import tiny_model  # noqa: E402

PROMPTS = [torch.arange(n).mul(7).add(n).remainder(90).add(3).tolist() for n in (1, 9, 17, 33)]
WIDE = dict(kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=2)
"""Latents as wide as packed rows hold."""

ATTENTION = ("trtllm", "vllm-blhnc", "sglang-mha", "transformers", "flashinfer-gqa-nhd")
LATENT = ("flashinfer-mla", "kvpagoda-mla")
STATES = (["gdn-state-kv"], ["gdn-state-vk", "vllm-gdn-conv-sd"])
LEGAL: list[tuple[str, Any]] = [
    *(("llama", name) for name in ATTENTION), *(("deepseek_v3", name) for name in LATENT), ("deepseek_v32", LATENT[0]),
    *(("qwen3_next", [*names, "trtllm"]) for names in STATES), ("kimi_linear", ["gdn-state-kv", "sglang-kda-conv"]),
    ("gemma3_text", "vllm-cross-layer-hnd"), ("gpt_oss", "trtllm"), ("llama4_text", "vllm-lbnhc"),
    ("bamba", ["mamba2-state", "vllm-mamba2-conv-sd", "transformers"]), ("gemma3n_text", "trtllm"),
]  # fmt: skip


def tokens(model: Any, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[list[int]]:
    generator = Generator(model, num_blocks=60, max_requests=4, prefill_chunk=7, poison=True, **arguments)
    monkeypatch.setattr(generator, "_ends", frozenset())
    return generator.generate(PROMPTS, 5)


QUICK = {"deepseek_v3", "kimi_linear"}


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in LEGAL],
)
def test_tokens_are_the_same_in_every_layout(family: str, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    assert tokens(model, monkeypatch, layout=layout) == tokens(model, monkeypatch)


def test_layer_major_and_kernel_pages_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3_text")
    plain = tokens(model, monkeypatch)
    assert tokens(model, monkeypatch, layout="trtllm", order="layer") == plain
    assert tokens(model, monkeypatch, layout="trtllm", block_size=16, kernel_page=4) == plain
    model = tiny_model("deepseek_v4")
    plain = tokens(model, monkeypatch)
    assert tokens(model, monkeypatch, block_size=32, kernel_page=8) == plain


class RoundTrip(DynamicCache):
    """transformers' own cache, into which rows go as they read back from packed pages of one row."""

    formats: tuple[str, str]

    def update(self, key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(*self.round_trip(key, value), layer, *args, **kwargs)

    def round_trip(self, key: Any, value: Any) -> tuple[Any, Any]:
        """``[B, H, S, D]`` each."""
        (name, dialect), width = self.formats, key.shape[-1]
        if name.startswith("gqa"):
            rows = torch.stack((key, value), 1).permute(0, 3, 1, 2, 4).flatten(2)
        else:
            rows = torch.cat((key, value), dim=-1)[:, 0]
        pages = rows.flatten(0, 1)[:, None].to(torch.bfloat16)
        head_dim = width if name.startswith("gqa") else None
        packed = pack(pages, name, page_size=1, dialect=dialect, head_dim=head_dim)
        back = unpack(packed, name, page_size=1, dialect=dialect, head_dim=head_dim).view(rows.shape)
        if name.startswith("gqa"):
            both = back.view(*back.shape[:2], 2, key.shape[1], width).permute(2, 0, 3, 1, 4)
            return both[0], both[1]
        return back[:, None, :, :width], back[:, None, :, width:]


@torch.no_grad()
def with_round_trips(model: Any, prompt: list[int], name: str, dialect: str, new: int) -> list[int]:
    cache, step, found = RoundTrip(config=model.config), prompt, []
    cache.formats = (name, dialect)
    given = {cache_name_of(model): cache}
    for _ in range(new):
        output = model(input_ids=torch.tensor([step]), use_cache=True, **given)
        step = [int(output.logits[0, -1].argmax())]
        found += step
    return found


PACKED = [
    ("deepseek_v3", WIDE, "flashmla-v32", "v32_656", "flashmla"),
    ("deepseek_v3", WIDE, "flashmla-v32:flashinfer_raw", "v32_656", "flashinfer_raw"),
    ("deepseek_v3", WIDE, "vllm-nvfp4-mla", "nvfp4_352", "emulated"),
    ("llama", dict(head_dim=64), "vllm-fp8-head", "gqa_fp8_head", "vllm"),
    ("llama", dict(head_dim=64), "vllm-int8-head", "gqa_int8_head", "vllm"),
]


@pytest.mark.parametrize(
    ("family", "changes", "layout", "name", "dialect"),
    [PACKED[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in PACKED[1:])],
)
def test_tokens_of_packed_rows_are_those_of_rows_packed_and_unpacked(
    family: str, changes: dict[str, Any], layout: str, name: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")
    model = tiny_model(family, **changes)
    assert tokens(model, monkeypatch, layout=layout) == [
        with_round_trips(model, prompt, name, dialect, 5) for prompt in PROMPTS
    ]


def test_packed_entries_and_windows_are_rows_packed_and_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a cache of raw rows, each of which is packed and unpacked before it is kept: the same logits to the bit."""
    from test_compressed import logits, tokens

    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")
    model = tiny_model("deepseek_v4", head_dim=512, partial_rotary_factor=0.125, index_head_dim=128)
    ids, raw = tokens(40, seed=4), Schema.from_hf_config(model.config)
    packed = logits(model, raw.laid_out(["flashmla-dsv4", "deepgemm-indexer-fp4"]), ids)
    formats = {"swa": "dsv4_584", "entries": "dsv4_584", "indexer_keys": "index_68"}

    def round_trip(name: str, values: Any) -> Any:
        if name not in formats or not values.numel():
            return values
        rows = values.reshape(-1, 1, values.shape[-1]).to(torch.bfloat16)
        return unpack(pack(rows, formats[name], page_size=1), formats[name], page_size=1).view(values.shape)

    write = Pool.write
    monkeypatch.setattr(Pool, "write", lambda self, name, at, rows: write(self, name, at, round_trip(name, rows)))
    monkeypatch.setattr(Pool, "stored", lambda self, name, rows: round_trip(name, rows))
    assert torch.equal(packed, logits(model, raw, ids))
