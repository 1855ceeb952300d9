"""What must be done to the memory of a cache before a step, as data and as JSON, where a worker has that memory.

scheduler    batch.copies  ──►  to_json  ──►  from_json  ──►  Worker.apply    worker
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.errors import BadInput, shown, unknown_name
from kvpagoda.schema import Plan
from kvpagoda.units import ceil_div, table_rows, whole_number

VERSION = 1
_COPYING = ("block", "state", "move", "swap_out", "swap_in")
KINDS = (*_COPYING, "reset", "round", "clear", "poison", "wrote", "reads")
_NOWHERE = 0, 0


class Copy(NamedTuple):
    """One operation on the memory.

        kind      source              target              what is done
        block     blocks of group     blocks of into      copied: a request goes on in a partly filled block of its own
        move      blocks of group     blocks of into      copied: they give their sector to another group
        state     states of group     states of into      copied, and encoded as into keeps them if that is another group
        swap_out  blocks of group     rows of the swap    copied to host memory: a request was suspended
        swap_in   rows of the swap    blocks of group     copied back
        reset     -                   states of group     set to the initial values of their fields, mostly zeros
        round     -                   states of group     rounded to what a checkpoint in group into gives back
        clear     -                   sectors             set to zeros, or to NaN if the worker's cache poisons
        poison    -                   blocks of group     free now: set to NaN if the worker's cache poisons

    and of a scheduler that sanitizes, for a worker that does (others pass over them):

        wrote     codes               blocks of group     provenance of the rows that the step before wrote
        reads     digests             blocks of group     provenance of all rows of the blocks that the step reads

    Args:
        kind: one of the above.
        group: an index of ``plan.groups``.
        source: ids, int32 ``[n]``; codes of rows or digests of blocks: numbers of 31 bits, one for each.
        target: ids, int32 ``[n]``.
        rows: how many tokens' rows of a block or a move are used, from the first source on; whole blocks may be copied.
            Of ``wrote`` the row of the first block that was written first. 0 for other kinds.
        into: an index of ``plan.groups``: ``group`` but for states with checkpoints in another encoding.
    """

    kind: str
    group: int
    source: Ids
    target: Ids
    rows: int
    into: int


class Noted(NamedTuple):
    """The operations of ``scheduler`` since the batch before the ``number``-th one after ``resets`` resets; None: there were
    too many."""

    scheduler: str
    resets: int
    number: int
    operations: list[Copy] | None


@dataclass(frozen=True, eq=False)
class Copies:
    """The operations before one step, in the order in which they must be done. Made by ``batch.copies``.

    A worker applies the copies of all batches of one scheduler in the order of ``resets`` and ``number``, also if there
    are none.

    Args:
        plan: the schema and the sizes that scheduler and worker must share.
        scheduler: which one it is, by a random name; "": the cache has its memory itself.
        resets: how often it was reset.
        number: how many batches it has made since then, before this one.
        operations: in order.
    """

    plan: str
    scheduler: str
    resets: int
    number: int
    operations: tuple[Copy, ...]

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def to_json(self) -> str:
        """Return the copies as text."""
        operations = [
            [one.kind, one.group, one.source.tolist(), one.target.tolist(), one.rows, one.into] for one in self
        ]
        data = {"kvpagoda_copies": VERSION, "plan": self.plan, "scheduler": self.scheduler, "resets": self.resets}
        return json.dumps({**data, "number": self.number, "operations": operations}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Copies:
        """Return the copies in a text.

        Args:
            text: what ``to_json`` wrote.

        Raises:
            BadInput: it is something else, or of another version.
        """
        try:
            data = json.loads(text)
            version = whole_number(data["kvpagoda_copies"], "the version of copies")
            if version != VERSION:
                message = f"copies of version {version}, this is version {VERSION}"
                raise BadInput(message, needed=version, available=VERSION)
            plan, scheduler, operations = data["plan"], data["scheduler"], data["operations"]
            if not type(plan) is type(scheduler) is str or type(operations) is not list:
                got = ", ".join(map(shown, (plan, scheduler, operations)))
                raise BadInput(f"plan and scheduler are text, operations a list, got {got}")
            resets = whole_number(data["resets"], "resets")
            number = whole_number(data["number"], "the number of a batch")
            return cls(plan, scheduler, resets, number, tuple(map(_read, operations)))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"these are no copies: {type(error).__name__} {shown(str(error))}") from None

    def check(self, plan: Plan, swap_rows: int, row_nbytes: int) -> None:
        """Prove that every operation is one on the memory of a plan and of a swap.

        Args:
            plan: of the worker's cache.
            swap_rows: rows of its swap.
            row_nbytes: bytes of such a row.

        Raises:
            BadInput: an operation is not.
        """
        for one in self.operations:
            _check(one, plan, swap_rows, row_nbytes)


def word_columns(plan: Plan) -> list[int]:
    """Return how many words of provenance a block of each group has: of its rows, or of a state that it can go back to."""
    ahead = min((tokens for _, _, tokens in plan.rewinds), default=0)  # a state in one place is taken back by so many
    num_states = 1 if any(group.places > 1 for group in plan.groups) else 1 + ahead
    return [num_states if group.growth.is_state else plan.block_size for group in plan.groups]


def agreement_of(plan: Plan, fingerprint: str, swap_rows: int, row_nbytes: int) -> str:
    """Return what a scheduler and its worker must share, as text. ``fingerprint``: of what the memory keeps."""
    groups = ", ".join(f"{group.num_rows} of {group.name}" for group in plan.groups)
    sizes = f"blocks of {plan.block_size} tokens in pages of {plan.kernel_page}, {groups}, {plan.num_sectors} sectors"
    return f"{fingerprint}: {sizes} of {plan.sector_nbytes} bytes, {swap_rows} rows of {row_nbytes} bytes to swap"


def _read(operation: Any) -> Copy:
    kind, group, source, target, rows, into = operation
    if kind not in KINDS:
        raise unknown_name("kind of a copy", kind, KINDS)
    return Copy(
        str(kind), whole_number(group, "a group"), _ids(source), _ids(target), whole_number(rows, "rows of a copy"),
        whole_number(into, "a group"),
    )  # fmt: skip


def _ids(ids: Any) -> Ids:
    """Return a list of whole numbers as int32 ``[n]``. Raises BadInput."""
    if type(ids) is not list or not {*map(type, ids)} <= {int}:
        raise BadInput(f"ids are a list of whole numbers, got {shown(ids)}")
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise BadInput(f"ids are from 0 to 2^31 - 1, got {shown(min(ids))} to {shown(max(ids))}")
    return np.array(ids, np.int32)


def _check(one: Copy, plan: Plan, swap_rows: int, row_nbytes: int) -> None:
    """Prove that ``one`` is an operation on the memory of ``plan``; see ``Copies.check``. Raises BadInput."""
    many = len(plan.groups)
    if one.kind not in KINDS or not (0 <= one.group < many and 0 <= one.into < many):
        raise BadInput(f"a copy is one of {', '.join(KINDS)}, in groups 0 to {many - 1}; got {shown(one)}")
    group, into = plan.groups[one.group], plan.groups[one.into]
    if one.kind == "round":
        is_possible = group.growth.is_state and into.growth.is_at_rest and not group.growth.is_at_rest
    else:
        is_possible = group is into or (one.kind == "state" and group.growth.is_state and into.growth.is_state)
    if not is_possible:
        raise BadInput(f"there is no copy {one.kind!r} from {group.name} into {into.name}", needed=one.kind)
    blocks, host = (group.first_id, group.num_rows), (0, swap_rows)
    source, target = (blocks, (into.first_id, into.num_rows)) if one.kind in _COPYING else (_NOWHERE, blocks)
    num_sources = len(one.target) if one.kind in _COPYING else 0
    num_targets = len(one.target)
    if one.kind == "swap_out":
        target = host
        num_sources = len(one.source)
        num_targets = table_rows(num_sources, group.layout.nbytes, row_nbytes)
    elif one.kind == "swap_in":
        source = host
        num_sources = table_rows(num_targets, group.layout.nbytes, row_nbytes)
    elif one.kind == "clear":
        target = 1, plan.num_sectors
    elif one.kind in ("wrote", "reads"):
        source = 0, 1 << 31
        num_sources = len(one.source if one.kind == "wrote" else one.target)
        if one.kind == "wrote":
            num_targets = ceil_div(one.rows + num_sources, word_columns(plan)[one.group])
    counts, wanted = (len(one.source), len(one.target)), (num_sources, num_targets)
    if counts != wanted:
        raise BadInput(f"a copy {one.kind!r} from {group.name} has {wanted} sources and targets, got {counts}")
    for ids, (first, end) in ((one.source, source), (one.target, target)):
        if len(ids) and not first <= int(ids.min()) <= int(ids.max()) < end:
            text = f"ids of a copy {one.kind!r} are from {first} to {end - 1}, got {int(ids.min())} to {int(ids.max())}"
            raise BadInput(text, needed=int(ids.max()), available=end - 1, group=group.name)
