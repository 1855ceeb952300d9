"""Another dialect on the way: rows are decoded by the rules of one dialect and encoded by those of another.

``unpack`` and ``pack`` take whole pages without padding, in an order of their own (``pages`` of ``named.json``): the rows that
move are copied into such pages, encoded anew there, and copied on. Rows of small numbers change: that is what dialects
differ in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpagoda.errors import LayoutError
from kvpagoda.layouts.axes import TOKENS, Axis
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.named import table

PAGE = 64
"""Rows of a page between: any number would do."""


@dataclass(frozen=True)
class Recode:
    """Rows of ``format`` go from dialect ``source`` to dialect ``target``."""

    format: str
    source: str
    target: str

    def stages(self, targets: Sequence[Layout], tokens: int) -> tuple[list[Layout], list[Layout]]:
        """The pages between, for each target rank: ``tokens`` tokens as ``unpack`` takes them, and as ``pack`` gives them."""
        made: tuple[list[Layout], list[Layout]] = ([], [])
        for layout in targets:
            axes = tuple(axis if axis.name != TOKENS else Axis(TOKENS, tokens, tokens) for axis in layout.axes)
            for side, dialect in zip(made, (self.source, self.target)):
                page = f"L B {table()['pages'][self.format][dialect]}"
                side.append(Layout(page, axes, PAGE, format=self.format, dialect=dialect))
        return made

    def __str__(self) -> str:
        return f"{self.format} from dialect {self.source!r} to {self.target!r}"


def recode_of(source: Layout, target: Layout) -> Recode | None:
    """What must be done to rows of one dialect so that they are rows of the other; None where both encode alike.

    Raises LayoutError with rule 'dialect' where there is no codec for one of them, or it takes other pages than are known.
    """
    if source.dialect == target.dialect:
        return None
    from kvpagoda.layouts.dialects import DIALECTS

    known, pages = DIALECTS.get(target.format, {}), table()["pages"].get(target.format, {})
    for dialect in (source.dialect, target.dialect):
        if dialect not in known or dialect not in pages:
            raise LayoutError.of(
                "dialect",
                f"rows of {target.format!r} cannot go from dialect {source.dialect!r} to {target.dialect!r}: there is no "
                f"codec for {dialect!r}; there are {', '.join(sorted(known.keys() & pages)) or 'none'}",
            )
    if known[source.dialect].rule == known[target.dialect].rule:
        return None
    return Recode(target.format, source.dialect, target.dialect)
