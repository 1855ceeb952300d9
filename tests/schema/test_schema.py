"""Records, groups and plans: arithmetic that the arenas must then agree with."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import BadInput, NeverFits, SchemaError
from kvpagoda.schema import (
    MXFP4,
    NVFP4,
    RAW,
    Attention,
    Compressed,
    Encoding,
    Growth,
    IndexKeys,
    Latent,
    Layer,
    LayerKind,
    Recurrent,
    Rows,
    Schema,
    Shared,
)  # fmt: skip
from kvpagoda.schema.sectors import sector_size
from kvpagoda.units import format_bytes
from raises import raises


def schema_of(*kinds: LayerKind | tuple[LayerKind, ...]) -> Schema:
    layers = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    return Schema(tuple(Layer(i, type(k[0]).__name__, k) for i, k in enumerate(layers)))


FULL = Attention(8, 64, 64, "bfloat16")
WINDOW = Attention(4, 32, 48, "bfloat16", Growth(window=100))
CHUNK = Attention(4, 32, 32, "float16", Growth(chunk=64))
STATE = Recurrent(
    (Rows("conv", (40, 3), "bfloat16", heads=((40, 1),)), Rows("recurrent", (8, 16, 16), "float32", heads=((8, 1),)))
)


def test_growth_laws_say_what_is_still_read() -> None:
    """Against the definition: the token at p reads j <= p that are in its window, or in its chunk."""
    for growth, reads in (
        (Growth(), lambda p, j: True),
        (Growth(window=7), lambda p, j: j > p - 7),
        (Growth(chunk=7), lambda p, j: j // 7 == p // 7),
    ):
        for p in range(40):
            assert growth.first_needed(p) == min(j for j in range(p + 1) if reads(p, j))
            assert growth.reads(p, np.arange(45)).tolist() == [j <= p and reads(p, j) for j in range(45)]


@pytest.mark.parametrize("growth", [Growth(window=7), Growth(window=1), Growth(chunk=9), Growth(window=64)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("step", [1, 5, 33])
def test_most_blocks_is_enough_and_nearly_tight(growth: Growth, block_size: int, step: int) -> None:
    """A request that writes ``step`` tokens at a time holds blocks first_needed(n) // b .. (n + step - 1) // b."""
    starts = range(300)
    held = max(-(-(n + step) // block_size) - growth.first_needed(n) // block_size for n in starts)
    most = growth.most_blocks(block_size, step)
    assert most is not None and held <= most <= held + 1


def test_fields_are_aligned_and_do_not_overlap() -> None:
    schema = schema_of(
        FULL, (CHUNK, STATE), Compressed(96, 8, "bfloat16", 4, IndexKeys(32, MXFP4), Encoding("fp8_ue8m0", 32, 64))
    )
    for layout in (*(group.block_layout(16) for group in schema.groups), schema.state_layout):
        end = 0
        for place in layout.places:
            assert place.offset % 16 == 0 and place.offset >= end
            end = place.offset + place.nbytes
        assert layout.nbytes % 16 == 0 and end <= layout.nbytes < end + 16
        assert layout.payload_nbytes == sum(place.nbytes for place in layout.places)


@pytest.mark.parametrize(
    ("encoding", "dim", "nbytes"),
    [
        (RAW, 512, 1024),
        (Encoding("fp8", kept=64), 512, 448 + 128 + 4),
        (Encoding("fp8_ue8m0", kept=64, group=64), 512, 584),
        (Encoding("fp8", group=128), 512, 512 + 16),
        (Encoding("fp8", group=128), 128, 132),
        (MXFP4, 128, 68),
        (NVFP4, 128, 72),
    ],
)
def test_bytes_of_one_row(encoding: Encoding, dim: int, nbytes: int) -> None:
    assert Rows("row", (dim,), "bfloat16", encoding).row_nbytes == nbytes


@pytest.mark.parametrize("encoding", [Encoding("fp8", kept=512), Encoding("fp8", group=100), Encoding("fp7")])
def test_an_encoding_that_cannot_hold_the_row_says_so(encoding: Encoding) -> None:
    told = {"needed": "fp7"} if encoding.name == "fp7" else {"needed": 512, "field": encoding.name}
    with raises(SchemaError, available=ANY, **told):
        Rows("row", (512,), "bfloat16", encoding).fields(1)


def test_layers_with_one_growth_law_share_blocks() -> None:
    schema = schema_of(WINDOW, FULL, STATE, (FULL, STATE), Shared(0), WINDOW, CHUNK)
    names = [(group.name, [layer.index for layer in group.layers]) for group in schema.groups]
    assert names == [("full", [1, 3]), ("window(100)", [0, 5]), ("chunk(64)", [6])]
    assert schema.bytes_per_token == 2 * 8 * 128 * 2 + 2 * 4 * (32 + 48) * 2 + 4 * 64 * 2
    assert schema.state_layout.payload_nbytes == 2 * (40 * 3 * 2 + 8 * 256 * 4)


def test_compressed_layers_decide_the_block_size() -> None:
    schema = schema_of(Compressed(64, 8, "bfloat16", 4, IndexKeys(16)), Compressed(64, 8, "bfloat16", 128))
    assert schema.block_size() == 128 and schema.block_size(256) == 256
    with raises(BadInput, field="block_size", needed=64, available=128):
        schema.block_size(64)


def test_tensor_parallel_ranks_divide_heads_and_channels_and_replicate_latents() -> None:
    schema = schema_of(FULL, STATE, Latent(512, 64, "bfloat16"))
    part = schema.split(tp=4)
    assert part.layers[0].block_rows()[0].shape == (2, 64) and part.layers[2] == schema.layers[2]
    assert [rows.shape for rows in part.layers[1].state_rows()] == [(10, 3), (2, 16, 16)]
    assert schema_of(FULL).split(tp=16).layers[0].block_rows()[0].shape == (1, 64)  # fewer heads than ranks: replicated
    with raises(SchemaError, field="KV heads", needed=3, available=8):
        schema.split(tp=3)


def test_pipeline_stages_cover_every_layer_once() -> None:
    schema = schema_of(*[FULL] * 7)
    stages = [schema.split(pp=3, rank=rank) for rank in range(3)]
    assert [[layer.index for layer in stage.layers] for stage in stages] == [[0, 1, 2], [3, 4], [5, 6]]
    with raises(BadInput, needed=(1, 3, 3), available=7):
        schema.split(pp=3, rank=3)


def test_a_shared_layer_needs_an_owner_before_it() -> None:
    with raises(SchemaError, needed=1, available=0):
        schema_of(Shared(1), FULL)
    with raises(SchemaError, needed=1, available=0):
        Schema(())
    with raises(SchemaError, needed=1, available=2):
        schema_of((FULL, WINDOW))


def test_fingerprints_tell_layouts_apart() -> None:
    kinds = [FULL, WINDOW, CHUNK, Latent(64, 64, "bfloat16"), Latent(64, 64, "float16"), STATE]
    prints = {schema_of(kind).fingerprint for kind in kinds}
    assert len(prints) == len(kinds) and schema_of(FULL).fingerprint in prints


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_plan_is_what_the_arenas_take_and_nothing_larger_fits(seed: int, shared: bool) -> None:
    rng = np.random.default_rng(seed)
    kinds = [
        [FULL, WINDOW, CHUNK, STATE, Latent(64, 16, "float32", indexer=IndexKeys(32))][i] for i in rng.integers(0, 5, 6)
    ]
    schema, requests = schema_of(*kinds), int(rng.integers(1, 9))
    budget = int(rng.integers(2**20, 2**24))
    plan = schema.plan(
        budget, requests, int(rng.choice([1, 16, 32])), step_tokens=int(rng.integers(1, 200)), shared=shared
    )
    order = None if shared else "layer"
    cache = KVCache(schema, budget, device="cpu", max_requests=requests, block_size=plan.block_size, order=order)
    assert cache.core.memory.nbytes == cache.plan.nbytes <= budget and plan.nbytes <= budget
    growing = [group for group in plan.groups if group.most_blocks is None]
    if growing:
        more = plan.sector_nbytes or sum(group.layout.nbytes for group in plan.groups)
        assert plan.nbytes + more > budget
    for length in (1, 100, 1000):
        fit = plan.requests_at(length)
        assert plan.fits(fit, length) if fit else True
        assert not plan.fits(fit + 1, length)


def test_groups_of_equally_long_requests_fill_together() -> None:
    """A window group gets blocks for what all requests can hold at once, never more; full layers get the rest."""
    plan = schema_of(FULL, WINDOW).plan("64MiB", 4, 16, step_tokens=16, checkpoints=0, shared=False)
    full, window = plan.groups
    assert window.num_blocks == 4 * window.most_blocks < full.num_blocks  # type: ignore[operator]
    assert plan.longest_context == full.num_blocks * 16
    more = schema_of(FULL, WINDOW).plan("64MiB", 4, 16, step_tokens=16, checkpoints=3, shared=False).groups[1]
    assert more.num_blocks == window.num_blocks + 3 * 8  # 100 tokens lie in at most 8 blocks of 16


def test_a_budget_too_small_names_the_bytes_of_one_request() -> None:
    schema = schema_of(FULL, STATE)
    with raises(NeverFits, needed=124560, available=10000) as error:
        schema.plan("10KB", 3, shared=False)
    need = int(str(error.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert need == 2 * 16 * 2048 + (3 + 3 + 1) * schema.state_layout.nbytes  # requests, checkpoints, the dummy
    assert schema.plan(need, 3, shared=False).groups[0].num_blocks == 1
    with raises(NeverFits, needed=98304, available=10000) as error:
        schema.plan("10KB", 3)
    need = int(str(error.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert need == 3 * schema.plan(need, 3).sector_nbytes  # padding, a block, a state
    with pytest.raises(NeverFits):
        schema.plan(need - 1, 3)


@pytest.mark.parametrize("seed", range(20))
def test_sectors_lose_little_to_carving(seed: int) -> None:
    """Whatever the kinds' records are: each kind's records tile a sector, from multiples of 16 bytes, and lose little."""
    rng = np.random.default_rng(seed)
    sizes = tuple((16 * rng.integers(1, 10 ** rng.integers(1, 7, rng.integers(2, 5)))).tolist())
    sector = sector_size(sizes, 64 * max(sizes))
    for size, per in zip(sizes, sector.records):
        assert sector.nbytes % (16 * per) == 0 and sector.nbytes // per >= size
        assert 1 - per * size / sector.nbytes <= (0.02 if max(sizes) > 10_000 else 0.10), sector


def test_offsets_past_two_to_the_31_are_int64() -> None:
    small, large = (schema_of(FULL).plan(size, 4).groups[0].index_dtype for size in ("1GiB", "8GiB"))
    assert (small, large) == ("int32", "int64")


def test_a_model_of_states_alone_has_no_context_limit() -> None:
    plan = schema_of(STATE).plan("1MiB", 8)
    assert plan.longest_context is None and plan.requests_at(10**9) == 8
    assert "not limited by memory" in str(plan)


def test_a_rewind_of_states_costs_a_place_for_each_token_and_nothing_else() -> None:
    """A request has ``verify_width + 1`` states, a checkpoint one; without ``verify_width`` the plan is as it was."""
    schema = schema_of(FULL, STATE)
    plain, deep = (schema.rewindable(width).plan(num_blocks=9, max_requests=3, checkpoints=5) for width in (0, 4))
    states = plain.groups[1].layout.nbytes
    assert [plan.groups[1].num_blocks for plan in (plain, deep)] == [3 + 5, 3 * 5 + 5]
    assert [plan.blocks_wanted(40) for plan in (plain, deep)] == [[3, 1], [3, 5]]
    assert deep.groups[0] == plain.groups[0] and deep.nbytes - plain.nbytes == 3 * 4 * states
    assert [plan.to_dict()["state_bytes_per_request"] for plan in (plain, deep)] == [states, 5 * states]
    more = {*str(deep).splitlines()} - {*str(plain).splitlines()}
    assert [line for line in more if "verify width" in line] == [
        f"verify width         4 tokens: 4 more places for states, {format_bytes(4 * states)} a request"
    ]
    assert "verify width" not in str(plain)
    assert schema.rewindable(4).fingerprint == schema.fingerprint  # checkpoints of both are the same bytes
    assert schema.rewindable(4).rewindable(0) == schema and schema.rewindable(0).plan(num_blocks=9) == schema.plan(
        num_blocks=9
    )


@pytest.mark.parametrize("shared", [True, False])
def test_a_budget_must_hold_all_places_of_the_states(shared: bool) -> None:
    for layers in ((FULL, STATE), (STATE,)):
        schema = schema_of(*layers).rewindable(7)
        with pytest.raises(NeverFits) as refused:
            schema.plan(1, 2, shared=shared)
        needed = refused.value.needed
        assert isinstance(needed, int)
        with pytest.raises(NeverFits):
            schema.plan(needed // 2, 2, shared=shared)
        assert schema.plan(needed, 2, shared=shared).fits(1, 1)


def test_states_that_move_do_not_lie_beside_states_that_are_written_in_place() -> None:
    ring, sinks = Compressed(8, 6, "float32", 4), replace(WINDOW, num_sinks=2)
    for other in (ring, sinks):
        schema = schema_of(FULL, STATE, other)
        assert schema.rewindable(0) == schema
        with raises(SchemaError, needed=3, available=0) as refused:
            schema.rewindable(3)
        assert (refused.value.needed, refused.value.available) == (3, 0)


def test_every_kind_says_how_many_tokens_it_takes_back() -> None:
    ring = Compressed(8, 6, "float32", 4, verify_width=3)
    schema = schema_of(FULL, (WINDOW, STATE), Latent(64, 16, "bfloat16"), ring, STATE, Shared(0))
    assert [layer.rewinds for layer in schema.layers] == [None, 0, None, 3, 0, None]
    assert schema.plan(num_blocks=9).rewinds == ((1, "Attention", 0), (3, "Compressed", 3), (4, "Recurrent", 0))
    assert schema_of(FULL, ring).rewindable(5).layers[1].rewinds == 5
    assert schema.cast("bfloat16").layers[3].rewinds == 3
    states = schema_of(FULL, (WINDOW, STATE), STATE).rewindable(5)
    assert [layer.rewinds for layer in states.layers] == [None, 5, 5]
    for width in (-1, 1.5, True, None):
        with raises(SchemaError, field="verify_width", needed=width, available=0):
            schema.rewindable(width)
