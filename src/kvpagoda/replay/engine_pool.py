"""How an engine divides memory into blocks for the layers of a model: the groups, the tokens of a block, how many blocks."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.replay.groups import Group
from kvpagoda.replay.profiles import profile
from kvpagoda.schema import Growth, Schema
from kvpagoda.schema.plan import Plan
from kvpagoda.units import ceil_div, parse_bytes, whole_number

_LEAST_BLOCK = 16


class EnginePool(NamedTuple):
    """``num_blocks`` blocks of ``block_size`` tokens and ``nbytes`` bytes each, which the ``groups`` share."""

    groups: tuple[Group, ...]
    block_size: int
    num_blocks: int
    nbytes: int


def pool_of(engine: str, schema: Schema, plan: Plan, budget: int | str, block_size: int | None = None) -> EnginePool:
    """Return the blocks that ``engine`` makes of ``budget`` bytes. ``plan``: ours for ``schema``, which says what layers take.

    vLLM's rules: a group is that many layers of one kind as there are of the rarest kind, or of the most frequent one if
    that is less than 1.5 times as many; layers without a partner are padded. A block holds ``block_size`` tokens of one
    group's layers (None: 16); with states the fewest tokens, a multiple of 16, that take as many bytes as a state. One block
    holds nothing. SGLang sets some of these blocks apart for windows (``edge_windows.pools``). Raises BadInput, also for
    layers that no profile has, and NeverFits.
    """
    profile(engine)
    tokens, nbytes = dict[Growth, int](), dict[Growth, int]()
    counts = Counter(layer.growth for layer in schema.layers if layer.growth is not None)
    for part in plan.groups:
        growth, payload = part.growth, part.layout.payload_nbytes
        if growth.slack or growth.is_optional or growth.is_at_rest:
            raise BadInput(f"no profile of an engine has layers like {part.name} of {plan.schema_name}")
        if growth.is_state:
            counts[growth] = sum(bool(layer.state_rows()) for layer in schema.layers)
            nbytes[growth] = payload // counts[growth]
        else:
            tokens[growth] = payload // counts[growth] // part.block_size
    if len({*tokens.values()}) != 1:
        raise BadInput(
            f"profiles of engines have layers with as many bytes a token each; {plan.schema_name} has others"
        )
    token = max(tokens.values())
    size = whole_number(block_size or _LEAST_BLOCK, "block_size", at_least=1)
    if nbytes and not engine.startswith("vllm"):
        raise BadInput(f"how {engine} divides {budget} among states and tokens is not known here; vLLM's way is")
    if nbytes:
        needed = _LEAST_BLOCK * ceil_div(max(nbytes.values()), _LEAST_BLOCK * token)
        if block_size not in (None, needed):
            raise BadInput(
                f"a block has as many bytes as a state of {plan.schema_name}: {needed} tokens, got {block_size}",
                needed=needed, available=block_size,
            )  # fmt: skip
        size = needed
    least, most = min(counts.values()), max(counts.values())
    layers = most if most < 1.5 * least else least
    groups = [_group(growth) for growth, count in counts.items() for _ in range(ceil_div(count, layers))]
    block, memory = layers * size * token, parse_bytes(budget)
    if memory < 2 * block:
        raise NeverFits(f"{engine} makes no block of {block} bytes of {memory}", needed=2 * block, available=memory)
    return EnginePool(tuple(groups), size, memory // block - 1, block)


def _group(growth: Growth) -> Group:
    if growth.is_state:
        return Group("state")
    if growth.window is not None:
        return Group("window", growth.window)
    return Group() if growth.chunk is None else Group("chunk", growth.chunk)
