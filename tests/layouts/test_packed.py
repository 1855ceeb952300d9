"""``pack`` and ``unpack`` against bytes of the engines' own packers, and against the geometry by hand."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda.errors import BadInput, LayoutError
from kvpagoda.formats.dialects import DIALECTS, dialect_of
from kvpagoda.layouts import pack, unpack
from kvpagoda.layouts.packed import views
from raises import raises

VECTORS = Path(__file__).parents[3] / "shared" / "vectors"
FILES = sorted(VECTORS.glob("rows_*.npz"))
ARRAYS = [
    pytest.param(path, key, id=f"{path.stem}: {key}")
    for path in FILES
    for key in np.load(path).files
    if "__" in key and not key.endswith("__robust")
]
EVERY = [(format, dialect) for format, dialects in DIALECTS.items() for dialect in dialects]
every_dialect = pytest.mark.parametrize(("format", "dialect"), EVERY, ids=[f"{f}__{d}" for f, d in EVERY])


def rows_of(x, format):
    """The columns of the vectors' rows that the format holds: see the README of the vectors."""
    width = dialect_of(format).packing.width * (2 if format.startswith("gqa") else 1)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)[..., :width].contiguous()


def random_rows(format, pages=3, page_size=4, heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(pages, page_size, dialect_of(format).packing.width * heads, generator=generator)
    return (x * torch.exp2(torch.randn(pages, page_size, 1, generator=generator))).bfloat16()


@pytest.mark.skipif(not FILES, reason="the reference packers' bytes are not here")
@pytest.mark.parametrize(("path", "key"), ARRAYS)
def test_bytes_of_the_reference_packer(path, key):
    stored = np.load(path)
    format, dialect = key.split("__")
    page_size = stored["x"].shape[1]
    pages = pack(rows_of(stored["x"], format), format, page_size=page_size, dialect=dialect).numpy()
    compared = np.ones(pages.shape, bool)
    if f"{format}__robust" in stored:  # elsewhere the source's approximate reciprocals decide
        compared = stored[f"{format}__robust"].reshape(pages.shape)
    if key == "dsv4_584__flashmla":  # the eighth scale byte is undefined in this reference
        compared.reshape(len(pages), -1)[:, 576 * page_size :].reshape(len(pages), page_size, 8)[..., 7] = False
    wrong = compared & (pages != stored[key].reshape(pages.shape))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} bytes"
    assert compared.mean() > 0.8


@every_dialect
@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
def test_a_page_is_as_long_as_its_name_says_and_is_read_back(format, dialect, page_size):
    heads = 3 if format.startswith("gqa") else 1
    rows = random_rows(format, 2, page_size, heads)
    pages = pack(rows, format, page_size=page_size, dialect=dialect)
    of_heads = {"gqa_fp8_head": 136, "gqa_int8_head": 136, "gqa_int4_group": 80, "gqa_nvfp4": 72}
    row_nbytes = of_heads.get(format) or int(format.split("_")[-1])
    assert pages.shape == (2, page_size * heads * row_nbytes) and pages.dtype == torch.uint8
    back = unpack(pages, format, page_size=page_size, dialect=dialect)
    assert back.shape == rows.shape and back.dtype == torch.float32
    assert (back - rows.float()).norm() / rows.float().norm() < 0.2
    half = unpack(pages, format, page_size=page_size, dialect=dialect, dtype=torch.bfloat16)
    assert torch.equal(half, back.bfloat16())
    kept = dialect_of(format).packing
    if kept.kept_nbytes == 2 and kept.kept:
        assert torch.equal(half[..., -kept.kept :], rows[..., -kept.kept :])


@every_dialect
def test_no_pages_are_packed_and_read_as_none(format, dialect):
    rows = random_rows(format, 0)
    pages = pack(rows, format, page_size=4, dialect=dialect)
    assert len(pages) == 0 and unpack(pages, format, page_size=4, dialect=dialect).shape == rows.shape


@every_dialect
def test_a_page_owns_its_bytes(format, dialect):
    """No byte of a page depends on another page (a footer for the whole pool would), on strides, or on chunks of work."""
    rows = random_rows(format, 3, 5)
    pages = pack(rows, format, page_size=5, dialect=dialect)
    for i in range(3):
        assert torch.equal(pack(rows[i : i + 1], format, page_size=5, dialect=dialect)[0], pages[i])
    strided = torch.stack([rows, rows], 2)[:, :, 0]
    assert torch.equal(pack(strided, format, page_size=5, dialect=dialect), pages)
    long = random_rows(format, 1, 2000)
    parts = [pack(long[:, i : i + 500], format, page_size=500, dialect=dialect) for i in range(0, 2000, 500)]
    whole = unpack(pack(long, format, page_size=2000, dialect=dialect), format, page_size=2000, dialect=dialect)
    assert torch.equal(whole[0], torch.cat([unpack(p, format, page_size=500, dialect=dialect)[0] for p in parts]))


