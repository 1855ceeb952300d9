"""Run with vLLM's Python: bytes of a page by vLLM's own specs. Reads a list of layers as JSON, prints their bytes as JSON.

A layer: {"heads", "dim", "v_dim", "window" (or null), "block", "dtype" (a kv_cache_dtype)}.
"""

import json
import sys

import vllm
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode


def nbytes(layer):
    given = dict(
        block_size=layer["block"], num_kv_heads=layer["heads"], head_size=layer["dim"], head_size_v=layer["v_dim"],
        dtype=STR_DTYPE_TO_TORCH_DTYPE[layer["dtype"]], kv_quant_mode=get_kv_quant_mode(layer["dtype"]),
    )  # fmt: skip
    spec = FullAttentionSpec(**given)
    if layer["window"] is not None:
        spec = SlidingWindowSpec(**given, sliding_window=layer["window"])
    if hasattr(TritonAttentionBackend, "customize_spec"):
        spec = TritonAttentionBackend.customize_spec(spec)  # scales in the page
    return spec.page_size_bytes


print(json.dumps({"at": vllm.__file__, "nbytes": [nbytes(layer) for layer in json.load(sys.stdin)]}))
