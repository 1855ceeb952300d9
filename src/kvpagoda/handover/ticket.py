"""A ticket: all that a receiver must know to continue a request, as JSON; one for all ranks, signed with a shared key.

Whoever has the key may make tickets. **Without a key a ticket is trusted as it is**: let only the scheduler pass them on. A
ticket holds the tokens of the request, but not its namespace: the receiver says whose request it is.
"""

from __future__ import annotations

import hmac
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.errors import TicketRefused, shown
from kvpagoda.handover.checksums import KNOWN
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.lease import LEASE_NBYTES, MOST_LEASES, MOST_RANKS
from kvpagoda.units import items_of, real_number, truth, whole_number

VERSION = 4


@dataclass(frozen=True)
class RankLease:
    """Where the records of source rank ``rank`` of ``num_ranks`` are: lease ``lease`` (hex), in ``slot`` and at ``offset`` of
    the memory at ``address``, the ``generation``-th of its sender."""

    rank: int
    num_ranks: int
    lease: str
    generation: int
    slot: int
    offset: int
    nbytes: int
    address: Mapping[str, Any]

    @classmethod
    def from_json(cls, data: Any) -> RankLease:
        """Return what ``asdict`` made. Raises ValueError, TypeError or KeyError for anything else."""
        name, ranks = (
            bytes.fromhex(data["lease"]),
            whole_number(data["num_ranks"], "num_ranks", 1, below=MOST_RANKS + 1),
        )
        if len(name) != LEASE_NBYTES or not isinstance(data["address"], dict):
            raise ValueError(f"a lease has a name of {LEASE_NBYTES} bytes and an address, got {shown(data)}")
        return cls(
            whole_number(data["rank"], "a rank", below=ranks), ranks, name.hex(),
            whole_number(data["generation"], "a generation"), whole_number(data["slot"], "a slot", below=MOST_LEASES),
            whole_number(data["offset"], "an offset"), whole_number(data["nbytes"], "the bytes of a lease"), data["address"],
        )  # fmt: skip


