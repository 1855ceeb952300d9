"""``KVCache.warm_up``: no later step launches what Triton would compile then."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvpagoda import DSV4Config, KVCache, Schema
from kvpagoda.compat import LayerCacheHandle
from kvpagoda.core.kernels import packed_rows, scaled_rows
from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.memory.device_memory import DeviceArrays
from kvpagoda.core.memory.writes import Writes
from kvpagoda.errors import Asleep
from schema.test_layout_choice import LLAMA, V32

append_swa = importlib.import_module("kvpagoda.core.kernels.append_swa")
flatten_table = importlib.import_module("kvpagoda.core.kernels.flatten_table")
KERNELS = [
    (flatten_table, "flatten_table_kernel"), (append_swa, "append_swa_kernel"),
    (packed_rows, "append_rows_kernel"), (packed_rows, "gather_rows_kernel"),
    (scaled_rows, "append_scaled_kernel"), (scaled_rows, "gather_scaled_kernel"),
]  # fmt: skip
SCHEMAS: dict[str, Callable[[], Schema]] = {
    "fp8": lambda: Schema.from_hf_config(LLAMA, kv_format="fp8"),
    "trtllm": lambda: Schema.from_hf_config(LLAMA, kv_format="fp8", layout="trtllm"),
    "int8": lambda: Schema.from_hf_config(LLAMA, kv_format="int8"),
    "float16": lambda: Schema.from_hf_config(LLAMA, kv_format="nvfp4", dtype="float16"),
    "per_token_head": lambda: Schema.from_hf_config(LLAMA, kv_format="fp8_per_token_head"),
    "mla": lambda: Schema.from_hf_config(V32, kv_format="fp8"),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What Triton compiles anew for, of every launch: types, alignment, the numbers 1 and those that 16 divides, constants."""
    pytest.importorskip("triton")
    monkeypatch.setenv(VARIABLE, "triton")
    seen: list[object] = []

    def kind_of(value: Any, is_special: bool) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int):
            return value >= 2**31, is_special and (value == 1, value % 16 == 0)
        return type(value) if isinstance(value, float) else value

    class StandIn:
        def __init__(self, kernel: Any) -> None:
            self.name, self.special = kernel.fn.__name__, [not one.do_not_specialize for one in kernel.params]

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **options: seen.append(
                (self.name, *map(kind_of, args, self.special), tuple(options.items()))
            )

    for module, name in KERNELS:
        monkeypatch.setattr(module, name, StandIn(getattr(module, name)))
    for module in (packed_rows, scaled_rows, append_swa):
        monkeypatch.setattr(module, "LARGE", 10_000)  # reached by the longer of these steps
    return seen


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_step_compiles(name: str, launched: list[object]) -> None:
    schema = SCHEMAS[name]()
    cache = KVCache(schema, num_blocks=64, max_requests=3, device="cpu")
    cache.warm_up()
    warm = list(launched)
    launched.clear()
    sequence = cache.open([0] * 400)
    for count in (1, 3, 200):
        sequence.extend(count)
        batch = cache.batch([sequence], [count])
        for layer in schema.layers:
            view = batch.layer(layer.index)
            assert view.blocks is not None
            rows = {
                row.name: torch.zeros(count, *row.shape, dtype=getattr(torch, row.dtype)) for row in layer.block_rows()
            }
            view.write(**rows)
            for row in rows:
                view.blocks.read(row, (view.block_table[0].long(),))
                view.blocks.read(row, (view.slot_mapping.long() // 16, view.slot_mapping.long() % 16))
        sequence.commit([0] * count)
    assert launched and all(one in warm for one in launched)
    assert len({str(one) for one in launched}) >= (2 if name == "float16" else 4), "few and many"
    cache.close()


def test_no_step_of_compressed_attention_compiles(launched: list[object]) -> None:
    config = DSV4Config((4,), head_dim=64, rope_dim=16, window=8, index_dim=32)
    cache = KVCache(config.schema(), num_blocks=512, max_requests=2, device="cpu")
    cache.warm_up()
    sequence = cache.open([0, 0])
    sequence.extend(1)
    LayerCacheHandle.of(cache.batch([sequence], [1]).layer(0)).warm_up()
    warm = list(launched)
    sequence.commit([0])
    launched.clear()
    for count in (1, 1200):
        sequence.extend(count)
        handle = LayerCacheHandle.of(cache.batch([sequence], [count]).layer(0))
        handle.read_window(torch.zeros(count, 64, dtype=torch.bfloat16))
        handle.write_swa(torch.zeros(count, 64, dtype=torch.bfloat16))
        sequence.commit([0] * count)
    assert {one[0] for one in launched} == {"gather_rows_kernel", "append_swa_kernel"}  # type: ignore[index]
    assert all(one in warm for one in launched)
    cache.close()


@pytest.mark.parametrize("columns", [48, 50])
def test_no_index_array_is_made_by_what_is_compiled_then(columns: int, launched: list[object]) -> None:
    arrays = DeviceArrays(torch.device("cpu"))
    arrays.warm_up(16)
    assert not launched, "host and kernels use the same arrays"
    arrays.is_host, arrays.send = False, launched.append  # type: ignore[method-assign, assignment]
    arrays.warm_up(16)
    assert isinstance(launched.pop(0), Writes), "the way of all arrays of a step"
    warm = list(launched)
    table, row = torch.zeros(3, columns, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    arrays.flatten(table, row[:3], row[:4], 16, row)
    assert len(warm) == 2 and launched[-1] in warm


def test_on_a_cpu_it_does_nothing_and_a_sleeping_cache_refuses() -> None:
    cache = KVCache(SCHEMAS["fp8"](), num_blocks=4, max_requests=1, device="cpu")
    before = [arena.buffer.clone() for arena in cache.core.memory.arenas]  # type: ignore[attr-defined]
    cache.warm_up()
    assert all(map(torch.equal, before, (arena.buffer for arena in cache.core.memory.arenas)))  # type: ignore[attr-defined]
    cache.sleep()
    with pytest.raises(Asleep):
        cache.warm_up()
    cache.wake()
    cache.close()
    KVCache(SCHEMAS["fp8"](), num_blocks=4, max_requests=1, device="none").warm_up()