@every_dialect
def test_parts_cover_a_page_without_overlap(format, dialect):
    packing = dialect_of(format, dialect).packing
    heads = packing.cells
    pages = torch.zeros(2, packing.page_stride(6, heads) + 8, dtype=torch.uint8)
    for view in views(pages, packing, 6, heads).values():
        assert not view.any()
        view.fill_(1)
    payload = packing.payload_nbytes(6, heads)
    assert pages[:, :payload].all() and not pages[:, payload:].any()


def test_page_strides_that_kernels_want():
    dsv4 = dialect_of("dsv4_584").packing
    strides = {n: (dsv4.payload_nbytes(n), dsv4.page_stride(n)) for n in (2, 32, 64, 128)}
    assert strides == {2: (1168, 1728), 32: (18688, 19008), 64: (37376, 37440), 128: (74752, 74880)}
    assert dialect_of("v32_656").packing.page_stride(64) % 656 == 0


def test_the_default_of_v32_is_right_on_every_reader():
    """Only power-of-two scales are: sm100 truncates the others."""
    chosen = dialect_of("v32_656")
    assert chosen is DIALECTS["v32_656"]["flashmla"] and chosen.rule.has_power_of_two_scales
    rows = random_rows("v32_656")
    scales = pack(rows, "v32_656", page_size=4).view(3, 4, 656)[..., 512:528].contiguous().view(torch.int32)
    assert not (scales & 0x7FFFFF).any(), "no scale has a mantissa"


def test_scales_of_656_as_vllm_writes_them():
    """amax / 448 as it comes out, at least the least normal float32; no power of two, and no scale of zero."""
    rows = random_rows("v32_656", 1, 3)
    rows[0, 1, :128], rows[0, 2, 128:256] = 0, 1e-38
    page = pack(rows, "v32_656", page_size=3, dialect="vllm").view(3, 656)
    groups = rows[0, :, :512].float().view(3, 4, 128)
    scales = (groups.abs().amax(2) / torch.full((3, 4), 448.0)).clamp(min=torch.finfo(torch.float32).tiny)
    assert torch.equal(page[:, 512:528].contiguous().view(torch.float32), scales)
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(page[:, :512], codes.view(3, 512))


@pytest.mark.parametrize(("format", "data"), [("v41_528", 512), ("v41fp4_288", 256)])
def test_inline_rows_hold_the_bytes_of_the_footer(format, data):
    rows, scales = random_rows(format), int(format.split("_")[1]) - data
    footer = pack(rows, format, page_size=4, dialect="sglang_footer")
    inline = pack(rows, format, page_size=4, dialect="sglang_rows").view(3, 4, data + scales)
    assert torch.equal(inline[..., :data].reshape(3, -1), footer[:, : 4 * data])
    assert torch.equal(inline[..., data:].reshape(3, -1), footer[:, 4 * data :])


def test_known_answer_of_nvfp4_384():
    values = [0, -0.0, 0.5, -0.5, 1, -1, 1.5, -1.5, 2, -2, 3, -3, 4, -4, 6, -6]
    rows = torch.tensor(values, dtype=torch.bfloat16).repeat(32).view(1, 1, 512)
    page = pack(rows, "nvfp4_384", page_size=1)[0]
    assert bytes(page[:8].tolist()).hex() == "8091a2b3c4d5e6f7" and page[352:384].tolist() == [0x38] * 28 + [0] * 4


