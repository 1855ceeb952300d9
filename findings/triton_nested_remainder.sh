#!/usr/bin/env bash
# triton 3.6.0: of (i % 16) % 2 * 132 the compiler concludes that 8 divides it, and stores 8 bytes at a time at places that only 4
# divides: a GPU stops with a misaligned address. Of i % 2 * 132, the same numbers, it concludes 4. Compiles without a GPU.
# Seen: 3.6.0 gives 4 bytes for i % 2, and 8 for (i % 16) % 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.3.5 triton==3.6.0
cat > "$folder/store.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def store(target, IS_NESTED: tl.constexpr):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    place = (i % 16 % 2 if IS_NESTED else i % 2) * 132
    byte = tl.arange(0, 128)[None, :]
    tl.store(target + place[:, None] + byte, (byte + i[:, None]).to(tl.uint8))


def widest(is_nested):
    source = ASTSource(
        fn=store,
        signature={"target": "*u8", "IS_NESTED": "constexpr"},
        constexprs={(1,): is_nested},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return max(int(many or 1) * int(bits) // 8 for many, bits in re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", ptx))


print(triton.__version__, widest(False), widest(True))
PY
seen=$("$folder/env/bin/python" "$folder/store.py")
echo "$seen"
test "$seen" = "3.6.0 4 8"
