"""What ``kvpagoda replay --engine`` prints: which engine with which settings, and what its cache hits at each capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.replay.engines import replay_engine
from kvpagoda.replay.groups import Group
from kvpagoda.replay.profiles import profile
from kvpagoda.replay.report import Sheet, Source, order_of

_SETTINGS: dict[str, Callable[[str], Any]] = {
    "block_size": int, "at_once": int, "step_tokens": int, "shared": lambda text: bool(int(text)), "groups": Group.from_text,
    "retention": lambda text: None if text == "none" else int(text),
}  # fmt: skip


def engine_from_text(text: str) -> tuple[str, dict[str, Any]]:
    """Return the engine and the arguments of ``replay_engine`` that ``text`` names. Raises BadInput.

    >>> engine_from_text("vllm-0.33,block_size=64,at_once=16,step_tokens=2048,retention=none")[1]["block_size"]
    64
    """
    name, *parts = text.split(",")
    profile(name)
    pairs = [part.partition("=") for part in parts]
    try:
        return name, {key: _SETTINGS[key](value) for key, _, value in pairs}
    except (KeyError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{text!r} is not an engine NAME[,SETTING=VALUE..] with {', '.join(_SETTINGS)}") from None


def measured(source: Source, sizes: Sequence[int], text: str, jobs: int | None = None, quiet: bool = False) -> Sheet:
    """Replay the trace with the engine that ``text`` names at each capacity of ``sizes``, in blocks, one after another.
    ``jobs``: not used. Raises BadInput."""
    name, settings = engine_from_text(text)
    trace = source(2_000)
    order, notes = order_of(trace)
    results = []
    with console.progress(len(sizes) * len(trace), "requests", quiet) as moved:
        for number, size in enumerate(sizes):

            def done(finished: int, before: int = number * len(trace)) -> None:
                if moved is not None:
                    moved(before + finished, name)

            results.append(replay_engine(trace, name, size, on_request=done, **settings))
    one = results[0]
    pace = "each whole" if one.step_tokens is None else f"{one.step_tokens:,} tokens a step"
    lines = [f"{trace.name}: {one.requests:,} requests, {one.prompt_tokens:,} tokens of prompts", *notes]
    lines.append(f"{text}: blocks of {one.block_size} tokens, {one.at_once} at once, {pace}")
    cells = [
        [
            f"{each.capacity_blocks:,}",
            f"{each.hit_rate:.1%}",
            f"{each.hit_tokens:,}",
            f"{each.preempted:,}",
            f"{each.never_fit:,}",
        ]
        for each in results
    ]
    columns = ("capacity", "of tokens", "hit tokens", "preempted", "never fit")
    return Sheet({"trace": trace.name, **order, "results": [each.to_dict() for each in results]}, lines, columns, cells)
