"""The positions of a prompt at which its caller wants it to be resumable, and what became of each."""

from __future__ import annotations

from typing import NamedTuple

from kvpagoda.errors import BadInput, shown
from kvpagoda.prefix.tokens import TokenIds, as_tokens


class Breakpoint(NamedTuple):
    """A position that ``open(checkpoints=..)`` asked for: ``seq.checkpoints``."""

    asked: int
    """In tokens, as it was given."""
    position: int
    """Where a text can be resumed for it: ``asked``, rounded down to a whole block and to the hit grid."""
    state: str
    """``due``: it will be kept, some time after the tokens before it are committed. ``kept``: a checkpoint was kept there.
    ``cached``: it was there before. Either may be evicted later, as all checkpoints. ``always``: nothing must be kept for
    it, since the model has full attention alone, or it is the beginning of the text. ``beyond``: it lies behind the end of the
    prompt. ``skipped``: the request started behind it, so that what must be kept there is not computed. ``passed``: a step
    went past it, see ``KVCache.step_limit``. ``memory``: there was no room, or a window block was evicted. ``private``: the
    request publishes nothing."""


class Breakpoints:
    """The positions ``asked`` of one request, in tokens. ``granted``: asked position -> where a text can be resumed for it.
    ``states``: granted position -> its state, see ``Breakpoint``."""

    def __init__(self, asked: tuple[int, ...]) -> None:
        self.asked = asked
        self.granted: dict[int, int] = {}
        self.states: dict[int, str] = {}

    def told(self, due: list[int], block_size: int) -> tuple[Breakpoint, ...]:
        """Return what became of each position. ``due``: after how many blocks checkpoints are still to be kept."""
        found: list[Breakpoint] = []
        for position in self.asked:
            at = self.granted.get(position, 0)
            state = self.states[at] if position in self.granted else "beyond"
            if state == "due" and at // block_size not in due:
                state = "beyond"  # the prompt was shortened
            found.append(Breakpoint(position, at, state))
        return tuple(found)


def breakpoints_of(positions: TokenIds, max_context: int) -> Breakpoints:
    """Return ``positions``, whole numbers from 0 to ``max_context``, as ``open`` was given them. Raises BadInput."""
    asked = positions_of(positions)
    most = max(asked, default=0)
    if most > max_context:
        text = f"a checkpoint after {most} tokens lies behind the longest context of {max_context}"
        raise BadInput(text, needed=most, available=max_context)
    return Breakpoints(asked)


def positions_of(checkpoints: TokenIds) -> tuple[int, ...]:
    """Return ``checkpoints``, positions in tokens as a caller gives them, as whole numbers. Raises BadInput."""
    try:
        asked: tuple[int, ...] = tuple(as_tokens(checkpoints).tolist())
    except BadInput:
        text = f"checkpoints are positions in tokens, whole numbers of at least 0, got {shown(checkpoints)}"
        raise BadInput(text, needed=checkpoints) from None
    return asked
