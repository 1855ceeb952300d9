"""kvpagoda in vLLM's log: where its messages go, and the line that says that it is in charge."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import kvpagoda

_OURS, _THEIRS = "kvpagoda", "vllm"
_log = logging.getLogger(__name__)


def join_log() -> None:
    """Let kvpagoda's messages go where vLLM's go, from vLLM's level on, unless they go somewhere already.

    vLLM configures its own logger and not the root, so that without this a fault of a tier is told to nobody.
    """
    ours, theirs = logging.getLogger(_OURS), logging.getLogger(_THEIRS)
    heard = [*ours.handlers, *(logging.root.handlers if ours.propagate else ())]
    if all(isinstance(handler, logging.NullHandler) for handler in heard):
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate  # a root that some package configures later would say it all again


@cache
def announce(what: str) -> None:
    """Say once in this process that kvpagoda is in charge of ``what``."""
    join_log()
    _log.info("kvpagoda %s %s", kvpagoda.__version__, what, stacklevel=2)


def groups_text(kv_cache_config: Any) -> str:
    """Return what the groups of vLLM's ``kv_cache_config`` are, for a line of the log."""
    pairs = [(len(group.layer_names), group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    groups = [f"{count} of {type(spec).__name__} in blocks of {spec.block_size} tokens" for count, spec in pairs]
    return f"groups of layers: {', '.join(groups) or 'none'}"
