#!/usr/bin/env bash
# vllm 0.33.0, ZmqEventPublisher (distributed/kv_events.py; SGLang 0.5.23 has the same loop), asked to send events again from
# number 0, while it keeps the last 3 of 6:
#   DEALER sends 8 bytes                   nothing comes back; the docstring asks for "an 8-byte big-endian integer"
#   DEALER sends an empty frame, 8 bytes   3, 4, 5 and the end: no word that 0, 1 and 2 are gone
#   REQ sends 8 bytes                      3 alone: a REQ socket takes one answer to a question
# So a subscriber has to compare the first number that comes with the one that it asked for, and to be a DEALER with an empty
# frame. The file is run as it is; of vllm it needs a logger, a config class and helpers for addresses, which stand in below, so
# that nothing else of vllm and no torch is loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip=("$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" pyzmq==27.3.0 msgspec==0.22.0
"${pip[@]}" --no-deps --target "$folder/vllm" vllm==0.33.0
"$folder/env/bin/python" - "$folder/vllm/vllm/distributed/kv_events.py" "$folder" <<'PY'
import logging
import sys
import time
import types

import msgspec
import zmq

path, folder = sys.argv[1:]


def stand_in(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module


for name in ("vllm", "vllm.config", "vllm.utils", "vllm.v1", "vllm.v1.core"):
    stand_in(name)
stand_in("vllm.config.kv_events", KVEventsConfig=types.SimpleNamespace)
stand_in("vllm.logger", init_logger=logging.getLogger)
stand_in("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
stand_in("vllm.utils.network_utils", **{
    name: None for name in ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
})
events = types.ModuleType("events")
sys.modules["events"] = events
exec(compile(open(path).read(), path, "exec"), events.__dict__)
logging.disable(logging.ERROR)

publisher = events.ZmqEventPublisher(0, endpoint=f"ipc://{folder}/p", replay_endpoint=f"ipc://{folder}/r", buffer_steps=3)
for _ in range(6):
    publisher.publish(events.KVEventBatch(ts=0.0, events=[events.AllBlocksCleared()]))
time.sleep(1)


def numbers(kind, frames):
    """Return the numbers that come back for ``frames``; -1 is the end."""
    socket, seen = zmq.Context.instance().socket(kind), []
    socket.linger = 0
    socket.connect(f"ipc://{folder}/r")
    socket.send_multipart(frames)
    while socket.poll(1500):
        try:
            seen.append(int.from_bytes(socket.recv_multipart()[-2], "big", signed=True))
        except zmq.ZMQError:
            break
    socket.close()
    return seen


seen = {
    "DEALER, 8 bytes": numbers(zmq.DEALER, [bytes(8)]),
    "DEALER, empty frame, 8 bytes": numbers(zmq.DEALER, [b"", bytes(8)]),
    "REQ, 8 bytes": numbers(zmq.REQ, [bytes(8)]),
}
print(seen)
publisher.shutdown()
assert [*seen.values()] == [[], [3, 4, 5, -1], [3]], seen
PY
