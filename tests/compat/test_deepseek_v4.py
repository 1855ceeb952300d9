"""The DeepSeek-V4 preset: schedules, the shape of every layer, bytes a token, and the block budget."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from kvpagoda.compat import deepseek_v4
from kvpagoda.compat.deepseek_v4 import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    FP8_UE8M0,
    AttentionType,
    DSV4Config,
    FFNType,
    RouterMode,
    build_schedule,
    build_schema,
    compute_block_budget,
    most_blocks,
)
from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.schema import NVFP4, RAW, Compressed, Encoding, IndexKeys
from raises import raises

CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA
MODELS = [DSV4Config.pro(), DSV4Config.flash()]


def layers(config: DSV4Config) -> str:
    return "".join(spec.attn.name[0] for spec in build_schedule(config))


def test_flash_schedule() -> None:
    schedule = build_schedule(DSV4Config.flash())
    assert [spec.layer_idx for spec in schedule] == list(range(43))
    assert layers(DSV4Config.flash()) == "SS" + "CH" * 20 + "C"
    assert [layers(DSV4Config.flash()).count(letter) for letter in "SCH"] == [2, 21, 20]


def test_pro_schedule() -> None:
    assert DSV4Config.pro().num_layers == len(build_schedule(DSV4Config.pro())) == 61
    assert layers(DSV4Config.pro()) == "HH" + "CH" * 29 + "C"
    assert [layers(DSV4Config.pro()).count(letter) for letter in "SCH"] == [0, 30, 31]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.name)
def test_the_first_three_layers_route_by_hash(config: DSV4Config) -> None:
    schedule = build_schedule(config)
    assert {spec.ffn for spec in schedule} == {FFNType.MOE}
    assert [spec.router_mode for spec in schedule[:4]] == [RouterMode.HASH] * 3 + [RouterMode.DENSE]
    assert {spec.router_mode for spec in schedule[3:]} == {RouterMode.DENSE}
    with pytest.raises(FrozenInstanceError):
        schedule[0].layer_idx = 7  # type: ignore[misc]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.name)
def test_layer_shapes(config: DSV4Config) -> None:
    assert (config.head_dim, config.rope_dim, config.window) == (512, 64, 128)
    assert (config.csa_ratio, config.hca_ratio, config.index_heads, config.index_dim) == (4, 128, 64, 128)
    assert config.index_topk == (1024 if config.name.endswith("pro") else 512)
    assert BLOCK_SIZE_ORIGINAL_TOKENS == deepseek_v4.BLOCK_SIZE_ORIGINAL_TOKENS == 128
    expected = {CSA: (32, 32, 3, 4, 3, 4, 128), HCA: (1, 0, 127, 0, 0, 0, 0), SWA: (0,) * 7}
    for spec in build_schedule(config):
        schema = build_schema(config, spec)
        assert schema.BLOCK_SIZE_ORIGINAL_TOKENS == 128
        assert (
            schema.entries_per_block,
            schema.indexer_entries_per_block,
            schema.tail_buffer_size,
            schema.overlap_size,
            schema.indexer_tail_buffer_size,
            schema.indexer_overlap_size,
            schema.indexer_dim,
        ) == expected[spec.attn]
        assert (schema.layer_idx, schema.attn) == (spec.layer_idx, spec.attn)
        assert (schema.swa_window_size, schema.entry_head_dim) == (128, config.head_dim)


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.name)
def test_counts_are_those_of_the_records(config: DSV4Config) -> None:
    """What ``LayerSchema`` says is what its two records really hold."""
    for spec in build_schedule(config)[:4]:
        schema = build_schema(config, spec)
        block = {place.field.name: place.field for place in schema.block_layout().places}
        state = {place.field.name: place.field for place in schema.state_layout().places}
        for field, count in (
            ("entries_fp8", schema.entries_per_block),
            ("indexer_keys_fp4", schema.indexer_entries_per_block),
        ):
            assert (block[field].count if field in block else 0) == count
        for field, count in (
            ("tail_ka", schema.tail_buffer_size),
            ("tail_zb", schema.tail_buffer_size if spec.attn is CSA else 0),
            ("overlap_k", schema.overlap_size),
            ("idx_tail_kb", schema.indexer_tail_buffer_size),
            ("idx_overlap_z", schema.indexer_overlap_size),
            ("swa_pos", schema.swa_window_size),
        ):
            assert (state[field].count if field in state else 0) == count


def test_a_closing_csa_window_pools_over_eight_rows() -> None:
    """3 pending rows and the closing token are 4; the other 4 are the window before: a tail of 3 rows would lose them."""
    config = DSV4Config.flash()
    schema = build_schema(config, build_schedule(config)[2])
    assert schema.tail_buffer_size + 1 + schema.overlap_size == 2 * config.csa_ratio


@pytest.mark.parametrize(
    ("config", "encoding", "index_encoding", "per_token"),
    [
        (DSV4Config.pro(), FP8_UE8M0, None, 5031.4375),
        (DSV4Config.flash(), FP8_UE8M0, None, 3514.25),
        (DSV4Config.pro(), None, NVFP4, 5030.46875),
        (DSV4Config.flash(), None, NVFP4, 3513.625),
        (DSV4Config.pro(), RAW, RAW, 9848.0),
        (DSV4Config.flash(), RAW, RAW, 6880.0),
    ],
)
def test_bytes_per_token(
    config: DSV4Config, encoding: Encoding | None, index_encoding: Encoding | None, per_token: float
) -> None:
    schema = config.schema(encoding=encoding, index_encoding=index_encoding)
    assert schema.bytes_per_token == per_token
    assert (schema.name, schema.block_size(), schema.max_positions) == (config.name, 128, 1_048_576)


def test_encodings_are_chosen_at_either_end() -> None:
    early = DSV4Config.flash(encoding=FP8_UE8M0, index_encoding=NVFP4)
    late = DSV4Config.flash().schema(encoding=FP8_UE8M0, index_encoding=NVFP4)
    assert early.schema().fingerprint == late.fingerprint != DSV4Config.flash().schema().fingerprint


def test_state_of_one_request() -> None:
    """Per request: 128 rows of 584 bytes in every layer; HCA tails of 127 rows dominate (20 480 bytes a CSA overlap)."""
    places = DSV4Config.pro().schema(encoding=FP8_UE8M0).state_layout.places
    nbytes = {
        part: sum(p.nbytes for p in places if p.field.name.startswith(part))
        for part in ("swa_fp8", "swa_rope", "swa_s")
    }
    assert sum(nbytes.values()) == 61 * 128 * 584
    overlap = sum(p.nbytes for p in places if "overlap" in p.field.name)
    assert overlap == 30 * (2 * 4 * 512 * 4 + 2 * 4 * 128 * 4) == 30 * 20_480
    assert sum(p.nbytes for p in places if p.field.name.startswith("tail_") and p.layer == 0) == 127 * 2 * 512 * 4


def test_kept_follows_rope_dim() -> None:
    config = replace(DSV4Config.flash(), head_dim=24, rope_dim=8)
    assert config.encoding == Encoding("fp8", kept=8)
    kind = build_schema(config, build_schedule(config)[2]).kind
    assert kind == Compressed(24, 128, "bfloat16", 4, IndexKeys(128, config.index_encoding), config.encoding)


@pytest.mark.parametrize(
    "change",
    [
        {"csa_ratio": 3},
        {"csa_ratio": 128},
        {"csa_ratio": 1},
        {"hca_ratio": 256},
        {"compress_ratios": ()},
        {"compress_ratios": (0, 4, 7)},
        {"rope_dim": 512},
        {"rope_dim": 0},
        {"window": 0},
    ],
)
def test_absurd_configs_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(SchemaError):
        replace(DSV4Config.flash(), **change)  # type: ignore[arg-type]


# -- the budget ------------------------------------------------------------------------------------------------------


def test_block_budget_of_pro() -> None:
    config = DSV4Config.pro()
    budget = compute_block_budget(config, build_schedule(config), 1_000_000, 16)
    assert budget["csa"] > budget["hca"]
    assert (budget["csa"], budget["hca"]) == (7828, 7813)
    assert budget["csa_bytes"] == 30 * 7828 * 32 * (580 + 68)
    assert budget["hca_bytes"] == 31 * 7813 * 580
    assert budget["state_bytes"] % 16 == 0


def divide(total: int, parts: int, rng: random.Random) -> list[int]:
    """``total`` as ``parts`` numbers of at least 0, some of them small."""
    cuts = sorted(rng.choice([rng.randint(0, total), rng.randint(0, min(total, 300))]) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


@pytest.mark.parametrize("ratio", [4, 128])
def test_budget_is_enough_for_every_division_and_tight(ratio: int) -> None:
    """Brute force over divisions of the tokens; a block is taken when its first entry is written."""
    rng = random.Random(1)
    for _ in range(300):
        tokens, requests = rng.randint(1, 3000), rng.randint(1, 6)
        most = most_blocks(ratio, tokens, requests)
        per_block = 128 // ratio
        used = [sum(-(-(length // ratio) // per_block) for length in divide(tokens, requests, rng)) for _ in range(20)]
        assert max(used) <= most
        first = [ratio] * (min(requests, tokens // ratio) - 1) if tokens >= ratio else []
        worst = [*first, tokens - sum(first)]
        taken = sum(-(-(length // ratio) // per_block) for length in worst)
        assert taken == most or most == -(-tokens // 128) == taken + 1


@pytest.mark.parametrize(("tokens", "requests"), [(0, 1), (-1, 1), (1, 0), (1.5, 1), (True, 1), (1, "2")])
def test_budget_refuses_nonsense(tokens: object, requests: object) -> None:
    config = DSV4Config.flash()
    wrong, field = (tokens, "max_tokens") if requests == 1 else (requests, "max_requests")
    with raises(BadInput, field=field, needed=wrong, available=1):
        compute_block_budget(config, build_schedule(config), tokens, requests)  # type: ignore[arg-type]


def test_the_preset_needs_no_torch() -> None:
    code = "import sys, kvpagoda.compat.deepseek_v4; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("width", [0, 1, 4, 5, 130])
def test_rings_grow_by_the_verify_width_and_nothing_else_does(width: int) -> None:
    """Overlap rings by whole windows: as many as ``width`` tokens can close, and one more."""
    plain = DSV4Config.flash().schema()
    deep = plain.rewindable(width)
    assert [group.block_layout(128) for group in deep.groups] == [group.block_layout(128) for group in plain.groups]
    assert (deep.state_layout == plain.state_layout) == (deep.fingerprint == plain.fingerprint) == (width == 0)
    counts = {place.field.name: place.field.count for place in deep.state_layout.places if place.layer == 2}
    assert (counts["swa_fp8"], counts["swa_pos"], counts["swa_head"]) == (128 + width, 128 + width, 1)
    assert counts["tail_ka"] == counts["idx_tail_zb"] == 3 + width
    assert counts["overlap_k"] == counts["idx_overlap_z"] == {0: 4, 1: 8, 4: 8, 5: 12, 130: 136}[width]
    assert [rows.count for rows in deep.layers[3].state_rows() if rows.name == "tail_ka"] == [127 + width]
    assert deep.plan("8GiB", 4).rewinds == tuple((layer.index, layer.label, width) for layer in deep.layers)
