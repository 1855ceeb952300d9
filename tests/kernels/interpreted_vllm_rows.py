"""Heads with scales as vLLM's own kernel writes them, byte for byte.

Run it where vLLM is: ``TRITON_INTERPRET=1 .venv-vllm/bin/python -m pytest tests/kernels/interpreted_vllm_rows.py -q``.
"""

from importlib.util import find_spec

import pytest
import torch

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.packed_rows import Parts, append_parts, append_rows
from kvpagoda.formats.encoding import Encoding
from kvpagoda.layouts.packed import views

pytestmark = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
WIDTHS = (64, 80, 96, 112, 128, 192, 256, 512)
HEADS, PAGE, PAGES = 2, 4, 3
SLOTS = torch.tensor([5, 0, -1, 11, 3, 2])


@pytest.fixture(scope="module")
def theirs():
    """vLLM's writers. Its build for CPUs has no Triton, so it is given the interpreter."""
    patch = pytest.MonkeyPatch()
    import triton
    import vllm.triton_utils

    patch.setattr(vllm.triton_utils, "triton", triton)
    patch.setattr(vllm.triton_utils, "tl", triton.language)
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash

    yield triton_reshape_and_cache_flash
    patch.undo()


def written(theirs, k, v):
    """Return the cells ``[pages, heads, rows, bytes]`` after vLLM's kernel wrote int8 codes and scales to ``SLOTS``."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    wide, narrow = k.shape[-1], v.shape[-1]
    cells = torch.zeros(PAGES, HEADS, PAGE, wide + narrow + 8, dtype=torch.int8)
    keys, k_scale, values, v_scale = (part.transpose(1, 2) for part in cells.split([wide, 4, narrow, 4], -1))
    scales = (part.view(torch.float32)[..., 0] for part in (k_scale, v_scale))
    how = {"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}
    theirs.triton_reshape_and_cache_flash_per_token_head_quant(k, v, keys, values, *scales, SLOTS, **how)
    return cells.view(torch.uint8)


def rows_of(dim, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(SLOTS), HEADS, dim, generator=generator)
    rows *= torch.exp2(8 * torch.randn(len(SLOTS), HEADS, 1, generator=generator))
    rows[0, 0], rows[1, 1] = 0, 1e-7
    return rows.bfloat16()


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_int8_heads_are_those_of_vllm(theirs, head_dim, backend, monkeypatch):
    if backend == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    monkeypatch.setenv(VARIABLE, backend)
    k, v = rows_of(head_dim, 1), rows_of(head_dim, 2)
    pages = torch.zeros(PAGES, HEADS * PAGE * 2 * (head_dim + 4), dtype=torch.uint8)
    append_rows(torch.stack((k, v), 1).flatten(1), SLOTS, pages, "gqa_int8_head", page_size=PAGE, head_dim=head_dim)
    assert torch.equal(pages.view(PAGES, HEADS, PAGE, -1), written(theirs, k, v))


def test_heads_of_different_widths_have_the_codes_and_scales_of_vllm(theirs, monkeypatch):
    """vLLM's kernel writes them to cells; here K and V are pages of their own, of the same codes and scales."""
    monkeypatch.setenv(VARIABLE, "reference")
    k, v = rows_of(192, 1), rows_of(128, 2)
    cells = written(theirs, k, v).split([196, 132], -1)
    for rows, wanted in zip((k, v), cells):
        encoding = Encoding("gqa_int8_head", head_dim=rows.shape[-1])
        nbytes, _ = encoding.arrange(PAGE, rows.shape[1:])
        pages, packing = torch.zeros(PAGES, nbytes, dtype=torch.uint8), encoding.geometry(rows.shape[1:])[0]
        append_parts(rows.flatten(1), SLOTS, Parts.of(views(pages, packing, PAGE, HEADS), encoding))
        assert torch.equal(pages.view(PAGES, HEADS, PAGE, -1), wanted)


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_nvfp4_pages_are_divided_as_vllm_divides_them(head_dim):
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale

    encoding = Encoding("gqa_nvfp4", head_dim=head_dim)
    shape = (2, HEADS, head_dim)
    nbytes, _ = encoding.arrange(PAGE, shape)
    slots, rows, row = encoding.page_shape(PAGE, shape)
    assert (slots, rows, row) == (2 * HEADS, PAGE, nvfp4_kv_cache_full_dim(head_dim))
    pages = torch.randint(0, 127, (PAGES, nbytes), dtype=torch.uint8)
    parts = views(pages, encoding.rules.packing, PAGE, HEADS)
    for cell, side in enumerate(pages.view(PAGES, slots, rows, row).split(HEADS, 1)):
        data, scale = nvfp4_split_data_scale(side)
        assert torch.equal(parts["codes"][:, :, :, cell].transpose(1, 2), data)
        assert torch.equal(parts["scales"][:, :, :, cell].transpose(1, 2), scale.view(torch.uint8))
