"""The time steps of Mamba-2 layers (arXiv 2405.21060), clamped in passes of one token too.

A model with ``time_step_limit`` clamps each time step, after its softplus, to that range. transformers does so where it
scans several tokens, but not where it updates a state by one token. Without this file the tokens of a text would
depend on how many of them stand in a pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kvpagoda.errors import SchemaError

Tensor = torch.Tensor
Limit = tuple[float, float]
UPDATE = "mamba2_selective_state_update"
"""The function of transformers' modeling files that updates the states by one token."""

_limit: ContextVar[Limit | None] = ContextVar("kvpagoda_time_step_limit", default=None)


class TimeSteps:
    """``limit``: the least and the most time step of ``model``; None if it clamps none, as most models.

    The constructor wraps ``UPDATE`` in the modeling file of a model that clamps. Outside of ``clamped`` the wrapped
    function does what it did before. Raises SchemaError if that file has no such function, or for layers with different
    limits.
    """

    def __init__(self, model: Any) -> None:
        limits = {_limit_of(part): part for part in model.modules() if hasattr(part, "time_step_limit")}
        if len(limits) > 1:
            text = f"the layers of this {type(model).__name__} have different time_step_limit: {[*limits]}"
            raise SchemaError(text, field="time_step_limit", needed=[*limits])
        self.limit = next(iter(limits), None)
        if self.limit is not None:
            _wrap_update(limits[self.limit], self.limit)

    @contextmanager
    def clamped(self) -> Iterator[None]:
        """Make the passes of one token inside this context clamp their time steps."""
        token = _limit.set(self.limit)
        try:
            yield
        finally:
            _limit.reset(token)


def _limit_of(part: torch.nn.Module) -> Limit | None:
    """Return the limit of module ``part``; None if it changes no time step, because these are at least 0 already."""
    least, most = map(float, part.time_step_limit)  # type: ignore[arg-type]
    return None if least <= 0 and most == float("inf") else (least, most)


def _wrap_update(part: torch.nn.Module, limit: Limit) -> None:
    """Wrap ``UPDATE`` in the modeling file of ``part``, which has ``limit``. A second call does nothing. Raises
    SchemaError."""
    file = sys.modules[type(part).__module__]
    own = getattr(file, UPDATE, None)
    if own is None:
        raise SchemaError.with_hint(
            f"{type(part).__name__} has time_step_limit {limit}, but {file.__name__} has no {UPDATE} in which "
            f"the time steps of single tokens could be clamped to it",
            "take a version of transformers that has this function",
            field="time_step_limit", needed=limit,
        )  # fmt: skip
    if not hasattr(own, "is_kvpagoda_clamp"):
        setattr(file, UPDATE, _clamping(own))


def _clamping(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``own``, which updates states by one token, with time steps clamped inside ``clamped``: in the order and
    the dtype of transformers' scan."""

    @functools.wraps(own)
    def update(
        state: Tensor, hidden: Tensor, dt: Tensor, *rest: Any,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        limit = _limit.get()
        if limit is None:
            return own(state, hidden, dt, *rest, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = torch.nn.functional.softplus(dt)
        return own(state, hidden, dt.clamp(*limit), *rest, dt_bias=None, dt_softplus=False, **kwargs)

    update.is_kvpagoda_clamp = True  # type: ignore[attr-defined]
    return update
