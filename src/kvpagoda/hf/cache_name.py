"""The name by which transformers' models take a cache and return it: ``cache`` from 5.24 on, ``past_key_values`` before, in
Mamba ``cache_params``. Read from signatures: code of a model that is loaded from elsewhere may have another name than the
installed version."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpagoda.errors import MissingExtra, SchemaError

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of arguments with a ``Cache``, the newest first."""

OWN_STATES_NAME = "state"
"""The argument of a model that passes its states around itself (RWKV)."""

VERSIONS = "5.23 and 5.24"
"""The versions of transformers with which ``kvpagoda.hf`` is tested."""


def _output_name() -> str:
    for name in CACHE_NAMES:
        if name in inspect.signature(CausalLMOutputWithPast).parameters:
            return name
    raise MissingExtra(
        f"outputs of transformers {transformers.__version__} have no field for a cache: none of {', '.join(CACHE_NAMES)}; "
        f"kvpagoda.hf is tested with transformers {VERSIONS}",
        name="transformers", needed=CACHE_NAMES,
    )  # fmt: skip


OUTPUT_NAME = _output_name()
"""The field of outputs, and the argument of ``generate``, of the installed version."""


def cache_name_of(model: Any) -> str:
    """Return the argument of the ``forward`` of ``model`` that takes its cache. Raises SchemaError if there is none."""
    accepted = inspect.signature(model.forward).parameters
    for name in (*CACHE_NAMES, OWN_STATES_NAME):
        if name in accepted:
            return name
    raise SchemaError.with_hint(
        f"{type(model).__name__} takes no cache in its forward pass: none of {', '.join(CACHE_NAMES)} is an argument of it "
        f"in transformers {transformers.__version__}",
        f"kvpagoda.hf is tested with transformers {VERSIONS}",
        needed=CACHE_NAMES,
    )
