"""How an engine divides memory into blocks for the layers of a model: the groups, the tokens of a block, how many blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.replay.engines import edge_states, edge_unified, edge_windows
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.profiles import profile
from kvpagoda.units import ceil_div, parse_bytes, whole_number

if TYPE_CHECKING:  # a replay of blocks needs no models
    from kvpagoda.schema import Growth, Schema
    from kvpagoda.schema.plan import Plan

_LEAST_BLOCK = 16
_PAGE = 4096
"""Of so many bytes a multiple is what SGLang's one memory has, beside the states that would be set apart."""
_KEPT_WHOLE = (
    "afmoe", "cohere2", "exaone4", "exaonemoe", "gemma2", "gemma3", "qwen2moe",
)  # fmt: skip
"""How names of models with windows begin, without signs, that are not in SGLang's list ``is_hybrid_swa_model``."""


class EnginePool(NamedTuple):
    """What an engine makes of its memory: ``num_blocks`` blocks of ``block_size`` tokens, which the ``groups`` share.

    SGLang's are blocks of full attention, and ``num_apart`` is what it sets apart for the other layers: blocks of windows, or
    slots of states. ``nbytes``: of all this together, with what holds nothing; 0 if it was not divided by bytes. ``shared``:
    the one memory that they have with ``unified_memory``, where the two numbers at most limit the requests."""

    groups: tuple[Group, ...]
    block_size: int
    num_blocks: int
    nbytes: int = 0
    num_apart: int = 0
    shared: edge_unified.OneMemory | None = None


def divided(
    engine: str,
    groups: Sequence[Group],
    block_size: int,
    num_blocks: int,
    ratio: float | None = None,
    unified: bool = False,
) -> EnginePool:
    """Return what ``engine`` makes of the memory of ``num_blocks`` blocks of one group each; ``ratio``, ``unified``: see
    ``pool_of``. Raises BadInput for groups, and blocks of so many tokens with states, that SGLang does not have, for a ratio
    that has no effect or is out of range, and for one memory where nothing is set apart.

    >>> pool = divided("sglang-0.5.23", Group.from_text("full+3*state"), 64, 1_900)
    >>> pool.num_blocks, pool.num_apart
    (1000, 300)
    """
    ratio, apart, memory = _ratio(engine, groups, ratio), 0, None
    full = sum(group == Group() for group in groups)
    if unified:
        edge_unified.check_groups(engine, groups)
    if profile(engine).store == "edges" and Group("state") in groups:
        num_blocks, apart = edge_states.slots(num_blocks, groups, ratio)
        if edge_states.INTERVAL % block_size:
            text = f"with states SGLang's blocks divide {edge_states.INTERVAL} tokens, got {block_size}"
            raise BadInput(text, needed=block_size, available=edge_states.INTERVAL)
        if unified:
            states = len(groups) - full
            memory = edge_unified.shared(num_blocks * full + (apart + 1) * states, full, states)
    elif profile(engine).store == "edges":
        units = num_blocks
        num_blocks, apart, _ = edge_windows.pools(num_blocks, groups, ratio)
        if unified:
            memory = edge_unified.shared(units, full, len(groups) - full)
    return EnginePool(tuple(groups), block_size, num_blocks, 0, apart, memory)


