"""Checkpoints in fewer bytes: rounded when they are kept, widened when they are used; running states stay as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.test_looking_up import FULL, WINDOW  # noqa: E402

from kvpagoda import Identity, KVCache, Limits, Retention  # noqa: E402
from kvpagoda.errors import BadInput, SchemaError  # noqa: E402
from kvpagoda.schema import Layer, Recurrent, Rows, Schema  # noqa: E402
from kvpagoda.schema.at_rest import FORMATS, rows_at_rest  # noqa: E402
from kvpagoda.tiers import disk_tier, host_tier  # noqa: E402
from raises import raises  # noqa: E402

WIDE = Recurrent(
    (Rows("conv", (6, 3), "bfloat16"), Rows("recurrent", (2, 4, 128), "float32"), Rows("count", (), "int32"))
)
SCHEMA = Schema(tuple(Layer(i, "x", (kind,)) for i, kind in enumerate((FULL, WINDOW, WIDE))), "test")
TEXT = list(range(41))


def cache_of(format: str | None, *, schema: Schema = SCHEMA, device: str = "cpu", **arguments: Any) -> KVCache:
    retention = Retention(checkpoint_format=format, rounds_states=arguments.pop("rounds", False))
    sizes = {} if "budget" in arguments else {"num_blocks": 60}
    poison = device == "cpu"
    return KVCache(
        schema, block_size=4, max_requests=4, device=device, retention=retention, poison=poison, **sizes, **arguments
    )


def state_after(text: list[int]) -> torch.Tensor:
    """Return the state that a text has: random numbers that depend on it."""
    return torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(hash(tuple(text)) % 2**31))


def put(cache: KVCache, sequence: Any, n: int) -> None:
    """Compute the next ``n`` tokens of TEXT: the state is the old one plus what the tokens add."""
    sequence.extend(n)
    view, end = cache.batch([sequence], [n]).layer(2), sequence.length + n
    row = int(view.state_indices[0])
    view["recurrent"][row] = view["recurrent"][row] * (sequence.length > 0) + state_after(TEXT[sequence.length : end])
    view["conv"][row], view["count"][row] = end, end
    sequence.commit(TEXT[sequence.length : end])


def compute(cache: KVCache, sequence: Any, end: int = 41, chunk: int = 41) -> torch.Tensor:
    while sequence.length < end:
        put(cache, sequence, min(chunk, end - sequence.length, cache.step_limit(sequence)))
    view = cache.batch([sequence], [0 + 1]).layer(2) if sequence.capacity > sequence.length else None
    return state_of(cache, sequence) if view is None else view["recurrent"][int(view.state_indices[0]), 0].clone()


def state_of(cache: KVCache, sequence: Any) -> torch.Tensor:
    row = int(cache.core.states.rows(np.array([sequence.slot]), np.array([sequence.length]))[0])
    return cache.layer(2)["recurrent"][row, 0].clone()


def error_of(format: str | None, found: torch.Tensor, exact: torch.Tensor) -> float:
    least = {None: 0.0, "bfloat16": 2**-8, "int8": 1 / 127}[format]
    scale = exact.abs() if format == "bfloat16" else exact.abs().amax(-1, keepdim=True)
    assert ((found - exact).abs() <= least * scale + 1e-30).all()
    return float((found - exact).abs().max())


@pytest.mark.parametrize("sizes", [{}, {"budget": "128KiB"}], ids=["apart", "one memory"])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_a_checkpoint_is_rounded_and_the_running_state_is_not(format: str | None, sizes: dict[str, Any]) -> None:
    cache, exact = cache_of(format, **sizes), cache_of(None)
    with cache.open(TEXT, capacity=0, checkpoints=[8]) as one, exact.open(TEXT, capacity=0, checkpoints=[8]) as other:
        assert torch.equal(compute(cache, one), compute(exact, other))
    cache.check()
    with cache.open([*TEXT[:8], 99, 98]) as one, exact.open([*TEXT[:8], 99, 98]) as other:
        assert one.cached_tokens == other.cached_tokens == 8
        error = error_of(format, state_of(cache, one), state_of(exact, other))
        assert (error > 0) == (format is not None)
        row = int(cache.batch([one], [1]).state_indices[0])
        assert cache.layer(2)["count"][row].item() == 8 and (cache.layer(2)["conv"][row] == 8).all()
        fork = one.fork()
        assert torch.equal(state_of(cache, fork), state_of(cache, one))
        before = state_of(cache, one)
        one.suspend()
        assert one.resume() == 0 and torch.equal(state_of(cache, one), before)
        fork.close()
        cache.check()
    cache.check()


def test_bytes_of_the_plan_and_what_stays_as_it_is() -> None:
    exact, half, quarter = (SCHEMA.plan(num_blocks=60, checkpoint_format=format) for format in (None, *FORMATS))
    assert [one.name for one in exact.groups] == ["full", "window(10)", "state"] and exact.checkpoint_format is None
    assert [one.name for one in half.groups] == ["full", "window(10)", "state", "checkpoint"]
    assert half.groups[2].layout == quarter.groups[2].layout == exact.groups[2].layout
    wide, rest = exact.groups[2].layout.nbytes, 36 + 4
    assert half.groups[3].layout.payload_nbytes == 2 * 4 * 128 * 2 + rest
    assert quarter.groups[3].layout.payload_nbytes == 2 * 4 * (128 + 4) + rest
    assert half.to_dict()["state_bytes_per_request"] == exact.to_dict()["state_bytes_per_request"] == wide
    assert rows_at_rest(Rows("conv", (6, 3), "float32"), "int8").dtype == "bfloat16"
    without = replace(SCHEMA, layers=SCHEMA.layers[:2])
    assert without.plan(num_blocks=60, checkpoint_format="int8") == without.plan(num_blocks=60)
    small = Schema((Layer(0, "x", (Recurrent((Rows("conv", (6, 3), "bfloat16"),)),)),), "test")
    assert small.plan(num_blocks=60, checkpoint_format="bfloat16").checkpoint_format is None


@pytest.mark.parametrize("format", FORMATS)
def test_more_checkpoints_fit(format: str) -> None:
    def kept(format: str | None) -> int:
        cache = cache_of(format, device="none", budget="4MiB")
        for first in range(100, 80000, 100):
            text = list(range(first, first + 17))
            with cache.open(text, capacity=0) as sequence:
                while sequence.length < 17:
                    n = min(17 - sequence.length, cache.step_limit(sequence))
                    sequence.extend(n)
                    sequence.commit(text[sequence.length : sequence.length + n])
        cache.check()
        return cache.stats().checkpoints

    assert kept(format) > kept(None)


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_that_leaves_states_in_full_bytes(format: str) -> None:
    cache = cache_of(format, limits=Limits(step_checkpoints=4))
    with cache.open(TEXT, checkpoints=[8, 20]) as sequence:
        batch = cache.batch([sequence], [41])
        places = batch.checkpoints.places.tolist()
        for at, place in zip(sequence.step_checkpoints, places):
            cache.layer(2)["recurrent"][place] = state_after(TEXT[:at])
        free = cache.stats().groups[2].free
        sequence.commit(TEXT, sequence.step_checkpoints)
        cache.check()
        assert cache.stats().groups[2].free == free + len(places) and cache.stats().checkpoints == len(places)
    with cache.open([*TEXT[:20], 99]) as sequence:
        assert sequence.cached_tokens == 20
        error_of(format, state_of(cache, sequence), state_after(TEXT[:20]))
    cache.check()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("format", FORMATS)
def test_tiers_keep_what_is_rounded_and_another_format_is_a_miss(format: str, tier: str, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    spec = host_tier("1MiB", write="commit") if tier == "host" else disk_tier(tmp_path, "1MiB", write="commit")
    cache = cache_of(format, tiers=[spec], identity=Identity("w"))
    with cache.open(TEXT, capacity=0, checkpoints=[8]) as sequence:
        compute(cache, sequence)
    with cache.open([*TEXT[:8], 99]) as sequence:
        kept = state_of(cache, sequence)
    assert cache.flush()
    cache.core.capacity.forget(cache.core.prefix.clear)
    with cache.open([*TEXT[:8], 99]) as sequence:
        assert sequence.match.loaded == 8 and torch.equal(state_of(cache, sequence), kept)
        cache.check()
    cache.check()
    cache.close()
    if tier == "disk":
        other = cache_of(FORMATS[format == "bfloat16"], tiers=[disk_tier(tmp_path, "1MiB")], identity=Identity("w"))
        assert other.open([*TEXT[:8], 99]).match.loaded == 0
        other.close()


@pytest.mark.parametrize("format", FORMATS)
def test_warm_equals_cold_where_the_cold_run_rounds_too(format: str) -> None:
    def states(rounds: bool) -> tuple[torch.Tensor, torch.Tensor]:
        cache = cache_of(format, rounds=rounds, limits=Limits(hit_grid=8))
        with cache.open(TEXT, capacity=0) as sequence:
            cold = compute(cache, sequence, 41, 8)
        with cache.open(TEXT, capacity=0) as sequence:
            assert sequence.cached_tokens == 40
            warm = compute(cache, sequence, 41, 8)
        cache.check()
        return cold, warm

    cold, warm = states(True)
    assert torch.equal(cold, warm)
    cold, warm = states(False)
    assert not torch.equal(cold, warm)


def test_steps_end_on_the_grid_where_states_are_rounded() -> None:
    cache = cache_of("bfloat16", rounds=True, limits=Limits(hit_grid=8, step_checkpoints=4))
    sequence = cache.open(TEXT, capacity=0)
    assert cache.step_limit(sequence) == 8
    put(cache, sequence, 5)
    assert cache.step_limit(sequence) == 3


def test_options_that_mean_nothing_are_refused() -> None:
    for wrong in ("float8", "raw", 8, b"int8", ["int8"]):
        with raises(SchemaError, needed=wrong, available=("bfloat16", "int8")):
            Retention(checkpoint_format=wrong)  # type: ignore[arg-type]
    with raises(BadInput, needed="checkpoint_format"):
        Retention(rounds_states=True)
    with raises(BadInput, needed="hit_grid", available=1):
        cache_of("int8", rounds=True)
