"""K and V with scales: the bytes of their rows, of ranks and of sinks, in every encoding that heads can have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvpagoda import KVCache, Schema  # noqa: E402
from kvpagoda.core.memory.arena import Arena  # noqa: E402
from kvpagoda.core.memory.pool import Pool  # noqa: E402
from kvpagoda.errors import LayoutError, SchemaError  # noqa: E402
from kvpagoda.formats import decode, encode  # noqa: E402
from kvpagoda.layouts import judge, pack  # noqa: E402
from kvpagoda.schema import FULL, MXFP4, NVFP4, Attention, Encoding, Group, Growth, Layer  # noqa: E402
from raises import raises  # noqa: E402

APART = [Encoding("fp8"), Encoding("fp8", group=32), Encoding("int8"), Encoding("int8", group=32), MXFP4, NVFP4]
PACKED = [Encoding(name) for name in ("gqa_fp8_head", "gqa_int8_head", "gqa_int4_group", "gqa_nvfp4")]
every = pytest.mark.parametrize("encoding", [*APART, *PACKED], ids=lambda one: f"{one.name}-{one.group}")
BLOCKS, SIZE = 3, 8


@pytest.fixture(autouse=True)
def the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops take longer to compile than these tests; ``tests/kernels`` compares them with the reference."""
    monkeypatch.setenv("KVPAGODA_KERNELS", "reference")


AT = torch.arange(BLOCKS)[:, None], torch.arange(SIZE)


def pool_of(kind: Attention, order: str = "block", kernel_page: int = SIZE) -> Pool:
    layer = Layer(0, "attention", (kind,))
    layout = Group(FULL, (layer,)).block_layout(SIZE, kernel_page, order)
    return Pool(Arena(layout, BLOCKS, device="cpu", order=order), 0, layer.block_rows())


