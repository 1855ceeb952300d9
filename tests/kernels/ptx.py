"""Kernels compiled for GPUs that are not here, and what their PTX says."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.core.kernels.launch import OPTIONS

FORBIDDEN = r"div\.full", r"\.approx", r"\bfma\b", r"\bfma\.", r"\.ftz", r"\.local\b", r"__local_depot"
"""What would round otherwise than IEEE operations do, and what spills."""
CASTS = {80: 80, 90: 89, 100: 89}
"""Capability -> the casts that its kernels leave to the hardware."""


def ptx(kernel, pointers, constants, aligned, capability, **other):
    """Return the PTX of ``kernel``. ``pointers``: name -> type. ``aligned``: arguments that 16 divides. ``other``: types."""
    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else {**pointers, **other}.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS).asm["ptx"]


def check_arithmetic(text):
    for forbidden in FORBIDDEN:
        assert not re.search(forbidden, text), forbidden


def widest(text, access):
    """Bytes of the widest global ``access``, "ld" or "st"."""
    found = re.findall(rf"{access}\.global(?:\.v(\d))?\.b(\d+)", text)
    return max(int(many or 1) * int(bits) // 8 for many, bits in found)


def count(text, instruction):
    return len(re.findall(re.escape(instruction), text))
