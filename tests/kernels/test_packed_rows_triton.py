"""The Triton kernels without a GPU. Interpreting and compiling exclude each other, so each has a process of its own."""

import pytest
from test_append_swa_triton import run_pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_interpreted_kernels_equal_the_reference(tmp_path):
    run_pytest("interpreted_packed_rows.py", tmp_path, TRITON_INTERPRET="1")


def test_kernels_compile_for_hopper_and_blackwell(tmp_path):
    run_pytest("compiled_packed_rows.py", tmp_path)
