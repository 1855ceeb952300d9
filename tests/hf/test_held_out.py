"""The model that is shipped speaks, and what each form of the cache costs it is bounded."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from unittest.mock import ANY

from json_schema import schema_of, violations
from kvpagoda.errors import SchemaError
from kvpagoda.formats.encoding import RAW
from kvpagoda.hf import calibrated_scales
from kvpagoda.hf.embedded import (
    FOLDER,
    NUM_PROMPTS,
    PROMPT_BYTES,
    ByteTokenizer,
    built_in_prompts,
    embedded_model,
    held_out_text,
)
from kvpagoda.hf.generator import Generator
from kvpagoda.hf.held_out import Cost, format_cost, logits_and_bits
from kvpagoda.hf.sampling import Sampling
from kvpagoda.schema import Schema
from kvpagoda.schema.kv_format import KV_FORMATS
from models import tiny_model
from raises import raises

ROOT = Path(__file__).parents[2]
TEXT = held_out_text()[:768]
MOST = {"fp8": 0.01, "int8": 0.01, "nvfp4": 0.02, "mxfp4": 0.02}
"""Bits for each byte that a form may cost, on a text so short that rounding may help as well."""


@cache
def model() -> Any:
    return embedded_model()


@cache
def raw() -> Cost:
    return Cost.of(model(), "raw", TEXT)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_has_a_million_parameters_and_all_kinds_of_layers() -> None:
    assert 1e6 < sum(p.numel() for p in model().parameters()) < 1.5e6
    assert len({*model().config.layer_types}) == 3
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1.3e6, "the largest part of the wheel"


def test_the_prompts_have_nothing_in_common() -> None:
    prompts = built_in_prompts()
    assert len(prompts) == NUM_PROMPTS and all(PROMPT_BYTES - 20 < len(text) <= PROMPT_BYTES for text in prompts)
    assert all(text in held_out_text().decode() and text.endswith(" ") for text in prompts)
    assert len({text[:20] for text in prompts}) == NUM_PROMPTS


def test_it_predicts_text_that_it_was_not_trained_on() -> None:
    with torch.no_grad():
        ids = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()[None]
        logits = model()(input_ids=ids, use_cache=False).logits[0, :-1]
        whole = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item() / torch.log(torch.tensor(2.0)).item()
    assert raw().bits_per_byte == pytest.approx(whole, abs=1e-4), "the cache changes nothing"
    assert whole < 3.0, "8 bits without a model"


def test_it_measures_models_with_heads_too() -> None:
    """Across steps and pieces: the second piece is read without the first. A window has no room for a whole piece."""
    net, text = tiny_model("gemma3_text", vocab_size=256), held_out_text()[:1300]
    logits, bits = logits_and_bits(net, Schema.from_hf_config(net.config, dtype="float32"), text)
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None].split(1024, dim=1)
    with torch.no_grad():
        whole = [net(input_ids=piece).logits[0] for piece in pieces]
    torch.testing.assert_close(logits, torch.cat(whole), rtol=0, atol=1e-3)
    loss = sum(
        torch.nn.functional.cross_entropy(found[:-1], piece[0, 1:], reduction="sum").item()
        for found, piece in zip(whole, pieces)
    )
    assert bits == pytest.approx(loss / 1298 / math.log(2), abs=1e-3)


def test_scales_are_calibrated_on_texts_longer_than_a_window_has_room_for() -> None:
    net = tiny_model("gemma3_text", vocab_size=256)
    ids = np.frombuffer(held_out_text()[:1024], np.uint8)
    scales = calibrated_scales(net, [ids], step=128)
    assert sorted(scales) == list(range(net.config.num_hidden_layers)) and all(
        k > 0 and v > 0 for k, v in scales.values()
    )


@pytest.mark.parametrize("kv_format", MOST)
def test_what_a_form_of_the_cache_costs_is_bounded(kv_format: str) -> None:
    cost = format_cost(model(), kv_format, TEXT, raw())
    assert violations(cost.to_dict(), schema_of("generate")["properties"]["format_cost"]) == []
    assert -0.02 < cost.lost_bits_per_byte < MOST[kv_format] and cost.lost_bits_per_byte, "not the raw rows"
    assert cost.saved > 0.65 and cost.packed.bytes_per_request < cost.raw.bytes_per_request
    assert f"{cost.lost_bits_per_byte:+.4f}" in str(cost)


def test_every_form_has_a_bound() -> None:
    assert {*MOST} == {name for name, form in KV_FORMATS.items() if form.entries != RAW}
    with raises(SchemaError, needed="fp3", available=ANY):
        format_cost(model(), "fp3", TEXT)


def test_it_writes_words() -> None:
    """Most of its words are words of the documents, though it knows bytes alone."""
    prompts = [
        ByteTokenizer().encode(text)
        for text in ("The cache keeps what a request leaves behind, so that ", "The function ", "If the ")
    ]
    outputs = Generator(model(), "8MiB", max_requests=3).generate(prompts, 60, sampling=Sampling(0.3, seed=1))
    text = "\n".join(ByteTokenizer().decode(output).rpartition(" ")[0] for output in outputs)
    known = (
        " ".join(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))) + held_out_text().decode()
    )
    found = [word in re.findall("[a-z]+", known.lower()) for word in re.findall("[a-z]+", text.lower())]
    assert text.isascii() and len(found) >= 10 and sum(found) > 0.7 * len(found), text