def pool_of(
    engine: str,
    schema: Schema,
    plan: Plan,
    budget: int | str,
    block_size: int | None = None,
    ratio: float | None = None,
    unified: bool = False,
) -> EnginePool:
    """Return what ``engine`` makes of ``budget`` bytes. ``plan``: ours for ``schema``, which says what layers take.

    vLLM's rules: a group is that many layers of one kind as there are of the rarest kind, or of the most frequent one if
    that is less than 1.5 times as many; layers without a partner are padded. A block holds ``block_size`` tokens of one
    group's layers (None: 16); with states the fewest tokens, a multiple of 16, that take as many bytes as a state. One block
    holds nothing.

    SGLang's: a block holds ``block_size`` tokens of all layers with full attention. Blocks of all layers with windows hold
    ``ratio`` times as many tokens (None: 0.8), but windows of models that SGLang does not list, as Gemma-3, are kept like
    full attention. With states, slots have ``ratio`` times the memory of blocks (None: 0.9), each of a state of every layer,
    of which one holds nothing. ``unified``: it has one memory of as many bytes for blocks and states, or for blocks and
    windows, instead. Raises BadInput, also for layers that no profile has, and NeverFits.
    """
    size, memory = whole_number(block_size or _LEAST_BLOCK, "block_size", at_least=1), parse_bytes(budget)
    taken: dict[Growth, int] = {}
    for part in plan.groups:
        growth, payload = part.growth, part.layout.payload_nbytes
        if growth.slack or growth.is_optional or growth.is_at_rest:
            raise BadInput(f"no profile of an engine has layers like {part.name} of {plan.schema_name}")
        taken[growth] = payload if growth.is_state else payload // part.block_size
    if profile(engine).store == "edges":
        return _sglang(engine, _as_sglang_keeps(schema.name, taken), size, memory, ratio, unified)
    _ratio(engine, (), ratio)  # raises BadInput
    if unified:
        edge_unified.check_groups(engine, ())  # raises BadInput
    counts = Counter(layer.growth for layer in schema.layers if layer.growth is not None)
    for growth in (growth for growth in taken if growth.is_state):
        counts[growth] = sum(bool(layer.state_rows()) for layer in schema.layers)
    tokens = {nbytes // counts[growth] for growth, nbytes in taken.items() if not growth.is_state}
    state = max((nbytes // counts[growth] for growth, nbytes in taken.items() if growth.is_state), default=0)
    if len(tokens) != 1:
        text = f"{engine} has layers with as many bytes a token each; {plan.schema_name} has others"
        raise BadInput(text, needed=1, available=len(tokens))
    token = tokens.pop()
    if state and not engine.startswith("vllm"):
        text = f"how {engine} divides {budget} among states and tokens is not known here; vLLM's way is"
        raise BadInput(text, needed=engine)
    if state:
        needed = _LEAST_BLOCK * ceil_div(state, _LEAST_BLOCK * token)
        if block_size not in (None, needed):
            raise BadInput(
                f"a block has as many bytes as a state of {plan.schema_name}: {needed} tokens, got {block_size}",
                needed=needed, available=block_size,
            )  # fmt: skip
        size = needed
    least, most = min(counts.values()), max(counts.values())
    layers = most if most < 1.5 * least else least
    groups = [_group(growth) for growth, count in counts.items() for _ in range(ceil_div(count, layers))]
    block = layers * size * token
    if memory < 2 * block:
        raise NeverFits(f"{engine} makes no block of {block} bytes of {memory}", needed=2 * block, available=memory)
    return EnginePool(tuple(groups), size, memory // block - 1, memory // block * block)


def _ratio(engine: str, groups: Sequence[Group], given: float | None) -> float:
    """Return SGLang's ratio for ``groups``, the default of its option if none is given. Raises BadInput."""
    kinds = {group.kind for group in groups}
    if given is None:
        return edge_states.RATIO if "state" in kinds else edge_windows.RATIO
    if profile(engine).store != "edges" or not kinds & {"state", "window"}:
        text = f"{engine} with memory_ratio={given}: it is SGLang's, for what it sets apart for states or windows"
        raise BadInput(text, needed=engine, available=given)
    if not 0 < given < float("inf") or ("window" in kinds and given > 1):
        text = f"memory_ratio must be above 0, and of windows at most 1, got {given}"
        raise BadInput(text, needed=0, available=given)
    return given


def _as_sglang_keeps(name: str, taken: dict[Growth, int]) -> dict[Growth, int]:
    """Return ``taken`` of the model ``name``: with the windows in full attention, if SGLang has no pool for them."""
    full = next((growth for growth in taken if _group(growth) == Group()), None)
    plain = "".join(sign for sign in name.lower() if sign.isalnum())
    if full is None or not plain.startswith(_KEPT_WHOLE):
        return taken
    merged = {growth: nbytes for growth, nbytes in taken.items() if growth.window is None}
    merged[full] += sum(nbytes for growth, nbytes in taken.items() if growth.window is not None)
    return merged


def _sglang(
    engine: str, taken: Mapping[Growth, int], size: int, memory: int, given: float | None = None, unified: bool = False
) -> EnginePool:
    """Return SGLang's blocks of ``size`` tokens and what it sets apart in ``memory`` bytes. ``taken``: the bytes of a token,
    or of a state, of all layers of a kind. ``given``: the ratio."""
    groups = tuple(_group(growth) for growth in taken)
    divided(engine, groups, size, 0, given, unified)  # raises BadInput
    of = {group.kind: nbytes for group, nbytes in zip(groups, taken.values())}
    token, window, state = of["full"], of.get("window", 0), of.get("state", 0)
    least, apart, ratio = 0, 0, _ratio(engine, groups, given)
    if unified and window:
        return _beside_windows(engine, groups, size, memory, (token, window), ratio)
    if state:
        least = edge_states.LEAST
        apart, unit = int(memory * ratio / (1 + ratio) // state) - 1, state
        spent = (apart + 1) * state
        blocks = (memory - spent) // (token * size)
        needed = max((least + 2) * state / ratio, token * size) * (1 + ratio)
    else:
        cell, unit = token + ratio * window if window else token, window * size
        blocks = int(memory // cell) // size
        if window:
            apart, least = int(blocks * size * ratio) // size, (max(group.size for group in groups) - 1) // size + 2
        spent = apart * unit
        needed = cell * size * (1 + least / ratio)
    if blocks < 1 or apart < least:
        raise NeverFits(
            f"{engine} makes {max(blocks, 0)} blocks of {token * size} bytes of {memory}, and of the rest {max(apart, 0)} of "
            f"{unit} bytes for windows or states: too few for a request",
            needed=ceil(needed), available=memory,
        )  # fmt: skip
    if not unified:
        return EnginePool(groups, size, blocks, spent + blocks * token * size, apart)
    nbytes = (memory - spent) // _PAGE * _PAGE + apart * state
    shared = edge_unified.shared(nbytes, token * size, state)
    return EnginePool(groups, size, blocks, nbytes, apart, shared)


def _beside_windows(
    engine: str, groups: tuple[Group, ...], size: int, memory: int, of_token: tuple[int, int], ratio: float
) -> EnginePool:
    """Return SGLang's one memory for blocks of ``size`` tokens and their windows: the most blocks that would fit divided, and
    all bytes. ``of_token``: bytes of a token in full attention, and in windows. SGLang refuses less than a window and a block
    of it, beside what holds nothing."""
    block, each = (nbytes * size for nbytes in of_token)

    def apart(blocks: int) -> int:
        return int(blocks * size * ratio) // size

    blocks = int(memory / (block + ratio * each))
    while (blocks + 1) * block + apart(blocks + 1) * each <= memory:
        blocks += 1
    nbytes = memory // _PAGE * _PAGE
    shared, nothing = edge_unified.shared(nbytes, block, each), max(block, each)
    window = (max(group.size for group in groups) + size) * of_token[1]
    if nbytes < window + nothing or shared.nbytes < block + each:
        text = f"{engine} makes one memory of {nbytes} of {memory} bytes, too few for a window and a block of {block + each}"
        needed = max(window, 2 * (block + each)) + nothing
        raise NeverFits(text, needed=ceil_div(needed, _PAGE) * _PAGE, available=memory)
    return EnginePool(groups, size, blocks, nbytes, apart(blocks), shared)


def _group(growth: Growth) -> Group:
    if growth.is_state:
        return Group("state")
    if growth.window is not None:
        return Group("window", growth.window)
    return Group() if growth.chunk is None else Group("chunk", growth.chunk)