def heads_of(count: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(BLOCKS, SIZE, count, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


@every
@pytest.mark.parametrize(("order", "kernel_page"), [("block", SIZE), ("layer", SIZE // 2)])
def test_heads_of_different_widths_are_what_the_codec_gives(encoding: Encoding, order: str, kernel_page: int) -> None:
    """As in MiMo-V2: K of 192 elements, V of 128. Bytes of every part, and numbers, are those of the reference."""
    pool = pool_of(Attention(2, 192, 128, "bfloat16", encoding=encoding), order, kernel_page)
    assert [*pool.rows] == ["k", "v"]
    for name, dim in (("k", 192), ("v", 128)):
        values, rows = heads_of(2, dim, dim), pool.rows[name].encoding
        pool.write(name, AT, values)
        assert torch.equal(pool.read(name, AT), decode(rows, encode(rows, values), torch.bfloat16))
        assert torch.equal(pool.read(name, AT), pool.stored(name, values))
        for found, wanted in zip(pool.parts(name), encode(rows, values)):
            assert torch.equal(found.reshape(wanted.shape), wanted)


@every
def test_bytes_of_a_token_are_codes_and_scales(encoding: Encoding) -> None:
    bits = {"mxfp4": 4, "nvfp4": 4, "gqa_int4_group": 4, "gqa_nvfp4": 4}.get(encoding.name, 8)
    per_scale = {"mxfp4": 1, "nvfp4": 1, "gqa_nvfp4": 1}.get(encoding.name, 4)
    for k, v in ((128, 128), (192, 128)):
        schema = Schema((Layer(0, "attention", (Attention(2, k, v, "bfloat16", encoding=encoding),)),))
        groups = [
            1 if encoding.name.endswith("_head") or encoding.group is None else n // encoding.group for n in (k, v)
        ]
        assert schema.bytes_per_token == 2 * ((k + v) * bits // 8 + sum(groups) * per_scale)


@every
@pytest.mark.parametrize("widths", [(128, 128), (192, 128)], ids=str)
def test_a_rank_has_the_codes_and_scales_of_its_heads(encoding: Encoding, widths: tuple[int, int]) -> None:
    """No group straddles two heads, so that a rank's bytes are a part of the whole."""
    kind = Attention(4, *widths, "bfloat16", encoding=encoding)
    whole, given = pool_of(kind), {name: heads_of(4, dim, dim) for name, dim in zip("kv", widths)}
    for name, rows in whole.joined(given).items():
        whole.write(name, AT, rows)
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        pool = pool_of(kind.split(2))
        for name, rows in pool.joined({name: rows[:, :, mine] for name, rows in given.items()}).items():
            pool.write(name, AT, rows)
            for found, wanted in zip(pool.parts(name), whole.parts(name)):
                assert torch.equal(found, wanted[:, :, :, mine] if name == "kv" else wanted[:, :, mine])


@every
def test_sinks_are_encoded_as_the_rows_of_blocks(encoding: Encoding) -> None:
    kind = Attention(2, 128, 128, "bfloat16", Growth(window=10), encoding, num_sinks=3)
    cache = KVCache(Schema((Layer(0, "sinks", (kind,)),)), num_blocks=8, device="cpu", block_size=4)
    sequence = cache.open(range(6))
    batch = cache.batch([sequence], [6])
    view = batch.layer(0)
    given = dict(zip("kv", torch.randn(2, 6, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()))
    view.write(**given)
    slots, slot = view.slot_mapping.long(), batch.state_indices.long().expand(3)
    for name, rows in view.blocks.joined(given).items():
        view.state.write(f"sink_{name}", (slot, torch.arange(3)), rows[:3])
        kept = view.state.read(f"sink_{name}", (slot, torch.arange(3)))
        assert torch.equal(kept, view.blocks.read(name, (slots[:3] // 4, slots[:3] % 4))) and kept.any()


def test_a_head_that_groups_do_not_divide_is_refused_by_name() -> None:
    with raises(LayoutError, needed=80, available=32, rule="size"):
        Attention(2, 80, 80, "bfloat16", encoding=Encoding("gqa_int4_group")).block_rows()
    with raises(LayoutError, needed=72, available=16, rule="size"):
        Attention(2, 128, 72, "bfloat16", encoding=Encoding("gqa_nvfp4")).block_rows()
    with raises(LayoutError, needed=128, available=128, rule="size"):
        Attention(2, 128, 128, "bfloat16", encoding=Encoding("v32_656")).block_rows()
    with raises(SchemaError, field="mxfp4", needed=80, available=32):
        Attention(2, 80, 80, "bfloat16", encoding=MXFP4).block_rows()[0].fields(1)


def test_a_layout_of_one_row_is_refused_for_two_widths() -> None:
    schema = Schema((Layer(0, "attention", (Attention(2, 192, 128, "bfloat16"),)),))
    with raises(SchemaError, needed=192, available=128):
        schema.laid_out("vllm-int8-head")


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("vllm-int8-head", "gqa_int8_head"),
        ("vllm-fp8-head", "gqa_fp8_head"),
        ("vllm-nvfp4", "gqa_nvfp4"),
        ("kvpagoda-int4", "gqa_int4_group"),
    ],
)
def test_a_cache_in_a_named_layout_has_the_pages_of_pack(layout: str, format: str) -> None:
    schema = Schema((Layer(0, "attention", (Attention(2, 128, 128, "bfloat16"),)),)).laid_out(layout)
    cache = KVCache(schema, num_blocks=4, device="cpu", block_size=16)
    view = cache.batch([cache.open(range(32))], [32]).layer(0)
    k, v = torch.randn(2, 32, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    view.write(k=k, v=v)
    wanted = pack(torch.stack((k, v), 1).view(2, 16, -1), format, page_size=16, head_dim=128)
    assert torch.equal(view.blocks.pages("kv")[view.block_table[0].long()], wanted)
    verdict = judge("vllm-triton-unified", view)
    assert verdict.expect == ("ok" if layout.endswith("head") else "garbage")
