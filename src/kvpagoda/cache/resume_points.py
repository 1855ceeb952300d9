"""Where requests may resume, and where their prompts keep checkpoints for that."""

from __future__ import annotations

from dataclasses import dataclass

_SLACK = 512
"""Tokens before the end of a prompt for which its checkpoint keeps windows too: prompts that extend another one often part
from it a little before its end."""
_COARSE = 1024
"""Tokens: models with states keep one more checkpoint for such prompts, at the last multiple of this in a prompt."""


@dataclass(frozen=True)
class ResumePoints:
    """The positions of a text after which requests may start, in blocks unless tokens are named.

    ``grid``: hits from checkpoints and tiers end at multiples of it. ``grid_tokens``: those of models with a full group
    alone end at multiples of this many tokens. ``every``: a prompt keeps a checkpoint at each multiple; 0: at none.
    ``coarse``: one more at the last multiple of it; 0: none. ``slack``: for how many blocks before the end of a prompt its
    last checkpoint keeps windows, where no states are copied. ``ends_steps``: whether a step must end where a checkpoint is
    kept, since states must be copied there."""

    block_size: int
    grid: int
    grid_tokens: int
    every: int
    coarse: int
    slack: int
    ends_steps: bool

    @classmethod
    def of(cls, block_size: int, hit_grid: int, every: int | None, *, has_states: bool) -> ResumePoints:
        """Return the points for caches whose hits end at multiples of ``hit_grid`` tokens, a multiple of
        ``block_size``, or 1."""
        coarse = max(1, _COARSE // block_size) if has_states else 0
        slack = 0 if has_states else _SLACK // block_size
        return cls(block_size, max(1, hit_grid // block_size), hit_grid, every or 0, coarse, slack, has_states)

    def due(self, begin: int, parted: int, prompt_length: int) -> list[int]:
        """Return after how many blocks a prompt of ``prompt_length`` tokens keeps checkpoints, ascending, if it starts
        after ``begin`` blocks and ``parted`` blocks of it were cached.

        These are the last boundary from which the same prompt can be resumed with a token left to compute, the one where
        it parts from what was cached, and multiples of ``every`` and ``coarse``."""
        end = (prompt_length - 1) // self.block_size
        depths = {end, parted}
        if self.every:
            depths.update(range((begin // self.every + 1) * self.every, end, self.every))
        if self.coarse:
            depths.add(end // self.coarse * self.coarse)
        return sorted({at for at in (depth // self.grid * self.grid for depth in depths) if begin < at <= end})

    def rounded(self, position: int, *, is_bounded: bool) -> int:
        """Return the last position, in tokens, up to ``position`` after which a request may start. ``is_bounded``: it may
        start after whole blocks alone."""
        unit = self.grid * self.block_size if is_bounded else self.grid_tokens
        return position // unit * unit

    def is_worth_keeping(self, depth: int, resumable: int) -> bool:
        """Return whether a checkpoint after ``depth`` blocks may be resumed, and saves much beside one after
        ``resumable``, whose states a request has only there."""
        return self.ends_steps and depth - resumable >= self.coarse and depth % self.grid == 0
