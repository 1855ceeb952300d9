"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
from ptx import check_arithmetic, ptx

from kvpagoda.core.kernels.flatten_table import flatten_table_kernel


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_and_spills_nothing(capability):
    pointers = dict.fromkeys(("table", "starts", "indptr", "out"), "*i32")
    text = ptx(flatten_table_kernel, pointers, {"CELLS": 1024}, [], capability)
    assert re.search(r"ld\.global", text) and re.search(r"st\.global", text)
    check_arithmetic(text)
