"""What a checkpoint's config says of its cache: a scheme, which engines follow unless they are told otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpagoda.errors import SchemaError, shown
from kvpagoda.schema.config import Config

FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")
TABLES = ("quantization_config", "compression_config")
BESIDE = "hf_quant_config.json"
"""The file beside ``config.json`` in which older checkpoints of ModelOpt have their ``quantization_config``."""


def kv_scheme(levels: Iterable[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return (``kv_format``, what was read, as text) of a config that is nested in ``levels``, the outermost first.

    Read as vLLM reads it for ``kv_cache_dtype="auto"``: 8-bit floats of compressed-tensors and ModelOpt are ``fp8``, 4-bit
    floats of ModelOpt ``nvfp4``. Other schemes of ModelOpt and those of other methods are passed over: ``raw``, and the text
    says so. The text is None if no scheme is named. Raises SchemaError for a scheme of compressed-tensors that vLLM refuses.
    """
    tables = (Config(level, {}).table(name) for level in levels for name in TABLES if level.get(name) is not None)
    whole = Config(next(tables, {}), {})
    inner = Config(whole.table("quantization"), {})
    method = _word(whole.get("quant_method")).replace("_", "-")
    if _word(whole.table("producer").get("name")) == "modelopt" or "modelopt_quant_config" in inner.raw:
        method = "modelopt"
    named = ((field, table.get(field)) for field in FIELDS for table in (inner, whole))
    field, scheme = next(((field, value) for field, value in named if value is not None), ("", None))
    if scheme is None:
        return "raw", None
    parts = scheme if isinstance(scheme, Mapping) else {}
    bits, type_of = parts.get("num_bits"), _word(parts.get("type"))
    said = f"{shown(bits)}-bit {type_of}" if type_of else shown(scheme)
    kv_format = None
    if method.startswith("modelopt"):
        kv_format = {"fp8": "fp8", "nvfp4": "nvfp4"}.get(_word(scheme))
        if type_of == "float" and isinstance(bits, int):
            kv_format = {8: "fp8" if parts.get("dynamic") is False else None, 4: "nvfp4"}.get(bits)
    elif method == "compressed-tensors" and field == "kv_cache_scheme":
        is_float8 = type_of == "float" and isinstance(bits, int) and bits == 8
        strategy = _word(parts.get("strategy", "tensor"))
        if not is_float8 or parts.get("symmetric") is False or strategy not in ("tensor", "attn_head"):
            raise SchemaError(
                f"{field} of {method} is {shown(scheme)}; vLLM takes symmetric 8-bit floats with a scale a tensor or head "
                f"(strategy 'tensor' or 'attn_head') alone. Give a kv_format: it goes before what the config says",
                field=field, needed=scheme,
            )  # fmt: skip
        kv_format = "fp8"
    by = f"{field}: {said} of {method or 'a method without a name'}"
    return kv_format or "raw", f"{by}, so {kv_format}" if kv_format else f"{by}, which vLLM passes over, so raw"


def _word(value: Any) -> str:
    """Return ``value`` in lower case if it is text, else ""."""
    return value.lower() if isinstance(value, str) else ""
