"""LongRoPE (arXiv 2402.13753) as transformers computes it: chooses which of two sets of factors rotates a forward pass.

Such a model has short factors for texts of at most ``original_max_position_embeddings`` tokens and long ones for longer
texts. transformers chooses between them by the furthest position of a *forward pass*, for all positions of the pass. So
the rows of a text depend on how long it was when they were computed. A text that grows past the switch is computed
again from its beginning. Shorter and longer texts never share rows, and are never in one pass.

    text          0 ......... original ......... max_position_embeddings
    its factors   short       | long, from position 0 on
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any

import torch

Tensor = torch.Tensor


class RopeSwitch:
    """The text lengths at which a model's position encodings switch. ``lengths``, ascending: a text with more tokens
    than one of these is encoded differently; empty for most models."""

    def __init__(self, model: Any) -> None:
        self._modules: list[torch.nn.Module] = []
        found: set[int] = set()
        for module in model.modules():
            lengths = _switch_lengths(module)
            if lengths:
                self._modules.append(module)
                found |= lengths
        self.lengths = tuple(sorted(found))

    def passed(self, num_tokens: int) -> int:
        """Return the last switch that a text of ``num_tokens`` tokens has passed; 0: none. O(log switches)."""
        before = bisect_left(self.lengths, num_tokens)
        return self.lengths[before - 1] if before else 0

    def room(self, num_tokens: int) -> int | None:
        """Return how many tokens a text of ``num_tokens`` can grow before it passes the next switch; None: any
        number."""
        before = bisect_left(self.lengths, num_tokens)
        return self.lengths[before] - num_tokens if before < len(self.lengths) else None

    @contextmanager
    def rotating_past(self, passed: int) -> Iterator[None]:
        """Make forward passes inside this context rotate as for texts longer than ``passed`` tokens, at any positions;
        0: no change.

        Hooks give the rotary modules one more position, which is past the switch, and remove its angles from the
        result.
        """
        with ExitStack() as hooks:
            if passed:
                for module in self._modules:
                    before = module.register_forward_pre_hook(_with_position(passed), with_kwargs=True)
                    hooks.callback(before.remove)
                    hooks.callback(module.register_forward_hook(_without_last).remove)
            yield


def media_past(passed: int, first_token: int) -> Mapping[int, bytes]:
    """Return the ``media`` for ``KVCache.open`` that keeps texts longer than ``passed`` tokens from sharing rows with
    shorter ones: a digest for the first token, as for an image. Empty for 0."""
    if not passed:
        return {}
    content = f"token {first_token}, rotated for texts past {passed} tokens"
    return {0: blake2b(content.encode(), digest_size=16).digest()}


def _switch_lengths(module: torch.nn.Module) -> set[int]:
    """Return the text lengths after which rotary module ``module`` uses its long factors: one, or one for each layer
    type. A module with ``long_mscale`` switches another magnitude too, whatever its type (PhiMoE)."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if kinds is None or not isinstance(parameters, Mapping):
        return set()
    named = {"": kinds} if isinstance(kinds, str) else kinds
    each = [(kind, parameters[name] if name else parameters) for name, kind in named.items()]
    switched = [own for kind, own in each if kind == "longrope" or "long_mscale" in own]
    return {int(own["original_max_position_embeddings"]) for own in switched}


def _with_position(position: int) -> Any:
    """Return a hook that appends ``position`` to the positions ``[..., S]`` that a rotary module is called with."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.nn.functional.pad(positions, (0, 1), value=position)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    return hook


def _without_last(module: torch.nn.Module, args: Any, angles: Tensor | tuple[Tensor, Tensor]) -> Any:
    """The hook that removes the last position from the cosines and sines, each ``[..., S + 1, D]``, or from the complex
    numbers that represent both."""
    return angles[..., :-1, :] if isinstance(angles, Tensor) else tuple(part[..., :-1, :] for part in angles)
