"""What ``kvpagoda replay --engine`` prints: which engine with which settings, and what its cache hits at each capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.profiles import profile
from kvpagoda.replay.engines.run import EngineResult, replay_engine
from kvpagoda.replay.engines.settings import EngineSettings
from kvpagoda.replay.jobs import run_jobs
from kvpagoda.replay.report import Sheet, Source, order_of
from kvpagoda.text import words_of

_READ: dict[str, Callable[[str], Any]] = {
    "int | None": lambda text: None if text == "none" else int(text), "float | None": float, "float": float,
    "bool": lambda text: bool(int(text)),
}  # fmt: skip
"""What reads a field of ``EngineSettings``, by its type."""
_OPTIONS: dict[str, Callable[[str], Any]] = {one.name: _READ[str(one.type)] for one in fields(EngineSettings)}
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "block_size": int, "at_once": int, "step_tokens": int, "shared": _READ["bool"], "groups": Group.from_text, **_OPTIONS,
}  # fmt: skip


def engine_from_text(text: str) -> tuple[str, dict[str, Any]]:
    """Return the engine and the arguments of ``replay_engine`` that ``text`` names. Raises BadInput.

    >>> engine_from_text("vllm-0.33,block_size=64,at_once=16,step_tokens=2048,retention=none")[1]["block_size"]
    64
    """
    return _read(text, _SETTINGS)


def engines_from_text(text: str) -> list[str]:
    """Split ``text`` into engines with their settings, for ``settings_from_text``.

    >>> engines_from_text("kvpagoda, vllm-0.33,watermark=0.1,retention=none")
    ['kvpagoda', 'vllm-0.33,watermark=0.1,retention=none']
    """
    engines = list[str]()
    for word in words_of(text):
        if "=" in word and engines:
            engines[-1] += f",{word}"
        else:
            engines.append(word)
    return engines


def settings_from_text(text: str) -> tuple[str, EngineSettings]:
    """Return the engine and its settings that ``text`` names. Raises BadInput.

    >>> settings_from_text("vllm-0.33,watermark=0.1")[1].watermark
    0.1
    """
    name, given = _read(text, _OPTIONS)
    return name, EngineSettings(**given)


def _read(text: str, settings: dict[str, Callable[[str], Any]]) -> tuple[str, dict[str, Any]]:
    name, *parts = text.split(",")
    profile(name)
    pairs = [part.partition("=") for part in parts]
    try:
        return name, {key: settings[key](value) for key, _, value in pairs}
    except (KeyError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{text!r} is not an engine NAME[,SETTING=VALUE..] with {', '.join(settings)}", needed=text
        ) from None


def measured(source: Source, sizes: Sequence[int], text: str, jobs: int | None = None, quiet: bool = False) -> Sheet:
    """Replay the trace with the engine that ``text`` names at each capacity of ``sizes``, in blocks, in ``jobs`` processes at
    once (None: one after another). Raises BadInput."""
    name, settings = engine_from_text(text)
    trace, done = source(2_000), dict[int, EngineResult]()
    order, notes = order_of(trace)
    work = [partial(replay_engine, engine=name, capacity_blocks=size, **settings) for size in sizes]
    with console.progress(len(sizes) * len(trace), "requests", quiet) as moved:

        def told(number: int, finished: int) -> None:
            if moved is not None:
                moved(len(done) * len(trace) + finished, name)

        run_jobs(work, trace, jobs or 1, done.__setitem__, told)
    results = [done[number] for number in range(len(sizes))]
    one = results[0]
    pace = "each whole" if one.step_tokens is None else f"{one.step_tokens:,} tokens a step"
    lines = [f"{trace.name}: {one.requests:,} requests, {one.prompt_tokens:,} tokens of prompts", *notes]
    lines.append(f"{text}: blocks of {one.block_size} tokens, {one.at_once} at once, {pace}")
    cells = [
        (
            f"{each.capacity_blocks:,}", f"{each.hit_rate:.1%}", f"{each.hit_tokens:,}", f"{each.preempted:,}",
            f"{each.never_fit:,}",
        )
        for each in results
    ]  # fmt: skip
    columns = ("capacity\nin blocks", "hit rate\nof tokens", "tokens\nhit", "times\npreempted", "requests\nnever fit")
    return Sheet({"trace": trace.name, **order, "results": [each.to_dict() for each in results]}, lines, columns, cells)
