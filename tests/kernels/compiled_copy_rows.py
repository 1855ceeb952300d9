"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.core.kernels.copy_rows import copy_regions_kernel

KINDS = {"regions": "*i64", "pairs": "*i64", "n": "i32", "num_regions": "i32"}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "words, word, width, access",
    [
        (2048, tl.int64, 16, "v2.b64"),
        (64, tl.int64, 16, "v2.b64"),
        (2048, tl.int64, 8, "b64"),
        (2048, tl.int8, 1, "b8"),
    ],
)
def test_it_moves_sixteen_bytes_an_access_where_it_may(capability, words, word, width, access):
    """All loads of a piece come before its first store, so that they are under way together."""
    names = copy_regions_kernel.arg_names
    values = {"WORDS": words, "WORD": word, "SIZE": min(8, width), "WIDTH": width}
    source = ASTSource(
        fn=copy_regions_kernel,
        signature={name: KINDS.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in values.items()},
    )
    warps = max(1, min(8, words // 256))
    text = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["ptx"]
    stores = re.findall(r"st\.global\.(\S+)", text)
    assert stores == [access] * (words // (32 * warps) // (2 if width == 16 else 1))
    assert re.findall(r"(?:ld|st)\.global\.(\S+)", text)[-2 * len(stores) :] == [access] * 2 * len(stores)
    assert not re.search(r"\.local\b|__local_depot", text)