def test_scales_of_352_lie_in_four_lanes():
    rows = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    rows[0, 0, :512] = torch.exp2(torch.arange(32) // 4 - 4.0).repeat_interleave(16) * 6
    scales = pack(rows, "nvfp4_352", page_size=1)[0, 320:]
    natural = torch.stack([scales[8 * (s % 4) + s // 4] for s in range(32)])
    assert natural.view(torch.float8_e4m3fn).float().tolist() == [2.0 ** (s // 4 - 4) for s in range(32)]


def test_heads_follow_one_another_in_a_gqa_page():
    """K of all heads, then V of all heads in a row; in the page, head after head, cells of K, its scale, V, its scale."""
    rows = torch.zeros(1, 2, 256, dtype=torch.bfloat16)
    for token in range(2):
        for cell in range(2):
            for head in range(2):
                rows[0, token, cell * 128 + head * 64 :][:64] = 1 + token + 2 * cell + 4 * head
    page = pack(rows, "gqa_int8_head", page_size=2, dialect="vllm").view(2, 2, 2, 68)  # head, token, K or V
    scales = page[..., 64:].contiguous().view(torch.float32)[..., 0]
    assert (page[..., :64] == 127).all()
    expected = torch.tensor([[[1.0, 3], [2, 4]], [[5, 7], [6, 8]]]) / torch.full((), 127.0)
    assert torch.equal(scales, expected)


def test_other_head_sizes():
    rows = random_rows("gqa_fp8_head", heads=4)  # the same elements as two heads of 128
    pages = pack(rows, "gqa_fp8_head", page_size=4, head_dim=128)
    assert pages.shape[1] == 4 * 2 * 264
    back = unpack(pages, "gqa_fp8_head", page_size=4, head_dim=128)
    assert (back - rows.float()).norm() / rows.float().norm() < 0.04
    assert pack(rows, "gqa_int4_group", page_size=4, head_dim=128).shape[1] == 4 * 2 * 2 * (64 + 16)


def test_int4_by_hand():
    rows = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    rows[0, 0, :4] = torch.tensor([7.0, -7.0, 2.5, -3.4])
    page = pack(rows, "gqa_int4_group", page_size=1)[0]
    assert page[:2].tolist() == [0x97, 0xD2] and page[32:36].view(torch.float32).item() == 1.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@every_dialect
def test_non_finite_rows_are_refused_where_the_dialect_has_no_bytes_for_them(format, dialect, value):
    rows = random_rows(format)
    rows[1, 2, 5] = value
    if dialect_of(format, dialect).rule.non_finite == "refused":
        with raises(BadInput, field=ANY, needed=(1, 2, 5)):
            pack(rows, format, page_size=4, dialect=dialect)
    else:
        pages = pack(rows, format, page_size=4, dialect=dialect)
        back = unpack(pages, format, page_size=4, dialect=dialect)
        assert back[1, 2].isnan().any() or value == torch.inf, "what was NaN stays visible"
        with (
            raises(BadInput, field=f"a reader of {format} would see inf or NaN", needed=(1, 2, ANY))
            if not (
                format == "v41fp4_288" and value == torch.inf  # saturates
            )
            else torch.no_grad()
        ):
            pack(rows, format, page_size=4, dialect=dialect, refuse_nan=True)


def test_zeros_that_a_reader_would_see_as_nan_are_refused_on_demand():
    rows = random_rows("v32_656")
    rows[2, 1, 128:256] = 0
    assert pack(rows, "v32_656", page_size=4, dialect="flashmla", refuse_nan=True).any()
    with raises(BadInput, field="a reader of v32_656 would see inf or NaN", needed=(2, 1, 128)):
        pack(rows, "v32_656", page_size=4, dialect="sglang_raw", refuse_nan=True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: pack(random_rows("dsv4_584"), "dsv4_585", page_size=4), {"needed": "dsv4_585", "available": ANY}),
        (
            lambda: pack(random_rows("dsv4_584"), "dsv4_584", page_size=4, dialect="flash_mla"),
            {"needed": "flash_mla", "available": ("flashmla", "vllm")},
        ),
        (
            lambda: pack(random_rows("v32_656"), "nvfp4_384", page_size=4),
            {"needed": [4, 512], "available": [3, 4, 576]},
        ),
        (
            lambda: pack(random_rows("dsv4_584"), "dsv4_584", page_size=8),
            {"needed": [8, 512], "available": [3, 4, 512]},
        ),
        (
            lambda: pack(random_rows("dsv4_584"), "dsv4_584", page_size=0),
            {"field": "page_size", "needed": 0, "available": 1},
        ),
        (
            lambda: pack(random_rows("dsv4_584").float(), "dsv4_584", page_size=4),
            {"needed": [4, 512], "available": [3, 4, 512]},
        ),
        (
            lambda: pack(random_rows("dsv4_584")[0], "dsv4_584", page_size=4),
            {"needed": [4, 512], "available": [4, 512]},
        ),
        (
            lambda: pack(random_rows("dsv4_584"), "dsv4_584", page_size=4, head_dim=64),
            {"rule": "size", "needed": 64, "available": 64},
        ),
        (
            lambda: pack(random_rows("gqa_int4_group"), "gqa_int4_group", page_size=4, head_dim=48),
            {"rule": "size", "needed": 48, "available": 32},
        ),
        (
            lambda: unpack(torch.zeros(2, 1169, dtype=torch.uint8), "dsv4_584", page_size=2),
            {"needed": [2, 1168], "available": [2, 1169]},
        ),
        (
            lambda: unpack(torch.zeros(2, 2336, dtype=torch.uint8), "dsv4_584", page_size=2),
            {"needed": 1168, "available": 2336},
        ),
        (lambda: unpack(torch.zeros(2, 1168), "dsv4_584", page_size=2), {"needed": [2, 1168], "available": [2, 1168]}),
    ],
)
def test_what_cannot_be_packed_is_an_error_with_numbers(call, told):
    with raises(LayoutError if "rule" in told else BadInput, **told):
        call()


def test_the_tables_need_no_torch_and_packing_says_that_it_does():
    code = """
import sys
sys.modules["torch"] = None
from kvpagoda.formats.dialects import DIALECTS
from kvpagoda.layouts import judge
assert "flashmla" in DIALECTS["v32_656"]
try:
    from kvpagoda.layouts import pack
except ImportError as error:
    assert "pip install" in str(error) and error.name == "torch"
else:
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_of_several_axes_are_unpacked_as_they_are() -> None:
    pages = pack(random_rows("v32_656"), "v32_656", page_size=4)
    for shape in ((3, 4, 656), (3, 4, 1, 656)):
        assert torch.equal(unpack(pages.view(shape), "v32_656", page_size=4), unpack(pages, "v32_656", page_size=4))
    with raises(BadInput, needed=[4, 2624], available=[3, 2656]):
        unpack(torch.zeros(3, 4, 664, dtype=torch.uint8), "v32_656", page_size=4)
