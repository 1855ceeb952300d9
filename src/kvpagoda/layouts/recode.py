"""Recode rows during a copy: decode them by the rules of one dialect and encode them by those of another.

``unpack`` and ``pack`` take whole pages without padding, in a fixed order (``pages`` of ``named.json``). The rows are
copied into such staging pages, recoded there, and copied on to the target. Rows of small numbers may change, because
dialects treat them differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpagoda.errors import LayoutError
from kvpagoda.layouts.axes import TOKENS, Axis
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.named import table

PAGE = 64
"""Rows of a staging page; any number would do."""


@dataclass(frozen=True)
class Recode:
    """Rows of ``format`` are recoded from dialect ``source`` to dialect ``target``."""

    format: str
    source: str
    target: str

    def stages(self, targets: Sequence[Layout], tokens: int) -> tuple[list[Layout], list[Layout]]:
        """Return the staging layouts of ``tokens`` tokens by target rank: (for ``unpack``, for ``pack``)."""
        staged: tuple[list[Layout], list[Layout]] = ([], [])
        for layout in targets:
            axes = tuple(axis if axis.name != TOKENS else Axis(TOKENS, tokens, tokens) for axis in layout.axes)
            for side, dialect in zip(staged, (self.source, self.target)):
                page = f"L B {table()['pages'][self.format][dialect]}"
                side.append(Layout(page, axes, PAGE, format=self.format, dialect=dialect))
        return staged

    def __str__(self) -> str:
        return f"{self.format} from dialect {self.source!r} to {self.target!r}"


def recode_of(source: Layout, target: Layout) -> Recode | None:
    """Return the recoding from the dialect of ``source`` to that of ``target``; None if both encode by the same rule.

    Raises LayoutError with rule 'dialect' if there is no codec for one of them, or its pages are unknown.
    """
    if source.dialect == target.dialect:
        return None
    from kvpagoda.formats.dialects import DIALECTS

    known, pages = DIALECTS.get(target.format, {}), table()["pages"].get(target.format, {})
    for dialect in (source.dialect, target.dialect):
        if dialect not in known or dialect not in pages:
            raise LayoutError.of(
                "dialect",
                f"rows of {target.format!r} cannot change from dialect {source.dialect!r} to {target.dialect!r}: "
                f"there is no codec for {dialect!r}; there are {', '.join(sorted(known.keys() & pages)) or 'none'}",
                needed=dialect,
            )
    if known[source.dialect].rule == known[target.dialect].rule:
        return None
    return Recode(target.format, source.dialect, target.dialect)
