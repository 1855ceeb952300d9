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

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import TicketRefused, shown
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.lease import MOST_RANKS

VERSION = 3


@dataclass(frozen=True)
class RankLease:
    """Where the records of one source rank are: lease ``lease`` (hex), in ``slot`` and at ``offset`` of the memory at
    ``address``, the ``generation``-th of its sender."""

    lease: str
    generation: int
    slot: int
    offset: int
    nbytes: int
    address: Mapping[str, Any]


@dataclass(frozen=True)
class Ticket:
    """A request that waits to be continued elsewhere. ``Sequence.hand_over`` makes the ticket of one rank.

    ``content``: see ``content_of``. ``weights``: the digest of the weights, hex. ``tokens``: int32, committed ones and the
    rest of the prompt. ``length``: how many are committed, or will be when the leases are sealed. ``prompt_length``: how many
    were given. ``media``: offset -> digest, hex. ``groups``: where fields lie in records. ``firsts``, ``counts``: for each
    group the first column (block of the text) in the leases, and the number of columns. ``publishes``: whether others may
    find the text at the receiver. ``expires``: seconds since 1970.
    ``checksum``: the algorithm. ``by_layer``: whether the leases are written layer by layer, after the ticket was made.
    ``ranks``: the leases, by source rank. ``key``: what ``to_json`` signs with; it is not part of the text.
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
        """Return one ticket for all source ranks from theirs, in the order of the ranks. It expires with the first of them.
        Raises TicketRefused unless all are of one request, and no more than ``MOST_RANKS``."""
        first = tickets[0] if tickets else None
        if first is None or len(tickets) > MOST_RANKS or any(len(one.ranks) != 1 for one in tickets):
            raise TicketRefused(f"join the tickets of 1 to {MOST_RANKS} ranks, one each; got {len(tickets)}")
        for rank, one in enumerate(tickets):
            if one._shared() != first._shared():
                raise TicketRefused(f"rank {rank} handed over another request, or at another length, than rank 0")
        leases = tuple(one.ranks[0] for one in tickets)
        return replace(first, ranks=leases, expires=min(one.expires for one in tickets))

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
        """Return the ticket in ``text``. Raises TicketRefused unless it is one, of this version, and signed with ``key``;
        without a key any signature is accepted."""
        try:
            data = json.loads(text)
            signature = data.pop("signature")
            if data["kvpagoda_ticket"] != VERSION:
                raise TicketRefused(
                    f"a ticket of version {shown(data['kvpagoda_ticket'])}; this is version {VERSION}",
                    needed=data["kvpagoda_ticket"], available=VERSION,
                )  # fmt: skip
            if key and not hmac.compare_digest(_signature(data, key), str(signature)):
                raise TicketRefused("the ticket is not signed with the key of this side: it was changed or forged")
            return replace(cls._read(data), key=key)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, TicketRefused):
                raise
            raise TicketRefused(f"this is no ticket: {type(error).__name__} {shown(str(error))}") from None

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Ticket:
        leases = tuple(
            RankLease(
                bytes.fromhex(one["lease"]).hex(), int(one["generation"]), int(one["slot"]), int(one["offset"]),
                int(one["nbytes"]), dict(one["address"]),
            )
            for one in data["ranks"]
        )  # fmt: skip
        tokens = np.frombuffer(b64decode(data["tokens"], validate=True), "<i4").astype(np.int32)
        media = {int(offset): bytes.fromhex(digest).hex() for offset, digest in data["media"].items()}
        ticket = cls(
            str(data["content"]), str(data["weights"]), tokens, int(data["length"]), int(data["prompt_length"]), media,
            tuple(map(GroupPlace.from_json, data["groups"])), tuple(map(int, data["firsts"])),
            tuple(map(int, data["counts"])), bool(data["publishes"]), float(data["expires"]), str(data["checksum"]),
            bool(data["by_layer"]), leases,
        )  # fmt: skip
        sizes = {len(ticket.groups), len(ticket.firsts), len(ticket.counts)}
        if not 1 <= len(leases) <= MOST_RANKS or len(sizes) > 1 or ticket.length < 1:
            raise ValueError(f"{len(leases)} ranks, {ticket.length} of {len(tokens)} tokens, groups {sizes}")
        if min((*ticket.firsts, *ticket.counts), default=0) < 0 or max(ticket.length, ticket.prompt_length) != len(
            tokens
        ):
            raise ValueError(f"{len(tokens)} tokens of a prompt of {ticket.prompt_length}, or columns below 0")
        return ticket


def _signature(data: Mapping[str, Any], key: bytes) -> str:
    """Return HMAC-SHA256 over ``data`` as JSON with sorted keys; "" without a key."""
    return hmac.new(key, json.dumps(data, sort_keys=True).encode(), "sha256").hexdigest() if key else ""
