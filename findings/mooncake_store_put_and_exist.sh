#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1 (Mooncake Store, one master and one client on the loopback, TCP):
# 1. `put` of a key that exists returns 0, success, and keeps the first value: the second is nowhere.
# 2. Asking whether a key exists takes a lease on it: `remove` right after `is_exist` or `get` returns -706 and the key stays;
#    right after `put`, with no question between, it returns 0.
# So a program that asks "is it there? then remove it" removes nothing, and one that writes a corrected value under the old key
# keeps the old one, both without an error. Needs Debian's libibverbs1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5
cat > "$folder/store.py" <<'PY'
import os
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path


def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


home, rpc, metrics = Path(next(iter(find_spec("mooncake").submodule_search_locations))), port(), port()
master = subprocess.Popen(
    [home / "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1",
     f"--metrics_port={metrics}"],
    env={**os.environ, "LD_LIBRARY_PATH": str(home)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
try:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", rpc), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", f"127.0.0.1:{rpc}") == 0
    again = store.put("a", b"first"), store.put("a", b"second"), store.get("a")
    silent = store.put("b", b"value"), store.remove("b"), store.is_exist("b")
    questioned = store.put("c", b"value"), store.is_exist("c"), store.remove("c"), store.is_exist("c")
    read = store.put("d", b"value"), store.get("d"), store.remove("d"), store.is_exist("d")
    print("put, put, get:", again)
    print("put, remove, is_exist:", silent)
    print("put, is_exist, remove, is_exist:", questioned)
    print("put, get, remove, is_exist:", read)
    assert again == (0, 0, b"first"), again
    assert silent == (0, 0, 0), silent
    assert questioned == (0, 1, -706, 1), questioned
    assert read == (0, b"value", -706, 1), read
    store.close()
finally:
    master.terminate()
    master.wait()
PY
GLOG_minloglevel=2 "$folder/env/bin/python" "$folder/store.py" 2> /dev/null
