#!/usr/bin/env bash
# triton 3.9.0: TRITON_INTERPRET=1 refuses a mask that joins a comparison of a vector with one of a scalar, which every
# compiled kernel may use (`mask=(i < n) & (value > 0)`); 3.8.0 and before run it.
# Seen: 3.8.0 gives [0, 1, 2, 9]; 3.9.0 raises InterpreterError: ValueError('mask has unsupported dtype').
# The scalar's comparison is spread as int32, and the interpreter's loads, in C++ since 3.9, take bool alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip=("$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.3.5
cat > "$folder/mask.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def copy(source, target, N: tl.constexpr):
    i = tl.arange(0, N)
    is_positive = tl.load(source + 1) > 0
    tl.store(target + i, tl.load(source + i, mask=(i < 3) & is_positive, other=9))


source, target = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
try:
    copy[(1,)](source, target, 4)
    print(triton.__version__, target.tolist())
except Exception as error:
    print(triton.__version__, "refused" if "mask has unsupported dtype" in str(error) else repr(error))
PY
seen=""
for version in 3.8.0 3.9.0; do
    "${pip[@]}" --no-deps "triton==$version"
    seen+="$(TRITON_INTERPRET=1 "$folder/env/bin/python" "$folder/mask.py");"
done
echo "$seen"
test "$seen" = "3.8.0 [0, 1, 2, 9];3.9.0 refused;"
