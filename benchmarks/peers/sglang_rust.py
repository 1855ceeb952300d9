"""SGLang with the unified radix tree in Rust."""

from __future__ import annotations

from benchmarks.peers import sglang
from benchmarks.peers.sglang import LEAST_BLOCK, VERSION

__all__ = ["LEAST_BLOCK", "VERSION", "Peer"]


class Peer(sglang.Peer):
    """SGLang with the Rust core of its unified radix tree."""

    backend = "rust"
