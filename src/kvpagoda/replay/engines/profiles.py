"""What engines do with cached blocks, in a few settings each: see ``kvpagoda.replay.engines.run`` for how they are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpagoda.errors import unknown_name


@dataclass(frozen=True)
class Profile:
    """The settings of one engine's manager of the cache.

    Args:
        engine: the package and its version whose manager this is.
        store: "queue": single blocks, which are used again in the order in which they became free, a request's last
            block first; "edges": texts in a tree, of which whole edges are evicted, with windows or states too; "tree":
            our prefix tree. The others are settings of the queue.
        recomputes: how many tokens at the end of a known text are computed even if they are cached.
        reserves: what must fit for a request to be admitted: its "prompt", its first "chunk", or its "total", prompt
            and output, beside the total of all that run.
        shares: when other requests can find a whole block: from the moment when its "chunk" has room, or when the
            request is complete ("end").
        watermark: the share of the memory that stays free when a request is admitted beside others.
        moves_states: of groups it has full attention with states, of which a request moves one along
            (``moved_states``).
    """

    engine: str
    store: Literal["queue", "tree", "edges"] = "queue"
    recomputes: int = 1
    reserves: Literal["total", "prompt", "chunk"] = "prompt"
    shares: Literal["chunk", "end"] = "chunk"
    watermark: float = 0.0
    moves_states: bool = False


PROFILES = {
    "kvpagoda": Profile("kvpagoda", store="tree"),
    "vllm-0.33": Profile("vllm 0.33.0"),
    "sglang-0.5.23": Profile("sglang 0.5.23", store="edges"),
    "dynamo-1.6.1": Profile("ai-dynamo-runtime 1.6.1, backend vllm", moves_states=True),
    "dynamo-1.6.1-trtllm": Profile("ai-dynamo-runtime 1.6.1, backend trtllm", recomputes=0, reserves="total"),
}
"""The engines by the name that ``replay(engine=)`` takes."""


def profile(name: str) -> Profile:
    """Return the profile of the engine ``name``. Raises BadInput for an unknown name, and lists the names."""
    if name not in PROFILES:
        raise unknown_name("engine", name, PROFILES)
    return PROFILES[name]