@dataclass(frozen=True)
class Ticket:
    """A request that waits to be continued elsewhere. ``Sequence.hand_over`` makes the ticket of one rank.

    Args:
        content: see ``content_of``.
        weights: the digest of the weights, hex.
        tokens: int32, committed ones and the rest of the prompt.
        length: how many are committed, or will be when the leases are sealed.
        prompt_length: how many were given.
        media: offset -> digest, hex.
        groups: where fields lie in records.
        firsts: for each group the first column (block of the text) in the leases, and the number of columns.
        counts: as ``firsts``.
        publishes: whether others may find the text at the receiver.
        expires: seconds since 1970.
        checksum: the algorithm.
        by_layer: whether the leases are written layer by layer, after the ticket was made.
        ranks: the lease of one source rank, or of all, by rank.
        key: what ``to_json`` signs with; no part of the text.
    """

    content: str
    weights: str
    tokens: Ids
    length: int
    prompt_length: int
    media: Mapping[int, str]
    groups: tuple[GroupPlace, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    publishes: bool
    expires: float
    checksum: str
    by_layer: bool
    ranks: tuple[RankLease, ...]
    key: bytes = field(default=b"", repr=False)

    @classmethod
    def joined(cls, tickets: Many[Ticket]) -> Ticket:
        """Return one ticket for all source ranks from theirs. It expires with the first of them.

        Args:
            tickets: of each rank, in any order.

        Raises:
            TicketRefused: they are of several requests, or one of a rank is missing.
        """
        if not tickets or any(len(one.ranks) != 1 for one in tickets):
            raise TicketRefused(f"join the tickets of 1 to {MOST_RANKS} ranks, one each; got {len(tickets)}")
        first, *others = by_rank = sorted(tickets, key=lambda one: one.ranks[0].rank)
        ticket = replace(
            first, ranks=tuple(one.ranks[0] for one in by_rank), expires=min(one.expires for one in by_rank)
        )
        ticket.check_ranks()
        for one in others:
            if one._shared() != first._shared():
                text = f"rank {one.ranks[0].rank} handed over another request, or at another length, than rank 0"
                raise TicketRefused(text)
        return ticket

    def check_ranks(self) -> None:
        """Raise TicketRefused unless it has the leases of all source ranks, each once, in their order."""
        ranks, counts = [one.rank for one in self.ranks], {one.num_ranks for one in self.ranks}
        if counts != {len(ranks)} or ranks != [*range(len(ranks))]:
            raise TicketRefused.with_hint(
                f"the ticket has leases of ranks {shown(ranks)}, of {shown(sorted(counts))} ranks",
                "join one ticket of each rank of the sender with Ticket.joined; its cache has Identity(rank=.., num_ranks=..)",
                needed=[*range(max(counts, default=1))], available=ranks,
            )  # fmt: skip

    def _shared(self) -> list[Any]:
        """Return what the tickets of all ranks of a request have in common."""
        data = self._data()
        del data["ranks"], data["expires"]
        return [*data.values()]

    def _data(self) -> dict[str, Any]:
        return {
            "kvpagoda_ticket": VERSION,
            "content": self.content,
            "weights": self.weights,
            "tokens": b64encode(self.tokens.astype("<i4").tobytes()).decode(),
            "length": self.length,
            "prompt_length": self.prompt_length,
            "media": {str(offset): digest for offset, digest in self.media.items()},
            "groups": [group.to_json() for group in self.groups],
            "firsts": list(self.firsts),
            "counts": list(self.counts),
            "publishes": self.publishes,
            "expires": self.expires,
            "checksum": self.checksum,
            "by_layer": self.by_layer,
            "ranks": [asdict(one) for one in self.ranks],
        }

    def to_json(self) -> str:
        """Return the ticket as text, signed with its key (HMAC-SHA256) if it has one."""
        data = self._data()
        return json.dumps({**data, "signature": _signature(data, self.key)})

    @classmethod
    def from_json(cls, text: str | bytes, key: bytes = b"") -> Ticket:
        """Return the ticket in a text.

        Args:
            text: what ``to_json`` returned.
            key: the one that it was signed with; without one any signature is accepted.

        Raises:
            TicketRefused: no ticket, another version, or a signature of another key.
        """
        try:
            data = json.loads(text)
            signature = data.pop("signature")
            if whole_number(data["kvpagoda_ticket"], "the version of a ticket") != VERSION:
                raise TicketRefused(
                    f"a ticket of version {shown(data['kvpagoda_ticket'])}; this is version {VERSION}",
                    needed=data["kvpagoda_ticket"], available=VERSION,
                )  # fmt: skip
            if key and not hmac.compare_digest(_signature(data, key), str(signature)):
                raise TicketRefused(
                    "the ticket is not signed with the key of this side: it was changed or forged", needed="signature"
                )
            return replace(cls._read(data), key=key)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, TicketRefused):
                raise
            raise TicketRefused(
                f"this is no ticket: {type(error).__name__} {shown(str(error))}", needed=type(error).__name__
            ) from None

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Ticket:
        tokens = np.frombuffer(b64decode(data["tokens"], validate=True), "<i4").astype(np.int32)
        length = whole_number(data["length"], "the length of a ticket", 1, below=len(tokens) + 1)
        prompt = whole_number(data["prompt_length"], "the prompt of a ticket", below=len(tokens) + 1)
        media = {int(offset): bytes.fromhex(digest).hex() for offset, digest in data["media"].items()}
        groups = tuple(map(GroupPlace.from_json, items_of(data["groups"])))
        firsts, counts = (
            tuple(whole_number(one, f"one of the {name} of a ticket") for one in items_of(data[name]))
            for name in ("firsts", "counts")
        )
        leases = tuple(map(RankLease.from_json, items_of(data["ranks"])))
        ticket = cls(
            str(data["content"]), str(data["weights"]), tokens, length, prompt, media, groups, firsts, counts,
            truth(data["publishes"], "publishes"), real_number(data["expires"], "expires, in seconds since 1970,"),
            data["checksum"], truth(data["by_layer"], "by_layer"), leases,
        )  # fmt: skip
        if not 1 <= len(leases) <= MOST_RANKS or {len(firsts), len(counts)} != {len(groups)}:
            raise ValueError(f"{len(leases)} ranks, {len(firsts)} and {len(counts)} numbers for {len(groups)} groups")
        if max(length, prompt) != len(tokens) or ticket.checksum not in KNOWN:
            raise ValueError(f"{len(tokens)} tokens of a prompt of {prompt}, and a checksum {shown(ticket.checksum)}")
        return ticket


def _signature(data: Mapping[str, Any], key: bytes) -> str:
    """Return HMAC-SHA256 over ``data`` as JSON with sorted keys; "" without a key."""
    return hmac.new(key, json.dumps(data, sort_keys=True).encode(), "sha256").hexdigest() if key else ""
